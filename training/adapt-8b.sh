#!/usr/bin/env bash
# An 8B into a ladder of its last 16 layers, on eight GPUs of 80 GB: softly, distilled, then a little chat.
#
# NOT RUN YET: nobody has had the machine. What it should cost, by arithmetic: training takes 8 N FLOPs a token with
# --recompute (forward, again, twice that backward), a teacher 2 N; 0.5G tokens of an 8B are 4e19 FLOPs. Eight H100s at
# 40 % of their 989 TFLOP/s need 3.5 hours for that, 28 GPU hours. Memory: docs/retraining.md (35 GB a GPU). Disk: 9 bytes
# a token, and two states of 12 bytes a parameter while one is written, 193 GB.
#
#   training/adapt-8b.sh CHECKPOINT TEXT VALID CHAT CHAT_VALID OUT
#
# CHECKPOINT: of convert_hf_checkpoint.py. TEXT: what resembles its pretraining, 0.5G tokens; CHAT: .jsonl of messages.
# Each stage goes on where it was killed.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# = 6 ] || { sed -n 2,15p training/adapt-8b.sh >&2; exit 2; }
checkpoint=$1 text=$2 valid=$3 chat=$4 chat_valid=$5 out=$6

stage() {  # NAME FLAGS...: unless its folder is there already
    [ -e "$1" ] || torchrun --standalone --nproc_per_node=8 adapt.py --out "$@"
}

# 64 windows of 4,096 tokens: 262,144 tokens a step
common=(--seq-len 4096 --batch 64 --micro-batch 1 --recompute --valid-tokens 500000 --save-every 100)
stage "$out-blended" --checkpoint "$checkpoint" --ladder-layers 16 --distill --blend-steps 286 --steps 286 --lr 5e-5 \
    --text "$text" --valid "$valid" "${common[@]}"                                            # 75M tokens
stage "$out-distilled" --checkpoint "$out-blended" --distill "$checkpoint" --steps 1526 --lr 5e-5 --seed 1 \
    --text "$text" --valid "$valid" "${common[@]}"                                            # 400M tokens
stage "$out" --checkpoint "$out-distilled" --steps 100 --warmup 20 --lr 5e-6 \
    --text "$chat" --valid "$chat_valid" "${common[@]}"                                       # 26M tokens
