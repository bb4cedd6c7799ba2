#!/usr/bin/env bash
# sanitize.sh asan|tsan: the unit tests under a sanitizer. Without the embedded engine and the Rust library: neither is instrumented.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/build.sh "$1" all
export ASAN_OPTIONS=detect_stack_use_after_return=1 UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS="halt_on_error=1 second_deadlock_stack=1"
if [ "$1" = tsan ] && [ -e scripts/tsan.supp ]; then
    TSAN_OPTIONS="$TSAN_OPTIONS suppressions=$PWD/scripts/tsan.supp"
fi
ctest --test-dir "build/$1" --output-on-failure --no-tests=error -j "$(nproc)" ${FILTER:+-R "$FILTER"}
