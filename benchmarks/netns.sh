#!/usr/bin/env bash
# Two ranks on one machine with a real slow link between them: two network namespaces joined by a veth pair, shaped by
# tc's token bucket filter. One core a rank. Removes the namespaces when it ends, however it ends.
#
#   benchmarks/netns.sh "20mbit 5mbit" --wirings standard ladder --json overlap-netns.jsonl
#
# The first argument lists rates; the rest goes to overlap.py, which runs in the repository's root.
set -euo pipefail
cd "$(dirname "$0")/.."

refuse() {
    echo "netns.sh: $1" >&2
    exit 2
}
[[ $# -ge 1 && $1 != -* ]] || refuse 'give the rates first: benchmarks/netns.sh "20mbit 5mbit" [flags of overlap.py]'
read -ra rates <<< "$1"
for rate in "${rates[@]}"; do
    [[ $rate =~ ^[1-9][0-9]*[kmg]bit$ ]] || refuse "$rate is no rate such as 20mbit"
done
[[ $(id -u) == 0 ]] || refuse "network namespaces need root: run it with sudo"
for tool in ip tc taskset; do
    command -v "$tool" > /dev/null || refuse "$tool is missing: install iproute2 and util-linux"
done
python=${PYTHON:-.venv/bin/python}
[[ -x $(command -v "$python") ]] || refuse "no $python: run make .venv/installed first, or set PYTHON"

name=ladder$$
pids=()
shift
cleanup() {
    ((${#pids[@]})) && kill "${pids[@]}" 2> /dev/null || true
    wait || true
    ip netns del "$name-0" 2> /dev/null || true
    ip netns del "$name-1" 2> /dev/null || true # and with them the veth pair
}
trap cleanup EXIT
trap 'exit 130' INT TERM

for rank in 0 1; do
    ip netns add "$name-$rank" || refuse "this system does not let root make network namespaces"
done
ip link add veth0 netns "$name-0" type veth peer name veth1 netns "$name-1"
for rank in 0 1; do
    ip -n "$name-$rank" address add "10.231.0.$((rank + 1))/24" dev "veth$rank"
    ip -n "$name-$rank" link set "veth$rank" up
    ip -n "$name-$rank" link set lo up
done

for rate in "${rates[@]}"; do
    for rank in 0 1; do
        # a bucket of one packet: every packet waits for its time on the wire
        tc -n "$name-$rank" qdisc replace dev "veth$rank" root tbf rate "$rate" burst 1600 latency 400ms
    done
    pids=()
    for rank in 1 0; do
        # the ranks find each other as torchrun would tell those of two nodes
        ip netns exec "$name-$rank" env RANK=$rank WORLD_SIZE=2 MASTER_ADDR=10.231.0.1 MASTER_PORT=29500 \
            LOCAL_WORLD_SIZE=1 GLOO_SOCKET_IFNAME="veth$rank" OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR \
            taskset -c $rank "$python" -m benchmarks.overlap --device cpu --links free --label "veth $rate" "$@" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do
        wait "$pid" && continue
        code=$?
        ((code < 128)) || { echo "netns.sh: a rank was killed" >&2; exit 1; }
        exit $code
    done
done
