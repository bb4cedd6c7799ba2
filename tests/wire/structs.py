# SPDX-License-Identifier: Apache-2.0
"""The engines' wire structs, declared with the encoder that the engines use (msgspec), so that a test has the real codec's bytes
and its strictness. Field order and defaults as seen on vLLM 0.32.0 and tokenspeed 0.1.1."""
from __future__ import annotations

import enum
from typing import Any, Optional, Union

import msgspec


class Tensor:
    """Stands for a numpy array or a torch tensor: dtype word, shape, raw bytes."""

    def __init__(self, dtype: str, shape: tuple, data: bytes):
        self.dtype, self.shape, self.data = dtype, shape, data


class Encoder:
    """Tensors below 256 bytes inline (extension 3), others in frames of their own, counted from the payload."""

    def __init__(self):
        self.aux: list[bytes] = []
        self.encoder = msgspec.msgpack.Encoder(enc_hook=self._hook)

    def _hook(self, value):
        assert isinstance(value, Tensor), type(value)
        if len(value.data) < 256:
            return (value.dtype, value.shape, msgspec.msgpack.Ext(3, value.data))
        self.aux.append(value.data)
        return (value.dtype, value.shape, len(self.aux))

    def frames(self, value) -> list[bytes]:
        self.aux = []
        payload = self.encoder.encode(value)
        return [payload, *self.aux]


# ---- vLLM ----


class SamplingParams(msgspec.Struct, omit_defaults=True):
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    watermarking: Optional[bool] = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: Optional[int] = None
    stop: Union[str, list[str], None] = None
    stop_token_ids: Optional[list[int]] = None
    ignore_eos: bool = False
    max_tokens: Optional[int] = 16
    min_tokens: int = 0
    logprobs: Optional[int] = None
    prompt_logprobs: Optional[int] = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: int = 0
    _eos_token_id: Optional[int] = None
    _all_stop_token_ids: set[int] = msgspec.field(default_factory=set)
    structured_outputs: Optional[dict] = None
    logit_bias: Optional[dict[int, float]] = None
    allowed_token_ids: Optional[list[int]] = None
    extra_args: Optional[dict[str, Any]] = None
    bad_words: Optional[list[str]] = None
    _bad_words_token_ids: Optional[list[list[int]]] = None
    skip_reading_prefix_cache: Optional[bool] = None
    thinking_token_budget: Optional[int] = None


class LoRARequest(msgspec.Struct, array_like=True, omit_defaults=True):
    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: Optional[str] = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    request_id: str
    prompt_token_ids: Optional[list[int]]
    mm_features: Optional[list[Any]]
    sampling_params: Optional[SamplingParams]
    pooling_params: Optional[dict]
    arrival_time: float
    lora_request: Optional[LoRARequest]
    cache_salt: Optional[str]
    data_parallel_rank: Optional[int]
    prompt_embeds: Optional[Any] = None
    prompt_is_token_ids: Optional[list[bool]] = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: Optional[dict[str, str]] = None
    resumable: bool = False
    external_req_id: Optional[str] = None
    reasoning_ended: Optional[bool] = None
    reasoning_parser_kwargs: Optional[dict[str, Any]] = None
    abort_immediately: bool = False
    session_id: Optional[str] = None
    kv_hints: Optional[dict] = None


class FinishReason(enum.IntEnum):
    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4


class PrefillStats(msgspec.Struct):
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0
    num_cache_creation_tokens: int = 0


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    request_id: str
    new_token_ids: list[int]
    new_logprobs: Optional[Any] = None
    new_prompt_logprobs_tensors: Optional[Any] = None
    pooling_output: Optional[Any] = None
    finish_reason: Optional[FinishReason] = None
    stop_reason: Union[int, str, None] = None
    events: Optional[list[Any]] = None
    kv_transfer_params: Optional[dict[str, Any]] = None
    ec_transfer_params: Optional[dict[str, Any]] = None
    trace_headers: Optional[dict[str, str]] = None
    prefill_stats: Optional[PrefillStats] = None
    routed_experts: Optional[Any] = None
    num_nans_in_logits: int = 0
    mm_cache_miss_hashes: Optional[list[str]] = None
    new_sampling_mask: Optional[Any] = None
    spec_decode_metrics: Optional[Any] = None
    prompt_token_id_logprobs: Optional[Any] = None


