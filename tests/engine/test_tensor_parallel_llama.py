"""Two processes that each hold the whole model: the followers repeat rank 0's work, token by token, and say so in their digests."""
import os
import pathlib
import signal
import time

import pytest
from test_tensor_parallel import children, gone

MODEL = pathlib.Path(os.environ.get("RANKGATE_MODEL", pathlib.Path(__file__).parents[2] / "build/models/SmolLM2-135M-Instruct.Q4_1.gguf"))
pytestmark = pytest.mark.skipif(not MODEL.is_file(), reason=f"no model at {MODEL} (scripts/fetch_model.sh)")

LLAMA = {"model": str(MODEL), "runner": "llama"}
PROMPT = (1, 504, 260, 1156, 282, 253)


def start(frontend, *args):
    try:
        return frontend.start(0, *args, **LLAMA)
    except AssertionError:
        if "not in this build" in frontend.log(0):
            pytest.skip("this rankgate is built without llama.cpp")
        raise


def test_two_ranks_give_the_tokens_of_one(make_vllm):
    plain, pair = make_vllm(), make_vllm()
    start(plain)
    process = start(pair, "--tensor-parallel-size", "2")
    assert pair.facts[0]["tensor_parallel_size"] == 2
    followers = children(process.pid)
    assert len(followers) == 1
    for n in range(3):
        want = plain.run(f"r{n}", prompt=PROMPT + (n,), max_tokens=8)
        assert len(want) == 8 and pair.run(f"r{n}", prompt=PROMPT + (n,), max_tokens=8) == want
    process.send_signal(signal.SIGTERM)
    assert process.wait(15) == 0 and pair.dead == 0
    assert gone(followers)


def test_losing_the_follower_in_a_long_answer_is_an_error_not_a_hang(vllm):
    process = start(vllm, "--tensor-parallel-size", "2")
    followers = children(process.pid)
    vllm.add("r", prompt=PROMPT, max_tokens=2000)
    assert vllm.pump(30, lambda: vllm.rows("r"))
    os.kill(followers[0], signal.SIGKILL)
    started = time.monotonic()
    assert vllm.pump(20, lambda: vllm.dead == 1), vllm.log(0)
    assert time.monotonic() - started < 10
    assert process.wait(15) == 3
    assert "rank=1" in vllm.log(0) or "rank 1" in vllm.log(0), vllm.log(0)
