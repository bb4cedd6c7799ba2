// SPDX-License-Identifier: Apache-2.0
// The vocabulary inside a GGUF file, through llama.cpp. No weights are read.
#include <llama.h>

#include <algorithm>
#include <mutex>

#include "base/log.h"
#include "base/utf8.h"
#include "text/backends.h"

namespace rankgate::text {
namespace {

struct ModelDeleter {
    void operator()(llama_model* model) const noexcept { llama_model_free(model); }
};
using ModelPtr = std::unique_ptr<llama_model, ModelDeleter>;

std::string Piece(const llama_vocab* vocab, llama_token id) {
    std::string piece(64, '\0');
    int size = llama_token_to_piece(vocab, id, piece.data(), static_cast<int>(piece.size()), 0, true);
    if (size < 0) {
        piece.resize(static_cast<std::size_t>(-size));
        size = llama_token_to_piece(vocab, id, piece.data(), static_cast<int>(piece.size()), 0, true);
    }
    piece.resize(static_cast<std::size_t>(std::max(size, 0)));
    return piece;
}

std::string Meta(const llama_model* model, const std::string& key) {
    const int size = llama_model_meta_val_str(model, key.c_str(), nullptr, 0);
    if (size < 0) {
        return "";
    }
    std::string value(static_cast<std::size_t>(size) + 1, '\0');
    llama_model_meta_val_str(model, key.c_str(), value.data(), value.size());
    value.resize(static_cast<std::size_t>(size));
    return value;
}

class GgufTokenizer final : public Tokenizer {
  public:
    explicit GgufTokenizer(ModelPtr model)
        : model_{std::move(model)}, vocab_{llama_model_get_vocab(model_.get())} {
        TokenTable::Builder builder;
        const int count = llama_vocab_n_tokens(vocab_);
        for (llama_token id = 0; id < count; ++id) {
            const auto attributes = static_cast<unsigned>(llama_vocab_get_attr(vocab_, id));
            const std::string_view literal = llama_vocab_get_text(vocab_, id);
            if ((attributes & (LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_UNKNOWN)) != 0) {
                builder.Add(literal, TokenTable::kSpecial | TokenTable::kAdded);
            } else if ((attributes & LLAMA_TOKEN_ATTR_UNUSED) != 0 && literal.starts_with("[PAD")) {
                builder.Add({}, TokenTable::kHole);  // rows of the embedding beyond the vocabulary
            } else {
                const std::uint8_t flags =
                    (attributes & LLAMA_TOKEN_ATTR_BYTE) != 0           ? TokenTable::kByteFallback
                    : (attributes & LLAMA_TOKEN_ATTR_USER_DEFINED) != 0 ? TokenTable::kAdded
                                                                        : 0;
                builder.Add(Piece(vocab_, id), flags);
            }
        }
        const bool sentencepiece = llama_vocab_type(vocab_) == LLAMA_VOCAB_TYPE_SPM;
        table_ = std::move(builder).Build(sentencepiece &&
                                          Meta(model_.get(), "tokenizer.ggml.add_space_prefix") != "false");
        const auto known = [](llama_token id) {
            return id == LLAMA_TOKEN_NULL ? std::nullopt : std::optional<TokenId>{id};
        };
        bos_ = known(llama_vocab_bos(vocab_));
        eos_ = known(llama_vocab_eos(vocab_));
    }

    Status Encode(std::string_view text, EncodeOptions options, std::vector<TokenId>& out) const override {
        if (text.size() > kMaxEncodeBytes) {
            return Error::Invalid(
                "", "The text is too long to be tokenized (" + std::to_string(text.size()) + " bytes).");
        }
        std::string repaired;
        if (!IsValidUtf8(text)) {
            repaired = ToValidUtf8(text);
            text = repaired;
        }
        // A text has at most one token per byte, one more in front and one behind; so one pass is enough.
        const std::size_t at = out.size();
        out.resize(at + text.size() + 8);
        const int count =
            llama_tokenize(vocab_, text.data(), static_cast<int>(text.size()), out.data() + at,
                           static_cast<int>(text.size() + 8), options.add_special, options.parse_special);
        if (count < 0) {
            out.resize(at);
            return Error{ErrorCode::kInternal, "Tokenization failed.", "", false};
        }
        out.resize(at + static_cast<std::size_t>(count));
        return {};
    }

    Status EncodeSegments(std::span<const TextSpan> spans, bool add_special,
                          std::vector<TokenId>& out) const override {
        if (add_special && llama_vocab_get_add_bos(vocab_) && bos_) {
            out.push_back(*bos_);
        }
        for (const TextSpan& span : spans) {
            Status done = Encode(span.text, {.add_special = false, .parse_special = span.trusted}, out);
            if (!done.ok()) {
                return done;
            }
        }
        if (add_special && llama_vocab_get_add_eos(vocab_) && eos_) {
            out.push_back(*eos_);
        }
        return {};
    }

    std::string_view kind() const noexcept override { return "gguf"; }
    const llama_vocab* vocab() const noexcept { return vocab_; }
    const llama_model* model() const noexcept { return model_.get(); }

  private:
    ModelPtr model_;
    const llama_vocab* vocab_;
};

void QuietLog(ggml_log_level level, const char* text, void*) {
    if (level == GGML_LOG_LEVEL_ERROR) {
        std::string line{text};
        while (!line.empty() && line.back() == '\n') {
            line.pop_back();
        }
        LogWarning("llama.cpp", {{"message", line}});
    }
}

}  // namespace

Result<GgufFacts> LoadGguf(const std::string& path) {
    static std::once_flag once;
    std::call_once(once, [] { llama_log_set(QuietLog, nullptr); });
    llama_model_params params = llama_model_default_params();
    params.vocab_only = true;
    params.n_gpu_layers = 0;
    ModelPtr model{llama_model_load_from_file(path.c_str(), params)};
    if (!model) {
        return Error{ErrorCode::kInvalidArgument, path + " cannot be read as a GGUF model (see the log)",
                     "model", false};
    }
    GgufFacts facts;
    const llama_model* raw = model.get();
    facts.name = Meta(raw, "general.name");
    facts.architecture = Meta(raw, "general.architecture");
    if (const char* source = llama_model_chat_template(raw, nullptr); source != nullptr) {
        facts.chat_template = source;
    }
    if (const char* source = llama_model_chat_template(raw, "tool_use"); source != nullptr) {
        facts.tool_template = source;
    }
    const std::string context = Meta(raw, facts.architecture + ".context_length");
    facts.context_length = context.empty() ? 0 : std::strtoll(context.c_str(), nullptr, 10);
    auto tokenizer = std::make_shared<GgufTokenizer>(std::move(model));
    const llama_vocab* vocab = tokenizer->vocab();
    for (llama_token id = 0; id < llama_vocab_n_tokens(vocab); ++id) {
        if (llama_vocab_is_eog(vocab, id)) {
            facts.end_ids.push_back(id);
        }
    }
    const auto name = [&](const char* what, llama_token id) {
        if (id != LLAMA_TOKEN_NULL) {
            facts.template_tokens.emplace_back(what, llama_vocab_get_text(vocab, id));
        }
    };
    name("bos_token", llama_vocab_bos(vocab));
    name("eos_token", llama_vocab_eos(vocab));
    name("pad_token", llama_vocab_pad(vocab));
    name("sep_token", llama_vocab_sep(vocab));
    facts.tokenizer = std::move(tokenizer);
    return facts;
}

}  // namespace rankgate::text
