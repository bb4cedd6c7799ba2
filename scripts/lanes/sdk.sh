#!/usr/bin/env bash
# The official OpenAI SDKs, Python and Node, against `rankgate serve` with the demo model.
set -euo pipefail
lane=sdk
. "$(dirname "$0")/lib.sh"
scripts/bootstrap.sh lanes
lane_program
model=$(scripts/fetch_model.sh)
lane_venv build/venv-sdk openai==3.57.0 pytest pytest-asyncio pytest-timeout
lane_node
if [ ! -e build/node-sdk/node_modules/openai/package.json ]; then
    say "installing the Node SDK"
    mkdir -p build/node-sdk
    (cd build/node-sdk && npm init -y >/dev/null && npm install --silent --no-audit --no-fund openai@6.49.0 >/dev/null)
fi
export MODEL=SmolLM2-135M-Instruct NO_PROXY=127.0.0.1,localhost
start_server sdk "$model" --served-model-name $MODEL --max-model-len 2048 --max-num-seqs 4
status=0
say "openai-python"
build/venv-sdk/bin/python -m pytest -q --timeout 120 -o asyncio_mode=auto -o asyncio_default_fixture_loop_scope=function tests/sdk/test_openai_python.py || status=1
say "openai-node"
cp tests/sdk/openai_node.test.mjs build/node-sdk/
(cd build/node-sdk && node --test --test-concurrency=1 --test-reporter=tap openai_node.test.mjs) >build/lane-sdk-node.log 2>&1 || status=1
grep -E '^not ok|^# (pass|fail) ' build/lane-sdk-node.log
[ "$status" = 0 ] || grep -A12 '^not ok' build/lane-sdk-node.log | head -60 || true
echo "$(grep -oE '^# pass [0-9]+' build/lane-sdk-node.log | grep -oE '[0-9]+') passed, $(grep -oE '^# fail [0-9]+' build/lane-sdk-node.log | grep -oE '[0-9]+') failed"
stop_server
exit $status
