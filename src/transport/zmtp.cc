// SPDX-License-Identifier: Apache-2.0
#include "transport/zmtp.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace rankgate::transport {
namespace {

constexpr std::size_t kGreetingBytes = 64;
constexpr std::size_t kMechanismAt = 12;
constexpr std::size_t kMechanismBytes = 20;
constexpr std::uint8_t kMore = 1;
constexpr std::uint8_t kLong = 2;
constexpr std::uint8_t kCommand = 4;
/// READY with a full identity and every property libzmq can send is far below.
constexpr std::size_t kMaxCommandBytes = 8192;
constexpr std::size_t kMaxIdentity = 255;
constexpr std::size_t kMaxPingContext = 16;
/// Answers that the peer does not take are dropped.
constexpr std::size_t kMaxReplies = 4096;
constexpr std::size_t kFirstBuffer = 64 * 1024;
/// What a large message took is given back once it is read.
constexpr std::size_t kKeptBuffer = 1 << 20;
/// A read shall be worth its system call.
constexpr std::size_t kLeastSpace = 16 * 1024;
constexpr std::string_view kNull = "NULL";

std::string_view RoleName(ZmtpRole role) noexcept {
    constexpr std::array<std::string_view, 4> kNames{"ROUTER", "PULL", "DEALER", "PUSH"};
    return kNames[static_cast<std::size_t>(role)];
}

bool MayTalk(ZmtpRole own, std::string_view peer) noexcept {
    switch (own) {
        case ZmtpRole::kRouter:
            return peer == "DEALER" || peer == "REQ" || peer == "ROUTER";
        case ZmtpRole::kDealer:
            return peer == "ROUTER" || peer == "REP" || peer == "DEALER";
        case ZmtpRole::kPull:
            return peer == "PUSH";
        case ZmtpRole::kPush:
            return peer == "PULL";
    }
    return false;
}

bool SameName(std::string_view a, std::string_view lower) noexcept {
    return a.size() == lower.size() && std::equal(a.begin(), a.end(), lower.begin(), [](char x, char y) {
               return (x >= 'A' && x <= 'Z' ? static_cast<char>(x + 32) : x) == y;
           });
}

void AppendProperty(std::string& out, std::string_view name, std::string_view value) {
    out += static_cast<char>(name.size());
    out += name;
    for (const unsigned shift : {24U, 16U, 8U, 0U}) {
        out += static_cast<char>(value.size() >> shift & 0xffU);
    }
    out += value;
}

void AppendCommand(std::string& out, std::string_view name, std::string_view body) {
    const std::size_t size = 1 + name.size() + body.size();
    if (size <= 255) {
        out += static_cast<char>(kCommand);
        out += static_cast<char>(size);
    } else {
        out += static_cast<char>(kCommand | kLong);
        for (int shift = 56; shift >= 0; shift -= 8) {
            out += static_cast<char>(static_cast<std::uint64_t>(size) >> shift & 0xffU);
        }
    }
    out += static_cast<char>(name.size());
    out += name;
    out += body;
}

}  // namespace

void AppendZmtpHello(std::string& out, ZmtpRole own, std::string_view identity) {
    std::array<char, kGreetingBytes> greeting{};
    greeting[0] = static_cast<char>(0xff);
    greeting[8] = 1;  // as libzmq, whose peers of before ZMTP 2 read a length here
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[11] = 1;
    std::copy(kNull.begin(), kNull.end(), greeting.begin() + kMechanismAt);
    out.append(greeting.data(), greeting.size());
    std::string properties;
    AppendProperty(properties, "Socket-Type", RoleName(own));
    if (own == ZmtpRole::kRouter || own == ZmtpRole::kDealer) {
        AppendProperty(properties, "Identity", identity);
    }
    AppendCommand(out, "READY", properties);
}

std::size_t ZmtpFrameHeader(char* out, std::size_t size, bool more) noexcept {
    const std::uint8_t flags = more ? kMore : 0;
    if (size <= 255) {
        out[0] = static_cast<char>(flags);
        out[1] = static_cast<char>(size);
        return 2;
    }
    out[0] = static_cast<char>(flags | kLong);
    for (std::size_t i = 0; i < 8; ++i) {
        out[1 + i] = static_cast<char>(static_cast<std::uint64_t>(size) >> (56 - 8 * i) & 0xffU);
    }
    return kMaxZmtpFrameHeader;
}

std::span<char> ZmtpDecoder::Space() {
    if (std::exchange(delivered_, false)) {
        begin_ += std::exchange(scan_, 0);
    }
    if (begin_ == end_) {
        begin_ = end_ = 0;
        if (capacity_ > kKeptBuffer) {
            memory_.reset();
            capacity_ = 0;
        }
    }
    if (capacity_ - end_ < kLeastSpace) {
        const std::size_t held = available();
        if (capacity_ == 0 || held > capacity_ / 2) {
            const std::size_t capacity = std::max(kFirstBuffer, 2 * capacity_);
            std::unique_ptr<char[]> larger{new char[capacity]};
            if (held != 0) {
                std::memcpy(larger.get(), memory_.get() + begin_, held);
            }
            memory_ = std::move(larger);
            capacity_ = capacity;
        } else {
            std::memmove(memory_.get(), memory_.get() + begin_, held);
        }
        begin_ = 0;
        end_ = held;
    }
    return {memory_.get() + end_, capacity_ - end_};
}

