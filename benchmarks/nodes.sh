#!/usr/bin/env bash
# Runs a command on each of several pretended machines: network namespaces, one core and one rank each, over a network
# of their own. Needs root. Rates are in Mbit/s. Without a delay two nodes get a veth pair that tc shapes, else relay.cpp.
#
#   benchmarks/nodes.sh NODES MBIT DELAY_US COMMAND ...      # in which {} is the number of the node
#   benchmarks/nodes.sh 2 100 0 .venv/bin/python -m benchmarks.overlap --links free --label "100 Mbit/s"
set -euo pipefail

nodes=$1 mbit=$2 delay=$3
shift 3
name=ladder$$ folder=$(mktemp -d) spaces=()
for ((i = 0; i < nodes; i++)); do spaces+=("$name-$i"); done
cleanup() {
    kill $(jobs -p) 2> /dev/null || true
    wait || true
    for space in "${spaces[@]}"; do ip netns del "$space" || true; done
    rm -r "$folder"
}
trap cleanup EXIT

for space in "${spaces[@]}"; do ip netns add "$space"; done
if ((delay == 0 && nodes == 2)); then
    ip link add relay0 netns "$name-0" type veth peer name relay0 netns "$name-1"
    # a bucket of one packet: every packet waits for its time on the wire
    for space in "${spaces[@]}"; do tc -n "$space" qdisc add dev relay0 root tbf rate "${mbit}mbit" burst 1600 latency 400ms; done
else
    g++ -O2 -o "$folder/relay" "$(dirname "$0")/relay.cpp"
    "$folder/relay" "$mbit" "$delay" "${spaces[@]}" &
    sleep 1
fi
for ((i = 0; i < nodes; i++)); do
    ip -n "$name-$i" address add "10.77.0.$((i + 1))/24" dev relay0
    ip -n "$name-$i" link set relay0 up
    ip -n "$name-$i" link set lo up
done
ranks=()
for ((i = nodes - 1; i >= 0; i--)); do
    ip netns exec "$name-$i" env RANK=$i WORLD_SIZE="$nodes" GROUP_RANK=$i LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 \
        MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 TORCH_CPP_LOG_LEVEL=ERROR OMP_NUM_THREADS=1 taskset -c $((i % $(nproc))) "${@//\{\}/$i}" &
    ranks+=($!)
done
for rank in "${ranks[@]}"; do wait "$rank"; done
