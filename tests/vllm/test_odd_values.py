"""Odd values for every field, and bodies of every shape, through HTTP to a real rank: a 400 or an answer, never a 5xx, and the rank lives."""
import json

import pytest
from odd_values import CHAT, COMPLETIONS, GOOD_MESSAGES, MESSAGES, PROMPTS, ROOTS, VALUES, base, text

pytestmark = pytest.mark.slow


def bodies():
    for path, fields in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETIONS)):
        for field in fields:
            for value in ["null", *VALUES]:
                # A cap that the swept field does not lift: dummy weights never end by themselves.
                cap = {"max_completion_tokens": "2"} if field == "max_tokens" else {}
                yield path, text({**base(path), "model": '"tiny"', **cap, field: value})
    for messages in [messages for messages, _ in MESSAGES] + GOOD_MESSAGES:
        yield "/v1/chat/completions", text({**base("/v1/chat/completions"), "model": '"tiny"', "messages": messages})
    for prompt in PROMPTS:
        yield "/v1/completions", text({**base("/v1/completions"), "model": '"tiny"', "prompt": prompt})
    for body in ROOTS:
        yield "/v1/completions", body


def test_odd_values_are_answered_or_a_400_and_the_rank_lives(dense1):
    import http.client
    connection = http.client.HTTPConnection("127.0.0.1", dense1.gateway.port, timeout=60)
    seen = {}
    for path, body in bodies():
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        raw = reply.read()
        assert reply.status in (200, 400, 404), (path, body[:300], reply.status, raw[:300])
        if reply.status != 200:
            assert set(json.loads(raw)["error"]) == {"message", "type", "param", "code"}
        seen[reply.status] = seen.get(reply.status, 0) + 1
    assert seen[200] > 300 and seen[400] > 4000, seen
    assert dense1.state(0) == "live"
    status, reply = dense1.complete()
    assert status == 200 and reply["usage"]["completion_tokens"] == 4
    dense1.gateway.wait_idle(5)