/// The next whole frame from scan_ on, or false: not there yet, or broken (the state says so).
bool ZmtpDecoder::ReadFrame(Frame& frame) {
    const std::size_t left = available() - scan_;
    if (left < 2) {
        return false;
    }
    const char* at = memory_.get() + begin_ + scan_;
    frame.flags = static_cast<std::uint8_t>(at[0]);
    const bool command = (frame.flags & kCommand) != 0;
    if ((frame.flags & ~(kMore | kLong | kCommand)) != 0 || (command && (frame.flags & kMore) != 0)) {
        state_ = State::kBroken;
        return false;
    }
    std::size_t header = 2;
    std::uint64_t size = static_cast<std::uint8_t>(at[1]);
    if ((frame.flags & kLong) != 0) {
        header = kMaxZmtpFrameHeader;
        if (left < header) {
            return false;
        }
        size = 0;
        for (std::size_t i = 1; i < header; ++i) {
            size = size << 8U | static_cast<std::uint8_t>(at[i]);
        }
    }
    if (size > (command ? kMaxCommandBytes : limits_.frame_bytes) ||
        scan_ + header + size > limits_.message_bytes) {
        state_ = State::kBroken;
        return false;
    }
    if (left - header < size) {
        return false;
    }
    frame.body = {scan_ + header, static_cast<std::size_t>(size)};
    scan_ += header + static_cast<std::size_t>(size);
    return true;
}

bool ZmtpDecoder::OnReady(std::string_view body) {
    constexpr std::string_view kReady{"\5READY"};
    if (!body.starts_with(kReady)) {
        return false;
    }
    body.remove_prefix(kReady.size());
    bool typed = false;
    while (!body.empty()) {
        const auto name_size = static_cast<std::size_t>(static_cast<std::uint8_t>(body[0]));
        if (name_size == 0 || body.size() < 1 + name_size + 4) {
            return false;
        }
        const std::string_view name = body.substr(1, name_size);
        body.remove_prefix(1 + name_size);
        std::size_t size = 0;
        for (std::size_t i = 0; i < 4; ++i) {
            size = size << 8U | static_cast<std::uint8_t>(body[i]);
        }
        body.remove_prefix(4);
        if (size > body.size()) {
            return false;
        }
        const std::string_view value = body.substr(0, size);
        body.remove_prefix(size);
        if (SameName(name, "socket-type")) {
            if (!MayTalk(own_, value)) {
                return false;
            }
            typed = true;
        } else if (SameName(name, "identity")) {
            if (value.size() > kMaxIdentity) {
                return false;
            }
            identity_ = value;
        }
    }
    return typed;
}

bool ZmtpDecoder::OnCommand(std::string_view body) {
    if (body.empty() || body.size() < 1U + static_cast<std::uint8_t>(body[0])) {
        return false;
    }
    const std::string_view name = body.substr(1, static_cast<std::uint8_t>(body[0]));
    body.remove_prefix(1 + name.size());
    if (name == "PING") {
        if (body.size() < 2 || body.size() > 2 + kMaxPingContext) {
            return false;
        }
        if (replies_.size() < kMaxReplies) {
            AppendCommand(replies_, "PONG", body.substr(2));
        }
    }
    return name != "ERROR";  // others are news of later versions
}

ZmtpDecoder::Got ZmtpDecoder::Next() {
    if (std::exchange(delivered_, false)) {
        begin_ += std::exchange(scan_, 0);
    }
    if (state_ == State::kBroken) {
        return Got::kBroken;
    }
    if (state_ == State::kGreeting) {
        // As early as it can be told: strays of other protocols say less than a greeting and then wait.
        const std::string_view said = Bytes({0, std::min(available(), kGreetingBytes)});
        if ((!said.empty() && said[0] != static_cast<char>(0xff)) || (said.size() > 9 && said[9] != 0x7f) ||
            (said.size() > 10 && static_cast<std::uint8_t>(said[10]) < 3)) {
            return Broken();
        }
        if (said.size() < kGreetingBytes) {
            return Got::kNothing;
        }
        std::array<char, kMechanismBytes> mechanism{};
        std::copy(kNull.begin(), kNull.end(), mechanism.begin());
        if (said.substr(kMechanismAt, kMechanismBytes) !=
            std::string_view{mechanism.data(), mechanism.size()}) {
            return Broken();
        }
        begin_ += kGreetingBytes;
        state_ = State::kHandshake;
    }
    Frame frame;
    while (ReadFrame(frame)) {
        const std::string_view body = Bytes(frame.body);
        if (state_ == State::kHandshake) {
            if ((frame.flags & kCommand) == 0 || !OnReady(body)) {
                return Broken();
            }
            begin_ += std::exchange(scan_, 0);
            state_ = State::kMessages;
            return Got::kReady;
        }
        if ((frame.flags & kCommand) != 0) {
            if (!OnCommand(body)) {
                return Broken();
            }
            if (ranges_.empty() && !surplus_) {
                begin_ += std::exchange(scan_, 0);
            }
            continue;
        }
        if (ranges_.size() < limits_.frames) {
            ranges_.push_back(frame.body);
        } else {
            surplus_ = true;
        }
        if ((frame.flags & kMore) != 0) {
            continue;
        }
        views_.clear();
        for (const Range& range : ranges_) {
            views_.push_back(Bytes(range));
        }
        ranges_.clear();
        delivered_ = true;
        return std::exchange(surplus_, false) ? Got::kMalformed : Got::kMessage;
    }
    return state_ == State::kBroken ? Got::kBroken : Got::kNothing;
}

}  // namespace rankgate::transport
