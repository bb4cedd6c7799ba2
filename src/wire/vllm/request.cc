// SPDX-License-Identifier: Apache-2.0
#include "wire/vllm/request.h"

#include <algorithm>
#include <utility>

#include "wire/fields.h"
#include "wire/msgpack_json.h"

namespace rankgate::wire::vllm {

using internal::FieldError;

namespace {

// Bounds on what one request may make the engine end allocate; all far above any real use.
constexpr std::uint32_t kMaxStopStrings = 4096;
constexpr std::uint32_t kMaxBadWords = 1 << 16;
constexpr std::uint32_t kMaxLogitBias = 1 << 20;
constexpr std::uint32_t kMaxTraceHeaders = 1024;
constexpr double kGreedyBelow = 1e-5;

/// Python fills the option keys in this order, nil where unset, and adds the two underscore keys.
void WriteStructured(Writer& writer, const StructuredOutputs& options) {
    const auto text = [&](StructuredOutputs::Kind kind) {
        options.kind == kind ? writer.Str(options.value) : writer.Nil();
    };
    writer.Map(11);
    writer.Str("json");
    text(StructuredOutputs::Kind::kJson);
    writer.Str("regex");
    text(StructuredOutputs::Kind::kRegex);
    writer.Str("choice");
    writer.Nil();
    writer.Str("grammar");
    text(StructuredOutputs::Kind::kGrammar);
    writer.Str("json_object");
    options.kind == StructuredOutputs::Kind::kJsonObject ? writer.Bool(true) : writer.Nil();
    writer.Str("disable_any_whitespace");
    writer.Bool(options.disable_any_whitespace);
    writer.Str("disable_additional_properties");
    writer.Bool(options.disable_additional_properties);
    writer.Str("whitespace_pattern");
    options.whitespace_pattern ? writer.Str(*options.whitespace_pattern) : writer.Nil();
    writer.Str("structural_tag");
    text(StructuredOutputs::Kind::kStructuralTag);
    writer.Str("_backend");
    writer.Str(options.backend);
    writer.Str("_backend_was_auto");
    writer.Bool(true);
}

/// Keys in Python's order, those equal to the default left out, as Python does. Stop strings are never sent:
/// the engine has no detokenizer, and an empty one among them would deafen it.
void WriteSampling(Writer& writer, const SamplingParams& params) {
    const bool greedy = params.temperature < kGreedyBelow;
    const bool presence = params.presence_penalty != 0.0;
    const bool frequency = params.frequency_penalty != 0.0;
    const bool repetition = params.repetition_penalty != 1.0;
    const bool temperature = params.temperature != 1.0;
    const bool top_p = !greedy && params.top_p != 1.0;
    const bool top_k = !greedy && params.top_k > 0;
    const bool min_p = !greedy && params.min_p != 0.0;
    const bool eos = params.eos_token_id.has_value() && !params.ignore_eos;
    const bool budget = params.thinking_token_budget && *params.thinking_token_budget >= 0;
    const std::size_t keys = std::size_t{1} + presence + frequency + repetition + temperature + top_p +
                             top_k + min_p + params.seed.has_value() + !params.stop_token_ids.empty() +
                             params.ignore_eos + (params.min_tokens != 0) + params.logprobs.has_value() +
                             params.prompt_logprobs.has_value() + eos + !params.all_stop_token_ids.empty() +
                             params.structured_outputs.has_value() + !params.logit_bias.empty() +
                             params.allowed_token_ids.has_value() + !params.bad_words.empty() +
                             !params.bad_words_token_ids.empty() + params.skip_reading_prefix_cache + budget;
    writer.Map(keys);
    const auto number = [&writer](bool present, std::string_view key, double value) {
        if (present) {
            writer.Str(key);
            writer.Float(value);
        }
    };
    const auto integer = [&writer](bool present, std::string_view key, std::int64_t value) {
        if (present) {
            writer.Str(key);
            writer.Int(value);
        }
    };
    number(presence, "presence_penalty", params.presence_penalty);
    number(frequency, "frequency_penalty", params.frequency_penalty);
    number(repetition, "repetition_penalty", params.repetition_penalty);
    number(temperature, "temperature", greedy ? 0.0 : params.temperature);
    number(top_p, "top_p", params.top_p);
    integer(top_k, "top_k", params.top_k);
    number(min_p, "min_p", params.min_p);
    integer(params.seed.has_value(), "seed", params.seed.value_or(0));
    if (!params.stop_token_ids.empty()) {
        writer.Str("stop_token_ids");
        writer.Ints(params.stop_token_ids);
    }
    if (params.ignore_eos) {
        writer.Str("ignore_eos");
        writer.Bool(true);
    }
    integer(true, "max_tokens", params.max_tokens);
    integer(params.min_tokens != 0, "min_tokens", params.min_tokens);
    integer(params.logprobs.has_value(), "logprobs", params.logprobs.value_or(0));
    integer(params.prompt_logprobs.has_value(), "prompt_logprobs", params.prompt_logprobs.value_or(0));
    integer(eos, "_eos_token_id", params.eos_token_id.value_or(0));
    if (!params.all_stop_token_ids.empty()) {
        writer.Str("_all_stop_token_ids");
        writer.Ints(params.all_stop_token_ids);
    }
    if (params.structured_outputs) {
        writer.Str("structured_outputs");
        WriteStructured(writer, *params.structured_outputs);
    }
    if (!params.logit_bias.empty()) {
        writer.Str("logit_bias");
        writer.Map(params.logit_bias.size());
        for (const auto& [token, bias] : params.logit_bias) {
            writer.Int(token);
            writer.Float(std::clamp(bias, -100.0, 100.0));
        }
    }
    if (params.allowed_token_ids) {
        writer.Str("allowed_token_ids");
        writer.Ints(*params.allowed_token_ids);
    }
    if (!params.bad_words.empty()) {
        writer.Str("bad_words");
        writer.Array(params.bad_words.size());
        for (const std::string& word : params.bad_words) {
            writer.Str(word);
        }
    }
    if (!params.bad_words_token_ids.empty()) {
        writer.Str("_bad_words_token_ids");
        writer.Array(params.bad_words_token_ids.size());
        for (const std::vector<TokenId>& ids : params.bad_words_token_ids) {
            writer.Ints(ids);
        }
    }
    if (params.skip_reading_prefix_cache) {
        writer.Str("skip_reading_prefix_cache");
        writer.Bool(true);
    }
    integer(budget, "thinking_token_budget", params.thinking_token_budget.value_or(0));
}

// ---- decoding ----

bool ReadText(Reader& reader, std::string& out) {
    const std::size_t at = reader.offset();
    std::string_view view;
    if (!reader.ReadStr(view)) {
        return false;
    }
    if (!IsValidUtf8(view)) {
        return reader.Reject(at);
    }
    out.assign(view);
    return true;
}

bool ReadOptionalText(Reader& reader, std::optional<std::string>& out) {
    out.reset();
    if (reader.TryNil()) {
        return true;
    }
    return ReadText(reader, out.emplace());
}

bool ReadIds(Reader& reader, std::vector<TokenId>& out) {
    out.clear();
    std::uint32_t count = 0;
    if (!reader.ReadArray(count)) {
        return false;
    }
    out.reserve(count);
    for (std::uint32_t i = 0; i < count; ++i) {
        std::int32_t id = 0;
        if (!reader.ReadInt32(id)) {
            return false;
        }
        out.push_back(id);
    }
    return true;
}

/// For sets of stop ids, where the real engine takes any integer and those outside the vocabulary simply
/// never match.
bool ReadIdsLeniently(Reader& reader, std::vector<TokenId>& out) {
    out.clear();
    if (reader.TryNil()) {
        return true;
    }
    std::uint32_t count = 0;
    if (!reader.ReadArray(count)) {
        return false;
    }
    for (std::uint32_t i = 0; i < count; ++i) {
        std::int32_t id = 0;
        if (reader.ReadInt32(id)) {
            out.push_back(id);
        } else if (reader.error() != MsgError::kOutOfRange || !internal::SkipWrong(reader)) {
            return false;
        }
    }
    return true;
}

bool ReadTexts(Reader& reader, std::uint32_t limit, std::vector<std::string>& out) {
    out.clear();
    if (reader.TryNil()) {
        return true;
    }
    const std::size_t at = reader.offset();
    std::uint32_t count = 0;
    if (!reader.ReadArray(count)) {
        return false;
    }
    if (count > limit) {
        return reader.Reject(at);
    }
    for (std::uint32_t i = 0; i < count; ++i) {
        const std::size_t text_at = reader.offset();
        if (!ReadText(reader, out.emplace_back())) {
            return false;
        }
        if (out.back().empty()) {  // "" among stop strings or bad words is refused by the real engine as well
            return reader.Reject(text_at);
        }
    }
    return true;
}

bool ReadOptionalInt32(Reader& reader, std::optional<std::int32_t>& out) {
    out.reset();
    if (reader.TryNil()) {
        return true;
    }
    std::int32_t value = 0;
    if (!reader.ReadInt32(value)) {
        return false;
    }
    out = value;
    return true;
}

bool ReadSeed(Reader& reader, std::optional<std::int64_t>& out) {
    out.reset();
    if (reader.TryNil()) {
        return true;
    }
    std::int64_t seed = 0;
    if (!reader.ReadInt(seed)) {
        if (reader.error() != MsgError::kOutOfRange || !reader.Recover()) {
            return false;
        }
        std::uint64_t wide = 0;
        if (!reader.ReadUint(wide)) {
            return false;
        }
        seed = static_cast<std::int64_t>(wide);
    }
    out = seed;
    return true;
}

bool ReadStructured(Reader& reader, std::optional<StructuredOutputs>& out, std::string& field) {
    out.reset();
    if (reader.TryNil()) {
        return true;
    }
    const std::size_t at = reader.offset();
    std::uint32_t pairs = 0;
    if (!reader.ReadMap(pairs)) {
        return false;
    }
    StructuredOutputs options;
    options.backend.clear();
    int kinds = 0;
    for (std::uint32_t i = 0; i < pairs; ++i) {
        std::string_view key;
        if (!internal::TakeKey(reader, key)) {
            return false;
        }
        field.assign("sampling_params.structured_outputs.").append(key);
        const auto text = [&](StructuredOutputs::Kind kind) {
            if (reader.TryNil()) {
                return true;
            }
            options.kind = kind;
            ++kinds;
            return ReadText(reader, options.value);
        };
        bool read = true;
        if (key == "json") {
            if (reader.Peek() == MsgType::kMap) {  // Python keeps a schema as the object it was given
                options.kind = StructuredOutputs::Kind::kJson;
                options.value.clear();
                ++kinds;
                read = AppendJson(reader, options.value);
            } else {
                read = text(StructuredOutputs::Kind::kJson);
            }
        } else if (key == "regex") {
            read = text(StructuredOutputs::Kind::kRegex);
        } else if (key == "grammar") {
            read = text(StructuredOutputs::Kind::kGrammar);
        } else if (key == "structural_tag") {
            read = text(StructuredOutputs::Kind::kStructuralTag);
        } else if (key == "json_object") {
            bool on = false;
            if (!reader.TryNil()) {
                read = reader.ReadBool(on);
            }
            if (on) {
                options.kind = StructuredOutputs::Kind::kJsonObject;
                ++kinds;
            }
        } else if (key == "choice") {
            if (!reader.TryNil()) {
                return reader.Reject(reader.offset());
            }
        } else if (key == "disable_any_whitespace") {
            read = reader.ReadBool(options.disable_any_whitespace);
        } else if (key == "disable_additional_properties") {
            read = reader.ReadBool(options.disable_additional_properties);
        } else if (key == "whitespace_pattern") {
            read = ReadOptionalText(reader, options.whitespace_pattern);
        } else if (key == "_backend") {
            read = reader.TryNil() || ReadText(reader, options.backend);
        } else {
            read = reader.Skip();
        }
        if (!read) {
            return false;
        }
    }
    field = "sampling_params.structured_outputs";
    if (kinds != 1) {
        return reader.Reject(at);
    }
    out = std::move(options);
    return true;
}

struct SamplingExtras {
    std::int64_t n{1};
    bool detokenize{true};
    /// More than the reader's error says.
    std::string_view reason;
};

bool ReadSamplingKey(Reader& reader, std::string_view key, SamplingParams& params, SamplingExtras& extras,
                     std::string& field) {
    const std::size_t at = reader.offset();
    if (key == "temperature") {
        return reader.ReadDouble(params.temperature);
    }
    if (key == "max_tokens") {
        return reader.ReadInt(params.max_tokens);
    }
    if (key == "top_p") {
        return reader.ReadDouble(params.top_p);
    }
    if (key == "top_k") {
        std::int64_t top_k = 0;
        if (!reader.ReadInt(top_k)) {
            return false;
        }
        if (top_k < -1) {
            return reader.Reject(at);
        }
        params.top_k = static_cast<std::int32_t>(std::clamp<std::int64_t>(top_k, 0, INT32_MAX));
        return true;
    }
    if (key == "min_p") {
        return reader.ReadDouble(params.min_p);
    }
    if (key == "presence_penalty") {
        return reader.ReadDouble(params.presence_penalty);
    }
    if (key == "frequency_penalty") {
        return reader.ReadDouble(params.frequency_penalty);
    }
    if (key == "repetition_penalty") {
        return reader.ReadDouble(params.repetition_penalty);
    }
    if (key == "seed") {
        return ReadSeed(reader, params.seed);
    }
    if (key == "min_tokens") {
        return reader.ReadInt(params.min_tokens);
    }
    if (key == "ignore_eos") {
        return reader.ReadBool(params.ignore_eos);
    }
    if (key == "stop_token_ids") {
        return ReadIdsLeniently(reader, params.stop_token_ids);
    }
    if (key == "_eos_token_id") {
        return ReadOptionalInt32(reader, params.eos_token_id);
    }
    if (key == "_all_stop_token_ids") {
        return ReadIdsLeniently(reader, params.all_stop_token_ids);
    }
    if (key == "logprobs") {
        return ReadOptionalInt32(reader, params.logprobs);
    }
    if (key == "prompt_logprobs") {
        return ReadOptionalInt32(reader, params.prompt_logprobs);
    }
    if (key == "stop") {
        if (reader.Peek() == MsgType::kStr) {
            params.stop.clear();
            return ReadText(reader, params.stop.emplace_back()) &&
                   (!params.stop.back().empty() || reader.Reject(at));
        }
        return ReadTexts(reader, kMaxStopStrings, params.stop);
    }
    if (key == "logit_bias") {
        params.logit_bias.clear();
        if (reader.TryNil()) {
            return true;
        }
        std::uint32_t pairs = 0;
        if (!reader.ReadMap(pairs)) {
            return false;
        }
        if (pairs > kMaxLogitBias) {
            return reader.Reject(at);
        }
        for (std::uint32_t i = 0; i < pairs; ++i) {
            std::int32_t token = 0;
            double bias = 0.0;
            if (!reader.ReadInt32(token) || !reader.ReadDouble(bias)) {
                return false;
            }
            params.logit_bias.emplace_back(token, bias);
        }
        return true;
    }
    if (key == "allowed_token_ids") {
        params.allowed_token_ids.reset();
        return reader.TryNil() || ReadIds(reader, params.allowed_token_ids.emplace());
    }
    if (key == "bad_words") {
        return ReadTexts(reader, kMaxBadWords, params.bad_words);
    }
    if (key == "_bad_words_token_ids") {
        params.bad_words_token_ids.clear();
        if (reader.TryNil()) {
            return true;
        }
        std::uint32_t count = 0;
        if (!reader.ReadArray(count)) {
            return false;
        }
        if (count > kMaxBadWords) {
            return reader.Reject(at);
        }
        for (std::uint32_t i = 0; i < count; ++i) {
            if (!ReadIds(reader, params.bad_words_token_ids.emplace_back())) {
                return false;
            }
        }
        return true;
    }
    if (key == "structured_outputs") {
        return ReadStructured(reader, params.structured_outputs, field);
    }
    if (key == "skip_reading_prefix_cache") {
        params.skip_reading_prefix_cache = false;
        return reader.TryNil() || reader.ReadBool(params.skip_reading_prefix_cache);
    }
    if (key == "thinking_token_budget") {
        if (!ReadOptionalInt32(reader, params.thinking_token_budget)) {
            return false;
        }
        if (params.thinking_token_budget && *params.thinking_token_budget < 0) {
            if (*params.thinking_token_budget < -1) {
                return reader.Reject(at);
            }
            params.thinking_token_budget.reset();
        }
        return true;
    }
    if (key == "n") {
        return reader.ReadIntIn(extras.n, 1, INT32_MAX);
    }
    if (key == "detokenize") {
        return reader.ReadBool(extras.detokenize);
    }
    if (key == "include_stop_str_in_output") {
        return reader.ReadBool(params.include_stop_str_in_output);
    }
    if (key == "skip_special_tokens") {
        return reader.ReadBool(params.skip_special_tokens);
    }
    if (key == "spaces_between_special_tokens") {
        return reader.ReadBool(params.spaces_between_special_tokens);
    }
    if (key == "output_kind") {
        std::int32_t kind = 0;
        return reader.ReadIntIn(kind, 0, 2);
    }
    if (key == "stream_interval") {
        std::int64_t interval = 0;
        return reader.TryNil() || reader.ReadIntIn(interval, 1, INT64_MAX);
    }
    if (key == "logprob_token_ids" || key == "prompt_logprob_token_ids" || key == "repetition_detection") {
        // They change the answer and no runner has them. Ids outside the vocabulary kill a real rank here.
        Reader list = reader;
        std::uint32_t count = 0;
        if (reader.TryNil()) {
            return true;
        }
        if (list.ReadArray(count) && count == 0) {
            reader = list;
            return true;
        }
        extras.reason = "not supported by this engine";
        return reader.Reject(at);
    }
    if (key == "extra_args") {
        if (!reader.PeekNil() && reader.Peek() != MsgType::kMap) {
            return reader.Reject(at);
        }
        return reader.Skip();
    }
    return reader.Skip();
}

bool ReadSampling(Reader& reader, SamplingParams& params, std::string& field, std::string_view& reason) {
    const std::size_t at = reader.offset();
    params = SamplingParams{};
    SamplingExtras extras;
    std::uint32_t pairs = 0;
    if (!reader.ReadMap(
            pairs)) {  // nil as well: exactly one of sampling and pooling is due, and pooling is not ours
        return false;
    }
    for (std::uint32_t i = 0; i < pairs; ++i) {
        std::string_view key;
        if (!internal::TakeKey(reader, key)) {
            return false;
        }
        field.assign("sampling_params.").append(key);
        if (!ReadSamplingKey(reader, key, params, extras, field)) {
            reason = extras.reason;
            return false;
        }
    }
    field = "sampling_params.n";
    if (extras.n > 1 && params.temperature < kGreedyBelow) {
        return reader.Reject(at);
    }
    field = "sampling_params.detokenize";
    if (!extras.detokenize && !params.stop.empty()) {
        return reader.Reject(at);
    }
    field = "sampling_params";
    return true;
}

bool ReadTraceHeaders(Reader& reader, std::vector<std::pair<std::string, std::string>>& out) {
    out.clear();
    if (reader.TryNil()) {
        return true;
    }
    const std::size_t at = reader.offset();
    std::uint32_t pairs = 0;
    if (!reader.ReadMap(pairs)) {
        return false;
    }
    if (pairs > kMaxTraceHeaders) {
        return reader.Reject(at);
    }
    for (std::uint32_t i = 0; i < pairs; ++i) {
        std::pair<std::string, std::string>& header = out.emplace_back();
        if (!ReadText(reader, header.first) || !ReadText(reader, header.second)) {
            return false;
        }
    }
    return true;
}

bool ReadLoraInto(Reader& reader, LoraRequest& lora) {
    const std::size_t at = reader.offset();
    std::uint32_t count = 0;
    if (!reader.ReadArray(count)) {
        return false;
    }
    if (count < 3) {
        return reader.Reject(at);
    }
    if (!ReadText(reader, lora.name)) {
        return false;
    }
    const std::size_t id_at = reader.offset();
    if (!reader.ReadInt(lora.id)) {
        return false;
    }
    if (lora.id < 1) {
        return reader.Reject(id_at);
    }
    if (!ReadText(reader, lora.path)) {
        return false;
    }
    if (count > 3 && !ReadOptionalText(reader, lora.base_model_name)) {
        return false;
    }
    // Both layouts end in values that change nothing here (tensorizer map, load_inplace, is_3d_lora_weight).
    return count <= 4 || reader.Skip(count - 4);
}

constexpr std::string_view kElementNames[] = {"request_id",
                                              "prompt_token_ids",
                                              "mm_features",
                                              "sampling_params",
                                              "pooling_params",
                                              "arrival_time",
                                              "lora_request",
                                              "cache_salt",
                                              "data_parallel_rank",
                                              "prompt_embeds",
                                              "prompt_is_token_ids",
                                              "client_index",
                                              "current_wave",
                                              "priority",
                                              "trace_headers",
                                              "resumable",
                                              "external_req_id",
                                              "reasoning_ended",
                                              "reasoning_parser_kwargs",
                                              "abort_immediately",
                                              "session_id",
                                              "kv_hints"};

/// Reads element `index`; `field` and `reason` say more than the reader's error where there is more to say.
bool ReadElement(Reader& reader, std::uint32_t index, DecodedAdd& out, std::string& field,
                 std::string_view& reason) {
    GenerateRequest& request = out.request;
    const std::size_t at = reader.offset();
    const auto unsupported = [&] {
        reason = "not supported by this engine";
        return reader.Reject(at);
    };
    switch (index) {
        case 0:
            if (!ReadText(reader, request.id)) {
                request.id.clear();
                return false;
            }
            out.has_id = true;  // a long one as well: its sender waits for an answer under it
            if (request.id.size() > kMaxRequestIdBytes) {
                reason = "longer than 1024 bytes";
                return reader.Reject(at);
            }
            return true;
        case 1:
            return ReadIds(reader, request.prompt_token_ids);
        case 2:  // mm_features
            if (reader.TryNil()) {
                return true;
            } else {
                std::uint32_t count = 0;
                return reader.ReadArray(count) && (count == 0 || unsupported());
            }
        case 3:
            return ReadSampling(reader, request.sampling, field, reason);
        case 4:  // pooling_params
            return reader.TryNil() || unsupported();
        case 5:
            return reader.ReadDouble(request.arrival_time);
        case 6:
            request.lora.reset();
            return reader.TryNil() || ReadLoraInto(reader, request.lora.emplace());
        case 7:
            return ReadOptionalText(reader, request.cache_salt);
        case 8:
            return ReadOptionalInt32(reader, request.data_parallel_rank);
        case 9:  // prompt_embeds
            return reader.TryNil() || unsupported();
        case 11:
            return reader.ReadInt32(request.client_index);
        case 12:
            return reader.ReadInt(request.current_wave);
        case 13:
            return reader.ReadInt(request.priority);
        case 14:
            return ReadTraceHeaders(reader, request.trace_headers);
        case 15:    // resumable
        case 19: {  // abort_immediately
            bool on = false;
            return reader.ReadBool(on) && (!on || unsupported());
        }
        case 17: {  // reasoning_ended
            bool on = false;
            return reader.TryNil() || reader.ReadBool(on);
        }
        case 10: {  // prompt_is_token_ids
            if (reader.TryNil()) {
                return true;
            }
            std::uint32_t count = 0;
            bool is_id = false;
            bool read = reader.ReadArray(count);
            for (std::uint32_t i = 0; i < count && read; ++i) {
                read = reader.ReadBool(is_id);
            }
            return read;
        }
        case 16:    // external_req_id
        case 20: {  // session_id
            std::string ignored;
            return reader.TryNil() || ReadText(reader, ignored);
        }
        case 18:    // reasoning_parser_kwargs
        case 21: {  // kv_hints, whose protocol_version is required
            if (reader.TryNil()) {
                return true;
            }
            std::uint32_t pairs = 0;
            return reader.ReadMap(pairs) && (index == 18 || pairs > 0 || reader.Reject(at)) &&
                   reader.Skip(std::uint64_t{2} * pairs);
        }
        default:
            return reader.Skip();
    }
}

}  // namespace

std::string_view TypeFrame(RequestType type) noexcept {
    static constexpr char kBytes[] = {0, 1, 2, 3};
    return {kBytes + static_cast<std::size_t>(type), 1};
}

std::optional<RequestType> ParseTypeFrame(std::string_view frame) noexcept {
    if (frame.size() != 1 || static_cast<std::uint8_t>(frame[0]) > 3) {
        return std::nullopt;
    }
    return static_cast<RequestType>(frame[0]);
}

void WriteLora(Writer& writer, const LoraRequest& lora) {
    // Four elements only: what follows them changed its layout, and a stale one deafens the engine.
    writer.Array(4);
    writer.Str(lora.name);
    writer.Int(lora.id);
    writer.Str(lora.path);
    lora.base_model_name ? writer.Str(*lora.base_model_name) : writer.Nil();
}

void EncodeAdd(const GenerateRequest& request, std::string& out) {
    Writer writer{out};
    writer.Array(kAddElements);
    writer.Str(request.id);
    writer.Ints(request.prompt_token_ids);
    writer.Nil();  // mm_features
    WriteSampling(writer, request.sampling);
    writer.Nil();  // pooling_params
    writer.Float(request.arrival_time);
    if (request.lora) {
        WriteLora(writer, *request.lora);
    } else {
        writer.Nil();
    }
    request.cache_salt ? writer.Str(*request.cache_salt) : writer.Nil();
    request.data_parallel_rank ? writer.Int(*request.data_parallel_rank) : writer.Nil();
    writer.Nil();  // prompt_embeds
    writer.Nil();  // prompt_is_token_ids
    writer.Int(request.client_index);
    writer.Int(request.current_wave);
    writer.Int(request.priority);
    if (request.trace_headers.empty()) {
        writer.Nil();
    } else {
        writer.Map(request.trace_headers.size());
        for (const auto& [key, value] : request.trace_headers) {
            writer.Str(key);
            writer.Str(value);
        }
    }
    writer.Bool(false);  // resumable
    writer.Nil();        // external_req_id
    writer.Nil();        // reasoning_ended
    writer.Nil();        // reasoning_parser_kwargs
    writer.Bool(false);  // abort_immediately
    writer.Nil();        // session_id
}

void DecodeAdd(std::string_view payload, DecodedAdd& out) {
    out.request = GenerateRequest{};
    out.status = Status::Ok();
    out.has_id = false;
    const auto fail = [&out](std::string_view field, std::string_view reason) {
        if (out.status.ok()) {  // the first mistake is the one to name
            Error error = FieldError("ADD", field, reason);
            error.code = ErrorCode::kInvalidArgument;
            out.status = std::move(error);
        }
    };
    Reader reader{payload};
    std::uint32_t count = 0;
    if (!reader.ReadArray(count)) {
        fail("", MsgErrorName(reader.error()));
        return;
    }
    for (std::uint32_t i = 0; i < count; ++i) {
        const Reader before = reader;
        std::string field{i < std::size(kElementNames) ? kElementNames[i] : "tail"};
        std::string_view reason;
        if (ReadElement(reader, i, out, field, reason)) {
            continue;
        }
        fail(field, reason.empty() ? MsgErrorName(reader.error()) : reason);
        // A value of the wrong kind spoils this element alone: the ones behind it (client_index) are needed
        // for the answer.
        reader = before;
        if (!reader.Skip()) {
            return;
        }
    }
    if (count < kMinAddElements) {
        fail("", "fewer than 9 elements");
    }
    if (!reader.Done()) {
        fail("", "bytes after the request");
    }
}

void EncodeAbort(std::span<const std::string_view> request_ids, std::string& out) {
    Writer writer{out};
    writer.Array(request_ids.size());
    for (const std::string_view id : request_ids) {
        writer.Str(id);
    }
}

void EncodeAbort(std::string_view request_id, std::string& out) {
    EncodeAbort(std::span{&request_id, 1}, out);
}

Status DecodeAbort(std::string_view payload, std::vector<std::string_view>& request_ids) {
    request_ids.clear();
    Reader reader{payload};
    std::uint32_t count = 0;
    if (!reader.ReadArray(count)) {
        return FieldError("ABORT", "", reader.error());
    }
    for (std::uint32_t i = 0; i < count; ++i) {
        std::string_view id;
        if (reader.ReadStr(id)) {
            request_ids.push_back(id);
        } else if (!internal::SkipWrong(reader)) {
            break;
        }
    }
    if (!reader.Done()) {
        request_ids.clear();
        return FieldError(
            "ABORT", "",
            reader.ok() ? std::string_view{"bytes after the list"} : MsgErrorName(reader.error()));
    }
    return {};
}

void EncodeStartDpWave(const StartDpWave& start, std::string& out) {
    Writer writer{out};
    writer.Array(2);
    writer.Int(start.wave);
    start.exclude ? writer.Int(*start.exclude) : writer.Nil();
}

Result<StartDpWave> DecodeStartDpWave(std::string_view payload) {
    Reader reader{payload};
    StartDpWave start;
    std::uint32_t count = 0;
    if (!reader.ReadArray(count) || count == 0 || !reader.ReadInt(start.wave)) {
        return FieldError("START_DP_WAVE", "wave",
                          reader.ok() ? std::string_view{"missing"} : MsgErrorName(reader.error()));
    }
    if (count > 1) {
        // nil, a rank, or (Python frontends) the two-byte identity, which the engines compare to an integer:
        // it excludes nobody.
        internal::TakeOptionalInt(reader, start.exclude);
        reader.Skip(count - 2);
    }
    if (!reader.Done()) {
        return FieldError("START_DP_WAVE", "",
                          reader.ok() ? std::string_view{"trailing bytes"} : MsgErrorName(reader.error()));
    }
    return start;
}

void BeginUtility(Writer& writer, std::int32_t client_index, std::uint64_t call_id, std::string_view method,
                  std::size_t num_args) {
    writer.Array(4);
    writer.Int(client_index);
    writer.Uint(call_id);
    writer.Str(method);
    writer.Array(num_args);
}

UtilityCall DecodeUtility(std::string_view payload) {
    UtilityCall call;
    Reader reader{payload};
    std::uint32_t count = 0;
    if (!reader.ReadArray(count)) {
        call.status = FieldError("UTILITY", "", reader.error());
        return call;
    }
    if (count < 4) {
        call.status = FieldError("UTILITY", "", "fewer than 4 elements");
        return call;
    }
    if (!reader.ReadInt32(call.client_index)) {
        call.status = FieldError("UTILITY", "client_index", reader.error());
        return call;
    }
    if (!reader.ReadUint(call.call_id)) {
        call.status = FieldError("UTILITY", "call_id", reader.error());
        return call;
    }
    call.answerable = true;
    if (!reader.ReadStr(call.method)) {
        call.status = FieldError("UTILITY", "method", reader.error());
        return call;
    }
    Reader args = reader;
    if (!reader.ReadRaw(call.args)) {
        call.status = FieldError("UTILITY", "args", reader.error());
        return call;
    }
    if (!args.ReadArray(call.num_args)) {
        call.status = FieldError("UTILITY", "args", args.error());
        return call;
    }
    reader.Skip(count - 4);
    if (!reader.Done()) {
        call.status = FieldError(
            "UTILITY", "", reader.ok() ? std::string_view{"trailing bytes"} : MsgErrorName(reader.error()));
    }
    return call;
}

Result<LoraRequest> ReadLora(Reader& reader) {
    LoraRequest lora;
    if (!ReadLoraInto(reader, lora)) {
        return FieldError("LoRA request", "", reader.error());
    }
    return lora;
}

}  // namespace rankgate::wire::vllm
