// SPDX-License-Identifier: Apache-2.0
// The OpenAI error object, in one place: every body and event that says "this failed" is made here, so that
// all of them have the same four keys, the same bound and valid UTF-8 whatever the message quotes. Pure
// functions.
#pragma once

#include <cstddef>
#include <string>

#include "base/result.h"

namespace rankgate {

/// Longer messages are cut here: they may quote what a client sent.
inline constexpr std::size_t kMaxErrorMessage = 8192;
inline constexpr std::size_t kMaxErrorParam = 512;

/// {"error":{"message","type","param","code"}}; `param` and `code` are null when empty.
void AppendErrorJson(std::string& out, const Error& error);
std::string ErrorJson(const Error& error);

}  // namespace rankgate
