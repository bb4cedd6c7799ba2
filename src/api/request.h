// SPDX-License-Identifier: Apache-2.0
// OpenAI request bodies as text-level structs, and from there to wire::GenerateRequest. Three pure steps:
//   ParseX (JSON -> ParsedRequest, on the shard)  ->  Prepare (template + tokenizer -> token ids, on the
//   prepare pool)
//   ->  BuildGenerate (everything an engine would choke on is refused here; one GenerateRequest a choice).
// Every refusal is an Error whose `param` names the field. No sockets, no threads; a Parser is
// shard-confined, the rest is pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "api/model.h"
#include "base/result.h"
#include "wire/generate.h"

namespace rankgate::text {
class StopSet;
}  // namespace rankgate::text

namespace rankgate::api {

/// Bounds that do not depend on the model.
inline constexpr std::size_t kMaxJsonDepth = 128;
inline constexpr std::size_t kMaxMessages = 16384;
inline constexpr std::size_t kMaxParts = 16384;  // of one message
inline constexpr std::size_t kMaxPrompts = 2048;
inline constexpr std::size_t kMaxPromptIds = std::size_t{16} << 20;  // of all prompts; no context is as long
inline constexpr std::size_t kMaxTokenList = std::size_t{1} << 20;   // allowed_token_ids, logit_bias
inline constexpr std::size_t kMaxTemplateBytes = std::size_t{8} << 20;  // tools, documents, kwargs, each
inline constexpr std::size_t kMaxNameBytes = 256;                       // model, role, request_id, cache_salt
inline constexpr std::size_t kMaxStructuredBytes = 1 << 20;             // schema, grammar, pattern
inline constexpr std::size_t kMaxChoices = 4096;                        // structured_outputs.choice
inline constexpr std::size_t kMaxBadWords = 256;
inline constexpr std::size_t kMaxBadWordBytes = 1024;
inline constexpr std::size_t kMaxStopTokenIds = 4096;
inline constexpr std::size_t kMaxStop = 64;
inline constexpr std::size_t kMaxStopStringBytes = 4096;
inline constexpr std::size_t kMaxToolCalls = 1024;  // of one message
inline constexpr std::size_t kMaxTools = 1024;

enum class Endpoint : std::uint8_t { kChat, kCompletion };

/// Sampling fields as the client gave them; unset = the model's default. Ranges are checked already.
struct SamplingFields {
    std::optional<double> temperature;
    std::optional<double> top_p;
    std::optional<double> min_p;
    std::optional<std::int32_t> top_k;  // 0 = off (-1 in a request)
    std::optional<double> presence_penalty;
    std::optional<double> frequency_penalty;
    std::optional<double> repetition_penalty;
    std::optional<std::int64_t> seed;
    std::optional<std::int64_t> max_tokens;
    /// Which spelling gave max_tokens; names `param` in errors.
    bool max_tokens_is_completion{false};
    std::int64_t min_tokens{0};
    bool ignore_eos{false};
    std::vector<std::string> stop;
    std::shared_ptr<const text::StopSet> stop_set;  // null without stop strings
    bool include_stop_str_in_output{false};
    std::vector<TokenId> stop_token_ids;
    std::vector<std::pair<TokenId, double>> logit_bias;
    std::optional<std::vector<TokenId>> allowed_token_ids;
    std::vector<std::string> bad_words;
    std::optional<std::int32_t> thinking_token_budget;
    bool skip_special_tokens{true};
    bool spaces_between_special_tokens{true};
    std::optional<wire::StructuredOutputs> structured_outputs;
    /// The request field that asked for it; names `param` in errors.
    std::string structured_outputs_field;
};

/// One prompt of a completion: text, or token ids.
using Prompt = std::variant<std::string, std::vector<TokenId>>;

struct ParsedRequest {
    Endpoint endpoint{Endpoint::kChat};
    std::optional<std::string> model;
    bool stream{false};
    bool include_usage{false};
    bool continuous_usage{false};
    std::int32_t n{1};
    SamplingFields sampling;

    /// Chat: `logprobs: true`; completion: `logprobs: k`. top_logprobs is k in both (-1 = whole vocabulary).
    bool logprobs{false};
    std::int32_t top_logprobs{0};
    std::optional<std::int32_t> prompt_logprobs;
    bool return_token_ids{false};
    bool return_tokens_as_token_ids{false};

    /// `tools` are given and may be called: needs a tool parser.
    bool wants_tools{false};

    // Chat. Messages are normalised JSON text (an array): developer became system, text parts are joined by a
    // newline, tool-call arguments are JSON values. Where a content came as parts, messages_parts_json keeps
    // them for templates that walk through parts themselves; it is empty otherwise, as tools_json and the
    // like are when absent.
    std::string messages_json;
    std::string messages_parts_json;
    std::string tools_json;
    std::string documents_json;
    std::string template_kwargs_json;
    std::string chat_template;  // from the request; only where the model allows it
    bool add_generation_prompt{true};
    bool continue_final_message{false};

