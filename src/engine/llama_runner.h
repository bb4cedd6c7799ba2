// SPDX-License-Identifier: Apache-2.0
// LlamaRunner: a GGUF model through llama.cpp on the CPU. Real batching over sequences; one KV stream per
// slot and no flash attention, so that logits do not depend on what else is in the batch or how a prompt was
// chunked (docs/engine.md). A finished sequence's KV stays in its slot until the slot is needed: a later
// prompt that begins alike continues from there. Core thread only (llama.cpp has its own workers below).
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/result.h"
#include "engine/runner.h"

namespace rankgate::engine {

struct LlamaConfig {
    std::string path;
    std::int64_t max_model_len{0};  // 0 = the model's own, capped by kDefaultLlamaContext
    std::int32_t max_num_seqs{8};
    std::int32_t max_num_batched_tokens{128};
    std::int32_t threads{1};
    bool prefix_caching{true};
};

/// Without --max-model-len: more context than this per sequence is memory that a demo does not need.
inline constexpr std::int64_t kDefaultLlamaContext = 2048;

/// Loads the model (seconds). facts() then has the vocabulary, the EOS ids and the usable context.
Result<std::unique_ptr<ModelRunner>> MakeLlamaRunner(const LlamaConfig& config);

}  // namespace rankgate::engine
