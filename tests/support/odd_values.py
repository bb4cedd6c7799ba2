"""What no well-meaning client sends: odd values for every field, bodies that are no object, prompts and messages of every shape."""

BOTH = ["model", "stream", "stream_options", "n", "temperature", "top_p", "min_p", "top_k", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "seed", "max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "stop", "stop_token_ids",
        "include_stop_str_in_output", "logit_bias", "allowed_token_ids", "bad_words", "logprobs", "prompt_logprobs", "response_format",
        "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_whitespace_pattern",
        "guided_decoding_backend", "structural_tag", "priority", "cache_salt", "data_parallel_rank", "skip_special_tokens",
        "spaces_between_special_tokens", "truncate_prompt_tokens", "thinking_token_budget", "return_token_ids",
        "return_tokens_as_token_ids", "add_special_tokens", "kv_transfer_params", "vllm_xargs", "use_beam_search", "length_penalty",
        "repetition_detection", "logits_processors", "prompt_embeds", "best_of", "request_id", "stream_interval", "echo", "suffix"]
CHAT = [*BOTH, "messages", "top_logprobs", "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs",
        "reasoning_effort", "documents", "tools", "tool_choice", "functions", "function_call", "web_search_options", "modalities"]
COMPLETIONS = [*BOTH, "prompt"]
TOKENIZE = ["model", "prompt", "content", "messages", "add_special_tokens", "add_special", "return_token_strs", "with_pieces",
            "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "tools"]
DETOKENIZE = ["model", "tokens"]

DEEP = "[" * 120 + "]" * 120
# As JSON text, so that what Python's writer cannot say is said too.
VALUES = ["true", "false", "0", "1", "-1", "1.5", "-0.0", "1e300", "9223372036854775807", "9223372036854775808", "-9223372036854775808",
          "18446744073709551615", '""', '"x"', '"\\u0000"', '"1"', '"' + "y" * 100_000 + '"', '"\\ud83d\\ude00"', "[]", "[null]", "[1]",
          "[-1]", "[1.5]", "[999999999999]", '["a"]', '[""]', '["\\u0000"]', "[[]]", "[[1]]", "[{}]", "[true]", '[1,"a"]', '["a",1]',
          '["a",[1]]', DEEP, "{}", '{"a":1}', '{"":""}', '{"type":null}', '{"type":"json_schema"}', '{"1":"x"}', '{"1":null}',
          '{"-1":1}', '{"99999999999":1}', '{"include_usage":1}', '{"type":"json_object","schema":1}', '{"json":"{","regex":"("}']


def base(path: str) -> dict:
    if path.endswith("chat/completions"):
        return {"model": '"m"', "messages": '[{"role":"user","content":"hi"}]', "max_tokens": "2"}
    if path.endswith("completions"):
        return {"model": '"m"', "prompt": '"hi"', "max_tokens": "2"}
    return {"model": '"m"', "tokens": "[97]"} if path == "/detokenize" else {"model": '"m"', "prompt": '"hi"'}


def text(fields: dict) -> bytes:
    return ("{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}").encode()


ROOTS = [b"", b" ", b"{", b"}", b"null", b"true", b"1", b'"x"', b"[]", b"[{}]", b"{}{}", b"{} x", b'{"model":"m",}', b"{'model':'m'}",
         b'{"model":"m","prompt":NaN}', b'{"temperature":NaN}', b'{"temperature":Infinity}', b'{"temperature":-Infinity}', b'{"n":01}',
         b'{"n":+1}', b'{"n":1.}', b'{"n":0x1}', b'{"n":1e}', b'{"prompt":"\x00"}', b'{"prompt":"\n"}', b'{"prompt":"\\x41"}',
         b'{"prompt":"\\u12"}', b'{"prompt":"\\ud800"}', b'{"prompt":"\\udc00\\ud800"}', b'{"prompt":"\\ud800\\u0041"}',
         b'{"prompt":"\xff"}', b'{"prompt":"\xc0\x80"}', b'{"prompt":"\xed\xa0\x80"}', b'{"prompt":"\xf4\x90\x80\x80"}',
         b'\xef\xbb\xbf{"model":"m","prompt":"hi"}', '{"prompt":"hi"}'.encode("utf-16"), '{"prompt":"你好"}'.encode("gbk"),
         b'{"a":' * 200 + b"1" + b"}" * 200, b"[" * 1_000_000, b'{"a":' * 300_000, b'{"prompt":"' + b"\\" * 1001 + b'"}',
         b"// c\n{}", b"/* c */{}", b"\x1f\x8b\x08\x00garbage", b"model=m&prompt=hi", b"--x\r\nContent-Disposition: form-data\r\n\r\n--x--",
         b'{"model":"m","prompt":"hi","prompt":"ho"}', b'{"n":1,"n":1}', b'{"seed":' + b"9" * 5000 + b"}", b'{"x":' + b"9" * 400 + b"}",
         b'{"temperature":1e999}', b'{"temperature":-1e999}', b'{"logit_bias":{"1":1e999}}', b'{"stop_token_ids":[1e999]}']

# What a prompt of this shape is answered with (byte tokenizer: 259 ids).
PROMPTS = {
    '""': 400, "[]": 400, "[[]]": 400, '["a",[]]': 400, '[[1],"a"]': 200, '["a",[1,2]]': 200, "[97]": 200, "[[97],[98,99]]": 200,
    "[258]": 200, "[259]": 400, "[-1]": 400, "[2147483648]": 400, "[5279552648203111001]": 400, "[18446744073709551615]": 400,
    "[1.5]": 400, "[1e2]": 200, "[97.0, 98.0]": 200, "[1e300]": 400, "[-1.0]": 400, "[true]": 400, "[null]": 400, '["a",null]': 400, '["a",true]': 400, "[[97],98]": 400, "[97,[98]]": 400,
    '[97,"a"]': 400, "[[[97]]]": 400, '{"a":1}': 400, '["\\u0000"]': 200, '[""]': 400, '["a",""]': 400, "0": 400, "true": 400,
}

# Messages that are a 400, and the parameter it names.
MESSAGES = [
    ("[]", "messages"), ("{}", "messages"), ('"hi"', "messages"), ("[null]", "messages[0]"), ("[1]", "messages[0]"), ("[[]]", "messages[0]"),
    ("[{}]", "messages[0].role"), ('[{"role":"user"}]', "messages[0].content"), ('[{"role":"user","content":null}]', "messages[0].content"),
    ('[{"role":"user","content":1}]', "messages[0].content"), ('[{"role":"user","content":{}}]', "messages[0].content"),
    ('[{"role":"user","content":true}]', "messages[0].content"), ('[{"role":1,"content":"a"}]', "messages[0].role"),
    ('[{"role":"","content":"a"}]', "messages[0].role"), ('[{"role":null,"content":"a"}]', "messages[0].role"),
    ('[{"content":"a"}]', "messages[0].role"), ('[{"role":"user","content":[null]}]', "messages[0].content[0]"),
    ('[{"role":"user","content":[1]}]', "messages[0].content[0]"), ('[{"role":"user","content":["a"]}]', "messages[0].content[0]"),
    ('[{"role":"user","content":[{}]}]', "messages[0].content[0].type"),
    ('[{"role":"user","content":[{"type":null,"text":"a"}]}]', "messages[0].content[0].type"),
    ('[{"role":"user","content":[{"type":"text"}]}]', "messages[0].content[0]"),
    ('[{"role":"user","content":[{"type":"text","text":null}]}]', "messages[0].content[0].text"),
    ('[{"role":"user","content":[{"type":"text","text":1}]}]', "messages[0].content[0].text"),
    ('[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url","image_url":{"url":"data:,"}}]}]', "messages[0].content[1]"),
    ('[{"role":"user","content":[{"type":"input_audio"}]}]', "messages[0].content[0]"),
    ('[{"role":"user","content":[{"type":"input_text","text":"a"}]}]', "messages[0].content[0]"),
    ('[{"role":"user","content":"a","name":1}]', "messages[0].name"), ('[{"role":"tool","content":"a","tool_call_id":[]}]', "messages[0].tool_call_id"),
    ('[{"role":"assistant","tool_calls":{}}]', "messages[0].tool_calls"), ('[{"role":"assistant","tool_calls":[1]}]', "messages[0].tool_calls[0]"),
    ('[{"role":"assistant","tool_calls":[{}]}]', "messages[0].tool_calls[0].function"),
    ('[{"role":"assistant","tool_calls":[{"function":{"name":1}}]}]', "messages[0].tool_calls[0].function.name"),
    ('[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":1}}]}]', "messages[0].tool_calls[0].function.arguments"),
    ('[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{"}}]}]', "messages[0].tool_calls[0].function.arguments"),
    ('[{"role":"user","content":"a","tool_calls":[{"function":{"name":"f"}}]}]', "messages[0].tool_calls"),
    ('[{"role":"assistant","content":"a","function_call":{"name":"f","arguments":"{}"}}]', "messages[0].function_call"),
    ('[{"role":"' + "r" * 300 + '","content":"a"}]', "messages[0].role"),
]
GOOD_MESSAGES = [
    '[{"role":"user","content":""}]', '[{"role":"user","content":[]}]', '[{"role":"user","content":[{"type":"text","text":""}]}]',
    '[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]', '[{"role":"user","content":"\\u0000"}]',
    '[{"role":"system","content":[{"type":"text","text":"a"}]},{"role":"user","content":"b"}]', '[{"role":"developer","content":"a"}]',
    '[{"role":"user","content":"a"},{"role":"assistant","content":null}]', '[{"role":"user","content":"a"},{"role":"assistant"}]',
    '[{"role":"user","content":"a"},{"role":"assistant","content":""}]', '[{"role":"user","content":"a"},{"role":"user","content":"b"}]',
    '[{"role":"assistant","content":"a","tool_calls":[]},{"role":"user","content":"b"}]', '[{"role":"function","name":"f","content":"a"}]',
    '[{"role":"user","content":"a","refusal":null,"audio":null,"name":null,"tool_calls":null,"frobnicate":{"a":[1]}}]',
    '[{"role":"assistant","content":null,"tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":""}}]},'
    '{"role":"tool","tool_call_id":"c","content":[{"type":"text","text":"a"}]}]',
    '[{"role":"assistant","content":null,"tool_calls":[{"function":{"name":"f","arguments":"[1]"}}]},{"role":"tool","content":"a"}]',
]
