"""`rankgate engine --wire tokenspeed` in front of a frontend that speaks through the published package's own codec."""
import json
import socket

import pytest
from real_codec import Frontend


@pytest.fixture
def frontend():
    made = Frontend()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def lone(frontend):
    (name,) = frontend.start()
    return frontend, name


@pytest.mark.parametrize("base", [0, 255])
def test_two_ranks_shake_hands_interleaved_and_name_themselves(frontend, base):
    names = frontend.start(base, 2)
    assert names == [bytes([base % 256, base // 256]), bytes([(base + 1) % 256, (base + 1) // 256])]
    for rank, name in enumerate(names):
        facts = frontend.facts[name]
        assert (facts.data_parallel_size, facts.data_parallel_rank, facts.max_model_len) == (2, rank, 1024)
        assert facts.vllm_version.startswith("tokenspeed-") and facts.dtype == "bfloat16" and facts.num_gpu_blocks == 65
    for i in range(4):
        for name in names:
            frontend.add(f"r{i}-{name.hex()}", name, max_new_tokens=20)
    every = [f"r{i}-{name.hex()}" for i in range(4) for name in names]
    assert frontend.pump(30, lambda: all(frontend.finish(rid) == "length" for rid in every))
    for rid in every:
        rank = names.index(bytes.fromhex(rid.split("-")[1]))
        assert {batch.engine_index for batch, _ in frontend.rows(rid)} == {base + rank}, "a batch names the rank it came from"
        assert len(frontend.tokens(rid)) == 20


def test_generates_streamed_and_plain(lone):
    frontend, name = lone
    streamed = frontend.run("s", name, max_new_tokens=60)
    assert [batch.completion_tokens[i] for batch, i in frontend.rows("s")] == list(range(1, 61))
    assert frontend.run("p", name, max_new_tokens=60, stream=False) == streamed
    assert [batch.completion_tokens[i] for batch, i in frontend.rows("p")] == [1, 50, 60]
    batch, i = frontend.rows("s")[-1]
    assert (batch.prompt_tokens[i], batch.finished_reasons[i]) == (3, "length")
    # What one says about its prompt, another finds in the prefix cache.
    prompt = list(range(1, 130))
    frontend.run("first", name, ids=prompt)
    frontend.run("second", name, ids=prompt)
    batch, i = frontend.rows("second")[-1]
    assert batch.cached_tokens[i] >= 64
    assert frontend.run("other", name, temperature=1.0, seed=7, top_k=50, top_p=0.9) == frontend.run("again", name, temperature=1.0, seed=7, top_k=50, top_p=0.9)


def test_stop_ids_include_the_matched_token_and_ignore_eos_stands(lone):
    frontend, name = lone
    free = frontend.run("free", name, max_new_tokens=12)
    stopped = frontend.run("stop", name, max_new_tokens=12, stop_token_ids={free[3]}, ignore_eos=False)
    assert stopped == free[:free.index(free[3]) + 1] and frontend.finish("stop") == "stop"


def test_an_abort_has_no_row_and_frees_what_was_held(frontend):
    (name,) = frontend.start(0, 1, "--sim-step-us", "4000")
    for rid in ("a", "b", "kept"):
        frontend.add(rid, name, max_new_tokens=250)
    assert frontend.pump(10, lambda: all(frontend.rows(rid) for rid in ("a", "b", "kept")))
    frontend.abort(name, "a", "b")
    assert frontend.pump(30, lambda: frontend.finish("kept") == "length")
    assert frontend.finish("a") == frontend.finish("b") == ""
    assert frontend.load(0) == (0, 0, 0, 64)


def test_an_abort_is_followed_by_the_load_without_rows(frontend):
    (name,) = frontend.start(0, 1, "--sim-step-us", "300000")
    frontend.add("r", name, max_new_tokens=500)
    assert frontend.pump(10, lambda: frontend.rows("r"))
    assert frontend.load(0)[0] == 1
    before = len(frontend.batches)
    frontend.abort(name, "r")
    assert frontend.pump(5, lambda: frontend.load(0) == (0, 0, 0, 64))
    assert any(not batch.rids for batch in frontend.batches[before:]), "a batch of its own, not a row of the dead request"


def test_logprobs_are_one_per_new_token(lone):
    frontend, name = lone
    for rid, stream in (("s", True), ("p", False)):
        frontend.run(rid, name, logprob=True, stream=stream, max_new_tokens=55)
        for batch, i in frontend.rows(rid):
            assert batch.output_token_logprobs_idx[i] == batch.output_ids[i]
            assert len(batch.output_token_logprobs_val[i]) == len(batch.output_ids[i])
            assert all(v <= 0 for v in batch.output_token_logprobs_val[i])
    frontend.run("off", name)
    assert all(batch.output_token_logprobs_val[i] == [] for batch, i in frontend.rows("off"))


def test_the_load_is_that_after_the_step(frontend):
    (name,) = frontend.start(0, 1, "--max-num-seqs", "2", "--sim-step-us", "2000")
    for i in range(5):
        frontend.add(f"r{i}", name, max_new_tokens=20)
    every = [f"r{i}" for i in range(5)]
    assert frontend.pump(30, lambda: all(frontend.finish(rid) for rid in every))
    seen = {(batch.num_running, batch.num_waiting) for batch in frontend.batches}
    assert max(r for r, _ in seen) == 2 and max(w for _, w in seen) == 3, seen
    assert all(batch.kv_total_pages == 64 for batch in frontend.batches)
    batch, _ = frontend.rows(max(every, key=lambda rid: frontend.batches.index(frontend.rows(rid)[-1][0])))[-1]
    assert (batch.num_running, batch.num_waiting, batch.kv_active_pages) == (0, 0, 0), "the last word is idle"


@pytest.mark.parametrize("what", ["empty", "huge id", "too long", "interval", "n"])
def test_what_kills_upstream_is_an_abort_row_here(lone, what):
    frontend, name = lone
    bad = {"empty": {"ids": []}, "huge id": {"ids": [2**31]}, "too long": {"ids": [5] * 1024}, "interval": {"stream_interval": 0}, "n": {"n": 2}}[what]
    assert frontend.run("bad", name, **bad) == [] and frontend.finish("bad") == "abort"
    assert len(frontend.run("good", name)) == 8 and frontend.dead == 0


def test_a_finished_rid_may_come_again_and_a_running_one_not(lone):
    frontend, name = lone
    frontend.add("twice", name, max_new_tokens=300)
    assert frontend.pump(10, lambda: frontend.rows("twice"))
    frontend.add("twice", name, max_new_tokens=300)
    assert frontend.pump(30, lambda: frontend.finish("twice"))
    assert len(frontend.run("after", name)) == 8 and len(frontend.run("after", name)) >= 8 and frontend.dead == 0


def test_last_words_and_every_finish_word_are_the_package_s(frontend):
    path = f"{frontend.dir.name}/script"
    (name,) = frontend.start(0, 1, "--script-socket", path, runner="script")
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)
        answers = line.makefile("r")

        def tell(**what):
            line.sendall(json.dumps(what).encode() + b"\n")
            assert json.loads(answers.readline())["ok"]

        for finish in ("stop", "length", "abort"):
            tell(rule={"id_prefix": finish, "tokens": [7, 8], "finish": finish})
            assert frontend.run(finish, name) == [7, 8] and frontend.finish(finish) == finish
        tell(do="last_words")
        assert frontend.pump(20, lambda: frontend.dead == 1)
