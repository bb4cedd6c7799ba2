"""The program's outside: signals, exit codes, listeners."""
import fcntl
import json
import os
import pathlib
import signal
import socket
import ssl
import subprocess
import time

import httpx
import pytest

from client import Stream, run
from conftest import LETTERS, SLOWDOWN, free_port, hangup, program, wait_for


def test_sigterm_lets_streams_end_and_refuses_new_work(stack):
    server = stack.start("--shutdown-timeout", "30", rank_args=["--sim-step-us", "20000"])
    streams = [Stream(server.port, {"prompt": "x", "max_tokens": 100, "ignore_eos": True}) for _ in range(20)]
    run(streams, until=lambda: all(s.first_at for s in streams))
    kept = httpx.Client(base_url=server.root, timeout=10)
    assert kept.get("/readiness").status_code == 200
    server.popen.send_signal(signal.SIGTERM)
    wait_for("not ready", lambda: server.get("/readiness")[0] == 503, 2)
    refused = kept.post("/v1/completions", json={"model": "m", "prompt": "x"})
    assert refused.status_code == 503 and refused.headers["connection"] == "close"
    fresh = httpx.post(server.base_url + "/completions", json={"model": "m", "prompt": "x"})
    assert fresh.status_code == 503
    run(streams, seconds=20)
    assert all(s.done() and len(s.text()) == 100 for s in streams)
    assert server.popen.wait(10 * SLOWDOWN) == 0
    assert stack.ranks[0].popen.poll() is None, "engines that others started go on"


def test_sigterm_cuts_what_does_not_end_in_time(stack):
    server = stack.start("--shutdown-timeout", "0.5", rank_args=["--sim-step-us", "50000"])
    streams = [Stream(server.port, {"prompt": "x", "max_tokens": 1000, "ignore_eos": True}) for _ in range(20)]
    run(streams, until=lambda: all(s.first_at for s in streams))
    begin = time.monotonic()
    server.popen.send_signal(signal.SIGTERM)
    run(streams, seconds=10)
    assert server.popen.wait(10 * SLOWDOWN) == 1
    assert time.monotonic() - begin < 5 * SLOWDOWN
    assert all(s.error() and s.error()["code"] == "draining" and not s.done() for s in streams)
    # The rank was told to stop: a new gateway on the same port finds it idle.
    assert stack.ranks[0].popen.poll() is None


def test_sigint_is_130(stack):
    server = stack.start()
    server.popen.send_signal(signal.SIGINT)
    assert server.popen.wait(10 * SLOWDOWN) == 130


def test_a_hangup_drains_unless_it_was_ignored_from_the_start(stack):
    with hangup(signal.SIG_DFL):
        server = stack.start("--shutdown-timeout", "30", rank_args=["--sim-step-us", "10000"])
    streams = [Stream(server.port, {"prompt": "x", "max_tokens": 100, "ignore_eos": True}) for _ in range(5)]
    run(streams, until=lambda: all(s.first_at for s in streams))
    server.popen.send_signal(signal.SIGHUP)
    run(streams, seconds=20)
    assert all(s.done() and len(s.text()) == 100 for s in streams)
    assert server.popen.wait(10 * SLOWDOWN) == 0
    with hangup(signal.SIG_IGN):
        kept = stack.gateway()
    stack.rank(0)
    kept.wait_ready()
    kept.popen.send_signal(signal.SIGHUP)
    assert kept.post("/v1/completions", {"model": "m", "prompt": "x", "max_tokens": 3, "ignore_eos": True})[0] == 200
    assert kept.get("/readiness")[0] == 200
    kept.popen.send_signal(signal.SIGTERM)
    assert kept.popen.wait(10 * SLOWDOWN) == 0


