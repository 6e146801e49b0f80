#!/usr/bin/env bash
# The sweep: wirings x batch sizes x ranks x links, each generating with random weights, in turns; then its tables and
# figures (plot.py).
#
#   ./bench.sh                                                  what this machine can do
#   MODEL=3b BATCHES="1 8" LINKS="real ethernet-10g" ./bench.sh  some of it, and an emulated link
#   SIMULATE=1 MODEL=70b TPS=8 LINKS="nvlink pcie" ./bench.sh    one rank alone predicts eight
#   DRY_RUN=1 ./bench.sh                                        only print the commands
#
# Everything is set by the environment variables that are printed first. Results are lines of $OUT: started again with the
# same settings, a sweep goes on where it was interrupted. A new sweep takes another OUT.
set -euo pipefail
here=$(dirname "$0")

refuse() {
    echo "bench.sh: $1" >&2
    exit 2
}

# ---------------------------------------------------------------------------------------------------------------------
# What to measure

venv=$here/.venv/bin/python
[[ -x $venv ]] || venv=python3
: "${PYTHON=$venv}"
facts='import torch, link, model
print(torch.cuda.device_count(), *model.SIZES)
print(*model.WIRINGS)
print("real", "no-p2p", *link.LINKS)'
{ read -r gpus models && read -r wirings && read -r links; } < <(PYTHONPATH=$here "$PYTHON" -c "$facts") ||
    refuse "$PYTHON cannot import torch: run make .venv/installed first, or set PYTHON"
cores=$(env -u OMP_NUM_THREADS nproc)

: "${DEVICE=$([[ $gpus == 0 ]] && echo cpu || echo cuda)}"
if [[ $DEVICE == cpu ]]; then
    most=$cores model=1b prompt=64 new=32
else
    most=$gpus model=8b prompt=1024 new=512
fi
: "${NNODES=1}" "${NODE_RANK=0}" "${MASTER_ADDR=127.0.0.1}" "${MASTER_PORT=29500}" # several nodes: see README.md
here_too=""
for tp in 1 2 4 8 16; do
    ((tp % NNODES == 0 && tp >= NNODES && tp <= most * NNODES && tp <= 8 * NNODES)) && here_too+="$tp "
done
: "${CHECKPOINT=}" "${MODEL=$model}" "${N_LAYERS=}" "${QUANT=none}"                    # or a checkpoint instead of a MODEL
: "${WIRINGS=standard ladder parallel upper-bound}" "${BATCHES=1 4 16 64}"
: "${TPS=${here_too% }}" "${SIMULATE=}"                                               # numbers of ranks
: "${LINKS=real$([[ $DEVICE == cuda && $gpus -gt 1 ]] && echo " no-p2p")}"            # real, no-p2p, or emulated ones
: "${PROMPT=$prompt}" "${NEW_TOKENS=$new}" "${REPEATS=3}" "${EXPOSED=1}" "${FLAGS=}"  # FLAGS: more ones of generate.py
: "${OUT=bench.jsonl}" "${FIGURES=${OUT%.jsonl}}" "${DRY_RUN=}"

settings="PYTHON DEVICE CHECKPOINT MODEL N_LAYERS QUANT WIRINGS BATCHES TPS SIMULATE LINKS PROMPT NEW_TOKENS REPEATS
    EXPOSED FLAGS OUT FIGURES DRY_RUN NNODES NODE_RANK MASTER_ADDR MASTER_PORT"
for name in $settings; do
    printf '%s=%q ' "$name" "${!name}" >&2
done
echo >&2

numbers() { # name, value: at least one whole number above 0
    [[ $2 =~ ^\ *[1-9][0-9]*(\ +[1-9][0-9]*)*\ *$ ]] || refuse "$1 is '$2' but must be whole numbers from 1 on"
}
known() { # name, value, what it may be
    local word
    for word in $2; do
        [[ " $3 " == *" $word "* ]] || refuse "$1 names $word; known: $3"
    done
}
for name in BATCHES TPS PROMPT NEW_TOKENS REPEATS NNODES MASTER_PORT; do
    numbers $name "${!name}"
done
for name in PROMPT NEW_TOKENS REPEATS NNODES MASTER_PORT; do
    [[ ${!name} =~ ^[0-9]+$ ]] || refuse "$name is '${!name}' but must be one number"
