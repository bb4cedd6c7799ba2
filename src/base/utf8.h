// SPDX-License-Identifier: Apache-2.0
// UTF-8 and JSON-string helpers that more than one module needs. Pure functions.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace rankgate {

/// Length in bytes of the longest prefix of `text` that is valid UTF-8 (no overlongs, no surrogates, <=
/// U+10FFFF).
std::size_t ValidUtf8Prefix(std::string_view text) noexcept;
inline bool IsValidUtf8(std::string_view text) noexcept {
    return ValidUtf8Prefix(text) == text.size();
}

/// Bytes at the end of `text` that begin a valid but incomplete sequence (0..3): what a stream holds back.
std::size_t IncompleteUtf8Tail(std::string_view text) noexcept;

/// Appends `text` with one U+FFFD per maximal invalid subpart (the WHATWG and Rust lossy rule).
void AppendLossyUtf8(std::string& out, std::string_view text);
std::string ToValidUtf8(std::string_view text);

/// Appends `text` as the inside of a JSON string. Valid UTF-8 stays raw except ", \, controls and
/// U+2028/U+2029/U+0085 (old SSE parsers split lines there); invalid bytes become U+FFFD.
void AppendJsonEscaped(std::string& out, std::string_view text);
/// The same between quotes.
void AppendJsonString(std::string& out, std::string_view text);
/// `null` for an empty text.
void AppendJsonStringOrNull(std::string& out, std::string_view text);

}  // namespace rankgate
