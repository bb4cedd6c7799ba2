// SPDX-License-Identifier: Apache-2.0
// Internal to wire/: helpers that the message decoders share. Two manners of reading a field: "Take" is
// tolerant (a value of the wrong type is skipped and the default stays), "Need" belongs to the decoders
// themselves. All return false only where the bytes are broken, which ends the whole message.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "base/utf8.h"
#include "wire/msgpack.h"

namespace rankgate::wire::internal {

/// "READY: block_size: wrong type"
inline Error FieldError(std::string_view message, std::string_view field, std::string_view reason) {
    std::string text{message};
    if (!field.empty()) {
        text.append(": ").append(field);
    }
    text.append(": ").append(reason);
    return Error{ErrorCode::kDecode, std::move(text), std::string{field}, false};
}
inline Error FieldError(std::string_view message, std::string_view field, MsgError reason) {
    return FieldError(message, field, MsgErrorName(reason));
}

inline bool SkipWrong(Reader& reader) noexcept {
    return reader.Recover() && reader.Skip();
}

inline bool TakeInt(Reader& reader, std::int64_t& value) noexcept {
    std::int64_t read = 0;
    if (!reader.ReadInt(read)) {
        return SkipWrong(reader);
    }
    value = read;
    return true;
}
inline bool TakeBool(Reader& reader, bool& value) noexcept {
    bool read = false;
    if (!reader.ReadBool(read)) {
        return SkipWrong(reader);
    }
    value = read;
    return true;
}
inline bool TakeDouble(Reader& reader, double& value) noexcept {
    double read = 0.0;
    if (!reader.ReadDouble(read)) {
        return SkipWrong(reader);
    }
    value = read;
    return true;
}
inline bool TakeView(Reader& reader, std::string_view& value) noexcept {
    std::string_view read;
    if (!reader.ReadStr(read)) {
        return SkipWrong(reader);
    }
    value = read;
    return true;
}
inline bool TakeStr(Reader& reader, std::string& value) {
    std::string_view read;
    if (!reader.ReadStr(read)) {
        return SkipWrong(reader);
    }
    value = ToValidUtf8(read);
    return true;
}
inline bool TakeOptionalInt(Reader& reader, std::optional<std::int64_t>& value) noexcept {
    std::int64_t read = 0;
    if (!reader.ReadInt(read)) {
        return SkipWrong(reader);
    }
    value = read;
    return true;
}
inline bool TakeOptionalDouble(Reader& reader, std::optional<double>& value) noexcept {
    double read = 0.0;
    if (!reader.ReadDouble(read)) {
        return SkipWrong(reader);
    }
    value = read;
    return true;
}
inline bool TakeOptionalStr(Reader& reader, std::optional<std::string>& value) {
    std::string_view read;
    if (!reader.ReadStr(read)) {
        return SkipWrong(reader);
    }
    value = ToValidUtf8(read);
    return true;
}

/// Reads a map key. Keys that are not strings come back empty (no message here has an empty key).
inline bool TakeKey(Reader& reader, std::string_view& key) noexcept {
    key = {};
    return TakeView(reader, key);
}

}  // namespace rankgate::wire::internal
