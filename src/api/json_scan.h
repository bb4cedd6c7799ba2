// SPDX-License-Identifier: Apache-2.0
// Looks at JSON text that the parser has not accepted (or would accept too readily): lone surrogates, and
// which field holds a number that fits no type. Pure functions on untrusted bytes, linear, no recursion.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace rankgate::api {

/// True if a \uXXXX escape is one half of a surrogate pair without the other half.
bool HasLoneSurrogate(std::string_view json) noexcept;

/// The top-level key of an object whose value holds the first number that no 64-bit integer and no finite
/// double can hold; empty if there is none.
std::string KeyOfUnrepresentableNumber(std::string_view json);

/// How deep the brackets and braces of valid JSON text nest.
std::size_t NestingOf(std::string_view json) noexcept;

}  // namespace rankgate::api
