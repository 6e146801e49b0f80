#!/usr/bin/env bash
# Everything that bench.sh does is in measure/sweep.py. This finds a python for it, and helps without one.
set -euo pipefail
here=$(dirname "$0")

help() {
    cat << 'END'
./bench.sh [NAME=VALUE ...]

The sweep: quantizations x ranks x batch sizes x links x wirings x drafts, each generating, all of them in turns; then
its tables and figures. Started again with the same settings it goes on where it was interrupted.

  ./bench.sh                                                      what this machine can do
  ./bench.sh MODEL=3b BATCHES="1 8" LINKS="real ethernet-10g"     some of it, and an emulated link
  SIMULATE=1 MODEL=70b TPS=8 LINKS="nvlink pcie" ./bench.sh       one rank alone predicts eight
  DRY_RUN=1 ./bench.sh                                            only print the commands

A draft needs CHECKPOINT and a PROMPT of text: what it guesses of random weights or tokens means nothing.

Settings, of the environment or behind the name of the script. Defaults of a CPU | of GPUs:
  MODEL        1b | 8b           a named size, with random weights               MODEL=3b
  N_LAYERS     all of them       take only so many layers of MODEL               N_LAYERS=4
  QUANT        none              of MODEL: none, int8, int4, or several          QUANT="none int4"
  CHECKPOINT   none              a folder of weights, in place of those three    CHECKPOINT=demo
  WIRINGS      standard ladder parallel upper-bound; N: of the last N layers     WIRINGS="standard spd ladder:8 desync:4"
  SPECULATE    none              none or DRAFT@K, of generate.py's --draft       SPECULATE="none ngram@4 wiring:spd@auto"
  BATCHES      1 4 16 64         batch sizes                                     BATCHES="1 8"
  TPS          1 2 4 8           ranks, of all nodes; as many as the machine has TPS="1 2"
  LINKS        real | real no-p2p   real ones, or names of measure/link.py       LINKS="real ethernet-10g"
  SIMULATE     0                 1: one rank alone predicts TPS over LINKS       SIMULATE=1
  PROMPT       64 | 1024         random tokens of each, or a file, one on a line PROMPT=prompts.txt
  NEW_TOKENS   32 | 512          tokens to generate, 2 or more                   NEW_TOKENS=64
  REPEATS      3                 runs of each case, far apart in time            REPEATS=5
  EXPOSED      1                 1: also a run of each with --exposed            EXPOSED=0
  FLAGS        none              more flags of generate.py                       FLAGS="--seed 1"
  OUT          bench.jsonl       the results, a line each; a log beside it       OUT=night.jsonl
  FIGURES      OUT's name, -figures   folder of tables and figures               FIGURES=docs/night
  DEVICE       cpu | cuda        what to measure on                              DEVICE=cpu
  PYTHON       .venv/bin/python or python3: one that has torch                   PYTHON=python3.11
  DRY_RUN      0                 1: only print the commands                      DRY_RUN=1
  NNODES       1                 nodes; each runs this, with its NODE_RANK       NNODES=2
  NODE_RANK    0                 which of them this is                           NODE_RANK=1
  MASTER_ADDR  none              the address of node 0, of several               MASTER_ADDR=10.0.0.1
  MASTER_PORT  29500             its first port; each command takes the next     MASTER_PORT=29600
END
}

for word in "$@"; do
    case $word in
        -h | --help) help && exit ;;
        PYTHON=*) PYTHON=${word#*=} ;;
    esac
done
venv=$here/.venv/bin/python
[[ -x $venv ]] || venv=python3
export PYTHONSAFEPATH=1 # or a model.py where it is started would be taken for ours
export PYTHON=${PYTHON-$venv} PYTHONPATH="$(cd "$here" && pwd)${PYTHONPATH:+:$PYTHONPATH}"
"$PYTHON" -c 'import sys; from importlib.util import find_spec; sys.exit(not find_spec("torch"))' 2> /dev/null ||
    { echo "bench.sh: $PYTHON cannot import torch: run make .venv/installed first, or set PYTHON" >&2 && exit 2; }
BENCH_ROOT=$here exec "$PYTHON" -m measure.sweep "$@"
