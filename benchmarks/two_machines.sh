#!/usr/bin/env bash
# Two pretended machines: network namespaces of one core and one rank each, joined by a link that tc shapes. Needs root.
#
#   benchmarks/two_machines.sh MBIT [flags of benchmarks/two_machines.py]
set -euo pipefail
cd "$(dirname "$0")/.."

mbit=$1 name=ladder$$
shift
cleanup() {
    kill $(jobs -p) 2> /dev/null || true
    wait || true
    for i in 0 1; do ip netns del "$name-$i" || true; done
}
trap cleanup EXIT
for i in 0 1; do ip netns add "$name-$i"; done
ip link add link0 netns "$name-0" type veth peer name link0 netns "$name-1"
for i in 0 1; do
    ip -n "$name-$i" address add "10.77.0.$((i + 1))/24" dev link0
    ip -n "$name-$i" link set link0 up
    ip -n "$name-$i" link set lo up
    # a bucket of one packet: every packet waits for its time on the wire
    tc -n "$name-$i" qdisc add dev link0 root tbf rate "${mbit}mbit" burst 1600 latency 400ms
done
ranks=()
for i in 1 0; do
    ip netns exec "$name-$i" env RANK=$i WORLD_SIZE=2 GROUP_RANK=$i LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 \
        MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR \
        taskset -c $i "${PYTHON:-.venv/bin/python}" -m benchmarks.two_machines --link "$mbit Mbit/s" "$@" &
    ranks+=($!)
done
for rank in "${ranks[@]}"; do wait "$rank"; done
