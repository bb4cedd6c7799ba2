#!/usr/bin/env bash
# The engine end against a frontend in Python (pyzmq and msgspec, an implementation that shares nothing with ours): real processes,
# real sockets, both dialects, faults. RANKGATE names the program (default build/dev/rankgate).
set -euo pipefail
cd "$(dirname "$0")/../.."
lane=engine
. scripts/lanes/lib.sh
lane_venv build/venv-engine pyzmq==27.3.0 msgspec==0.23.0 pytest==9.2.0 pytest-timeout==2.4.0
exec build/venv-engine/bin/python -m pytest -q -p no:cacheprovider --timeout 120 "$@" tests/engine
