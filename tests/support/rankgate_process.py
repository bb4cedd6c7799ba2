"""Starts the built program for the Python lanes: free ports, readiness, metrics, a bounded stop.

RANKGATE names the program (default: build/dev/rankgate, else build/release/rankgate). RANKGATE_TEST_SLOWDOWN (default 1) stretches
every limit that a test sets itself: a program under a sanitizer is several times slower. RANKGATE_REPORTS names the folder that
sanitizers write their reports to; then a file in it fails the test, and programs are ended so that they can report leaks.
"""
from __future__ import annotations

import contextlib
import http.client
import json
import os
import pathlib
import signal
import socket
import subprocess
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
SLOWDOWN = float(os.environ.get("RANKGATE_TEST_SLOWDOWN", "1"))
REPORTS = pathlib.Path(os.environ["RANKGATE_REPORTS"]) if os.environ.get("RANKGATE_REPORTS") else None


@contextlib.contextmanager
def hangup(action):
    """Programs started meanwhile find SIGHUP like this: signal.SIG_DFL as in a terminal, signal.SIG_IGN as under nohup, whatever it is here."""
    before = signal.signal(signal.SIGHUP, action)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def program() -> str:
    named = os.environ.get("RANKGATE")
    if named:
        return named
    for preset in ("dev", "release"):
        path = ROOT / "build" / preset / "rankgate"
        if path.exists():
            return str(path)
    raise SystemExit("no rankgate program: run `make build` or `make test` first")


def shared() -> pathlib.Path:
    """The folder with the tools that run real engines (RANKGATE_SHARED, default: shared/ beside the checkout)."""
    path = pathlib.Path(os.environ.get("RANKGATE_SHARED", ROOT.parent / "shared"))
    if not (path / "tools").is_dir():
        raise SystemExit(f"{path}/tools is missing: set RANKGATE_SHARED to the folder that holds tools/vllm_live and tools/tokenspeed_live")
    return path


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for(what: str, condition, seconds: float, interval: float = 0.05):
    """Polls until condition() is truthy and returns it; fails by name after the deadline."""
    seconds *= SLOWDOWN
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds} s")
        time.sleep(interval)


def sanitizer_reports() -> str:
    """What sanitizers wrote since the start of the run; empty without a sanitizer."""
    return "".join(f"--- {path.name}\n{path.read_text(errors='replace')[:20000]}\n" for path in sorted(REPORTS.iterdir())) if REPORTS else ""


class Process:
    """One child with its output in a file, ended for sure."""

    def __init__(self, argv: list[str], log: pathlib.Path, env: dict | None = None, stdin=None):
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(log, "ab")
        self.popen = subprocess.Popen(argv, stdout=self._file, stderr=subprocess.STDOUT, stdin=stdin, start_new_session=True,
                                      env={**os.environ, **(env or {})})

    @property
    def pid(self) -> int:
        return self.popen.pid

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self, seconds: float = 40) -> None:
        """Kills it; under a sanitizer it ends by itself first, for its leaks to be seen. Not ending is a failure there."""
        if REPORTS and self.popen.poll() is None:
            self.popen.send_signal(signal.SIGCONT)
            self.popen.send_signal(signal.SIGTERM)
            try:
                self.popen.wait(seconds)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{self.popen.args} did not end within {seconds} s of SIGTERM:\n" + self.text()[-3000:]) from None
            finally:
                self.popen.kill()
                self.popen.wait()
        self.popen.kill()
        self.popen.wait()

    def stop(self, sig: int = signal.SIGTERM, seconds: float = 40) -> int:
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGCONT)
            self.popen.send_signal(sig)
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()
            raise AssertionError(f"did not end within {seconds} s of signal {sig}:\n" + self.text()[-3000:])
        finally:
            try:
                os.killpg(self.popen.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._file.close()


class Server(Process):
    """`rankgate serve` or `rankgate gateway` on a free port."""

    def __init__(self, command: str, args: list[str], log: pathlib.Path, port: int | None = None, env: dict | None = None,
                 engine_args: list[str] | None = None):
        self.port = port or free_port()
        argv = [program(), command, *args, "--host", "127.0.0.1", "--port", str(self.port)]
        if engine_args is not None:
            argv += ["--", *engine_args]
        super().__init__(argv, log, env)
        self.root = f"http://127.0.0.1:{self.port}"
        self.base_url = self.root + "/v1"

    def get(self, path: str, timeout: float = 10) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def post(self, path: str, body: dict, timeout: float = 120, headers: dict | None = None) -> tuple[int, dict]:
        request = urllib.request.Request(self.root + path, json.dumps(body).encode(),
                                         {"Content-Type": "application/json", **(headers or {})})
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                return reply.status, json.loads(reply.read() or b"null")
        except urllib.error.HTTPError as error:
            raw = error.read()
            try:
                return error.code, json.loads(raw)
            except ValueError:
                return error.code, {"raw": raw.decode(errors="replace")}

    def stream(self, path: str, body: dict, timeout: float = 120):
        """Yields the decoded JSON of each event until [DONE] or the end of the body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request("POST", path, json.dumps({**body, "stream": True}), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            if reply.status != 200:
                yield {"status": reply.status, **json.loads(reply.read() or b"{}")}
                return
            for line in reply:
                line = line.strip()
                if line.startswith(b"data: "):
                    if line == b"data: [DONE]":
                        yield {"done": True}
                        return
                    yield json.loads(line[6:])
        finally:
            connection.close()

    def ready(self) -> bool:
        if self.popen.poll() is not None:
            raise AssertionError(f"the server ended with {self.popen.returncode}:\n" + self.text()[-4000:])
        try:
            return self.get("/readiness", timeout=5)[0] == 200
        except OSError:
            return False

    def wait_ready(self, seconds: float = 60) -> "Server":
        try:
            wait_for("readiness", self.ready, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text()[-4000:]}") from None
        return self

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of `name` whose labels match; 0 if there is none."""
        total = 0.0
        for line in self.get("/metrics")[1].decode().splitlines():
            if line.startswith(name) and line[len(name)] in "{ " and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def idle(self) -> bool:
        return self.metric("rankgate_in_flight") == 0 and self.metric("rankgate_streams_open") == 0

    def wait_idle(self, seconds: float = 2) -> None:
        wait_for("no slot and no stream left", self.idle, seconds)
