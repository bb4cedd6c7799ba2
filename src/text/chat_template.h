// SPDX-License-Identifier: Apache-2.0
// ChatTemplate: a model's Jinja template, parsed once, rendered per request as Hugging Face's
// apply_chat_template and vLLM do it. Every byte of the result is known to come from the template or from the
// client, so that a "<|im_end|>" that somebody typed can be told from the real one (EncodePrompt). Rendering
// is bounded in CPU time, steps, output, memory and recursion (RenderLimits). Made by LoadModelAssets, called
// by api/ on the prepare pool. Thread rule: immutable; Render may run on many threads at once.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "text/tokenizer.h"

namespace rankgate::text {

struct RenderLimits {
    std::int64_t cpu_ms{2'000};
    std::size_t output_bytes{std::size_t{64} << 20};
    std::size_t input_bytes{std::size_t{64} << 20};  // messages + tools + kwargs
    std::int64_t steps{50'000'000};
    std::int64_t values{1'000'000};  // alive at once, about 250 bytes each
    int depth{600};                  // nested evaluations; a macro call takes about five
};
/// Longest template source, and how deep brackets and blocks may nest in it.
inline constexpr std::size_t kMaxTemplateBytes = std::size_t{1} << 20;
inline constexpr int kMaxTemplateNesting = 100;
/// Deepest nesting of the JSON that a client hands to a template.
inline constexpr int kMaxJsonDepth = 100;

/// What the template sees beside the conversation: bos_token, eos_token, pad_token, unk_token, ... as name ->
/// literal.
using TemplateTokens = std::vector<std::pair<std::string, std::string>>;

struct RenderRequest {
    /// JSON array of messages in OpenAI's shape; roles and parts already checked by the caller, or not: what
    /// the template cannot take is a 400 either way.
    std::string_view messages;
    /// JSON array or empty.
    std::string_view tools{};
    /// JSON array or empty.
    std::string_view documents{};
    /// JSON object or empty: chat_template_kwargs. Its keys override everything but messages.
    std::string_view kwargs{};
    bool add_generation_prompt{true};
    /// Leave the last message open (prefill). Not together with add_generation_prompt.
    bool continue_final_message{false};
    /// Seconds since the epoch for strftime_now; 0 = the system's clock.
    std::int64_t now{0};
};

struct RenderedPrompt {
    struct Span {
        std::size_t size;
        bool trusted;  // the template's own text
    };
    std::string text;
    std::vector<Span> spans;  // cover `text` in order, neighbours differ in trust
};

class ChatTemplate {
  public:
    /// A source that cannot be parsed fails here, with the line, not at the first request.
    static Result<std::shared_ptr<const ChatTemplate>> Compile(std::string source, TemplateTokens tokens,
                                                               RenderLimits limits = {});
    ~ChatTemplate();
    ChatTemplate(const ChatTemplate&) = delete;
    ChatTemplate& operator=(const ChatTemplate&) = delete;

    /// Errors are the client's (400, param "messages"): the template's own sentence for raise_exception, else
    /// what went wrong and in which line of the template.
    Result<RenderedPrompt> Render(const RenderRequest& request) const;

    const std::string& source() const noexcept;
    /// True when the template walks through content parts itself ("openai" in vLLM's words); false: it wants
    /// content as a string.
    bool takes_content_parts() const noexcept;

  private:
    struct Impl;
    explicit ChatTemplate(std::unique_ptr<Impl> impl) noexcept;
    std::unique_ptr<Impl> impl_;
};

/// Ids of a rendered prompt. `untrusted_specials` true: special tokens are read everywhere, as vLLM does;
/// false: only where the template wrote them.
Status EncodePrompt(const Tokenizer& tokenizer, const RenderedPrompt& prompt, bool untrusted_specials,
                    std::vector<TokenId>& out);

}  // namespace rankgate::text
