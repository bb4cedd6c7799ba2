"""One real vLLM rank: every feature of the wire once, and every input that deafens or kills a rank, through HTTP."""
import json
import math
import threading
import time

import pytest


def test_chat_and_completions_streaming_and_whole_agree(dense1):
    status, whole = dense1.chat(max_tokens=12)
    assert status == 200 and whole["choices"][0]["finish_reason"] == "length", whole
    assert whole["usage"]["completion_tokens"] == 12
    text = ""
    for event in dense1.gateway.stream("/v1/chat/completions", {"model": "tiny", "max_tokens": 12, "temperature": 0,
                                                               "messages": [{"role": "user", "content": "hello world"}]}):
        if event.get("choices"):
            text += event["choices"][0]["delta"].get("content") or ""
    assert text == whole["choices"][0]["message"]["content"]
    status, completion = dense1.complete(max_tokens=12)
    assert status == 200
    streamed = "".join(event["choices"][0]["text"] for event in dense1.gateway.stream(
        "/v1/completions", {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0}) if event.get("choices"))
    assert streamed == completion["choices"][0]["text"]


def test_n_choices_and_seeds(dense1):
    status, reply = dense1.complete(n=3, temperature=1.0, seed=11, max_tokens=6)
    assert status == 200 and [c["index"] for c in reply["choices"]] == [0, 1, 2]
    again = dense1.complete(n=3, temperature=1.0, seed=11, max_tokens=6)[1]
    assert [c["text"] for c in again["choices"]] == [c["text"] for c in reply["choices"]]
    assert len({c["text"] for c in reply["choices"]}) > 1, "siblings must not share a seed"


def test_stop_strings_and_stop_token_ids(dense1):
    full = dense1.complete(max_tokens=16)[1]["choices"][0]["text"]
    assert len(full) > 4
    stop = full[2:4]
    reply = dense1.complete(max_tokens=16, stop=[stop])[1]["choices"][0]
    assert reply["finish_reason"] == "stop" and reply["text"] == full.split(stop)[0]
    # Greedy on this model alternates between two ids, so the next token is known from the logprobs of a first run.
    reply = dense1.complete(max_tokens=16, stop_token_ids=[7])[1]["choices"][0]
    assert reply["finish_reason"] == "stop" and reply.get("stop_reason") == 7, reply


def test_sample_and_prompt_logprobs(dense1):
    reply = dense1.complete(logprobs=2, max_tokens=3)[1]["choices"][0]["logprobs"]
    assert len(reply["tokens"]) == 3 and all(v <= 0 and math.isfinite(v) for v in reply["token_logprobs"])
    assert all(len(top) in (2, 3) for top in reply["top_logprobs"])
    echoed = dense1.complete(logprobs=1, echo=True, max_tokens=2)[1]["choices"][0]["logprobs"]
    assert len(echoed["tokens"]) == 5 and echoed["token_logprobs"][0] is None
    assert all(math.isfinite(v) for v in echoed["token_logprobs"][1:])
    chat = dense1.chat(logprobs=True, top_logprobs=4, max_tokens=2)[1]["choices"][0]["logprobs"]["content"]
    assert len(chat) == 2 and all(len(entry["top_logprobs"]) == 4 for entry in chat)


def test_logit_bias_allowed_ids_and_bad_words_reach_the_engine(dense1):
    biased = dense1.complete(logit_bias={"300": 100}, max_tokens=3, logprobs=0)[1]["choices"][0]
    plain = dense1.complete(max_tokens=3)[1]["choices"][0]
    assert biased["text"] != plain["text"]
    assert len(set(biased["logprobs"]["tokens"])) == 1
    only = dense1.complete(allowed_token_ids=[301], max_tokens=3, logprobs=0)[1]["choices"][0]["logprobs"]["tokens"]
    assert len(set(only)) == 1
    word = plain["text"].strip()[:3]
    if word:
        status, reply = dense1.complete(bad_words=[plain["text"][:2]], max_tokens=3)
        assert status == 200 and not reply["choices"][0]["text"].startswith(plain["text"][:2])


