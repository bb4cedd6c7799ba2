# The reference for chat templates: Python's Jinja2 configured as Hugging Face transformers configures it, with the preparation of
# messages that `vllm serve` does first. Used by make_template_goldens.py and template_matrix.py; needs the jinja2 package.
import copy
import datetime
import json

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

NOW = 1_760_000_000  # what strftime_now sees, UTC
TEXT_TYPES = ("text", "input_text", "output_text")


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(lineno)

    def _render(self, caller):
        return caller()


def _raise(message):
    raise jinja2.exceptions.TemplateError(message)


def _tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda f: datetime.datetime.fromtimestamp(NOW, datetime.timezone.utc).strftime(f)
    return env


def walks_content(source):
    """vLLM's "openai" content format: some loop goes over message['content'] (filters and slices looked through)."""
    try:
        tree = environment().parse(source)
    except jinja2.TemplateError:
        return False
    for loop in tree.find_all(jinja2.nodes.For):
        over = loop.iter
        while True:
            if isinstance(over, jinja2.nodes.Filter):
                over = over.node
            elif isinstance(over, jinja2.nodes.Getitem) and isinstance(over.arg, jinja2.nodes.Slice):
                over = over.node
            else:
                break
        if isinstance(over, jinja2.nodes.Getattr) and over.attr == "content" and isinstance(over.node, jinja2.nodes.Name):
            return True
        if (isinstance(over, jinja2.nodes.Getitem) and isinstance(over.arg, jinja2.nodes.Const) and over.arg.value == "content"
                and isinstance(over.node, jinja2.nodes.Name)):
            return True
    return False


def prepare(messages, source):
    as_parts = walks_content(source)
    out = []
    for message in copy.deepcopy(messages):
        made = {}
        for key, value in message.items():
            if key == "content":
                parts = [] if value is None else [{"type": "text", "text": value}] if isinstance(value, str) else value
                parts = [{"type": "text", "text": p["text"]} if isinstance(p, dict) and p.get("type") in TEXT_TYPES else p for p in parts]
                made["content"] = parts if as_parts else "\n".join(p["text"] for p in parts)
            elif value is None:
                continue
            elif key == "role":
                made["role"] = "system" if value == "developer" and "developer" not in source else value
            elif key == "tool_calls":
                for call in value:
                    args = call["function"].get("arguments")
                    call["function"]["arguments"] = (json.loads(args) if args.strip() else {}) if isinstance(args, str) else args or {}
                made["tool_calls"] = value
            else:
                made[key] = value
        made.setdefault("content", [] if as_parts else "")
        out.append(made)
    return out


def render(source, tokens=None, messages=(), tools=None, documents=None, kwargs=None, add_generation_prompt=True,
           continue_final_message=False):
    """-> ("text", prompt) or ("raise", sentence) for raise_exception or ("error", message) for any other fault."""
    tag = "CONTINUE_FINAL_MESSAGE_TAG "
    try:
        template = environment().from_string(source)
        messages = prepare(messages, source)
        if continue_final_message:
            last = messages[-1]
            if isinstance(last["content"], str):
                last["content"] += tag
            else:
                [p for p in last["content"] if p.get("type") == "text"][-1]["text"] += tag
        text = template.render(messages=messages, tools=tools, documents=documents, add_generation_prompt=add_generation_prompt,
                               **{**(tokens or {}), **(kwargs or {})})
        if continue_final_message:
            at = text.rindex(tag.strip())
            text = text[:at] if text[at:].startswith(tag) else text[:at].rstrip()
        return "text", text
    except jinja2.exceptions.TemplateSyntaxError as e:
        return "syntax", str(e)
    except jinja2.exceptions.UndefinedError as e:
        return "error", str(e)
    except jinja2.exceptions.SecurityError as e:
        return "error", str(e)
    except jinja2.exceptions.TemplateError as e:
        return ("raise" if type(e) is jinja2.exceptions.TemplateError else "error"), str(e)
    except Exception as e:  # noqa: BLE001 whatever a template does wrong
        return "error", f"{type(e).__name__}: {e}"
