// SPDX-License-Identifier: Apache-2.0
// What a vLLM 0.32.0 rank must never be sent: each of these deafens, mutes or kills it for everybody. The
// gateway calls this before it encodes, the engine end after it decodes. Pure.
#pragma once

#include <cstdint>

#include "base/result.h"
#include "wire/generate.h"

namespace rankgate::wire::vllm {

/// What a rank can take; 0 = not known, the check is skipped.
struct RankLimits {
    std::int64_t max_model_len{0};
    std::int64_t vocab_size{0};
};

/// First violation as kInvalidArgument (kContextLength for the prompt), `param` named as on the wire
/// ("temperature").
Status CheckRequest(const GenerateRequest& request, const RankLimits& limits);

}  // namespace rankgate::wire::vllm
