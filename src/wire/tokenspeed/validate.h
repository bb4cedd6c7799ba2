// SPDX-License-Identifier: Apache-2.0
// What a TokenSpeed rank must never be sent, and what it answers with an abort row. The gateway calls
// CheckRequest before it encodes, the engine end CheckDecoded after it decodes. Pure.
#pragma once

#include <cstdint>

#include "base/result.h"
#include "wire/generate.h"
#include "wire/handshake.h"
#include "wire/tokenspeed/request.h"

namespace rankgate::wire::tokenspeed {

struct RankLimits {
    /// Longest prompt a rank survives; 0 = not known. See LongestPrompt.
    std::int64_t max_prompt_tokens{0};
    std::int64_t vocab_size{0};  // 0 = not known
    bool output_logprobs{true};  // --enable-output-logprobs
    bool grammar{true};          // --grammar-backend
};

/// The true bound is smaller than the reported max_model_len and not on the wire: one page of the cache and
/// two tokens less, and `decode_width - 1` more for speculative decoding. At least 0.
std::int64_t LongestPrompt(const ReadyResponse& ready, std::int64_t decode_width = 1) noexcept;

/// Gateway: refuses what kills the rank (empty prompt, over-long prompt, ids from 2^31 or outside the
/// vocabulary) and what it would answer with an abort row (ranges, top_k 128.., logprobs and grammar that are
/// switched off, top logprobs).
Status CheckRequest(const GenerateRequest& request, const RankLimits& limits);

/// Engine end: the real engine's own validation plus everything that kills it. Call after Normalise; a
/// failure is one abort row.
Status CheckDecoded(const Request& request, const RankLimits& limits);

}  // namespace rankgate::wire::tokenspeed
