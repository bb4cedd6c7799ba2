"""Bodies that no well-meaning client sends: each is answered in the client's terms, the rank lives, and a stream beside them goes on."""
import json
import re
import socket
import time

import httpx
import pytest

from client import Stream, request, run
from conftest import SLOWDOWN, Stack, sanitizer_reports
from odd_values import CHAT, COMPLETIONS, DEEP, DETOKENIZE, GOOD_MESSAGES, MESSAGES, PROMPTS, ROOTS, TOKENIZE, VALUES, base, text


def error_of(reply: httpx.Response) -> dict:
    """The error object of a reply that is one, with all that clients read in it."""
    assert reply.headers["content-type"].startswith("application/json"), reply.headers
    error = json.loads(reply.content.decode("utf-8", "strict"))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
    assert len(error["message"]) < 9000
    assert "x-request-id" in reply.headers
    return error


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    before = sanitizer_reports()
    made = Stack(tmp_path_factory.mktemp("hostile"))
    made.start(rank_args=["--sim-eos-after", "3", "--max-num-seqs", "64"])
    yield made
    server = made.server
    # After everything: the rank never died, nothing is held, and it still answers.
    assert made.ranks[0].popen.poll() is None
    server.wait_idle(5)
    assert server.metric("rankgate_decode_errors_total") == 0
    assert server.post("/v1/completions", {"model": "m", "prompt": "x", "max_tokens": 2})[0] == 200
    made.close()
    after = sanitizer_reports()
    assert after == before, after


@pytest.fixture(scope="module")
def http(served):
    with httpx.Client(base_url=served.server.root, timeout=30 * SLOWDOWN) as client:
        yield client


@pytest.mark.parametrize("path,fields", [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETIONS), ("/tokenize", TOKENIZE),
                                         ("/detokenize", DETOKENIZE)])
def test_every_field_takes_null_and_refuses_odd_values_by_its_own_name(http, path, fields):
    answered = refused = 0
    for field in fields:
        for value in ["null", *VALUES]:
            body = base(path)
            body[field] = value
            if field in ("stream_options", "n") or value == "null":
                body.setdefault("stream", "false")
            reply = http.post(path, content=text(body), headers={"Content-Type": "application/json"})
            shown = (path, field, value[:60], reply.status_code, reply.text[:300])
            if reply.status_code == 200:
                answered += 1
                continue
            error = error_of(reply)
            assert reply.status_code in (400, 404), shown
            assert reply.status_code == 400 or (field == "model" and error["code"] == "model_not_found"), shown
            if value == "null":
                assert field in ("messages", "prompt", "tokens"), shown  # null means absent, so only what is required is missed
            if field == "content" and error["param"] == "prompt":
                continue  # another name of the same thing
            assert error["param"] is not None and error["param"].startswith(field), shown
            refused += 1
    assert answered > len(fields) and refused > len(fields) * 5


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_bodies_that_are_no_json_object_are_a_400_and_the_connection_lives(http, path):
    for body in ROOTS:
        reply = http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert reply.status_code == 400, (path, body[:60], reply.status_code, reply.text[:200])
        error_of(reply)
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize("stream", ["false", "true"])
def test_prompts_of_every_shape(http, stream):
    for prompt, status in PROMPTS.items():
        reply = http.post("/v1/completions", content=text({**base("/v1/completions"), "prompt": prompt, "stream": stream}))
        assert reply.status_code == status, (prompt, reply.text[:200])
        if status == 400:
            assert error_of(reply)["param"] == "prompt", (prompt, reply.text)


def test_messages_of_every_shape(http):
    for messages, param in MESSAGES:
        reply = http.post("/v1/chat/completions", content=text({**base("/chat/completions"), "messages": messages}))
        assert reply.status_code == 400, (messages[:120], reply.text[:200])
        assert error_of(reply)["param"] == param, (messages[:120], reply.text)
    for messages in GOOD_MESSAGES:
        reply = http.post("/v1/chat/completions", content=text({**base("/chat/completions"), "messages": messages}))
        assert reply.status_code == 200, (messages, reply.text[:200])


CAPS = {"0": 400, "-1": 400, "1": 200, "1.0": 200, "1.5": 400, '"5"': 400, "4096": 400, "4095": 400, "1000000000000000000": 400, "1e18": 400,
        "1e999": 400, "true": 400, "[1]": 400}


