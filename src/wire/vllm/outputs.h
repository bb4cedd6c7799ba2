// SPDX-License-Identifier: Apache-2.0
// vLLM outputs, engine -> frontend, both directions. The gateway decodes a whole engine step into one
// reusable OutputsMessage whose rows are views into the frames: in steady state nothing is allocated.
// Tolerant: arrays may be shorter or longer than known, unknown keys and finish reasons never lose a batch,
// and a row with a field of the wrong type ends as kError alone. The engine end encodes what stock Python and
// Rust frontends require, in full length (18-element outputs, 9-element batch, as 0.32.0 sends).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "wire/generate.h"
#include "wire/protocol.h"

namespace rankgate::wire::vllm {

inline constexpr std::size_t kMaxRowsPerMessage = 1 << 16;
inline constexpr std::size_t kMaxLogprobEntries = 64 << 20;

struct PrefixCacheStats {  // deltas since the previous message
    bool reset{false};
    std::int64_t requests{0};
    std::int64_t queries{0};
    std::int64_t hits{0};
    std::int64_t preempted_requests{0};
    std::int64_t preempted_queries{0};
    std::int64_t preempted_hits{0};
};

/// `load` carries num_running, num_waiting, kv_usage, step_counter and current_wave on this wire.
struct SchedulerStats {
    LoadSnapshot load;
    std::int64_t num_skipped_waiting{0};
    PrefixCacheStats prefix_cache;
    /// Encoding only: the counts that go to a coordinator (outside any step) name no KV-fetch stages.
    bool counts_only{false};
};

/// Answer to a UTILITY call. Ids below zero are unsolicited notices of the engine; ignore them.
struct UtilityReplyView {
    std::uint64_t call_id{0};
    bool unsolicited{false};
    bool failed{false};
    std::string_view failure_message;
    std::string_view result;  // raw msgpack of the value; empty when failed
};

/// One decoded engine step. Reuse the same object: its vectors keep their room.
struct OutputsMessage {
    std::int32_t engine_index{0};
    std::vector<OutputRow> rows;
    std::vector<TokenId> tokens;
    /// Rows that had to be dropped because not even their request id could be read.
    std::uint32_t dropped_rows{0};
    bool has_stats{false};
    SchedulerStats stats;
    double timestamp{0.0};  // monotonic clock of the engine's host
    bool has_utility{false};
    UtilityReplyView utility;
    std::vector<std::string_view> finished_requests;
    std::int64_t wave_complete{-1};  // < 0 = none
    std::int64_t start_wave{-1};
    std::string_view weight_version;

    std::span<const TokenId> TokensOf(const OutputRow& row) const noexcept {
        return {tokens.data() + row.first_token, row.num_tokens};
    }
    void Clear() noexcept;
};

/// Frames [0] = payload, [1..] = tensors. The death notice is the caller's to test first (IsEngineCoreDead).
/// Fails only where the bytes are broken, the outer shape is not an array, or engine_index is no integer;
/// `out` then holds nothing.
Status DecodeOutputs(Frames frames, OutputsMessage& out);

/// Decodes OutputRow::logprobs or ::prompt_logprobs on demand. An empty array (a single-token prompt) gives
/// positions = 0.
Status DecodeLogprobs(std::string_view raw, Frames frames, Logprobs& out);

// ---- engine end ----

struct RequestEvent {
    enum class Kind : std::int8_t { kQueued = 1, kScheduled = 2, kPreempted = 3 };
    Kind kind{Kind::kQueued};
    double timestamp{0.0};
};

struct PrefillStats {
    std::int64_t num_prompt_tokens{0};
    std::int64_t num_computed_tokens{0};
    std::int64_t num_cached_tokens{0};
    std::int64_t num_local_cached_tokens{0};
    std::int64_t num_external_cached_tokens{0};
    std::int64_t num_cache_creation_tokens{0};
};

/// What a RequestOutput does not carry. Optional; see OutputsBatch::extras.
struct OutputExtras {
    std::vector<RequestEvent> events;
    std::optional<PrefillStats> prefill;
};

struct UtilityReply {
    std::uint64_t call_id{0};
    std::optional<std::string> failure_message;
    std::string result;  // raw msgpack of the value; empty = nil
};

/// One message. Never mix families (outputs, utility, DP control) and never send an all-empty one: stock Rust
/// frontends refuse both.
struct OutputsBatch {
    std::int32_t engine_index{0};
    std::span<const RequestOutput> outputs;
    /// Empty, or one per output. Without extras, prefill_stats is made of num_prompt_tokens and
    /// num_cached_tokens where set.
    std::span<const OutputExtras> extras;
    const SchedulerStats* stats{nullptr};
    double timestamp{0.0};
    const UtilityReply* utility{nullptr};
    std::span<const std::string> finished_requests;  // empty = nil
    std::optional<std::int64_t> wave_complete;
    std::optional<std::int64_t> start_wave;
    std::string_view weight_version{"default"};  // empty = nil
};

/// Appends the payload to `payload`; tensors of 256 bytes and more go to `aux` (cleared first).
void EncodeOutputs(const OutputsBatch& batch, std::string& payload, AuxFrames& aux);

}  // namespace rankgate::wire::vllm
