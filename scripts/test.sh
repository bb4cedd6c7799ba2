#!/usr/bin/env bash
# `make test`: every C++ test, then the end-to-end suites against the built program. The last line says how many passed.
# FILTER=regex runs the C++ tests whose name matches and nothing else.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/bootstrap.sh test
scripts/fetch_model.sh
scripts/build.sh dev all

passed=0
failed=0
suites=()

# run NAME COMMAND...: runs a suite, adds up its counts from the runner's closing line, and keeps its output.
run() {
    local name=$1 log=build/test-$1.log status=0
    shift
    echo "==> $name"
    "$@" >"$log" 2>&1 || status=$?
    local ok bad
    # ctest: "100% tests passed, 0 tests failed out of 9"; pytest: "3 failed, 40 passed in 2s"; ours: "N passed, N failed";
    # the wire conformance: "N checks, N failed".
    if grep -q 'tests failed out of' "$log"; then
        # All of them ran in the first run; what counts as failed is what failed in the last one.
        bad=$(grep -oE '[0-9]+ tests failed out of' "$log" | tail -1 | grep -oE '^[0-9]+')
        ok=$(($(grep -oE 'tests failed out of [0-9]+' "$log" | head -1 | grep -oE '[0-9]+$') - bad))
    elif grep -qE '^[0-9]+ checks, [0-9]+ failed$' "$log"; then
        bad=$(grep -E '^[0-9]+ checks, [0-9]+ failed$' "$log" | awk '{n += $3} END {print n}')
        ok=$(($(grep -E '^[0-9]+ checks, [0-9]+ failed$' "$log" | awk '{n += $1} END {print n}') - bad))
    else
        ok=$( (grep -oE '[0-9]+ passed' "$log" || true) | awk '{n += $1} END {print n + 0}')
        bad=$( (grep -oE '[0-9]+ (failed|errors?)\b' "$log" || true) | awk '{n += $1} END {print n + 0}')
    fi
    if [ "$status" -ne 0 ] && [ "${bad:-0}" -eq 0 ]; then
        bad=1
    fi
    # A suite that ran nothing has failed.
    if [ "${ok:-0}" -eq 0 ] && [ "${bad:-0}" -eq 0 ]; then
        echo "    no test ran" >>"$log"
        bad=1
    fi
    if [ "$bad" -ne 0 ]; then
        grep -E '\*\*\*Failed|\*\*\*Timeout|^FAILED|^ERROR|Failure$|no test ran' "$log" | head -40 || true
        echo "--- the last lines of $log"
        tail -60 "$log"
    fi
    passed=$((passed + ok))
    failed=$((failed + bad))
    suites+=("$(printf '%-12s %5d passed, %d failed' "$name" "$ok" "$bad")")
}

# Hundreds of these tests start processes and have deadlines, and the machine may be busy with others: what failed runs once more, alone.
# A test that needs that is named in the summary, so that it gets mended; two failures are a failure.
unit() {
    local failures=build/dev/Testing/Temporary/LastTestsFailed.log
    ctest --test-dir build/dev --output-on-failure --no-tests=error -j "$(nproc)" ${FILTER:+-R "$FILTER"} && return 0
    sed -E 's/^[0-9]+:/needed a second run: /' "$failures" >build/test-second-run.log
    ctest --test-dir build/dev --rerun-failed --output-on-failure
}

rm -f build/test-second-run.log
run unit unit
if [ -z "${FILTER:-}" ]; then
    for suite in tests/*/run.sh; do
        [ -e "$suite" ] || continue
        run "$(basename "$(dirname "$suite")")" "$suite"
    done
fi

echo
printf '%s\n' "${suites[@]}"
[ ! -e build/test-second-run.log ] || cat build/test-second-run.log
echo
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
