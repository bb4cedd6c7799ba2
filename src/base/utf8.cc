// SPDX-License-Identifier: Apache-2.0
#include "base/utf8.h"

#include <cstdint>

namespace rankgate {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

// What stands at the head of some bytes: a whole sequence, one that is cut short, or an invalid subpart.
struct Sequence {
    std::size_t size;  // bytes of the sequence or of the maximal invalid subpart
    enum class Kind : std::uint8_t { kValid, kIncomplete, kInvalid } kind;
};

Sequence Head(std::string_view text) noexcept {
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
    const unsigned char lead = byte(0);
    if (lead < 0x80) {
        return {1, Sequence::Kind::kValid};
    }
    std::size_t need = 0;
    unsigned char low = 0x80;
    unsigned char high = 0xBF;
    if (lead >= 0xC2 && lead <= 0xDF) {
        need = 2;
    } else if (lead >= 0xE0 && lead <= 0xEF) {
        need = 3;
        low = lead == 0xE0 ? 0xA0 : 0x80;   // overlong
        high = lead == 0xED ? 0x9F : 0xBF;  // surrogates
    } else if (lead >= 0xF0 && lead <= 0xF4) {
        need = 4;
        low = lead == 0xF0 ? 0x90 : 0x80;
        high = lead == 0xF4 ? 0x8F : 0xBF;
    } else {
        return {1, Sequence::Kind::kInvalid};
    }
    for (std::size_t i = 1; i < need; ++i) {
        if (i == text.size()) {
            return {i, Sequence::Kind::kIncomplete};
        }
        if (byte(i) < low || byte(i) > high) {
            return {i, Sequence::Kind::kInvalid};
        }
        low = 0x80;
        high = 0xBF;
    }
    return {need, Sequence::Kind::kValid};
}

}  // namespace

std::size_t ValidUtf8Prefix(std::string_view text) noexcept {
    std::size_t at = 0;
    while (at < text.size()) {
        const Sequence head = Head(text.substr(at));
        if (head.kind != Sequence::Kind::kValid) {
            break;
        }
        at += head.size;
    }
    return at;
}

std::size_t IncompleteUtf8Tail(std::string_view text) noexcept {
    // A sequence has at most three bytes before its last one; look for its lead byte that far back.
    for (std::size_t back = 1; back <= 3 && back <= text.size(); ++back) {
        const auto byte = static_cast<unsigned char>(text[text.size() - back]);
        if ((byte & 0xC0) == 0x80) {
            continue;
        }
        const Sequence head = Head(text.substr(text.size() - back));
        return head.kind == Sequence::Kind::kIncomplete && head.size == back ? back : 0;
    }
    return 0;
}

void AppendLossyUtf8(std::string& out, std::string_view text) {
    std::size_t at = 0;
    while (at < text.size()) {
        const std::size_t run = ValidUtf8Prefix(text.substr(at));
        out.append(text, at, run);
        at += run;
        if (at < text.size()) {
            out += kReplacement;
            at += Head(text.substr(at)).size;
        }
    }
}

std::string ToValidUtf8(std::string_view text) {
    std::string out;
    out.reserve(text.size());
    AppendLossyUtf8(out, text);
    return out;
}

void AppendJsonString(std::string& out, std::string_view text) {
    out += '"';
    AppendJsonEscaped(out, text);
    out += '"';
}

void AppendJsonStringOrNull(std::string& out, std::string_view text) {
    if (text.empty()) {
        out += "null";
    } else {
        AppendJsonString(out, text);
    }
}

void AppendJsonEscaped(std::string& out, std::string_view text) {
    static constexpr char kHex[] = "0123456789abcdef";
    std::size_t run = 0;  // start of the bytes not copied yet
    std::size_t at = 0;
    const auto flush = [&] { out.append(text, run, at - run); };
    while (at < text.size()) {
        const auto byte = static_cast<unsigned char>(text[at]);
        if (byte >= 0x20 && byte < 0x80 && byte != '"' && byte != '\\') {
            ++at;
            continue;
        }
        if (byte >= 0x80) {
            const Sequence head = Head(text.substr(at));
            if (head.kind != Sequence::Kind::kValid) {
                flush();
                out += kReplacement;
                at += head.size;
                run = at;
                continue;
            }
            const std::string_view sequence = text.substr(at, head.size);
            const char* escape = sequence == "\xE2\x80\xA8"   ? "\\u2028"
                                 : sequence == "\xE2\x80\xA9" ? "\\u2029"
                                 : sequence == "\xC2\x85"     ? "\\u0085"
                                                              : nullptr;
            if (escape != nullptr) {
                flush();
                out += escape;
                at += head.size;
                run = at;
                continue;
            }
            at += head.size;
            continue;
        }
        flush();
        switch (byte) {
            case '"':
                out += "\\\"";
                break;
            case '\\':
                out += "\\\\";
                break;
            case '\n':
                out += "\\n";
                break;
            case '\r':
                out += "\\r";
                break;
            case '\t':
                out += "\\t";
                break;
            default:
                out += "\\u00";
                out += kHex[byte >> 4];
                out += kHex[byte & 15];
        }
        ++at;
        run = at;
    }
    flush();
}

}  // namespace rankgate
