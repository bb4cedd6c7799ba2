#!/usr/bin/env bash
# The relay's figures beside what engines use today, C++ and Python, into build/bench/relay_cpp.json and relay_python.json.
#   FULL=1   the whole matrix of sizes and gaps (about half an hour) instead of the usual part (about five minutes)
#   REQUIRE=5  fail unless gloo count + PUB/SUB is that many times slower than the relay in Python, p50 and p99 (needs torch)
#   RR=1     ranks under SCHED_RR (root): keeps other work on the machine out of the measured part
#   TORCH=1  installs torch into build/bench/venv (3 GB to fetch, 5 GB on disk) for the Python rows of gloo count + PUB/SUB and of
#            SGLang's broadcast. Without it those rows are missing in Python; the C++ table has gloo count + PUB/SUB all the same, from
#            the gloo library itself: no torch, no Python, hence a lower and harder bar.
#   PYTHON   a Python that already has torch, pyzmq and numpy (its venv gets the wheel)
set -euo pipefail
cd "$(dirname "$0")/../.."
build=${RELAY_BENCH_BUILD:-build/relay-bench}
flags=()
[ "${RR:-0}" = 1 ] && flags+=(--rr)
if [ ! -f "$build/build.ninja" ]; then
    launcher=()
    if command -v ccache >/dev/null; then
        launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
    fi
    cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DRANKGATE_WITH_LLAMA=OFF -DRANKGATE_TESTS=OFF -DRANKGATE_BENCH=ON \
        "${launcher[@]}" >/dev/null
fi
ninja -C "$build" relay_bench | tail -n 1
[ -f /usr/include/gloo/broadcast.h ] || echo "gloo is not installed (libgloo-dev): the row 'gloo count + PUB/SUB' is missing in the C++ table"

python=${PYTHON:-build/bench/venv/bin/python}
if [ -z "${PYTHON:-}" ]; then
    [ -x "$python" ] || python3 -m venv build/bench/venv
    "$python" -m pip install -q --disable-pip-version-check pyzmq numpy nanobind scikit-build-core
    [ "${TORCH:-0}" = 1 ] && "$python" -m pip install -q --disable-pip-version-check --no-cache-dir torch
fi
"$python" -m pip install -q --disable-pip-version-check nanobind scikit-build-core
"$python" -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w build/bench/dist ./python
"$python" -m pip install -q --disable-pip-version-check --no-deps --force-reinstall build/bench/dist/rankgate-*.whl

status=0
if [ "${FULL:-0}" = 1 ]; then
    "$build/src/relay/relay_bench" --full "${flags[@]}" --out build/bench/relay_cpp.json || status=1
else
    "$build/src/relay/relay_bench" "${flags[@]}" --out build/bench/relay_cpp.json || status=1
fi
echo
"$python" bench/relay/step_latency.py "${flags[@]}" --ranks 4 --require "${REQUIRE:-0}" --out build/bench/relay_python.json || status=1
exit $status
