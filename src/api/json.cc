// SPDX-License-Identifier: Apache-2.0
// The small JSON bodies: errors, model lists, tokenize, detokenize, version.
#include <charconv>

#include "api/response.h"
#include "base/error_json.h"
#include "base/utf8.h"
#include "text/detokenizer.h"
#include "text/model_assets.h"

namespace rankgate::api {
namespace {

void AppendModel(std::string& out, std::string_view id, const ModelInfo& model, std::string_view root,
                 std::string_view parent) {
    out += out.ends_with('}') ? ",{\"id\":" : "{\"id\":";
    AppendJsonString(out, id);
    out += R"(,"object":"model","created":)" + std::to_string(model.created) + R"(,"owned_by":)";
    AppendJsonString(out, model.owned_by);
    out += R"(,"root":)";
    AppendJsonString(out, root);
    out += R"(,"parent":)";
    AppendJsonStringOrNull(out, parent);
    if (model.max_model_len > 0) {
        out += R"(,"max_model_len":)" + std::to_string(model.max_model_len);
    }
    out += '}';
}

int HexValue(char c) noexcept {
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    if (c >= 'a' && c <= 'f') {
        return c - 'a' + 10;
    }
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

}  // namespace

void AppendErrorEvent(std::string& out, const Error& error) {
    out += "data: ";
    AppendErrorJson(out, error);
    out += "\n\n";
}

std::string ModelsJson(std::span<const std::shared_ptr<const ModelInfo>> models) {
    std::string out = R"({"object":"list","data":[)";
    for (const auto& model : models) {
        for (const std::string& name : model->served_names) {
            AppendModel(out, name, *model, model->served_names.front(), {});
        }
        for (const wire::LoraRequest& adapter : model->adapters) {
            AppendModel(out, adapter.name, *model, adapter.path,
                        model->served_names.empty() ? std::string_view{}
                                                    : std::string_view{model->served_names.front()});
        }
    }
    out += "]}";
    return out;
}

Result<std::string> ModelJson(std::span<const std::shared_ptr<const ModelInfo>> models, std::string_view id) {
    for (const auto& model : models) {
        std::string out;
        if (model->Serves(id)) {
            AppendModel(out, id, *model, model->served_names.front(), {});
            return out;
        }
        if (const wire::LoraRequest* adapter = model->FindAdapter(id)) {
            AppendModel(out, id, *model, adapter->path,
                        model->served_names.empty() ? std::string_view{}
                                                    : std::string_view{model->served_names.front()});
            return out;
        }
    }
    return ModelNotFound(id);
}

Result<std::string> PercentDecode(std::string_view text) {
    std::string out;
    out.reserve(text.size());
    for (std::size_t i = 0; i < text.size(); ++i) {
        if (text[i] != '%') {
            out += text[i];
            continue;
        }
        const int high = i + 2 < text.size() ? HexValue(text[i + 1]) : -1;
        const int low = i + 2 < text.size() ? HexValue(text[i + 2]) : -1;
        if (high < 0 || low < 0 || (high == 0 && low == 0)) {
            return Error::Invalid("", "The path holds a bad percent-encoding.");
        }
        out += static_cast<char>(high * 16 + low);
        i += 2;
    }
    if (!IsValidUtf8(out)) {
        return Error::Invalid("", "The path is not valid UTF-8.");
    }
    return out;
}

std::string TokenizeJson(const TokenizeRequest& request, const ModelInfo& model,
                         std::span<const TokenId> tokens) {
    const text::TokenTable& table = model.assets->tokenizer->table();
    std::string out = R"({"count":)" + std::to_string(tokens.size()) + R"(,"max_model_len":)" +
                      std::to_string(model.max_model_len) + R"(,"tokens":[)";
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        if (i > 0) {
            out += ',';
        }
        if (request.with_pieces) {
            out += R"({"id":)" + std::to_string(tokens[i]) + R"(,"piece":)";
            AppendJsonString(out, table.bytes(tokens[i]));
            out += '}';
        } else {
            out += std::to_string(tokens[i]);
        }
    }
    out += R"(],"token_strs":)";
    if (!request.return_token_strs) {
        out += "null}";
        return out;
    }
    out += '[';
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        if (i > 0) {
            out += ',';
        }
        AppendJsonString(out, table.bytes(tokens[i]));
    }
    out += "]}";
    return out;
}

Result<std::string> DetokenizeJson(const DetokenizeRequest& request, const ModelInfo& model) {
    const text::TokenTable& table = model.assets->tokenizer->table();
    const std::int64_t size =
        std::max<std::int64_t>(model.vocab_size, static_cast<std::int64_t>(table.size()));
    for (const TokenId id : request.tokens) {
        if (id < 0 || id >= size) {
            return Error::Invalid("tokens", "'tokens' holds the token id " + std::to_string(id) +
                                                ", which is outside of the vocabulary (0 to " +
                                                std::to_string(size - 1) + ").");
        }
    }
    const std::string text = text::Detokenize(table, request.tokens, {.skip_special_tokens = false});
    std::string out = R"({"prompt":)";
    AppendJsonString(out, text);
    // llama.cpp's clients read this one.
    out += R"(,"content":)";
    AppendJsonString(out, text);
    out += '}';
    return out;
}

std::string VersionJson(std::string_view version) {
    std::string out = R"({"version":)";
    AppendJsonString(out, version);
    out += '}';
    return out;
}

}  // namespace rankgate::api