def test_caps_at_and_beyond_their_limits(http):
    for field in ("max_tokens", "max_completion_tokens"):
        for cap, status in CAPS.items():
            for path in ("/v1/chat/completions", "/v1/completions"):
                body = base(path)
                del body["max_tokens"]
                reply = http.post(path, content=text({**body, field: cap}))
                assert reply.status_code == status, (path, field, cap, reply.text[:200])
                if status == 400:
                    error = error_of(reply)
                    assert error["param"] == field, (path, field, cap, reply.text)
                    if cap in ("4096", "4095", "1000000000000000000"):
                        assert error["code"] == "context_length_exceeded" and "maximum context length is 4096" in error["message"]
                else:
                    choice = reply.json()["choices"][0]
                    assert choice["finish_reason"] == "length" and reply.json()["usage"]["completion_tokens"] == 1


def test_unknown_fields_of_any_kind_are_taken(http):
    extra = {"metadata": '{"a":"b"}', "store": "true", "user": '"u"', "service_tier": '"auto"', "prompt_cache_key": '"k"',
             "safety_identifier": '"s"', "verbosity": '"low"', "parallel_tool_calls": "false", "frobnicate": DEEP, "\\u0000": "1", "": "2"}
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert http.post(path, content=text({**base(path), **extra})).status_code == 200
        many = {f"x{i}": "[]" for i in range(50_000)}
        assert http.post(path, content=text({**base(path), **many})).status_code == 200


def test_a_stream_beside_them_is_not_disturbed(served, http):
    server = served.server
    stream = Stream(server.port, {"prompt": "x", "max_tokens": 3000, "ignore_eos": True})
    for body in ROOTS:
        assert http.post("/v1/completions", content=body).status_code == 400
    run([stream], seconds=60 * SLOWDOWN)
    assert stream.done() and len(stream.text()) == 3000


