# Shared by run_short.sh and run_long.sh: builds the test binaries and a Python environment that has the wheel.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
root=$PWD
build=${RELAY_BUILD:-build/relay-tests}
venv=${RELAY_VENV:-build/relay-venv}

say() { printf '\n== %s\n' "$*"; }

build_tests() {
    say "build"
    if [ ! -f "$build/build.ninja" ]; then
        local launcher=()
        if command -v ccache >/dev/null; then
            launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
        fi
        cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DRANKGATE_WITH_LLAMA=OFF "${launcher[@]}" >/dev/null
    fi
    ninja -C "$build" relay_test relay_node relay_process_test relay_controls_test relay_soak | tail -n 1
    bin=$root/$build/src/relay
}

build_python() {
    say "wheel"
    [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
    "$venv/bin/python" -m pip install -q --disable-pip-version-check nanobind scikit-build-core pytest pyzmq msgpack
    "$venv/bin/python" -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w "$venv/dist" ./python
    "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps --force-reinstall "$venv"/dist/rankgate-*.whl
}
