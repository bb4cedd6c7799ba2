#!/usr/bin/env bash
# clang-format and clang-tidy over the product's own code. CHANGED=REV checks only files changed since REV; TIDY=0 leaves clang-tidy out;
# FILTER=regex picks files for clang-tidy.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/bootstrap.sh lint
patterns=('src/*.cc' 'src/*.h' 'bench/*.cc' 'python/*.cc' 'tests/*.cc')
if [ -n "${CHANGED:-}" ]; then
    mapfile -t files < <(git diff --name-only --diff-filter=d "$CHANGED" -- "${patterns[@]}")
else
    mapfile -t files < <(git ls-files "${patterns[@]}")
fi
[ ${#files[@]} -gt 0 ] || { echo "lint: nothing to check"; exit 0; }
echo "==> clang-format, ${#files[@]} files"
clang-format-16 --dry-run -Werror "${files[@]}"
[ "${TIDY:-1}" != 0 ] || { echo "1 passed, 0 failed (clang-format; clang-tidy left out)"; exit 0; }

# The commands of the test build; fuzz targets and benches have none there.
[ -e build/dev/compile_commands.json ] || { scripts/bootstrap.sh test; cmake --preset dev >/dev/null; }
mapfile -t sources < <(printf '%s\n' "${files[@]}" | grep '^src/.*\.cc$' | grep -v -E '_fuzz\.cc$|_bench\.cc$' | grep -E "${FILTER:-.}")
mapfile -t tests < <(printf '%s\n' "${sources[@]}" | grep -E '_test\.cc$|/test_|plain_loop' || true)
mapfile -t product < <(printf '%s\n' "${sources[@]}" | grep -v -E '_test\.cc$|/test_|plain_loop' || true)
tidy=(clang-tidy-16 -p build/dev --quiet --extra-arg=-Wno-unknown-warning-option)
# run CHECKS FILE...: prints findings only; xargs fails when one of them does.
run() {
    local checks=$1
    shift
    [ $# -eq 0 ] || printf '%s\n' "$@" | xargs -P "$(nproc)" -n 1 "${tidy[@]}" --checks="$checks" 2> >(grep -v 'warnings generated\|^Suppressed\|^Use -header-filter' >&2)
}
echo "==> clang-tidy, ${#product[@]} files"
run '' "${product[@]}"
# The path-sensitive analyzer takes minutes for a file of gtest macros, and what it would find there the sanitizers see. Nor need a test
# be fast.
echo "==> clang-tidy without the analyzer, ${#tests[@]} tests"
run '-clang-analyzer-*,-performance-*' "${tests[@]}"
echo "2 passed, 0 failed (clang-format, clang-tidy)"
