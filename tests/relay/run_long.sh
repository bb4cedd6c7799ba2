#!/usr/bin/env bash
# The relay's tests in their long form, about an hour on two cores. On every back-end and for 2, 4 and 8 ranks: 1000 runs of "publish the
# moment join returns" under CPU load, and 500 cold starts with random delays of up to two seconds; the same cold starts from Python, kills
# at any moment, a soak of 10^7 steps, and the sanitizers. RELAY_RUNS / RELAY_COLD_STARTS (per back-end, shared out over the three sizes) /
# RELAY_SOAK change the counts.
source "$(dirname "$0")/common.sh"
export RELAY_RUNS=${RELAY_RUNS:-3000} RELAY_COLD_STARTS=${RELAY_COLD_STARTS:-1500}
soak=${RELAY_SOAK:-10000000}
build_tests
build_python

# One process per back-end beside each other: mostly they sleep, and what they do not sleep is the load that the others are to bear.
on_every_backend() {
    local pids=() pid backend
    for backend in ring stream tcp; do
        "$bin/relay_process_test" --gtest_brief=1 --gtest_filter="$1/$backend" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do
        wait "$pid"
    done
}

say "publish at once: $RELAY_RUNS runs on each back-end"
on_every_backend '*TheFrameBehindGo*'
say "cold starts: $RELAY_COLD_STARTS on each back-end"
on_every_backend '*ColdStarts*'
say "killed at any moment"
RELAY_KILLS=300 "$bin/relay_process_test" --gtest_brief=1 --gtest_filter="*KilledAtAnyMoment*"
unset RELAY_RUNS RELAY_COLD_STARTS
say "everything else"
"$bin/relay_test" --gtest_brief=1
"$bin/relay_process_test" --gtest_brief=1
"$bin/relay_controls_test" --gtest_brief=1
say "python, long form"
"$venv/bin/python" -m pytest -q -p no:cacheprovider python/tests --long
say "soak of $soak steps"
"$bin/relay_soak" "$soak"
for kind in thread address,undefined; do
    say "sanitizer: $kind"
    dir=build/relay-${kind%%,*}
    [ -f "$dir/build.ninja" ] || cmake -S . -B "$dir" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1" \
        -DRANKGATE_WITH_LLAMA=OFF -DRANKGATE_SANITIZE="$kind" >/dev/null
    ninja -C "$dir" relay_test relay_node relay_process_test | tail -n 1
    "$dir/src/relay/relay_test" --gtest_brief=1
    "$dir/src/relay/relay_process_test" --gtest_brief=1
done
