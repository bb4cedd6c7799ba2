"""The official OpenAI Python SDK against a running server: BASE_URL, ROOT, MODEL."""
import os
import time
import urllib.request

import openai
import pytest

MODEL = os.environ["MODEL"]
MESSAGES = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client():
    return openai.OpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0, timeout=60)


def metric(name: str) -> float:
    text = urllib.request.urlopen(os.environ["ROOT"] + "/metrics", timeout=10).read().decode()
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith((name + "{", name + " ")))


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


def test_closing_a_stream_frees_its_slot(client):
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1000, stream=True, temperature=1.0,
                                            extra_body={"ignore_eos": True})
    next(iter(stream))
    assert metric("rankgate_in_flight") == 1
    stream.close()
    deadline = time.monotonic() + 1.0
    while metric("rankgate_in_flight") or metric("rankgate_streams_open"):
        assert time.monotonic() < deadline, "the slot was not freed within a second"
        time.sleep(0.02)


@pytest.mark.asyncio
async def test_async_client_streams_concurrently():
    import asyncio

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
