// SPDX-License-Identifier: Apache-2.0
#include "wire/msgpack_json.h"

#include <charconv>
#include <cmath>
#include <cstdint>

#include "base/utf8.h"

namespace rankgate::wire {

namespace {

template <class T>
void AppendNumber(std::string& out, T value) {
    char digits[32];
    const auto [end, error] = std::to_chars(digits, digits + sizeof digits, value);
    (void)error;  // 32 bytes hold the shortest form of every double and 64-bit integer
    out.append(digits, end);
}

bool AppendInt(Reader& reader, std::string& out) {
    std::int64_t value = 0;
    if (reader.ReadInt(value)) {
        AppendNumber(out, value);
        return true;
    }
    std::uint64_t wide = 0;
    if (reader.error() != MsgError::kOutOfRange || !reader.Recover() || !reader.ReadUint(wide)) {
        return false;
    }
    AppendNumber(out, wide);
    return true;
}

bool AppendValue(Reader& reader, std::string& out, std::size_t depth);

bool AppendKey(Reader& reader, std::string& out) {
    std::string_view text;
    switch (reader.Peek()) {
        case MsgType::kStr:
            if (!reader.ReadStr(text)) {
                return false;
            }
            AppendJsonString(out, text);
            return true;
        case MsgType::kInt: {
            out.push_back('"');
            if (!AppendInt(reader, out)) {
                return false;
            }
            out.push_back('"');
            return true;
        }
        default:
            if (!reader.ReadRaw(text)) {
                return false;
            }
            out.append("\"?\"");
            return true;
    }
}

bool AppendValue(Reader& reader, std::string& out, std::size_t depth) {
    if (depth > kMaxJsonDepth) {
        return reader.Reject(reader.offset());
    }
    std::string_view bytes;
    switch (reader.Peek()) {
        case MsgType::kNil:
            out.append("null");
            return reader.ReadNil();
        case MsgType::kBool: {
            bool value = false;
            if (!reader.ReadBool(value)) {
                return false;
            }
            out.append(value ? "true" : "false");
            return true;
        }
        case MsgType::kInt:
            return AppendInt(reader, out);
        case MsgType::kFloat: {
            double value = 0.0;
            if (!reader.ReadDouble(value)) {
                return false;
            }
            if (std::isfinite(value)) {
                AppendNumber(out, value);
            } else {
                out.append("null");
            }
            return true;
        }
        case MsgType::kStr:
            if (!reader.ReadStr(bytes)) {
                return false;
            }
            AppendJsonString(out, bytes);
            return true;
        case MsgType::kBin:
            if (!reader.ReadBin(bytes)) {
                return false;
            }
            AppendJsonString(out, bytes);
            return true;
        case MsgType::kArray: {
            std::uint32_t count = 0;
            if (!reader.ReadArray(count)) {
                return false;
            }
            out.push_back('[');
            for (std::uint32_t i = 0; i < count; ++i) {
                if (i != 0) {
                    out.push_back(',');
                }
                if (!AppendValue(reader, out, depth + 1)) {
                    return false;
                }
            }
            out.push_back(']');
            return true;
        }
        case MsgType::kMap: {
            std::uint32_t pairs = 0;
            if (!reader.ReadMap(pairs)) {
                return false;
            }
            out.push_back('{');
            for (std::uint32_t i = 0; i < pairs; ++i) {
                if (i != 0) {
                    out.push_back(',');
                }
                if (!AppendKey(reader, out)) {
                    return false;
                }
                out.push_back(':');
                if (!AppendValue(reader, out, depth + 1)) {
                    return false;
                }
            }
            out.push_back('}');
            return true;
        }
        default:
            if (!reader.ReadRaw(bytes)) {
                return false;
            }
            out.append("null");
            return true;
    }
}

}  // namespace

bool AppendJson(Reader& reader, std::string& out) {
    const std::size_t start = out.size();
    if (AppendValue(reader, out, 0)) {
        return true;
    }
    out.resize(start);
    return false;
}

}  // namespace rankgate::wire
