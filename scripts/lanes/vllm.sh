#!/usr/bin/env bash
# vllm.sh short|full: the gateway in front of real vLLM engines (CPU, dummy weights). The full form also starts the stock command and
# compares with vLLM's own server; plan for 30 minutes of two cores.
set -euo pipefail
lane=vllm
. "$(dirname "$0")/lib.sh"
scripts/bootstrap.sh lanes
lane_program
scripts/lanes/vllm_env.sh
form=${1:-full}
flags=()
[ "$form" = short ] && flags+=(--short)
say "$form form"
exec build/venv-vllm/bin/python -m pytest -q --maxfail=8 --timeout 900 -p no:cacheprovider "${flags[@]}" ${FILTER:+-k "$FILTER"} tests/vllm
