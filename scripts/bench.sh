#!/usr/bin/env bash
# `make bench`: the budgets. Micro-benchmarks of the token path, then the whole gateway on one core against simulated ranks, beside a
# one-thread server that only writes canned chunks (the kernel's price). JSON in build/bench/, a table on the screen.
# --smoke: a few seconds of each, to see that they run.
# PEERS=1: also another gateway that speaks the same wire (SMG, a pinned wheel in a venv of its own), in front of the same ranks in the same run.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p build/bench
smoke=
[ "${1:-}" = --smoke ] && smoke=1

micro=(wire_bench text_bench group_core_bench api_bench engine_bench)
scripts/build.sh bench rankgate shard_bench "${micro[@]}"
ran=0
failed=0
for name in "${micro[@]}"; do
    program=$(find build/bench/src -name "$name" -type f -executable | head -1)
    echo "==> $name"
    # Google Benchmark programs take these flags; api_bench has a table of its own.
    flags=()
    if [ "$name" != api_bench ]; then
        flags=(--benchmark_out="build/bench/$name.json" --benchmark_out_format=json)
        [ -n "$smoke" ] && flags+=(--benchmark_min_time=0.01)
    fi
    if "$program" "${flags[@]}" >"build/bench/$name.txt" 2>&1; then
        ran=$((ran + 1))
        grep -vE '^(Run on|  L[0-9]|CPU Caches|Load Average|\*\*\*|[0-9]{4}-)' "build/bench/$name.txt" | head -60
    else
        failed=$((failed + 1))
        tail -20 "build/bench/$name.txt"
    fi
done
echo "==> shard"
if bench/gateway/shard.sh "$(find build/bench/src -name shard_bench -type f -executable | head -1)"; then
    ran=$((ran + 1))
else
    failed=$((failed + 1))
fi
echo "==> whole gateway"
if RANKGATE=$PWD/build/bench/rankgate bench/gateway/run.sh ${smoke:+--quick}; then
    ran=$((ran + 1))
else
    failed=$((failed + 1))
fi
if [ -n "${PEERS:-}" ]; then
    echo "==> peers"
    smg=1.13.0
    if [ ! -x build/bench/venv-peers/bin/smg ]; then
        python3 -m venv build/bench/venv-peers
        build/bench/venv-peers/bin/pip install -q --disable-pip-version-check "smg==$smg"
    fi
    scripts/fetch_tokenizers.sh smollm2 >/dev/null
    if python3 bench/gateway/run.py --rankgate "$PWD/build/bench/rankgate" --peers ${smoke:+--quick}; then
        ran=$((ran + 1))
    else
        failed=$((failed + 1))
    fi
fi
echo "$ran passed, $failed failed"
[ "$failed" -eq 0 ]
