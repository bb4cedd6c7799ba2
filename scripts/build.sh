#!/usr/bin/env bash
# build.sh PRESET TARGET...: configure once, build the targets. What the preset needs beyond packages is fetched first.
set -euo pipefail
cd "$(dirname "$0")/.."

preset=$1
shift
case "$preset" in
    release) scripts/bootstrap.sh serve ;;
    fuzz) scripts/bootstrap.sh fuzz ;;
    bench) scripts/bootstrap.sh bench ;;
    *) scripts/bootstrap.sh test ;;
esac
echo "==> configuring $preset"
log=build/$preset.configure.log
mkdir -p build
if ! cmake --preset "$preset" >"$log" 2>&1; then
    tail -40 "$log" >&2
    exit 1
fi
echo "==> building $preset: $*"
if [ -t 1 ]; then
    cmake --build "build/$preset" -j "${JOBS:-$(nproc)}" --target "$@"
else
    # Without a terminal ninja prints a line a file; keep progress visible, but not that much of it.
    NINJA_STATUS='[%f/%t %es] ' cmake --build "build/$preset" -j "${JOBS:-$(nproc)}" --target "$@" |
        awk '/FAILED/ {failed = 1} failed || /error|warning/ {print; fflush(); next} NR % 25 == 1 {print; fflush()} {last = $0} END {print last}'
fi
