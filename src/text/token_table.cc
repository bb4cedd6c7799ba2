// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "text/tokenizer.h"

namespace rankgate::text {

void TokenTable::Builder::Add(std::string_view bytes, std::uint8_t flags) {
    blob_.append(bytes);
    offsets_.push_back(static_cast<std::uint32_t>(blob_.size()));
    flags_.push_back(flags);
}

TokenTable TokenTable::Builder::Build(bool strips_leading_space) && {
    TokenTable table;
    // Holes at the end are no tokens at all.
    while (!flags_.empty() && (flags_.back() & kHole) != 0) {
        flags_.pop_back();
        offsets_.pop_back();
    }
    table.blob_ = std::move(blob_);
    table.offsets_ = std::move(offsets_);
    table.flags_ = std::move(flags_);
    table.strips_leading_space_ = strips_leading_space;
    for (std::size_t id = 0; id < table.flags_.size(); ++id) {
        table.max_token_bytes_ =
            std::max<std::size_t>(table.max_token_bytes_, table.offsets_[id + 1] - table.offsets_[id]);
        if ((table.flags_[id] & (kAdded | kSpecial)) != 0) {
            table.added_.push_back(static_cast<TokenId>(id));
        }
    }
    // Stable: where two ids share a literal the lower one is found.
    std::stable_sort(table.added_.begin(), table.added_.end(),
                     [&](TokenId a, TokenId b) { return table.bytes(a) < table.bytes(b); });
    return table;
}

std::optional<TokenId> TokenTable::Find(std::string_view literal) const noexcept {
    const auto at = std::lower_bound(added_.begin(), added_.end(), literal,
                                     [&](TokenId id, std::string_view want) { return bytes(id) < want; });
    if (at == added_.end() || bytes(*at) != literal) {
        return std::nullopt;
    }
    return *at;
}

}  // namespace rankgate::text
