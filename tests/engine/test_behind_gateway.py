"""`rankgate gateway` in front of `rankgate engine`, both as real processes, on both wires: the runtime that nobody declared, and what the
gateway knows of a rank's load."""
import json
import pathlib
import signal
import socket
import sys
import threading
import time

import msgspec
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from rankgate_process import Process, Server, free_port, program, wait_for  # noqa: E402

WIRES = ["vllm", "tokenspeed"]


class Pair:
    """One gateway and the ranks that dial it."""

    def __init__(self, folder: pathlib.Path):
        self.folder, self.rpc_port, self.port = folder, free_port(), free_port()
        self.processes: list[Process] = []
        self.ranks: dict[int, Process] = {}

    def gateway(self, *args: str, ranks: int = 1) -> Server:
        self.size = ranks
        self.server = Server("gateway", [":bytes:", "--served-model-name", "m", "--data-parallel-size", str(ranks), "--data-parallel-rpc-port",
                                         str(self.rpc_port), *args], self.folder / f"gateway{len(self.processes)}.log", port=self.port)
        self.processes.append(self.server)
        wait_for("the gateway answers", self.answers, 20)
        return self.server

    def answers(self) -> bool:
        try:
            return self.server.get("/liveness")[0] == 200
        except OSError:
            return False

    def rank(self, index: int, wire: str, *args: str) -> Process:
        runner = [] if "--runner" in args else ["--runner", "sim"]
        argv = [program(), "engine", "sim", *runner, "--wire", wire, "--data-parallel-size", str(self.size), "--data-parallel-rank",
                str(index), "--data-parallel-rpc-port", str(self.rpc_port), "--load-page-dir", str(self.folder / "load"), "--sim-vocab-size",
                "259", "--sim-first-token", "97", "--sim-last-token", "122", "--sim-eos-token", "257", "--max-model-len", "4096", *args]
        self.ranks[index] = Process(argv, self.folder / f"rank{index}-{len(self.processes)}.log")
        self.processes.append(self.ranks[index])
        return self.ranks[index]

    def group(self) -> dict:
        return json.loads(self.server.get("/health")[1])["groups"][0]

    def wait_live(self, count: int, seconds: float = 20) -> None:
        wait_for(f"{count} live", lambda: self.group()["live"] == count, seconds)

    def complete(self, timeout: float = 30, **body):
        return self.server.post("/v1/completions", {"model": "m", "prompt": "hello", "max_tokens": 8, "ignore_eos": True, **body}, timeout)

    def stream(self, **body) -> str:
        events = list(self.server.stream("/v1/completions", {"model": "m", "prompt": "hello", "max_tokens": 8, "ignore_eos": True, **body}))
        assert events[-1] == {"done": True}, events
        return "".join(e["choices"][0]["text"] for e in events if e.get("choices"))

    def reported(self, rank: int = 0) -> tuple:
        """What the gateway knows: running, waiting, part of the pages in use."""
        engine = str(rank)
        return (self.server.metric("vllm:num_requests_running", engine=engine), self.server.metric("vllm:num_requests_waiting", engine=engine),
                self.server.metric("rankgate_rank_kv_usage", rank=engine))

    def close(self):
        for process in self.processes:
            process.end()


