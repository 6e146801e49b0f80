#!/usr/bin/env bash
# Finds a python for extras/measure/sweep.py, which does everything else: --help lists the settings.
set -euo pipefail
here=$(dirname "$0")
for word in "$@"; do
    [[ $word == PYTHON=* ]] && PYTHON=${word#*=}
done
venv=$here/.venv/bin/python
[[ -x $venv ]] || venv=python3
export PYTHONSAFEPATH=1 # or a model.py where it is started would be taken for ours
export PYTHON=${PYTHON-$venv} PYTHONPATH="$(cd "$here" && pwd)${PYTHONPATH:+:$PYTHONPATH}"
"$PYTHON" -c 'import sys; from importlib.util import find_spec; sys.exit(not find_spec("torch"))' 2> /dev/null ||
    { echo "bench.sh: $PYTHON cannot import torch: run make .venv/installed first, or set PYTHON" >&2 && exit 2; }
BENCH_ROOT=$here exec "$PYTHON" -m extras.measure.sweep "$@"
