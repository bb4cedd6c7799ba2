#!/usr/bin/env bash
# clang-format and clang-tidy over the product's own code. CHANGED=REV checks only files changed since REV.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/bootstrap.sh lint
if [ -n "${CHANGED:-}" ]; then
    mapfile -t files < <(git diff --name-only --diff-filter=d "$CHANGED" -- 'src/*.cc' 'src/*.h' 'bench/*.cc' 'python/*.cc')
else
    mapfile -t files < <(git ls-files 'src/*.cc' 'src/*.h' 'bench/*.cc' 'python/*.cc')
fi
[ ${#files[@]} -gt 0 ] || { echo "lint: nothing to check"; exit 0; }
echo "==> clang-format, ${#files[@]} files"
clang-format-16 --dry-run -Werror "${files[@]}"
if [ -n "${TIDY:-1}" ] && [ "${TIDY:-1}" != 0 ]; then
    [ -e build/dev/compile_commands.json ] || { scripts/bootstrap.sh test; cmake --preset dev >/dev/null; }
    mapfile -t sources < <(printf '%s\n' "${files[@]}" | grep '\.cc$' | grep -v -E '_fuzz\.cc$|_bench\.cc$|^bench/|^python/')
    echo "==> clang-tidy, ${#sources[@]} files"
    printf '%s\n' "${sources[@]}" | xargs -P "$(nproc)" -n 4 clang-tidy-16 -p build/dev --quiet 2> >(grep -v 'warnings generated' >&2)
fi
echo "lint: clean"
