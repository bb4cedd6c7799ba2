// SPDX-License-Identifier: Apache-2.0
// Msgpack values as JSON text: schemas that Python sends as objects, results of utility calls for admin
// answers. Cold path.
#pragma once

#include <string>

#include "wire/msgpack.h"

namespace rankgate::wire {

inline constexpr std::size_t kMaxJsonDepth = 128;

/// Appends the next value as JSON. Map keys that are not strings are written as strings ({5: 1} -> {"5":1});
/// binary data is taken for text (invalid bytes become U+FFFD), NaN, infinities and extensions become null.
/// False, with `out` as it was, when the bytes are broken or nested deeper than kMaxJsonDepth.
bool AppendJson(Reader& reader, std::string& out);

}  // namespace rankgate::wire
