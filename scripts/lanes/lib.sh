# Sourced by the lanes: one server, started on a free port and ended for sure. The caller has `set -euo pipefail`.
lane_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$lane_root"

say() { echo "==> $lane: $*"; }

# The program under test: RANKGATE, or the test build, built when it is missing.
lane_program() {
    if [ -z "${RANKGATE:-}" ]; then
        scripts/build.sh dev rankgate
        RANKGATE=$lane_root/build/dev/rankgate
    fi
    export RANKGATE
}

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

# start_server NAME ARGS...: `rankgate serve ARGS` in the background; sets PORT, ROOT, BASE_URL; waits at most LANE_READY_S (120) seconds.
start_server() {
    local name=$1
    shift
    PORT=$(free_port)
    ROOT=http://127.0.0.1:$PORT
    BASE_URL=$ROOT/v1
    export PORT ROOT BASE_URL
    server_log=build/lane-$name.log
    setsid "$RANKGATE" serve "$@" --host 127.0.0.1 --port "$PORT" >"$server_log" 2>&1 &
    server_pid=$!
    trap stop_server EXIT
    local i
    for ((i = 0; i < ${LANE_READY_S:-120} * 5; i++)); do
        if curl -fs -o /dev/null "$ROOT/readiness"; then
            return 0
        fi
        if ! kill -0 "$server_pid" 2>/dev/null; then
            break
        fi
        sleep 0.2
    done
    echo "$lane: the server did not become ready; its last lines:" >&2
    tail -30 "$server_log" >&2
    return 1
}

stop_server() {
    if [ -n "${server_pid:-}" ]; then
        kill -TERM "$server_pid" 2>/dev/null || true
        local i
        for ((i = 0; i < 200; i++)); do
            kill -0 "$server_pid" 2>/dev/null || break
            sleep 0.1
        done
        kill -KILL -- "-$server_pid" 2>/dev/null || true
        wait "$server_pid" 2>/dev/null || true
        server_pid=
    fi
}

# venv DIR PACKAGE...: a virtual environment with exactly these, made once for each list.
lane_venv() {
    local dir=$1 want
    shift
    want="$*"
    if [ ! -e "$dir/.packages" ] || [ "$(cat "$dir/.packages")" != "$want" ]; then
        say "making $dir"
        rm -rf "$dir"
        python3 -m venv "$dir"
        "$dir/bin/pip" install -q uv
        "$dir/bin/uv" pip install -q --python "$dir/bin/python" "$@"
        echo "$want" >"$dir/.packages"
    fi
}

# Node for the JavaScript clients: the one on the PATH from version 18 on, else Debian's.
lane_node() {
    if ! command -v node >/dev/null || [ "$(node -p 'process.versions.node.split(".")[0]')" -lt 18 ] || ! command -v npm >/dev/null; then
        say "installing nodejs and npm"
        apt-get install -y -qq --no-install-recommends nodejs npm >/dev/null
    fi
}
