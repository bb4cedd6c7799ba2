// SPDX-License-Identifier: Apache-2.0
// Detokenizer: the ids of one stream, as they come, into text that is always valid UTF-8. A table look-up per
// id; an incomplete character (at most three bytes) waits for its rest. It never decodes twice and never
// looks back, so the joined pieces equal the decoding of all ids at once by construction, and no sequence of
// ids can stall or fail it. Owned by a stream on its shard. Thread rule: one thread at a time. No allocation
// once `out` has its capacity.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "text/tokenizer.h"

namespace rankgate::text {

class Detokenizer {
  public:
    struct Options {
        bool skip_special_tokens{true};
        /// Strip the one space that a sentencepiece vocabulary writes in front of a text. False when the text
        /// continues another.
        bool at_text_start{true};
    };

    /// `table` must outlive the detokenizer (the model's assets do).
    Detokenizer(const TokenTable& table, Options options) noexcept : table_{&table}, options_{options} {}

    /// Appends what can be said after these ids. Bytes that no longer can become a character turn into one
    /// U+FFFD per maximal invalid subpart. Ids outside of the vocabulary add nothing.
    void Append(std::span<const TokenId> ids, std::string& out);
    void Append(TokenId id, std::string& out) { Append(std::span<const TokenId>{&id, 1}, out); }

    /// End of the stream: an incomplete character becomes U+FFFD. The object may be used again afterwards as
    /// for a new text.
    void Flush(std::string& out);

    /// Bytes held back now (0..3).
    std::size_t held() const noexcept { return held_size_; }

  private:
    void AppendBytes(std::string_view bytes, std::string& out);

    const TokenTable* table_;
    Options options_;
    std::array<char, 4> held_{};
    std::uint8_t held_size_{0};
    bool started_{false};
};

/// The whole text of some ids (non-streaming replies, /detokenize).
std::string Detokenize(const TokenTable& table, std::span<const TokenId> ids, Detokenizer::Options options);

}  // namespace rankgate::text
