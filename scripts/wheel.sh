#!/usr/bin/env bash
# The Python wheel (rankgate.relay) into dist/. Built on Debian 12 it needs glibc 2.36 or newer.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/bootstrap.sh lanes
venv=build/venv-wheel
[ -x $venv/bin/python ] || { echo "==> making $venv"; python3 -m venv $venv; $venv/bin/pip install -q --upgrade pip; }
echo "==> building the wheel"
$venv/bin/pip wheel -q --no-deps -w dist ./python
ls -l dist/*.whl
