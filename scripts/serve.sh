#!/usr/bin/env bash
# `make serve`: everything from a bare machine to an answer. PORT, HOST, MODEL, ARGS come from make.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/bootstrap.sh serve
if [ -z "${MODEL:-}" ]; then
    scripts/fetch_model.sh
    MODEL=build/models/SmolLM2-135M-Instruct.Q4_1.gguf
    ARGS="--served-model-name SmolLM2-135M-Instruct ${ARGS:-}"
fi
scripts/build.sh release rankgate
echo "==> starting: $MODEL on http://${HOST:-127.0.0.1}:${PORT:-8000}"
# shellcheck disable=SC2086  # ARGS is a list of flags
exec build/release/rankgate serve "$MODEL" --host "${HOST:-127.0.0.1}" --port "${PORT:-8000}" ${ARGS:-}
