#!/usr/bin/env python3
# Turns the vocabulary of a GGUF file with GPT-2 style BPE and SmolLM's pre-tokenizer into a tokenizer.json, so that tests can compare the
# two readers of one vocabulary. Usage: gguf_to_tokenizer_json.py MODEL.gguf OUT_DIR
import json
import pathlib
import struct
import sys

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def scalar(self, fmt):
        value, = struct.unpack_from(fmt, self.data, self.at)
        self.at += struct.calcsize(fmt)
        return value

    def text(self):
        size = self.scalar("<Q")
        self.at += size
        return bytes(self.data[self.at - size:self.at]).decode("utf-8")

    def value(self, kind):
        if kind == 8:
            return self.text()
        if kind == 9:
            inner, count = self.scalar("<I"), self.scalar("<Q")
            return [self.value(inner) for _ in range(count)]
        return self.scalar(SCALARS[kind])


def main():
    source, out = sys.argv[1], pathlib.Path(sys.argv[2])
    with open(source, "rb") as f:
        reader = Reader(memoryview(f.read(16 << 20)))
    assert bytes(reader.data[:4]) == b"GGUF", "not a GGUF file"
    reader.at = 4
    reader.scalar("<I")
    reader.scalar("<Q")
    meta = {}
    for _ in range(reader.scalar("<Q")):
        key = reader.text()
        meta[key] = reader.value(reader.scalar("<I"))
    assert meta["tokenizer.ggml.model"] == "gpt2" and meta["tokenizer.ggml.pre"] == "smollm", "only GPT-2 BPE with SmolLM's splitter"
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    added = [{"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": types[i] == 3}
             for i, t in enumerate(tokens) if types[i] in (3, 4)]
    model = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": {t: i for i, t in enumerate(tokens)},
                  "merges": [m.split(" ", 1) for m in meta["tokenizer.ggml.merges"]]}}
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokenizer.json").write_text(json.dumps(model, ensure_ascii=False))
    ids = {name: meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    (out / "tokenizer_config.json").write_text(json.dumps({
        **{f"{k}_token": tokens[v] for k, v in ids.items() if v is not None}, "chat_template": meta["tokenizer.chat_template"]}))


if __name__ == "__main__":
    main()
