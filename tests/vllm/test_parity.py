"""The same requests through vLLM's own API server: equal token ids (greedy) and the same JSON shape, field by field."""
import json
import signal

import pytest
from conftest import ENGINE_ENV, ENGINE_FLAGS, START_S, VLLM, WORK, tiny_model
from rankgate_process import Process, Server, free_port, wait_for

pytestmark = pytest.mark.slow

# Differences that are meant; docs/openai-api.md gives the reason of each: what is null there is absent here.
MEANT_ABSENT = {"service_tier", "system_fingerprint", "kv_transfer_params", "prompt_logprobs", "prompt_token_ids", "token_ids", "annotations",
                "audio", "function_call", "reasoning", "reasoning_content", "tool_calls", "prompt_tokens_details", "completion_tokens_details",
                "ec_transfer_params", "routed_experts", "metrics",
                "prompt_text", "prompt_routed_experts"}


class Peer(Server):
    def __init__(self, model):
        log = WORK / "peer.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        self.port = free_port()
        Process.__init__(self, [f"{VLLM}/vllm", "serve", str(model), "--served-model-name", "tiny", "--port", str(self.port), "--host", "127.0.0.1",
                                "--return-tokens-as-token-ids", *ENGINE_FLAGS], log, {**ENGINE_ENV, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
        self.root = f"http://127.0.0.1:{self.port}"

    def ready(self):
        assert self.popen.poll() is None, self.text()[-3000:]
        try:
            return self.get("/health")[0] == 200
        except OSError:
            return False


@pytest.fixture(scope="module")
def peer():
    server = Peer(tiny_model("dense"))
    try:
        yield server.wait_ready(START_S)
    finally:
        server.stop(signal.SIGKILL)


REQUESTS = [
    ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0}),
    ("/v1/completions", {"prompt": "hello world", "max_tokens": 12, "temperature": 0}),
    ("/v1/completions", {"prompt": ["hello", "the queue"], "max_tokens": 5, "temperature": 0}),
    ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "logprobs": 2}),
    ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "logprobs": 1, "echo": True}),
    ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 9, "temperature": 0, "min_tokens": 3, "ignore_eos": True}),
    ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 9, "temperature": 0, "logit_bias": {"300": 100}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello world"}], "max_tokens": 12, "temperature": 0}),
    ("/v1/chat/completions", {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hello"}]}],
                              "max_tokens": 6, "temperature": 0}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "temperature": 0, "logprobs": True, "top_logprobs": 2}),
]


def shape(value, path=""):
    """{path: type} of a reply; list elements share one path, null counts as present."""
    out = {}
    if isinstance(value, dict):
        for key, inner in value.items():
            if path.endswith(("top_logprobs", "top_logprobs[]")) and path.count("logprobs") and not key.isidentifier():
                continue
            out.update(shape(inner, f"{path}.{key}"))
    elif isinstance(value, list):
        out[path] = "list"
        for inner in value[:1]:
            out.update(shape(inner, path + "[]"))
    else:
        out[path] = "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value).__name__
    return out


@pytest.mark.parametrize("path,body", REQUESTS, ids=[json.dumps(b)[:70] for _, b in REQUESTS])
def test_same_tokens_and_same_shape(peer, dense1, path, body):
    ours = dense1.gateway.post(path, {"model": "tiny", **body})
    theirs = peer.post(path, {"model": "tiny", **body})
    assert ours[0] == theirs[0] == 200, (ours, theirs)
    for mine, other in zip(ours[1]["choices"], theirs[1]["choices"], strict=True):
        # A token cap may fall inside a character: vLLM keeps the cut bytes to itself, we give them out as U+FFFD, as in a stream's end.
        texts = [choice.get("text", choice.get("message", {}).get("content")) for choice in (mine, other)]
        assert texts[0].rstrip("\ufffd") == texts[1].rstrip("\ufffd")
        assert mine["finish_reason"] == other["finish_reason"]
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert ours[1]["usage"][key] == theirs[1]["usage"][key]
    mine, other = shape(ours[1]), shape(theirs[1])
    missing = {p for p in other if p not in mine and p.split(".")[-1].rstrip("[]") not in MEANT_ABSENT
               and not any(part.rstrip("[]") in MEANT_ABSENT for part in p.split("."))}
    missing = {p for p in missing if ".top_logprobs[]." not in p}  # keys there are token texts
    assert not missing, sorted(missing)
