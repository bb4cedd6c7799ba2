// SPDX-License-Identifier: Apache-2.0
#include "api/json_scan.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <system_error>

namespace rankgate::api {
namespace {

int HexValue(char c) noexcept {
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    if (c >= 'a' && c <= 'f') {
        return c - 'a' + 10;
    }
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

// The code unit of "uXXXX" at `at`, or -1.
int CodeUnit(std::string_view json, std::size_t at) noexcept {
    if (at + 5 > json.size() || json[at] != 'u') {
        return -1;
    }
    int unit = 0;
    for (std::size_t i = 1; i <= 4; ++i) {
        const int digit = HexValue(json[at + i]);
        if (digit < 0) {
            return -1;
        }
        unit = unit * 16 + digit;
    }
    return unit;
}

bool Representable(std::string_view number) noexcept {
    if (number.find_first_of(".eE") == std::string_view::npos) {
        std::int64_t as_signed = 0;
        std::uint64_t as_unsigned = 0;
        const char* end = number.data() + number.size();
        return std::from_chars(number.data(), end, as_signed).ec == std::errc{} ||
               std::from_chars(number.data(), end, as_unsigned).ec == std::errc{};
    }
    double value = 0;
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), value);
    // Out of range on the small side is a plain zero; only the large side has no value.
    return error != std::errc::result_out_of_range || number.find('-', 1) != std::string_view::npos;
}

bool IsNumberChar(char c) noexcept {
    return (c >= '0' && c <= '9') || c == '-' || c == '+' || c == '.' || c == 'e' || c == 'E';
}

}  // namespace

bool HasLoneSurrogate(std::string_view json) noexcept {
    std::size_t at = 0;
    while (at < json.size()) {
        const void* found = std::memchr(json.data() + at, '\\', json.size() - at);
        if (found == nullptr) {
            return false;
        }
        at = static_cast<std::size_t>(static_cast<const char*>(found) - json.data()) + 1;
        const int unit = CodeUnit(json, at);
        if (unit < 0) {
            ++at;  // another escape: its character is not looked at, so that \\u is not taken for \u
            continue;
        }
        at += 5;
        if (unit >= 0xDC00 && unit <= 0xDFFF) {
            return true;
        }
        if (unit >= 0xD800 && unit <= 0xDBFF) {
            if (at >= json.size() || json[at] != '\\') {
                return true;
            }
            const int low = CodeUnit(json, at + 1);
            if (low < 0xDC00 || low > 0xDFFF) {
                return true;
            }
            at += 6;
        }
    }
    return false;
}

std::string KeyOfUnrepresentableNumber(std::string_view json) {
    std::string_view key;
    int depth = 0;
    std::size_t at = 0;
    bool expect_key = false;
    while (at < json.size()) {
        const char c = json[at];
        if (c == '"') {
            const std::size_t begin = ++at;
            while (at < json.size() && json[at] != '"') {
                at += json[at] == '\\' ? 2 : 1;
            }
            if (depth == 1 && expect_key) {
                key = json.substr(begin, std::min(at, json.size()) - begin);
                expect_key = false;
            }
            ++at;
        } else if (c == '{' || c == '[') {
            expect_key = ++depth == 1 && c == '{';
            ++at;
        } else if (c == '}' || c == ']') {
            --depth;
            ++at;
        } else if (c == ',') {
            expect_key = depth == 1;
            ++at;
        } else if (c == '-' || (c >= '0' && c <= '9')) {
            const std::size_t begin = at;
            while (at < json.size() && IsNumberChar(json[at])) {
                ++at;
            }
            if (!Representable(json.substr(begin, at - begin))) {
                return std::string{key};
            }
        } else {
            ++at;
        }
    }
    return {};
}

std::size_t NestingOf(std::string_view json) noexcept {
    std::size_t depth = 0;
    std::size_t deepest = 0;
    bool in_string = false;
    for (std::size_t i = 0; i < json.size(); ++i) {
        const char c = json[i];
        if (in_string) {
            if (c == '\\') {
                ++i;
            } else {
                in_string = c != '"';
            }
        } else if (c == '"') {
            in_string = true;
        } else if (c == '[' || c == '{') {
            deepest = std::max(deepest, ++depth);
        } else if (c == ']' || c == '}') {
            depth -= depth > 0 ? 1 : 0;
        }
    }
    return deepest;
}

}  // namespace rankgate::api