@pytest.fixture
def pair(tmp_path):
    made = Pair(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("wire", WIRES)
def test_an_undeclared_runtime_is_that_of_the_engines(pair, wire):
    server = pair.gateway(ranks=2)
    assert pair.group()["runtime"] == "auto"
    assert pair.complete(timeout=5)[0] == 503, "nobody is there yet, and nobody waits"
    for rank in range(2):
        pair.rank(rank, wire)
    server.wait_ready()
    pair.wait_live(2)
    assert pair.group()["runtime"] == wire
    whole = pair.complete()
    assert whole[0] == 200 and whole[1]["usage"]["completion_tokens"] == 8, whole
    assert len(pair.stream()) == 8
    for rank in range(2):
        status, reply = pair.complete(data_parallel_rank=rank)
        assert status == 200, reply
    # The rules of the wire that was found, not of the flag.
    status, reply = pair.complete(allowed_token_ids=[97])
    assert (status == 200) == (wire == "vllm"), reply
    status, reply = pair.complete(seed=-1)
    assert (status == 200) == (wire == "vllm"), reply
    # Both wires name the stop token that ended a request; it is not part of the text.
    text = pair.stream(max_tokens=30, temperature=0)
    stop = ord(text[4])
    status, reply = pair.complete(max_tokens=30, temperature=0, stop_token_ids=[stop], ignore_eos=False)
    choice = reply["choices"][0]
    assert status == 200 and choice["finish_reason"] == "stop" and choice["stop_reason"] == stop, reply
    assert chr(stop) not in choice["text"] and text.startswith(choice["text"])
    server.wait_idle()


@pytest.mark.parametrize("wire", WIRES)
def test_a_restarted_gateway_finds_running_engines_of_either_wire(pair, wire):
    sockets = str(pair.folder / "sockets")
    server = pair.gateway("--socket-dir", sockets, ranks=2)
    for rank in range(2):
        pair.rank(rank, wire)
    server.wait_ready()
    pair.wait_live(2)
    pair.complete()
    for how in (signal.SIGKILL, signal.SIGTERM):
        server.stop(how)
        server = pair.gateway("--socket-dir", sockets, ranks=2)
        server.wait_ready()
        pair.wait_live(2)
        assert pair.group()["runtime"] == wire
        assert len(pair.stream()) == 8
        for rank in range(2):
            assert pair.complete(data_parallel_rank=rank)[0] == 200
    assert all(process.popen.poll() is None for process in pair.ranks.values())


@pytest.mark.parametrize("first,second", [WIRES, WIRES[::-1]])
def test_a_group_of_two_runtimes_is_refused_by_name_and_goes_on(pair, first, second):
    server = pair.gateway(ranks=2)
    pair.rank(0, first)
    pair.wait_live(1)
    pair.rank(1, second)
    wait_for("the refusal in /health", lambda: pair.group()["ranks"][1].get("reason", "").startswith("refused"), 20)
    reason = pair.group()["ranks"][1]["reason"]
    assert first in reason and second in reason, reason
    assert reason in server.text()
    assert len(pair.stream()) == 8
    pair.ranks[1].end()
    pair.rank(1, first)
    pair.wait_live(2)
    assert pair.complete(data_parallel_rank=1)[0] == 200


@pytest.mark.parametrize("declared,real", [WIRES, WIRES[::-1]])
def test_a_wrong_declaration_is_refused_by_name(pair, declared, real):
    server = pair.gateway("--runtime", declared)
    pair.rank(0, real)
    wait_for("the refusal in /health", lambda: pair.group()["ranks"][0].get("reason", "").startswith("refused"), 20)
    reason = pair.group()["ranks"][0]["reason"]
    assert declared in reason and real in reason and "--runtime" in reason, reason
    assert reason in server.text()
    assert server.get("/health")[0] == 503 and pair.complete(timeout=5)[0] == 503


def burst(pair: Pair, count: int = 24) -> None:
    """More than fits at once, so that some wait; all done when it returns."""
    results = []
    threads = [threading.Thread(target=lambda i=i: results.append(pair.complete(prompt="p" * (20 + i), max_tokens=40)[0])) for i in range(count)]
    for t in threads:
        t.start()
    wait_for("work in the engine", lambda: pair.server.metric("rankgate_in_flight") > 4, 10, 0.005)
    for t in threads:
        t.join(60)
    assert results == [200] * count


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("page", [True, False])
def test_after_a_burst_the_gateway_knows_that_the_rank_is_idle(pair, wire, page):
    server = pair.gateway()
    pair.rank(0, wire, "--max-num-seqs", "4", "--sim-step-us", "2000", *([] if page else ["--no-load-page"]))
    server.wait_ready()
    burst(pair)
    server.wait_idle()
    # No traffic from here on. The pages that the prefix cache keeps are not in use.
    wait_for("idle as the rank itself says", lambda: pair.reported() == (0, 0, 0), 2)
    assert wait_for("an age", lambda: server.metric("rankgate_rank_load_age_seconds", rank="0") >= 0, 2)
    if page:
        assert pair.complete()[0] == 200
        wait_for("idle again", lambda: pair.reported() == (0, 0, 0), 2)


def test_in_the_upstream_order_the_last_word_stays_busy(pair):
    server = pair.gateway()
    pair.rank(0, "tokenspeed", "--max-num-seqs", "4", "--sim-step-us", "2000", "--no-load-page", "--stale-load")
    server.wait_ready()
    burst(pair)
    server.wait_idle()
    with pytest.raises(AssertionError):
        wait_for("idle", lambda: pair.reported() == (0, 0, 0), 1.5)
    running, _, usage = pair.reported()
    assert running > 0 and usage > 0
    # It is chosen all the same: a rank of whom nothing is in flight is idle, whatever it said.
    assert pair.complete()[0] == 200


@pytest.mark.parametrize("wire", WIRES)
def test_the_gateway_prefers_the_shared_page(pair, wire):
    server = pair.gateway(ranks=2)
    pair.rank(0, wire, "--sim-step-us", "3000")
    pair.rank(1, wire, "--sim-step-us", "3000", "--no-load-page")
    server.wait_ready()
    pair.wait_live(2)
    threads = [threading.Thread(target=pair.complete, kwargs={"max_tokens": 1000, "data_parallel_rank": i % 2}) for i in range(4)]
    for t in threads:
        t.start()
    source = lambda rank: pair.group()["ranks"][rank]["load_source"]  # noqa: E731
    wait_for("the page is read", lambda: source(0) == "mailbox", 5, 0.01)
    wait_for("reports are read", lambda: source(1) == "report", 5, 0.01)
    for t in threads:
        t.join(60)


class Told:
    """A script rank on the TokenSpeed wire that says its rows as told: the raw batch, whatever its shape."""

    def __init__(self, pair: Pair):
        self.pair, self.path = pair, pair.folder / "script"
        pair.gateway()
        pair.rank(0, "tokenspeed", "--runner", "script", "--script-socket", str(self.path))
        pair.server.wait_ready()
        self.line = socket.socket(socket.AF_UNIX)
        self.line.settimeout(10)
        self.line.connect(str(self.path))
        self.file = self.line.makefile("r")
        self.tell(rule={"hold": True})

    def tell(self, **what) -> dict:
        self.line.sendall(json.dumps(what).encode() + b"\n")
        answer = json.loads(self.file.readline())
        assert answer["ok"], answer
        return answer

    def ids(self) -> list[str]:
        return self.tell(get="state")["ids"]

    def rows(self, *rows: tuple[str, list[int], str]) -> None:
        batch = ["BatchTokenIDOutSlim", [r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows], [1] * len(rows), [1] * len(rows),
                 [0] * len(rows), [[]] * len(rows), [[]] * len(rows), 0, 1, 0, 1, 64]
        self.tell(do="raw", hex=[msgspec.msgpack.encode(batch).hex()])


@pytest.fixture
def told(pair):
    made = Told(pair)
    yield made
    made.line.close()


@pytest.mark.parametrize("first,shown", [([104], "h"), ([0xC3], "\ufffd"), ([], "")])
def test_first_and_last_chunk_of_a_choice_whatever_the_rows_hold(told, first, shown):
    """A02: a first token (or half a character), silence, and a terminal row without tokens."""
    events = []
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 50}
    reader = threading.Thread(target=lambda: events.extend(told.pair.server.stream("/v1/chat/completions", body)))
    reader.start()
    (rid,) = wait_for("the request", told.ids, 10, 0.01)
    if first:
        told.rows((rid, first, ""))
    time.sleep(0.5)
    told.rows((rid, [], "stop"))
    reader.join(20)
    assert events[-1] == {"done": True}, events
    choices = [e["choices"][0] for e in events[:-1] if e.get("choices")]
    assert choices[0]["delta"]["role"] == "assistant" and isinstance(choices[0]["delta"].get("content", ""), str)
    assert all(c["delta"].get("role", "assistant") is not None and c["delta"].get("content", "") is not None for c in choices)
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"], "the key is there from the start"
    assert "".join(c["delta"].get("content", "") for c in choices) == shown
    told.pair.server.wait_idle()


