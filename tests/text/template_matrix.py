#!/usr/bin/env python3
# Writes cases in the form of template_goldens.json for a folder of real templates: each with ten conversations.
# Usage: template_matrix.py TEMPLATES_DIR OUT.json      (run_template_matrix.sh gets the templates and compares)
import json
import pathlib
import sys

from hf_jinja import NOW, render

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Weather at a place – \"now\"", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "description": "Name"}, "days": {"type": "integer", "default": 1},
                                     "unit": {"type": "string", "enum": ["C", "F"]}}, "required": ["city"]}}}]
CALL = [{"id": "call_00001", "type": "function", "function": {"name": "get_weather", "arguments": "{\"city\": \"Köln\", \"days\": 2}"}}]
U = {"role": "user", "content": "What is the weather in Köln?"}
S = {"role": "system", "content": "You are helpful."}
A = {"role": "assistant", "content": "Sunny."}
CASES = {
    "plain": dict(messages=[U]),
    "system": dict(messages=[S, U]),
    "turns": dict(messages=[S, U, A, {"role": "user", "content": " And  tomorrow?\n"}]),
    "tools": dict(messages=[S, U], tools=TOOLS),
    "call": dict(messages=[U, {"role": "assistant", "content": None, "tool_calls": CALL},
                           {"role": "tool", "tool_call_id": "call_00001", "name": "get_weather", "content": "{\"t\": 21.5}"}], tools=TOOLS),
    "call and text": dict(messages=[S, U, {"role": "assistant", "content": "Let me look.", "tool_calls": CALL},
                                    {"role": "tool", "tool_call_id": "call_00001", "content": "21"}, A, U], tools=TOOLS),
    "thinking": dict(messages=[U, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSunny."}, U], kwargs={"enable_thinking": True}),
    "no thinking": dict(messages=[U], kwargs={"enable_thinking": False, "thinking": False}),
    "parts": dict(messages=[{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]),
    "no prompt": dict(messages=[U, A], add_generation_prompt=False),
}


def main():
    folder, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    templates = {p.stem: p.read_text() for p in sorted(folder.glob("*.jinja"))}
    cases = []
    kinds = {}
    for name, source in templates.items():
        for label, how in CASES.items():
            kind, text = render(source, tokens=TOKENS, **how)
            kinds[kind] = kinds.get(kind, 0) + 1
            cases.append({"name": f"{name} | {label}", "template": name, **how, "kind": kind, "expect": text})
    out.write_text(json.dumps({"now": NOW, "tokens": TOKENS, "templates": templates, "chats": {}, "V": {}, "cases": cases}, ensure_ascii=False))
    print(len(templates), "templates,", len(cases), "cases:", kinds)


if __name__ == "__main__":
    main()
