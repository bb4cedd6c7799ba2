// SPDX-License-Identifier: Apache-2.0
#include "text/detokenizer.h"

#include <cstring>

#include "base/utf8.h"

namespace rankgate::text {

void Detokenizer::Append(std::span<const TokenId> ids, std::string& out) {
    for (const TokenId id : ids) {
        const std::uint8_t flags = table_->flags(id);
        if ((flags & TokenTable::kHole) != 0) {
            continue;
        }
        if ((flags & TokenTable::kSpecial) != 0 && options_.skip_special_tokens) {
            continue;
        }
        std::string_view bytes = table_->bytes(id);
        // Literal text of an added token is no sentencepiece piece: its own leading space (if any) is meant.
        if (!started_ && options_.at_text_start && table_->strips_leading_space() &&
            (flags & TokenTable::kAdded) == 0 && bytes.starts_with(' ')) {
            bytes.remove_prefix(1);
        }
        started_ = true;
        if (!bytes.empty()) {
            AppendBytes(bytes, out);
        }
    }
}

void Detokenizer::AppendBytes(std::string_view bytes, std::string& out) {
    if (held_size_ == 0) {
        const std::size_t valid = ValidUtf8Prefix(bytes);
        out.append(bytes.substr(0, valid));
        bytes.remove_prefix(valid);
        if (bytes.empty()) {
            return;
        }
        const std::size_t tail = IncompleteUtf8Tail(bytes);
        AppendLossyUtf8(out, bytes.substr(0, bytes.size() - tail));
        std::memcpy(held_.data(), bytes.data() + (bytes.size() - tail), tail);
        held_size_ = static_cast<std::uint8_t>(tail);
        return;
    }
    // Complete (or give up on) the held character byte by byte; the rest takes the path above.
    while (held_size_ != 0 && !bytes.empty()) {
        held_[held_size_] = bytes.front();
        const std::string_view joined{held_.data(), held_size_ + std::size_t{1}};
        if (ValidUtf8Prefix(joined) == joined.size()) {
            out.append(joined);
            held_size_ = 0;
            bytes.remove_prefix(1);
        } else if (IncompleteUtf8Tail(joined) == joined.size()) {
            ++held_size_;
            bytes.remove_prefix(1);
        } else {
            // The new byte does not belong: what was held is one maximal invalid subpart, the byte starts
            // afresh.
            AppendLossyUtf8(out, {held_.data(), held_size_});
            held_size_ = 0;
        }
    }
    if (!bytes.empty()) {
        AppendBytes(bytes, out);
    }
}

void Detokenizer::Flush(std::string& out) {
    AppendLossyUtf8(out, {held_.data(), held_size_});
    held_size_ = 0;
    started_ = false;
}

std::string Detokenize(const TokenTable& table, std::span<const TokenId> ids, Detokenizer::Options options) {
    std::string out;
    Detokenizer detokenizer{table, options};
    detokenizer.Append(ids, out);
    detokenizer.Flush(out);
    return out;
}

}  // namespace rankgate::text
