"""The official OpenAI Python SDK against a running server: BASE_URL, ROOT, MODEL."""
import asyncio
import concurrent.futures
import json
import os
import time
import urllib.request

import openai
import pytest

from rankgate_process import wait_for

MODEL = os.environ["MODEL"]
MESSAGES = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client():
    return openai.OpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0, timeout=60)


def metric(name: str, label: str = "") -> float:
    text = urllib.request.urlopen(os.environ["ROOT"] + "/metrics", timeout=10).read().decode()
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith((name + "{", name + " ")) and label in line)


def freed_within_a_second(aborts_before: float, more: int = 1) -> None:
    """No slot, no stream, and the engine was told: the abort is counted and the rank reports nothing running."""
    deadline = time.monotonic() + 1.0
    while metric("rankgate_in_flight") or metric("rankgate_streams_open"):
        assert time.monotonic() < deadline, "the slot was not freed within a second"
        time.sleep(0.02)
    assert metric("rankgate_aborts_total", 'cause="client_gone"') == aborts_before + more
    deadline = time.monotonic() + 3.0  # the rank's own word is up to a second old
    while metric("vllm:num_requests_running") or metric("vllm:num_requests_waiting"):
        assert time.monotonic() < deadline, "the engine still runs the request"
        time.sleep(0.05)


def test_chat_answers_with_sensible_text_and_usage(client):
    reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=16)
    assert "Paris" in reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.id.startswith("chatcmpl-") and reply.model == MODEL and reply._request_id


def test_streamed_text_equals_the_whole(client):
    ask = dict(model=MODEL, messages=[{"role": "user", "content": "Tell me about the sea. é 👍"}], temperature=0, max_tokens=48)
    whole = client.chat.completions.create(**ask)
    text, finishes, usage, ids = "", [], None, set()
    for chunk in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        ids.add(chunk.id)
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
            if chunk.choices[0].finish_reason:
                finishes.append(chunk.choices[0].finish_reason)
        else:
            usage = chunk.usage
    assert text == whole.choices[0].message.content
    assert finishes == [whole.choices[0].finish_reason]
    # cached_tokens may differ: the second request finds the first one's prefix.
    assert [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens] == [
        whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens]
    assert len(ids) == 1


def test_n_2_gives_two_choices_in_order(client):
    reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2, temperature=1.0, seed=7, max_tokens=12)
    assert [choice.index for choice in reply.choices] == [0, 1]
    seen = {}
    for chunk in client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2, temperature=1.0, seed=7, max_tokens=12, stream=True):
        for choice in chunk.choices:
            seen[choice.index] = seen.get(choice.index, "") + (choice.delta.content or "")
    assert [seen[0], seen[1]] == [choice.message.content for choice in reply.choices]


def test_stop_string_ends_the_text_before_it(client):
    ask = dict(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=16)
    full = client.chat.completions.create(**ask).choices[0].message.content
    cut = client.chat.completions.create(**ask, stop=["Paris"]).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.message.content == full.split("Paris")[0]


def test_chat_logprobs(client):
    reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3)
    content = reply.choices[0].logprobs.content
    assert len(content) == 4
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob <= 0 and bytes(entry.bytes).decode() == entry.token
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
        assert entry.token == entry.top_logprobs[0].token  # greedy


def test_completions_logprobs_and_echo(client):
    reply = client.completions.create(model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=2, logprobs=2, echo=True)
    choice = reply.choices[0]
    assert choice.text.startswith("The capital of France is")
    lp = choice.logprobs
    assert lp.token_logprobs[0] is None and lp.top_logprobs[0] is None
    assert len(lp.tokens) == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert "".join(lp.tokens) == choice.text and lp.text_offset[0] == 0


def test_several_prompts_and_token_ids(client):
    reply = client.completions.create(model=MODEL, prompt=["One two three", "Four five six"], n=2, temperature=0.5, seed=1, max_tokens=3)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    reply = client.completions.create(model=MODEL, prompt=[[5, 6, 7], [8, 9]], temperature=0, max_tokens=2)
    assert reply.usage.prompt_tokens == 5


def test_errors_map_to_the_sdk_classes(client):
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="no-such-model", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=[])
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="word " * 20000, max_tokens=5)
    assert "maximum context length" in long.value.message


def test_models(client):
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


LONG = dict(model=MODEL, messages=MESSAGES, max_tokens=1500, temperature=1.0, extra_body={"ignore_eos": True})


def test_closing_a_stream_frees_its_slot_and_aborts_on_the_engine(client):
    before = metric("rankgate_aborts_total", 'cause="client_gone"')
    stream = client.chat.completions.create(**LONG, stream=True)
    next(iter(stream))
    assert metric("rankgate_in_flight") == 1
    stream.close()
    freed_within_a_second(before)
    # Leaving the with block is the same, and so is a completion.
    with client.completions.create(model=MODEL, prompt="x", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}) as stream:
        for _ in stream:
            break
    freed_within_a_second(before + 1)


