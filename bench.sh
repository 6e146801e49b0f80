#!/usr/bin/env bash
# Finds a Python that has torch for bench.py, which does everything else: ./bench.sh --help
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON-$here/.venv/bin/python}
[[ -n ${PYTHON-} || -x $python ]] || python=python3
export PYTHONSAFEPATH=1 PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" # or a model.py of the current folder is imported
"$python" -c 'import sys; from importlib.util import find_spec; sys.exit(not find_spec("torch"))' 2> /dev/null ||
    { echo "bench.sh: $python cannot import torch: run make .venv/requirements.txt first, or set PYTHON" >&2 && exit 2; }
exec "$python" "$here/bench.py" "$@"
