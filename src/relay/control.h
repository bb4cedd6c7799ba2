// SPDX-License-Identifier: Apache-2.0
// The control plane's messages: fixed-size structs behind an 8-byte header, parsed from untrusted bytes
// without allocation. HELLO's first 16 bytes never change, so that any two versions can refuse each other by
// name. Little-endian hosts only.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>

#include "relay/types.h"

namespace rankgate::relay {

static_assert(std::endian::native == std::endian::little, "the relay's wire is little-endian");

inline constexpr std::uint32_t kMagic = 0x4C524752;  // "RGRL"
inline constexpr std::uint32_t kProtocol = 2;

enum class MessageType : std::uint16_t {
    kHello = 1,
    kWelcome = 2,
    kFail = 3,
    kReady = 4,
    kAck = 5,
    kBeat = 6,
    kDigest = 7,
    kFin = 8,   // leader: no step after this one
    kBye = 9,   // follower: has called Finish
    kEnd = 10,  // leader: all have; from here on a closed socket is no death
};

struct MessageHeader {
    std::uint32_t magic{kMagic};
    std::uint16_t type{0};
    std::uint16_t length{0};  // of the body
};
static_assert(sizeof(MessageHeader) == 8);

enum class ConnectionKind : std::uint32_t { kControl = 0, kData = 1 };

struct HelloBody {
    std::uint32_t protocol{kProtocol};
    std::uint32_t abi{0};
    std::uint64_t epoch{0};
    std::uint64_t nonce{0};
    std::uint32_t rank{0};
    std::uint32_t size{0};
    std::uint32_t pid{0};
    std::uint32_t backend{0};
    std::uint32_t digest{0};
    std::uint32_t kind{0};
};
static_assert(sizeof(HelloBody) == 48);

struct WelcomeBody {
    std::uint64_t epoch{0};
    std::uint64_t first_seq{1};
    std::uint64_t ring_slots{0};
    std::uint64_t max_frame{0};
    double join_left_s{0};
    double stall_after_s{0};
    std::uint32_t max_lag_steps{0};
    std::uint32_t abi{0};
    std::uint32_t checksum{1};
    std::uint32_t fds{0};
};
static_assert(sizeof(WelcomeBody) == 64);

struct BeatBody {
    std::uint32_t loop{0};
    std::uint32_t process{0};
    std::uint32_t in_loop{0};
    std::uint32_t reserved{0};
};
struct DigestBody {
    std::uint64_t step{0};
    std::uint64_t value{0};
};
struct FinBody {
    std::uint64_t last_step{0};
};

inline constexpr std::size_t kMaxBody = sizeof(Failure);
inline constexpr std::size_t kHelloSize = sizeof(MessageHeader) + sizeof(HelloBody);
static_assert(kMaxBody >= sizeof(WelcomeBody));

/// Sizes and layout of everything that two processes must agree on.
std::uint32_t AbiHash() noexcept;

/// A whole message: header and body. `bytes` points into the parser and is valid until its next call.
struct Message {
    MessageType type{};
    std::span<const std::byte> body;

    /// The parser has checked that the body has this type's size, but for the HELLO of another version: zeros
    /// follow then.
    template <class T>
    T As() const noexcept {
        T value{};
        std::memcpy(static_cast<void*>(&value), body.data(), std::min(sizeof value, body.size()));
        return value;
    }
    /// FAIL's body with everything a peer could have got wrong put right.
    Failure AsFailure() const noexcept;
};

/// Cuts a byte stream into messages. Bounded: never holds more than one buffer of bytes. One thread.
class MessageParser {
  public:
    enum class State : std::uint8_t { kMessage, kNeedMore, kBad };

    /// Where the next bytes may be received to.
    std::span<std::byte> Room() noexcept;
    void Added(std::size_t n) noexcept { end_ += n; }
    State Next(Message* message) noexcept;

  private:
    std::array<std::byte, 4096> buffer_{};
    std::size_t begin_{0};
    std::size_t end_{0};
};

/// A message as bytes, ready to send.
template <class T>
std::array<std::byte, sizeof(MessageHeader) + sizeof(T)> Encode(MessageType type, const T& body) noexcept {
    static_assert(std::is_trivially_copyable_v<T>);
    std::array<std::byte, sizeof(MessageHeader) + sizeof(T)> out;
    MessageHeader header;
    header.type = static_cast<std::uint16_t>(type);
    header.length = static_cast<std::uint16_t>(sizeof(T));
    std::memcpy(out.data(), &header, sizeof header);
    std::memcpy(out.data() + sizeof header, &body, sizeof(T));
    return out;
}
std::array<std::byte, sizeof(MessageHeader)> EncodeBare(MessageType type) noexcept;

/// What a leader expects of everybody who dials.
struct HelloExpectation {
    std::uint64_t epoch{0};
    std::uint32_t size{0};
    std::uint32_t backend{0};
    std::uint32_t digest{0};
};
/// Why this HELLO is refused; nullopt = it is one of ours.
std::optional<Failure> CheckHello(const HelloBody& hello, const HelloExpectation& expected) noexcept;

}  // namespace rankgate::relay
