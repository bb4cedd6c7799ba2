// SPDX-License-Identifier: Apache-2.0
// The tokenizer that needs no file: one id per byte and three chatml tokens. For load tests, sanitizer builds
// and unit tests.
#include <algorithm>
#include <array>

#include "base/utf8.h"
#include "text/tokenizer.h"

namespace rankgate::text {
namespace {

constexpr std::array<std::string_view, 3> kSpecials = {"<|im_start|>", "<|im_end|>", "<|endoftext|>"};
constexpr TokenId kFirstSpecial = 256;

class ByteTokenizer final : public Tokenizer {
  public:
    ByteTokenizer() {
        TokenTable::Builder builder;
        for (int byte = 0; byte < 256; ++byte) {
            const char c = static_cast<char>(byte);
            builder.Add(std::string_view{&c, 1}, 0);
        }
        for (std::string_view special : kSpecials) {
            builder.Add(special, TokenTable::kSpecial | TokenTable::kAdded);
        }
        table_ = std::move(builder).Build(false);
        bos_ = kFirstSpecial + 2;
        eos_ = kFirstSpecial + 1;
    }

    Status Encode(std::string_view text, EncodeOptions options, std::vector<TokenId>& out) const override {
        if (text.size() > kMaxEncodeBytes) {
            return Error::Invalid("", "The text is too long to be tokenized.");
        }
        std::string repaired;
        if (!IsValidUtf8(text)) {
            repaired = ToValidUtf8(text);
            text = repaired;
        }
        out.reserve(out.size() + text.size());
        for (std::size_t at = 0; at < text.size();) {
            if (options.parse_special && text[at] == '<') {
                const auto* const hit = std::find_if(
                    kSpecials.begin(), kSpecials.end(),
                    [&](std::string_view special) { return text.substr(at).starts_with(special); });
                if (hit != kSpecials.end()) {
                    out.push_back(kFirstSpecial + static_cast<TokenId>(hit - kSpecials.begin()));
                    at += hit->size();
                    continue;
                }
            }
            out.push_back(static_cast<unsigned char>(text[at++]));
        }
        return {};
    }

    Status EncodeSegments(std::span<const TextSpan> spans, bool add_special,
                          std::vector<TokenId>& out) const override {
        for (const TextSpan& span : spans) {
            Status done = Encode(span.text, {.add_special = add_special, .parse_special = span.trusted}, out);
            if (!done.ok()) {
                return done;
            }
        }
        return {};
    }

    std::string_view kind() const noexcept override { return "bytes"; }
};

}  // namespace

std::shared_ptr<const Tokenizer> MakeByteTokenizer() {
    return std::make_shared<ByteTokenizer>();
}

}  // namespace rankgate::text
