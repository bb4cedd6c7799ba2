"""Many raw streams from one thread: enough to hold a thousand of them without a client library in the way."""
from __future__ import annotations

import json
import selectors
import socket
import time


def request(path: str, body: dict, headers: str = "") -> bytes:
    data = json.dumps(body).encode()
    return (f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n{headers}Content-Length: {len(data)}\r\n\r\n").encode() + data


class Stream:
    """One connection with one request on it. `closed_at` is set when the body's end was seen."""

    def __init__(self, port: int, body: dict, path: str = "/v1/completions"):
        self.raw = b""
        self.first_at = self.closed_at = None
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.sock.sendall(request(path, {"model": "m", "stream": True, **body}))
        self.sock.setblocking(False)

    @property
    def status(self) -> int:
        return int(self.raw[9:12] or b"0")

    def take(self) -> bool:
        """Reads what there is; True at the end of the body or connection."""
        try:
            data = self.sock.recv(1 << 16)
        except BlockingIOError:
            return False
        except ConnectionError:
            data = b""
        if data and self.first_at is None:
            self.first_at = time.monotonic()
        self.raw += data
        if not data or self.raw.endswith(b"0\r\n\r\n") or (b"Content-Length" in self.raw and self._whole()):
            self.closed_at = time.monotonic()
            return True
        return False

    def _whole(self) -> bool:
        head, _, body = self.raw.partition(b"\r\n\r\n")
        for line in head.split(b"\r\n"):
            if line.lower().startswith(b"content-length:"):
                return len(body) >= int(line.split(b":")[1])
        return False

    def events(self) -> list:
        body = self.raw.partition(b"\r\n\r\n")[2]
        data = b""
        while body and b"\r\n" in body:
            size, _, rest = body.partition(b"\r\n")
            size = int(size, 16)
            data += rest[:size]
            body = rest[size + 2:]
        return [line[6:] if line == b"data: [DONE]" else json.loads(line[6:]) for line in data.split(b"\n\n") if line.startswith(b"data: ")]

    def text(self) -> str:
        return "".join(c.get("text") or "" for e in self.events() if isinstance(e, dict) for c in e.get("choices", []))

    def error(self) -> dict | None:
        if self.status != 200:
            return json.loads(self.raw.partition(b"\r\n\r\n")[2])["error"]
        for event in self.events():
            if isinstance(event, dict) and "error" in event:
                return event["error"]
        return None

    def done(self) -> bool:
        events = self.events()
        return bool(events) and events[-1] == b"[DONE]"


def run(streams: list[Stream], seconds: float = 120, until=None) -> None:
    """Reads all of them until each has ended or until() is true."""
    selector = selectors.DefaultSelector()
    open_ = 0
    for stream in streams:
        if stream.closed_at is None:
            selector.register(stream.sock, selectors.EVENT_READ, stream)
            open_ += 1
    deadline = time.monotonic() + seconds
    while open_ and not (until and until()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{open_} of {len(streams)} streams have not ended within {seconds} s")
        for key, _ in selector.select(0.05):
            if key.data.take():
                selector.unregister(key.fileobj)
                key.data.sock.close()
                open_ -= 1
    selector.close()
