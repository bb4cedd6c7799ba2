#!/usr/bin/env bash
# The relay's tests in their long form, about an hour on two cores: 1000 runs of "publish the moment join returns" under CPU load and 500
# cold starts with random delays of up to two seconds (both shared out over the three back-ends and over 2, 4 and 8 ranks), the same cold
# starts from Python, a soak of 10^7 steps, and the sanitizers. RELAY_RUNS / RELAY_COLD_STARTS / RELAY_SOAK change the counts.
source "$(dirname "$0")/common.sh"
runs=${RELAY_RUNS:-1000}
starts=${RELAY_COLD_STARTS:-500}
soak=${RELAY_SOAK:-10000000}
build_tests
build_python
say "publish at once: $runs runs on each back-end"
RELAY_RUNS=$runs "$bin/relay_process_test" --gtest_brief=1 --gtest_filter='*TheFrameBehindGo*'
say "cold starts: $starts on each back-end"
RELAY_COLD_STARTS=$starts "$bin/relay_process_test" --gtest_brief=1 --gtest_filter='*ColdStarts*'
say "killed at any moment"
RELAY_KILLS=300 "$bin/relay_process_test" --gtest_brief=1 --gtest_filter="*KilledAtAnyMoment*"
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
