# SPDX-License-Identifier: Apache-2.0
"""nginx with its defaults in front, and connections that idle as long as proxies pool them. Run by scripts/lanes/judges.sh (lane proxy).

NGINX names the binary. Takes about 100 s, most of it idling in parallel.
"""
import http.client
import os
import pathlib
import sys
import threading
import time

import pytest

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "e2e")]
from conftest import Stack  # noqa: E402
from rankgate_process import Process, free_port, wait_for  # noqa: E402

NGINX = os.environ["NGINX"]
BODY = '{"model":"m","prompt":"x","max_tokens":20,"ignore_eos":true%s}'
JSON = {"Content-Type": "application/json"}


class Nginx(Process):
    """`plain`: nothing but proxy_pass (HTTP/1.0 upstream, one connection a request). `pooled`: upstream keep-alive over HTTP/1.1."""

    def __init__(self, folder: pathlib.Path, upstream: int):
        self.plain, self.pooled = free_port(), free_port()
        config = folder / "nginx.conf"
        config.write_text(f"""
daemon off; pid {folder}/pid; error_log {folder}/error.log; worker_processes 1;
events {{ }}
http {{
  access_log off;
  client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c; uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
  upstream pool {{ server 127.0.0.1:{upstream}; keepalive 8; }}
  server {{ listen 127.0.0.1:{self.plain}; location / {{ proxy_pass http://127.0.0.1:{upstream}; }} }}
  server {{ listen 127.0.0.1:{self.pooled}; location / {{ proxy_pass http://pool; proxy_http_version 1.1; proxy_set_header Connection ""; }} }}
}}""")
        super().__init__([NGINX, "-c", str(config), "-p", str(folder)], folder / "nginx.log")


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    made = Stack(tmp_path_factory.mktemp("proxy"))
    made.start(rank_args=["--sim-step-us", "50000", "--max-num-seqs", "64"])
    yield made
    made.close()


@pytest.fixture(scope="module")
def nginx(stack, tmp_path_factory):
    made = Nginx(tmp_path_factory.mktemp("nginx"), stack.server.port)

    def up():
        assert made.popen.poll() is None, made.text()
        try:
            return get(made.plain, "/health")[0] == 200
        except OSError:
            return False
    wait_for("nginx", up, 10)
    yield made
    made.stop()


def get(port: int, path: str, method: str = "GET", body: str | None = None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, body, JSON if body else {})
    reply = connection.getresponse()
    return reply.status, reply.read()


@pytest.mark.parametrize("kind", ["plain", "pooled"])
def test_each_event_passes_nginx_when_it_is_made(nginx, kind):
    port = getattr(nginx, kind)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    begin = time.monotonic()
    connection.request("POST", "/v1/completions", BODY % ',"stream":true', JSON)
    reply = connection.getresponse()
    assert reply.status == 200 and reply.getheader("content-type").startswith("text/event-stream")
    arrived = []
    for line in reply:
        if line.startswith(b"data: "):
            arrived.append(time.monotonic() - begin)
    assert len(arrived) >= 21
    assert arrived[0] < 0.6, "the first event is not held back"
    gaps = sorted(b - a for a, b in zip(arrived, arrived[1:20]))
    # A buffering proxy hands all of them out at once, at the end.
    assert gaps[len(gaps) // 2] > 0.025 and arrived[19] - arrived[0] > 0.5, arrived


@pytest.mark.parametrize("kind", ["plain", "pooled"])
def test_answers_errors_and_probes_pass_nginx(nginx, kind):
    port = getattr(nginx, kind)
    for _ in range(100):
        assert get(port, "/v1/models")[0] == 200
    assert get(port, "/v1/completions", "POST", BODY % "")[0] == 200
    status, body = get(port, "/v1/completions", "POST", "{")
    assert status == 400 and b'"error"' in body
    assert get(port, "/health", "HEAD") == (200, b"")
    assert get(port, "/nope")[0] == 404


@pytest.mark.parametrize("kind", ["plain", "pooled"])
def test_a_client_of_nginx_that_leaves_is_noticed(stack, nginx, kind):
    server = stack.server
    before = server.metric("rankgate_aborts_total", cause="client_gone")
    connection = http.client.HTTPConnection("127.0.0.1", getattr(nginx, kind), timeout=30)
    connection.request("POST", "/v1/completions", BODY.replace("20", "2000") % ',"stream":true', JSON)
    reply = connection.getresponse()
    reply.readline()
    connection.sock.close()
    reply.close()
    wait_for("the abort", lambda: server.metric("rankgate_aborts_total", cause="client_gone") == before + 1, 1.5)
    server.wait_idle()


def test_idle_connections_can_be_used_again_and_a_silent_stream_lives(stack, tmp_path):
    """4, 6, 60 and 95 s idle, 50 connections each, and a stream whose engine says nothing for 95 s: all at the same time."""
    failures: list[str] = []

    def reuse(seconds: float):
        connection = http.client.HTTPConnection("127.0.0.1", stack.server.port, timeout=60)
        try:
            connection.connect()
            sock = connection.sock
            for pause in (seconds, 0):
                connection.request("GET", "/v1/models")
                reply = connection.getresponse()
                reply.read()
                assert reply.status == 200 and connection.sock is sock
                time.sleep(pause)
            connection.request("POST", "/v1/completions", BODY % "", JSON)
            reply = connection.getresponse()
            reply.read()
            assert reply.status == 200 and connection.sock is sock
        except Exception as error:
            failures.append(f"{seconds} s: {error!r}")
        finally:
            connection.close()

    silent = Stack(tmp_path)
    try:
        server = silent.start(runner="script")
        silent.ranks[0].tell({"rule": {"tokens": [97, 98], "hold": True, "finish": "stop"}})
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        connection.request("POST", "/v1/completions", BODY % ',"stream":true', JSON)
        begin = time.monotonic()
        threads = [threading.Thread(target=reuse, args=(seconds,)) for seconds in (4, 6, 60, 95) for _ in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        time.sleep(max(0.0, 95 - (time.monotonic() - begin)))
        assert server.metric("rankgate_in_flight") == 1
        silent.ranks[0].tell({"do": "release"})
        body = connection.getresponse().read()
        assert body.endswith(b"data: [DONE]\n\n") and b'"text":"a"' in body
    finally:
        silent.close()
    assert not failures, failures[:5]
    assert stack.server.metric("rankgate_http_timeouts_total") == 0

