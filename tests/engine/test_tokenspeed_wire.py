"""`rankgate engine --wire tokenspeed` as a stock frontend sees it."""
import pytest
from frontend import ABORT, ADD, pack

WIRE = ("--wire", "tokenspeed")


def test_registers_with_block_size_and_the_engine_side_greeting(tokenspeed):
    tokenspeed.start(0, *WIRE, "--max-model-len", "1024", "--num-gpu-blocks", "64")
    assert tokenspeed.hello[0] == {"status": "HELLO", "local": True, "headless": True, "parallel_config_hash": None}
    facts = tokenspeed.facts[0]
    assert facts["block_size"] == 16 and "prefix_granularity" not in facts
    assert facts["num_gpu_blocks"] == 65, "the null page is counted"
    assert facts["vllm_version"].startswith("tokenspeed-") and facts["dtype"] in ("bfloat16", "float16", "float32")


def test_the_terminal_row_carries_the_load_after_the_finish(tokenspeed):
    tokenspeed.start(0, *WIRE, "--max-model-len", "1024", "--num-gpu-blocks", "64")
    rows = tokenspeed.run("r", max_new=5)
    assert sum((r["ids"] for r in rows), []) and rows[-1]["finish"] == "length" and rows[-1]["completion"] == 5
    assert rows[0]["load"] == (1, 0, 1, 64)
    assert rows[-1]["load"] == (0, 0, 0, 64)
    assert all(len(m) == 14 for _, m in tokenspeed.messages)


def test_the_upstream_order_would_leave_it_stale(tokenspeed):
    tokenspeed.start(0, *WIRE, "--stale-load", "--max-model-len", "1024", "--num-gpu-blocks", "64")
    rows = tokenspeed.run("r", max_new=5)
    tokenspeed.pump(0.3)
    assert rows[-1]["load"] == (1, 0, 1, 64) and tokenspeed.messages[-1][1][10:14] == [1, 0, 1, 64]


def test_a_client_abort_is_followed_by_a_load_only_batch(tokenspeed):
    tokenspeed.start(0, *WIRE, "--sim-step-us", "1000000")
    tokenspeed.add("r", max_new=1000)
    assert tokenspeed.pump(10, lambda: tokenspeed.rows("r"))
    tokenspeed.send(ABORT, pack(["r"]))
    assert tokenspeed.pump(5, lambda: tokenspeed.messages[-1][1][1] == [])
    last = tokenspeed.messages[-1][1]
    assert last[1:9] == [[]] * 8 and last[10:13] == [0, 0, 0] and last[13] > 0
    assert tokenspeed.finish("r") is None


def test_rows_follow_the_stream_interval(tokenspeed):
    tokenspeed.start(0, *WIRE)
    assert [r["completion"] for r in tokenspeed.run("every", max_new=4)] == [1, 2, 3, 4]
    assert [r["completion"] for r in tokenspeed.run("three", max_new=8, stream_interval=3)] == [1, 4, 7, 8]
    rows = tokenspeed.run("plain", max_new=120, stream=False)
    assert [r["completion"] for r in rows] == [1, 50, 100, 120]
    assert [len(r["ids"]) for r in rows] == [1, 49, 50, 20]


def test_logprob_columns_match_the_delta(tokenspeed):
    tokenspeed.start(0, *WIRE)
    for rid, stream in (("s", True), ("p", False)):
        for row in tokenspeed.run(rid, max_new=60, logprob=True, stream=stream):
            assert row["tokens"] == row["ids"] and len(row["values"]) == len(row["ids"])
    assert all(r["values"] == [] for r in tokenspeed.run("off"))


def test_stop_ids_and_eos(tokenspeed):
    tokenspeed.start(0, *WIRE, "--sim-eos-after", "6", "--sim-eos-token", "2")
    ids = sum((r["ids"] for r in tokenspeed.run("free", max_new=5)), [])
    rows = tokenspeed.run("stop", max_new=5, ignore_eos=False, stop_ids=[ids[2]])
    assert rows[-1]["finish"] == "stop" and sum((r["ids"] for r in rows), []) == ids[:3], "the matched id is in the delta"
    rows = tokenspeed.run("ignored", max_new=5, ignore_eos=True, stop_ids=[ids[2]])
    assert rows[-1]["finish"] == "length"
    rows = tokenspeed.run("eos", max_new=50, ignore_eos=False)
    assert rows[-1]["finish"] == "stop" and rows[-1]["ids"][-1] == 2
    assert len(tokenspeed.run("zero", max_new=0)) == 1, "max_new_tokens 0 still yields one token"