def test_a_timeout_of_the_client_is_its_own_error_and_aborts_on_the_engine(client):
    before = metric("rankgate_aborts_total", 'cause="client_gone"')
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=1.0).chat.completions.create(**LONG)
    freed_within_a_second(before)


def test_raw_responses_carry_headers_and_parse(client):
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=3,
                                                           extra_headers={"X-Request-Id": "my-id-7"})
    assert raw.status_code == 200 and raw.headers["content-type"].split(";")[0] == "application/json"
    assert raw.request_id == raw.headers["x-request-id"] == "my-id-7"
    assert raw.retries_taken == 0
    reply = raw.parse()
    assert reply.usage.completion_tokens == 3 and json.loads(raw.text)["id"] == reply.id
    # Optional objects are absent, not null; what strict clients want is there.
    body = json.loads(raw.text)
    assert "service_tier" not in body and "tool_calls" not in body["choices"][0]["message"]
    assert body["choices"][0]["logprobs"] is None and body["choices"][0]["message"]["refusal"] is None
    with client.chat.completions.with_streaming_response.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=3,
                                                                stream=True) as streamed:
        assert streamed.headers["content-type"].startswith("text/event-stream") and "content-length" not in streamed.headers
        assert streamed.headers["cache-control"] == "no-cache" and streamed.headers["x-accel-buffering"] == "no"
        lines = [line for line in streamed.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)


def test_streams_have_one_role_one_finish_and_one_usage_per_choice(client):
    roles, finishes, usages, ids, scored = {}, {}, [], set(), {}
    for chunk in client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2, temperature=0.8, seed=5, max_tokens=6, stream=True,
                                                logprobs=True, top_logprobs=2, stream_options={"include_usage": True},
                                                extra_body={"ignore_eos": True}):
        ids.add((chunk.id, chunk.created, chunk.model, chunk.object))
        if not chunk.choices:
            usages.append(chunk.usage)
        else:
            assert chunk.usage is None and not usages, "usage comes last"
        for choice in chunk.choices:
            if choice.delta.role is not None:
                roles.setdefault(choice.index, []).append(choice.delta.role)
            if choice.finish_reason:
                finishes.setdefault(choice.index, []).append(choice.finish_reason)
            scored.setdefault(choice.index, []).extend((choice.logprobs and choice.logprobs.content) or [])
    assert roles == {0: ["assistant"], 1: ["assistant"]} and finishes == {0: ["length"], 1: ["length"]}
    assert len(ids) == 1 and len(usages) == 1 and usages[0].completion_tokens == 12
    assert all(len(entries) == 6 and all(len(entry.top_logprobs) == 2 for entry in entries) for entries in scored.values())


def test_the_stream_helper_accumulates_to_the_whole(client):
    ask = dict(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=12)
    with client.chat.completions.stream(**ask, stream_options={"include_usage": True}) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    whole = client.chat.completions.create(**ask)
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.usage.completion_tokens == whole.usage.completion_tokens


def test_completions_stream_as_they_answer_whole(client):
    ask = dict(model=MODEL, prompt=["The sea is", "Water boils"], n=2, temperature=0.7, seed=11, max_tokens=8, logprobs=1)
    whole = client.completions.create(**ask)
    text, finishes, tokens, usage = {}, {}, {}, None
    for chunk in client.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text[choice.index] = text.get(choice.index, "") + choice.text
            tokens[choice.index] = tokens.get(choice.index, []) + (choice.logprobs.tokens if choice.logprobs else [])
            if choice.finish_reason:
                assert choice.index not in finishes
                finishes[choice.index] = choice.finish_reason
    for choice in whole.choices:
        assert (text[choice.index], finishes[choice.index]) == (choice.text, choice.finish_reason)
        assert tokens[choice.index] == choice.logprobs.tokens
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


