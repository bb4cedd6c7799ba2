#!/usr/bin/env bash
# sanitize.sh asan|tsan [short]: the unit tests, then gateway and engine as real processes, under AddressSanitizer and UBSan, or under
# ThreadSanitizer. Any report of any process fails the run, also of one whose test did not look. Without the embedded engine and the Rust
# library: neither is instrumented, so they would hide accesses and cost an hour. FILTER=regex: the unit tests whose name matches, nothing else.
# `short` is what CI runs. asan short: the process suites, on the program of the fuzz build, so that one build serves both; the parsers
# are what the fuzz targets cover. tsan short: the unit tests with threads, and the process suites' streams and faults.
set -euo pipefail
cd "$(dirname "$0")/.."
sanitizer=${1:?usage: sanitize.sh asan|tsan [short]}
short=${2:-}
[[ "$sanitizer" =~ ^(asan|tsan)$ && "$short" =~ ^(short)?$ ]] || { echo "usage: sanitize.sh asan|tsan [short]" >&2; exit 2; }
out=build/$sanitizer

unit_only=
run_unit=1
if [ -z "$short" ]; then
    scripts/build.sh "$sanitizer" all
    unit_only=${FILTER:+1}
elif [ "$sanitizer" = asan ]; then
    scripts/build.sh fuzz rankgate
    out=build/fuzz
    export ASAN_SYMBOLIZER_PATH=${ASAN_SYMBOLIZER_PATH:-$(command -v llvm-symbolizer || true)}  # clang does not look for it
    run_unit=
else
    threaded=(base_test engine_test gateway_test group_actor_test http_test rank_test relay_test transport_test)
    scripts/build.sh tsan "${threaded[@]}" rankgate
    FILTER="^($(IFS='|'; echo "${threaded[*]}"))\."
fi

# Reports go to files: a child's would be lost with its output, and a test may kill what it started. UBSan of g++ beside ASan does not
# know log_path and writes to stderr, so what programs print is kept as well, and searched at the end.
export RANKGATE_REPORTS=$PWD/$out/reports
rm -rf "$RANKGATE_REPORTS" "$out"/test-*.log "$out/e2e"
mkdir -p "$RANKGATE_REPORTS"
log=log_path=$RANKGATE_REPORTS/report
export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1:$log
export UBSAN_OPTIONS=print_stacktrace=1:$log
export TSAN_OPTIONS=second_deadlock_stack=1:suppressions=$PWD/scripts/tsan.supp:$log

passed=0
failed=0
# run NAME COMMAND...: a suite; its counts are those of ctest's or pytest's closing line.
run() {
    local name=$1 file=$out/test-$1.log status=0 ok bad
    shift
    echo "==> $name"
    "$@" >"$file" 2>&1 || status=$?
    if grep -q 'tests failed out of' "$file"; then
        bad=$(grep -oE '[0-9]+ tests failed out of' "$file" | tail -1 | grep -oE '^[0-9]+')
        ok=$(($(grep -oE 'tests failed out of [0-9]+' "$file" | head -1 | grep -oE '[0-9]+$') - bad))
    else
        ok=$( (grep -E ' in [0-9.]+s' "$file" | grep -oE '[0-9]+ passed' || true) | awk '{n += $1} END {print n + 0}')
        bad=$( (grep -E ' in [0-9.]+s' "$file" | grep -oE '[0-9]+ (failed|errors?)\b' || true) | awk '{n += $1} END {print n + 0}')
    fi
    [ "$status" -eq 0 ] || [ "$bad" -gt 0 ] || bad=1
    [ $((ok + bad)) -gt 0 ] || { echo "    no test ran"; bad=1; }
    if [ "$bad" -ne 0 ]; then
        grep -E '\*\*\*Failed|\*\*\*Timeout|^FAILED|^ERROR|Failure$' "$file" | head -40 || true
        echo "--- the last lines of $file"
        tail -60 "$file"
    fi
    echo "    $ok passed, $bad failed"
    passed=$((passed + ok))
    failed=$((failed + bad))
}

# Deadlines of tests are real time: what failed beside others runs once more, alone. A report stays a report.
unit() {
    ctest --test-dir "$out" --output-on-failure --no-tests=error -j "$(nproc)" ${FILTER:+-R "$FILTER"} && return 0
    ctest --test-dir "$out" --rerun-failed --output-on-failure
}
[ -z "$run_unit" ] || run unit unit

if [ -z "$unit_only" ]; then
    export RANKGATE=$PWD/$out/rankgate
    # Fewer streams, and more time for each step; what is counted and compared is the same.
    if [ "$sanitizer" = asan ]; then
        export E2E_STREAMS=${E2E_STREAMS:-500} RANKGATE_TEST_SLOWDOWN=${RANKGATE_TEST_SLOWDOWN:-8}
    else
        export E2E_STREAMS=${E2E_STREAMS:-500} RANKGATE_TEST_SLOWDOWN=${RANKGATE_TEST_SLOWDOWN:-20}
    fi
    if [ -n "$short" ] && [ "$sanitizer" = tsan ]; then
        run e2e tests/e2e/run.sh --basetemp "$out/e2e" -k "streams or faults"
    else
        run e2e tests/e2e/run.sh --basetemp "$out/e2e"
        run engine tests/engine/run.sh -s
    fi
fi

grep -rl --include='*.log' -E 'runtime error: |ERROR: [A-Za-z]+Sanitizer|WARNING: ThreadSanitizer' "$out"/test-*.log "$out/e2e" 2>/dev/null |
    while IFS= read -r file; do cp "$file" "$RANKGATE_REPORTS/printed-$(basename "$file")-$RANDOM"; done || true
reports=$(find "$RANKGATE_REPORTS" -type f | wc -l)
if [ "$reports" -ne 0 ]; then
    echo "==> $reports processes left a report in $RANKGATE_REPORTS; the first:"
    head -80 "$(find "$RANKGATE_REPORTS" -type f | sort | head -1)"
    failed=$((failed + 1))
fi
echo
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
