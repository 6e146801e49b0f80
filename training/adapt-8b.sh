#!/usr/bin/env bash
# An 8B into a ladder of its last 16 layers, on eight GPUs of 80 GB: softly, distilled, then a little chat.
#
# NOT RUN YET: nobody has had the machine. What it should cost, by arithmetic: training takes 8 N FLOPs a token with
# --recompute (forward, again, twice that backward), a teacher 2 N; 0.5G tokens of an 8B are 4e19 FLOPs. Eight H100s at
# 40 % of their 989 TFLOP/s need 3.5 hours for that, 28 GPU hours. Memory: docs/retraining.md (35 GB a GPU). Disk: 9 bytes
# a token; 12 bytes a parameter for a state, two while one is written, 193 GB; 16 GB for each of up to three sets of best
# weights and for each of the three results. Not in the hours: attention's own FLOPs, and tokenizing on one core first.
#
#   training/adapt-8b.sh CHECKPOINT TEXT VALID CHAT CHAT_VALID OUT
#
# CHECKPOINT: of convert_hf_checkpoint.py. TEXT: what resembles its pretraining, 0.5G tokens; CHAT: .jsonl of messages.
# Each stage goes on where it was killed.
set -euo pipefail
[ $# = 6 ] || { sed -n 2,13p "$0" >&2; exit 2; }
checkpoint=$(realpath "$1") text=$(realpath "$2") valid=$(realpath "$3") chat=$(realpath "$4")
chat_valid=$(realpath "$5") out=$(realpath "$6")
cd "$(dirname "$0")/.."
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600  # seconds that torchrun gives a run that was asked to stop, for its state

stage() {  # NAME FLAGS...: unless its folder is there already
    [ -e "$1" ] || torchrun --standalone --nproc_per_node=8 adapt.py --out "$@"
}

# 64 windows of 4,096 tokens: 262,144 tokens a step
common=(--seq-len 4096 --batch 64 --micro-batch 1 --recompute --valid-tokens 500000 --save-every 100)
stage "$out-blended" --checkpoint "$checkpoint" --ladder-layers 16 --distill --blend-steps 286 --steps 286 --warmup 29 --lr 5e-5 \
    --text "$text" --valid "$valid" "${common[@]}"                                            # 75M tokens
stage "$out-distilled" --checkpoint "$out-blended" --distill "$checkpoint" --steps 1526 --lr 5e-5 --seed 1 \
    --text "$text" --valid "$valid" "${common[@]}"                                            # 400M tokens
stage "$out" --checkpoint "$out-distilled" --steps 100 --warmup 20 --lr 5e-6 \
    --text "$chat" --valid "$chat_valid" "${common[@]}"                                       # 26M tokens
