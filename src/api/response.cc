// SPDX-License-Identifier: Apache-2.0
// The assembler. Per choice: ids -> Detokenizer -> StopMatcher -> escaped text between a prefix that was
// rendered once and a suffix. Everything that only some requests need (logprobs, echo, token ids, whole
// bodies) sits in Cold, so that a silent stream stays small.
#include "api/response.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

#include "base/check.h"
#include "base/utf8.h"
#include "text/detokenizer.h"
#include "text/model_assets.h"
#include "text/stop_matcher.h"

namespace rankgate::api {
namespace {

constexpr float kFloorLogprob = -9999.0F;
constexpr std::string_view kEventEnd = "}\n\n";

template <class T>
void AppendNumber(std::string& out, T value) {
    char text[32];
    const auto [end, failed] = std::to_chars(text, text + sizeof text, value);
    (void)failed;  // 32 bytes hold any of them
    out.append(text, end);
}

// JSON knows no infinities; the floor is the one vLLM shows. Whole numbers keep a ".0", so that typed readers
// see one type.
void AppendLogprob(std::string& out, float value) {
    const std::size_t begin = out.size();
    AppendNumber(out, value > kFloorLogprob ? value : kFloorLogprob);
    if (out.find_first_of(".e", begin) == std::string::npos) {
        out += ".0";
    }
}

std::int64_t CountCharacters(std::string_view text) noexcept {
    return std::count_if(text.begin(), text.end(),
                         [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

bool WellFormed(const wire::Logprobs& rows) noexcept {
    if (rows.positions < 0 || rows.width < 1) {
        return false;
    }
    const std::size_t cells = static_cast<std::size_t>(rows.positions) * static_cast<std::size_t>(rows.width);
    return rows.token_ids.size() >= cells && rows.logprobs.size() >= cells;
}

void AppendTokenIds(std::string& out, std::span<const TokenId> ids) {
    out += '[';
    for (std::size_t i = 0; i < ids.size(); ++i) {
        if (i > 0) {
            out += ',';
        }
        AppendNumber(out, ids[i]);
    }
    out += ']';
}

// The four parallel lists of the completions shape; chat uses the first one only.
struct LogprobLists {
    std::string tokens;
    std::string values;
    std::string top;
    std::string offsets;

    bool empty() const noexcept { return tokens.empty(); }
    void clear() noexcept {
        tokens.clear();
        values.clear();
        top.clear();
        offsets.clear();
    }
};

void Separate(std::string& list) {
    if (!list.empty()) {
        list += ',';
    }
}

struct Cold {
    std::string text;       // non-streaming
    LogprobLists logprobs;  // streaming: of the event being made
    std::vector<TokenId> token_ids;
    wire::Logprobs prompt_rows;
    bool prompt_ids_shown{false};
    std::int64_t characters{0};  // of the returned text so far, before stop strings cut it
};

struct Choice {
    Choice(const text::TokenTable& table, text::Detokenizer::Options options, const text::StopSet* stops,
           bool include_stop)
        : detokenizer{table, options}, matcher{stops, include_stop} {}

    text::Detokenizer detokenizer;
    text::StopMatcher matcher;
    /// Streaming: one event up to its text; the first delta_size bytes end where the delta (or the choice's
    /// fields) begin.
    std::string prefix;
    std::unique_ptr<Cold> cold;
    wire::StopReason stop_reason;
    std::int64_t completion_tokens{0};
    std::int32_t cached_tokens{-1};
    std::uint32_t delta_size{0};
    wire::FinishReason finish{wire::FinishReason::kNone};
    bool started{false};
    bool done{false};
};

// Reused by all streams of a thread: text between two steps of the pipeline.
struct Scratch {
    std::string decoded;
    std::string visible;
};
thread_local Scratch scratch;

}  // namespace

struct ResponseAssembler::Impl {
    ParsedRequest request;
    std::shared_ptr<const ModelInfo> model;
    std::vector<PreparedPrompt> prompts;
    std::string id;
    std::int64_t created;
    std::vector<Choice> choices;
    std::size_t open;
    bool started{false};
    bool failed{false};
    bool cold;  // some choice state beyond plain text streaming is needed
    bool chat;
    std::string suffix;
    Error error;

    Impl(ParsedRequest&& parsed, std::shared_ptr<const ModelInfo>&& info,
         std::vector<PreparedPrompt>&& prepared, std::string&& reply_id, std::int64_t reply_created)
        : request{std::move(parsed)},
          model{std::move(info)},
          prompts{std::move(prepared)},
          id{std::move(reply_id)},
          created{reply_created},
          open{request.num_choices()},
          cold{!request.stream || request.logprobs || request.return_token_ids || request.echo ||
               request.prompt_logprobs},
          chat{request.endpoint == Endpoint::kChat} {
        const SamplingFields& sampling = request.sampling;
        const text::TokenTable& table = model->assets->tokenizer->table();
        // A reply continues its prompt: a word boundary in front of it is a real space.
        const text::Detokenizer::Options options{.skip_special_tokens = sampling.skip_special_tokens,
                                                 .at_text_start = false};
        choices.reserve(open);
        for (std::size_t i = 0; i < open; ++i) {
            Choice& choice = choices.emplace_back(table, options, sampling.stop_set.get(),
                                                  sampling.include_stop_str_in_output);
            if (request.stream) {
                RenderPrefix(choice, i);
            }
            if (cold) {
                choice.cold = std::make_unique<Cold>();
            }
        }
        suffix = chat ? R"("},"logprobs":null,"finish_reason":null}])"
                      : R"(","logprobs":null,"finish_reason":null}])";
        if (!request.continuous_usage) {
            suffix += kEventEnd;
        }
        // What only the engine needed is not kept for the life of the stream.
        request.messages_json = {};
        request.messages_parts_json = {};
        request.tools_json = {};
        request.template_kwargs_json = {};
        request.documents_json = {};
        request.prompts = std::vector<Prompt>(request.prompts.size());
        request.sampling.stop = {};
        request.sampling.logit_bias = {};
        request.sampling.allowed_token_ids.reset();
        request.sampling.bad_words = {};
        request.sampling.structured_outputs.reset();
    }

    std::size_t PromptOf(std::size_t choice) const noexcept {
        return choice / static_cast<std::size_t>(request.n);
    }

    std::string_view ModelName() const noexcept {
        if (request.model && !model->Serves(*request.model) &&
            model->FindAdapter(*request.model) != nullptr) {
            return *request.model;
        }
        return model->served_names.empty() ? std::string_view{}
                                           : std::string_view{model->served_names.front()};
    }

    void AppendHead(std::string& out, bool chunk) const {
        out += R"({"id":")";
        out += id;
        out += chat ? (chunk ? R"(","object":"chat.completion.chunk","created":)"
                             : R"(","object":"chat.completion","created":)")
                    : R"(","object":"text_completion","created":)";
        AppendNumber(out, created);
        out += R"(,"model":")";
        AppendJsonEscaped(out, ModelName());
        out += R"(","choices":[)";
    }

    void RenderPrefix(Choice& choice, std::size_t index) const {
        std::string& prefix = choice.prefix;
        prefix.reserve(192 + id.size() + ModelName().size());
        prefix = "data: ";
        AppendHead(prefix, true);
        prefix += R"({"index":)";
        AppendNumber(prefix, index);
        prefix += chat ? R"(,"delta":{)" : ",";
        choice.delta_size = static_cast<std::uint32_t>(prefix.size());
        prefix += chat ? R"("content":")" : R"("text":")";
    }

    std::string_view BeforeDelta(const Choice& choice) const noexcept {
        return std::string_view{choice.prefix}.substr(0, choice.delta_size);
    }

    // ---- usage ----

    std::int64_t PromptTokens() const noexcept {
        std::int64_t sum = 0;
        for (const PreparedPrompt& prompt : prompts) {
            sum += static_cast<std::int64_t>(prompt.num_tokens);
        }
        return sum;
    }
    std::int64_t CompletionTokens() const noexcept {
        std::int64_t sum = 0;
        for (const Choice& choice : choices) {
            sum += choice.completion_tokens;
        }
        return sum;
    }

    static void AppendUsage(std::string& out, std::int64_t prompt, std::int64_t completion,
                            std::int64_t cached) {
        out += R"("usage":{"prompt_tokens":)";
        AppendNumber(out, prompt);
        out += R"(,"total_tokens":)";
        AppendNumber(out, prompt + completion);
        out += R"(,"completion_tokens":)";
        AppendNumber(out, completion);
        if (cached >= 0) {
            out += R"(,"prompt_tokens_details":{"cached_tokens":)";
            AppendNumber(out, cached);
            out += '}';
        }
        out += '}';
    }

    // Counted once a prompt, from the first of its choices: the others find what that one computed.
    std::int64_t CachedTokens() const noexcept {
        std::int64_t sum = -1;
        for (std::size_t i = 0; i < choices.size(); i += static_cast<std::size_t>(request.n)) {
            if (choices[i].cached_tokens >= 0) {
                sum = std::max<std::int64_t>(sum, 0) + choices[i].cached_tokens;
            }
        }
        return sum;
    }

    void AppendWholeUsage(std::string& out) const {
        AppendUsage(out, PromptTokens(), CompletionTokens(), CachedTokens());
    }

    // Closes a chunk after its "choices" array.
    void CloseChunk(std::string& out, std::size_t index) const {
        if (request.continuous_usage) {
            out += ',';
            AppendUsage(out, static_cast<std::int64_t>(prompts[PromptOf(index)].num_tokens),
                        choices[index].completion_tokens, -1);
        }
        out += kEventEnd;
    }

    // ---- logprobs ----

    void AppendToken(std::string& out, TokenId token) const {
        out += '"';
        if (request.return_tokens_as_token_ids) {
            out += "token_id:";
            AppendNumber(out, token);
        } else {
            const std::string_view bytes = model->assets->tokenizer->table().bytes(token);
            if (chat || IsValidUtf8(bytes)) {
                AppendJsonEscaped(out, bytes);
            } else {
                // The completions shape has no bytes; this is how OpenAI writes a token that is no text.
                static constexpr char kHex[] = "0123456789abcdef";
                out += "bytes:";
                for (const char c : bytes) {
                    const auto byte = static_cast<unsigned char>(c);
                    out += "\\\\x";
                    out += kHex[byte >> 4];
                    out += kHex[byte & 15];
                }
            }
        }
        out += '"';
    }

    void AppendChatEntry(std::string& out, TokenId token, float value) const {
        out += R"({"token":)";
        AppendToken(out, token);
        out += R"(,"logprob":)";
        AppendLogprob(out, value);
        out += R"(,"bytes":[)";
        bool first = true;
        for (const char c : model->assets->tokenizer->table().bytes(token)) {
            if (!first) {
                out += ',';
            }
            first = false;
            AppendNumber(out, static_cast<unsigned>(static_cast<unsigned char>(c)));
        }
        out += ']';
    }

    // Two ids with the same text would give one key twice: the likelier one, which stands first, keeps it.
    bool SameTextBefore(const wire::Logprobs& rows, std::size_t begin, std::size_t at) const {
        if (request.return_tokens_as_token_ids) {
            return std::find(rows.token_ids.begin() + static_cast<std::ptrdiff_t>(begin),
                             rows.token_ids.begin() + static_cast<std::ptrdiff_t>(at),
                             rows.token_ids[at]) != rows.token_ids.begin() + static_cast<std::ptrdiff_t>(at);
        }
        const text::TokenTable& table = model->assets->tokenizer->table();
        const std::string_view bytes = table.bytes(rows.token_ids[at]);
        for (std::size_t i = begin; i < at; ++i) {
            if (table.bytes(rows.token_ids[i]) == bytes) {
                return true;
            }
        }
        return false;
    }

    // One scored position; the token at `row` must be `token`'s own row.
    void AddLogprobs(LogprobLists& lists, const wire::Logprobs& rows, std::size_t row,
                     std::int64_t offset) const {
        const auto width = static_cast<std::size_t>(rows.width);
        const std::size_t begin = row * width;
        if (chat) {
            Separate(lists.tokens);
            AppendChatEntry(lists.tokens, rows.token_ids[begin], rows.logprobs[begin]);
            lists.tokens += R"(,"top_logprobs":[)";
            for (std::size_t i = 1; i < width; ++i) {
                if (i > 1) {
                    lists.tokens += ',';
                }
                AppendChatEntry(lists.tokens, rows.token_ids[begin + i], rows.logprobs[begin + i]);
                lists.tokens += '}';
            }
            lists.tokens += "]}";
            return;
        }
        Separate(lists.tokens);
        AppendToken(lists.tokens, rows.token_ids[begin]);
        Separate(lists.values);
        AppendLogprob(lists.values, rows.logprobs[begin]);
        Separate(lists.offsets);
        AppendNumber(lists.offsets, offset);
        Separate(lists.top);
        // The sampled token is always among them, so there may be one more than asked for.
        lists.top += '{';
        for (std::size_t i = 0; i < width; ++i) {
            if (i > 0) {
                if (SameTextBefore(rows, begin, begin + i)) {
                    continue;
                }
                lists.top += ',';
            }
            AppendToken(lists.top, rows.token_ids[begin + i]);
            lists.top += ':';
            AppendLogprob(lists.top, rows.logprobs[begin + i]);
        }
        lists.top += '}';
    }

    // Position of a prompt without a score: the first one, or one that the engine left out.
    void AddUnscored(LogprobLists& lists, TokenId token, std::int64_t offset) const {
        Separate(lists.tokens);
        AppendToken(lists.tokens, token);
        Separate(lists.values);
        lists.values += "null";
        Separate(lists.top);
        lists.top += "null";
        Separate(lists.offsets);
        AppendNumber(lists.offsets, offset);
    }

    void AddPromptLogprobs(Choice& choice, const PreparedPrompt& prompt) const {
        LogprobLists& lists = choice.cold->logprobs;
        const wire::Logprobs& rows = choice.cold->prompt_rows;
        text::Detokenizer detokenizer{
            model->assets->tokenizer->table(),
            {.skip_special_tokens = request.sampling.skip_special_tokens, .at_text_start = true}};
        std::string text;
        std::int64_t offset = 0;
        for (std::size_t i = 0; i < prompt.token_ids.size(); ++i) {
            if (i > 0 && WellFormed(rows) && i - 1 < static_cast<std::size_t>(rows.positions)) {
                AddLogprobs(lists, rows, i - 1, offset);
            } else {
                AddUnscored(lists, prompt.token_ids[i], offset);
            }
            text.clear();
            detokenizer.Append(prompt.token_ids[i], text);
            offset += CountCharacters(text);
        }
    }

    void AppendLogprobs(std::string& out, const LogprobLists& lists) const {
        if (!request.logprobs || (lists.empty() && request.stream)) {
            out += R"("logprobs":null)";
            return;
        }
        if (chat) {
            out += R"("logprobs":{"content":[)";
            out += lists.tokens;
            out += R"(],"refusal":null})";
            return;
        }
        out += R"("logprobs":{"text_offset":[)";
        out += lists.offsets;
        out += R"(],"token_logprobs":[)";
        out += lists.values;
        out += R"(],"tokens":[)";
        out += lists.tokens;
        out += R"(],"top_logprobs":[)";
        out += lists.top;
        out += "]}";
    }

    // vLLM's own field: one object of {id: {logprob, rank, decoded_token}} a position, the first one null.
    void AppendPromptLogprobsField(std::string& out, const Choice& choice,
                                   const PreparedPrompt& prompt) const {
        out += R"(,"prompt_logprobs":[null)";
        const wire::Logprobs& rows = choice.cold->prompt_rows;
        const text::TokenTable& table = model->assets->tokenizer->table();
        for (std::size_t i = 1; i < prompt.num_tokens; ++i) {
            const std::size_t row = i - 1;
            if (!WellFormed(rows) || row >= static_cast<std::size_t>(rows.positions)) {
                out += ",null";
                continue;
            }
            out += ",{";
            const auto width = static_cast<std::size_t>(rows.width);
            for (std::size_t k = 0; k < width; ++k) {
                const std::size_t at = row * width + k;
                const TokenId token = rows.token_ids[at];
                if (k > 0) {
                    if (token == rows.token_ids[row * width]) {
                        continue;
                    }
                    out += ',';
                }
                out += '"';
                AppendNumber(out, token);
                out += R"(":{"logprob":)";
                AppendLogprob(out, rows.logprobs[at]);
                out += R"(,"rank":)";
                AppendNumber(out, k > 0                     ? static_cast<std::int64_t>(k)
                                  : row < rows.ranks.size() ? rows.ranks[row]
                                                            : std::int64_t{1});
                out += R"(,"decoded_token":")";
                AppendJsonEscaped(out, table.bytes(token));
                out += "\"}";
            }
            out += '}';
        }
        out += ']';
    }

    // ---- one output ----

    void StoreFacts(Choice& choice, const ChoiceOutput& output) const {
        if (output.num_cached_tokens >= 0 && choice.cached_tokens < 0) {
            choice.cached_tokens = output.num_cached_tokens;
        }
        if (output.prompt_logprobs != nullptr && choice.cold != nullptr &&
            WellFormed(*output.prompt_logprobs)) {
            wire::Logprobs& all = choice.cold->prompt_rows;
            const wire::Logprobs& more = *output.prompt_logprobs;
            if (all.positions == 0) {
                all = more;
            } else if (all.width == more.width) {
                all.positions += more.positions;
                all.token_ids.insert(all.token_ids.end(), more.token_ids.begin(), more.token_ids.end());
                all.logprobs.insert(all.logprobs.end(), more.logprobs.begin(), more.logprobs.end());
                all.ranks.insert(all.ranks.end(), more.ranks.begin(), more.ranks.end());
            }
        }
    }

    // The first thing said about a choice: its role, or the echoed prompt.
    void Start(Choice& choice, std::size_t index, std::string& out) {
        choice.started = true;
        const PreparedPrompt& prompt = prompts[PromptOf(index)];
        if (request.echo) {
            if (request.logprobs) {
                AddPromptLogprobs(choice, prompt);
            }
            choice.cold->characters = CountCharacters(prompt.text);
            if (!request.stream) {
                choice.cold->text = prompt.text;
            }
        }
        if (!request.stream) {
            return;
        }
        if (chat) {
            out += BeforeDelta(choice);
            out += R"("role":"assistant","content":""},"logprobs":null,"finish_reason":null}])";
            if (request.return_token_ids) {
                out += R"(,"prompt_token_ids":)";
                AppendTokenIds(out, prompt.token_ids);
            }
            CloseChunk(out, index);
        } else if (request.echo) {
            AppendTextEvent(choice, index, prompt.text, out);
        }
    }

    // One streamed event with text, and with logprobs or ids where asked for.
    void AppendTextEvent(Choice& choice, std::size_t index, std::string_view text, std::string& out) {
        out += choice.prefix;
        AppendJsonEscaped(out, text);
        if (choice.cold == nullptr) {
            out += suffix;
            if (request.continuous_usage) {
                CloseChunk(out, index);
            }
            return;
        }
        out += chat ? "\"}," : "\",";
        AppendLogprobs(out, choice.cold->logprobs);
        choice.cold->logprobs.clear();
        out += R"(,"finish_reason":null)";
        if (request.return_token_ids) {
            if (!chat &&
                choice.completion_tokens == static_cast<std::int64_t>(choice.cold->token_ids.size())) {
                out += R"(,"prompt_token_ids":)";
                AppendTokenIds(out, prompts[PromptOf(index)].token_ids);
            }
            out += R"(,"token_ids":)";
            AppendTokenIds(out, choice.cold->token_ids);
            choice.cold->token_ids.clear();
        }
        out += "}]";
        CloseChunk(out, index);
    }

    // Is this the token that ended generation, and not text of the reply?
    bool EndsGeneration(TokenId token) const noexcept {
        const SamplingFields& sampling = request.sampling;
        const std::vector<TokenId>& stops = sampling.stop_token_ids;
        if (std::find(stops.begin(), stops.end(), token) != stops.end()) {
            return true;
        }
        const text::ModelAssets& assets = *model->assets;
        return !sampling.ignore_eos && (assets.eos_token_id == token ||
                                        std::find(assets.eos_token_ids.begin(), assets.eos_token_ids.end(),
                                                  token) != assets.eos_token_ids.end());
    }

    // Feeds text to the stop matcher; appends what may be shown to scratch.visible. True = a stop string
    // matched.
    static bool Match(Choice& choice, std::string_view text, wire::StopReason& reason,
                      const text::StopSet* stops) {
        if (const auto match = choice.matcher.Append(text, scratch.visible)) {
            reason = stops->string(match->index);
            return true;
        }
        return false;
    }

    // Runs the tokens through the pipeline. Returns how many count; `matched` tells of a stop string.
    void TakeTokens(Choice& choice, const ChoiceOutput& output, bool& matched) {
        const bool scored = request.logprobs && output.logprobs != nullptr && WellFormed(*output.logprobs);
        const text::StopSet* stops = request.sampling.stop_set.get();
        std::size_t shown = output.tokens.size();
        if (output.finish_reason == wire::FinishReason::kStop && shown > 0 &&
            !request.sampling.include_stop_str_in_output && EndsGeneration(output.tokens.back())) {
            --shown;
        }
        if (stops == nullptr && !scored && choice.cold == nullptr) {
            choice.detokenizer.Append(output.tokens.first(shown), scratch.visible);
            choice.completion_tokens += static_cast<std::int64_t>(output.tokens.size());
            return;
        }
        for (std::size_t i = 0; i < output.tokens.size() && !matched; ++i) {
            scratch.decoded.clear();
            if (i < shown) {
                choice.detokenizer.Append(output.tokens[i], scratch.decoded);
            }
            if (choice.cold != nullptr) {
                Cold& state = *choice.cold;
                if (scored && i < static_cast<std::size_t>(output.logprobs->positions)) {
                    AddLogprobs(state.logprobs, *output.logprobs, i, state.characters);
                }
                if (request.return_token_ids) {
                    state.token_ids.push_back(output.tokens[i]);
                }
                if (request.logprobs) {
                    state.characters += CountCharacters(scratch.decoded);
                }
            }
            ++choice.completion_tokens;
            if (stops == nullptr) {
                scratch.visible += scratch.decoded;
            } else {
                matched = Match(choice, scratch.decoded, choice.stop_reason, stops);
            }
        }
    }

    // The stream of a choice ends well: what was held back is given out.
    void FlushHeld(Choice& choice, bool& matched) {
        scratch.decoded.clear();
        choice.detokenizer.Flush(scratch.decoded);
        const text::StopSet* stops = request.sampling.stop_set.get();
        if (stops == nullptr) {
            scratch.visible += scratch.decoded;
            return;
        }
        matched = !scratch.decoded.empty() && Match(choice, scratch.decoded, choice.stop_reason, stops);
        if (!matched) {
            choice.matcher.Flush(scratch.visible);
        }
    }

    static void AppendStopReason(std::string& out, const wire::StopReason& reason) {
        out += R"(,"stop_reason":)";
        if (const auto* number = std::get_if<std::int64_t>(&reason)) {
            AppendNumber(out, *number);
        } else if (const auto* text = std::get_if<std::string>(&reason)) {
            out += '"';
            AppendJsonEscaped(out, *text);
            out += '"';
        } else {
            out += "null";
        }
    }

    static std::string_view FinishName(wire::FinishReason reason) noexcept {
        return reason == wire::FinishReason::kStop ? "stop" : "length";
    }

    void AppendFinishEvent(const Choice& choice, std::size_t index, std::string& out) const {
        out += BeforeDelta(choice);
        out += chat ? R"(},"logprobs":null,"finish_reason":")"
                    : R"("text":"","logprobs":null,"finish_reason":")";
        out += FinishName(choice.finish);
        out += '"';
        AppendStopReason(out, choice.stop_reason);
        out += "}]";
        CloseChunk(out, index);
    }

    void AppendStreamEnd(std::string& out) const {
        if (request.include_usage) {
            out += "data: ";
            AppendHead(out, true);
            out += "],";
            AppendWholeUsage(out);
            out += kEventEnd;
        }
        out += "data: [DONE]\n\n";
    }

    void AppendBody(std::string& out) const {
        AppendHead(out, false);
        for (std::size_t i = 0; i < choices.size(); ++i) {
            const Choice& choice = choices[i];
            const PreparedPrompt& prompt = prompts[PromptOf(i)];
            out += i == 0 ? R"({"index":)" : R"(,{"index":)";
            AppendNumber(out, i);
            out += chat ? R"(,"message":{"role":"assistant","content":")" : R"(,"text":")";
            AppendJsonEscaped(out, choice.cold->text);
            out += chat ? R"(","refusal":null},)" : "\",";
            AppendLogprobs(out, choice.cold->logprobs);
            out += R"(,"finish_reason":")";
            out += FinishName(choice.finish);
            out += '"';
            AppendStopReason(out, choice.stop_reason);
            if (request.return_token_ids) {
                if (!chat) {
                    out += R"(,"prompt_token_ids":)";
                    AppendTokenIds(out, prompt.token_ids);
                }
                out += R"(,"token_ids":)";
                AppendTokenIds(out, choice.cold->token_ids);
            }
            if (!chat && request.prompt_logprobs) {
                AppendPromptLogprobsField(out, choice, prompt);
            }
            out += '}';
        }
        out += "],";
        AppendWholeUsage(out);
        if (chat && request.prompt_logprobs) {
            AppendPromptLogprobsField(out, choices[0], prompts[0]);
        }
        if (chat && request.return_token_ids) {
            out += R"(,"prompt_token_ids":)";
            AppendTokenIds(out, prompts[0].token_ids);
        }
        out += '}';
    }

    Effect Fail(const Error& reason, std::string& out) {
        failed = true;
        error = reason;
        if (request.stream && started) {
            AppendErrorEvent(out, reason);
        }
        return {.failed = true};
    }

    Effect OnOutput(const ChoiceOutput& output, std::string& out) {
        if (output.choice >= choices.size()) {
            RG_BUG("an output names a choice that the request does not have");
            return {};
        }
        Choice& choice = choices[output.choice];
        if (choice.done || failed) {
            return {};
        }
        using wire::FinishReason;
        const FinishReason finish = output.finish_reason;
        if (finish != FinishReason::kNone && finish != FinishReason::kStop &&
            finish != FinishReason::kLength) {
            choice.done = true;
            --open;
            choice.finish = FinishReason::kError;
            Error why = FinishError(finish, output.stop_reason);
            if (!request.sampling.structured_outputs_field.empty()) {
                // The wire knows one field for all of them; the client knows the one that it sent.
                const std::string& field = request.sampling.structured_outputs_field;
                if (why.param == "structured_outputs") {
                    why.param = field.substr(0, field.find('.'));
                } else if (finish == FinishReason::kError && why.param.empty() &&
                           choice.completion_tokens == 0 && output.tokens.empty() &&
                           HttpStatus(why.code) >= 500) {
                    // Engines compile a constraint when the request arrives and say no more than "error" when
                    // they cannot. That is the client's to mend, and nothing that a retry would.
                    why = Error::Invalid(field.substr(0, field.find('.')),
                                         "The engine could not process the request: what '" + field +
                                             "' holds is most likely not valid for its back-end.");
                }
            }
            return Fail(why, out);
        }
        const std::size_t before = out.size();
        StoreFacts(choice, output);
        if (output.tokens.empty() && finish == FinishReason::kNone) {
            return {};
        }
        if (!choice.started) {
            Start(choice, output.choice, out);
        }

        scratch.visible.clear();
        bool matched = false;
        if (!request.EchoOnly()) {
            TakeTokens(choice, output, matched);
            if (finish != FinishReason::kNone && !matched) {
                FlushHeld(choice, matched);
            }
        }
        if (request.stream) {
            const bool details =
                choice.cold != nullptr && (!choice.cold->logprobs.empty() || !choice.cold->token_ids.empty());
            if (!scratch.visible.empty() || details) {
                AppendTextEvent(choice, output.choice, scratch.visible, out);
            }
            started = started || out.size() > before;
        } else {
            choice.cold->text += scratch.visible;
        }
        if (finish == FinishReason::kNone && !matched) {
            return {};
        }

        Effect effect;
        choice.done = true;
        --open;
        choice.finish = matched ? FinishReason::kStop : finish;
        if (!matched && output.stop_reason != nullptr) {
            choice.stop_reason = *output.stop_reason;
        }
        effect.abort_choice = matched && finish == FinishReason::kNone;
        if (request.stream) {
            AppendFinishEvent(choice, output.choice, out);
            started = true;
        }
        if (open == 0) {
            effect.done = true;
            if (request.stream) {
                AppendStreamEnd(out);
            } else {
                AppendBody(out);
            }
        }
        return effect;
    }

    Effect OnError(std::uint32_t index, const Error& reason, std::string& out) {
        if (failed || open == 0 || index >= choices.size() || choices[index].done) {
            return {};
        }
        choices[index].done = true;
        choices[index].finish = wire::FinishReason::kError;
        --open;
        return Fail(reason, out);
    }
};

