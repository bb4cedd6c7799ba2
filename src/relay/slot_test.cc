// SPDX-License-Identifier: Apache-2.0
#include "relay/slot.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "relay/crc.h"

namespace rankgate::relay {
namespace {

struct Slot {
    SlotHeader header;
    std::vector<std::byte> payload;
};

std::vector<Slot> Cut(const std::vector<std::string>& texts, std::uint64_t step, std::uint64_t first_seq,
                      std::size_t limit) {
    std::vector<Frame> frames;
    for (const std::string& text : texts) {
        frames.push_back(std::as_bytes(std::span{text}));
    }
    StepSource source{frames, step};
    std::vector<Slot> slots;
    std::uint64_t left = source.total();
    do {
        Slot slot;
        slot.header.seq = first_seq++;
        slot.header.epoch = 5;
        slot.header.step = step;
        slot.header.total = source.total();
        slot.header.n_frames = source.n_frames();
        slot.header.fragment = static_cast<std::uint32_t>(slots.size());
        slot.header.length = static_cast<std::uint32_t>(std::min<std::uint64_t>(left, limit));
        left -= slot.header.length;
        slot.header.flags = (slots.empty() ? kSlotFirst : 0U) | (left == 0 ? kSlotLast : 0U);
        slot.payload.resize(slot.header.length);
        EXPECT_EQ(source.Copy(slot.payload.data(), slot.header.length), slot.header.length);
        slot.header.crc = SlotChecksum(slot.header, slot.payload.data());
        slots.push_back(std::move(slot));
    } while (left > 0);
    return slots;
}

struct Reader {
    explicit Reader(std::size_t max_frame = 1 << 20) {
        config.epoch = 5;
        config.max_frame = max_frame;
        assembler = std::make_unique<Assembler>(config, 4096);
        SlotHeader go;
        go.seq = 1;
        go.epoch = 5;
        go.flags = kSlotGo;
        go.crc = SlotChecksum(go, nullptr);
        EXPECT_EQ(assembler->Feed(go, nullptr), Assembler::Fed::kGo);
    }
    Assembler::Fed Feed(const Slot& slot) { return assembler->Feed(slot.header, slot.payload.data()); }
    Code FeedBad(Slot slot, bool fix_crc = true) {
        if (fix_crc) {
            slot.header.crc = SlotChecksum(slot.header, slot.payload.data());
        }
        EXPECT_EQ(Feed(slot), Assembler::Fed::kFailed);
        return assembler->failure().code;
    }
    Config config;
    std::unique_ptr<Assembler> assembler;
};

std::string Text(Frame frame) {
    return {reinterpret_cast<const char*>(frame.data()), frame.size()};
}

TEST(SlotTest, AStepComesBackAsItWasWhateverTheCut) {
    const std::vector<std::vector<std::string>> steps{{},
                                                      {""},
                                                      {"a"},
                                                      {"", "", ""},
                                                      {"hello", "", std::string(5000, 'x'), "y"},
                                                      std::vector<std::string>(1500, "frame")};
    for (const std::size_t limit : {1U, 7U, 8U, 64U, 4032U, 4096U}) {
        Reader reader;
        std::uint64_t seq = 2;
        std::uint64_t number = 1;
        for (const auto& texts : steps) {
            const auto slots = Cut(texts, number, seq, limit);
            for (std::size_t i = 0; i + 1 < slots.size(); ++i) {
                ASSERT_EQ(reader.Feed(slots[i]), Assembler::Fed::kMore);
            }
            ASSERT_EQ(reader.Feed(slots.back()), Assembler::Fed::kStep);
            const Step step = reader.assembler->Take();
            ASSERT_EQ(step.number(), number);
            ASSERT_EQ(step.size(), texts.size());
            for (std::size_t i = 0; i < texts.size(); ++i) {
                ASSERT_EQ(Text(step[i]), texts[i]);
            }
            seq += slots.size();
            ++number;
        }
    }
}

TEST(SlotTest, EveryDamageHasItsName) {
    const auto slots = Cut({std::string(10000, 'z')}, 1, 2, 4096);
    ASSERT_EQ(slots.size(), 3U);
    const auto damaged = [&](auto change, bool fix_crc = true) {
        Reader reader;
        Slot slot = slots[0];
        change(slot);
        return reader.FeedBad(slot, fix_crc);
    };
    EXPECT_EQ(damaged([](Slot& s) { s.header.seq = 3; }), Code::kSequenceGap);
    EXPECT_EQ(damaged([](Slot& s) { s.header.seq = 1; }), Code::kForeignFrame);
    EXPECT_EQ(damaged([](Slot& s) { s.header.epoch = 4; }), Code::kBadEpoch);
    EXPECT_EQ(damaged([](Slot& s) { s.payload[99] ^= std::byte{1}; }, false), Code::kCorrupt);
    EXPECT_EQ(damaged([](Slot& s) { s.header.n_frames = 2; }, false), Code::kCorrupt);
    EXPECT_EQ(damaged([](Slot& s) { s.header.length = 5000; }, false), Code::kCorrupt);
    EXPECT_EQ(damaged([](Slot& s) { s.header.total = ~0ULL; }), Code::kCorrupt);
    EXPECT_EQ(damaged([](Slot& s) { s.header.total = 4; }), Code::kCorrupt);
    EXPECT_EQ(damaged([](Slot& s) { s.header.n_frames = 0xFFFFFFFF; }), Code::kCorrupt);
    EXPECT_EQ(damaged([](Slot& s) { s.header.flags |= kSlotLast; }), Code::kCorrupt);
    EXPECT_EQ(damaged([](Slot& s) { s.header.flags |= 0x100; }), Code::kVersionMismatch);
    EXPECT_EQ(damaged([](Slot& s) { s.header.step = 2; }), Code::kForeignFrame);
    EXPECT_EQ(damaged([](Slot& s) { s.header.fragment = 1; }), Code::kForeignFrame);
    EXPECT_EQ(damaged([](Slot& s) { s.header.flags = 0; }), Code::kForeignFrame);
    EXPECT_EQ(damaged([](Slot& s) {
                  s.header.flags = kSlotGo;
                  s.header.length = 0;
              }),
              Code::kForeignFrame);
}

TEST(SlotTest, AFrameAboveTheLimitIsNotBelieved) {
    Reader reader{100};
    const auto slots = Cut({std::string(101, 'z')}, 1, 2, 4096);
    EXPECT_EQ(reader.FeedBad(slots[0]), Code::kCorrupt);
}

TEST(SlotTest, ACalledOffStepLeavesNoTrace) {
    Reader reader;
    const auto torn = Cut({std::string(10000, 'z')}, 1, 2, 4096);
    ASSERT_EQ(reader.Feed(torn[0]), Assembler::Fed::kMore);
    Slot abort;
    abort.header.seq = 3;
    abort.header.epoch = 5;
    abort.header.step = 1;
    abort.header.flags = kSlotAbort;
    abort.header.crc = SlotChecksum(abort.header, nullptr);
    ASSERT_EQ(reader.Feed(abort), Assembler::Fed::kMore);
    const auto whole = Cut({"after"}, 1, 4, 4096);
    ASSERT_EQ(reader.Feed(whole[0]), Assembler::Fed::kStep);
    const Step step = reader.assembler->Take();
    EXPECT_EQ(step.number(), 1U);
    EXPECT_EQ(Text(step[0]), "after");
}

TEST(ChecksumTest, TheFastPathIsThePortableOne) {
    std::vector<std::byte> data(5000);
    std::uint32_t x = 12345;
    for (std::byte& b : data) {
        x = x * 1664525 + 1013904223;
        b = static_cast<std::byte>(x >> 24);
    }
    for (std::size_t size = 0; size < 200; ++size) {
        EXPECT_EQ(Checksum(data.data() + 3, size, 77), ChecksumPortable(data.data() + 3, size, 77)) << size;
    }
    EXPECT_EQ(Checksum(data.data(), data.size(), 1), ChecksumPortable(data.data(), data.size(), 1));
}

TEST(ChecksumTest, SeesEverySingleBitAndTheLength) {
    std::vector<std::byte> data(100, std::byte{0x5A});
    const std::uint32_t good = Checksum(data.data(), data.size(), 0);
    for (std::size_t bit = 0; bit < 800; ++bit) {
        data[bit / 8] ^= std::byte{1} << (bit % 8);
        EXPECT_NE(Checksum(data.data(), data.size(), 0), good) << bit;
        data[bit / 8] ^= std::byte{1} << (bit % 8);
    }
    std::vector<std::byte> zeros(64);
    EXPECT_NE(Checksum(zeros.data(), 10, 0), Checksum(zeros.data(), 11, 0));
}

TEST(StepSourceTest, NamesTheFrameThatIsTooLarge) {
    Config config;
    config.max_frame = 4;
    const std::string a = "1234";
    const std::string b = "12345";
    const std::vector<Frame> frames{std::as_bytes(std::span{a}), std::as_bytes(std::span{b})};
    EXPECT_FALSE(StepSource::Check(std::span{frames}.first(1), config));
    const auto failure = StepSource::Check(frames, config);
    ASSERT_TRUE(failure);
    EXPECT_EQ(failure->code, Code::kTooLarge);
    EXPECT_EQ(failure->got, 5U);
    EXPECT_NE(failure->text_view().find("frame 1"), std::string_view::npos);
}

}  // namespace
}  // namespace rankgate::relay