    // Completion.
    std::vector<Prompt> prompts;
    bool echo{false};

    /// Whether tokenizing adds BOS and the like: completions yes, chat no (the template has written them).
    bool add_special_tokens{false};
    std::optional<std::int32_t> truncate_prompt_tokens;

    std::int64_t priority{0};
    std::optional<std::string> cache_salt;
    std::optional<std::int32_t> data_parallel_rank;
    std::optional<std::string> request_id;

    std::size_t num_prompts() const noexcept { return endpoint == Endpoint::kChat ? 1 : prompts.size(); }
    /// Choices of the whole HTTP request; choice index = prompt * n + k.
    std::size_t num_choices() const noexcept { return num_prompts() * static_cast<std::size_t>(n); }
    /// Scores every prompt token: asked for outright, or completions with echo and logprobs.
    std::optional<std::int32_t> EffectivePromptLogprobs() const noexcept;
    /// Completions with echo and max_tokens 0: the one token that the engine must make is not shown.
    bool EchoOnly() const noexcept;
};

struct TokenizeRequest {
    std::optional<std::string> model;
    std::string prompt;
    bool is_chat{false};
    ParsedRequest chat;  // only the template fields, when is_chat
    bool add_special_tokens{true};
    bool return_token_strs{false};
    bool with_pieces{false};
};

struct DetokenizeRequest {
    std::optional<std::string> model;
    std::vector<TokenId> tokens;
};

/// Parses bodies. Keeps its JSON buffers between calls (released again after an unusually large body): one
/// per shard.
class Parser {
  public:
    Parser();
    ~Parser();
    Parser(Parser&&) noexcept;
    Parser& operator=(Parser&&) noexcept;

    /// `body` is read in place when its capacity leaves room behind it (http::kBodyPadding), else copied.
    Result<ParsedRequest> ParseChat(const std::string& body) noexcept;
    Result<ParsedRequest> ParseCompletion(const std::string& body) noexcept;
    Result<TokenizeRequest> ParseTokenize(const std::string& body) noexcept;
    Result<DetokenizeRequest> ParseDetokenize(const std::string& body) noexcept;

  private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

/// What the checks of Parse cannot know without the model: names, features, limits. Cheap; call before
/// Prepare.
Status CheckAgainstModel(const ParsedRequest& request, const ModelInfo& model);

/// A prompt ready to send. `text` is kept only where the answer echoes it.
struct PreparedPrompt {
    std::vector<TokenId> token_ids;
    std::string text;
    std::size_t num_tokens{0};  // outlives token_ids, which BuildGenerate moves into the wire request
};

/// Renders the template or takes the prompts, and tokenizes. The slow step: thread-safe, meant for the
/// prepare pool. Refuses a text that cannot fit the context before it is tokenized.
Result<std::vector<PreparedPrompt>> Prepare(const ParsedRequest& request, const ModelInfo& model);
Result<std::vector<TokenId>> PrepareTokenize(const TokenizeRequest& request, const ModelInfo& model);

/// Facts of one HTTP request that are not in its body.
struct BuildContext {
    /// The id that the reply shows ("chatcmpl-..."); wire ids are this plus "-<choice>".
    std::string_view id{};
    double arrival_time{0.0};  // wall clock, seconds
    /// Header X-data-parallel-rank as sent; empty = absent.
    std::string_view data_parallel_rank_header{};
    std::string_view traceparent{};
    std::string_view tracestate{};
};

/// One GenerateRequest per choice, in choice order. Moves the token ids out of `prompts` unless the answer
/// shows them (echo, prompt logprobs, return_token_ids). Nothing is produced unless everything is in order.
Result<std::vector<std::unique_ptr<wire::GenerateRequest>>> BuildGenerate(const ParsedRequest& request,
                                                                          const ModelInfo& model,
                                                                          std::span<PreparedPrompt> prompts,
                                                                          const BuildContext& context);

/// Makes reply ids: "chatcmpl-" or "cmpl-" and 28 hex digits, unique for the life of the process and, by
/// their random half, among processes. Shard-confined; give each shard another `shard` number.
class IdSource {
  public:
    explicit IdSource(std::uint64_t random_seed, std::uint16_t shard = 0) noexcept;
    std::string Next(Endpoint endpoint);

  private:
    std::uint64_t prefix_;
    std::uint64_t counter_{0};
};

/// X-Request-Id to answer with: the client's when it is 1..128 visible ASCII characters, else `own`.
std::string_view RequestIdToEcho(std::string_view client, std::string_view own) noexcept;

}  // namespace rankgate::api
