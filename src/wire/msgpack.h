// SPDX-License-Identifier: Apache-2.0
// MessagePack as the engines' Python encoder (msgspec) writes and reads it: a pull Reader over one frame and
// an appending Writer. The Reader allocates nothing, never recurses, never throws and never reads past its
// view; strings and binaries are views into the frame. Lengths are checked against the bytes that are left
// before anybody can reserve memory for them, so a header that lies (4 G elements in 6 bytes) fails at once,
// and Skip() is a loop whose work is bounded by the frame. Values, no thread rule.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

namespace rankgate::wire {

/// Largest payload frame that a decoder here looks at. Tensors travel beside the payload in frames of their
/// own.
inline constexpr std::size_t kMaxPayloadBytes = std::size_t{256} << 20;

enum class MsgType : std::uint8_t {
    kEnd,
    kNil,
    kBool,
    kInt,
    kFloat,
    kStr,
    kBin,
    kArray,
    kMap,
    kExt,
    kReserved
};

/// Why a Reader stopped. kWrongType and kOutOfRange leave the bytes intact: Recover() goes back to the value.
enum class MsgError : std::uint8_t {
    kNone,
    kTruncated,
    kWrongType,
    kOutOfRange,
    kBadLength,
    kReserved,
    kTooLarge
};
std::string_view MsgErrorName(MsgError error) noexcept;

namespace internal {
template <class T>
T LoadBig(const char* from) noexcept {
    T value;
    std::memcpy(&value, from, sizeof value);
    if constexpr (std::endian::native == std::endian::little && sizeof(T) > 1) {
        if constexpr (sizeof(T) == 2) {
            value = static_cast<T>(__builtin_bswap16(value));
        } else if constexpr (sizeof(T) == 4) {
            value = static_cast<T>(__builtin_bswap32(value));
        } else {
            value = static_cast<T>(__builtin_bswap64(value));
        }
    }
    return value;
}
template <class T>
void StoreBig(char* to, T value) noexcept {
    value = LoadBig<T>(reinterpret_cast<const char*>(&value));
    std::memcpy(to, &value, sizeof value);
}
}  // namespace internal

/// Pull reader. Every Read* returns false on failure and then so does every later one (the cursor is at the
/// end); the first failure is kept in error(). Usual form: read a whole struct, test ok() once.
class Reader {
  public:
    Reader() noexcept = default;
    explicit Reader(std::string_view bytes) noexcept
        : begin_{bytes.data()}, at_{begin_}, end_{begin_ + bytes.size()} {
        if (bytes.size() > kMaxPayloadBytes) {
            Fail(MsgError::kTooLarge, at_);
        }
    }

    bool ok() const noexcept { return error_ == MsgError::kNone; }
    MsgError error() const noexcept { return error_; }
    std::size_t remaining() const noexcept { return static_cast<std::size_t>(end_ - at_); }
    /// Offset of the cursor, or of the value that failed.
    std::size_t offset() const noexcept {
        return static_cast<std::size_t>((ok() ? at_ : failed_at_) - begin_);
    }
    /// Everything was read and nothing failed: a decoder that rejects trailing bytes asks this last.
    bool Done() const noexcept { return ok() && at_ == end_; }

    /// After kWrongType or kOutOfRange: clears the error and puts the cursor back on the offending value, so
    /// that it can be skipped. False when the bytes themselves are broken.
    bool Recover() noexcept {
        if (error_ != MsgError::kWrongType && error_ != MsgError::kOutOfRange) {
            return ok();
        }
        at_ = failed_at_;
        error_ = MsgError::kNone;
        return true;
    }
    /// Marks the value at `offset` as unacceptable for a reason of the caller's own.
    bool Reject(std::size_t at_offset) noexcept { return Fail(MsgError::kOutOfRange, begin_ + at_offset); }

    MsgType Peek() const noexcept {
        return at_ == end_ ? MsgType::kEnd : TypeOf(static_cast<std::uint8_t>(*at_));
    }
    bool PeekNil() const noexcept { return at_ != end_ && static_cast<std::uint8_t>(*at_) == 0xc0; }

    /// Consumes a nil if there is one; says whether.
    bool TryNil() noexcept {
        if (PeekNil()) {
            ++at_;
            return true;
        }
        return false;
    }
    bool ReadNil() noexcept { return TryNil() || FailType(); }

    /// Consumes exactly these bytes if they come next; says whether. For runs of values that nearly always
    /// are the same.
    bool TryExact(std::string_view bytes) noexcept {
        if (remaining() >= bytes.size() && std::memcmp(at_, bytes.data(), bytes.size()) == 0) {
            at_ += bytes.size();
            return true;
        }
        return false;
    }

    bool ReadBool(bool& value) noexcept {
        value = false;
        if (at_ == end_) {
            return Fail(MsgError::kTruncated, at_);
        }
        const auto head = static_cast<std::uint8_t>(*at_);
        if (head != 0xc2 && head != 0xc3) {
            return FailType();
        }
        value = head == 0xc3;
        ++at_;
        return true;
    }

