"""Greedy answers of the demo model through HTTP, wire, scheduler and runner against llama.cpp alone (plain_loop.cc)."""
import concurrent.futures
import os
import pathlib
import subprocess

import pytest

from conftest import SLOWDOWN, Server, program
from rankgate_process import ROOT

MODEL = pathlib.Path(os.environ.get("RANKGATE_TEST_MODEL", ROOT / "build/models/SmolLM2-135M-Instruct.Q4_1.gguf"))
PLAIN = pathlib.Path(os.environ.get("RANKGATE_PLAIN_LOOP", pathlib.Path(program()).parent / "src/engine/plain_loop"))
COUNT = 16
# Prompts longer than this take several steps to read (the engine's default is 128).
CHUNK = 64

STORY = ("The harbour was quiet in the morning, and the fishermen were mending their nets. A boy with a red cap ran along the pier, past the "
         "ropes, the barrels and the sleeping dogs, until he saw the ship that everybody had been talking about. It was larger than any house "
         "in the village, and its sails were the colour of old bread. ")
PROMPTS = [
    "The capital of France is", "Once upon a time", "def fibonacci(n):\n    ", "1, 2, 3, 4,", "The sea is", "Water boils at",
    "Roses are red, violets are", "To be, or not to be,", "In 1969, humans first", "Caf\u00e9 \u00e0 la carte: ", "\u4f60\u597d\uff0c",
    "\U0001f44d \U0001f469\u200d\U0001f469\u200d\U0001f467 means", "SELECT * FROM", "{\"name\": \"", "Dear Sir or Madam,\n", "The opposite of hot is",
    "My favourite colour is", STORY + "On its deck stood", STORY * 2 + "The captain said:", STORY * 4 + "In the evening,",
]

pytestmark = [
    pytest.mark.skipif(not MODEL.exists(), reason=f"no model at {MODEL}: run scripts/fetch_model.sh"),
    pytest.mark.skipif(not PLAIN.exists(), reason=f"no {PLAIN}: built with -DRANKGATE_WITH_LLAMA=ON"),
    pytest.mark.skipif(SLOWDOWN > 1, reason="a model under a sanitizer takes hours; sim and script ranks cover it there"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Server("serve", [str(MODEL), "--served-model-name", "m", "--max-model-len", "1024", "--max-num-seqs", "4"],
                  tmp_path_factory.mktemp("greedy") / "serve.log", engine_args=["--max-num-batched-tokens", str(CHUNK)]).wait_ready(120)
    yield made
    made.stop()


def plain(lines: list[str], count: int = COUNT) -> list[tuple[list[int], list[int], bytes]]:
    done = subprocess.run([str(PLAIN), str(MODEL), str(count)], input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines()]
    return [([int(i) for i in a.split()], [int(i) for i in b.split()], bytes.fromhex(c)) for a, b, c in rows]


@pytest.fixture(scope="module")
def expected():
    rows = plain(["text:" + prompt.replace("\n", "\\n") for prompt in PROMPTS])
    assert len(rows) == len(PROMPTS) and sum(len(row[0]) > CHUNK for row in rows) == 3
    return rows


def ask(prompt, **more) -> dict:
    return {"model": "m", "prompt": prompt, "temperature": 0, "max_tokens": COUNT, "ignore_eos": True, "return_token_ids": True, **more}


def answer(server, prompt, **more) -> dict:
    status, reply = server.post("/v1/completions", ask(prompt, **more))
    assert status == 200, reply
    return reply["choices"][0]


def test_token_ids_equal_a_plain_loop_one_at_a_time(server, expected):
    for prompt, (prompt_ids, ids, text) in zip(PROMPTS, expected, strict=True):
        choice = answer(server, prompt)
        assert choice["prompt_token_ids"] == prompt_ids, prompt
        assert choice["token_ids"] == ids, prompt
        assert choice["text"] == text.decode("utf-8", "replace"), prompt
        # The prefix of the first answer is reused by this one, which may not change a token.
        assert answer(server, prompt_ids)["token_ids"] == ids, prompt


def test_token_ids_equal_a_plain_loop_four_at_a_time(server, expected):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda prompt: answer(server, prompt)["token_ids"], PROMPTS))
    # llama.cpp on a CPU with flash attention off is batch-invariant for this model: all of them, not most.
    assert got == [ids for _, ids, _ in expected]


def test_streamed_text_equals_the_whole_byte_for_byte(server):
    for prompt in PROMPTS[9:]:  # the odd characters and the long ones among them
        whole = answer(server, prompt)
        text, ids = "", []
        for event in server.stream("/v1/completions", ask(prompt)):
            for choice in event.get("choices", []):
                text += choice["text"]
                ids += choice.get("token_ids") or []
        assert (text, ids) == (whole["text"], whole["token_ids"]), prompt


def test_chat_is_the_template_and_the_same_loop(server):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    status, reply = server.post("/v1/chat/completions", body)
    assert status == 200, reply
    prompt = ("<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n<|im_start|>user\\n"
              "What is the capital of France?<|im_end|>\\n<|im_start|>assistant\\n")
    (prompt_ids, ids, _), = plain(["text:" + prompt], 12)
    assert reply["prompt_token_ids"] == prompt_ids
    assert reply["choices"][0]["token_ids"] == ids


def test_a_flag_that_the_engine_refuses_ends_serve_with_2():
    for flags, named in ((["--max-model-len", "10000000"], "--max-model-len 10000000"), (["--", "--frobnicate"], "--frobnicate")):
        done = subprocess.run([program(), "serve", str(MODEL), "--port", "0", *flags], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and named in done.stdout + done.stderr, done.stdout + done.stderr
