#!/usr/bin/env bash
# Every fuzz target for FUZZ_SECONDS each (default 60), corpora kept in build/fuzz-corpus. A finding ends the run and is named.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/build.sh fuzz rg_fuzzers
# Debian's clang-16 looks for the symbolizer of its own version only; any will do.
export ASAN_SYMBOLIZER_PATH=${ASAN_SYMBOLIZER_PATH:-$(command -v llvm-symbolizer || true)}
count=0
while IFS= read -r target; do
    name=$(basename "$target")
    corpus=build/fuzz-corpus/$name
    mkdir -p "$corpus"
    echo "==> $name for ${FUZZ_SECONDS:-60} s"
    "$target" -max_total_time="${FUZZ_SECONDS:-60}" -timeout=10 -rss_limit_mb=2048 -print_final_stats=0 -print_funcs=0 \
        -verbosity=0 \
        -artifact_prefix="build/fuzz-corpus/$name." "$corpus"
    count=$((count + 1))
done < <(find build/fuzz/src -name '*_fuzz' -type f -executable | sort)
[ "$count" -gt 0 ] || { echo "fuzz: no target was built" >&2; exit 1; }
echo "$count passed, 0 failed"
