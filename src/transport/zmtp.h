// SPDX-License-Identifier: Apache-2.0
// ZMTP 3.1 with the NULL mechanism, as far as the data sockets of a group need it: what one connection says
// (ZmtpDecoder) and what is said to it (the Append functions). Pure: no sockets, no clock. Used by
// zmtp_socket.h. Interoperable with libzmq 4 and the Rust client; peers of before ZMTP 3 are refused.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace rankgate::transport {

/// As libzmq: a connection that does not introduce itself for so long is given up.
inline constexpr std::chrono::seconds kZmtpIntroduction{30};

enum class ZmtpRole : std::uint8_t { kRouter, kPull, kDealer, kPush };

struct ZmtpLimits {
    std::uint64_t frame_bytes{1 << 20};
    std::uint64_t message_bytes{4 << 20};  // headers included
    std::size_t frames{65536};             // further ones are read past, and the message counts as malformed
};

/// Greeting and READY; both may be sent at once, before the peer has said anything. Only ROUTER and DEALER
/// name an identity.
void AppendZmtpHello(std::string& out, ZmtpRole own, std::string_view identity);
inline constexpr std::size_t kMaxZmtpFrameHeader = 9;
/// Writes the header of a message frame, returns its length.
std::size_t ZmtpFrameHeader(char* out, std::size_t size, bool more) noexcept;

/// The incoming side of one connection. Read into Space(), say how much with Filled(), and take what is
/// complete with Next(). Memory grows with the bytes that came, never with a length that was announced.
class ZmtpDecoder {
  public:
    enum class Got : std::uint8_t {
        kNothing,    // read more
        kReady,      // once: the peer has introduced itself
        kMessage,    // frames() until the next call
        kMalformed,  // a message of too many frames
        kBroken,     // not a peer of ours, or over a limit: nothing further is of use
    };

    ZmtpDecoder(ZmtpRole own, const ZmtpLimits& limits) : own_{own}, limits_{limits} {}

    /// Never empty. Invalidates frames().
    std::span<char> Space();
    void Filled(std::size_t bytes) noexcept { end_ += bytes; }
    Got Next();
    std::span<const std::string_view> frames() const noexcept { return views_; }
    bool ready() const noexcept { return state_ == State::kMessages; }
    /// What the peer calls itself, may be empty.
    const std::string& identity() const noexcept { return identity_; }
    /// Answers to its PINGs, to be sent and cleared by the caller.
    std::string& replies() noexcept { return replies_; }

  private:
    enum class State : std::uint8_t { kGreeting, kHandshake, kMessages, kBroken };
    struct Range {
        std::size_t at;  // from begin_
        std::size_t size;
    };
    struct Frame {
        std::uint8_t flags;
        Range body;
    };

    bool ReadFrame(Frame& frame);
    bool OnReady(std::string_view body);
    bool OnCommand(std::string_view body);
    Got Broken() noexcept {
        state_ = State::kBroken;
        return Got::kBroken;
    }
    std::string_view Bytes(Range range) const noexcept {
        return {memory_.get() + begin_ + range.at, range.size};
    }
    std::size_t available() const noexcept { return end_ - begin_; }

    const ZmtpRole own_;
    const ZmtpLimits limits_;
    State state_{State::kGreeting};
    bool delivered_{false};  // views_ are of a message that is still in front
    bool surplus_{false};
    std::unique_ptr<char[]> memory_;
    std::size_t capacity_{0};
    std::size_t begin_{0};  // of the message that is being read
    std::size_t end_{0};
    std::size_t scan_{0};  // read up to here, from begin_
    std::vector<Range> ranges_;
    std::vector<std::string_view> views_;
    std::string identity_;
    std::string replies_;
};

}  // namespace rankgate::transport
