// SPDX-License-Identifier: Apache-2.0
#include "wire/tokenspeed/outputs.h"

#include <algorithm>
#include <limits>

#include "wire/fields.h"
#include "wire/msgpack.h"

namespace rankgate::wire::tokenspeed {

using internal::FieldError;

namespace {

constexpr std::string_view kOutputTag = "BatchTokenIDOutSlim";
constexpr std::uint32_t kMinElements = 9;

std::int32_t Saturate(std::int64_t value) noexcept {
    return static_cast<std::int32_t>(
        std::clamp<std::int64_t>(value, INT32_MIN, std::numeric_limits<std::int32_t>::max()));
}

FinishReason ReasonOf(std::string_view word) noexcept {
    if (word.empty()) {
        return FinishReason::kNone;
    }
    if (word == "stop") {
        return FinishReason::kStop;
    }
    if (word == "length") {
        return FinishReason::kLength;
    }
    if (word == "abort") {
        return FinishReason::kAbort;
    }
    return FinishReason::kError;
}

std::string_view WordOf(FinishReason reason) noexcept {
    switch (reason) {
        case FinishReason::kNone:
            return "";
        case FinishReason::kStop:
        case FinishReason::kRepetition:
            return "stop";
        case FinishReason::kLength:
            return "length";
        case FinishReason::kAbort:
        case FinishReason::kError:  // "error" exists in no engine's vocabulary; every refusal is an abort row
            return "abort";
    }
    return "abort";
}

/// Reads the head of a column and holds it against the number of rows.
bool ReadColumn(Reader& reader, std::size_t rows) noexcept {
    const std::size_t at = reader.offset();
    std::uint32_t count = 0;
    return reader.ReadArray(count) && (count == rows || reader.Reject(at));
}

bool ReadRids(Reader& reader, OutputsMessage& out) {
    const std::size_t at = reader.offset();
    std::uint32_t count = 0;
    if (!reader.ReadArray(count)) {
        return false;
    }
    if (count > kMaxRowsPerMessage) {
        return reader.Reject(at);
    }
    for (std::uint32_t i = 0; i < count; ++i) {
        if (!reader.ReadStr(out.rows.emplace_back().request_id)) {
            return false;
        }
    }
    return true;
}

bool ReadDeltas(Reader& reader, OutputsMessage& out) {
    if (!ReadColumn(reader, out.rows.size())) {
        return false;
    }
    for (OutputRow& row : out.rows) {
        row.first_token = static_cast<std::uint32_t>(out.tokens.size());
        if (!reader.ReadArray(row.num_tokens)) {
            return false;
        }
        for (std::uint32_t i = 0; i < row.num_tokens; ++i) {
            TokenId token = 0;
            if (!reader.ReadIntIn(token, 0, INT32_MAX)) {
                return false;
            }
            out.tokens.push_back(token);
        }
    }
    return true;
}

bool ReadReasons(Reader& reader, OutputsMessage& out) noexcept {
    if (!ReadColumn(reader, out.rows.size())) {
        return false;
    }
    for (OutputRow& row : out.rows) {
        std::string_view word;
        if (!reader.ReadStr(word)) {
            return false;
        }
        row.finish_reason = ReasonOf(word);
    }
    return true;
}

template <class Set>
bool ReadCounts(Reader& reader, OutputsMessage& out, Set set) noexcept {
    if (!ReadColumn(reader, out.rows.size())) {
        return false;
    }
    for (OutputRow& row : out.rows) {
        std::int64_t value = 0;
        if (!reader.ReadInt(value)) {
            return false;
        }
        set(row, value);
    }
    return true;
}

/// Checks an inner list's types and keeps its bytes; empty lists keep nothing.
template <bool kFloats>
bool ReadInner(Reader& reader, std::string_view payload, std::string_view& raw) noexcept {
    const std::size_t start = reader.offset();
    std::uint32_t count = 0;
    if (!reader.ReadArray(count)) {
        return false;
    }
    for (std::uint32_t i = 0; i < count; ++i) {
        double value = 0.0;
        std::int64_t id = 0;
        if (kFloats ? !reader.ReadDouble(value) : !reader.ReadInt(id)) {
            return false;
        }
    }
    raw = count == 0 ? std::string_view{} : payload.substr(start, reader.offset() - start);
    return true;
}

}  // namespace

void OutputsMessage::Clear() noexcept {
    engine_index = 0;
    names_rank = false;
    rows.clear();
    tokens.clear();
    load = {};
}

Status DecodeOutputs(Frames frames, OutputsMessage& out) {
    out.Clear();
    if (frames.empty()) {
        return FieldError("outputs", "", "no frame");
    }
    const std::string_view payload = frames[0];
    Reader reader{payload};
    const auto fail = [&](std::string_view field, std::string_view reason = {}) {
        out.Clear();
        return FieldError("outputs", field, reason.empty() ? MsgErrorName(reader.error()) : reason);
    };
    std::uint32_t count = 0;
    std::string_view tag;
    if (!reader.ReadArray(count)) {
        return fail("");
    }
    if (count < kMinElements) {
        return fail("", "fewer than 9 elements");
    }
    if (!reader.ReadStr(tag)) {
        return fail("tag");
    }
    if (tag != kOutputTag) {
        return fail("tag", "not BatchTokenIDOutSlim");
    }
    if (!ReadRids(reader, out)) {
        return fail("rids");
    }
    if (!ReadDeltas(reader, out)) {
        return fail("output_ids");
    }
    if (!ReadReasons(reader, out)) {
        return fail("finished_reasons");
    }
    if (!ReadCounts(reader, out,
                    [](OutputRow& row, std::int64_t n) { row.num_prompt_tokens = Saturate(n); })) {
        return fail("prompt_tokens");
    }
    if (!ReadCounts(reader, out, [](OutputRow& row, std::int64_t n) { row.completion_tokens = n; })) {
        return fail("completion_tokens");
    }
    if (!ReadCounts(reader, out,
                    [](OutputRow& row, std::int64_t n) { row.num_cached_tokens = Saturate(n); })) {
        return fail("cached_tokens");
    }
    if (!ReadColumn(reader, out.rows.size())) {
        return fail("output_token_logprobs_val");
    }
    for (OutputRow& row : out.rows) {
        if (!ReadInner<true>(reader, payload, row.logprobs)) {
            return fail("output_token_logprobs_val");
        }
    }
    if (!ReadColumn(reader, out.rows.size())) {
        return fail("output_token_logprobs_idx");
    }
    for (OutputRow& row : out.rows) {
        if (!ReadInner<false>(reader, payload, row.logprob_ids)) {
            return fail("output_token_logprobs_idx");
        }
    }
    if (count > 9) {
        out.names_rank = true;
        if (!reader.ReadInt32(out.engine_index)) {
            return fail("engine_index");
        }
    }
    if (count > 10 && !reader.ReadInt(out.load.num_running)) {
        return fail("num_running");
    }
    if (count > 11 && !reader.ReadInt(out.load.num_waiting)) {
        return fail("num_waiting");
    }
    if (count > 12 && !reader.ReadInt(out.load.kv_active_pages)) {
        return fail("kv_active_pages");
    }
    if (count > 13 && !reader.ReadInt(out.load.kv_total_pages)) {
        return fail("kv_total_pages");
    }
    if (count > 14 && !reader.Skip(count - 14)) {
        return fail("tail");
    }
    if (!reader.Done()) {
        return fail("", "bytes after the batch");
    }
    if (out.has_load()) {
        out.load.kv_usage =
            static_cast<double>(out.load.kv_active_pages) / static_cast<double>(out.load.kv_total_pages);
    }
    return {};
}

Status DecodeLogprobs(const OutputRow& row, Logprobs& out) {
    out.positions = 0;
    out.width = 1;
    out.token_ids.clear();
    out.logprobs.clear();
    out.ranks.clear();
    if (row.logprobs.empty() && row.logprob_ids.empty()) {
        return {};
    }
    Reader values{row.logprobs};
    Reader ids{row.logprob_ids};
    std::uint32_t num_values = 0;
    std::uint32_t num_ids = 0;
    if (!values.ReadArray(num_values) || !ids.ReadArray(num_ids) || num_values != num_ids ||
        num_values != row.num_tokens) {
        return FieldError("logprobs", "", "columns of different lengths");
    }
    for (std::uint32_t i = 0; i < num_values; ++i) {
        double value = 0.0;
        TokenId id = 0;
        if (!values.ReadDouble(value) || !ids.ReadInt32(id)) {
            out.token_ids.clear();
            out.logprobs.clear();
            return FieldError("logprobs", "", values.ok() ? ids.error() : values.error());
        }
        out.token_ids.push_back(id);
        out.logprobs.push_back(static_cast<float>(value));
    }
    out.ranks.assign(num_values, 0);
    out.positions = static_cast<std::int32_t>(num_values);
    return {};
}

std::vector<TokenId> NamedStops(const SamplingParams& params) {
    std::vector<TokenId> named = params.stop_token_ids;
    if (params.eos_token_id && !params.ignore_eos) {
        std::erase(named, *params.eos_token_id);
    }
    return named;
}

StopReason MatchedStop(FinishReason reason, std::span<const TokenId> delta,
                       std::span<const TokenId> named) noexcept {
    if (reason != FinishReason::kStop || delta.empty() ||
        std::find(named.begin(), named.end(), delta.back()) == named.end()) {
        return {};
    }
    return std::int64_t{delta.back()};
}

void EncodeOutputs(const OutputsBatch& batch, std::string& payload) {
    Writer writer{payload};
    const std::size_t rows = batch.outputs.size();
    writer.Array(14);
    writer.Str(kOutputTag);
    writer.Array(rows);
    for (const RequestOutput& output : batch.outputs) {
        writer.Str(output.request_id);
    }
    writer.Array(rows);
    for (const RequestOutput& output : batch.outputs) {
        writer.Ints(output.new_token_ids);
    }
    writer.Array(rows);
    for (const RequestOutput& output : batch.outputs) {
        writer.Str(WordOf(output.finish_reason));
    }
    // Frontends in Rust read these unsigned and refuse the whole batch for one negative: floor at 0.
    writer.Array(rows);
    for (const RequestOutput& output : batch.outputs) {
        writer.Int(std::max<std::int32_t>(0, output.num_prompt_tokens.value_or(0)));
    }
    writer.Array(rows);
    for (const RequestOutput& output : batch.outputs) {
        writer.Int(std::max<std::int64_t>(0, output.completion_tokens));
    }
    writer.Array(rows);
    for (const RequestOutput& output : batch.outputs) {
        writer.Int(std::max<std::int32_t>(0, output.num_cached_tokens.value_or(0)));
    }
    // Column 0 of each scored position is the sampled token; an unscored row has empty lists.
    const auto scored = [](const RequestOutput& output) {
        return output.logprobs && output.logprobs->width > 0
                   ? static_cast<std::size_t>(output.logprobs->positions)
                   : 0;
    };
    writer.Array(rows);
    for (const RequestOutput& output : batch.outputs) {
        const std::size_t positions = scored(output);
        writer.Array(positions);
        for (std::size_t i = 0; i < positions; ++i) {
            const auto width = static_cast<std::size_t>(output.logprobs->width);
            writer.Float(static_cast<double>(output.logprobs->logprobs[i * width]));
        }
    }
    writer.Array(rows);
    for (const RequestOutput& output : batch.outputs) {
        const std::size_t positions = scored(output);
        writer.Array(positions);
        for (std::size_t i = 0; i < positions; ++i) {
            const auto width = static_cast<std::size_t>(output.logprobs->width);
            writer.Int(output.logprobs->token_ids[i * width]);
        }
    }
    writer.Int(batch.engine_index);
    writer.Int(std::max<std::int64_t>(0, batch.load.num_running));
    writer.Int(std::max<std::int64_t>(0, batch.load.num_waiting));
    writer.Int(std::max<std::int64_t>(0, batch.load.kv_active_pages));
    writer.Int(std::max<std::int64_t>(0, batch.load.kv_total_pages));
}

}  // namespace rankgate::wire::tokenspeed
