#!/usr/bin/env bash
# The gateway bench: release build, then bench/gateway/run.py. RANKGATE names another program; arguments go through.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ -z "${RANKGATE:-}" ]; then
    scripts/build.sh release rankgate
    export RANKGATE=$PWD/build/release/rankgate
fi
exec python3 bench/gateway/run.py "$@"
