#!/usr/bin/env bash
# Continuous integration: the README's test command, then a short form of every slower lane. Each lane prints its own counts; the last
# line adds them up. A lane that cannot run has failed. CI_LANES chooses: format test sdk vllm tokenspeed asan tsan fuzz bench (bench, which
# needs a quiet machine, by hand).
set -uo pipefail
cd "$(dirname "$0")/.."
mkdir -p build

lanes=${CI_LANES:-"test sdk vllm tokenspeed asan tsan fuzz format"}
passed=0
failed=0
summary=()

lane() {
    local name=$1 log=build/ci-$1.log status=0 start=$SECONDS ok bad
    shift
    echo "=== $name: $*"
    "$@" 2>&1 | tee "$log" | awk '!/^\[[0-9]+\/[0-9]+ /' || true
    status=${PIPESTATUS[0]}
    # The closing line of the lane: "N passed, N failed", pytest's, or ctest's.
    if grep -qE '^[0-9]+ passed, [0-9]+ failed' "$log"; then
        ok=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$log" | awk '{n += $1} END {print n + 0}')
        bad=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$log" | awk '{n += $3} END {print n + 0}')
    else
        ok=0
        bad=0
    fi
    ok=$((ok + $(grep -E '^([0-9]+ failed, )?[0-9]+ passed.* in [0-9.]+s' "$log" | grep -oE '[0-9]+ passed' | awk '{n += $1} END {print n + 0}')))
    bad=$((bad + $(grep -E '^[0-9]+ failed.* in [0-9.]+s' "$log" | grep -oE '^[0-9]+' | awk '{n += $1} END {print n + 0}')))
    ok=$((ok + $(grep -oE '[0-9]+% tests passed, [0-9]+ tests failed out of [0-9]+' "$log" | awk '{n += $NF - $4} END {print n + 0}')))
    if [ "$status" -ne 0 ] && [ "$bad" -eq 0 ]; then
        bad=1
    fi
    if [ "$ok" -eq 0 ] && [ "$bad" -eq 0 ]; then
        echo "=== $name ran no test"
        bad=1
    fi
    passed=$((passed + ok))
    failed=$((failed + bad))
    summary+=("$(printf '%-14s %5d passed %3d failed %5d s' "$name" "$ok" "$bad" $((SECONDS - start)))")
}

for name in $lanes; do
    case "$name" in
        test) lane test make --no-print-directory test ;;
        sdk) lane sdk make --no-print-directory test-sdk ;;
        vllm) lane vllm make --no-print-directory test-vllm-short ;;
        tokenspeed) lane tokenspeed make --no-print-directory test-tokenspeed-short ;;
        format) lane format env TIDY=0 scripts/lint.sh ;;
        asan) lane asan make --no-print-directory test-asan-short ;;
        tsan) lane tsan make --no-print-directory test-tsan-short ;;
        fuzz) lane fuzz make --no-print-directory fuzz FUZZ_SECONDS=3 ;;
        bench) lane bench scripts/bench.sh --smoke ;;
        *) echo "ci: unknown lane $name" >&2; exit 2 ;;
    esac
done

echo
printf '%s\n' "${summary[@]}"
echo
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