done
[[ $NODE_RANK =~ ^[0-9]+$ ]] && ((NODE_RANK < NNODES)) || refuse "NODE_RANK is $NODE_RANK but must be 0 to $((NNODES - 1))"
[[ -z $N_LAYERS ]] || numbers N_LAYERS "$N_LAYERS"
((NEW_TOKENS > 1)) || refuse "NEW_TOKENS is 1 but must be at least 2: the first one comes from the prefill"
known DEVICE "$DEVICE" "cpu cuda"
known QUANT "$QUANT" "none int8 int4"
known LINKS "$LINKS" "$links"
known WIRINGS "$(sed -E 's/(hybrid|desync):[0-9]+/\1/g' <<< "$WIRINGS")" "$wirings"
[[ " $WIRINGS " != *" hybrid "* ]] || refuse "WIRINGS names hybrid without its ladder layers: hybrid:8 has the last 8"
[[ -n $CHECKPOINT ]] || known MODEL "$MODEL" "$models"
[[ -z $CHECKPOINT || $QUANT$N_LAYERS == none ]] || refuse "QUANT and N_LAYERS are for MODEL: a checkpoint is as it is"
for tp in $TPS; do
    ((tp % NNODES == 0)) || refuse "TPS names $tp, which is no multiple of NNODES $NNODES"
    [[ -n $SIMULATE || $DEVICE == cpu ]] || ((tp <= gpus * NNODES)) || refuse "TPS names $tp, but there are $gpus GPUs"
    [[ -z $SIMULATE ]] || ((tp > 1 && NNODES == 1)) || refuse "SIMULATE needs TPS from 2 on, and one node"
done
[[ -z $SIMULATE || " $LINKS " != *\ real\ * && " $LINKS " != *\ no-p2p\ * ]] ||
    refuse "SIMULATE needs LINKS to emulate, such as nvlink pcie; known: ${links#real no-p2p }"
for file in "$OUT" "$OUT.log"; do
    [[ -n $DRY_RUN ]] || { : 2> /dev/null >> "$file"; } 2> /dev/null || refuse "OUT: cannot write $file"
done

# ---------------------------------------------------------------------------------------------------------------------
# The commands, each with its repeat and what its result would say of itself if it had any

commands=() repeats=() abouts=()

plan() { # repeat, JSON fields, script, flags: by tp and link, and threads on a CPU
    local prefix=() launch=("$PYTHON") local_ranks=$((tp / NNODES))
    [[ -z $SIMULATE ]] || local_ranks=1
    [[ $DEVICE != cpu ]] || prefix+=("OMP_NUM_THREADS=$((cores > local_ranks ? cores / local_ranks : 1))")
    [[ $link != no-p2p ]] || prefix+=(NCCL_P2P_DISABLE=1)
    if ((NNODES > 1)); then # a port of its own, so that nodes which are not at the same command do not meet
        launch+=(-m torch.distributed.run "--nnodes=$NNODES" "--nproc_per_node=$local_ranks" --node_rank=NODE_RANK
            "--master_addr=$MASTER_ADDR" "--master_port=$((MASTER_PORT + ${#commands[@]}))")
    elif ((local_ranks > 1)); then
        launch+=(-m torch.distributed.run --standalone "--nproc_per_node=$tp")
    fi
    local words
    printf -v words '%q ' "${prefix[@]}" "${launch[@]}" "$here/$3" --device "$DEVICE" "${@:4}"
    repeats+=("$1") abouts+=("$2") commands+=("${words% }")
}

plan_generate() { # repeat, more flags; by quant, tp, batch, link, wiring
    local flags=(--model "$MODEL" --random-weights) model=$MODEL name=null
    [[ -z $N_LAYERS ]] || flags+=(--n-layers "$N_LAYERS")
    [[ $quant == none ]] || flags+=(--quant "$quant")
    [[ -z $CHECKPOINT ]] || flags=(--checkpoint "$CHECKPOINT") model=$(basename "$CHECKPOINT")
    flags+=(--wiring "${wiring%:*}" --batch "$batch" --prompt-length "$PROMPT" --max-new-tokens "$NEW_TOKENS"
        --ignore-eos --temperature 0 --compile)
    case $wiring in
        hybrid:*) flags+=(--ladder-layers "${wiring#*:}") ;;
        desync:*) flags+=(--desync-period "${wiring#*:}") ;;
    esac
    [[ $link == real || $link == no-p2p ]] || { flags+=(--link "$link") name="{\"name\": \"$link\"}"; }
    [[ -z $SIMULATE ]] || flags+=(--simulate-tp "$tp")
    local quant_json=\"$quant\"
    [[ $quant != none ]] || quant_json=null
    plan "$1" "\"model\": \"$model\", \"quant\": $quant_json, \"wiring\": \"$wiring\", \"tp\": $tp, \"batch\": $batch,
        \"link\": $name, \"prompt_tokens\": $PROMPT" generate.py "${flags[@]}" $FLAGS "${@:2}"
}

