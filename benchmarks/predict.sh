#!/usr/bin/env bash
# One rank alone, at two and at eight layers of each named size, for predict.py. Takes about an hour on two cores.
#
#   benchmarks/predict.sh predict-layers.jsonl
set -euo pipefail
refuse() {
    echo "predict.sh: $1" >&2
    exit 2
}
[[ $# == 1 ]] || refuse "give the file for the results"
out=$(realpath -m -- "$1")
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[[ -x $(command -v "$python") ]] || refuse "no $python: run make .venv/installed first, or set PYTHON"
for case in "1b 4" "3b 4" "8b 4" "34b 4" "70b 4" "176b 4" "405b 4" "70b 1" "70b 16" "70b 64"; do
    read -r model batch <<< "$case"
    ranks=8 links=nvlink,pcie,ethernet-10g,ethernet-1g
    [[ $model != 405b ]] || ranks=16 links=nvlink,pcie,ib,ethernet-10g,ethernet-1g
    for n in 2 8; do
        "$python" -m benchmarks.overlap --model "$model" --n-layers $n --simulate-tp $ranks --batch "$batch" \
            --prompt-length 1024 --wirings standard,ladder,parallel,upper-bound --links $links \
            --rounds 15 --seconds 40 --json "$out"
    done
done
