// SPDX-License-Identifier: Apache-2.0
#include "wire/vllm/outputs.h"

#include <bit>
#include <cstring>
#include <limits>

#include "base/check.h"
#include "wire/fields.h"
#include "wire/msgpack.h"

namespace rankgate::wire::vllm {

using internal::FieldError;
using internal::SkipWrong;
using internal::TakeBool;
using internal::TakeDouble;
using internal::TakeInt;

static_assert(std::endian::native == std::endian::little,
              "tensors travel little-endian and are copied as they are");

namespace {

constexpr std::size_t kInlineTensorBytes = 256;  // tensors below travel inside the payload
constexpr std::int8_t kRawTensorExt = 3;
/// Elements 2 to 17 of a row that only carries tokens: nil, but for num_nans_in_logits (13).
constexpr std::string_view kPlainTail{"\xc0\xc0\xc0\xc0\xc0\xc0\xc0\xc0\xc0\xc0\xc0\x00\xc0\xc0\xc0\xc0", 16};

std::int32_t Saturate(std::int64_t value) noexcept {
    constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
    return static_cast<std::int32_t>(value < -1 ? -1 : value > kMax ? kMax : value);
}

// ---- decoding ----

bool ReadFinishReason(Reader& reader, OutputRow& row) noexcept {
    std::int64_t reason = 0;
    if (reader.ReadInt(reason)) {
        row.finish_reason = reason >= 0 && reason <= static_cast<std::int64_t>(FinishReason::kRepetition)
                                ? static_cast<FinishReason>(reason)
                                : FinishReason::kError;
        return true;
    }
    row.finish_reason = FinishReason::kError;  // non-nil means terminal, whatever it is
    return SkipWrong(reader);
}

bool ReadStopReason(Reader& reader, OutputRow& row) noexcept {
    switch (reader.Peek()) {
        case MsgType::kInt:
            if (reader.ReadInt(row.stop_token)) {
                row.has_stop_token = true;
                return true;
            }
            return SkipWrong(reader);
        case MsgType::kStr:
            return reader.ReadStr(row.stop_string);
        default:
            return reader.Skip();
    }
}

bool ReadPrefillStats(Reader& reader, OutputRow& row) noexcept {
    std::uint32_t pairs = 0;
    if (!reader.ReadMap(pairs)) {
        return SkipWrong(reader);
    }
    for (std::uint32_t i = 0; i < pairs; ++i) {
        std::string_view key;
        if (!internal::TakeKey(reader, key)) {
            return false;
        }
        std::int64_t value = -1;
        if (!TakeInt(reader, value)) {
            return false;
        }
        if (key == "num_prompt_tokens") {
            row.num_prompt_tokens = Saturate(value);
        } else if (key == "num_cached_tokens") {
            row.num_cached_tokens = Saturate(value);
        }
    }
    return true;
}

/// Reads one EngineCoreOutput. Nearly all elements are nil in nearly all rows, so each is first tried as
/// that.
bool ReadRow(Reader& reader, OutputRow& row, std::vector<TokenId>& tokens) {
    std::uint32_t count = 0;
    if (!reader.ReadArray(count)) {
        return false;
    }
    if (count < 2) {
        return reader.Reject(reader.offset());
    }
    if (!reader.ReadStr(row.request_id)) {
        return false;
    }
    std::uint32_t num_tokens = 0;
    if (!reader.ReadArray(num_tokens)) {
        return false;
    }
    for (std::uint32_t i = 0; i < num_tokens; ++i) {
        TokenId token = 0;
        if (!reader.ReadIntIn(token, 0, INT32_MAX)) {
            return false;
        }
        tokens.push_back(token);
    }
    row.num_tokens = num_tokens;
    if (count - 2 <= kPlainTail.size() && reader.TryExact(kPlainTail.substr(0, count - 2))) [[likely]] {
        return true;
    }
    if (count > 2 && !reader.TryNil() && !reader.ReadRaw(row.logprobs)) {
        return false;
    }
    if (count > 3 && !reader.TryNil() && !reader.ReadRaw(row.prompt_logprobs)) {
        return false;
    }
    if (count > 4 && !reader.TryNil() && !reader.Skip()) {  // pooling_output
        return false;
    }
    if (count > 5 && !reader.TryNil() && !ReadFinishReason(reader, row)) {
        return false;
    }
    if (count > 6 && !reader.TryNil() && !ReadStopReason(reader, row)) {
        return false;
    }
    if (count > 7 && !reader.Skip(count < 10 ? count - 7 : 3)) {  // events, kv_ and ec_transfer_params
        return false;
    }
    if (count > 10 && !reader.TryNil() && !reader.ReadRaw(row.trace_headers)) {
        return false;
    }
    if (count > 11 && !reader.TryNil() && !ReadPrefillStats(reader, row)) {
        return false;
    }
    return count <= 12 || reader.Skip(count - 12);
}

/// False only where the bytes are broken.
bool ReadRows(Reader& reader, OutputsMessage& out) {
    std::uint32_t count = 0;
    if (!reader.ReadArray(count)) {
        return SkipWrong(reader);
    }
    if (count > kMaxRowsPerMessage) {
        return reader.Reject(reader.offset());
    }
    for (std::uint32_t i = 0; i < count; ++i) {
        const Reader before = reader;
        OutputRow& row = out.rows.emplace_back();
        row.first_token = static_cast<std::uint32_t>(out.tokens.size());
        if (ReadRow(reader, row, out.tokens)) [[likely]] {
            continue;
        }
        // One row that cannot be understood must not cost the others theirs: it ends as an error where its id
        // is known.
        reader = before;
        if (!reader.Skip()) {
            return false;
        }
        out.tokens.resize(row.first_token);
        if (row.request_id.empty()) {
            ++out.dropped_rows;
            out.rows.pop_back();
            continue;
        }
        OutputRow failed;
        failed.request_id = row.request_id;
        failed.first_token = row.first_token;
        failed.finish_reason = FinishReason::kError;
        row = failed;
    }
    return true;
}

bool ReadPrefixCacheStats(Reader& reader, PrefixCacheStats& stats) noexcept {
    std::uint32_t pairs = 0;
    if (!reader.ReadMap(pairs)) {
        return SkipWrong(reader);
    }
    for (std::uint32_t i = 0; i < pairs; ++i) {
        std::string_view key;
        if (!internal::TakeKey(reader, key)) {
            return false;
        }
        bool read = false;
        if (key == "reset") {
            read = TakeBool(reader, stats.reset);
        } else if (key == "requests") {
            read = TakeInt(reader, stats.requests);
        } else if (key == "queries") {
            read = TakeInt(reader, stats.queries);
        } else if (key == "hits") {
            read = TakeInt(reader, stats.hits);
        } else if (key == "preempted_requests") {
            read = TakeInt(reader, stats.preempted_requests);
        } else if (key == "preempted_queries") {
            read = TakeInt(reader, stats.preempted_queries);
        } else if (key == "preempted_hits") {
            read = TakeInt(reader, stats.preempted_hits);
        } else {
            read = reader.Skip();
        }
        if (!read) {
            return false;
        }
    }
    return true;
}

bool ReadStats(Reader& reader, OutputsMessage& out) noexcept {
    std::uint32_t pairs = 0;
    if (!reader.ReadMap(pairs)) {
        return SkipWrong(reader);
    }
    out.has_stats = true;
    SchedulerStats& stats = out.stats;
    for (std::uint32_t i = 0; i < pairs; ++i) {
        std::string_view key;
        if (!internal::TakeKey(reader, key)) {
            return false;
        }
        bool read = false;
        if (key == "num_running_reqs") {
            read = TakeInt(reader, stats.load.num_running);
        } else if (key == "num_waiting_reqs") {
            read = TakeInt(reader, stats.load.num_waiting);
        } else if (key == "num_skipped_waiting_reqs") {
            read = TakeInt(reader, stats.num_skipped_waiting);
        } else if (key == "step_counter") {
            read = TakeInt(reader, stats.load.step_counter);
        } else if (key == "current_wave") {
            read = TakeInt(reader, stats.load.current_wave);
        } else if (key == "kv_cache_usage") {
            read = TakeDouble(reader, stats.load.kv_usage);
        } else if (key == "prefix_cache_stats") {
            read = ReadPrefixCacheStats(reader, stats.prefix_cache);
        } else {
            read = reader.Skip();
        }
        if (!read) {
            return false;
        }
    }
    return true;
}

bool ReadUtility(Reader& reader, OutputsMessage& out) noexcept {
    std::uint32_t count = 0;
    if (!reader.ReadArray(count)) {
        return SkipWrong(reader);
    }
    if (count < 3) {
        return reader.Skip(count);
    }
    UtilityReplyView& reply = out.utility;
    if (!reader.ReadUint(reply.call_id)) {
        if (!SkipWrong(reader)) {  // below zero: a notice nobody asked for
            return false;
        }
        reply.unsolicited = true;
    }
    if (!reader.TryNil()) {
        reply.failed = true;
        if (!internal::TakeView(reader, reply.failure_message)) {
            return false;
        }
    }
    std::string_view raw;
    if (!reader.ReadRaw(raw) || !reader.Skip(count - 3)) {
        return false;
    }
    Reader result{raw};
    std::uint32_t parts = 0;
    if (!reply.failed && !result.TryNil() && result.ReadArray(parts) && parts >= 2) {
        result.Skip(parts - 1);
        result.ReadRaw(reply.result);
    }
    out.has_utility = true;
    return true;
}

bool ReadFinishedRequests(Reader& reader, OutputsMessage& out) {
    std::uint32_t count = 0;
    if (!reader.ReadArray(count)) {
        return SkipWrong(reader);
    }
    for (std::uint32_t i = 0; i < count; ++i) {
        std::string_view id;
        if (!internal::TakeView(reader, id)) {
            return false;
        }
        if (!id.empty() && out.finished_requests.size() < kMaxRowsPerMessage) {
            out.finished_requests.push_back(id);
        }
    }
    return true;
}

// ---- tensors ----

struct TensorView {
    std::string_view dtype;
    std::uint32_t rank{0};
    std::int64_t shape[2]{1, 1};
    std::string_view data;

