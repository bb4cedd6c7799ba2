// SPDX-License-Identifier: Apache-2.0
#include "wire/msgpack.h"

#include "base/check.h"

namespace rankgate::wire {

using internal::LoadBig;

std::string_view MsgErrorName(MsgError error) noexcept {
    switch (error) {
        case MsgError::kNone:
            return "none";
        case MsgError::kTruncated:
            return "truncated";
        case MsgError::kWrongType:
            return "wrong type";
        case MsgError::kOutOfRange:
            return "out of range";
        case MsgError::kBadLength:
            return "length exceeds the frame";
        case MsgError::kReserved:
            return "reserved byte 0xc1";
        case MsgError::kTooLarge:
            return "frame too large";
    }
    return "unknown";
}

MsgType Reader::TypeOf(std::uint8_t head) noexcept {
    if (head < 0x80 || head >= 0xe0) {
        return MsgType::kInt;
    }
    if (head < 0x90) {
        return MsgType::kMap;
    }
    if (head < 0xa0) {
        return MsgType::kArray;
    }
    if (head < 0xc0) {
        return MsgType::kStr;
    }
    switch (head) {
        case 0xc0:
            return MsgType::kNil;
        case 0xc1:
            return MsgType::kReserved;
        case 0xc2:
        case 0xc3:
            return MsgType::kBool;
        case 0xc4:
        case 0xc5:
        case 0xc6:
            return MsgType::kBin;
        case 0xc7:
        case 0xc8:
        case 0xc9:
            return MsgType::kExt;
        case 0xca:
        case 0xcb:
            return MsgType::kFloat;
        case 0xd9:
        case 0xda:
        case 0xdb:
            return MsgType::kStr;
        case 0xdc:
        case 0xdd:
            return MsgType::kArray;
        case 0xde:
        case 0xdf:
            return MsgType::kMap;
        default:
            return head >= 0xd4 && head <= 0xd8 ? MsgType::kExt : MsgType::kInt;
    }
}

bool Reader::TakeBytes(std::size_t header, std::size_t size, std::string_view& value) noexcept {
    if (remaining() - header < size) {
        return Fail(MsgError::kTruncated, at_);
    }
    value = {at_ + header, size};
    at_ += header + size;
    return true;
}

bool Reader::ReadIntSlow(std::int64_t& value) noexcept {
    value = 0;
    if (at_ == end_) {
        return Fail(MsgError::kTruncated, at_);
    }
    const auto head = static_cast<std::uint8_t>(*at_);
    if (head < 0x80) {
        value = head;
        ++at_;
        return true;
    }
    if (head >= 0xe0) {
        value = std::int64_t{head} - 256;
        ++at_;
        return true;
    }
    if (head < 0xcc || head > 0xd3) {
        return FailType();
    }
    const std::size_t width = std::size_t{1}
                              << (head & 3);  // cc..cf unsigned, d0..d3 signed: 1, 2, 4, 8 bytes
    if (remaining() <= width) {
        return Fail(MsgError::kTruncated, at_);
    }
    const char* const body = at_ + 1;
    switch (head) {
        case 0xcc:
            value = static_cast<std::uint8_t>(*body);
            break;
        case 0xcd:
            value = LoadBig<std::uint16_t>(body);
            break;
        case 0xce:
            value = LoadBig<std::uint32_t>(body);
            break;
        case 0xcf: {
            const auto wide = LoadBig<std::uint64_t>(body);
            if (wide > static_cast<std::uint64_t>(INT64_MAX)) {
                return Fail(MsgError::kOutOfRange, at_);
            }
            value = static_cast<std::int64_t>(wide);
            break;
        }
        case 0xd0:
            value = std::int64_t{static_cast<std::uint8_t>(*body)};
            value -= value < 0x80 ? 0 : 256;
            break;
        case 0xd1:
            value = static_cast<std::int16_t>(LoadBig<std::uint16_t>(body));
            break;
        case 0xd2:
            value = static_cast<std::int32_t>(LoadBig<std::uint32_t>(body));
            break;
        default:
            value = static_cast<std::int64_t>(LoadBig<std::uint64_t>(body));
            break;
    }
    at_ = body + width;
    return true;
}

bool Reader::ReadUint(std::uint64_t& value) noexcept {
    value = 0;
    if (remaining() >= 9 && static_cast<std::uint8_t>(*at_) == 0xcf) {
        value = LoadBig<std::uint64_t>(at_ + 1);
        at_ += 9;
        return true;
    }
    const char* const start = at_;
    std::int64_t narrow = 0;
    if (!ReadInt(narrow)) {
        return false;
    }
    if (narrow < 0) {
        return Fail(MsgError::kOutOfRange, start);
    }
    value = static_cast<std::uint64_t>(narrow);
    return true;
}

bool Reader::ReadDouble(double& value) noexcept {
    value = 0.0;
    if (at_ == end_) {
        return Fail(MsgError::kTruncated, at_);
    }
    const auto head = static_cast<std::uint8_t>(*at_);
    if (head == 0xcb) {
        if (remaining() < 9) {
            return Fail(MsgError::kTruncated, at_);
        }
        value = std::bit_cast<double>(LoadBig<std::uint64_t>(at_ + 1));
        at_ += 9;
        return true;
    }
    if (head == 0xca) {
        if (remaining() < 5) {
            return Fail(MsgError::kTruncated, at_);
        }
        value = static_cast<double>(std::bit_cast<float>(LoadBig<std::uint32_t>(at_ + 1)));
        at_ += 5;
        return true;
    }
    if (head == 0xcf) {
        std::uint64_t wide = 0;
        const bool read = ReadUint(wide);
        value = static_cast<double>(wide);
        return read;
    }
    std::int64_t integer = 0;
    if (!ReadInt(integer)) {
        return false;
    }
    value = static_cast<double>(integer);
    return true;
}

bool Reader::ReadStrSlow(std::string_view& value) noexcept {
    value = {};
    if (at_ == end_) {
        return Fail(MsgError::kTruncated, at_);
    }
    const auto head = static_cast<std::uint8_t>(*at_);
    if ((head & 0xe0) == 0xa0) {
        return TakeBytes(1, head & 0x1f, value);
    }
    if (head < 0xd9 || head > 0xdb) {
        return FailType();
    }
    const std::size_t width = std::size_t{1} << (head - 0xd9);
    if (remaining() <= width) {
        return Fail(MsgError::kTruncated, at_);
    }
    const std::size_t size = head == 0xd9   ? static_cast<std::uint8_t>(at_[1])
                             : head == 0xda ? LoadBig<std::uint16_t>(at_ + 1)
                                            : LoadBig<std::uint32_t>(at_ + 1);
    return TakeBytes(1 + width, size, value);
}

bool Reader::ReadBin(std::string_view& value) noexcept {
    value = {};
    const auto head = at_ == end_ ? std::uint8_t{0} : static_cast<std::uint8_t>(*at_);
    if (head < 0xc4 || head > 0xc6) {
        return FailType();
    }
    const std::size_t width = std::size_t{1} << (head - 0xc4);
    if (remaining() <= width) {
        return Fail(MsgError::kTruncated, at_);
    }
    const std::size_t size = head == 0xc4   ? static_cast<std::uint8_t>(at_[1])
                             : head == 0xc5 ? LoadBig<std::uint16_t>(at_ + 1)
                                            : LoadBig<std::uint32_t>(at_ + 1);
    return TakeBytes(1 + width, size, value);
}

bool Reader::ReadExt(std::int8_t& type, std::string_view& data) noexcept {
    type = 0;
    data = {};
    const auto head = at_ == end_ ? std::uint8_t{0} : static_cast<std::uint8_t>(*at_);
    if (head >= 0xd4 && head <= 0xd8) {
        if (remaining() < 2) {
            return Fail(MsgError::kTruncated, at_);
        }
        const auto code = static_cast<std::int8_t>(at_[1]);
        if (!TakeBytes(2, std::size_t{1} << (head - 0xd4), data)) {
            return false;
        }
        type = code;
        return true;
    }
    if (head < 0xc7 || head > 0xc9) {
        return FailType();
    }
    const std::size_t width = std::size_t{1} << (head - 0xc7);
    if (remaining() < 2 + width) {
        return Fail(MsgError::kTruncated, at_);
    }
    const std::size_t size = head == 0xc7   ? static_cast<std::uint8_t>(at_[1])
                             : head == 0xc8 ? LoadBig<std::uint16_t>(at_ + 1)
                                            : LoadBig<std::uint32_t>(at_ + 1);
    const auto code = static_cast<std::int8_t>(at_[1 + width]);
    if (!TakeBytes(2 + width, size, data)) {
        return false;
    }
    type = code;
    return true;
}

bool Reader::ReadArraySlow(std::uint32_t& count) noexcept {
    count = 0;
    if (at_ == end_) {
        return Fail(MsgError::kTruncated, at_);
    }
    const char* const start = at_;
    const auto head = static_cast<std::uint8_t>(*at_);
    std::size_t header = 1;
    std::uint32_t elements = head & 0x0f;
    if (head == 0xdc) {
        header = 3;
    } else if (head == 0xdd) {
        header = 5;
    } else if ((head & 0xf0) != 0x90) {
        return FailType();
    }
    if (remaining() < header) {
        return Fail(MsgError::kTruncated, start);
    }
    if (header == 3) {
        elements = LoadBig<std::uint16_t>(at_ + 1);
    } else if (header == 5) {
        elements = LoadBig<std::uint32_t>(at_ + 1);
    }
    if (remaining() - header < elements) {
        return Fail(MsgError::kBadLength, start);
    }
    at_ += header;
    count = elements;
    return true;
}

bool Reader::ReadMap(std::uint32_t& count) noexcept {
    count = 0;
    if (at_ == end_) {
        return Fail(MsgError::kTruncated, at_);
    }
    const char* const start = at_;
    const auto head = static_cast<std::uint8_t>(*at_);
    std::size_t header = 1;
    std::uint32_t pairs = head & 0x0f;
    if (head == 0xde) {
        header = 3;
    } else if (head == 0xdf) {
        header = 5;
    } else if ((head & 0xf0) != 0x80) {
        return FailType();
    }
    if (remaining() < header) {
        return Fail(MsgError::kTruncated, start);
    }
    if (header == 3) {
        pairs = LoadBig<std::uint16_t>(at_ + 1);
    } else if (header == 5) {
        pairs = LoadBig<std::uint32_t>(at_ + 1);
    }
    if ((remaining() - header) / 2 < pairs) {
        return Fail(MsgError::kBadLength, start);
    }
    at_ += header;
    count = pairs;
    return true;
}

bool Reader::Skip(std::uint64_t values) noexcept {
    // `pending` counts values still owed; every one of them costs at least a byte, so it may never exceed
    // what is left.
    std::uint64_t pending = values;
    while (pending != 0) {
        if (pending > remaining()) {
            return Fail(at_ == end_ ? MsgError::kTruncated : MsgError::kBadLength, at_);
        }
        --pending;
        const auto head = static_cast<std::uint8_t>(*at_);
        if (head < 0x80 || head >= 0xe0 || head == 0xc0 || head == 0xc2 || head == 0xc3) {
            ++at_;
            continue;
        }
        std::string_view bytes;
        std::uint32_t count = 0;
        switch (TypeOf(head)) {
            case MsgType::kArray:
                if (!ReadArray(count)) {
                    return false;
                }
                pending += count;
                break;
            case MsgType::kMap:
                if (!ReadMap(count)) {
                    return false;
                }
                pending += std::uint64_t{2} * count;
                break;
            case MsgType::kStr:
                if (!ReadStr(bytes)) {
                    return false;
                }
                break;
            case MsgType::kBin:
                if (!ReadBin(bytes)) {
                    return false;
                }
                break;
            case MsgType::kExt: {
                std::int8_t type = 0;
                if (!ReadExt(type, bytes)) {
                    return false;
                }
                break;
            }
            case MsgType::kInt:
            case MsgType::kFloat: {
                // ca, cc..cf, d0..d3: the width is all that matters.
                const std::size_t width = head == 0xca ? 4 : head == 0xcb ? 8 : std::size_t{1} << (head & 3);
                if (!TakeBytes(1, width, bytes)) {
                    return false;
                }
                break;
            }
            default:
                return FailType();
        }
    }
    return ok();
}

void Writer::Int(std::int64_t value) {
    if (value >= 0) {
        Uint(static_cast<std::uint64_t>(value));
    } else if (value >= -32) {
        out_->push_back(static_cast<char>(value));
    } else if (value >= INT8_MIN) {
        Head(0xd0, static_cast<std::uint8_t>(value));
    } else if (value >= INT16_MIN) {
        Head(0xd1, static_cast<std::uint16_t>(value));
    } else if (value >= INT32_MIN) {
        Head(0xd2, static_cast<std::uint32_t>(value));
    } else {
        Head(0xd3, static_cast<std::uint64_t>(value));
    }
}

void Writer::Uint(std::uint64_t value) {
    if (value < 0x80) {
        out_->push_back(static_cast<char>(value));
    } else if (value <= UINT8_MAX) {
        Head(0xcc, static_cast<std::uint8_t>(value));
    } else if (value <= UINT16_MAX) {
        Head(0xcd, static_cast<std::uint16_t>(value));
    } else if (value <= UINT32_MAX) {
        Head(0xce, static_cast<std::uint32_t>(value));
    } else {
        Head(0xcf, value);
    }
}

void Writer::Float(double value) {
    Head(0xcb, std::bit_cast<std::uint64_t>(value));
}

void Writer::Str(std::string_view value) {
    const std::size_t size = value.size();
    if (size < 32) {
        out_->push_back(static_cast<char>(0xa0 | size));
    } else if (size <= UINT8_MAX) {
        Head(0xd9, static_cast<std::uint8_t>(size));
    } else if (size <= UINT16_MAX) {
        Head(0xda, static_cast<std::uint16_t>(size));
    } else {
        RG_CHECK(size <= UINT32_MAX);
        Head(0xdb, static_cast<std::uint32_t>(size));
    }
    out_->append(value);
}

void Writer::Bin(std::string_view value) {
    const std::size_t size = value.size();
    if (size <= UINT8_MAX) {
        Head(0xc4, static_cast<std::uint8_t>(size));
    } else if (size <= UINT16_MAX) {
        Head(0xc5, static_cast<std::uint16_t>(size));
    } else {
        RG_CHECK(size <= UINT32_MAX);
        Head(0xc6, static_cast<std::uint32_t>(size));
    }
    out_->append(value);
}

void Writer::Ext(std::int8_t type, std::string_view data) {
    const std::size_t size = data.size();
    if (size == 1 || size == 2 || size == 4 || size == 8 || size == 16) {
        out_->push_back(static_cast<char>(0xd4 + std::countr_zero(size)));
    } else if (size <= UINT8_MAX) {
        Head(0xc7, static_cast<std::uint8_t>(size));
    } else if (size <= UINT16_MAX) {
        Head(0xc8, static_cast<std::uint16_t>(size));
    } else {
        RG_CHECK(size <= UINT32_MAX);
        Head(0xc9, static_cast<std::uint32_t>(size));
    }
    out_->push_back(static_cast<char>(type));
    out_->append(data);
}

void Writer::Array(std::size_t count) {
    if (count < 16) {
        out_->push_back(static_cast<char>(0x90 | count));
    } else if (count <= UINT16_MAX) {
        Head(0xdc, static_cast<std::uint16_t>(count));
    } else {
        RG_CHECK(count <= UINT32_MAX);
        Head(0xdd, static_cast<std::uint32_t>(count));
    }
}

void Writer::Map(std::size_t count) {
    if (count < 16) {
        out_->push_back(static_cast<char>(0x80 | count));
    } else if (count <= UINT16_MAX) {
        Head(0xde, static_cast<std::uint16_t>(count));
    } else {
        RG_CHECK(count <= UINT32_MAX);
        Head(0xdf, static_cast<std::uint32_t>(count));
    }
}

void Writer::Ints(std::span<const std::int32_t> values) {
    Array(values.size());
    if (values.size() == 1) {  // one token of a running stream
        Int(values[0]);
        return;
    }
    // Token ids: room for the longest form first, then plain stores; a prompt is thousands of these.
    const std::size_t start = out_->size();
    out_->resize(start + values.size() * 5);
    char* to = out_->data() + start;
    for (const std::int32_t value : values) {
        const auto bits = static_cast<std::uint32_t>(value);
        if (bits < 0x80) {
            *to++ = static_cast<char>(bits);
        } else if (value < 0) {
            if (value >= -32) {
                *to++ = static_cast<char>(bits);
            } else if (value >= INT8_MIN) {
                *to++ = '\xd0';
                *to++ = static_cast<char>(bits);
            } else if (value >= INT16_MIN) {
                *to++ = '\xd1';
                internal::StoreBig(to, static_cast<std::uint16_t>(bits));
                to += 2;
            } else {
                *to++ = '\xd2';
                internal::StoreBig(to, bits);
                to += 4;
            }
        } else if (bits <= UINT8_MAX) {
            *to++ = '\xcc';
            *to++ = static_cast<char>(bits);
        } else if (bits <= UINT16_MAX) {
            *to++ = '\xcd';
            internal::StoreBig(to, static_cast<std::uint16_t>(bits));
            to += 2;
        } else {
            *to++ = '\xce';
            internal::StoreBig(to, bits);
            to += 4;
        }
    }
    out_->resize(static_cast<std::size_t>(to - out_->data()));
}

}  // namespace rankgate::wire
