#!/usr/bin/env bash
# One streamed token on the shard, ids -> bytes written: CPU, heap allocations and instructions. usage: shard.sh PROGRAM [OUT.json]
# Instructions: two runs under callgrind that differ in the number of steps; the difference is the tokens' alone, and the same on
# every machine with this compiler, so it has a budget. The CPU figure is this machine's.
set -euo pipefail
program=$1
out=${2:-build/bench/shard.json}
budget=1500
streams=64
few=100
many=600

native=$("$program" --streams $streams --steps 2000 --json)
counted() {
    valgrind --tool=callgrind --callgrind-out-file=/dev/null "$program" --streams $streams --steps "$1" 2>&1 |
        sed -nE 's/.*Collected : ([0-9]+).*/\1/p'
}
if ! command -v valgrind >/dev/null; then
    echo "shard.sh: valgrind is missing, so no instruction was counted (apt-get install valgrind)" >&2
    exit 1
fi
a=$(counted $few)
b=$(counted $many)
instructions=$(((b - a) / (streams * (many - few))))
printf '{"native":%s,"instructions_per_token":%d,"budget":%d}\n' "$native" "$instructions" "$budget" >"$out"
echo "one streamed token on the shard, $streams streams, each token its own write:"
echo "$native" | sed -E 's/.*"cpu_ns_per_token":([0-9]+),"allocations":([0-9]+),"allocations_per_token":([0-9.]+).*/  \1 ns of CPU (the kernel'"'"'s write included); \2 allocations in 128 000 tokens (timers), \3 a token/'
echo "  $instructions instructions in user space (budget $budget)"
[ "$instructions" -le "$budget" ] || { echo "over budget" >&2; exit 1; }
