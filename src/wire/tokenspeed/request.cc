// SPDX-License-Identifier: Apache-2.0
#include "wire/tokenspeed/request.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>

#include "wire/fields.h"
#include "wire/msgpack.h"

namespace rankgate::wire::tokenspeed {

using internal::FieldError;

namespace {

constexpr std::string_view kAddTag = "TokenizedGenerateReqInput";
constexpr std::size_t kSentElements = 11;
constexpr std::size_t kSamplingElements = 29;
constexpr std::uint32_t kMinElements = 6;  // tag .. sampling_params
constexpr std::uint32_t kMaxStopStrings = 4096;
constexpr std::uint32_t kMaxLogitBias = 1 << 20;
constexpr double kGreedyBelow = 1e-6;
/// Stands for "as much as the context holds" in the neutral request.
constexpr std::int64_t kUnboundedTokens = std::int64_t{1} << 30;

void WriteSampling(Writer& writer, const SamplingParams& params) {
    const bool greedy = params.temperature < kGreedyBelow;
    using Kind = StructuredOutputs::Kind;
    const auto grammar = [&](Kind kind) {
        params.structured_outputs&& params.structured_outputs->kind == kind
            ? writer.Str(params.structured_outputs->value)
            : writer.Nil();
    };
    writer.Array(kSamplingElements);
    writer.Int(params.max_tokens);
    writer.Nil();  // stop: matched by the gateway
    if (params.stop_token_ids.empty()) {
        writer.Nil();
    } else {
        writer.Ints(params.stop_token_ids);
    }
    writer.Float(greedy ? 1.0 : params.temperature);
    writer.Float(params.top_p);
    writer.Int(greedy ? 1 : params.top_k > 0 ? params.top_k : kTopKAll);
    writer.Float(params.min_p);
    writer.Float(params.frequency_penalty);
    writer.Float(params.presence_penalty);
    writer.Float(params.repetition_penalty);
    writer.Int(params.min_tokens);
    if (params.structured_outputs && params.structured_outputs->kind == Kind::kJsonObject) {
        writer.Str(R"({"type":"object"})");
    } else {
        grammar(Kind::kJson);
    }
    grammar(Kind::kRegex);
    grammar(Kind::kGrammar);
    grammar(Kind::kStructuralTag);
    writer.Bool(params.ignore_eos);
    writer.Bool(params.skip_special_tokens);
    writer.Bool(params.spaces_between_special_tokens);
    writer.Bool(params.include_stop_str_in_output);  // no_stop_trim
    params.thinking_token_budget ? writer.Int(*params.thinking_token_budget) : writer.Nil();
    writer.Nil();  // custom_params
    writer.Nil();  // stream_interval: 0 kills the engine, and every token is wanted anyway
    if (params.logit_bias.empty()) {
        writer.Nil();
    } else {
        writer.Map(params.logit_bias.size());
        for (const auto& [token, bias] : params.logit_bias) {
            writer.Str(std::to_string(token));
            writer.Float(bias);
        }
    }
    if (greedy) {
        writer.Int(0);  // later engines pin it so; the same bytes then mean the same on all of them
    } else if (params.seed) {
        writer.Int(*params.seed);
    } else {
        writer.Nil();
    }
    writer.Nil();  // logprobs: return_logprob asks
    writer.Int(1);
    writer.Array(0);  // stop_strs
    writer.Int(0);
    writer.Bool(true);
}

// ---- decoding ----

/// msgspec takes integers up to 2^64-1 wherever one is declared; those above int64 are clamped, since every
/// check refuses them.
bool ReadWide(Reader& reader, std::int64_t& value) noexcept {
    if (reader.ReadInt(value)) {
        return true;
    }
    std::uint64_t wide = 0;
    if (reader.error() != MsgError::kOutOfRange || !reader.Recover() || !reader.ReadUint(wide)) {
        return false;
    }
    value = std::numeric_limits<std::int64_t>::max();
    return true;
}

bool ReadOptionalWide(Reader& reader, std::optional<std::int64_t>& out) noexcept {
    out.reset();
    return reader.TryNil() || ReadWide(reader, out.emplace());
}

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
    return reader.TryNil() || ReadText(reader, out.emplace());
}

bool ReadWides(Reader& reader, std::vector<std::int64_t>& out) {
    std::uint32_t count = 0;
    if (!reader.ReadArray(count)) {
        return false;
    }
    out.clear();
    for (std::uint32_t i = 0; i < count; ++i) {
        if (!ReadWide(reader, out.emplace_back())) {
            return false;
        }
    }
    return true;
}

bool ReadOptionalWides(Reader& reader, std::optional<std::vector<std::int64_t>>& out) {
    out.reset();
    return reader.TryNil() || ReadWides(reader, out.emplace());
}

/// nil, one string, or a list of them.
bool ReadTexts(Reader& reader, std::optional<std::vector<std::string>>& out) {
    out.reset();
    if (reader.TryNil()) {
        return true;
    }
    std::vector<std::string>& list = out.emplace();
    if (reader.Peek() == MsgType::kStr) {
        return ReadText(reader, list.emplace_back());
    }
    const std::size_t at = reader.offset();
    std::uint32_t count = 0;
    if (!reader.ReadArray(count)) {
        return false;
    }
    if (count > kMaxStopStrings) {
        return reader.Reject(at);
    }
    for (std::uint32_t i = 0; i < count; ++i) {
        if (!ReadText(reader, list.emplace_back())) {
            return false;
        }
    }
    return true;
}

bool ReadLogitBias(Reader& reader, std::optional<std::vector<std::pair<std::string, double>>>& out) {
    out.reset();
    if (reader.TryNil()) {
        return true;
    }
    const std::size_t at = reader.offset();
    std::uint32_t pairs = 0;
    if (!reader.ReadMap(pairs)) {
        return false;
    }
    if (pairs > kMaxLogitBias) {
        return reader.Reject(at);
    }
    auto& list = out.emplace();
    for (std::uint32_t i = 0; i < pairs; ++i) {
        auto& [token, bias] = list.emplace_back();
        if (!ReadText(reader, token) || !reader.ReadDouble(bias)) {
            return false;
        }
    }
    return true;
}

bool ReadSeed(Reader& reader, SamplingFields& fields) noexcept {
    fields.seed.reset();
    fields.negative_seed = false;
    if (reader.TryNil()) {
        return true;
    }
    std::uint64_t seed = 0;
    if (reader.ReadUint(seed)) {
        fields.seed = seed;
        return true;
    }
    std::int64_t negative = 0;
    if (reader.error() != MsgError::kOutOfRange || !reader.Recover() || !reader.ReadInt(negative)) {
        return false;
    }
    fields.seed = static_cast<std::uint64_t>(negative);
    fields.negative_seed = true;
    return true;
}

/// Steps over a value if its type is `type` or nil.
bool SkipTyped(Reader& reader, MsgType type) noexcept {
    if (reader.TryNil()) {
        return true;
    }
    if (reader.Peek() != type) {
        return reader.Peek() == MsgType::kEnd ? reader.Skip() : reader.Reject(reader.offset());
    }
    return reader.Skip();
}

constexpr std::array<std::string_view, kSamplingElements> kSamplingNames{"max_new_tokens",
                                                                         "stop",
                                                                         "stop_token_ids",
                                                                         "temperature",
                                                                         "top_p",
                                                                         "top_k",
                                                                         "min_p",
                                                                         "frequency_penalty",
                                                                         "presence_penalty",
                                                                         "repetition_penalty",
                                                                         "min_new_tokens",
                                                                         "json_schema",
                                                                         "regex",
                                                                         "ebnf",
                                                                         "structural_tag",
                                                                         "ignore_eos",
                                                                         "skip_special_tokens",
                                                                         "spaces_between_special_tokens",
                                                                         "no_stop_trim",
                                                                         "thinking_budget",
                                                                         "custom_params",
                                                                         "stream_interval",
                                                                         "logit_bias",
                                                                         "seed",
                                                                         "logprobs",
                                                                         "n",
                                                                         "stop_strs",
                                                                         "stop_str_max_len",
                                                                         "is_normalized"};

bool ReadSamplingElement(Reader& reader, std::uint32_t index, SamplingFields& fields) {
    switch (index) {
        case 0:
            return ReadOptionalWide(reader, fields.max_new_tokens);
        case 1:
            return ReadTexts(reader, fields.stop);
        case 2:
            return ReadOptionalWides(reader, fields.stop_token_ids);
        case 3:
            return reader.ReadDouble(fields.temperature);
        case 4:
            return reader.ReadDouble(fields.top_p);
        case 5:
            return ReadWide(reader, fields.top_k);
        case 6:
            return reader.ReadDouble(fields.min_p);
        case 7:
            return reader.ReadDouble(fields.frequency_penalty);
        case 8:
            return reader.ReadDouble(fields.presence_penalty);
        case 9:
            return reader.ReadDouble(fields.repetition_penalty);
        case 10:
            return ReadWide(reader, fields.min_new_tokens);
        case 11:
            return ReadOptionalText(reader, fields.json_schema);
        case 12:
            return ReadOptionalText(reader, fields.regex);
        case 13:
            return ReadOptionalText(reader, fields.ebnf);
        case 14:
            return ReadOptionalText(reader, fields.structural_tag);
        case 15:
            return reader.ReadBool(fields.ignore_eos);
        case 16:
            return reader.ReadBool(fields.skip_special_tokens);
        case 17:
            return reader.ReadBool(fields.spaces_between_special_tokens);
        case 18:
            return reader.ReadBool(fields.no_stop_trim);
        case 19:
            return ReadOptionalWide(reader, fields.thinking_budget);
        case 20:
            return SkipTyped(reader, MsgType::kMap);
        case 21:
            return ReadOptionalWide(reader, fields.stream_interval);
        case 22:
            return ReadLogitBias(reader, fields.logit_bias);
        case 23:
            return ReadSeed(reader, fields);
        case 24:
            return ReadOptionalWide(reader, fields.logprobs);
        case 25:
            return ReadWide(reader, fields.n);
        case 26:
            return ReadTexts(reader, fields.stop_strs);
        case 27:
            return ReadWide(reader, fields.stop_str_max_len);
        case 28:
            return reader.ReadBool(fields.is_normalized);
        default:
            return reader.Skip();
    }
}

bool ReadSampling(Reader& reader, SamplingFields& fields, std::string& field) {
    std::uint32_t count = 0;
    if (!reader.ReadArray(count)) {
        return false;
    }
    for (std::uint32_t i = 0; i < count; ++i) {
        if (!ReadSamplingElement(reader, i, fields)) {
            field = "sampling_params";
            if (i < kSamplingNames.size()) {
                field.append(".").append(kSamplingNames[i]);
            }
            return false;
        }
    }
    return true;
}

/// [id str|nil, rid str|nil, offset int, replace bool], all defaulted.
bool ReadSession(Reader& reader, bool& has_session) {
    if (reader.TryNil()) {
        return true;
    }
    std::uint32_t count = 0;
    if (!reader.ReadArray(count)) {
        return false;
    }
    if (count > 0 && !reader.TryNil()) {
        has_session = true;
        std::string_view id;
        if (!reader.ReadStr(id)) {
            return false;
        }
    }
    return count <= 1 || reader.Skip(count - 1);
}

constexpr std::string_view kElementNames[] = {"tag",
                                              "rid",
                                              "http_worker_ipc",
                                              "input_text",
                                              "input_ids",
                                              "sampling_params",
                                              "return_logprob",
                                              "logprob_start_len",
                                              "top_logprobs_num",
                                              "token_ids_logprob",
                                              "stream",
                                              "input_embeds",
                                              "session_params",
                                              "custom_logit_processor",
                                              "return_hidden_states",
                                              "created_time",
                                              "bootstrap_host",
                                              "bootstrap_port",
                                              "bootstrap_room",
                                              "input_multi_ids",
                                              "input_extra_infos",
                                              "input_ids_unpadded",
                                              "multimodal_inputs",
                                              "validation_error",
                                              "data_parallel_rank"};

bool ReadElement(Reader& reader, std::uint32_t index, DecodedRequest& out, std::string& field) {
    Request& request = out.request;
    const std::size_t at = reader.offset();
    std::optional<std::int64_t> ignored;
    std::optional<std::vector<std::int64_t>> ignored_ids;
    bool flag = false;
    switch (index) {
        case 0: {
            std::string_view tag;
            return reader.ReadStr(tag) && (tag == kAddTag || reader.Reject(at));
        }
        case 1:  // a list of ids or nil is declared, and kills the request in the real engine as well
            if (!ReadText(reader, request.rid)) {
                request.rid.clear();
                return false;
            }
            out.has_rid = true;  // a long one as well: its sender waits for an answer under it
            return request.rid.size() <= kMaxRequestIdBytes || reader.Reject(at);
        case 2:
        case 3:
        case 13:
        case 16:
            return SkipTyped(reader, MsgType::kStr);
        case 4:
            return ReadOptionalWides(reader, request.input_ids);
        case 5:
            return ReadSampling(reader, request.sampling, field);
        case 6:
            return reader.ReadBool(request.return_logprob);
        case 7:
            return ReadWide(reader, request.logprob_start_len);
        case 8:
            return ReadWide(reader, request.top_logprobs_num);
        case 9:
            return ReadOptionalWides(reader, request.token_ids_logprob);
        case 10:
            return reader.ReadBool(request.stream);
        case 11:
        case 22:
            request.has_multimodal = request.has_multimodal || !reader.PeekNil();
            return SkipTyped(reader, MsgType::kArray);
        case 12:
            return ReadSession(reader, request.has_session);
        case 14:
            return reader.ReadBool(flag);
        case 15:
            return reader.ReadDouble(request.created_time);
        case 17:
        case 18:
        case 24:
            return ReadOptionalWide(reader, ignored);
        case 19:
        case 20:
            return SkipTyped(reader, MsgType::kArray);
        case 21:
            return ReadOptionalWides(reader, ignored_ids);
        case 23:
            return ReadOptionalText(reader, request.validation_error);
        default:
            return reader.Skip();
    }
}

std::size_t Characters(std::string_view text) noexcept {
    return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char byte) {
        return (static_cast<std::uint8_t>(byte) & 0xc0) != 0x80;
    }));
}