    /// Any integer that fits (a float never does, a bool never does).
    bool ReadInt(std::int64_t& value) noexcept {
        if (at_ != end_) [[likely]] {
            const auto head = static_cast<std::uint8_t>(*at_);
            if (head < 0x80) {
                value = head;
                ++at_;
                return true;
            }
            if (head == 0xcd && remaining() >= 3) {  // token ids are mostly these two
                value = internal::LoadBig<std::uint16_t>(at_ + 1);
                at_ += 3;
                return true;
            }
            if (head == 0xce && remaining() >= 5) {
                value = internal::LoadBig<std::uint32_t>(at_ + 1);
                at_ += 5;
                return true;
            }
        }
        return ReadIntSlow(value);
    }
    bool ReadUint(std::uint64_t& value) noexcept;
    /// An integer within [low, high].
    template <class T>
    bool ReadIntIn(T& value, std::int64_t low, std::int64_t high) noexcept {
        const char* const start = at_;
        std::int64_t wide = 0;
        value = T{};
        if (!ReadInt(wide)) {
            return false;
        }
        if (wide < low || wide > high) [[unlikely]] {
            return Fail(MsgError::kOutOfRange, start);
        }
        value = static_cast<T>(wide);
        return true;
    }
    bool ReadInt32(std::int32_t& value) noexcept { return ReadIntIn(value, INT32_MIN, INT32_MAX); }

    /// float64, float32, or an integer (as msgspec does where a float is declared). NaN and infinities pass.
    bool ReadDouble(double& value) noexcept;

    bool ReadStr(std::string_view& value) noexcept {
        if (at_ != end_) [[likely]] {
            const auto head = static_cast<std::uint8_t>(*at_);
            if ((head & 0xe0) == 0xa0) {
                const std::size_t size = head & 0x1f;
                if (remaining() > size) [[likely]] {
                    value = {at_ + 1, size};
                    at_ += size + 1;
                    return true;
                }
            }
        }
        return ReadStrSlow(value);
    }
    bool ReadBin(std::string_view& value) noexcept;
    bool ReadExt(std::int8_t& type, std::string_view& data) noexcept;

    /// Number of elements that follow; never more than the bytes that are left.
    bool ReadArray(std::uint32_t& count) noexcept {
        if (at_ != end_) [[likely]] {
            const auto head = static_cast<std::uint8_t>(*at_);
            if ((head & 0xf0) == 0x90 && remaining() > (head & 0x0fU)) [[likely]] {
                count = head & 0x0f;
                ++at_;
                return true;
            }
            if (head == 0xdc && remaining() >= 3) {
                const std::uint32_t wide = internal::LoadBig<std::uint16_t>(at_ + 1);
                if (remaining() - 3 >= wide) [[likely]] {
                    count = wide;
                    at_ += 3;
                    return true;
                }
            }
        }
        return ReadArraySlow(count);
    }
    /// Number of key/value pairs that follow; never more than half the bytes that are left.
    bool ReadMap(std::uint32_t& count) noexcept;

    /// Steps over `values` whole values of any shape. Iterative.
    bool Skip(std::uint64_t values = 1) noexcept;
    /// Steps over one value and gives its bytes.
    bool ReadRaw(std::string_view& raw) noexcept {
        const char* const start = at_;
        if (!Skip()) {
            raw = {};
            return false;
        }
        raw = {start, static_cast<std::size_t>(at_ - start)};
        return true;
    }

    static MsgType TypeOf(std::uint8_t head) noexcept;

  private:
    bool Fail(MsgError error, const char* at) noexcept {
        if (error_ == MsgError::kNone) {
            error_ = error;
            failed_at_ = at;
        }
        at_ = end_;
        return false;
    }
    bool FailType() noexcept {
        if (at_ == end_) {
            return Fail(MsgError::kTruncated, at_);
        }
        return Fail(static_cast<std::uint8_t>(*at_) == 0xc1 ? MsgError::kReserved : MsgError::kWrongType,
                    at_);
    }
    bool ReadIntSlow(std::int64_t& value) noexcept;
    bool ReadStrSlow(std::string_view& value) noexcept;
    bool ReadArraySlow(std::uint32_t& count) noexcept;
    /// Reads a `width`-byte big-endian length after the head byte and checks that as many bytes follow.
    bool TakeBytes(std::size_t header, std::size_t size, std::string_view& value) noexcept;

    const char* begin_{nullptr};
    const char* at_{nullptr};
    const char* end_{nullptr};
    const char* failed_at_{nullptr};
    MsgError error_{MsgError::kNone};
};

/// Appends to a caller's buffer, which is meant to be reused. Bytes are those of msgspec: shortest integer
/// form, float64 always, shortest string, array and map headers. Lengths above 2^32-1 are a caller's bug
/// (checked).
class Writer {
  public:
    explicit Writer(std::string& out) noexcept : out_{&out} {}

    void Nil() { out_->push_back('\xc0'); }
    void Bool(bool value) { out_->push_back(value ? '\xc3' : '\xc2'); }
    void Int(std::int64_t value);
    void Uint(std::uint64_t value);
    void Float(double value);
    void Str(std::string_view value);
    void Bin(std::string_view value);
    void Ext(std::int8_t type, std::string_view data);
    void Array(std::size_t count);
    void Map(std::size_t count);
    /// A whole array of integers.
    void Ints(std::span<const std::int32_t> values);
    /// Bytes that are msgpack already.
    void Raw(std::string_view bytes) { out_->append(bytes); }
    void OptionalStr(const std::string* value) { value == nullptr ? Nil() : Str(*value); }

    std::string& buffer() noexcept { return *out_; }

  private:
    template <class T>
    void Head(std::uint8_t head, T value) {
        char bytes[1 + sizeof(T)];
        bytes[0] = static_cast<char>(head);
        internal::StoreBig(bytes + 1, value);
        out_->append(bytes, sizeof bytes);
    }
    std::string* out_;
};

}  // namespace rankgate::wire