@pytest.mark.parametrize("word", ["abort", "banana", "error"])
@pytest.mark.parametrize("streamed", [False, True])
def test_an_end_that_is_none_of_the_good_ones_does_not_look_like_one(told, word, streamed):
    """F04, A04: an abort nobody asked for, and words that nobody knows."""
    got = []
    body = {"model": "m", "prompt": "x", "max_tokens": 50}
    ask = (lambda: got.extend(told.pair.server.stream("/v1/completions", body))) if streamed else \
        (lambda: got.append(told.pair.server.post("/v1/completions", body)))
    reader = threading.Thread(target=ask)
    reader.start()
    (rid,) = wait_for("the request", told.ids, 10, 0.01)
    if streamed:
        told.rows((rid, [104, 105], ""))
        wait_for("a token", lambda: got, 10, 0.01)
    told.rows((rid, [], word))
    reader.join(20)
    if streamed:
        reasons = [c.get("finish_reason") for e in got for c in e.get("choices", [])]
        assert any("error" in e for e in got), got
        assert not any(reasons), "no good end in the stream"
    else:
        assert got[0][0] >= 500 and got[0][1]["error"]["message"], got
    told.pair.server.wait_idle()


def test_rows_of_one_batch_go_to_their_own_requests_and_a_ragged_batch_to_none(told):
    """F04: columns that disagree in length, twice the same rid, no rows at all."""
    replies = {}
    threads = [threading.Thread(target=lambda i=i: replies.__setitem__(i, told.pair.complete(prompt="p" * (i + 1)))) for i in range(3)]
    for i, t in enumerate(threads):
        t.start()
        wait_for("the request", lambda: len(told.ids()) == i + 1, 10, 0.01)
    ids = told.ids()
    ragged = ["BatchTokenIDOutSlim", ids, [[120]], [""] * 3, [1] * 3, [1] * 3, [0] * 3, [[]] * 3, [[]] * 3, 0]
    told.tell(do="raw", hex=[msgspec.msgpack.encode(ragged).hex()])
    told.rows()
    told.rows((ids[0], [97], ""), (ids[1], [98], "length"), (ids[0], [100], "length"), (ids[2], [99], "length"))
    for t in threads:
        t.join(20)
    assert [replies[i][1]["choices"][0]["text"] for i in range(3)] == ["ad", "b", "c"], replies
    told.pair.server.wait_idle()


