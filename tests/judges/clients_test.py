# SPDX-License-Identifier: Apache-2.0
"""Client libraries with opinions of their own about replies and errors: LiteLLM and Pydantic AI. BASE_URL, MODEL; lane `clients` of judges.sh."""
import os

import litellm
import pytest
from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

MODEL = os.environ["MODEL"]
MESSAGES = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "What is the capital of France?"}]


def ask(**more):
    return litellm.completion(model="openai/" + MODEL, api_base=os.environ["BASE_URL"], api_key="none", num_retries=0, timeout=60,
                              **{"messages": MESSAGES, "temperature": 0, "max_tokens": 16, **more})


def test_litellm_reads_answer_and_usage():
    reply = ask()
    assert "Paris" in reply.choices[0].message.content and reply.choices[0].finish_reason == "stop"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens > 0


def test_litellm_streams_the_same_text_and_usage():
    whole = ask(max_tokens=40)
    chunks = list(ask(max_tokens=40, stream=True, stream_options={"include_usage": True}))
    built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert built.choices[0].message.content == whole.choices[0].message.content
    assert built.choices[0].finish_reason == whole.choices[0].finish_reason
    assert built.usage.completion_tokens == whole.usage.completion_tokens


def test_litellm_tells_n_choices_and_logprobs():
    reply = ask(n=2, temperature=0.9, seed=3, logprobs=True, top_logprobs=2, max_tokens=4, ignore_eos=True)
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert all(len(choice.logprobs.content) == 4 and len(choice.logprobs.content[0].top_logprobs) == 2 for choice in reply.choices)


@pytest.mark.parametrize("more,kind", [
    ({"messages": [{"role": "user", "content": "word " * 5000}]}, litellm.ContextWindowExceededError),
    ({"max_tokens": 100_000}, litellm.ContextWindowExceededError),
    ({"temperature": 9}, litellm.BadRequestError), ({"messages": []}, litellm.BadRequestError),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}, litellm.BadRequestError),
])
def test_litellm_names_the_kind_of_error(more, kind):
    for stream in (False, True):
        with pytest.raises(kind):
            list(ask(stream=stream, **more))


def test_litellm_finds_no_unknown_model():
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model="openai/nope", api_base=os.environ["BASE_URL"], api_key="none", messages=MESSAGES, num_retries=0)


def test_litellm_completes_text_with_scores():
    reply = litellm.text_completion(model="text-completion-openai/" + MODEL, api_base=os.environ["BASE_URL"], api_key="none", num_retries=0,
                                    prompt="The capital of France is", max_tokens=3, temperature=0, logprobs=1, echo=True)
    choice = reply.choices[0]
    assert choice.text.startswith("The capital of France is")


def agent(**more) -> Agent:
    return Agent(OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=os.environ["BASE_URL"], api_key="none")),
                 model_settings={"temperature": 0, "max_tokens": 24}, **more)


def test_pydantic_ai_runs_and_keeps_a_conversation():
    one = agent(instructions="You are a helpful assistant.")
    first = one.run_sync("What is the capital of France?")
    assert "Paris" in first.output and first.usage.output_tokens > 0
    second = one.run_sync("And of Italy?", message_history=first.all_messages())
    assert second.output and len(second.all_messages()) == 4


@pytest.mark.timeout(60)
def test_pydantic_ai_streams():
    import asyncio

    async def run() -> tuple[str, int]:
        async with agent().run_stream("Tell me about the sea.") as result:
            pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
            return "".join(pieces), len(pieces)

    text, pieces = asyncio.run(run())
    assert text and pieces > 5


def test_pydantic_ai_shows_the_refusal_of_tools():
    one = agent()

    @one.tool_plain
    def weather(city: str) -> str:
        return "rain in " + city

    with pytest.raises(ModelHTTPError) as caught:
        one.run_sync("weather?")
    assert caught.value.status_code == 400 and caught.value.body["param"] == "tools"
