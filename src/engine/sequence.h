// SPDX-License-Identifier: Apache-2.0
// Sequence: one request while the engine end holds it, shared by the scheduler (which owns it), the runner
// (which reads it) and the dialect (which turns its new tokens into wire rows). Confined to the rank's core
// thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "wire/generate.h"

namespace rankgate::engine {

using wire::TokenId;

/// When a row of this request is due. vLLM sends every step; TokenSpeed thins out (stream interval, or 50 for
/// plain requests).
struct EmitPolicy {
    bool every_step{true};
    bool stream{true};
    std::int32_t interval{1};
};

/// Waiting (slot < 0) -> Running (slot >= 0) -> gone; a preempted one goes back to Waiting with `computed` 0
/// and keeps its output.
struct Sequence {
    wire::GenerateRequest request;
    std::uint64_t arrival{0};  // order of acceptance; the only tie-break
    std::int32_t slot{-1};     // the runner's place for its KV while running
    std::int64_t computed{0};  // positions whose KV the runner holds
    std::int64_t blocks{0};    // pages it occupies
    std::vector<TokenId> output;
    bool first_row_sent{false};
    std::int64_t cached{0};  // prompt tokens found in the prefix cache at the last admission
    EmitPolicy emit;
    std::size_t sent{0};  // how much of `output` has gone out in rows
    bool want_logprobs{false};
    /// Scored positions not yet sent: sampled tokens, and the prompt (complete once the prefill is).
    wire::Logprobs logprobs;
    wire::Logprobs prompt_logprobs;
    bool prompt_logprobs_done{false};
    wire::FinishReason finish{wire::FinishReason::kNone};
    wire::StopReason stop_reason;

    std::int64_t prompt_len() const noexcept {
        return static_cast<std::int64_t>(request.prompt_token_ids.size());
    }
    std::int64_t num_tokens() const noexcept {
        return prompt_len() + static_cast<std::int64_t>(output.size());
    }
    TokenId TokenAt(std::int64_t position) const noexcept {
        return position < prompt_len() ? request.prompt_token_ids[static_cast<std::size_t>(position)]
                                       : output[static_cast<std::size_t>(position - prompt_len())];
    }
    std::span<const TokenId> unsent() const noexcept {
        return std::span<const TokenId>{output}.subspan(sent);
    }
};

}  // namespace rankgate::engine