    std::int64_t size() const noexcept { return shape[0] * shape[1]; }
};

Status ReadTensor(Reader& reader, Frames frames, std::string_view name, TensorView& out) {
    const auto fail = [name](std::string_view reason) { return FieldError("logprobs", name, reason); };
    std::uint32_t count = 0;
    if (!reader.ReadArray(count) || count < 3 || !reader.ReadStr(out.dtype)) {
        return fail(reader.ok() ? std::string_view{"not a tensor"} : MsgErrorName(reader.error()));
    }
    if (!reader.ReadArray(out.rank)) {
        return fail(MsgErrorName(reader.error()));
    }
    if (out.rank > 2) {
        return fail("more than two dimensions");
    }
    for (std::uint32_t i = 0; i < out.rank; ++i) {
        if (!reader.ReadIntIn(out.shape[i], 0, static_cast<std::int64_t>(kMaxLogprobEntries))) {
            return fail(MsgErrorName(reader.error()));
        }
    }
    if (out.size() > static_cast<std::int64_t>(kMaxLogprobEntries)) {
        return fail("too many entries");
    }
    if (reader.Peek() == MsgType::kInt) {
        std::int64_t index = 0;
        if (!reader.ReadInt(index) || index < 1 || static_cast<std::uint64_t>(index) >= frames.size()) {
            return fail("names a frame that is not there");
        }
        out.data = frames[static_cast<std::size_t>(index)];
    } else {
        std::int8_t type = 0;
        if (!reader.ReadExt(type, out.data)) {
            return fail(MsgErrorName(reader.error()));
        }
        if (type != kRawTensorExt) {  // 1 and 2 are pickles
            return fail("extension type is not raw data");
        }
    }
    if (!reader.Skip(count - 3)) {
        return fail(MsgErrorName(reader.error()));
    }
    return {};
}

/// Copies `tensor` as `T`s from one of the dtypes that engines were seen to use.
template <class T, class From>
bool CopyAs(const TensorView& tensor, std::vector<T>& out) {
    const auto size = static_cast<std::size_t>(tensor.size());
    if (tensor.data.size() != size * sizeof(From)) {
        return false;
    }
    out.resize(size);
    if constexpr (std::is_same_v<T, From>) {
        if (size != 0) {
            std::memcpy(out.data(), tensor.data.data(), tensor.data.size());
        }
    } else {
        for (std::size_t i = 0; i < size; ++i) {
            From value;
            std::memcpy(&value, tensor.data.data() + i * sizeof(From), sizeof(From));
            out[i] = static_cast<T>(value);
        }
    }
    return true;
}

template <class T>
bool CopyInts(const TensorView& tensor, std::vector<T>& out) {
    if (tensor.dtype == "<i4" || tensor.dtype == "int32") {
        return CopyAs<T, std::int32_t>(tensor, out);
    }
    if (tensor.dtype == "<i8" || tensor.dtype == "int64") {
        return CopyAs<T, std::int64_t>(tensor, out);
    }
    return false;
}

bool CopyFloats(const TensorView& tensor, std::vector<float>& out) {
    if (tensor.dtype == "<f4" || tensor.dtype == "float32") {
        return CopyAs<float, float>(tensor, out);
    }
    if (tensor.dtype == "<f8" || tensor.dtype == "float64") {
        return CopyAs<float, double>(tensor, out);
    }
    return false;
}

// ---- encoding ----

void WriteTensor(Writer& writer, AuxFrames& aux, std::string_view dtype,
                 std::initializer_list<std::int64_t> shape, std::string_view data) {
    writer.Array(3);
    writer.Str(dtype);
    writer.Array(shape.size());
    for (const std::int64_t extent : shape) {
        writer.Int(extent);
    }
    if (data.size() < kInlineTensorBytes) {
        writer.Ext(kRawTensorExt, data);
    } else {
        aux.Add().assign(data);
        writer.Uint(aux.size());  // the payload is frame 0
    }
}

template <class T>
std::string_view BytesOf(const std::vector<T>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

void WriteLogprobs(Writer& writer, AuxFrames& aux, const Logprobs& logprobs, bool prompt) {
    const std::int64_t positions = logprobs.positions;
    const std::int64_t width = logprobs.width;
    RG_DCHECK(logprobs.token_ids.size() == static_cast<std::size_t>(positions * width));
    RG_DCHECK(logprobs.logprobs.size() == logprobs.token_ids.size());
    RG_DCHECK(logprobs.ranks.size() == static_cast<std::size_t>(positions));
    writer.Array(prompt ? 5 : 4);
    WriteTensor(writer, aux, prompt ? "int32" : "<i4", {positions, width}, BytesOf(logprobs.token_ids));
    WriteTensor(writer, aux, prompt ? "float32" : "<f4", {positions, width}, BytesOf(logprobs.logprobs));
    if (prompt) {
        std::vector<std::int32_t> ranks;
        ranks.reserve(logprobs.ranks.size());
        for (const std::int64_t rank : logprobs.ranks) {
            ranks.push_back(static_cast<std::int32_t>(rank));
        }
        WriteTensor(writer, aux, "int32", {positions}, BytesOf(ranks));
        writer.Nil();
    } else {
        WriteTensor(writer, aux, "<i8", {positions}, BytesOf(logprobs.ranks));
    }
    writer.Nil();
}

void WritePrefillStats(Writer& writer, const PrefillStats& stats) {
    writer.Map(6);
    writer.Str("num_prompt_tokens");
    writer.Int(stats.num_prompt_tokens);
    writer.Str("num_computed_tokens");
    writer.Int(stats.num_computed_tokens);
    writer.Str("num_cached_tokens");
    writer.Int(stats.num_cached_tokens);
    writer.Str("num_local_cached_tokens");
    writer.Int(stats.num_local_cached_tokens);
    writer.Str("num_external_cached_tokens");
    writer.Int(stats.num_external_cached_tokens);
    writer.Str("num_cache_creation_tokens");
    writer.Int(stats.num_cache_creation_tokens);
}

void WriteRow(Writer& writer, AuxFrames& aux, const RequestOutput& output, const OutputExtras* extras) {
    writer.Array(18);
    writer.Str(output.request_id);
    writer.Ints(output.new_token_ids);
    const bool plain = output.finish_reason == FinishReason::kNone && !output.logprobs &&
                       !output.prompt_logprobs && !output.num_prompt_tokens && !output.num_cached_tokens &&
                       std::holds_alternative<std::monostate>(output.stop_reason) &&
                       (extras == nullptr || (extras->events.empty() && !extras->prefill));
    if (plain) {
        writer.Raw(kPlainTail);
        return;
    }
    if (output.logprobs) {
        WriteLogprobs(writer, aux, *output.logprobs, false);
    } else {
        writer.Nil();
    }
    if (output.prompt_logprobs) {
        WriteLogprobs(writer, aux, *output.prompt_logprobs, true);
    } else {
        writer.Nil();
    }
    writer.Nil();  // pooling_output
    if (output.finish_reason == FinishReason::kNone) {
        writer.Nil();
    } else {
        writer.Int(static_cast<std::int64_t>(output.finish_reason));
    }
    if (const auto* token = std::get_if<std::int64_t>(&output.stop_reason)) {
        writer.Int(*token);
    } else if (const auto* text = std::get_if<std::string>(&output.stop_reason)) {
        writer.Str(*text);
    } else {
        writer.Nil();
    }
    if (extras != nullptr && !extras->events.empty()) {
        writer.Array(extras->events.size());
        for (const RequestEvent& event : extras->events) {
            writer.Map(2);
            writer.Str("type");
            writer.Int(static_cast<std::int64_t>(event.kind));
            writer.Str("timestamp");
            writer.Float(event.timestamp);
        }
    } else {
        writer.Nil();
    }
    writer.Nil();  // kv_transfer_params
    writer.Nil();  // ec_transfer_params
    writer.Nil();  // trace_headers
    if (extras != nullptr && extras->prefill) {
        WritePrefillStats(writer, *extras->prefill);
    } else if (output.num_prompt_tokens || output.num_cached_tokens) {
        PrefillStats stats;
        stats.num_prompt_tokens = output.num_prompt_tokens.value_or(0);
        stats.num_cached_tokens = output.num_cached_tokens.value_or(0);
        stats.num_local_cached_tokens = stats.num_cached_tokens;
        stats.num_computed_tokens = stats.num_prompt_tokens - stats.num_cached_tokens;
        WritePrefillStats(writer, stats);
    } else {
        writer.Nil();
    }
    writer.Nil();   // routed_experts
    writer.Int(0);  // num_nans_in_logits
    writer.Nil();   // mm_cache_miss_hashes
    writer.Nil();   // new_sampling_mask
    writer.Nil();   // spec_decode_metrics
    writer.Nil();   // prompt_token_id_logprobs
}

/// Every key that 0.32.0 sends; stock frontends in Rust need most of them to be there.
void WriteStats(Writer& writer, const SchedulerStats& stats) {
    writer.Map(18);
    writer.Str("num_running_reqs");
    writer.Int(stats.load.num_running);
    writer.Str("num_waiting_reqs");
    writer.Int(stats.load.num_waiting);
    writer.Str("num_skipped_waiting_reqs");
    writer.Int(stats.num_skipped_waiting);
    writer.Str("num_kv_fetch_reqs_by_stage");
    if (stats.counts_only) {
        writer.Map(0);
    } else {
        writer.Map(3);
        writer.Str("waiting_to_start");
        writer.Int(0);
        writer.Str("in_progress");
        writer.Int(0);
        writer.Str("completed_waiting");
        writer.Int(0);
    }
    writer.Str("step_counter");
    writer.Int(stats.load.step_counter);
    writer.Str("current_wave");
    writer.Int(stats.load.current_wave);
    writer.Str("kv_cache_usage");
    writer.Float(stats.load.kv_usage < 0.0 ? 0.0 : stats.load.kv_usage);
    writer.Str("iteration_details");
    writer.Nil();
    const PrefixCacheStats& cache = stats.prefix_cache;
    writer.Str("prefix_cache_stats");
    writer.Map(8);
    writer.Str("reset");
    writer.Bool(cache.reset);
    writer.Str("requests");
    writer.Int(cache.requests);
    writer.Str("queries");
    writer.Int(cache.queries);
    writer.Str("hits");
    writer.Int(cache.hits);
    writer.Str("preempted_requests");
    writer.Int(cache.preempted_requests);
    writer.Str("preempted_queries");
    writer.Int(cache.preempted_queries);
    writer.Str("preempted_hits");
    writer.Int(cache.preempted_hits);
    writer.Str("hits_by_source");
    writer.Map(0);
    writer.Str("connector_prefix_cache_stats");
    writer.Nil();
    writer.Str("kv_cache_eviction_events");
    writer.Array(0);
    writer.Str("spec_decoding_stats");
    writer.Nil();
    writer.Str("kv_connector_stats");
    writer.Nil();
    writer.Str("ec_connector_stats");
    writer.Nil();
    writer.Str("waiting_lora_adapters");
    writer.Map(0);
    writer.Str("running_lora_adapters");
    writer.Map(0);
    writer.Str("cudagraph_stats");
    writer.Nil();
    writer.Str("perf_stats");
    writer.Nil();
}

void WriteUtility(Writer& writer, const UtilityReply& reply) {
    writer.Array(3);
    writer.Uint(reply.call_id);
    if (reply.failure_message) {
        writer.Str(*reply.failure_message);
        writer.Nil();
        return;
    }
    writer.Nil();
    writer.Array(2);
    writer.Nil();  // type_info
    if (reply.result.empty()) {
        writer.Nil();
    } else {
        writer.Raw(reply.result);
    }
}

}  // namespace

void OutputsMessage::Clear() noexcept {
    engine_index = 0;
    rows.clear();
    tokens.clear();
    dropped_rows = 0;
    has_stats = false;
    stats = {};
    timestamp = 0.0;
    has_utility = false;
    utility = {};
    finished_requests.clear();
    wave_complete = -1;
    start_wave = -1;
    weight_version = {};
}

Status DecodeOutputs(Frames frames, OutputsMessage& out) {
    out.Clear();
    if (frames.empty()) {
        return FieldError("outputs", "", "no frame");
    }
    Reader reader{frames[0]};
    const auto fail = [&](std::string_view field) {
        out.Clear();
        return FieldError("outputs", field,
                          reader.ok() ? std::string_view{"trailing bytes"} : MsgErrorName(reader.error()));
    };
    std::uint32_t count = 0;
    if (!reader.ReadArray(count)) {
        return fail("");
    }
    if (count > 0 && !reader.ReadIntIn(out.engine_index, 0, kMaxRank)) {
        return fail("engine_index");
    }
    if (count > 1 && !ReadRows(reader, out)) {
        return fail("outputs");
    }
    if (count > 2 && !reader.TryNil() && !ReadStats(reader, out)) {
        return fail("scheduler_stats");
    }
    if (count > 3 && !TakeDouble(reader, out.timestamp)) {
        return fail("timestamp");
    }
    if (count > 4 && !reader.TryNil() && !ReadUtility(reader, out)) {
        return fail("utility_output");
    }
    if (count > 5 && !reader.TryNil() && !ReadFinishedRequests(reader, out)) {
        return fail("finished_requests");
    }
    if (count > 6 && !reader.TryNil() && !TakeInt(reader, out.wave_complete)) {
        return fail("wave_complete");
    }
    if (count > 7 && !reader.TryNil() && !TakeInt(reader, out.start_wave)) {
        return fail("start_wave");
    }
    if (count > 8 && !reader.TryNil() && !internal::TakeView(reader, out.weight_version)) {
        return fail("weight_version");
    }
    if (count > 9) {
        reader.Skip(count - 9);
    }
    if (!reader.Done()) {
        return fail("");
    }
    return {};
}

Status DecodeLogprobs(std::string_view raw, Frames frames, Logprobs& out) {
    out.positions = 0;
    out.width = 0;
    out.token_ids.clear();
    out.logprobs.clear();
    out.ranks.clear();
    Reader reader{raw};
    std::uint32_t count = 0;
    if (!reader.ReadArray(count)) {
        return FieldError("logprobs", "", reader.error());
    }
    if (count < 3) {
        return FieldError("logprobs", "", "fewer than three columns");
    }
    TensorView ids;
    TensorView values;
    TensorView ranks;
    if (Status read = ReadTensor(reader, frames, "token_ids", ids); !read.ok()) {
        return read;
    }
    if (Status read = ReadTensor(reader, frames, "logprobs", values); !read.ok()) {
        return read;
    }
    if (Status read = ReadTensor(reader, frames, "ranks", ranks); !read.ok()) {
        return read;
    }
    if (ids.rank != 2 || values.rank != 2 || ranks.rank != 1 || ids.shape[0] != values.shape[0] ||
        ids.shape[1] != values.shape[1] || ids.shape[0] != ranks.shape[0]) {
        return FieldError("logprobs", "", "columns of different shapes");
    }
    if (!CopyInts(ids, out.token_ids) || !CopyFloats(values, out.logprobs) || !CopyInts(ranks, out.ranks)) {
        out.token_ids.clear();
        out.logprobs.clear();
        out.ranks.clear();
        return FieldError("logprobs", "", "unknown dtype, or data of another size than the shape says");
    }
    out.positions = static_cast<std::int32_t>(ids.shape[0]);
    out.width = static_cast<std::int32_t>(ids.shape[1]);
    return {};
}

void EncodeOutputs(const OutputsBatch& batch, std::string& payload, AuxFrames& aux) {
    aux.Clear();
    Writer writer{payload};
    writer.Array(9);
    writer.Int(batch.engine_index);
    writer.Array(batch.outputs.size());
    for (std::size_t i = 0; i < batch.outputs.size(); ++i) {
        WriteRow(writer, aux, batch.outputs[i], i < batch.extras.size() ? &batch.extras[i] : nullptr);
    }
    if (batch.stats != nullptr) {
        WriteStats(writer, *batch.stats);
    } else {
        writer.Nil();
    }
    writer.Float(batch.timestamp);
    if (batch.utility != nullptr) {
        WriteUtility(writer, *batch.utility);
    } else {
        writer.Nil();
    }
    if (batch.finished_requests.empty()) {
        writer.Nil();
    } else {
        writer.Array(batch.finished_requests.size());
        for (const std::string& id : batch.finished_requests) {
            writer.Str(id);
        }
    }
    batch.wave_complete ? writer.Int(*batch.wave_complete) : writer.Nil();
    batch.start_wave ? writer.Int(*batch.start_wave) : writer.Nil();
    batch.weight_version.empty() ? writer.Nil() : writer.Str(batch.weight_version);
}

}  // namespace rankgate::wire::vllm
