// SPDX-License-Identifier: Apache-2.0
#include "wire/vllm/validate.h"

#include <cmath>
#include <string>

namespace rankgate::wire::vllm {

namespace {

bool Within(double value, double low, double high) {
    return value >= low && value <= high;
}  // false for NaN

bool AllBelow(const std::vector<TokenId>& ids, std::int64_t vocab_size) {
    for (const TokenId id : ids) {
        if (id < 0 || (vocab_size > 0 && id >= vocab_size)) {
            return false;
        }
    }
    return true;
}

}  // namespace

Status CheckRequest(const GenerateRequest& request, const RankLimits& limits) {
    const SamplingParams& params = request.sampling;
    const std::int64_t vocab = limits.vocab_size;
    if (request.prompt_token_ids.empty()) {
        return Error::Invalid("prompt", "the prompt is empty");
    }
    if (!AllBelow(request.prompt_token_ids, vocab)) {
        return Error::Invalid("prompt", "a prompt token id is outside the vocabulary");
    }
    const auto prompt = static_cast<std::int64_t>(request.prompt_token_ids.size());
    if (limits.max_model_len > 0 && prompt >= limits.max_model_len) {
        return Error{ErrorCode::kContextLength,
                     "the prompt of " + std::to_string(prompt) + " tokens leaves no room in a context of " +
                         std::to_string(limits.max_model_len),
                     "prompt", false};
    }
    if (!Within(params.temperature, 0.0, 2.0)) {
        return Error::Invalid("temperature", "temperature must be in [0, 2]");
    }
    if (!(params.top_p > 0.0 && params.top_p <= 1.0)) {
        return Error::Invalid("top_p", "top_p must be in (0, 1]");
    }
    if (params.top_k < -1) {
        return Error::Invalid("top_k", "top_k must be 0 or -1 (all) or positive");
    }
    if (!Within(params.min_p, 0.0, 1.0)) {
        return Error::Invalid("min_p", "min_p must be in [0, 1]");
    }
    if (!Within(params.presence_penalty, -2.0, 2.0)) {
        return Error::Invalid("presence_penalty", "presence_penalty must be in [-2, 2]");
    }
    if (!Within(params.frequency_penalty, -2.0, 2.0)) {
        return Error::Invalid("frequency_penalty", "frequency_penalty must be in [-2, 2]");
    }
    if (!(params.repetition_penalty > 0.0 && std::isfinite(params.repetition_penalty))) {
        return Error::Invalid("repetition_penalty", "repetition_penalty must be above 0");
    }
    if (params.max_tokens < 1) {
        return Error::Invalid("max_tokens", "max_tokens must be at least 1");
    }
    if (params.min_tokens < 0 || params.min_tokens > params.max_tokens) {
        return Error::Invalid("min_tokens", "min_tokens must be in [0, max_tokens]");
    }
    for (const auto* logprobs : {&params.logprobs, &params.prompt_logprobs}) {
        if (*logprobs && (**logprobs < -1 || (vocab > 0 && **logprobs > vocab))) {
            return Error::Invalid(logprobs == &params.logprobs ? "logprobs" : "prompt_logprobs",
                                  "must be -1 or in [0, vocabulary size]");
        }
    }
    if (params.thinking_token_budget && *params.thinking_token_budget < -1) {
        return Error::Invalid("thinking_token_budget", "thinking_token_budget must be at least -1");
    }
    for (const auto& [token, bias] : params.logit_bias) {
        if (token < 0 || (vocab > 0 && token >= vocab)) {
            return Error::Invalid("logit_bias", "a logit_bias token id is outside the vocabulary");
        }
        if (!std::isfinite(bias)) {
            return Error::Invalid("logit_bias", "a logit_bias value is not a number");
        }
    }
    if (params.allowed_token_ids && !AllBelow(*params.allowed_token_ids, vocab)) {
        return Error::Invalid("allowed_token_ids", "an allowed token id is outside the vocabulary");
    }
    if (params.min_tokens > 0 && vocab > 0) {
        // Masked by index until min_tokens is reached, so an id past the vocabulary writes out of bounds in
        // the engine.
        for (const TokenId id : params.all_stop_token_ids) {
            if (id >= vocab) {
                return Error::Invalid("stop_token_ids", "a stop token id is outside the vocabulary");
            }
        }
    }
    for (const std::string& word : params.bad_words) {
        if (word.empty()) {
            return Error::Invalid("bad_words", "a bad word is empty");
        }
    }
    for (const std::vector<TokenId>& ids : params.bad_words_token_ids) {
        if (ids.empty()) {
            return Error::Invalid("bad_words", "a bad word has no tokens");
        }
    }
    if (params.structured_outputs && params.structured_outputs->backend.empty()) {
        return Error::Invalid("structured_outputs", "structured outputs need a backend");
    }
    if (request.lora && request.lora->id < 1) {
        return Error::Invalid("lora_request", "a LoRA id must be positive");
    }
    return {};
}

}  // namespace rankgate::wire::vllm
