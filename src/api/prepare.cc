// SPDX-License-Identifier: Apache-2.0
// The slow step of a request: chat template and tokenizer. Runs on the prepare pool; touches only immutable
// model data.
#include <algorithm>

#include "api/request.h"
#include "text/detokenizer.h"
#include "text/model_assets.h"

namespace rankgate::api {
namespace {

std::string_view PromptField(const ParsedRequest& request) noexcept {
    return request.endpoint == Endpoint::kChat ? "messages" : "prompt";
}

Error TooLongToTokenize(std::string_view field, std::size_t at_least, std::int64_t limit) {
    return Error{ErrorCode::kContextLength,
                 "This model's maximum context length is " + std::to_string(limit) +
                     " tokens. However, your " + std::string{field} + " holds at least " +
                     std::to_string(at_least) + " tokens. Please reduce the length of the " +
                     std::string{field} + ".",
                 std::string{field}, false};
}

// A text that is to be cut may be longer than the context, but not by any amount: it has to be tokenized
// first.
constexpr std::int64_t kMaxOverlength = 16;

// A text that cannot fit whatever its tokens are is not worth tokenizing.
Status CheckSize(std::string_view text, const ParsedRequest& request, const ModelInfo& model) {
    const std::size_t longest = std::max<std::size_t>(model.assets->tokenizer->table().max_token_bytes(), 1);
    const std::size_t at_least = text.size() / longest;
    const std::int64_t limit =
        request.truncate_prompt_tokens ? model.max_model_len * kMaxOverlength : model.max_model_len;
    if (model.max_model_len > 0 && at_least > static_cast<std::size_t>(limit)) {
        return TooLongToTokenize(PromptField(request), at_least, limit);
    }
    return Status::Ok();
}

Error WithParam(Error error, std::string_view param) {
    if (error.param.empty() && HttpStatus(error.code) < 500) {
        error.param = param;
    }
    return error;
}

Status RenderChat(const ParsedRequest& request, const ModelInfo& model, std::vector<TokenId>& out) {
    std::shared_ptr<const text::ChatTemplate> own;
    const text::ChatTemplate* chat_template = model.assets->TemplateFor(!request.tools_json.empty());
    if (!request.chat_template.empty()) {
        Result<std::shared_ptr<const text::ChatTemplate>> compiled =
            text::ChatTemplate::Compile(request.chat_template, {});
        if (!compiled.ok()) {
            return Error::Invalid("chat_template", compiled.error().message);
        }
        own = std::move(compiled).value();
        chat_template = own.get();
    }
    if (chat_template == nullptr) {
        return Error::Invalid(
            "messages",
            "This model has no chat template, so it cannot take messages; use /v1/completions or start "
            "the server with --chat-template.");
    }
    text::RenderRequest render;
    render.messages = chat_template->takes_content_parts() && !request.messages_parts_json.empty()
                          ? request.messages_parts_json
                          : request.messages_json;
    render.tools = request.tools_json;
    render.documents = request.documents_json;
    render.kwargs = request.template_kwargs_json;
    render.add_generation_prompt = request.add_generation_prompt;
    render.continue_final_message = request.continue_final_message;
    Result<text::RenderedPrompt> rendered = chat_template->Render(render);
    if (!rendered.ok()) {
        return WithParam(std::move(rendered).error(), "messages");
    }
    if (Status fits = CheckSize(rendered->text, request, model); !fits.ok()) {
        return fits;
    }
    const text::Tokenizer& tokenizer = *model.assets->tokenizer;
    Status encoded =
        request.add_special_tokens
            ? tokenizer.Encode(rendered->text, {.add_special = true, .parse_special = true}, out)
            : text::EncodePrompt(tokenizer, *rendered, model.features.special_tokens_in_content, out);
    return encoded.ok() ? encoded : Status{WithParam(encoded.error(), "messages")};
}

// Keeps the end of a prompt, as vLLM's truncation_side "left" does.
Status Truncate(const ParsedRequest& request, const ModelInfo& model, std::vector<TokenId>& ids) {
    if (!request.truncate_prompt_tokens) {
        return Status::Ok();
    }
    std::int64_t keep = *request.truncate_prompt_tokens;
    if (keep > model.max_model_len) {
        return Error::Invalid("truncate_prompt_tokens",
                              "'truncate_prompt_tokens' (" + std::to_string(keep) +
                                  ") is above the model's maximum context length (" +
                                  std::to_string(model.max_model_len) + " tokens).");
    }
    if (keep < 0) {
        // As much as the context takes beside what is to be generated.
        keep = std::max<std::int64_t>(
            model.max_model_len - std::max<std::int64_t>(request.sampling.max_tokens.value_or(1), 1), 1);
    }
    if (ids.size() > static_cast<std::size_t>(keep)) {
        ids.erase(ids.begin(), ids.end() - keep);
    }
    return Status::Ok();
}

}  // namespace

Result<std::vector<PreparedPrompt>> Prepare(const ParsedRequest& request, const ModelInfo& model) {
    if (model.max_model_len <= 0) {
        return Error{ErrorCode::kUnavailable, "No engine rank is ready yet.", {}, true};
    }
    std::vector<PreparedPrompt> prompts(request.num_prompts());
    if (request.endpoint == Endpoint::kChat) {
        if (Status status = RenderChat(request, model, prompts[0].token_ids); !status.ok()) {
            return status.error();
        }
    } else {
        const text::Tokenizer& tokenizer = *model.assets->tokenizer;
        for (std::size_t i = 0; i < prompts.size(); ++i) {
            PreparedPrompt& prompt = prompts[i];
            if (const auto* ids = std::get_if<std::vector<TokenId>>(&request.prompts[i])) {
                prompt.token_ids = *ids;
                if (request.echo) {
                    prompt.text =
                        text::Detokenize(tokenizer.table(), *ids,
                                         {.skip_special_tokens = request.sampling.skip_special_tokens});
                }
                continue;
            }
            const std::string& text = std::get<std::string>(request.prompts[i]);
            if (Status fits = CheckSize(text, request, model); !fits.ok()) {
                return fits.error();
            }
            const text::Tokenizer::EncodeOptions options{.add_special = request.add_special_tokens,
                                                         .parse_special = true};
            if (Status encoded = tokenizer.Encode(text, options, prompt.token_ids); !encoded.ok()) {
                return WithParam(encoded.error(), "prompt");
            }
            if (request.echo) {
                prompt.text = text;
            }
        }
    }
    for (PreparedPrompt& prompt : prompts) {
        const std::size_t whole = prompt.token_ids.size();
        if (Status status = Truncate(request, model, prompt.token_ids); !status.ok()) {
            return status.error();
        }
        if (request.echo && prompt.token_ids.size() < whole) {
            // The echo is what the model was shown, so that tokens and scores are those of the text.
            prompt.text = text::Detokenize(model.assets->tokenizer->table(), prompt.token_ids,
                                           {.skip_special_tokens = request.sampling.skip_special_tokens});
        }
        prompt.num_tokens = prompt.token_ids.size();
        if (prompt.token_ids.empty()) {
            return Error::Invalid(std::string{PromptField(request)},
                                  "'" + std::string{PromptField(request)} +
                                      "' gives an empty prompt: there is nothing to continue.");
        }
    }
    return prompts;
}

Result<std::vector<TokenId>> PrepareTokenize(const TokenizeRequest& request, const ModelInfo& model) {
    std::vector<TokenId> ids;
    if (request.is_chat) {
        if (!request.chat.chat_template.empty() && !model.features.chat_template_in_request) {
            return Error::Invalid("chat_template",
                                  "'chat_template' in a request is not allowed by this server.");
        }
        ParsedRequest chat = request.chat;
        chat.truncate_prompt_tokens = 1;  // /tokenize counts texts that are longer than the context, too
        if (Status status = RenderChat(chat, model, ids); !status.ok()) {
            return status.error();
        }
        return ids;
    }
    const text::Tokenizer::EncodeOptions options{.add_special = request.add_special_tokens,
                                                 .parse_special = true};
    if (Status encoded = model.assets->tokenizer->Encode(request.prompt, options, ids); !encoded.ok()) {
        return WithParam(encoded.error(), "prompt");
    }
    return ids;
}

}  // namespace rankgate::api