def test_what_kills_or_silences_the_real_engine_is_an_abort_row(tokenspeed):
    tokenspeed.start(0, *WIRE, "--max-model-len", "512", "--sim-step-us", "2000", "--sim-vocab-size", "1024", "--sim-last-token", "900")
    tokenspeed.add("healthy", max_new=100)
    bad = {"empty": dict(prompt=()), "nil": dict(prompt=None), "huge": dict(prompt=(1 << 31,)), "long": dict(prompt=(5,) * 512),
           "interval": dict(stream_interval=0), "n": dict(n=2), "top_k": dict(top_k=128), "temperature": dict(temperature=-1.0)}
    for rid, change in bad.items():
        tokenspeed.add(rid, **change)
    tokenspeed.add("healthy")
    for kind, payload in ((ADD, b""), (ADD, b"\xc1"), (ADD, pack(["Other", "x"])), (ABORT, b"\xa1x"), (ABORT, b"\xc0"), (b"\x02", pack([])), (b"\0\0", b"x")):
        tokenspeed.send(kind, payload)
    tokenspeed.add(None)
    tokenspeed.add(["a", "b"])
    assert tokenspeed.pump(20, lambda: all(tokenspeed.finish(r) for r in [*bad, "healthy"]))
    assert {r: tokenspeed.finish(r) for r in bad} == dict.fromkeys(bad, "abort")
    for rid in bad:
        (row,) = tokenspeed.rows(rid)
        assert row["ids"] == [] and row["completion"] == 0
    assert tokenspeed.rows("healthy")[-1]["completion"] == 100
    assert tokenspeed.run("after")[-1]["finish"] == "length"
    assert tokenspeed.run("after")[-1]["finish"] == "length", "a finished rid may come again"
    assert tokenspeed.dead == 0 and not tokenspeed.disconnected("input")


@pytest.mark.parametrize("base,ranks", [(0, 2), (255, 2)])
def test_ranks_name_themselves_and_their_batches(tokenspeed, base, ranks):
    for rank in range(ranks):
        tokenspeed.start(base + rank, *WIRE, "--data-parallel-size", str(ranks), "--data-parallel-rank", str(rank), "--zmq-engine-index", str(base))
    for rank in range(ranks):
        rows = tokenspeed.run(f"r{rank}", rank=base + rank)
        assert {r["rank"] for r in rows} == {base + rank}
        assert tokenspeed.facts[base + rank]["data_parallel_size"] == ranks


def test_a_request_is_validated_once_more_when_raw(tokenspeed):
    tokenspeed.start(0, *WIRE)
    # The shortest legal ADD: raw parameters, four of them.
    tokenspeed.send(ADD, pack([tokenspeed.TAG, "raw", None, None, [1, 2, 300], [8, None, [2], 0.5]]))
    assert tokenspeed.pump(10, lambda: tokenspeed.finish("raw"))
    assert tokenspeed.rows("raw")[-1]["completion"] == 8


def test_an_id_after_its_abort(tokenspeed):
    tokenspeed.start(0, *WIRE, "--sim-step-us", "3000")
    tokenspeed.add("r", max_new=1000)
    assert tokenspeed.pump(10, lambda: tokenspeed.rows("r"))
    tokenspeed.send(ABORT, pack(["r", "never-seen"]))
    tokenspeed.add("other", max_new=3)
    assert tokenspeed.pump(10, lambda: tokenspeed.finish("other"))
    before = len(tokenspeed.rows("r"))
    tokenspeed.add("r", max_new=3)
    assert tokenspeed.pump(10, lambda: tokenspeed.finish("r") == "length"), "ours forgets an aborted id; upstream would stay silent for 300 s"
    assert len(tokenspeed.rows("r")) == before + 3
    assert tokenspeed.run("never-seen", max_new=3)[-1]["finish"] == "length"


def test_messages_of_one_frame_or_an_odd_type_are_passed_over(tokenspeed):
    tokenspeed.start(0, *WIRE)
    for frames in ([b""], [ADD], [ABORT], [b"\0\0", b"x"], [b"", b"x"], [b"\7", pack([])]):
        tokenspeed.ins[0].send_multipart([b"\0\0", *frames])
    assert tokenspeed.run("after")[-1]["finish"] == "length" and tokenspeed.dead == 0
    # Surplus frames of an ADD are none of a text request's business.
    tokenspeed.add("x")
    assert tokenspeed.pump(10, lambda: tokenspeed.finish("x"))


def test_an_abort_of_two_ends_both(tokenspeed):
    tokenspeed.start(0, *WIRE, "--sim-step-us", "3000")
    for rid in ("a", "b", "c"):
        tokenspeed.add(rid, max_new=200)
    assert tokenspeed.pump(10, lambda: all(tokenspeed.rows(r) for r in ("a", "b", "c")))
    tokenspeed.send(ABORT, pack(["a", "b"]))
    assert tokenspeed.pump(20, lambda: tokenspeed.finish("c") == "length")
    assert tokenspeed.finish("a") is None and tokenspeed.finish("b") is None