@pytest.mark.parametrize("wire", WIRES)
def test_a_dead_writer_of_the_page_is_noticed_and_the_next_one_is_read(pair, wire):
    server = pair.gateway(ranks=2)
    for rank in range(2):
        pair.rank(rank, wire, "--sim-step-us", "3000")
    server.wait_ready()
    pair.wait_live(2)

    def busy(rank: int) -> threading.Thread:
        thread = threading.Thread(target=pair.complete, kwargs={"max_tokens": 1000, "data_parallel_rank": rank})
        thread.start()
        wait_for("the page is read", lambda: pair.group()["ranks"][rank]["load_source"] == "mailbox", 20, 0.01)
        return thread

    threads = [busy(0), busy(1)]
    pair.ranks[0].stop(signal.SIGKILL)
    wait_for("it is noticed", lambda: "load_page_writer_gone" in server.text(), 10)
    assert pair.group()["ranks"][0]["load_source"] != "mailbox" and pair.group()["ranks"][1]["state"] == "live"
    pair.rank(0, wire, "--sim-step-us", "3000")
    pair.wait_live(2)
    threads.append(busy(0))
    for t in threads:
        t.join(60)
    # A stopped writer is a stopped rank: it is given up, and read again when it goes on.
    pair.ranks[1].popen.send_signal(signal.SIGSTOP)
    wait_for("wedged", lambda: pair.group()["ranks"][1]["state"] == "wedged", 30)
    assert all(pair.complete(max_tokens=3)[0] == 200 for _ in range(4))
    pair.ranks[1].popen.send_signal(signal.SIGCONT)
    pair.wait_live(2)
    busy(1).join(60)
    server.wait_idle()
