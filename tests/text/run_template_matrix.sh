#!/usr/bin/env bash
# Lane: the 70 real chat templates that llama.cpp ships (out of the npm package node-llama-cpp, 36 MB, pinned by hash) x 10 conversations,
# rendered by Python's Jinja2 as transformers sets it up, against ours. Prints what differs.
# Usage: tests/text/run_template_matrix.sh [build dir]     needs npm, git, python3 with jinja2
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
build="${1:-$root/build/dev}"
work="$root/build/node-llama"
archive="$work/node-llama-cpp-3.22.1.tgz"
mkdir -p "$work"
python3 -c 'import jinja2' 2>/dev/null || { echo "run_template_matrix: needs the Python package jinja2 (3.1.6)" >&2; exit 1; }
[[ -f "$archive" ]] || (cd "$work" && npm pack --silent node-llama-cpp@3.22.1 >/dev/null)
echo "a0d9dd80eacd2ab1cfe71aee57ac8a806487fd70b3d2a38fbec637752d9e5c5f  $archive" | sha256sum --check --status ||
    { echo "run_template_matrix: $archive has the wrong sha256" >&2; exit 1; }
if [[ ! -d "$work/templates" ]]; then
    tar -xzf "$archive" -C "$work" package/llama/gitRelease.bundle
    rm -rf "$work/repo" "$work/checkout"
    git clone --quiet --no-checkout "$work/package/llama/gitRelease.bundle" "$work/repo" 2>/dev/null
    commit="$(git -C "$work/repo" rev-list --all --max-count=1)"
    mkdir -p "$work/checkout"
    git -C "$work/repo" archive "$commit" models/templates | tar -x -C "$work/checkout"
    mv "$work/checkout/models/templates" "$work/templates"
fi
python3 "$root/tests/text/template_matrix.py" "$work/templates" "$work/matrix.json"
cmake --build "$build" --target text_template_lane
# Ten known: seven where the reference refuses what works here (list.append, a generator as JSON), three where "|safe" makes it escape HTML.
exec "$build/src/text/text_template_lane" "$work/matrix.json" 10