sweep() { # repeat, more flags: every configuration once. One rank has no link, and all wirings cost it about the same.
    for quant in $QUANT; do
        for tp in $TPS; do
            for batch in $BATCHES; do
                for link in $([[ $tp == 1 ]] && echo real || echo "$LINKS"); do
                    for wiring in $([[ $tp == 1 ]] && echo standard || echo "$WIRINGS"); do
                        [[ ${2-} == --exposed && ($tp == 1 || $wiring == upper-bound) ]] || plan_generate "$@"
                    done
                done
            done
        done
    done
}

for tp in $TPS; do
    for link in $LINKS; do
        [[ $link != real && ($link != no-p2p || $tp == 1) || -n $SIMULATE ]] || plan 0 "" probe.py
    done
done
for ((repeat = 1; repeat <= REPEATS; repeat++)); do
    sweep $repeat
done
[[ $EXPOSED != 1 ]] || sweep 0 --exposed # apart: it slows a step, if little

if [[ -n $DRY_RUN ]]; then
    for i in "${!commands[@]}"; do
        for ((node = 0; node < NNODES; node++)); do
            ((NNODES == 1)) || echo "# repeat ${repeats[i]}, node $node:"
            echo "${commands[i]//NODE_RANK/$node}"
        done
    done
    exit
fi

# ---------------------------------------------------------------------------------------------------------------------
# Run them

part=$(mktemp) log=$(mktemp)
trap 'rm -f "$part" "$log"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

lines() { # to ask for a command's line in OUT (by repeat), or to write one there: repeat, command, fields, file or ""
    "$PYTHON" - "$OUT" "$@" << 'PY'
import json, sys
from pathlib import Path

out, repeat, command, about, result = sys.argv[1:]
key = {"command": command, "repeat": int(repeat)}
if result:
    line = json.loads(about)
    if Path(result).stat().st_size:
        line |= json.loads(Path(result).read_text())
    line = {k: v for k, v in line.items() if k not in ("tokens", "texts")}
    with open(out, "a") as f:
        f.write(json.dumps(key | line) + "\n")
else:
    found = [json.loads(line) for line in Path(out).read_text().splitlines()]
    found = [line for line in found if line.get("command") == command]
    sys.exit(not any(line["repeat"] == key["repeat"] or "error" in line for line in found))
PY
}

declare -A failed=()
todo=${#commands[@]} ran=0 start=$SECONDS
for i in "${!commands[@]}"; do
    command=${commands[i]//NODE_RANK/$NODE_RANK} repeat=${repeats[i]}
    [[ -z ${failed[$command]-} ]] || continue
    if lines "$repeat" "$command" "" ""; then
        continue
    fi
    left="" && ((ran == 0)) || left=", about $(((SECONDS - start) * (todo - i) / ran / 60 + 1)) min left"
    echo "[$((i + 1))/$todo$left] $command" >&2
    ran=$((ran + 1))
    : > "$part"
    code=0
    bash -c "$command --json $(printf %q "$part")" > "$log" 2>&1 < /dev/null || code=$?
    if ((code == 0)); then # of several nodes the first one has the result, the others note that they were there
        lines "$repeat" "$command" "{}" "$part"
        grep -m 1 "per token" "$log" >&2 || true
    elif ((code == 130)); then
        exit 130
    else
        { echo "\$ $command" && cat "$log"; } >> "$OUT.log"
        if ((code == 137)) || grep -qiE "out ?of ?memory|can('t|not) allocate memory|SIGKILL" "$log"; then
            lines "$repeat" "$command" "{\"error\": \"out of memory\", ${abouts[i]}}" "$part"
            echo "out of memory" >&2
        else # to be tried again by the next sweep
            failed[$command]=1
            reason=$(grep -m 1 -E '^[a-z_]+\.py: |Error: ' "$log" || tail -n 1 "$log")
            echo "failed: $reason (more in $OUT.log)" >&2
        fi
    fi
done

[[ -s $OUT.log ]] || rm -f "$OUT.log"
if ((NODE_RANK == 0)); then
    "$PYTHON" "$here/plot.py" "$OUT" --out "$FIGURES"
fi
((${#failed[@]} == 0)) || { echo "bench.sh: ${#failed[@]} of the commands failed" >&2; exit 1; }