@pytest.mark.parametrize("more,param", [
    ({"temperature": -1}, "temperature"), ({"top_p": 0}, "top_p"), ({"n": 0}, "n"), ({"max_tokens": 0}, "max_tokens"), ({"stop": [""]}, "stop"),
    ({"top_logprobs": 2}, "top_logprobs"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"), ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"seed": 2**63}, "seed"), ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}, "tools"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}}, "response_format"),
    ({"extra_body": {"min_tokens": 9, "max_tokens": 3}}, "min_tokens"), ({"extra_body": {"guided_regex": "a+"}}, "guided_regex"),
])
def test_a_mistake_is_a_bad_request_with_its_field_and_is_never_retried(client, more, param):
    before = metric("rankgate_http_responses_total", 'status="400"')
    for stream in ({}, {"stream": True}):
        if param == "stream_options" and stream:
            continue
        with pytest.raises(openai.BadRequestError) as caught:
            client.with_options(max_retries=3).chat.completions.create(model=MODEL, messages=MESSAGES, **more, **stream)
        error = caught.value
        assert error.param == param and error.type == "invalid_request_error" and error.status_code == 400
        assert error.body["message"] and error.request_id and error.response.headers["content-type"].startswith("application/json")
    assert metric("rankgate_http_responses_total", 'status="400"') == before + (1 if param == "stream_options" else 2)


def test_a_wrong_key_is_an_authentication_error(small):
    for key in ("wrong", "sesam", "sesame2"):
        with pytest.raises(openai.AuthenticationError) as caught:
            openai.OpenAI(base_url=small.server.base_url, api_key=key, max_retries=0).models.list()
        assert caught.value.code == "invalid_api_key" and caught.value.response.headers["www-authenticate"] == "Bearer"
    assert [model.id for model in openai.OpenAI(base_url=small.server.base_url, api_key="sesame", max_retries=0).models.list()] == ["m"]


def test_a_full_house_is_a_rate_limit_that_is_retried_when_told(small):
    client = openai.OpenAI(base_url=small.server.base_url, api_key="sesame", max_retries=0, timeout=30)
    ask = dict(model="m", prompt="x", max_tokens=60, extra_body={"ignore_eos": True})  # 1.2 s
    streams = [client.completions.create(**ask, stream=True) for _ in range(2)]
    for stream in streams:
        next(iter(stream))
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(**ask)
    assert caught.value.code == "rate_limit_exceeded" and 0 < float(caught.value.response.headers["retry-after"]) <= 5
    # With the SDK's own retries the same call succeeds once the others are done.
    raw = client.with_options(max_retries=5).completions.with_raw_response.create(**ask)
    assert raw.retries_taken >= 1 and len(raw.parse().choices[0].text) == 60
    for stream in streams:
        stream.close()


def test_a_rank_that_dies_is_an_api_error_in_the_stream_and_a_503_after(small):
    client = openai.OpenAI(base_url=small.server.base_url, api_key="sesame", max_retries=0, timeout=30)
    stream = client.completions.create(model="m", prompt="x", max_tokens=2000, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    small.kill_rank()
    with pytest.raises(openai.APIError) as caught:
        for _ in stream:
            pass
    assert caught.value.code == "rank_lost" and caught.value.message
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model="m", prompt="x", max_tokens=2)
    assert caught.value.status_code == 503 and caught.value.response.headers["retry-after"]
    # Clients that retry ride over a restart.
    small.start_rank()
    assert client.completions.create(model="m", prompt="x", max_tokens=2, extra_body={"ignore_eos": True}).choices[0].text


def test_a_request_that_its_rank_may_have_died_of_is_not_sent_again_by_the_sdk(small):
    """By its status alone (502) the SDK would carry it to the next rank, and the next."""
    client = openai.OpenAI(base_url=small.server.base_url, api_key="sesame", max_retries=5, timeout=30)
    tokens = small.server.metric("vllm:generation_tokens_total")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.completions.create, model="m", prompt="x", max_tokens=2000, extra_body={"ignore_eos": True})
        wait_for("its first token", lambda: small.server.metric("vllm:generation_tokens_total") > tokens, 10)
        small.kill_rank()
        error = answer.exception(timeout=10)
    small.start_rank()
    assert isinstance(error, openai.InternalServerError) and error.status_code == 502 and error.code == "rank_lost", error
    assert error.response.headers["x-should-retry"] == "false"
    assert error.response.request.headers["x-stainless-retry-count"] == "0"



@pytest.mark.asyncio
async def test_async_raw_responses_errors_and_cancellation():
    async with openai.AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0, timeout=60) as client:
        raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=2)
        assert raw.status_code == 200 and raw.parse().usage.completion_tokens == 2
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("no-such-model")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=MODEL, messages=[], stream=True)
        assert caught.value.param == "messages"
        before = metric("rankgate_aborts_total", 'cause="client_gone"')
        # A task that is cancelled while it waits for a whole answer. The gauge is a moment old: let it forget what was before.
        while metric("rankgate_in_flight"):
            await asyncio.sleep(0.02)
        task = asyncio.create_task(client.chat.completions.create(**LONG))
        while not metric("rankgate_in_flight"):
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        freed_within_a_second(before)
        async with await client.chat.completions.create(**LONG, stream=True) as stream:
            async for _ in stream:
                break
        freed_within_a_second(before + 1)


def test_one_connection_serves_good_and_bad_in_turn():
    before = metric("rankgate_connections_total")
    with openai.OpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0, timeout=60,
                       http_client=openai.DefaultHttpxClient(limits=type(openai.DEFAULT_CONNECTION_LIMITS)(max_connections=1))) as client:
        for _ in range(5):
            with pytest.raises(openai.BadRequestError):
                client.chat.completions.create(model=MODEL, messages=[])
            assert client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1).usage.completion_tokens == 1
    # One of its own, and one for the second reading of the page.
    assert metric("rankgate_connections_total") - before <= 2


@pytest.mark.asyncio
async def test_async_client_streams_concurrently():
    client = openai.AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0, timeout=120)

    async def one(i: int) -> str:
        text = ""
        async for chunk in await client.chat.completions.create(model=MODEL, temperature=0, max_tokens=8, stream=True,
                                                                messages=[{"role": "user", "content": f"Count from {i}"}]):
            text += chunk.choices[0].delta.content or ""
        return text

    alone = [await one(i) for i in range(4)]
    together = await asyncio.gather(*(one(i) for i in range(4)))
    assert list(together) == alone