def exchange(port: int, data: bytes, seconds: float = 5) -> bytes:
    """What comes back until the server closes or falls silent."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as sock:
        sock.sendall(data)
        sock.settimeout(0.6 * SLOWDOWN)
        got = b""
        try:
            while piece := sock.recv(1 << 16):
                got += piece
        except TimeoutError:
            pass
        except ConnectionError:
            pass
        return got


def statuses(got: bytes) -> list[int]:
    return [int(code) for code in re.findall(rb"HTTP/1\.1 (\d{3}) ", got)]


WHOLE = json.dumps({"model": "m", "prompt": "x", "max_tokens": 1}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize("data,status", [
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 40, 400),
    (b"GET / HTTP/3.0\r\n\r\n", 400),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100, 400),
    (b"GET /health\r\n\r\n", 400),
    (b"GET  /health HTTP/1.1\r\nHost: t\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost t\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost : t\r\n\r\n", 400),
    (HEAD + b"Content-Length: 1\r\n 0\r\n\r\n" + b"x" * 10, 400),
    (HEAD + b"Content-Length: -1\r\n\r\n", 400),
    (HEAD + b"Content-Length: 1x\r\n\r\n", 400),
    (HEAD + b"Content-Length: 99999999999999999999\r\n\r\n", 400),
    (HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", 400),
    (HEAD + b"Content-Length: 99999999999\r\n\r\n", 413),
    (HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", 400),
    (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501),
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n", 400),
    (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n\x1f\x8b", 415),
    (HEAD.replace(b"json", b"xml") + b"Content-Length: 2\r\n\r\n{}", 415),
    (HEAD.replace(b"application/json", b"multipart/form-data; boundary=x") + b"Content-Length: 2\r\n\r\n{}", 415),
    (b"BREW /v1/completions HTTP/1.1\r\nHost: t\r\n\r\n", 405),
    (b"CONNECT example.com:443 HTTP/1.1\r\nHost: t\r\n\r\n", 404),
    (b"TRACE /health HTTP/1.1\r\nHost: t\r\n\r\n", 405),
    (b"GET /%00 HTTP/1.1\r\nHost: t\r\n\r\n", 404),
    (b"GET /v1/models/%ff%fe HTTP/1.1\r\nHost: t\r\n\r\n", 400),
    (b"GET /v1/models/../../etc/passwd HTTP/1.1\r\nHost: t\r\n\r\n", 404),
    (b"GET /\xff\xfe HTTP/1.1\r\nHost: t\r\n\r\n", 404),
])
def test_broken_and_foreign_protocols_get_an_error_object(served, data, status):
    got = exchange(served.server.port, data)
    assert got.startswith(b"HTTP/1.1 %d " % status), (data[:60], got[:200])
    head, _, body = got.partition(b"\r\n\r\n")
    assert b"application/json" in head and set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_every_route_answers_every_method(http):
    routes = {"/v1/chat/completions": "POST", "/v1/completions": "POST", "/v1/models": "GET", "/v1/models/m": "GET", "/health": "GET",
              "/liveness": "GET", "/readiness": "GET", "/metrics": "GET", "/version": "GET", "/load": "GET", "/tokenize": "POST",
              "/detokenize": "POST", "/workers": "GET"}
    for path, good in routes.items():
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND"):
            if (method, path) == ("POST", "/workers"):
                continue  # would add a group
            reply = http.request(method, path, content=b"{}" if method in ("POST", "PUT", "PATCH") else None)
            allowed = {good, "OPTIONS"} | ({"HEAD"} if good == "GET" else set()) | ({"POST"} if path == "/workers" else set())
            if method in allowed:
                assert reply.status_code < 500 and reply.status_code != 405, (method, path, reply.status_code)
            else:
                assert reply.status_code == 405, (method, path, reply.status_code)
                assert good in reply.headers["allow"], (method, path, reply.headers)
            if method == "HEAD":
                assert reply.content == b""
    # A HEAD says what GET says.
    for path in ("/v1/models", "/health", "/version"):
        head, get = http.head(path), http.get(path)
        assert head.status_code == get.status_code == 200 and head.headers["content-length"] == get.headers["content-length"]


def test_pipelined_and_broken_requests_stay_in_step(served):
    ask = HEAD + b"Content-Length: %d\r\n\r\n" % len(WHOLE) + WHOLE
    bad = HEAD + b"Content-Length: 1\r\n\r\n{"
    probe = b"GET /liveness HTTP/1.1\r\nHost: t\r\n\r\n"
    with_body = b"DELETE /workers/none HTTP/1.1\r\nHost: t\r\nContent-Length: 33\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: t\r\n\r\n"[:-1]
    got = exchange(served.server.port, ask + probe + bad + ask + probe)
    assert statuses(got) == [200, 200, 400, 200, 200]
    # A body where none belongs is never read as the next request.
    got = exchange(served.server.port, with_body)
    assert len(statuses(got)) == 1


def test_a_body_that_is_shorter_than_said_holds_nothing(served):
    server = served.server
    socks = []
    for _ in range(50):
        sock = socket.create_connection(("127.0.0.1", server.port))
        sock.sendall(HEAD + b"Content-Length: 1000\r\n\r\n" + WHOLE)
        socks.append(sock)
    time.sleep(0.1)
    assert server.metric("rankgate_in_flight") == 0
    for sock in socks:
        sock.close()
    server.wait_idle()
    # More than said: the rest is the next request, and it is refused as one.
    got = exchange(server.port, HEAD + b"Content-Length: %d\r\n\r\n" % len(WHOLE) + WHOLE + b"}}}}\r\n\r\n")
    assert statuses(got) == [200, 400]


def test_one_byte_at_a_time(served):
    data = request("/v1/completions", {"model": "m", "prompt": "x", "max_tokens": 1})
    with socket.create_connection(("127.0.0.1", served.server.port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for i in range(len(data)):
            sock.sendall(data[i:i + 1])
        sock.settimeout(5 * SLOWDOWN)
        assert sock.recv(100).startswith(b"HTTP/1.1 200 ")


def test_content_types_that_mean_json_are_taken(http):
    for kind in ("application/json", "application/json; charset=utf-8", "APPLICATION/JSON;charset=UTF-8", "application/json ; x=\"y\"", None, ""):
        headers = {} if kind is None else {"Content-Type": kind}
        assert http.post("/v1/completions", content=WHOLE, headers=headers).status_code == 200, kind
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/jsonx", "json"):
        reply = http.post("/v1/completions", content=WHOLE, headers={"Content-Type": kind})
        assert reply.status_code == 415 and error_of(reply)["code"] == "unsupported_media_type", kind


def test_head_and_body_of_a_reply_leave_together(served):
    """Two small writes cost 40 ms a request on a connection without TCP_NODELAY at its other end."""
    took = []
    with socket.create_connection(("127.0.0.1", served.server.port)) as sock:
        for _ in range(60):
            begin = time.monotonic()
            sock.sendall(b"GET /v1/models HTTP/1.1\r\nHost: t\r\n\r\n")
            got = sock.recv(1 << 16)
            took.append(time.monotonic() - begin)
            assert got.count(b"\r\n\r\n") == 1 and got.endswith(b"}")
    assert sorted(took)[30] < 0.02 * SLOWDOWN
