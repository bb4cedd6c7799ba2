// SPDX-License-Identifier: Apache-2.0
// Tokenizer: text -> ids, and the TokenTable that turns ids back into bytes. Three kinds exist: the
// vocabulary inside a GGUF file (llama.cpp), a tokenizer.json (the Rust library), and plain bytes (no file at
// all; load tests and sanitizer builds). Made by LoadModelAssets (model_assets.h); called by api/ on shards
// and on the prepare pool. Thread rule: immutable after loading; every method may be called from any number
// of threads at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "wire/generate.h"

namespace rankgate::text {

using wire::TokenId;

/// Longest text one Encode call takes; longer is refused before any work (400).
inline constexpr std::size_t kMaxEncodeBytes = std::size_t{64} << 20;

/// What is known of each id. Immutable; bytes(id) is a view that lives as long as the table.
class TokenTable {
  public:
    enum Flag : std::uint8_t {
        kSpecial = 1,       // hidden by skip_special_tokens
        kAdded = 2,         // raw text outside of the model's alphabet (special tokens too)
        kByteFallback = 4,  // a piece <0xNN>; its bytes are that one byte
        kHole = 8,          // an id without a token
    };

    /// How text begins: sentencepiece vocabularies write a word boundary in front, which is dropped at the
    /// very start of a text.
    bool strips_leading_space() const noexcept { return strips_leading_space_; }
    /// One past the highest id that has a token.
    std::size_t size() const noexcept { return flags_.size(); }
    bool contains(TokenId id) const noexcept {
        return id >= 0 && static_cast<std::size_t>(id) < flags_.size() &&
               (flags_[static_cast<std::size_t>(id)] & kHole) == 0;
    }
    /// The bytes an id stands for (for a special token its literal text); empty for an id outside of the
    /// table.
    std::string_view bytes(TokenId id) const noexcept {
        if (id < 0 || static_cast<std::size_t>(id) >= flags_.size()) {
            return {};
        }
        const std::size_t at = static_cast<std::size_t>(id);
        return std::string_view{blob_}.substr(offsets_[at], offsets_[at + 1] - offsets_[at]);
    }
    std::uint8_t flags(TokenId id) const noexcept {
        return id < 0 || static_cast<std::size_t>(id) >= flags_.size() ? std::uint8_t{kHole}
                                                                       : flags_[static_cast<std::size_t>(id)];
    }
    bool special(TokenId id) const noexcept { return (flags(id) & kSpecial) != 0; }
    /// The longest token in bytes: a text of N bytes has at least N / max_token_bytes() tokens (normalisation
    /// aside), so that an impossible prompt can be refused before it is tokenized.
    std::size_t max_token_bytes() const noexcept { return max_token_bytes_; }
    /// The id of an added or special token by its literal text, e.g. "<|im_end|>".
    std::optional<TokenId> Find(std::string_view literal) const noexcept;

    /// Builds a table id by id, in order.
    class Builder {
      public:
        void Add(std::string_view bytes, std::uint8_t flags);
        TokenTable Build(bool strips_leading_space) &&;

      private:
        friend class TokenTable;
        std::string blob_;
        std::vector<std::uint32_t> offsets_{0};
        std::vector<std::uint8_t> flags_;
    };

    TokenTable() = default;

  private:
    std::string blob_;
    std::vector<std::uint32_t> offsets_{0};
    std::vector<std::uint8_t> flags_;
    std::vector<TokenId> added_;  // sorted by literal
    std::size_t max_token_bytes_{0};
    bool strips_leading_space_{false};
};

/// A piece of a prompt. Untrusted = typed by a client: special tokens in it are then plain text.
struct TextSpan {
    std::string_view text;
    bool trusted{true};
};

class Tokenizer {
  public:
    struct EncodeOptions {
        /// Add what the model wants around a text (BOS, sometimes EOS). Chat prompts: false, the template
        /// writes them itself.
        bool add_special{true};
        /// Read "<|im_end|>" in the text as that token. False = as plain text.
        bool parse_special{true};
    };

    Tokenizer() = default;
    Tokenizer(const Tokenizer&) = delete;
    Tokenizer& operator=(const Tokenizer&) = delete;
    virtual ~Tokenizer() = default;

    /// Appends the ids of `text`. Invalid UTF-8 is read as U+FFFD. Refuses texts over kMaxEncodeBytes and,
    /// for vocabularies whose cost grows faster than the text, runs without a break over their limit
    /// (docs/text.md).
    virtual Status Encode(std::string_view text, EncodeOptions options, std::vector<TokenId>& out) const = 0;

    /// Appends the ids of spans in order; special tokens are only read in trusted ones. No merge crosses a
    /// border between spans of different trust, so the ids can differ there from those of the joined text.
    virtual Status EncodeSegments(std::span<const TextSpan> spans, bool add_special,
                                  std::vector<TokenId>& out) const = 0;

    /// "gguf", "fastokens", "hf" or "bytes".
    virtual std::string_view kind() const noexcept = 0;

    const TokenTable& table() const noexcept { return table_; }
    std::size_t vocab_size() const noexcept { return table_.size(); }
    std::optional<TokenId> bos() const noexcept { return bos_; }
    std::optional<TokenId> eos() const noexcept { return eos_; }

  protected:
    TokenTable table_;
    std::optional<TokenId> bos_;
    std::optional<TokenId> eos_;
};

/// 256 ids of one byte each, then <|im_start|> 256, <|im_end|> 257 (EOS), <|endoftext|> 258 (BOS, never
/// added). Needs no file.
std::shared_ptr<const Tokenizer> MakeByteTokenizer();

}  // namespace rankgate::text
