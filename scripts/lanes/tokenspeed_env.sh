#!/usr/bin/env bash
# Makes build/venv-tokenspeed: the published TokenSpeed packages (pinned) without their GPU kernels, which the tools stub. Idempotent;
# a few gigabytes the first time, most of them torch.
set -euo pipefail
cd "$(dirname "$0")/../.."

venv=build/venv-tokenspeed
stamp=$venv/.ready-0.1.1-1
[ -e "$stamp" ] && exit 0

python=
for candidate in python3.11 python3.12 python3; do
    if command -v $candidate >/dev/null && $candidate -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || { echo "tokenspeed lane: no Python 3.11 or 3.12 with venv found" >&2; exit 1; }

echo "==> tokenspeed lane: making $venv with $($python --version)"
rm -rf "$venv"
$python -m venv "$venv"
"$venv/bin/pip" install -q uv
"$venv/bin/uv" pip install -q --python "$venv/bin/python" torch msgspec==0.23.0 pyzmq numpy psutil setproctitle pybase64 requests \
    pillow pydantic starlette fastapi uvicorn uvloop orjson aiohttp transformers==5.12.0 viztracer prometheus-client pyyaml einops \
    xgrammar==0.2.3 huggingface_hub safetensors tiktoken sentencepiece grpcio grpcio-health-checking pytest pytest-timeout httpx
mkdir -p "$venv/wheels" "$venv/ts"
"$venv/bin/pip" download -q --no-deps -d "$venv/wheels" tokenspeed==0.1.1 tokenspeed-scheduler==0.1.25
for wheel in "$venv"/wheels/*.whl; do
    python3 -m zipfile -e "$wheel" "$venv/ts"
done
touch "$stamp"
echo "==> tokenspeed lane: ready"
