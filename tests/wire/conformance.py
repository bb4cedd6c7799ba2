# SPDX-License-Identifier: Apache-2.0
"""Random structs through the engines' real encoder (msgspec) and the product's codec, both ways.

A. msgspec encodes, the product decodes: the fields are equal (or it refuses what msgspec refuses).
B. the product encodes: the bytes are those of msgspec where both write the same form, and always decode strictly to the same struct.

usage: conformance.py PATH_TO_wire_peer [--count N] [--seed S]
"""
import argparse
import json
import random
import struct
import subprocess
import sys
import zlib

import msgspec

import structs as s


class Peer:
    def __init__(self, path):
        self.process = subprocess.Popen([path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, op, frames):
        self.process.stdin.write(json.dumps({"op": op, "frames": [f.hex() for f in frames]}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"wire_peer died on {op} {[f.hex() for f in frames]}")
        return json.loads(line)

    def close(self):
        self.process.stdin.close()
        return self.process.wait()


class Maker:
    """Random values with the edges of every msgpack width among them."""

    INTS = [0, 1, 31, 32, 127, 128, 255, 256, 65535, 65536, 2**31 - 1]

    def __init__(self, seed):
        self.r = random.Random(seed)

    def chance(self, p=0.5):
        return self.r.random() < p

    def token(self):
        return self.r.choice(self.INTS) if self.chance(0.3) else self.r.randrange(0, 200000)

    def tokens(self, most=20):
        return [self.token() for _ in range(self.r.choice([0, 1, 1, 2, 15, 16, 17, most]))]

    def text(self):
        size = self.r.choice([0, 1, 5, 31, 32, 40, 255, 256, 300])
        return "".join(self.r.choice("abz-_0é中😀\"\\\n") for _ in range(size))

    def name(self):
        return "r-" + "".join(self.r.choice("abcdef0123456789") for _ in range(self.r.choice([1, 20, 40])))

    def real(self, low, high):
        return float(self.r.choice([low, high, (low + high) / 2, self.r.uniform(low, high)]))

    def maybe(self, make):
        return make() if self.chance(0.4) else None

    def i64(self):
        return self.r.choice([0, -1, -32, -33, -128, -129, -32768, -32769, -(2**31), -(2**31) - 1, -(2**63), 2**63 - 1,
                              2**32 - 1, 2**32, self.r.randrange(-(2**63), 2**63)])

    # ---- vLLM ----

    def sampling(self):
        p = s.SamplingParams()
        p.max_tokens = self.r.choice([1, 17, 200, 10**12])
        p.temperature = self.real(0.02, 2.0) if self.chance(0.7) else 0.0
        if self.chance():
            p.presence_penalty, p.frequency_penalty = self.real(-2, 2), self.real(-2, 2)
            p.repetition_penalty = self.real(0.1, 2)
        if self.chance() and p.temperature > 0:
            p.top_p, p.top_k, p.min_p = self.real(0.1, 1), self.r.choice([0, 1, 40, 2**31 - 1]), self.real(0, 1)
        p.seed = self.maybe(self.i64)
        p.stop_token_ids = self.maybe(self.tokens)
        p.ignore_eos = self.chance(0.2)
        p.min_tokens = self.r.choice([0, 0, 1])
        p.logprobs = self.maybe(lambda: self.r.choice([-1, 0, 5, 20]))
        p.prompt_logprobs = self.maybe(lambda: self.r.choice([0, 1, 20]))
        if not p.ignore_eos:
            p._eos_token_id = self.maybe(self.token)
        p._all_stop_token_ids = set(self.tokens()) if self.chance() else set()
        p.logit_bias = self.maybe(lambda: {self.token(): self.real(-100, 100) for _ in range(self.r.choice([1, 3, 16]))})
        p.allowed_token_ids = self.maybe(self.tokens)
        p.bad_words = self.maybe(lambda: ["w" + self.text() for _ in range(2)])
        p._bad_words_token_ids = self.maybe(lambda: [[self.token()] for _ in range(3)])
        p.skip_reading_prefix_cache = True if self.chance(0.3) else None
        p.thinking_token_budget = self.maybe(lambda: self.r.choice([0, 100]))
        # An empty list and nothing are the same here; the product leaves both out.
        p.stop_token_ids = p.stop_token_ids or None
        return p

    def vllm_request(self):
        return s.EngineCoreRequest(
            request_id=self.name(), prompt_token_ids=self.tokens(600) or [1], mm_features=None,
            sampling_params=self.sampling(), pooling_params=None, arrival_time=self.r.uniform(0, 2e9),
            lora_request=self.maybe(lambda: s.LoRARequest("a", self.r.randrange(1, 2**31), self.text(), self.maybe(self.text))),
            cache_salt=self.maybe(self.text), data_parallel_rank=self.maybe(lambda: self.r.randrange(65536)),
            client_index=self.r.randrange(4), current_wave=self.r.randrange(2**40), priority=self.i64(),
            trace_headers=self.maybe(lambda: {"traceparent": self.text(), "x": self.text()}))

    def tensor(self, kind, values, shape):
        dtype, code = kind
        return s.Tensor(dtype, shape, b"".join(struct.pack(code, v) for v in values))

    def logprobs(self, prompt):
        rows, width = self.r.choice([(0, 2), (1, 1), (1, 3), (2, 81), (1, 64), (63, 1), (64, 1), (40, 6)])
        ids = [self.token() for _ in range(rows * width)]
        values = [struct.unpack("<f", struct.pack("<f", self.r.uniform(-30, 0)))[0] for _ in ids]
        ranks = [self.r.randrange(1, 100000) for _ in range(rows)]
        if prompt:
            return (self.tensor(("int32", "<i"), ids, (rows, width)), self.tensor(("float32", "<f"), values, (rows, width)),
                    self.tensor(("int32", "<i"), ranks, (rows,)), None, None)
        return (self.tensor(("<i4", "<i"), ids, (rows, width)), self.tensor(("<f4", "<f"), values, (rows, width)),
                self.tensor(("<i8", "<q"), ranks, (rows,)), None)

    def vllm_output(self):
        o = s.EngineCoreOutput(self.name(), self.tokens())
        o.new_logprobs = self.logprobs(False) if self.chance(0.2) else None
        o.new_prompt_logprobs_tensors = self.logprobs(True) if self.chance(0.1) else None
        if self.chance(0.3):
            o.finish_reason = self.r.choice(list(s.FinishReason))
            o.stop_reason = self.maybe(lambda: self.r.choice([self.token(), "stop " + self.text()]))
        if self.chance(0.3):
            cached, new = self.r.randrange(1000), self.r.randrange(1000)
            o.prefill_stats = s.PrefillStats(cached + new, new, cached, cached, 0, 0)
        return o

    def vllm_outputs(self):
        m = s.EngineCoreOutputs(engine_index=self.r.choice([0, 1, 255, 256, 65535]), timestamp=self.r.uniform(0, 1e6))
        kind = self.r.randrange(3)
        if kind == 0:
            m.outputs = [self.vllm_output() for _ in range(self.r.choice([0, 1, 2, 15, 16, 17]))]
            if self.chance():
                c = [self.r.choice(self.INTS) for _ in range(12)]
                m.scheduler_stats = s.SchedulerStats(
                    num_running_reqs=c[0], num_waiting_reqs=c[1], num_skipped_waiting_reqs=c[2], step_counter=c[3],
                    current_wave=c[4], kv_cache_usage=self.real(0, 1),
                    prefix_cache_stats=s.PrefixCacheStats(self.chance(), c[5], c[6], c[7], c[8], c[9], c[10]))
            if self.chance(0.3):
                m.finished_requests = {self.name() for _ in range(self.r.choice([1, 2, 17]))}
            m.weight_version = self.r.choice([None, "default", "v2"])
        elif kind == 1:
            call = self.r.choice([0, 7, 2**31, 2**64 - 1, self.r.randrange(2**64)])
            result = self.r.choice([None, True, False, ["generate"], [1, 2, 3], {"a": 1}, "default"])
            m.utility_output = s.UtilityOutput(call, None, (None, result)) if self.chance(0.7) else \
                s.UtilityOutput(call, "Call failed: " + self.text(), None)
        elif self.chance():
            m.wave_complete = self.r.randrange(2**40)
        else:
            m.start_wave = self.r.randrange(2**40)
        return m

    # ---- TokenSpeed ----

    def ts_sampling(self):
        p = s.TsSamplingParams()
        p.max_new_tokens = self.r.choice([1, 8, 4096, 2**31])
        p.stop_token_ids = set(self.tokens()) or None if self.chance() else None
        p.temperature = self.real(0.01, 2)
        p.top_p, p.min_p = self.real(0.1, 1), self.real(0, 1)
        p.top_k = self.r.choice([2, 40, 127, 1 << 30])
        p.frequency_penalty, p.presence_penalty = self.real(-2, 2), self.real(-2, 2)
        p.repetition_penalty, p.min_new_tokens = self.real(0.1, 2), self.r.choice([0, 1])
        if self.chance(0.3):
            setattr(p, self.r.choice(["json_schema", "regex", "ebnf", "structural_tag"]), "x" + self.text())
        p.ignore_eos = self.chance(0.2)
        p.skip_special_tokens, p.spaces_between_special_tokens = self.chance(), self.chance()
        p.no_stop_trim = self.chance()
        p.thinking_budget = self.maybe(lambda: self.r.choice([0, 100]))
        p.logit_bias = self.maybe(lambda: {str(self.token()): self.real(-5, 5) for _ in range(self.r.choice([1, 16]))})
        p.seed = self.maybe(lambda: self.r.randrange(2**63))
        p.stop_strs, p.is_normalized = [], True
        return p

    def ts_request(self):
        return s.TokenizedGenerateReqInput(
            rid=self.name(), input_ids=self.tokens(600) or [1], sampling_params=self.ts_sampling(),
            return_logprob=self.chance(0.3), stream=True)

    def ts_outputs(self):
        rows = self.r.choice([0, 1, 2, 15, 16, 17])
        ids = [self.tokens() for _ in range(rows)]
        values = [[struct.unpack("<f", struct.pack("<f", self.r.uniform(-30, 0)))[0] for _ in t] if self.chance(0.3) else []
                  for t in ids]
        return s.BatchTokenIDOutSlim(
            [self.name() for _ in range(rows)], ids, [self.r.choice(["", "", "stop", "length", "abort"]) for _ in range(rows)],
            [self.r.choice(self.INTS) for _ in range(rows)], [self.r.randrange(10**6) for _ in range(rows)],
            [self.r.choice(self.INTS) for _ in range(rows)], values, [t if v else [] for t, v in zip(ids, values)],
            self.r.choice([0, 1, 65535]), *[self.r.choice([0, 5, 2**32, 2**40]) for _ in range(4)])


class Check:
    def __init__(self):
        self.failures = 0
        self.counts = {}

    def that(self, ok, what, *details):
        self.counts[what] = self.counts.get(what, 0) + 1
        if not ok:
            self.failures += 1
            if self.failures <= 20:
                print("FAILED", what, *(str(d)[:600] for d in details), file=sys.stderr)


def vllm_add(peer, maker, check, encoder):
    request = maker.vllm_request()
    frames = encoder.frames(request)
    got = peer.ask("vllm_add", frames)
    check.that(got["ok"], "vllm add accepted", got, frames[0].hex())
    if not got["ok"]:
        return
    p, q = request.sampling_params, got["sampling"]
    greedy = p.temperature < 1e-5
    pairs = [
        (got["id"], request.request_id), (got["prompt_token_ids"], request.prompt_token_ids),
        (got["arrival_time"], request.arrival_time), (got["cache_salt"], request.cache_salt),
        (got["client_index"], request.client_index), (got["current_wave"], request.current_wave),
        (got["priority"], request.priority), (dict(got["trace_headers"]), request.trace_headers or {}),
        (q["temperature"], p.temperature), (q["top_p"], p.top_p), (q["top_k"], p.top_k), (q["min_p"], p.min_p),
        (q["presence_penalty"], p.presence_penalty), (q["frequency_penalty"], p.frequency_penalty),
        (q["repetition_penalty"], p.repetition_penalty), (q["seed"], p.seed), (q["max_tokens"], p.max_tokens),
        (q["min_tokens"], p.min_tokens), (q["ignore_eos"], p.ignore_eos), (q["stop_token_ids"], p.stop_token_ids or []),
        (q["eos_token_id"], p._eos_token_id), (set(q["all_stop_token_ids"]), p._all_stop_token_ids),
        (q["logprobs"], p.logprobs), (q["prompt_logprobs"], p.prompt_logprobs), (q["bad_words"], p.bad_words or []),
        (q["bad_words_token_ids"], p._bad_words_token_ids or []), (q["allowed_token_ids"], p.allowed_token_ids),
        ({k: v for k, v in q["logit_bias"]}, p.logit_bias or {}),
    ]
    for ours, theirs in pairs:
        check.that(ours == theirs, "vllm add field", ours, theirs)
    # What the product writes must decode strictly, to the same struct, and be msgspec's own bytes for the same 21 elements.
    back = bytes.fromhex(got["frames"][0])
    again = msgspec.msgpack.decode(back, type=s.EngineCoreRequest)
    check.that(again == request, "vllm add struct", again, request)
    # 21 of 22 elements, and the sampling map as a plain dict: for a struct with more than 15 fields msgspec always writes a 16-bit map
    # header, even where few keys are left; the product writes the shortest.
    # Floats equal to the default but not that very object are written by msgspec and left out here.
    own = msgspec.to_builtins(request)[:21]
    own[3] = {k: v for k, v in own[3].items() if not (isinstance(v, float) and v == getattr(s.SamplingParams(), k))}
    shorter = msgspec.msgpack.encode(own)
    lora = request.lora_request is not None  # ours stops after four elements, whatever follows
    sets = len(p._all_stop_token_ids) > 1  # a set's order is its sender's
    if not lora and not sets and p.max_tokens != 16 and not (greedy and p != again.sampling_params):
        check.that(back == shorter, "vllm add bytes", back.hex(), shorter.hex())


def vllm_outputs(peer, maker, check, encoder):
    message = maker.vllm_outputs()
    frames = encoder.frames(message)
    got = peer.ask("vllm_outputs", frames)
    check.that(got["ok"], "vllm outputs accepted", got)
    if got["ok"]:
        ours = [bytes.fromhex(f) for f in got["frames"]]
        check.that(ours == frames, "vllm outputs bytes", [f.hex() for f in ours], [f.hex() for f in frames])
        strict = msgspec.msgpack.decode(ours[0], type=s.EngineCoreOutputs, ext_hook=lambda code, data: bytes(data))
        check.that(strict.engine_index == message.engine_index and len(strict.outputs) == len(message.outputs),
                   "vllm outputs struct")


def small_messages(peer, maker, check):
    ids = [maker.name() for _ in range(maker.r.choice([0, 1, 2, 17]))]
    for op in ("vllm_abort", "ts_abort"):
        payload = msgspec.msgpack.encode(ids)
        got = peer.ask(op, [payload])
        check.that(got["ok"] and bytes.fromhex(got["frames"][0]) == payload, "abort bytes", op, ids)
    call = [maker.r.randrange(3), maker.r.choice([1, 2**63, 2**64 - 1]), "reset_prefix_cache",
            maker.r.choice([[], [True, False], ["abort", None], [{"a": [1, 2.5]}]])]
    payload = msgspec.msgpack.encode(call)
    got = peer.ask("vllm_utility", [payload])
    check.that(got["ok"] and bytes.fromhex(got["frames"][0]) == payload, "utility bytes", call)
    greeting = {"status": maker.r.choice(["HELLO", "READY"]), "local": maker.chance(), "headless": maker.chance()}
    if maker.chance():
        greeting["parallel_config_hash"] = maker.text()
    payload = msgspec.msgpack.encode(greeting)
    got = peer.ask("greeting_vllm", [payload])
    check.that(got["ok"] and bytes.fromhex(got["frames"][0]) == payload, "greeting bytes", greeting, got)
    greeting.setdefault("parallel_config_hash", None)
    payload = msgspec.msgpack.encode(greeting)
    got = peer.ask("greeting_tokenspeed", [payload])
    check.that(got["ok"] and bytes.fromhex(got["frames"][0]) == payload, "greeting bytes", greeting, got)
    init = {"addresses": {"inputs": ["ipc:///" + maker.text()] * maker.r.choice([1, 2]), "outputs": ["tcp://127.0.0.1:1"],
                          "coordinator_input": maker.maybe(maker.text), "coordinator_output": maker.maybe(maker.text),
                          "frontend_stats_publish_address": None},
            "parallel_config": maker.r.choice([{}, {"a": 1, "b": "x", "c": [1, 2, 65535]}])}
    payload = msgspec.msgpack.encode(init)
    got = peer.ask("init", [payload])
    check.that(got["ok"] and bytes.fromhex(got["frames"][0]) == payload, "init bytes", init, got)
    head = {"max_model_len": maker.r.choice(maker.INTS), "num_gpu_blocks": maker.r.choice(maker.INTS), "block_size": 16,
            "dp_stats_address": maker.maybe(maker.text), "dtype": maker.r.choice(["bfloat16", "float16", "float32"])}
    sizes = {"world_size": 1, "data_parallel_size": maker.r.choice([1, 2, 300]), "tensor_parallel_size": 1,
             "pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "data_parallel_rank": maker.r.randrange(300),
             "max_num_seqs": maker.r.choice(maker.INTS), "max_num_batched_tokens": maker.r.choice([-1, 0, 8192]),
             "instance_id": maker.text()}
    cache = {"kv_cache_size_tokens": maker.maybe(maker.token),
             "kv_cache_max_concurrency": maker.maybe(lambda: maker.r.uniform(0, 100)), "kv_events_config": None}
    vllm = {**head, "vllm_version": "0.32.0", **sizes, "supports_lora": maker.chance(), "max_loras": 4,
            "mamba_block_size": maker.maybe(maker.token), **cache, "weight_transfer_backend": maker.maybe(maker.text),
            "enable_sleep_mode": maker.chance(), "supports_draft_weight_updates": maker.chance(),
            "effective_attention_block_size": maker.maybe(maker.token)}
    ts = {**head, "multimodal_encoder_dtype": maker.maybe(maker.text), "vllm_version": "tokenspeed-0.1.1", **sizes, **cache}
    for op, ready in (("ready_vllm", vllm), ("ready_tokenspeed", ts)):
        payload = msgspec.msgpack.encode(ready)
        got = peer.ask(op, [payload])
        check.that(got["ok"] and bytes.fromhex(got["frames"][0]) == payload, "ready bytes", ready, got)


def ts_add(peer, maker, check, encoder):
    request = maker.ts_request()
    payload = msgspec.msgpack.encode(request)
    got = peer.ask("ts_add", [payload])
    check.that(got["ok"], "tokenspeed add accepted", got)
    if not got["ok"]:
        return
    p = request.sampling_params
    seed = p.seed if p.seed is not None else zlib.crc32(request.rid.encode())
    for ours, theirs in [(got["rid"], request.rid), (got["input_ids"], request.input_ids), (got["seed"], seed),
                         (got["temperature"], p.temperature), (got["top_k"], p.top_k),
                         (got["return_logprob"], request.return_logprob), (got["stream"], True)]:
        check.that(ours == theirs, "tokenspeed add field", ours, theirs)
    back = bytes.fromhex(got["frames"][0])
    again = msgspec.msgpack.decode(back, type=s.TokenizedGenerateReqInput)
    p.seed = seed  # resolved on the way in
    check.that(again == request, "tokenspeed add struct", again, request)
    if not p.stop_token_ids or len(p.stop_token_ids) < 2:
        full = msgspec.msgpack.encode(request)
        # The product sends the first eleven of 25 elements; the rest are defaults: 4 x nil-or-false.., see the struct.
        cut = full[len(b"\xdc\x00\x19"):]
        check.that(back == b"\x9b" + cut[:len(back) - 1], "tokenspeed add bytes", back.hex(), full.hex())


def ts_outputs(peer, maker, check, encoder):
    batch = maker.ts_outputs()
    payload = msgspec.msgpack.encode(batch)
    got = peer.ask("ts_outputs", [payload])
    check.that(got["ok"], "tokenspeed outputs accepted", got)
    if got["ok"]:
        ours = bytes.fromhex(got["frames"][0])
        check.that(ours == payload, "tokenspeed outputs bytes", ours.hex(), payload.hex())


JUNK = [None, True, 0, 1, -1, 7, 2**63, 0.5, "x", "", b"x", [], [1], {}, {"a": 1}, [None], [["a"]], [1.5]]


def mutate(value, r):
    """Replaces one random element, at any depth, by junk."""
    if isinstance(value, list) and value and r.random() < 0.8:
        i = r.randrange(len(value))
        out = list(value)
        out[i] = mutate(value[i], r) if r.random() < 0.6 else r.choice(JUNK)
        return out
    return r.choice(JUNK)


def accepts(payload, struct_type):
    try:
        return msgspec.msgpack.decode(payload, type=struct_type)
    except (msgspec.ValidationError, msgspec.DecodeError):
        return None


def same(a, b):
    """Equal on the wire: for Python, False is 0 and 1.0 is 1."""
    return msgspec.msgpack.encode(a) == msgspec.msgpack.encode(b)


def fixed_cases(peer, check):
    """What random runs found once, and what was decided."""
    # The tail of a LoRA (after its four known fields) changed its layout between versions: an integer stands where newer ones have a flag.
    # Nothing of it is used here, so it is read in every layout; whose version it is, is not ours to police. The real decoder is stricter.
    base = ["r-1", [1, 2], None, {"max_tokens": 4}, None, 1.0, None, None, None]
    for tail in ([None, False, 0], [None, 0, False], [None, None, {"uri": "x"}]):
        row = [*base[:6], ["a", 87940696, "/models/a", *tail], *base[7:]]
        payload = msgspec.msgpack.encode(row)
        check.that(accepts(payload, s.EngineCoreRequest) is None, "vllm LoRA tail is not this version's", payload.hex())
        got = peer.ask("vllm_add", [payload])
        check.that(got["ok"] and got["id"] == "r-1", "vllm LoRA of any layout", payload.hex(), got)
    for lora in (["a", 87940696], ["a", "1", "/models/a"], ["a", 1.0, "/models/a"], [7, 1, "/models/a"], {"a": 1}, 3, False):
        row = [*base[:6], lora, *base[7:]]
        got = peer.ask("vllm_add", [msgspec.msgpack.encode(row)])
        check.that(not got["ok"] and got["has_id"], "vllm LoRA that is none", lora, got)


def strictness(peer, maker, check, encoder):
    """The TokenSpeed codec must refuse exactly what the real decoder refuses (and, beyond it, what nobody can use)."""
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(maker.ts_request()))
    payload = msgspec.msgpack.encode(mutate(raw, maker.r))
    real = accepts(payload, s.TokenizedGenerateReqInput)
    got = peer.ask("ts_add", [payload])
    usable = real is not None and isinstance(real.rid, str) and _min_length(payload, 6)
    check.that(got["ok"] == usable, "tokenspeed request strictness", payload.hex(), got, real)
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(maker.ts_outputs()))
    payload = msgspec.msgpack.encode(mutate(raw, maker.r))
    batch = accepts(payload, s.BatchTokenIDOutSlim)
    got = peer.ask("ts_outputs", [payload])
    usable = batch is not None and batch.rids is not None and all(
        len(c) == len(batch.rids) for c in (batch.output_ids, batch.finished_reasons, batch.prompt_tokens,
                                            batch.completion_tokens, batch.cached_tokens, batch.output_token_logprobs_val,
                                            batch.output_token_logprobs_idx)) and \
        all(0 <= t < 2**31 for ids in batch.output_ids for t in ids) and \
        -(2**31) <= batch.engine_index < 2**31 and \
        all(abs(n) < 2**63 for n in (*batch.prompt_tokens, *batch.completion_tokens, *batch.cached_tokens,
                                     batch.num_running, batch.num_waiting, batch.kv_active_pages, batch.kv_total_pages)) and \
        all(abs(t) < 2**63 for ids in batch.output_token_logprobs_idx for t in ids)
    # A row whose logprob columns do not match its delta is refused by the peer when it asks for them, not by the codec.
    if not got["ok"] and got["error"].startswith("logprobs"):
        return
    check.that(got["ok"] == usable, "tokenspeed outputs strictness", payload.hex(), got, batch)
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(maker.vllm_request()), strict=False)
    broken = mutate(raw, maker.r)
    payload = msgspec.msgpack.encode(broken)
    got = peer.ask("vllm_add", [payload])
    if accepts(payload, s.EngineCoreRequest) is None and isinstance(broken, list) and len(broken) >= 9 and \
            isinstance(broken[0], str) and same(broken[6], raw[6]):
        check.that(not got["ok"] and got["has_id"], "vllm request strictness", payload.hex(), got)


def _min_length(payload, least):
    value = msgspec.msgpack.decode(payload)
    return isinstance(value, list) and len(value) >= least


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("peer")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.randrange(2**32)
    print(f"msgspec {msgspec.__version__}, seed {seed}, {options.count} rounds")
    peer, maker, check, encoder = Peer(options.peer), Maker(seed), Check(), s.Encoder()
    fixed_cases(peer, check)
    for _ in range(options.count):
        vllm_add(peer, maker, check, encoder)
        vllm_outputs(peer, maker, check, encoder)
        small_messages(peer, maker, check)
        ts_add(peer, maker, check, encoder)
        ts_outputs(peer, maker, check, encoder)
        strictness(peer, maker, check, encoder)
    if peer.close() != 0:
        print("wire_peer ended with an error", file=sys.stderr)
        return 1
    for what, count in sorted(check.counts.items()):
        print(f"  {count:8d}  {what}")
    print(f"{sum(check.counts.values())} checks, {check.failures} failed")
    return 1 if check.failures else 0


if __name__ == "__main__":
    sys.exit(main())
