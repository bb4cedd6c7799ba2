// SPDX-License-Identifier: Apache-2.0
// What both dialects share beside the neutral structs: frames, rank identities, the death notice, and the row
// that both output decoders fill. Views point into the caller's frames and live as long as they do. Values,
// no thread rule.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "wire/generate.h"

namespace rankgate::wire {

enum class Dialect : std::uint8_t { kVllm, kTokenSpeed };
std::string_view DialectName(Dialect dialect) noexcept;  // "vllm" | "tokenspeed"

/// The frames of one ZeroMQ message after routing frames are taken off: [0] is the payload, the rest are raw
/// tensors.
using Frames = std::span<const std::string_view>;

/// An engine's last words: one raw frame on every output socket, tested for equality before any decoding.
inline constexpr std::string_view kEngineCoreDead = "ENGINE_CORE_DEAD";
inline bool IsEngineCoreDead(Frames frames) noexcept {
    return !frames.empty() && frames[0] == kEngineCoreDead;
}

/// Routing identity of a rank: its index as two bytes, little-endian, on both dialects.
inline constexpr std::int32_t kMaxRank = 65535;
std::string RankIdentity(std::int32_t rank);
/// Empty when the identity is not exactly two bytes.
std::optional<std::int32_t> RankOfIdentity(std::string_view identity) noexcept;

/// Crossing from raw msgpack to owned values: bounds that hold for both dialects.
inline constexpr std::size_t kMaxRequestIdBytes = 1024;

/// One request's share of an engine step, as views. Tokens are in the message's own vector.
struct OutputRow {
    std::string_view request_id;
    std::uint32_t first_token{0};
    std::uint32_t num_tokens{0};
    FinishReason finish_reason{FinishReason::kNone};
    bool has_stop_token{false};
    std::int32_t num_prompt_tokens{-1};  // < 0 = not in this row
    std::int32_t num_cached_tokens{-1};
    std::int64_t completion_tokens{-1};  // running total where the dialect has it
    std::int64_t stop_token{0};
    std::string_view stop_string;  // empty = none
    /// Raw msgpack, empty = none; see the dialect's DecodeLogprobs.
    std::string_view logprobs;
    std::string_view prompt_logprobs;
    std::string_view logprob_ids;    // TokenSpeed: second column
    std::string_view trace_headers;  // vLLM: raw map

    bool terminal() const noexcept { return finish_reason != FinishReason::kNone; }
    StopReason stop_reason() const {
        if (has_stop_token) {
            return StopReason{stop_token};
        }
        return stop_string.empty() ? StopReason{} : StopReason{std::string{stop_string}};
    }
};

/// Owned frames that follow a payload on the way out (tensors of 256 bytes and more). Reused: Clear() keeps
/// the buffers.
class AuxFrames {
  public:
    std::size_t size() const noexcept { return used_; }
    bool empty() const noexcept { return used_ == 0; }
    const std::string& operator[](std::size_t index) const { return frames_[index]; }
    void Clear() noexcept { used_ = 0; }
    /// The new frame's buffer, empty.
    std::string& Add() {
        if (used_ == frames_.size()) {
            frames_.emplace_back();
        }
        frames_[used_].clear();
        return frames_[used_++];
    }

  private:
    std::vector<std::string> frames_;
    std::size_t used_{0};
};

}  // namespace rankgate::wire
