// SPDX-License-Identifier: Apache-2.0
#include "wire/tokenspeed/validate.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>

namespace rankgate::wire::tokenspeed {

namespace {

bool Within(double value, double low, double high) {
    return value >= low && value <= high;
}  // false for NaN

Error TooLong(std::int64_t prompt, std::int64_t limit) {
    return Error{ErrorCode::kContextLength,
                 "the prompt of " + std::to_string(prompt) + " tokens exceeds the engine's limit of " +
                     std::to_string(limit),
                 "prompt", false};
}

Error Unsupported(std::string param, std::string_view what) {
    return Error::Invalid(std::move(param), std::string{what} + " is not supported by this runtime");
}

/// The ranges that both directions share.
Status CheckRanges(double top_p, double min_p, double frequency, double presence, double repetition) {
    if (!(top_p > 0.0 && top_p <= 1.0)) {
        return Error::Invalid("top_p", "top_p must be in (0, 1]");
    }
    if (!Within(min_p, 0.0, 1.0)) {
        return Error::Invalid("min_p", "min_p must be in [0, 1]");
    }
    if (!Within(frequency, -2.0, 2.0)) {
        return Error::Invalid("frequency_penalty", "frequency_penalty must be in [-2, 2]");
    }
    if (!Within(presence, -2.0, 2.0)) {
        return Error::Invalid("presence_penalty", "presence_penalty must be in [-2, 2]");
    }
    if (!Within(repetition, 0.0, 2.0)) {
        return Error::Invalid("repetition_penalty", "repetition_penalty must be in [0, 2]");
    }
    return {};
}

}  // namespace

std::int64_t LongestPrompt(const ReadyResponse& ready, std::int64_t decode_width) noexcept {
    std::int64_t limit = ready.max_model_len;
    if (ready.kv_cache_size_tokens) {
        limit = std::min(limit, *ready.kv_cache_size_tokens - ready.block_size);
    }
    return std::max<std::int64_t>(0, limit - 2 - (decode_width - 1));
}

Status CheckRequest(const GenerateRequest& request, const RankLimits& limits) {
    const SamplingParams& params = request.sampling;
    if (request.prompt_token_ids.empty()) {
        return Error::Invalid("prompt", "the prompt is empty");
    }
    for (const TokenId id : request.prompt_token_ids) {
        if (id < 0 || (limits.vocab_size > 0 && id >= limits.vocab_size)) {
            return Error::Invalid("prompt", "a prompt token id is outside the vocabulary");
        }
    }
    const auto prompt = static_cast<std::int64_t>(request.prompt_token_ids.size());
    if (limits.max_prompt_tokens > 0 && prompt > limits.max_prompt_tokens) {
        return TooLong(prompt, limits.max_prompt_tokens);
    }
    if (!(params.temperature >= 0.0 && std::isfinite(params.temperature))) {
        return Error::Invalid("temperature", "temperature must be at least 0");
    }
    if (params.top_k < -1 || params.top_k >= kTopKLimit) {
        return Error::Invalid("top_k", "top_k must be below 128, or 0 or -1 for all, on this runtime");
    }
    if (Status ranges = CheckRanges(params.top_p, params.min_p, params.frequency_penalty,
                                    params.presence_penalty, params.repetition_penalty);
        !ranges.ok()) {
        return ranges;
    }
    if (params.max_tokens < 1) {
        return Error::Invalid("max_tokens", "max_tokens must be at least 1");
    }
    if (params.min_tokens < 0 || params.min_tokens > params.max_tokens) {
        return Error::Invalid("min_tokens", "min_tokens must be in [0, max_tokens]");
    }
    for (const auto& [token, bias] : params.logit_bias) {
        if (token < 0 || (limits.vocab_size > 0 && token >= limits.vocab_size) || !std::isfinite(bias)) {
            return Error::Invalid("logit_bias",
                                  "a logit_bias entry is outside the vocabulary or not a number");
        }
    }
    if (params.logprobs) {
        if (!limits.output_logprobs) {
            return Unsupported("logprobs", "logprobs (the engine runs without --enable-output-logprobs)");
        }
        if (*params.logprobs != 0) {
            return Unsupported("top_logprobs", "top_logprobs");
        }
    }
    if (params.prompt_logprobs) {
        return Unsupported("prompt_logprobs", "prompt_logprobs");
    }
    if (params.structured_outputs && !limits.grammar) {
        return Unsupported("response_format",
                           "structured output (the engine runs without a grammar backend)");
    }
    // A constraint that this wire cannot carry is refused, never dropped in silence.
    if (params.allowed_token_ids) {
        return Unsupported("allowed_token_ids", "allowed_token_ids");
    }
    if (!params.bad_words.empty() || !params.bad_words_token_ids.empty()) {
        return Unsupported("bad_words", "bad_words");
    }
    if (request.lora) {
        return Unsupported("model", "LoRA");
    }
    if (request.cache_salt) {
        return Unsupported("cache_salt", "cache_salt");
    }
    return {};
}

Status CheckDecoded(const Request& request, const RankLimits& limits) {
    const SamplingFields& fields = request.sampling;
    if (request.validation_error) {
        return Error::Invalid("validation_error", *request.validation_error);
    }
    if (request.has_multimodal) {
        return Unsupported("multimodal_inputs", "multimodal input");
    }
    if (request.has_session) {
        return Unsupported("session_params", "a session");
    }
    if (!request.input_ids || request.input_ids->empty()) {
        return Error::Invalid("input_ids", "the prompt is empty");
    }
    const auto prompt = static_cast<std::int64_t>(request.input_ids->size());
    if (limits.max_prompt_tokens > 0 && prompt > limits.max_prompt_tokens) {
        return TooLong(prompt, limits.max_prompt_tokens);
    }
    for (const std::int64_t id : *request.input_ids) {
        if (id < 0 || id > INT32_MAX || (limits.vocab_size > 0 && id >= limits.vocab_size)) {
            return Error::Invalid("input_ids", "a token id is outside the vocabulary");
        }
    }
    if (!(fields.temperature >= 0.0 && std::isfinite(fields.temperature))) {
        return Error::Invalid("temperature", "temperature must be at least 0");
    }
    if (fields.top_k != -1 && fields.top_k < 1) {
        return Error::Invalid("top_k", "top_k must be -1 or at least 1");
    }
    if (fields.top_k >= kTopKLimit && fields.top_k != kTopKAll) {
        return Error::Invalid("top_k", "top_k must be below 128 or exactly 2^30");
    }
    if (Status ranges = CheckRanges(fields.top_p, fields.min_p, fields.frequency_penalty,
                                    fields.presence_penalty, fields.repetition_penalty);
        !ranges.ok()) {
        return ranges;
    }
    if (fields.max_new_tokens && *fields.max_new_tokens < 0) {
        return Error::Invalid("max_new_tokens", "max_new_tokens must be at least 0");
    }
    if (fields.min_new_tokens < 0 ||
        (fields.max_new_tokens && fields.min_new_tokens > *fields.max_new_tokens)) {
        return Error::Invalid("min_new_tokens", "min_new_tokens must be in [0, max_new_tokens]");
    }
    if (fields.logit_bias) {
        for (const auto& [token, bias] : *fields.logit_bias) {
            TokenId id = -1;
            const auto [end, error] = std::from_chars(token.data(), token.data() + token.size(), id);
            if (error != std::errc{} || end != token.data() + token.size() || id < 0 ||
                (limits.vocab_size > 0 && id >= limits.vocab_size) || !std::isfinite(bias)) {
                return Error::Invalid("logit_bias",
                                      "a logit_bias key is no token id, or its value no number");
            }
        }
    }
    if (fields.logprobs && *fields.logprobs != 0) {
        return Error::Invalid("logprobs", "only logprobs=0 is supported");
    }
    if (fields.n != 1) {
        return Error::Invalid("n", "n must be 1 on this wire");
    }
    if (fields.json_schema.has_value() + fields.regex.has_value() + fields.ebnf.has_value() > 1) {
        return Error::Invalid("regex", "only one of regex, json_schema and ebnf can be set");
    }
    const bool constrained = fields.json_schema || fields.regex || fields.ebnf || fields.structural_tag;
    if (constrained && !limits.grammar) {
        return Unsupported("grammar", "a grammar");
    }
    if (fields.stream_interval && *fields.stream_interval == 0) {
        return Error::Invalid("stream_interval", "stream_interval must not be 0");
    }
    if (request.return_logprob) {
        if (!limits.output_logprobs) {
            return Unsupported("return_logprob", "logprobs (started without --enable-output-logprobs)");
        }
        if (request.top_logprobs_num > 0) {
            return Unsupported("top_logprobs_num", "top_logprobs_num above 0");
        }
        if (request.token_ids_logprob && !request.token_ids_logprob->empty()) {
            return Unsupported("token_ids_logprob", "token_ids_logprob");
        }
        // Only the last prompt position has a column to go with; -1 means it.
        if (request.logprob_start_len != -1 && request.logprob_start_len != prompt - 1) {
            return Error::Invalid("logprob_start_len",
                                  "logprob_start_len must be -1: no prompt logprobs on this wire");
        }
    }
    return {};
}

}  // namespace rankgate::wire::tokenspeed