constexpr std::array<std::uint32_t, 256> kCrcTable = [] {
    std::array<std::uint32_t, 256> table{};
    for (std::uint32_t i = 0; i < 256; ++i) {
        std::uint32_t value = i;
        for (int bit = 0; bit < 8; ++bit) {
            value = (value & 1) != 0 ? 0xedb88320U ^ (value >> 1) : value >> 1;
        }
        table[i] = value;
    }
    return table;
}();

}  // namespace

std::uint32_t SeedOf(std::string_view rid) noexcept {
    std::uint32_t crc = 0xffffffffU;
    for (const char byte : rid) {
        crc = kCrcTable[(crc ^ static_cast<std::uint8_t>(byte)) & 0xff] ^ (crc >> 8);
    }
    return ~crc;
}

std::string_view TypeFrame(RequestType type) noexcept {
    static constexpr char kBytes[] = {0, 1};
    return {kBytes + static_cast<std::size_t>(type), 1};
}

std::optional<RequestType> ParseTypeFrame(std::string_view frame) noexcept {
    if (frame.size() != 1 || static_cast<std::uint8_t>(frame[0]) > 1) {
        return std::nullopt;
    }
    return static_cast<RequestType>(frame[0]);
}

void EncodeAdd(const GenerateRequest& request, std::string& out) {
    Writer writer{out};
    writer.Array(kSentElements);
    writer.Str(kAddTag);
    writer.Str(request.id);
    writer.Nil();  // http_worker_ipc
    writer.Nil();  // input_text
    writer.Ints(request.prompt_token_ids);
    WriteSampling(writer, request.sampling);
    writer.Bool(request.sampling.logprobs.has_value());
    writer.Int(-1);     // logprob_start_len: no prompt logprobs on this wire
    writer.Int(0);      // top_logprobs_num: refused by the engine
    writer.Nil();       // token_ids_logprob
    writer.Bool(true);  // stream: a row for every step
}