ResponseAssembler::ResponseAssembler(ParsedRequest request, std::shared_ptr<const ModelInfo> model,
                                     std::vector<PreparedPrompt> prompts, std::string id,
                                     std::int64_t created)
    : impl_{std::make_unique<Impl>(std::move(request), std::move(model), std::move(prompts), std::move(id),
                                   created)} {}
ResponseAssembler::~ResponseAssembler() = default;
ResponseAssembler::ResponseAssembler(ResponseAssembler&&) noexcept = default;
ResponseAssembler& ResponseAssembler::operator=(ResponseAssembler&&) noexcept = default;

Effect ResponseAssembler::OnOutput(const ChoiceOutput& output, std::string& out) noexcept {
    return impl_->OnOutput(output, out);
}
Effect ResponseAssembler::OnError(std::uint32_t choice, const Error& error, std::string& out) noexcept {
    return impl_->OnError(choice, error, out);
}
bool ResponseAssembler::streaming() const noexcept {
    return impl_->request.stream;
}
bool ResponseAssembler::streaming_started() const noexcept {
    return impl_->started;
}
bool ResponseAssembler::choice_done(std::uint32_t choice) const noexcept {
    return choice >= impl_->choices.size() || impl_->choices[choice].done;
}
std::size_t ResponseAssembler::num_choices() const noexcept {
    return impl_->choices.size();
}
const Error& ResponseAssembler::error() const noexcept {
    return impl_->error;
}
const std::string& ResponseAssembler::id() const noexcept {
    return impl_->id;
}
std::int64_t ResponseAssembler::prompt_tokens() const noexcept {
    return impl_->PromptTokens();
}
std::int64_t ResponseAssembler::completion_tokens() const noexcept {
    return impl_->CompletionTokens();
}
std::string_view ResponseAssembler::finish_reason(std::uint32_t choice) const noexcept {
    if (choice >= impl_->choices.size() || !impl_->choices[choice].done) {
        return {};
    }
    const wire::FinishReason finish = impl_->choices[choice].finish;
    return finish == wire::FinishReason::kError ? std::string_view{"error"} : Impl::FinishName(finish);
}

