// SPDX-License-Identifier: Apache-2.0
#include "base/error_json.h"

#include <string_view>

#include "base/utf8.h"

namespace rankgate {
namespace {

/// A cut never leaves half a character behind.
std::string_view Bounded(std::string_view text, std::size_t limit) noexcept {
    if (text.size() <= limit) {
        return text;
    }
    text = text.substr(0, limit);
    return text.substr(0, text.size() - IncompleteUtf8Tail(text));
}

}  // namespace

void AppendErrorJson(std::string& out, const Error& error) {
    out += R"({"error":{"message":)";
    AppendJsonString(out, Bounded(error.message, kMaxErrorMessage));
    out += R"(,"type":)";
    AppendJsonString(out, OpenAiType(error.code));
    out += R"(,"param":)";
    AppendJsonStringOrNull(out, Bounded(error.param, kMaxErrorParam));
    out += R"(,"code":)";
    AppendJsonStringOrNull(out, OpenAiCode(error.code));
    out += "}}";
}

std::string ErrorJson(const Error& error) {
    std::string out;
    AppendErrorJson(out, error);
    return out;
}

}  // namespace rankgate