void DecodeRequest(std::string_view payload, DecodedRequest& out) {
    out.request = Request{};
    out.status = Status::Ok();
    out.has_rid = false;
    const auto fail = [&out](std::string_view field, std::string_view reason) {
        Error error = FieldError("ADD", field, reason);
        error.code = ErrorCode::kInvalidArgument;
        out.status = std::move(error);
    };
    Reader reader{payload};
    std::uint32_t count = 0;
    if (!reader.ReadArray(count)) {
        fail("", MsgErrorName(reader.error()));
        return;
    }
    for (std::uint32_t i = 0; i < count; ++i) {
        std::string field{i < std::size(kElementNames) ? kElementNames[i] : "tail"};
        if (!ReadElement(reader, i, out, field)) {
            fail(field, MsgErrorName(reader.error()));
            return;
        }
    }
    if (count < kMinElements) {
        fail("", "fewer than 6 elements");
    } else if (!reader.Done()) {
        fail("", "bytes after the request");
    }
}

void Normalise(Request& request) {
    SamplingFields& fields = request.sampling;
    if (!fields.is_normalized) {
        fields.stop_strs = fields.stop;
        if (fields.stop_token_ids && fields.stop_token_ids->empty()) {
            fields.stop_token_ids.reset();
        }
        if (fields.temperature < kGreedyBelow) {
            fields.temperature = 1.0;
            fields.top_k = 1;
        }
        if (fields.top_k == 1) {
            fields.seed = 0;
            fields.negative_seed = false;
        }
        if (fields.top_k == -1) {
            fields.top_k = kTopKAll;
        }
    }
    if (!fields.seed) {
        fields.seed = SeedOf(request.rid);
    }
    if (!fields.stop_strs) {
        fields.stop_strs.emplace();
    }
    fields.stop_str_max_len = 0;
    for (const std::string& text : *fields.stop_strs) {
        fields.stop_str_max_len =
            std::max(fields.stop_str_max_len, static_cast<std::int64_t>(Characters(text)));
    }
    fields.is_normalized = true;
}