std::size_t ResponseAssembler::held_bytes() const noexcept {
    std::size_t bytes = impl_->suffix.capacity() + impl_->id.capacity();
    for (const PreparedPrompt& prompt : impl_->prompts) {
        bytes += prompt.text.capacity() + prompt.token_ids.capacity() * sizeof(TokenId);
    }
    for (const Choice& choice : impl_->choices) {
        bytes += sizeof choice + choice.prefix.capacity();
        if (choice.cold) {
            const Cold& cold = *choice.cold;
            bytes += sizeof cold + cold.text.capacity() + cold.logprobs.tokens.capacity() +
                     cold.logprobs.values.capacity() + cold.logprobs.top.capacity() +
                     cold.logprobs.offsets.capacity() + cold.token_ids.capacity() * sizeof(TokenId) +
                     cold.prompt_rows.token_ids.capacity() * (sizeof(TokenId) + sizeof(float));
        }
    }
    return bytes;
}

Error FinishError(wire::FinishReason reason, const wire::StopReason* why) {
    // vLLM gives no reason with an error; our own engine end says why it refused a request, as "field:
    // sentence". That is the client's mistake and not worth the retries that a 5xx brings. A sentence that
    // names no field, or one that only this gateway writes, is nobody's mistake but ours or the engine's.
    if (reason == wire::FinishReason::kError && why != nullptr && std::holds_alternative<std::string>(*why)) {
        constexpr std::string_view kSampling = "sampling_params.";
        std::string_view text = std::get<std::string>(*why);
        if (text.starts_with(kSampling)) {
            text.remove_prefix(kSampling.size());
        }
        const std::size_t colon = text.find(": ");
        const std::string_view field = text.substr(0, colon);
        const bool named = colon != std::string_view::npos && colon > 0 &&
                           field.find_first_not_of("abcdefghijklmnopqrstuvwxyz_") == std::string_view::npos;
        if (named && field != "request_id" && field != "client_index" && field != "current_wave" &&
            field != "arrival_time") {
            return Error::Invalid(std::string{field},
                                  "The engine refused the request: " + std::string{text.substr(colon + 2)});
        }
    }
    switch (reason) {
        case wire::FinishReason::kAbort:
            return Error{ErrorCode::kEngineError, "The engine aborted the request.", {}, true};
        case wire::FinishReason::kRepetition:
            return Error{ErrorCode::kEngineError,
                         "The engine stopped the request because its output repeats itself.",
                         {},
                         false};
        default:
            return Error{ErrorCode::kEngineError, "The engine could not process the request.", {}, false};
    }
}

}  // namespace rankgate::api
