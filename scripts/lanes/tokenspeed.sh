#!/usr/bin/env bash
# tokenspeed.sh short|full: the gateway in front of the real TokenSpeed event loop (CPU, scripted tokens), one engine and a group of two.
set -euo pipefail
lane=tokenspeed
. "$(dirname "$0")/lib.sh"
scripts/bootstrap.sh lanes
lane_program
scripts/lanes/tokenspeed_env.sh
flags=()
[ "${1:-full}" = short ] && flags+=(--short)
say "${1:-full} form"
exec build/venv-tokenspeed/bin/python -m pytest -q --timeout 300 -p no:cacheprovider "${flags[@]}" ${FILTER:+-k "$FILTER"} tests/tokenspeed