GenerateRequest ToGenerateRequest(Request&& request) {
    GenerateRequest out;
    SamplingFields& fields = request.sampling;
    SamplingParams& params = out.sampling;
    out.id = std::move(request.rid);
    out.arrival_time = request.created_time;
    if (request.input_ids) {
        out.prompt_token_ids.reserve(request.input_ids->size());
        for (const std::int64_t id : *request.input_ids) {
            out.prompt_token_ids.push_back(static_cast<TokenId>(id));
        }
    }
    params.max_tokens = std::max<std::int64_t>(1, fields.max_new_tokens.value_or(kUnboundedTokens));
    params.min_tokens = fields.min_new_tokens;
    // top_k 1 is how this wire says greedy.
    params.temperature = fields.top_k == 1 ? 0.0 : fields.temperature;
    params.top_p = fields.top_p;
    params.top_k =
        fields.top_k > 0 && fields.top_k < kTopKLimit ? static_cast<std::int32_t>(fields.top_k) : 0;
    params.min_p = fields.min_p;
    params.frequency_penalty = fields.frequency_penalty;
    params.presence_penalty = fields.presence_penalty;
    params.repetition_penalty = fields.repetition_penalty;
    params.ignore_eos = fields.ignore_eos;
    params.skip_special_tokens = fields.skip_special_tokens;
    params.spaces_between_special_tokens = fields.spaces_between_special_tokens;
    params.include_stop_str_in_output = fields.no_stop_trim;
    if (fields.seed) {
        params.seed = static_cast<std::int64_t>(*fields.seed);
    }
    if (fields.stop_token_ids) {
        for (const std::int64_t id : *fields.stop_token_ids) {
            if (id >= 0 && id <= INT32_MAX) {
                params.stop_token_ids.push_back(static_cast<TokenId>(id));
            }
        }
        params.all_stop_token_ids = params.stop_token_ids;
    }
    if (fields.thinking_budget && *fields.thinking_budget >= 0) {
        params.thinking_token_budget =
            static_cast<std::int32_t>(std::min<std::int64_t>(*fields.thinking_budget, INT32_MAX));
    }
    if (fields.logit_bias) {
        for (const auto& [token, bias] : *fields.logit_bias) {
            TokenId id = 0;
            std::from_chars(token.data(), token.data() + token.size(), id);  // checked by CheckDecoded
            params.logit_bias.emplace_back(id, bias);
        }
    }
    if (request.return_logprob) {
        params.logprobs = 0;
    }
    if (fields.stop_strs) {
        params.stop = std::move(*fields.stop_strs);
    }
    const auto structured = [&params](StructuredOutputs::Kind kind, std::optional<std::string>& value) {
        if (value && !params.structured_outputs) {
            StructuredOutputs& options = params.structured_outputs.emplace();
            options.kind = kind;
            options.value = std::move(*value);
        }
    };
    structured(StructuredOutputs::Kind::kJson, fields.json_schema);
    structured(StructuredOutputs::Kind::kRegex, fields.regex);
    structured(StructuredOutputs::Kind::kGrammar, fields.ebnf);
    structured(StructuredOutputs::Kind::kStructuralTag, fields.structural_tag);
    return out;
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
    reader.ReadArray(count);
    for (std::uint32_t i = 0; i < count && reader.ok(); ++i) {
        std::string_view id;
        if (reader.ReadStr(id)) {
            request_ids.push_back(id);
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

}  // namespace rankgate::wire::tokenspeed
