// SPDX-License-Identifier: Apache-2.0
// What the api tests share: a model over the byte tokenizer (one id a byte) or over a small word list, JSON
// look-ups, and a client that reads SSE the strict way. Tests only.
#pragma once

#include <gtest/gtest.h>
#include <simdjson.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "api/request.h"
#include "api/response.h"
#include "base/utf8.h"
#include "text/detokenizer.h"
#include "text/model_assets.h"

namespace rankgate::api::test {

/// Allocations of this thread since its start (allocation_counter.cc).
std::size_t Allocations() noexcept;

inline constexpr const char* kChatml =
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

inline std::shared_ptr<text::ModelAssets> AssetsWithTemplate(const std::string& source) {
    auto assets = std::make_shared<text::ModelAssets>();
    assets->tokenizer = text::MakeByteTokenizer();
    assets->eos_token_id = assets->tokenizer->eos();
    assets->eos_token_ids = {257, 258};
    assets->vocab_size = 259;
    if (!source.empty()) {
        Result<std::shared_ptr<const text::ChatTemplate>> compiled = text::ChatTemplate::Compile(source, {});
        RG_CHECK(compiled.ok());
        assets->chat_template = std::move(compiled).value();
    }
    return assets;
}

inline std::shared_ptr<const text::ModelAssets> ByteAssets() {
    static const std::shared_ptr<const text::ModelAssets> assets = AssetsWithTemplate(kChatml);
    return assets;
}

/// Token i is words[i]; encodes greedily, longest first, and drops what no word begins. Special words begin
/// with "<|".
class WordTokenizer : public text::Tokenizer {
  public:
    explicit WordTokenizer(std::vector<std::string> words) : words_{std::move(words)} {
        text::TokenTable::Builder builder;
        for (const std::string& word : words_) {
            builder.Add(word,
                        word.starts_with("<|") ? text::TokenTable::kSpecial | text::TokenTable::kAdded : 0);
        }
        table_ = std::move(builder).Build(false);
    }
    Status Encode(std::string_view text, EncodeOptions, std::vector<TokenId>& out) const override {
        while (!text.empty()) {
            std::size_t best = words_.size();
            for (std::size_t i = 0; i < words_.size(); ++i) {
                if (!words_[i].empty() && text.starts_with(words_[i]) &&
                    (best == words_.size() || words_[i].size() > words_[best].size())) {
                    best = i;
                }
            }
            if (best == words_.size()) {
                text.remove_prefix(1);
                continue;
            }
            out.push_back(static_cast<TokenId>(best));
            text.remove_prefix(words_[best].size());
        }
        return Status::Ok();
    }
    Status EncodeSegments(std::span<const text::TextSpan> spans, bool,
                          std::vector<TokenId>& out) const override {
        for (const text::TextSpan& span : spans) {
            if (Status status = Encode(span.text, {}, out); !status.ok()) {
                return status;
            }
        }
        return Status::Ok();
    }
    std::string_view kind() const noexcept override { return "words"; }

