// SPDX-License-Identifier: Apache-2.0
#include "relay/control.h"

#include <gtest/gtest.h>

namespace rankgate::relay {
namespace {

void Push(MessageParser& parser, std::span<const std::byte> bytes) {
    const std::span<std::byte> room = parser.Room();
    ASSERT_GE(room.size(), bytes.size());
    std::memcpy(room.data(), bytes.data(), bytes.size());
    parser.Added(bytes.size());
}

HelloBody GoodHello() {
    HelloBody hello;
    hello.abi = AbiHash();
    hello.epoch = 7;
    hello.rank = 1;
    hello.size = 4;
    return hello;
}
constexpr HelloExpectation kExpected{7, 4, 0, 0};

TEST(ControlTest, MessagesSurviveEverySplit) {
    const auto fin = Encode(MessageType::kFin, FinBody{42});
    const auto bye = EncodeBare(MessageType::kBye);
    std::vector<std::byte> bytes(fin.begin(), fin.end());
    bytes.insert(bytes.end(), bye.begin(), bye.end());
    for (std::size_t cut = 0; cut <= bytes.size(); ++cut) {
        MessageParser parser;
        std::vector<MessageType> seen;
        for (const auto part : {std::span{bytes}.first(cut), std::span{bytes}.subspan(cut)}) {
            Push(parser, part);
            Message message;
            while (parser.Next(&message) == MessageParser::State::kMessage) {
                seen.push_back(message.type);
                if (message.type == MessageType::kFin) {
                    EXPECT_EQ(message.As<FinBody>().last_step, 42U);
                }
            }
        }
        EXPECT_EQ(seen, (std::vector{MessageType::kFin, MessageType::kBye})) << cut;
    }
}

TEST(ControlTest, RefusesWrongMagicTypeAndLength) {
    for (const std::size_t at : {0U, 4U, 6U}) {
        auto bytes = Encode(MessageType::kFin, FinBody{1});
        bytes[at] ^= std::byte{0x40};
        MessageParser parser;
        Push(parser, bytes);
        Message message;
        EXPECT_EQ(parser.Next(&message), MessageParser::State::kBad) << at;
    }
}

TEST(ControlTest, AHelloOfAnotherVersionIsRefusedByName) {
    std::array<std::byte, sizeof(MessageHeader) + 12> bytes{};
    MessageHeader header;
    header.type = static_cast<std::uint16_t>(MessageType::kHello);
    header.length = 12;
    std::memcpy(bytes.data(), &header, sizeof header);
    bytes[sizeof header] = std::byte{99};
    MessageParser parser;
    Push(parser, bytes);
    Message message;
    ASSERT_EQ(parser.Next(&message), MessageParser::State::kMessage);
    const auto refused = CheckHello(message.As<HelloBody>(), kExpected);
    ASSERT_TRUE(refused);
    EXPECT_EQ(refused->code, Code::kVersionMismatch);
    EXPECT_EQ(refused->got, 99U);
}

TEST(ControlTest, ChecksEveryFieldOfHello) {
    EXPECT_FALSE(CheckHello(GoodHello(), kExpected));
    const auto code = [](auto change) {
        HelloBody hello = GoodHello();
        change(hello);
        const auto refused = CheckHello(hello, kExpected);
        return refused ? refused->code : Code::kOk;
    };
    EXPECT_EQ(code([](HelloBody& h) { h.epoch = 8; }), Code::kBadEpoch);
    EXPECT_EQ(code([](HelloBody& h) { h.abi ^= 1; }), Code::kVersionMismatch);
    EXPECT_EQ(code([](HelloBody& h) { h.size = 2; }), Code::kVersionMismatch);
    EXPECT_EQ(code([](HelloBody& h) { h.rank = 0; }), Code::kVersionMismatch);
    EXPECT_EQ(code([](HelloBody& h) { h.rank = 4; }), Code::kVersionMismatch);
    EXPECT_EQ(code([](HelloBody& h) { h.rank = 0xFFFFFFFFU; }), Code::kVersionMismatch);
    EXPECT_EQ(code([](HelloBody& h) { h.backend = 2; }), Code::kVersionMismatch);
    EXPECT_EQ(code([](HelloBody& h) { h.digest = 1; }), Code::kVersionMismatch);
}

TEST(ControlTest, AFailureFromOutsideIsPutInBounds) {
    Failure failure;
    failure.origin_rank = 3000;
    failure.text.fill('x');
    auto bytes = Encode(MessageType::kFail, failure);
    bytes[sizeof(MessageHeader) + offsetof(Failure, code)] = std::byte{0xEE};
    bytes[sizeof(MessageHeader) + offsetof(Failure, phase)] = std::byte{0xEE};
    MessageParser parser;
    Push(parser, bytes);
    Message message;
    ASSERT_EQ(parser.Next(&message), MessageParser::State::kMessage);
    const Failure got = message.AsFailure();
    EXPECT_EQ(got.code, Code::kRemoteFailure);
    EXPECT_EQ(got.phase, Phase::kNone);
    EXPECT_EQ(got.origin_rank, -1);
    EXPECT_EQ(got.text_view().size(), got.text.size() - 1);
}

TEST(ConfigTest, NamesTheFieldThatIsWrong) {
    const auto why = [](auto change) {
        Config config;
        config.size = 2;
        config.where = "/tmp/x";
        change(config);
        const std::string text = config.Validate();
        return text.substr(0, text.find(':'));
    };
    EXPECT_EQ(why([](Config&) {}), "");
    EXPECT_EQ(why([](Config& c) { c.size = 0; }), "size");
    EXPECT_EQ(why([](Config& c) { c.size = 65; }), "size");
    EXPECT_EQ(why([](Config& c) { c.rank = 2; }), "rank");
    EXPECT_EQ(why([](Config& c) { c.rank = -1; }), "rank");
    EXPECT_EQ(why([](Config& c) { c.where = ""; }), "where");
    EXPECT_EQ(why([](Config& c) { c.where = "/tmp/"; }), "where");
    EXPECT_EQ(why([](Config& c) { c.where = "@"; }), "where");
    EXPECT_EQ(why([](Config& c) { c.where = "@" + std::string(107, 'x'); }), "");
    EXPECT_EQ(why([](Config& c) { c.where = "@" + std::string(108, 'x'); }), "where");
    EXPECT_EQ(why([](Config& c) { c.where = "tcp://nohost"; }), "where");
    EXPECT_EQ(why([](Config& c) { c.where = "tcp://h:0"; }), "where");
    EXPECT_EQ(why([](Config& c) { c.where = "tcp://h:1"; }), "backend");
    EXPECT_EQ(why([](Config& c) { c.backend = Backend::kTcp; }), "backend");
    EXPECT_EQ(why([](Config& c) { c.join = Seconds{0}; }), "join_s");
    EXPECT_EQ(why([](Config& c) { c.join = Seconds{std::numeric_limits<double>::quiet_NaN()}; }), "join_s");
    EXPECT_EQ(why([](Config& c) { c.publish_stall = Seconds{-1}; }), "publish_stall_s");
    EXPECT_EQ(why([](Config& c) { c.stall_after = Seconds{-1}; }), "stall_after_s");
    EXPECT_EQ(why([](Config& c) { c.beat = Seconds{0}; }), "beat_s");
    EXPECT_EQ(why([](Config& c) { c.max_lag_steps = 0; }), "max_lag_steps");
    EXPECT_EQ(why([](Config& c) { c.max_frame = 0; }), "max_frame");
    EXPECT_EQ(why([](Config& c) { c.ring_slots = 100; }), "ring_slots");
    // One rank alone needs no address.
    EXPECT_EQ(why([](Config& c) { c.size = 1, c.where = ""; }), "");
}

TEST(FailureTest, TextIsCutBetweenCharacters) {
    Failure failure;
    std::string text(failure.text.size() - 2, 'a');
    text += "\xC3\xA9\xC3\xA9";
    failure.SetText(text);
    EXPECT_EQ(failure.text_view(), std::string(failure.text.size() - 2, 'a'));
    EXPECT_EQ(CodeFromName("publish_stalled"), Code::kPublishStalled);
    EXPECT_FALSE(CodeFromName("nonsense"));
}

}  // namespace
}  // namespace rankgate::relay
