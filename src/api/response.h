// SPDX-License-Identifier: Apache-2.0
// Engine outputs -> response bytes. One ResponseAssembler per HTTP request, fed with every Output of its
// choices in any interleaving; it detokenizes, matches stop strings and APPENDS to a string: complete SSE
// events while streaming, one JSON body otherwise. Whoever frames the body (chunked coding) leaves room in
// that string before the call and patches it afterwards, so that nothing is copied. Shard-confined. Steady
// state of a stream (a token without logprobs): no allocation, no virtual call but the tokenizer's.
//
// Protocol: OnOutput / OnError any number of times until an Effect says done or failed; nothing afterwards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "api/model.h"
#include "api/request.h"
#include "base/result.h"
#include "wire/generate.h"

namespace rankgate::api {

/// One choice's share of an engine step; the views are read during the call only.
struct ChoiceOutput {
    std::uint32_t choice{0};
    std::span<const TokenId> tokens;
    wire::FinishReason finish_reason{wire::FinishReason::kNone};
    const wire::Logprobs* logprobs{nullptr};
    const wire::Logprobs* prompt_logprobs{nullptr};
    const wire::StopReason* stop_reason{nullptr};
    std::int32_t num_cached_tokens{-1};
};

/// What the caller must do after a call, besides sending what was appended.
struct Effect {
    /// A stop string matched: cancel this choice on the engine now (its text is complete here).
    bool abort_choice{false};
    /// The response is complete: streaming has its [DONE], a non-streaming body is in `out`.
    bool done{false};
    /// The request failed: cancel all its other choices. While streaming_started() the error event is in
    /// `out` and the stream ends here, without [DONE]; otherwise answer with error() and its HTTP status.
    bool failed{false};
};

class ResponseAssembler {
  public:
    /// `prompts` as BuildGenerate left them. `id` and `created` are shown in every chunk.
    ResponseAssembler(ParsedRequest request, std::shared_ptr<const ModelInfo> model,
                      std::vector<PreparedPrompt> prompts, std::string id, std::int64_t created);
    ~ResponseAssembler();
    ResponseAssembler(ResponseAssembler&&) noexcept;
    ResponseAssembler& operator=(ResponseAssembler&&) noexcept;

    /// Outputs for a choice that is already complete are dropped without effect.
    Effect OnOutput(const ChoiceOutput& output, std::string& out) noexcept;
    /// The group's or the gateway's own error for one choice; it fails the whole request.
    Effect OnError(std::uint32_t choice, const Error& error, std::string& out) noexcept;

    bool streaming() const noexcept;
    /// True once bytes of a stream were appended: from then on an error can only be an event.
    bool streaming_started() const noexcept;
    bool choice_done(std::uint32_t choice) const noexcept;
    std::size_t num_choices() const noexcept;
    /// Valid after an Effect with failed.
    const Error& error() const noexcept;
    const std::string& id() const noexcept;

    // For metrics and logs; final once done.
    std::int64_t prompt_tokens() const noexcept;
    std::int64_t completion_tokens() const noexcept;
    /// "stop", "length", "error" or "" (still running).
    std::string_view finish_reason(std::uint32_t choice) const noexcept;
    /// Bytes held for this request beyond the object itself (back-pressure accounting).
    std::size_t held_bytes() const noexcept;

  private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

/// A finish reason that is no success (abort, error, repetition, anything unknown) as the error to show.
/// `why` may be null; a text in it that names a field of the request ("field: sentence") is the engine's
/// refusal and makes a 400 of an error.
Error FinishError(wire::FinishReason reason, const wire::StopReason* why = nullptr);

/// The error object as one SSE event.
void AppendErrorEvent(std::string& out, const Error& error);

/// GET /v1/models; adapters follow their base model with `parent` and `root`.
std::string ModelsJson(std::span<const std::shared_ptr<const ModelInfo>> models);
/// GET /v1/models/{id}; `id` as in the path after percent-decoding. 404 model_not_found.
Result<std::string> ModelJson(std::span<const std::shared_ptr<const ModelInfo>> models, std::string_view id);
/// Undoes %XX in a path segment; nullopt-like: an Error when a sequence is cut, not hex, or decodes to NUL or
/// invalid UTF-8.
Result<std::string> PercentDecode(std::string_view text);

std::string TokenizeJson(const TokenizeRequest& request, const ModelInfo& model,
                         std::span<const TokenId> tokens);
/// Refuses ids outside the vocabulary with `param` tokens.
Result<std::string> DetokenizeJson(const DetokenizeRequest& request, const ModelInfo& model);
/// {"version":"..."}.
std::string VersionJson(std::string_view version);

}  // namespace rankgate::api
