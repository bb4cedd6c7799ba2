// SPDX-License-Identifier: Apache-2.0
// Sampling on a row of logits, as vLLM orders it: logprobs of the raw logits; allowed ids, bad words,
// min_tokens, logit_bias, penalties; then greedy argmax, or temperature, min_p, top_k, top_p and one draw.
// Randomness is a function of (seed, index of the token) alone, so a preempted or mirrored request repeats
// itself. Pure; scratch space is the caller's.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/sequence.h"
#include "wire/generate.h"

namespace rankgate::engine {

/// Reused between calls; holds nothing of a request.
struct SamplerScratch {
    std::vector<float> logits;
    std::vector<std::int32_t> order;
    std::vector<float> weights;
    std::vector<std::int32_t> counts;  // per token, of the output; all zero between calls
    std::vector<std::uint8_t> seen;    // per token, in prompt or output; all zero between calls
};

/// Seed of a request that names none: its id, which is unique. Equal on all tensor-parallel ranks.
std::uint64_t SeedOf(const wire::GenerateRequest& request) noexcept;

/// The next token of `sequence` from `raw` logits. `allowed` (a grammar's mask, may be empty) has one flag a
/// token.
TokenId SampleToken(const Sequence& sequence, std::span<const float> raw,
                    std::span<const std::uint8_t> allowed, SamplerScratch& scratch);

/// First index of the largest value (NaN never wins).
TokenId ArgMax(std::span<const float> logits) noexcept;

/// Appends one scored position: column 0 `chosen`, then the top `top` tokens (-1 = all) of log_softmax(raw).
/// Ranks are 1-based.
void AppendLogprobs(std::span<const float> raw, TokenId chosen, std::int32_t top, SamplerScratch& scratch,
                    wire::Logprobs& out);

}  // namespace rankgate::engine