  private:
    std::vector<std::string> words_;
};

inline std::shared_ptr<ModelInfo> ByteModel() {
    auto model = std::make_shared<ModelInfo>();
    model->served_names = {"m", "alias"};
    model->created = 1700000000;
    model->assets = ByteAssets();
    model->vocab_size = static_cast<std::int32_t>(model->assets->vocab_size);
    model->max_model_len = 4096;
    return model;
}

/// `eos` is an index into `words`, or -1.
inline std::shared_ptr<ModelInfo> WordModel(std::vector<std::string> words, TokenId eos = -1) {
    auto assets = std::make_shared<text::ModelAssets>();
    const auto size = static_cast<std::int32_t>(words.size());
    assets->tokenizer = std::make_shared<WordTokenizer>(std::move(words));
    assets->vocab_size = size;
    if (eos >= 0) {
        assets->eos_token_id = eos;
        assets->eos_token_ids = {eos};
    }
    std::shared_ptr<ModelInfo> model = ByteModel();
    model->assets = std::move(assets);
    model->vocab_size = size;
    return model;
}

/// Parsed text that owns its parser; look-ups by JSON pointer.
class Json {
  public:
    explicit Json(std::string_view text) : parser_{std::make_unique<simdjson::dom::parser>()} {
        const auto failed = parser_->parse(text.data(), text.size()).get(root_);
        EXPECT_EQ(failed, simdjson::SUCCESS) << text;
        EXPECT_TRUE(IsValidUtf8(text)) << text;
    }
    /// The value as compact JSON text; "(absent)" where there is none.
    std::string operator[](std::string_view pointer) const {
        simdjson::dom::element found;
        return root_.at_pointer(pointer).get(found) == simdjson::SUCCESS ? simdjson::to_string(found)
                                                                         : "(absent)";
    }
    /// A string value, unescaped.
    std::string Text(std::string_view pointer) const {
        std::string_view found;
        return root_.at_pointer(pointer).get(found) == simdjson::SUCCESS ? std::string{found} : "(no string)";
    }
    bool Has(std::string_view pointer) const { return (*this)[pointer] != "(absent)"; }
    std::size_t Size(std::string_view pointer) const {
        simdjson::dom::array found;
        return root_.at_pointer(pointer).get(found) == simdjson::SUCCESS ? found.size() : 0;
    }

  private:
    std::unique_ptr<simdjson::dom::parser> parser_;
    simdjson::dom::element root_;
};

/// Splits SSE bytes into the data of each event; anything but "data: ...\n\n" is a failure.
inline std::vector<std::string> Events(std::string_view bytes) {
    std::vector<std::string> events;
    while (!bytes.empty()) {
        const std::size_t end = bytes.find("\n\n");
        if (end == std::string_view::npos || !bytes.starts_with("data: ")) {
            ADD_FAILURE() << "not an event: " << bytes;
            break;
        }
        std::string_view data = bytes.substr(6, end - 6);
        EXPECT_EQ(data.find('\n'), std::string_view::npos);
        events.emplace_back(data);
        bytes.remove_prefix(end + 2);
    }
    return events;
}

inline std::vector<TokenId> Bytes(std::string_view text) {
    std::vector<TokenId> ids;
    for (const char c : text) {
        ids.push_back(static_cast<unsigned char>(c));
    }
    return ids;
}

/// Parse -> Prepare -> BuildGenerate in one go.
struct Outcome {
    std::vector<std::unique_ptr<wire::GenerateRequest>> requests;
    ParsedRequest parsed;
    std::vector<PreparedPrompt> prompts;
    bool ok{false};
    Error error;
};

inline Outcome Build(Endpoint endpoint, const std::string& body, const ModelInfo& model,
                     const BuildContext& context = {.id = "id"}) {
    Parser parser;
    Outcome out;
    Result<ParsedRequest> parsed =
        endpoint == Endpoint::kChat ? parser.ParseChat(body) : parser.ParseCompletion(body);
    if (!parsed.ok()) {
        out.error = std::move(parsed).error();
        return out;
    }
    out.parsed = std::move(parsed).value();
    if (Status status = CheckAgainstModel(out.parsed, model); !status.ok()) {
        out.error = status.error();
        return out;
    }
    Result<std::vector<PreparedPrompt>> prompts = Prepare(out.parsed, model);
    if (!prompts.ok()) {
        out.error = std::move(prompts).error();
        return out;
    }
    out.prompts = std::move(prompts).value();
    auto built = BuildGenerate(out.parsed, model, out.prompts, context);
    if (!built.ok()) {
        out.error = std::move(built).error();
        return out;
    }
    out.requests = std::move(built).value();
    out.ok = true;
    return out;
}

/// A chat body with one user message and `more` members ("" or "\"n\":2").
inline std::string Chat(const std::string& more = {}) {
    return R"({"model":"m","messages":[{"role":"user","content":"hi"}])" + (more.empty() ? "" : "," + more) +
           "}";
}
inline std::string Completion(const std::string& more = {}) {
    return R"({"model":"m","prompt":"hi")" + (more.empty() ? "" : "," + more) + "}";
}

}  // namespace rankgate::api::test
