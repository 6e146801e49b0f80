#!/usr/bin/env bash
# The sweep: quantizations x ranks x batch sizes x links x wirings, each generating, all of them in turns; then its tables
# and figures.
#
#   ./bench.sh                                                      what this machine can do
#   MODEL=3b BATCHES="1 8" LINKS="real ethernet-10g" ./bench.sh     some of it, and an emulated link
#   SIMULATE=1 MODEL=70b TPS=8 LINKS="nvlink pcie" ./bench.sh       one rank alone predicts eight
#   DRY_RUN=1 ./bench.sh                                            only print the commands
#
# Everything is set by the environment variables that are printed first. This script lists the commands; sweep.py runs
# them and goes on where it was interrupted when started again with the same settings; plot.py draws.
set -euo pipefail
here=$(dirname "$0")

refuse() {
    echo "bench.sh: $1" >&2
    exit 2
}
number() { # name: a whole number above 0
    [[ ${!1} =~ ^[1-9][0-9]{0,8}$ ]] || refuse "$1 is '${!1}' but must be one whole number from 1 on"
}
numbers() { # name: one or more of them
    [[ ${!1} =~ ^\ *[1-9][0-9]{0,8}(\ +[1-9][0-9]{0,8})*\ *$ ]] || refuse "$1 is '${!1}' but must be whole numbers from 1 on"
}
one_of() { # name, what it may be
    [[ -n ${!1} && ${!1} != *" "* && " $2 " == *" ${!1} "* ]] || refuse "$1 is '${!1}' but must be one of: $2"
}
some_of() { # name, words, what they may be
    [[ -n ${2// /} ]] || refuse "$1 is empty; known: $3"
    local word
    for word in $2; do
        [[ " $3 " == *" $word "* ]] || refuse "$1 names $word; known: $3"
    done
}

# ---------------------------------------------------------------------------------------------------------------------
# The settings

venv=$here/.venv/bin/python
[[ -x $venv ]] || venv=python3
: "${PYTHON=$venv}"
facts='import os, torch, link, model
print(torch.cuda.device_count(), len(os.sched_getaffinity(0)), *model.SIZES)
print(*model.WIRINGS)
print("real", "no-p2p", *link.LINKS)'
facts=$(PYTHONPATH=$here "$PYTHON" -c "$facts" 2> /dev/null) ||
    refuse "$PYTHON cannot import torch: run make .venv/installed first, or set PYTHON"
{ read -r gpus cores models && read -r wirings && read -r links; } <<< "$facts"

: "${DEVICE=$([[ $gpus == 0 ]] && echo cpu || echo cuda)}"
: "${NNODES=1}" "${NODE_RANK=0}" "${MASTER_ADDR=}" "${MASTER_PORT=29500}" # several nodes: see README.md
one_of DEVICE "cpu cuda"
number NNODES
if [[ $DEVICE == cpu ]]; then
    most=$cores model=1b prompt=64 new=32
else
    ((gpus > 0)) || refuse "DEVICE is cuda, but there is no GPU"
    most=$gpus model=8b prompt=1024 new=512
fi
some=""
for tp in 1 2 4 8; do
    ((tp > most)) || some+="$((tp * NNODES)) "
done

[[ -z ${CHECKPOINT-} || -z ${MODEL-} ]] || refuse "give either CHECKPOINT or MODEL"
: "${CHECKPOINT=}" "${MODEL=$model}" "${N_LAYERS=}" "${QUANT=none}"                   # a CHECKPOINT stands for the others
: "${WIRINGS=standard ladder parallel upper-bound}" "${BATCHES=1 4 16 64}"
: "${TPS=${some% }}" "${SIMULATE=0}"                                                  # numbers of ranks, of all nodes
: "${LINKS=real$([[ $DEVICE == cuda && $most -gt 1 ]] && echo " no-p2p")}"            # real, no-p2p, or emulated ones
: "${PROMPT=$prompt}" "${NEW_TOKENS=$new}" "${REPEATS=3}" "${EXPOSED=1}" "${FLAGS=}"  # FLAGS: more ones of generate.py
: "${OUT=bench.jsonl}" "${FIGURES=${OUT%.jsonl}-figures}" "${DRY_RUN=0}"
{
    for name in PYTHON DEVICE CHECKPOINT MODEL N_LAYERS QUANT WIRINGS BATCHES TPS SIMULATE LINKS PROMPT NEW_TOKENS \
        REPEATS EXPOSED FLAGS OUT FIGURES DRY_RUN NNODES NODE_RANK MASTER_ADDR MASTER_PORT; do
        printf '%s="%s" ' "$name" "${!name}"
    done
    echo
} | fold -s -w 120 >&2

for name in SIMULATE EXPOSED DRY_RUN; do
    one_of "$name" "0 1"
done
for name in PROMPT NEW_TOKENS REPEATS MASTER_PORT ${N_LAYERS:+N_LAYERS}; do
    number "$name"
done
numbers BATCHES
numbers TPS
((NEW_TOKENS > 1)) || refuse "NEW_TOKENS is 1 but must be at least 2: the first one comes from the prefill"
some_of QUANT "$QUANT" "none int8 int4"
some_of LINKS "$LINKS" "$links"
some_of WIRINGS "$(sed -E 's/(hybrid|desync):[0-9]+/\1/g' <<< "$WIRINGS")" "$wirings"
[[ ! " $WIRINGS " =~ \ (hybrid|desync)\  ]] || refuse "WIRINGS names ${BASH_REMATCH[1]} without a number: hybrid:8, desync:4"
if [[ -n $CHECKPOINT ]]; then
    [[ -d $CHECKPOINT ]] || refuse "CHECKPOINT $CHECKPOINT is no folder"
    [[ $QUANT$N_LAYERS == none ]] || refuse "QUANT and N_LAYERS are for MODEL: a checkpoint is as it is"
else
    one_of MODEL "$models"
fi
if [[ $SIMULATE == 1 ]]; then
    ((NNODES == 1)) || refuse "SIMULATE is one rank alone, but NNODES is $NNODES"
    [[ ! " $LINKS " =~ \ (real|no-p2p)\  ]] || refuse "SIMULATE needs LINKS to emulate: ${links#real no-p2p }"
    [[ ! " $TPS " =~ \ 1\  ]] || refuse "SIMULATE needs TPS from 2 on"
fi
[[ $DEVICE == cuda || " $LINKS " != *" no-p2p "* ]] || refuse "LINKS names no-p2p, which is for GPUs"
for tp in $TPS; do
    ((tp % NNODES == 0)) || refuse "TPS names $tp, which is no multiple of NNODES $NNODES"
    [[ $SIMULATE == 1 || $DEVICE == cpu || $DRY_RUN == 1 ]] || ((tp <= gpus * NNODES)) ||
        refuse "TPS names $tp, but there are $gpus GPUs on each node"
done
if ((NNODES > 1)); then
    [[ $NODE_RANK =~ ^[0-9]+$ ]] && ((NODE_RANK < NNODES)) || refuse "NODE_RANK is '$NODE_RANK' but must be 0 to $((NNODES - 1))"
    [[ -n $MASTER_ADDR ]] || refuse "NNODES is $NNODES, so MASTER_ADDR must be the address of node 0"
fi
unset NCCL_P2P_DISABLE # or the real link would be another

# ---------------------------------------------------------------------------------------------------------------------
# The commands, a line each, behind the number of their repeat

plan() { # repeat, script, its flags; by tp, local_ranks (processes on a node), link
    local words=()
    [[ $DEVICE == cuda ]] || words+=("OMP_NUM_THREADS=$((cores > local_ranks ? cores / local_ranks : 1))")
    [[ $link != no-p2p ]] || words+=(NCCL_P2P_DISABLE=1)
    words+=("$PYTHON")
    ((local_ranks * NNODES == 1)) || words+=(-m torch.distributed.run "--nproc_per_node=$local_ranks")
    if ((NNODES > 1)); then
        words+=("--nnodes=$NNODES" "--master_addr=$MASTER_ADDR")
    elif ((local_ranks > 1)); then
        words+=(--standalone)
    fi
    words+=("$here/$2" --device "$DEVICE" "${@:3}")
    local line
    printf -v line '%q ' "${words[@]}"
    # filled in when it is run: the command itself is the same on all nodes
    ((NNODES == 1)) || line=${line/--nnodes/--node_rank=\$NODE_RANK --master_port=\$MASTER_PORT --nnodes}
    printf '%s\t%s\n' "$1" "${line% }"
}

plan_generate() { # repeat, more flags; by quant, tp, local_ranks, batch, link, wiring
    local flags=(--model "$MODEL" --random-weights)
    [[ -z $N_LAYERS ]] || flags+=(--n-layers "$N_LAYERS")
    [[ $quant == none ]] || flags+=(--quant "$quant")
    [[ -z $CHECKPOINT ]] || flags=(--checkpoint "$CHECKPOINT")
    flags+=(--wiring "${wiring%:*}" --batch "$batch" --prompt-length "$PROMPT" --max-new-tokens "$NEW_TOKENS")
    flags+=(--ignore-eos --temperature 0 --compile)
    case $wiring in
        hybrid:*) flags+=(--ladder-layers "${wiring#*:}") ;;
        desync:*) flags+=(--desync-period "${wiring#*:}") ;;
    esac
    [[ $link == real || $link == no-p2p ]] || flags+=(--link "$link")
    [[ $SIMULATE == 0 ]] || flags+=(--simulate-tp "$tp")
    plan "$1" generate.py "${flags[@]}" $FLAGS "${@:2}"
}

each() { # a function and its first arguments: for each number of ranks and each link. One rank has no link
    for tp in $TPS; do
        local_ranks=$((SIMULATE ? 1 : tp / NNODES))
        for link in $([[ $tp == 1 ]] && echo real || echo "$LINKS"); do
            "$@"
        done
    done
}

probe() { # the machine's own links; the rest of a sweep may be emulated
    [[ $link == real || $link == no-p2p ]] && plan 0 probe.py
    return 0
}

configurations() { # repeat, more flags. On one rank all wirings cost about the same
    for batch in $BATCHES; do
        for wiring in $([[ $tp == 1 ]] && echo standard || echo "$WIRINGS"); do
            [[ ${2-} == --exposed && ($tp == 1 || $wiring == upper-bound) ]] || plan_generate "$@"
        done
    done
}

list() {
    [[ " $LINKS " == *" real "* ]] || link=real tp=1 local_ranks=1 plan 0 probe.py
    each probe
    for ((repeat = 1; repeat <= REPEATS; repeat++)); do
        for quant in $QUANT; do
            each configurations "$repeat"
        done
    done
    for quant in $([[ $EXPOSED == 0 ]] || echo "$QUANT"); do
        each configurations 0 --exposed # apart: it slows a step, if little
    done
}

export NNODES NODE_RANK MASTER_PORT
flags=(--out "$OUT" --figures "$FIGURES")
[[ $DRY_RUN == 0 ]] || flags=(--dry-run)
exec "$PYTHON" "$here/sweep.py" "${flags[@]}" < <(list)
