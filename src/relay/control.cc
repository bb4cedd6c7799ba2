// SPDX-License-Identifier: Apache-2.0
#include "relay/control.h"

#include "relay/board.h"
#include "relay/slot.h"

namespace rankgate::relay {
namespace {

/// Body size of a type; nullopt = no such type.
std::optional<std::size_t> BodySize(std::uint16_t type) noexcept {
    switch (static_cast<MessageType>(type)) {
        case MessageType::kHello:
            return sizeof(HelloBody);
        case MessageType::kWelcome:
            return sizeof(WelcomeBody);
        case MessageType::kFail:
            return sizeof(Failure);
        case MessageType::kBeat:
            return sizeof(BeatBody);
        case MessageType::kDigest:
            return sizeof(DigestBody);
        case MessageType::kFin:
            return sizeof(FinBody);
        case MessageType::kReady:
        case MessageType::kAck:
        case MessageType::kBye:
        case MessageType::kEnd:
            return 0;
    }
    return std::nullopt;
}

}  // namespace

std::uint32_t AbiHash() noexcept {
    std::uint64_t hash = 0xCBF29CE484222325ULL;
    for (const std::uint64_t value :
         {std::uint64_t{kProtocol}, std::uint64_t{sizeof(void*)}, std::uint64_t{sizeof(Failure)},
          std::uint64_t{sizeof(SlotHeader)}, std::uint64_t{kSlotBytes}, std::uint64_t{sizeof(BoardHead)},
          std::uint64_t{sizeof(RankLine)}, std::uint64_t{kCodeCount}}) {
        hash = (hash ^ value) * 0x100000001B3ULL;
    }
    return static_cast<std::uint32_t>(hash ^ (hash >> 32));
}

Failure Message::AsFailure() const noexcept {
    // Built field by field: the bytes may hold any value, an enum may not.
    Failure failure;
    Failure raw = As<Failure>();
    std::uint8_t code = 0;
    std::uint8_t phase = 0;
    std::memcpy(&code, body.data() + offsetof(Failure, code), 1);
    std::memcpy(&phase, body.data() + offsetof(Failure, phase), 1);
    failure = raw;
    failure.code = code > 0 && code < kCodeCount ? static_cast<Code>(code) : Code::kRemoteFailure;
    failure.phase =
        phase <= static_cast<std::uint8_t>(Phase::kClose) ? static_cast<Phase>(phase) : Phase::kNone;
    if (failure.origin_rank < -1 || failure.origin_rank >= kMaxRanks) {
        failure.origin_rank = -1;
    }
    failure.text.back() = '\0';
    return failure;
}

std::span<std::byte> MessageParser::Room() noexcept {
    if (begin_ > 0) {
        std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
        end_ -= begin_;
        begin_ = 0;
    }
    return {buffer_.data() + end_, buffer_.size() - end_};
}

MessageParser::State MessageParser::Next(Message* message) noexcept {
    MessageHeader header;
    if (end_ - begin_ < sizeof header) {
        return State::kNeedMore;
    }
    std::memcpy(&header, buffer_.data() + begin_, sizeof header);
    const std::optional<std::size_t> size = BodySize(header.type);
    if (header.magic != kMagic || !size) {
        return State::kBad;
    }
    // A HELLO of another version may have another length; it is still readable enough to be refused by name.
    const bool other_hello = static_cast<MessageType>(header.type) == MessageType::kHello &&
                             header.length >= 8 && header.length <= kMaxBody && header.length != *size;
    if (header.length != *size && !other_hello) {
        return State::kBad;
    }
    if (end_ - begin_ < sizeof header + header.length) {
        return State::kNeedMore;
    }
    message->type = static_cast<MessageType>(header.type);
    message->body = {buffer_.data() + begin_ + sizeof header, header.length};
    begin_ += sizeof header + header.length;
    return State::kMessage;
}

std::array<std::byte, sizeof(MessageHeader)> EncodeBare(MessageType type) noexcept {
    MessageHeader header;
    header.type = static_cast<std::uint16_t>(type);
    std::array<std::byte, sizeof(MessageHeader)> out;
    std::memcpy(out.data(), &header, sizeof header);
    return out;
}

std::optional<Failure> CheckHello(const HelloBody& hello, const HelloExpectation& expected) noexcept {
    Failure failure;
    failure.phase = Phase::kHello;
    failure.origin_rank = hello.rank < static_cast<std::uint32_t>(kMaxRanks)
                              ? static_cast<std::int16_t>(hello.rank)
                              : std::int16_t{-1};
    const auto refuse = [&](Code code, std::uint64_t want, std::uint64_t got, std::string_view text) {
        failure.code = code;
        failure.expected = want;
        failure.got = got;
        failure.SetText(text);
        return std::optional<Failure>{failure};
    };
    if (hello.protocol != kProtocol || hello.abi != AbiHash()) {
        return refuse(Code::kVersionMismatch, kProtocol, hello.protocol,
                      "the ranks run different versions of the relay");
    }
    if (hello.epoch != expected.epoch) {
        return refuse(Code::kBadEpoch, expected.epoch, hello.epoch,
                      "this rank belongs to epoch " + std::to_string(hello.epoch) +
                          ", the group here is epoch " + std::to_string(expected.epoch));
    }
    if (hello.size != expected.size) {
        return refuse(Code::kVersionMismatch, expected.size, hello.size,
                      "this rank was told size " + std::to_string(hello.size) + ", rank 0 size " +
                          std::to_string(expected.size));
    }
    if (hello.rank == 0 || hello.rank >= expected.size) {
        return refuse(Code::kVersionMismatch, expected.size, hello.rank,
                      "no such follower rank in this group");
    }
    if (hello.backend != expected.backend || hello.digest != expected.digest) {
        return refuse(Code::kVersionMismatch, expected.backend, hello.backend,
                      "backend or digest differ from rank 0's configuration");
    }
    return std::nullopt;
}

}  // namespace rankgate::relay
