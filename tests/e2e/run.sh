#!/usr/bin/env bash
# The gateway and engine ranks as real processes: streams by the thousand, clients that leave, ranks that die, signals, TLS, restarts.
# RANKGATE names the program (default build/dev/rankgate).
set -euo pipefail
cd "$(dirname "$0")/../.."
lane=e2e
. scripts/lanes/lib.sh
lane_venv build/venv-e2e httpx==0.28.1 pytest==9.2.0 pytest-timeout==2.4.0
exec build/venv-e2e/bin/python -m pytest -q -p no:cacheprovider --timeout 180 "$@" tests/e2e