def full_pipe() -> tuple[int, int]:
    """Both ends of a pipe that takes nothing more: the stderr of a program whose reader stands still."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, b"x" * 4096)
    except BlockingIOError:
        pass
    os.set_blocking(write, True)
    os.set_blocking(read, False)
    return read, write


def served(port: int) -> bool:
    """One completion through it, if it is ready."""
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
            return client.get("/readiness").status_code == 200 and client.post(
                "/v1/completions", json={"model": "m", "prompt": "x", "max_tokens": 3, "ignore_eos": True}).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize("command", ["gateway", "serve"])
def test_a_log_that_nobody_reads_stops_nobody(stack, command):
    read, write = full_pipe()
    port = free_port()
    argv = [program(), command, ":bytes:", "--served-model-name", "m", "--port", str(port)]
    if command == "gateway":
        argv += ["--data-parallel-rpc-port", str(stack.rpc_port)]
        stack.rank(0)
    else:
        argv += ["--engine", "llama", "--", "--runner", "sim", "--load-page-dir", str(stack.folder), *LETTERS]
    said = stack.folder / "stdout"
    with said.open("wb") as out:
        server = subprocess.Popen(argv, stdout=out, stderr=write, start_new_session=True)
    try:
        wait_for("served", lambda: served(port), 30)
        if command == "serve":  # which restarts what dies once it was ready, and says so to nobody
            wait_for("ready", lambda: "rankgate is ready" in said.read_text(), 10)
            children = pathlib.Path(f"/proc/{server.pid}/task").glob("*/children")
            os.kill(int(next(text for path in children if (text := path.read_text().split()))[0]), signal.SIGKILL)
            wait_for("served again", lambda: served(port), 30)
        os.read(read, 1 << 20)
        server.send_signal(signal.SIGTERM)
        assert server.wait(20 * SLOWDOWN) == 0
        assert b"log_lines_dropped" in os.read(read, 1 << 20)
    finally:
        server.kill()
        server.wait()
        os.close(read)
        os.close(write)


def test_bad_flags_are_2_and_name_themselves(stack):
    for args, words in [(["--port", "99999"], ["--port", "99999"]), (["--frobnicate"], ["--frobnicate"]),
                        (["--worker", "dp_size=2,rank=1"], ["rank", "ONE worker"]),
                        (["--worker", "path=/nonexistent/m,rpc_port=0"], ["worker: path '/nonexistent/m'"]),
                        (["--data-parallel-address", "0.0.0.0"], ["--allow-remote-engines"]),
                        (["--tool-call-parser", "hermes"], ["--tool-call-parser"])]:
        done = subprocess.run([program(), "gateway", ":bytes:", *args], capture_output=True, text=True, timeout=20)
        assert done.returncode == 2, args
        for word in words:
            assert word in done.stderr, (args, done.stderr)
    done = subprocess.run([program(), "gateway", "/nonexistent/model.gguf"], capture_output=True, text=True, timeout=20)
    assert done.returncode == 2 and "/nonexistent/model.gguf" in done.stderr


def test_a_number_that_is_none_is_refused_by_the_name_of_its_flag():
    for command, flag in ((["bench"], "--timeout"), (["top"], "--interval"), (["gateway", ":bytes:"], "--shutdown-timeout"),
                          (["engine", "m", "--runner", "sim"], "--sim-step-us"), (["engine", "m", "--runner", "sim"], "--frontend-away-timeout")):
        for bad in ("nan", "-1", "1e300"):
            done = subprocess.run([program(), *command, f"{flag}={bad}"], capture_output=True, text=True, timeout=20)
            assert done.returncode == 2 and flag in done.stderr and bad in done.stderr, (command, flag, bad, done)


def test_a_setting_that_no_start_could_use_is_2_and_named(tmp_path):
    def pem(name: str) -> tuple[str, str]:
        cert, key = tmp_path / f"{name}.crt", tmp_path / f"{name}.key"
        subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=t"],
                       check=True, capture_output=True)
        return str(cert), str(key)

    cert, _ = pem("one")
    _, other = pem("two")
    junk = tmp_path / "junk"
    junk.write_text("x")
    remote = ["--allow-remote-engines"]
    for args in (["--host", "no.such.host.invalid"], ["--host", "192.0.2.1"], ["--ssl-certfile", str(junk)], ["--ssl-certfile", cert, "--ssl-keyfile", str(junk)],
                 ["--ssl-certfile", cert, "--ssl-keyfile", other], ["--uds", "/nonexistent/x.sock"], ["--uds", "/tmp/" + "x" * 200], ["--uds", str(junk)],
                 ["--chat-template", "/nonexistent/t.jinja"], ["--socket-dir", str(junk)], ["--socket-dir", "/proc/nonexistent/x"],
                 [*remote, "--data-parallel-address", "192.0.2.1"], [*remote, "--data-parallel-address", "no.such.host.invalid"]):
        done = subprocess.run([program(), "gateway", ":bytes:", "--port", "0", "--data-parallel-rpc-port", "0", *args], capture_output=True, text=True, timeout=20)
        assert done.returncode == 2, (args, done)
        last = done.stderr.splitlines()[-1]
        assert last.startswith("rankgate gateway: ") and args[-2] in last and args[-1] in last, (args, last)
    done = subprocess.run([program(), "serve", ":bytes:", "--engine", "vllm", "--engine-command", "/nonexistent/vllm serve", "--port", "0"], capture_output=True,
                          text=True, timeout=20)
    assert done.returncode == 2 and "--engine-command '/nonexistent/vllm serve'" in done.stderr, done
    done = subprocess.run([program(), "bench", "http://127.0.0.1:1", "--output", "/nonexistent/x"], capture_output=True, text=True, timeout=20)
    assert done.returncode == 2 and "--output /nonexistent/x" in done.stderr, done


def test_an_engine_that_dies_at_its_start_ends_serve_with_3():
    done = subprocess.run([program(), "serve", ":bytes:", "--engine", "vllm", "--engine-command", "/bin/false", "--port", "0"], capture_output=True,
                          text=True, timeout=40)
    assert done.returncode == 3, done.stderr


def test_a_taken_port_is_one_line_and_1(stack):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run([program(), "gateway", ":bytes:", "--port", str(port), "--data-parallel-rpc-port", "0"], capture_output=True,
                              text=True, timeout=20)
        assert done.returncode == 1
        lines = [line for line in done.stderr.splitlines() if line.startswith("rankgate gateway:")]
        assert len(lines) == 1 and str(port) in lines[0] and "--port" in lines[0]


def test_tls(stack):
    cert, key = stack.folder / "c.pem", stack.folder / "k.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2", "-subj",
                    "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    server = stack.gateway("--ssl-certfile", str(cert), "--ssl-keyfile", str(key))
    stack.rank(0, args=["--sim-step-us", "2000"])
    context = ssl.create_default_context(cafile=str(cert))
    with httpx.Client(base_url=server.root.replace("http", "https"), verify=context, timeout=20) as client:
        def ready():
            try:
                return client.get("/readiness").status_code == 200
            except httpx.HTTPError:
                return False
        wait_for("ready over TLS", ready, 20)
        long_prompt = "x" * 1_000_000
        assert client.post("/tokenize", json={"prompt": long_prompt}).json()["count"] == len(long_prompt)
        with client.stream("POST", "/v1/completions", json={"model": "m", "prompt": "x", "max_tokens": 50, "ignore_eos": True, "stream": True}) as reply:
            lines = [line for line in reply.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        assert sum(len(json.loads(line[6:])["choices"][0]["text"]) for line in lines[:-1]) == 50
        # A client that leaves is seen through TLS too.
        with client.stream("POST", "/v1/completions", json={"model": "m", "prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True}) as reply:
            next(reply.iter_lines())
        def open_streams():
            return [line for line in client.get("/metrics").text.splitlines() if line.startswith("rankgate_streams_open ")]
        wait_for("gone", lambda: open_streams() == ["rankgate_streams_open 0"], 3)
    # Plain bytes on a TLS port end the connection and nothing else.
    with socket.create_connection(("127.0.0.1", server.port)) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n")
        plain.settimeout(10)
        assert b"200" not in plain.recv(100)


def test_unix_socket(stack):
    path = str(stack.folder / "api.sock")
    from conftest import Process
    gateway = Process([program(), "gateway", ":bytes:", "--served-model-name", "m", "--uds", path, "--data-parallel-rpc-port", str(stack.rpc_port)],
                      stack.folder / "gateway.log")
    stack.processes.append(gateway)
    stack.rank(0)
    with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://t", timeout=10) as client:
        def ready():
            try:
                return client.get("/readiness").status_code == 200
            except httpx.HTTPError:
                return False
        wait_for("ready", ready, 20)
        assert client.post("/v1/completions", json={"model": "m", "prompt": "x", "max_tokens": 3, "ignore_eos": True}).status_code == 200


def test_the_key_comes_from_the_environment(stack):
    server = stack.gateway(env={"RANKGATE_API_KEY": "k"})
    stack.rank(0)
    server.wait_ready()
    assert server.get("/v1/models")[0] == 401
    assert server.post("/v1/completions", {"model": "m", "prompt": "x", "max_tokens": 1}, headers={"Authorization": "Bearer k"})[0] == 200


def test_a_toml_file_configures_it(stack):
    config = stack.folder / "g.toml"
    config.write_text('api-key = "fromfile"\ndebug_headers = true\n')
    server = stack.gateway("--config", str(config))
    stack.rank(0)
    server.wait_ready()
    assert server.get("/v1/models")[0] == 401
    reply = httpx.post(server.base_url + "/completions", json={"model": "m", "prompt": "x", "max_tokens": 1}, headers={"Authorization": "Bearer fromfile"})
    assert reply.headers["x-rankgate-rank"] == "group0/0"
