#!/usr/bin/env bash
# Gets the llama.cpp source tree that cmake/llama.cmake builds, and records its path in build/deps/llama.path.
#
# Order: 1. RANKGATE_LLAMA_DIR (your own tree; its release must match the pinned one closely enough to build)
#        2. the Rust crate llama-cpp-sys-2 (llama.cpp 0.6.0, 5.8 MB, hash pinned by rust/llama-src/Cargo.lock; nothing is compiled by cargo)
#        3. without a cargo >= 1.85: the PyPI source archive of llama-cpp-python (llama.cpp 0.5.0, 77 MB, hash pinned below)
# Idempotent; returns at once when the recorded tree is still there. RANKGATE_LLAMA_SOURCE=crate|pypi forces one way.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
deps="$root/build/deps"
record="$deps/llama.path"
target="x86_64-unknown-linux-gnu"
sdist_version="0.3.36"
sdist_sha256="832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"

say() { echo "fetch_llama: $*" >&2; }
die() { say "error: $*"; exit 1; }
is_tree() { [[ -f "$1/include/llama.h" && -f "$1/ggml/CMakeLists.txt" && -f "$1/common/jinja/runtime.cpp" ]]; }
finish() {
    is_tree "$1" || die "$1 does not look like a llama.cpp source tree (include/llama.h, ggml/, common/jinja/)"
    mkdir -p "$deps"
    # Written only when it changes, so that cmake does not configure again for nothing.
    if [[ ! -f "$record" || "$(cat "$record")" != "$1" ]]; then
        printf '%s\n' "$1" >"$record.$$" && mv "$record.$$" "$record"
    fi
    printf '%s\n' "$1"
    exit 0
}

if [[ -n "${RANKGATE_LLAMA_DIR:-}" ]]; then
    finish "$(cd "$RANKGATE_LLAMA_DIR" && pwd)"
fi
if [[ -z "${RANKGATE_LLAMA_SOURCE:-}" && -f "$record" ]] && is_tree "$(cat "$record")"; then
    finish "$(cat "$record")"
fi

cargo_ok() {
    command -v cargo >/dev/null 2>&1 || return 1
    local version major minor
    version="$(cargo --version 2>/dev/null | awk '{print $2}')"
    IFS=. read -r major minor _ <<<"$version"
    [[ "$major" =~ ^[0-9]+$ && "$minor" =~ ^[0-9]+$ ]] || return 1
    ((major > 1 || (major == 1 && minor >= 85)))
}

from_crate() {
    local manifest="$root/rust/llama-src/Cargo.toml"
    say "getting the llama.cpp source with cargo (crate llama-cpp-sys-2, 6 MB)"
    cargo fetch --locked --manifest-path "$manifest" --target "$target" >&2 || return 1
    local path
    path="$(cargo metadata --locked --offline --filter-platform "$target" --format-version 1 --manifest-path "$manifest" |
        python3 -c 'import json, os, sys
print(next(os.path.dirname(p["manifest_path"]) for p in json.load(sys.stdin)["packages"] if p["name"] == "llama-cpp-sys-2"))')" || return 1
    finish "$path/llama.cpp"
}

from_pypi() {
    command -v python3 >/dev/null || die "python3 is needed to fetch llama.cpp from PyPI"
    python3 -m pip --version >/dev/null 2>&1 || die "python3-pip is needed to fetch llama.cpp from PyPI (apt install python3-pip)"
    local work="$deps/llama-sdist" archive
    mkdir -p "$work"
    archive="$work/llama_cpp_python-$sdist_version.tar.gz"
    if [[ ! -f "$archive" ]] || ! echo "$sdist_sha256  $archive" | sha256sum --check --status; then
        say "getting the llama.cpp source from PyPI (llama-cpp-python $sdist_version, 77 MB)"
        # pip wants the archive's build back end even to download it; it goes into a folder of its own, not into the system.
        python3 -m pip install --quiet --target "$work/backend" scikit-build-core >&2
        PYTHONPATH="$work/backend" python3 -m pip download --quiet --no-deps --no-build-isolation --no-binary :all: \
            --dest "$work" "llama-cpp-python==$sdist_version" >&2
        echo "$sdist_sha256  $archive" | sha256sum --check --status || die "$archive has the wrong sha256; delete it and try again"
    fi
    if ! is_tree "$work/llama.cpp"; then
        rm -rf "$work/unpack" "$work/llama.cpp"
        mkdir -p "$work/unpack"
        tar -xzf "$archive" -C "$work/unpack"
        mv "$work/unpack/llama_cpp_python-$sdist_version/vendor/llama.cpp" "$work/llama.cpp"
        rm -rf "$work/unpack"
    fi
    finish "$work/llama.cpp"
}

case "${RANKGATE_LLAMA_SOURCE:-}" in
    crate) from_crate || die "cargo could not fetch the crate" ;;
    pypi) from_pypi ;;
    "")
        if cargo_ok; then
            from_crate || say "cargo could not fetch the crate; trying PyPI"
        else
            say "no cargo >= 1.85 on PATH; using PyPI"
        fi
        from_pypi
        ;;
    *) die "RANKGATE_LLAMA_SOURCE is '$RANKGATE_LLAMA_SOURCE'; allowed: crate, pypi" ;;
esac
