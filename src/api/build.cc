// SPDX-License-Identifier: Apache-2.0
// ParsedRequest + token ids -> wire::GenerateRequest. The last line before the wire: an engine that decodes a
// value it does not expect loses its input thread, and with it every tenant, so each such value is refused
// here with the field's name.
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <limits>

#include "api/request.h"
#include "text/model_assets.h"

namespace rankgate::api {
namespace {

constexpr std::int64_t kCompletionDefaultMaxTokens = 16;
constexpr double kGreedyBelow = 1e-5;
// Engines raise smaller temperatures to this themselves (the logits would overflow).
constexpr double kMinTemperature = 0.01;
constexpr std::size_t kTraceparentSize = 55;
constexpr std::size_t kMaxTracestate = 512;

std::string_view PromptField(const ParsedRequest& request) noexcept {
    return request.endpoint == Endpoint::kChat ? "messages" : "prompt";
}

std::string_view MaxTokensField(const ParsedRequest& request) noexcept {
    return request.sampling.max_tokens_is_completion ? "max_completion_tokens" : "max_tokens";
}

Error NotByEngine(std::string_view field) {
    return Error::Invalid(std::string{field},
                          "'" + std::string{field} + "' is not supported by the engine behind this model.");
}

Error OutsideVocabulary(std::string_view field, std::int64_t id, std::int64_t vocab) {
    return Error::Invalid(std::string{field}, "'" + std::string{field} + "' holds the token id " +
                                                  std::to_string(id) +
                                                  ", which is outside of the vocabulary (0 to " +
                                                  std::to_string(vocab - 1) + ").");
}

Status CheckIds(std::string_view field, std::span<const TokenId> ids, std::int64_t vocab) {
    for (const TokenId id : ids) {
        if (id < 0 || id >= vocab) {
            return OutsideVocabulary(field, id, vocab);
        }
    }
    return Status::Ok();
}

Status CheckLogprobs(std::string_view field, std::int32_t wanted, const ModelInfo& model) {
    if (!model.features.logprobs) {
        return NotByEngine(field);
    }
    const std::int32_t cap = model.features.max_logprobs;
    if (cap >= 0 && (wanted < 0 || wanted > cap)) {
        return Error::Invalid(std::string{field}, "'" + std::string{field} + "' must be between 0 and " +
                                                      std::to_string(cap) + ", got " +
                                                      std::to_string(wanted) + ".");
    }
    if (wanted > model.vocab_size) {
        return Error::Invalid(std::string{field}, "'" + std::string{field} +
                                                      "' is larger than the vocabulary (" +
                                                      std::to_string(model.vocab_size) + ").");
    }
    return Status::Ok();
}

// A model's own file may say anything; a default that the engine would choke on is no default.
template <class T, class Valid>
T OrDefault(const std::optional<T>& asked, const std::optional<T>& of_model, T neutral, Valid valid) {
    if (asked) {
        return *asked;
    }
    return of_model && valid(*of_model) ? *of_model : neutral;
}

bool InClosed(double value, double low, double high) noexcept {
    return value >= low && value <= high;
}

Error ContextExceeded(const ParsedRequest& request, std::int64_t limit, std::int64_t prompt,
                      std::optional<std::int64_t> completion) {
    const std::string field{PromptField(request)};
    std::string message =
        "This model's maximum context length is " + std::to_string(limit) + " tokens. However, ";
    if (!completion) {
        message += "your " + field + " resulted in " + std::to_string(prompt) +
                   " tokens, which leaves no room for a reply. " + "Please reduce the length of the " +
                   field + ".";
        return Error{ErrorCode::kContextLength, std::move(message), field, false};
    }
    const std::int64_t total = *completion > std::numeric_limits<std::int64_t>::max() - prompt
                                   ? std::numeric_limits<std::int64_t>::max()
                                   : prompt + *completion;
    message += "you requested " + std::to_string(total) + " tokens (" + std::to_string(prompt) + " in the " +
               field + ", " + std::to_string(*completion) +
               " in the completion). Please reduce the length of the " + field + " or completion.";
    return Error{ErrorCode::kContextLength, std::move(message), std::string{MaxTokensField(request)}, false};
}

Result<std::int64_t> ResolveMaxTokens(const ParsedRequest& request, const ModelInfo& model,
                                      std::int64_t prompt_tokens) {
    const std::int64_t limit = model.max_model_len;
    if (prompt_tokens >= limit) {
        return ContextExceeded(request, limit, prompt_tokens, std::nullopt);
    }
    const std::int64_t room = limit - prompt_tokens;
    std::int64_t max_tokens = 0;
    if (request.EchoOnly()) {
        max_tokens = 1;
    } else if (request.sampling.max_tokens) {
        max_tokens = *request.sampling.max_tokens;
        if (max_tokens > room) {
            return ContextExceeded(request, limit, prompt_tokens, max_tokens);
        }
    } else {
        max_tokens = request.endpoint == Endpoint::kChat ? room : std::min(room, kCompletionDefaultMaxTokens);
        const std::optional<std::int64_t>& of_model = model.assets->defaults.max_new_tokens;
        if (of_model && *of_model >= 1) {
            max_tokens = std::min(max_tokens, *of_model);
        }
    }
    if (request.sampling.min_tokens > max_tokens) {
        return Error::Invalid("min_tokens", "'min_tokens' (" + std::to_string(request.sampling.min_tokens) +
                                                ") is above the most that can be generated here (" +
                                                std::to_string(max_tokens) + ").");
    }
    return max_tokens;
}

// Each word twice, as vLLM does: as it is, and as it looks in the middle of a text when that is another
// token.
Result<std::vector<std::vector<TokenId>>> TokenizeBadWords(const std::vector<std::string>& words,
                                                           const ModelInfo& model) {
    std::vector<std::vector<TokenId>> out;
    const text::Tokenizer::EncodeOptions options{.add_special = false, .parse_special = true};
    for (const std::string& word : words) {
        const std::size_t begin = word.find_first_not_of(" \t\r\n\f\v");
        if (begin == std::string::npos) {
            return Error::Invalid("bad_words", "'bad_words' must not hold an empty or blank string.");
        }
        const std::string bare = word.substr(begin);
        std::vector<TokenId> ids;
        if (Status encoded = model.assets->tokenizer->Encode(bare, options, ids); !encoded.ok()) {
            return Error::Invalid("bad_words", encoded.error().message);
        }
        std::vector<TokenId> spaced;
        if (Status encoded = model.assets->tokenizer->Encode(" " + bare, options, spaced); !encoded.ok()) {
            return Error::Invalid("bad_words", encoded.error().message);
        }
        for (const auto* list : {&ids, &spaced}) {
            if (list->empty()) {
                return Error::Invalid(
                    "bad_words", "'bad_words' holds a word that has no tokens in this model's vocabulary.");
            }
            if (Status status = CheckIds("bad_words", *list, model.vocab_size); !status.ok()) {
                return status.error();
            }
        }
        const bool another = spaced.front() != ids.front() && spaced.size() == ids.size();
        out.push_back(std::move(ids));
        if (another) {
            out.push_back(std::move(spaced));
        }
    }
    return out;
}

Result<std::optional<std::int32_t>> PinnedRank(const ParsedRequest& request, const ModelInfo& model,
                                               std::string_view header) {
    std::optional<std::int32_t> rank = request.data_parallel_rank;
    constexpr const char* kField = "data_parallel_rank";
    if (!header.empty()) {
        std::int32_t named = -1;
        const auto [end, failed] = std::from_chars(header.data(), header.data() + header.size(), named);
        if (failed != std::errc{} || end != header.data() + header.size() || named < 0) {
            return Error::Invalid(kField, "The header X-data-parallel-rank must be a rank number.");
        }
        if (rank && *rank != named) {
            return Error::Invalid(
                kField, "'data_parallel_rank' and the header X-data-parallel-rank name different ranks.");
        }
        rank = named;
    }
    if (rank && *rank >= model.data_parallel_size) {
        return Error::Invalid(kField, "'data_parallel_rank' is " + std::to_string(*rank) +
                                          ", but this group has " + std::to_string(model.data_parallel_size) +
                                          " rank(s), numbered from 0.");
    }
    return rank;
}

bool IsTraceparent(std::string_view text) noexcept {
    if (text.size() != kTraceparentSize || text[2] != '-' || text[35] != '-' || text[52] != '-') {
        return false;
    }
    return std::all_of(text.begin(), text.end(),
                       [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || c == '-'; });
}

bool IsTracestate(std::string_view text) noexcept {
    return !text.empty() && text.size() <= kMaxTracestate &&
           std::all_of(text.begin(), text.end(), [](char c) { return c >= 0x20 && c < 0x7F; });
}

Result<wire::SamplingParams> BuildSampling(const ParsedRequest& request, const ModelInfo& model) {
    const SamplingFields& in = request.sampling;
    const text::GenerationDefaults& of_model = model.assets->defaults;
    const std::int64_t vocab = model.vocab_size;
    wire::SamplingParams out;

    out.temperature =
        OrDefault(in.temperature, of_model.temperature, 1.0, [](double v) { return InClosed(v, 0, 2); });
    out.top_p = OrDefault(in.top_p, of_model.top_p, 1.0, [](double v) { return v > 0 && v <= 1; });
    out.min_p = OrDefault(in.min_p, of_model.min_p, 0.0, [](double v) { return InClosed(v, 0, 1); });
    const std::int32_t top_k_limit = model.features.top_k_limit;
    out.top_k = OrDefault(in.top_k, of_model.top_k, std::int32_t{0},
                          [&](std::int32_t v) { return v >= 0 && (top_k_limit == 0 || v < top_k_limit); });
    out.repetition_penalty =
        OrDefault(in.repetition_penalty, of_model.repetition_penalty, 1.0,
                  [&](double v) { return v > 0 && v <= model.features.max_repetition_penalty; });
    out.presence_penalty = in.presence_penalty.value_or(0.0);
    out.frequency_penalty = in.frequency_penalty.value_or(0.0);
    if (out.temperature < kGreedyBelow) {
        out.temperature = 0;
        out.top_p = 1;
        out.top_k = 0;
        out.min_p = 0;
    } else {
        out.temperature = std::max(out.temperature, kMinTemperature);
    }

    out.min_tokens = in.min_tokens;
    out.ignore_eos = in.ignore_eos;

    if (Status status = CheckIds("stop_token_ids", in.stop_token_ids, vocab); !status.ok()) {
        return status.error();
    }
    const auto add_once = [](std::vector<TokenId>& list, TokenId id) {
        if (std::find(list.begin(), list.end(), id) == list.end()) {
            list.push_back(id);
        }
    };
    const auto in_vocab = [&](TokenId id) { return id >= 0 && id < vocab; };
    for (const TokenId id : in.stop_token_ids) {
        add_once(out.stop_token_ids, id);
    }
    out.all_stop_token_ids = out.stop_token_ids;
    const std::optional<TokenId> eos = model.assets->eos_token_id;
    if (eos && in_vocab(*eos)) {
        add_once(out.all_stop_token_ids, *eos);
        if (!in.ignore_eos) {
            out.eos_token_id = eos;
        }
    }
    for (const TokenId id : model.assets->eos_token_ids) {
        if (!in_vocab(id)) {
            continue;
        }
        add_once(out.all_stop_token_ids, id);
        if (!in.ignore_eos && id != eos) {
            add_once(out.stop_token_ids, id);
        }
    }

    if (request.logprobs) {
        out.logprobs = request.top_logprobs;
    }
    if (const std::optional<std::int32_t> prompt_logprobs = request.EffectivePromptLogprobs()) {
        out.prompt_logprobs = prompt_logprobs;
        // Cached blocks have no scores.
        out.skip_reading_prefix_cache = true;
    }

    for (const auto& [id, bias] : in.logit_bias) {
        if (!in_vocab(id)) {
            return OutsideVocabulary("logit_bias", id, vocab);
        }
    }
    out.logit_bias = in.logit_bias;
    if (in.allowed_token_ids) {
        if (Status status = CheckIds("allowed_token_ids", *in.allowed_token_ids, vocab); !status.ok()) {
            return status.error();
        }
        out.allowed_token_ids = in.allowed_token_ids;
    }
    if (!in.bad_words.empty()) {
        Result<std::vector<std::vector<TokenId>>> ids = TokenizeBadWords(in.bad_words, model);
        if (!ids.ok()) {
            return std::move(ids).error();
        }
        out.bad_words = in.bad_words;
        out.bad_words_token_ids = std::move(ids).value();
    }
    if (in.structured_outputs) {
        out.structured_outputs = in.structured_outputs;
        out.structured_outputs->backend = model.features.structured_outputs_backend;
    }
    out.thinking_token_budget = in.thinking_token_budget;
    out.stop = in.stop;
    out.include_stop_str_in_output = in.include_stop_str_in_output;
    out.skip_special_tokens = in.skip_special_tokens;
    out.spaces_between_special_tokens = in.spaces_between_special_tokens;
    return out;
}

// What one more choice costs beside its prompt: everything that is copied into its own message.
std::int64_t CopiedBytes(const wire::SamplingParams& sampling) noexcept {
    const auto ids = [](std::size_t count) { return static_cast<std::int64_t>(count * sizeof(TokenId)); };
    std::int64_t bytes =
        ids(sampling.stop_token_ids.size()) + ids(sampling.all_stop_token_ids.size()) +
        static_cast<std::int64_t>(sampling.logit_bias.size() * sizeof(sampling.logit_bias[0]));
    if (sampling.allowed_token_ids) {
        bytes += ids(sampling.allowed_token_ids->size());
    }
    for (const std::string& text : sampling.stop) {
        bytes += static_cast<std::int64_t>(text.size());
    }
    for (const std::string& text : sampling.bad_words) {
        bytes += static_cast<std::int64_t>(text.size());
    }
    for (const std::vector<TokenId>& word : sampling.bad_words_token_ids) {
        bytes += ids(word.size());
    }
    if (sampling.structured_outputs) {
        bytes += static_cast<std::int64_t>(sampling.structured_outputs->value.size());
    }
    return bytes;
}

constexpr std::string_view kHex = "0123456789abcdef";

// Mixes a number so that neighbours look unrelated (splitmix64's finaliser); a bijection, so ids stay unique.
std::uint64_t Mix(std::uint64_t x) noexcept {
    x += 0x9E3779B97F4A7C15U;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
    return x ^ (x >> 31);
}

}  // namespace

std::optional<std::int32_t> ParsedRequest::EffectivePromptLogprobs() const noexcept {
    if (prompt_logprobs) {
        return echo && logprobs ? std::max(*prompt_logprobs, top_logprobs) : *prompt_logprobs;
    }
    return endpoint == Endpoint::kCompletion && echo && logprobs ? std::optional{top_logprobs} : std::nullopt;
}

bool ParsedRequest::EchoOnly() const noexcept {
    return endpoint == Endpoint::kCompletion && echo && sampling.max_tokens == 0;
}

Status CheckAgainstModel(const ParsedRequest& request, const ModelInfo& model) {
    if (Status status = CheckModelName(request.model, model); !status.ok()) {
        return status;
    }
    const Features& features = model.features;
    const SamplingFields& sampling = request.sampling;
    if (request.wants_tools && !features.tool_parser) {
        return Error::Invalid(
            "tools",
            "'tools' cannot be used with this server: no tool-call parser is configured. Send tool_choice "
            "\"none\" to get a plain answer.");
    }
    if (!request.chat_template.empty() && !features.chat_template_in_request) {
        return Error::Invalid("chat_template", "'chat_template' in a request is not allowed by this server.");
    }
    if (request.n > model.limits.max_n) {
        return Error::Invalid("n", "'n' must be between 1 and " + std::to_string(model.limits.max_n) +
                                       ", got " + std::to_string(request.n) + ".");
    }
    if (request.num_prompts() > static_cast<std::size_t>(model.limits.max_prompts)) {
        return Error::Invalid("prompt", "'prompt' holds " + std::to_string(request.num_prompts()) +
                                            " prompts; the limit is " +
                                            std::to_string(model.limits.max_prompts) + ".");
    }
    if (request.num_choices() > static_cast<std::size_t>(model.limits.max_sequences)) {
        return Error::Invalid("n", "'n' times the number of prompts is " +
                                       std::to_string(request.num_choices()) + "; the limit is " +
                                       std::to_string(model.limits.max_sequences) + ".");
    }
    if (request.logprobs) {
        const bool chat = request.endpoint == Endpoint::kChat;
        if (Status status = CheckLogprobs(chat && features.logprobs ? "top_logprobs" : "logprobs",
                                          request.top_logprobs, model);
            !status.ok()) {
            return status;
        }
    }
    if (const std::optional<std::int32_t> wanted = request.EffectivePromptLogprobs()) {
        const std::string_view field = request.prompt_logprobs ? "prompt_logprobs" : "echo";
        if (!features.prompt_logprobs) {
            return NotByEngine(field);
        }
        if (request.prompt_logprobs) {
            if (Status status = CheckLogprobs(field, *wanted, model); !status.ok()) {
                return status;
            }
        }
    }
    if (features.top_k_limit > 0 && sampling.top_k.value_or(0) >= features.top_k_limit) {
        return Error::Invalid("top_k", "'top_k' must be below " + std::to_string(features.top_k_limit) +
                                           " for this engine, got " + std::to_string(*sampling.top_k) + ".");
    }
    if (sampling.repetition_penalty.value_or(1) > features.max_repetition_penalty) {
        char limit[32];
        std::snprintf(limit, sizeof limit, "%g", features.max_repetition_penalty);
        return Error::Invalid("repetition_penalty", std::string{"'repetition_penalty' must be in (0, "} +
                                                        limit + "] for this engine.");
    }
    if (!features.negative_seed && sampling.seed.value_or(0) < 0) {
        return Error::Invalid("seed", "'seed' must not be negative for this engine.");
    }
    const std::array<std::pair<std::string_view, bool>, 6> unsupported{{
        {"logit_bias", !features.logit_bias && !sampling.logit_bias.empty()},
        {"allowed_token_ids", !features.allowed_token_ids && sampling.allowed_token_ids.has_value()},
        {"bad_words", !features.bad_words && !sampling.bad_words.empty()},
        {"priority", !features.priority && request.priority != 0},
        {"cache_salt", !features.cache_salt && request.cache_salt.has_value()},
        {"thinking_token_budget",
         !features.thinking_token_budget && sampling.thinking_token_budget.has_value()},
    }};
    for (const auto& [field, refused] : unsupported) {
        if (refused) {
            return NotByEngine(field);
        }
    }
    if (sampling.structured_outputs) {
        const std::string& backend = features.structured_outputs_backend;
        const std::string& asked = sampling.structured_outputs->backend;
        const std::string field =
            sampling.structured_outputs_field.substr(0, sampling.structured_outputs_field.find('.'));
        if (backend.empty()) {
            return NotByEngine(field);
        }
        if (!asked.empty() && asked != "auto" && asked != backend) {
            return Error::Invalid(field, "This server runs the structured-output back-end \"" + backend +
                                             "\"; another one cannot be chosen per request.");
        }
    }
    return Status::Ok();
}

Result<std::vector<std::unique_ptr<wire::GenerateRequest>>> BuildGenerate(const ParsedRequest& request,
                                                                          const ModelInfo& model,
                                                                          std::span<PreparedPrompt> prompts,
                                                                          const BuildContext& context) {
    using Requests = std::vector<std::unique_ptr<wire::GenerateRequest>>;
    if (model.max_model_len <= 0 || model.vocab_size <= 0) {
        return Error{ErrorCode::kUnavailable, "No engine rank is ready yet.", {}, true};
    }
    if (Status status = CheckAgainstModel(request, model); !status.ok()) {
        return status.error();
    }
    const wire::LoraRequest* lora =
        request.model && !model.Serves(*request.model) ? model.FindAdapter(*request.model) : nullptr;
    if (lora != nullptr && (!model.features.lora || lora->id <= 0)) {
        return Error::Invalid(
            "model", "'model' names an adapter, but the engine behind this model runs without LoRA.");
    }
    Result<std::optional<std::int32_t>> rank = PinnedRank(request, model, context.data_parallel_rank_header);
    if (!rank.ok()) {
        return std::move(rank).error();
    }
    Result<wire::SamplingParams> sampling = BuildSampling(request, model);
    if (!sampling.ok()) {
        return std::move(sampling).error();
    }
    if (prompts.empty() || prompts.size() != request.num_prompts()) {
        return Error{ErrorCode::kInternal, "The prompts do not belong to this request.", {}, false};
    }

    // All prompts are judged before anything is moved or made.
    std::vector<std::int64_t> max_tokens;
    max_tokens.reserve(prompts.size());
    std::int64_t bytes = CopiedBytes(*sampling) * static_cast<std::int64_t>(prompts.size());
    for (const PreparedPrompt& prompt : prompts) {
        if (prompt.token_ids.empty()) {
            return Error::Invalid(std::string{PromptField(request)},
                                  "The prompt is empty: there is nothing to continue.");
        }
        if (Status status = CheckIds(PromptField(request), prompt.token_ids, model.vocab_size);
            !status.ok()) {
            return status.error();
        }
        Result<std::int64_t> resolved =
            ResolveMaxTokens(request, model, static_cast<std::int64_t>(prompt.token_ids.size()));
        if (!resolved.ok()) {
            return std::move(resolved).error();
        }
        max_tokens.push_back(*resolved);
        bytes += static_cast<std::int64_t>(prompt.token_ids.size() * sizeof(TokenId));
    }
    if (bytes > model.limits.max_sequence_bytes / request.n) {
        return Error::Invalid(request.n > 1 ? "n" : std::string{PromptField(request)},
                              "The request is too large: its " + std::to_string(request.num_choices()) +
                                  " sequences, each with its prompt, ids and constraints, would take " +
                                  std::to_string(bytes * request.n) + " bytes; the limit is " +
                                  std::to_string(model.limits.max_sequence_bytes) + ".");
    }

    const bool keep_ids = request.return_token_ids || request.EffectivePromptLogprobs().has_value();
    const auto n = static_cast<std::size_t>(request.n);
    Requests out;
    out.reserve(request.num_choices());
    for (std::size_t p = 0; p < prompts.size(); ++p) {
        PreparedPrompt& prompt = prompts[p];
        prompt.num_tokens = prompt.token_ids.size();
        for (std::size_t k = 0; k < n; ++k) {
            auto generate = std::make_unique<wire::GenerateRequest>();
            generate->id.reserve(context.id.size() + 6);
            generate->id = context.id;
            generate->id += '-';
            generate->id += std::to_string(out.size());
            const bool last = k + 1 == n;
            if (last && !keep_ids) {
                generate->prompt_token_ids = std::move(prompt.token_ids);
                prompt.token_ids.clear();
            } else {
                generate->prompt_token_ids = prompt.token_ids;
            }
            if (last && p + 1 == prompts.size()) {
                generate->sampling = std::move(*sampling);
            } else {
                generate->sampling = *sampling;
            }
            generate->sampling.max_tokens = max_tokens[p];
            if (request.sampling.seed) {
                // Wraps at 2^63: seeds are names, not quantities.
                const std::uint64_t seed = static_cast<std::uint64_t>(*request.sampling.seed) + k;
                generate->sampling.seed = static_cast<std::int64_t>(
                    model.features.negative_seed ? seed : seed & std::numeric_limits<std::int64_t>::max());
            }
            generate->arrival_time = context.arrival_time;
            if (lora != nullptr) {
                generate->lora = *lora;
            }
            generate->cache_salt = request.cache_salt;
            generate->data_parallel_rank = *rank;
            generate->priority = request.priority;
            if (model.features.trace_headers && IsTraceparent(context.traceparent)) {
                generate->trace_headers.emplace_back("traceparent", context.traceparent);
                if (IsTracestate(context.tracestate)) {
                    generate->trace_headers.emplace_back("tracestate", context.tracestate);
                }
            }
            out.push_back(std::move(generate));
        }
    }
    return out;
}

IdSource::IdSource(std::uint64_t random_seed, std::uint16_t shard) noexcept
    : prefix_{(Mix(random_seed) & ~std::uint64_t{0xFFFF}) | shard} {}

std::string IdSource::Next(Endpoint endpoint) {
    std::string id{endpoint == Endpoint::kChat ? "chatcmpl-" : "cmpl-"};
    id.reserve(id.size() + 28);
    for (int shift = 60; shift >= 0; shift -= 4) {
        id += kHex[(prefix_ >> shift) & 15];
    }
    const std::uint64_t count = counter_++;
    for (int shift = 44; shift >= 0; shift -= 4) {
        id += kHex[(count >> shift) & 15];
    }
    return id;
}

std::string_view RequestIdToEcho(std::string_view client, std::string_view own) noexcept {
    constexpr std::size_t kMaxEchoed = 128;
    const bool fine = !client.empty() && client.size() <= kMaxEchoed &&
                      std::all_of(client.begin(), client.end(), [](char c) { return c > 0x20 && c < 0x7F; });
    return fine ? client : own;
}

}  // namespace rankgate::api