class UtilityOutput(msgspec.Struct, array_like=True):
    call_id: int
    failure_message: Optional[str] = None
    result: Optional[tuple[Any, Any]] = None


class PrefixCacheStats(msgspec.Struct):
    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    hits_by_source: dict[str, int] = msgspec.field(default_factory=dict)


def _stages() -> dict[str, int]:
    return {"waiting_to_start": 0, "in_progress": 0, "completed_waiting": 0}


class SchedulerStats(msgspec.Struct):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    num_kv_fetch_reqs_by_stage: dict[str, int] = msgspec.field(default_factory=_stages)
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: float = 0.0
    iteration_details: Optional[dict] = None
    prefix_cache_stats: PrefixCacheStats = msgspec.field(default_factory=PrefixCacheStats)
    connector_prefix_cache_stats: Optional[PrefixCacheStats] = None
    kv_cache_eviction_events: list[Any] = msgspec.field(default_factory=list)
    spec_decoding_stats: Optional[dict] = None
    kv_connector_stats: Optional[dict] = None
    ec_connector_stats: Optional[dict] = None
    waiting_lora_adapters: dict[str, int] = msgspec.field(default_factory=dict)
    running_lora_adapters: dict[str, int] = msgspec.field(default_factory=dict)
    cudagraph_stats: Optional[dict] = None
    perf_stats: Optional[dict] = None


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True):
    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: Optional[SchedulerStats] = None
    timestamp: float = 0.0
    utility_output: Optional[UtilityOutput] = None
    finished_requests: Optional[set[str]] = None
    wave_complete: Optional[int] = None
    start_wave: Optional[int] = None
    weight_version: Optional[str] = None


# ---- TokenSpeed ----


class TsSamplingParams(msgspec.Struct, array_like=True):
    max_new_tokens: Optional[int] = None
    stop: Union[str, list[str], None] = None
    stop_token_ids: Optional[set[int]] = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    json_schema: Optional[str] = None
    regex: Optional[str] = None
    ebnf: Optional[str] = None
    structural_tag: Optional[str] = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    thinking_budget: Optional[int] = None
    custom_params: Optional[dict[str, Any]] = None
    stream_interval: Optional[int] = None
    logit_bias: Optional[dict[str, float]] = None
    seed: Optional[int] = None
    logprobs: Optional[int] = None
    n: int = 1
    stop_strs: Union[str, list[str], None] = None
    stop_str_max_len: int = 0
    is_normalized: bool = False


class SessionParams(msgspec.Struct, array_like=True):
    id: Optional[str] = None
    rid: Any = None
    offset: Any = None
    replace: Any = None


class TokenizedGenerateReqInput(msgspec.Struct, array_like=True, tag=True):
    rid: Union[str, list[str], None] = None
    http_worker_ipc: Optional[str] = None
    input_text: Optional[str] = None
    input_ids: Optional[list[int]] = None
    sampling_params: TsSamplingParams = msgspec.field(default_factory=TsSamplingParams)
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: Optional[list[int]] = None
    stream: bool = False
    input_embeds: Optional[list] = None
    session_params: Optional[SessionParams] = None
    custom_logit_processor: Optional[str] = None
    return_hidden_states: bool = False
    created_time: float = 0.0
    bootstrap_host: Optional[str] = None
    bootstrap_port: Optional[int] = None
    bootstrap_room: Optional[int] = None
    input_multi_ids: Optional[list] = None
    input_extra_infos: Optional[list] = None
    input_ids_unpadded: Optional[list[int]] = None
    multimodal_inputs: Optional[list] = None
    validation_error: Optional[str] = None
    data_parallel_rank: Optional[int] = None


class BatchTokenIDOutSlim(msgspec.Struct, array_like=True, tag=True):
    rids: Optional[list[str]]
    output_ids: list[list[int]]
    finished_reasons: list[str]
    prompt_tokens: list[int]
    completion_tokens: list[int]
    cached_tokens: list[int]
    output_token_logprobs_val: list[list[float]]
    output_token_logprobs_idx: list[list[int]]
    engine_index: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_active_pages: int = 0
    kv_total_pages: int = 0
