#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Conformance of the wire codec with the engines' own encoder (msgspec), both ways, on random structs.
# usage: tests/wire/run.sh [build dir (default build/dev)] [conformance.py options]
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"
build="${1:-$root/build/dev}"
shift || true
venv="$root/build/venv-wire"
if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -c 'import msgspec' 2>/dev/null; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check msgspec==0.23.0
fi
if [ ! -f "$build/build.ninja" ]; then
    cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DRANKGATE_WITH_LLAMA=OFF
fi
ninja -C "$build" wire_peer
peer="$(find "$build" -name wire_peer -type f -perm -u+x | head -1)"
# A fixed seed, so that a failure is this tree's and not this run's; SEED=N looks elsewhere, SEED="" somewhere new. What such runs found is
# kept in conformance.py's fixed_cases.
seed=${SEED-1}
exec "$venv/bin/python" "$root/tests/wire/conformance.py" "$peer" ${seed:+--seed "$seed"} "$@"
