// SPDX-License-Identifier: Apache-2.0
// What the api layer knows of one served model: names, limits, special tokens, defaults and what its engines
// can do. The gateway builds it once the engines have said hello and swaps it whole; requests in flight keep
// the one they started with. Immutable.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "wire/generate.h"

namespace rankgate::text {
struct ModelAssets;
}  // namespace rankgate::text

namespace rankgate::api {

using wire::TokenId;

/// What the runtime behind a model can honour. A field it cannot honour is refused by name, never dropped.
struct Features {
    bool logprobs{true};
    /// Largest `logprobs` / `top_logprobs`; -1 = no limit (the whole vocabulary may be asked for).
    std::int32_t max_logprobs{20};
    bool prompt_logprobs{true};
    /// top_k must be below this unless it is off; 0 = no limit.
    std::int32_t top_k_limit{0};
    /// Largest repetition_penalty that the engine takes.
    double max_repetition_penalty{100};
    bool negative_seed{true};
    bool logit_bias{true};
    bool allowed_token_ids{true};
    bool bad_words{true};
    bool priority{true};
    bool cache_salt{true};
    bool lora{false};
    bool thinking_token_budget{true};
    /// W3C traceparent/tracestate are forwarded (an engine without tracing only logs a warning for them).
    bool trace_headers{false};
    /// Structured-output back-end named on the wire; empty = the engine has none and such requests are
    /// refused.
    std::string structured_outputs_backend{"xgrammar"};
    /// A tool-call parser is configured. Without one a request that may call tools is refused.
    bool tool_parser{false};
    /// `chat_template` in a request is honoured (off: a template is code).
    bool chat_template_in_request{false};
    /// Special tokens typed by a client ("<|im_end|>") are read as such, as vLLM does. Off: they are plain
    /// text.
    bool special_tokens_in_content{true};

    static Features Vllm() { return {}; }
    static Features TokenSpeed();
};

/// Bounds on one HTTP request; docs/openai-api.md lists them.
struct Limits {
    std::int32_t max_n{128};
    std::int32_t max_prompts{2048};    // at most kMaxPrompts
    std::int32_t max_sequences{4096};  // prompts * n
    /// What all sequences of a request weigh together: each carries its own prompt, ids and schema.
    std::int64_t max_sequence_bytes{std::int64_t{128} << 20};
};

struct ModelInfo {
    /// Names that requests may use; the first one is the model's own.
    std::vector<std::string> served_names;
    std::int64_t created{0};
    std::string owned_by{"rankgate"};

    /// Tokenizer, templates, EOS ids and sampling defaults. Never null in use.
    std::shared_ptr<const text::ModelAssets> assets;

    /// Entries of the MODEL's vocabulary (embedding rows): an id at or above it kills an engine.
    std::int32_t vocab_size{0};
    /// The smallest of the live ranks; 0 = no rank has told yet (requests are answered 503).
    std::int64_t max_model_len{0};
    std::int32_t data_parallel_size{1};

    Features features;
    Limits limits;
    /// Loaded adapters; a request whose `model` is an adapter's name is routed to it.
    std::vector<wire::LoraRequest> adapters;

    bool Serves(std::string_view name) const noexcept;
    /// Null = no adapter of that name.
    const wire::LoraRequest* FindAdapter(std::string_view name) const noexcept;
};

/// Whether `model` of a request (absent = the only model) is this model or one of its adapters. 404 with code
/// model_not_found.
Status CheckModelName(const std::optional<std::string>& name, const ModelInfo& model);
Error ModelNotFound(std::string_view name);

}  // namespace rankgate::api