def test_min_tokens_ignore_eos_priority_and_salt_are_served(dense1):
    status, reply = dense1.complete(min_tokens=5, max_tokens=8, ignore_eos=True, cache_salt="tenant-a", priority=0, user="u")
    assert status == 200 and reply["usage"]["completion_tokens"] == 8


def test_structured_outputs(dense1):
    status, reply = dense1.complete(prompt="x", max_tokens=60, temperature=1.0, seed=1, structured_outputs={"regex": "(yes|no)"})
    assert status == 200 and reply["choices"][0]["text"] in ("yes", "no"), reply
    status, reply = dense1.complete(prompt="x", max_tokens=60, temperature=1.0, seed=1, structured_outputs={"choice": ["red", "green"]})
    assert status == 200 and reply["choices"][0]["text"] in ("red", "green"), reply
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    status, reply = dense1.chat(max_tokens=200, temperature=0,
                                response_format={"type": "json_schema", "json_schema": {"name": "t", "schema": schema}})
    assert status == 200, reply
    if reply["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(reply["choices"][0]["message"]["content"])["a"], bool)


def test_traceparent_and_request_id_are_accepted(dense1):
    status, _ = dense1.gateway.post("/v1/completions", {"model": "tiny", "prompt": [5], "max_tokens": 1},
                                    headers={"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "X-Request-Id": "same"})
    assert status == 200


def test_a_client_that_leaves_frees_its_slot_within_a_second(dense1):
    events = dense1.gateway.stream("/v1/completions", {"model": "tiny", "prompt": [5], "max_tokens": 400, "ignore_eos": True})
    next(events)
    next(events)
    events.close()
    dense1.gateway.wait_idle(1.5)


# Each row deafens, mutes or kills a real rank when it reaches it. 400 = refused by name; 200 = served, normalised on the way.
LONG = [5] * 600
BAD = [
    ({"temperature": -1}, 400, "temperature"), ({"temperature": 2.5}, 400, "temperature"), ({"temperature": "hot"}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"), ({"top_p": 1.1}, 400, "top_p"), ({"top_k": -2}, 400, "top_k"), ({"min_p": 1.5}, 400, "min_p"),
    ({"presence_penalty": 3}, 400, "presence_penalty"), ({"frequency_penalty": -3}, 400, "frequency_penalty"),
    ({"repetition_penalty": 0}, 400, "repetition_penalty"), ({"max_tokens": 0}, 400, "max_tokens"), ({"max_tokens": -1}, 400, "max_tokens"),
    ({"max_tokens": 1.5}, 400, "max_tokens"), ({"min_tokens": -1}, 400, "min_tokens"), ({"min_tokens": 9, "max_tokens": 4}, 400, "min_tokens"),
    ({"n": 0}, 400, "n"), ({"n": -1}, 400, "n"), ({"n": 2, "temperature": 0}, 200, None), ({"logprobs": -5}, 400, "logprobs"),
    ({"logprobs": 5000}, 400, "logprobs"), ({"prompt_logprobs": -5}, 400, "prompt_logprobs"), ({"stop": [""]}, 400, "stop"),
    ({"stop": 5}, 400, "stop"), ({"bad_words": [""]}, 400, "bad_words"), ({"bad_words": 3}, 400, "bad_words"),
    ({"prompt": []}, 400, "prompt"), ({"prompt": ""}, 400, "prompt"), ({"prompt": [-1]}, 400, "prompt"), ({"prompt": [1024]}, 400, "prompt"),
    ({"prompt": [2**40]}, 400, "prompt"), ({"prompt": [5.5]}, 400, "prompt"), ({"prompt": ["a", 5]}, 400, "prompt"), ({"prompt": LONG}, 400, "prompt"),
    ({"prompt": [5] * 512}, 400, "prompt"), ({"prompt": [5] * 511, "max_tokens": 1}, 200, None), ({"prompt": [5] * 500, "max_tokens": 100}, 400, None),
    ({"logit_bias": {"99999": 5}}, 400, "logit_bias"), ({"logit_bias": {"-1": 5}}, 400, "logit_bias"), ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
    ({"logit_bias": [1]}, 400, "logit_bias"), ({"allowed_token_ids": [99999]}, 400, "allowed_token_ids"), ({"allowed_token_ids": [-1]}, 400, "allowed_token_ids"),
    ({"allowed_token_ids": []}, 400, "allowed_token_ids"), ({"stop_token_ids": [10**9], "min_tokens": 1}, 400, "stop_token_ids"),
    ({"seed": 2**63}, 400, "seed"), ({"seed": -(2**63)}, 200, None), ({"seed": 2**63 - 1}, 200, None), ({"seed": "x"}, 400, "seed"),
    ({"priority": 1.5}, 400, "priority"), ({"cache_salt": 5}, 400, "cache_salt"), ({"ignore_eos": 3}, 400, "ignore_eos"),
    ({"structured_outputs": {}}, 400, "structured_outputs"), ({"structured_outputs": {"regex": "a", "json": {}}}, 400, "structured_outputs"),
    ({"structured_outputs": {"json": 5}}, 400, "structured_outputs"), ({"thinking_token_budget": -5}, 400, "thinking_token_budget"),
    ({"data_parallel_rank": 7}, 400, "data_parallel_rank"), ({"data_parallel_rank": -1}, 400, "data_parallel_rank"),
    ({"echo": "x"}, 400, "echo"), ({"stream_options": {"include_usage": True}}, 400, "stream_options"), ({"top_k": 1.5}, 400, "top_k"),
]


@pytest.mark.parametrize("body,expected,param", BAD, ids=[json.dumps(row[0])[:60] for row in BAD])
def test_what_kills_a_rank_is_refused_by_name(dense1, body, expected, param):
    status, reply = dense1.complete(**body)
    assert status == expected, reply
    if expected == 400 and param:
        assert reply["error"]["param"] == param, reply
        assert reply["error"]["type"] == "invalid_request_error"
    assert dense1.state(0) == "live"
    assert dense1.complete(max_tokens=1)[0] == 200, "the rank no longer serves"


def test_bad_grammar_is_an_error_for_that_request_alone(dense1):
    for bad in ({"regex": "(("}, {"grammar": "root ::= "}, {"json": {"type": "nonsense"}}):
        status, reply = dense1.complete(structured_outputs=bad)
        assert status == 400 and reply["error"]["param"] == "structured_outputs", (bad, reply)
        assert dense1.complete(max_tokens=1)[0] == 200


def test_pause_freezes_and_resume_loses_nothing(dense1):
    done = []
    assert dense1.gateway.post("/pause?mode=keep", {})[0] == 200
    thread = threading.Thread(target=lambda: done.append(dense1.complete(max_tokens=4)))
    thread.start()
    time.sleep(0.5)
    assert not done, "served while paused"
    assert dense1.gateway.post("/resume", {})[0] == 200
    thread.join(20)
    assert done and done[0][0] == 200


def test_admin_queries(dense1):
    status, raw = dense1.gateway.get("/is_sleeping")
    assert status == 200 and json.loads(raw)["is_sleeping"] is False
    assert dense1.gateway.post("/reset_prefix_cache", {})[0] == 200


def test_fifty_concurrent_requests_are_exact(dense1):
    alone = dense1.complete(max_tokens=10)[1]["choices"][0]["text"]
    results = [None] * 50

    def one(i):
        results[i] = dense1.complete(max_tokens=10)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(50)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert all(r is not None and r[0] == 200 for r in results)
    assert {r[1]["choices"][0]["text"] for r in results} == {alone}
    dense1.gateway.wait_idle()
