// SPDX-License-Identifier: Apache-2.0
// tokenizer.json through the Rust library (rust/tokenizer/rg_tokenizer.h).
#include <rg_tokenizer.h>

#include <algorithm>

#include "text/backends.h"

namespace rankgate::text {
namespace {

std::string Take(RgText text) {
    std::string out{text.data == nullptr ? "" : text.data, text.size};
    rg_text_free(text);
    return out;
}

class JsonTokenizer final : public Tokenizer {
  public:
    explicit JsonTokenizer(RgTokenizer* handle) : handle_{handle} {
        struct Sink {
            TokenTable::Builder builder;
            std::uint32_t next{0};
        } sink;
        rg_tok_vocab(
            handle,
            [](void* context, std::uint32_t id, const char* bytes, std::size_t size, std::uint8_t flags) {
                auto& to = *static_cast<Sink*>(context);
                while (to.next < id) {
                    to.builder.Add({}, kHole);
                    ++to.next;
                }
                to.builder.Add({bytes, size}, flags);
                ++to.next;
            },
            &sink);
        table_ = std::move(sink.builder).Build(rg_tok_strips_leading_space(handle) != 0);
    }
    ~JsonTokenizer() override { rg_tok_free(handle_); }

    void SetEnds(std::string_view bos, std::string_view eos) {
        bos_ = bos.empty() ? std::nullopt : table_.Find(bos);
        eos_ = eos.empty() ? std::nullopt : table_.Find(eos);
    }

    Status Encode(std::string_view text, EncodeOptions options, std::vector<TokenId>& out) const override {
        const TextSpan span{text, options.parse_special};
        return EncodeSegments({&span, 1}, options.add_special, out);
    }

    Status EncodeSegments(std::span<const TextSpan> spans, bool add_special,
                          std::vector<TokenId>& out) const override {
        std::size_t bytes = 0;
        std::vector<RgSpan> raw;
        raw.reserve(spans.size());
        for (const TextSpan& span : spans) {
            bytes += span.text.size();
            raw.push_back({span.text.data(), span.text.size(), static_cast<std::uint8_t>(span.trusted)});
        }
        if (bytes > kMaxEncodeBytes) {
            return Error::Invalid(
                "", "The text is too long to be tokenized (" + std::to_string(bytes) + " bytes).");
        }
        RgIds ids{};
        RgText error{};
        if (rg_tok_encode(handle_, raw.data(), raw.size(), static_cast<std::uint8_t>(add_special), &ids,
                          &error) != 0) {
            return Error{ErrorCode::kInternal, "Tokenization failed: " + Take(error), "", false};
        }
        const std::size_t at = out.size();
        out.resize(at + ids.size);
        std::transform(ids.data, ids.data + ids.size, out.begin() + static_cast<std::ptrdiff_t>(at),
                       [](std::uint32_t id) { return static_cast<TokenId>(id); });
        rg_ids_free(ids);
        return {};
    }

    std::string_view kind() const noexcept override { return rg_tok_backend(handle_); }

  private:
    static constexpr std::uint8_t kHole = TokenTable::kHole;
    RgTokenizer* handle_;
};

static_assert(TokenTable::kSpecial == 1 && TokenTable::kAdded == 2 && TokenTable::kByteFallback == 4);

}  // namespace

Result<std::shared_ptr<const Tokenizer>> LoadTokenizerJson(std::string_view json, std::string_view config,
                                                           const std::string& backend,
                                                           std::string_view bos_literal,
                                                           std::string_view eos_literal) {
    RgTokenizer* handle = nullptr;
    RgText error{};
    if (rg_tok_load(json.data(), json.size(), config.data(), config.size(), backend.c_str(), &handle,
                    &error) != 0) {
        return Error{ErrorCode::kInvalidArgument, Take(error), "tokenizer", false};
    }
    auto made = std::make_shared<JsonTokenizer>(handle);
    made->SetEnds(bos_literal, eos_literal);
    return std::shared_ptr<const Tokenizer>{std::move(made)};
}

}  // namespace rankgate::text
