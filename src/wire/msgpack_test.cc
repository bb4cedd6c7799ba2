// SPDX-License-Identifier: Apache-2.0
#include "wire/msgpack.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "wire/msgpack_json.h"
#include "wire/test_vectors.h"

namespace rankgate::wire {
namespace {

using test::FromHex;
using test::ToHex;

template <class Write>
std::string Encoded(Write write) {
    std::string out;
    Writer writer{out};
    write(writer);
    return ToHex(out);
}

TEST(MsgpackWriter, WritesIntegersInTheirShortestForm) {
    const auto hex = [](std::int64_t value) { return Encoded([&](Writer& w) { w.Int(value); }); };
    EXPECT_EQ(hex(0), "00");
    EXPECT_EQ(hex(127), "7f");
    EXPECT_EQ(hex(128), "cc80");
    EXPECT_EQ(hex(255), "ccff");
    EXPECT_EQ(hex(256), "cd0100");
    EXPECT_EQ(hex(65535), "cdffff");
    EXPECT_EQ(hex(65536), "ce00010000");
    EXPECT_EQ(hex(4294967295), "ceffffffff");
    EXPECT_EQ(hex(4294967296), "cf0000000100000000");
    EXPECT_EQ(hex(std::numeric_limits<std::int64_t>::max()), "cf7fffffffffffffff");
    EXPECT_EQ(hex(-1), "ff");
    EXPECT_EQ(hex(-32), "e0");
    EXPECT_EQ(hex(-33), "d0df");
    EXPECT_EQ(hex(-128), "d080");
    EXPECT_EQ(hex(-129), "d1ff7f");
    EXPECT_EQ(hex(-32768), "d18000");
    EXPECT_EQ(hex(-32769), "d2ffff7fff");
    EXPECT_EQ(hex(std::numeric_limits<std::int32_t>::min()), "d280000000");
    EXPECT_EQ(hex(std::int64_t{std::numeric_limits<std::int32_t>::min()} - 1), "d3ffffffff7fffffff");
    EXPECT_EQ(Encoded([](Writer& w) { w.Uint(~std::uint64_t{0}); }), "cfffffffffffffffff");
}

TEST(MsgpackWriter, WritesAnIntegerArrayLikeSingleIntegers) {
    const std::vector<std::int32_t> values{0,  127, 128, 255,  256,  65535,  65536,  INT32_MAX,
                                           -1, -32, -33, -128, -129, -32768, -32769, INT32_MIN};
    const std::string one_by_one = Encoded([&](Writer& w) {
        w.Array(values.size());
        for (const std::int32_t value : values) {
            w.Int(value);
        }
    });
    EXPECT_EQ(Encoded([&](Writer& w) { w.Ints(values); }), one_by_one);
}

TEST(MsgpackWriter, WritesFloatsAsFloat64EvenWhenWhole) {
    EXPECT_EQ(Encoded([](Writer& w) { w.Float(1.0); }), "cb3ff0000000000000");
    EXPECT_EQ(Encoded([](Writer& w) { w.Float(0.0); }), "cb0000000000000000");
}

TEST(MsgpackWriter, WritesHeadersInTheirShortestForm) {
    EXPECT_EQ(Encoded([](Writer& w) { w.Array(15); }), "9f");
    EXPECT_EQ(Encoded([](Writer& w) { w.Array(16); }), "dc0010");
    EXPECT_EQ(Encoded([](Writer& w) { w.Array(65536); }), "dd00010000");
    EXPECT_EQ(Encoded([](Writer& w) { w.Map(15); }), "8f");
    EXPECT_EQ(Encoded([](Writer& w) { w.Map(16); }), "de0010");
    EXPECT_EQ(Encoded([](Writer& w) { w.Map(65536); }), "df00010000");
    const auto head = [](std::size_t size) {
        return Encoded([&](Writer& w) { w.Str(std::string(size, 'x')); }).substr(0, 10);
    };
    EXPECT_EQ(head(31).substr(0, 2), "bf");
    EXPECT_EQ(head(32).substr(0, 4), "d920");
    EXPECT_EQ(head(255).substr(0, 4), "d9ff");
    EXPECT_EQ(head(256).substr(0, 6), "da0100");
    EXPECT_EQ(head(65536), "db00010000");
    EXPECT_EQ(Encoded([](Writer& w) { w.Ext(3, ""); }), "c70003");
    EXPECT_EQ(Encoded([](Writer& w) { w.Ext(3, "abcd"); }), "d60361626364");
    EXPECT_EQ(Encoded([](Writer& w) { w.Ext(3, "abc"); }), "c70303616263");
    EXPECT_EQ(Encoded([](Writer& w) { w.Bin("a"); }), "c40161");
}

TEST(MsgpackReader, TakesEverySpellingOfAnInteger) {
    for (const char* hex : {"05", "cc05", "cd0005", "ce00000005", "cf0000000000000005", "d005", "d10005",
                            "d200000005", "d30000000000000005"}) {
        const std::string bytes = FromHex(hex);
        Reader reader{bytes};
        std::int64_t value = 0;
        EXPECT_TRUE(reader.ReadInt(value)) << hex;
        EXPECT_EQ(value, 5) << hex;
        EXPECT_TRUE(reader.Done()) << hex;
    }
}

TEST(MsgpackReader, ReadsWhatTheWriterWroteAtEveryEdge) {
    for (const std::int64_t value : {std::int64_t{0},
                                     std::int64_t{-1},
                                     std::int64_t{-32},
                                     std::int64_t{-33},
                                     std::int64_t{-127},
                                     std::int64_t{-128},
                                     std::int64_t{-129},
                                     std::int64_t{127},
                                     std::int64_t{128},
                                     std::int64_t{32767},
                                     std::int64_t{-32768},
                                     std::int64_t{-32769},
                                     std::int64_t{65535},
                                     std::int64_t{65536},
                                     std::int64_t{INT32_MIN},
                                     std::int64_t{INT32_MIN} - 1,
                                     std::int64_t{UINT32_MAX},
                                     std::int64_t{UINT32_MAX} + 1,
                                     INT64_MIN,
                                     INT64_MAX}) {
        std::string bytes;
        Writer{bytes}.Int(value);
        Reader reader{bytes};
        std::int64_t back = 0;
        EXPECT_TRUE(reader.ReadInt(back));
        EXPECT_EQ(back, value);
        EXPECT_TRUE(reader.Done());
    }
    const std::string wide_spelling = FromHex("d0ff");
    Reader reader{wide_spelling};
    std::int64_t back = 0;
    EXPECT_TRUE(reader.ReadInt(back));
    EXPECT_EQ(back, -1);
}

TEST(MsgpackReader, KeepsIntegersAboveInt64ForUnsignedReadersOnly) {
    const std::string bytes = FromHex("cfffffffffffffffff");
    Reader reader{bytes};
    std::int64_t narrow = 0;
    EXPECT_FALSE(reader.ReadInt(narrow));
    EXPECT_EQ(reader.error(), MsgError::kOutOfRange);
    ASSERT_TRUE(reader.Recover());
    std::uint64_t wide = 0;
    EXPECT_TRUE(reader.ReadUint(wide));
    EXPECT_EQ(wide, ~std::uint64_t{0});
    EXPECT_TRUE(reader.Done());
}

TEST(MsgpackReader, TakesIntegersAndFloat32WhereAFloatIsDue) {
    for (const auto& [hex, expected] :
         std::vector<std::pair<std::string, double>>{{"05", 5.0},
                                                     {"ff", -1.0},
                                                     {"ca3f000000", 0.5},
                                                     {"cb3fe0000000000000", 0.5},
                                                     {"cfffffffffffffffff", 18446744073709551615.0}}) {
        const std::string bytes = FromHex(hex);
        Reader reader{bytes};
        double value = 0;
        EXPECT_TRUE(reader.ReadDouble(value)) << hex;
        EXPECT_EQ(value, expected) << hex;
    }
    const std::string bytes = FromHex("cb7ff8000000000000");
    Reader reader{bytes};
    double value = 0;
    EXPECT_TRUE(reader.ReadDouble(value));
    EXPECT_TRUE(std::isnan(value));
}

TEST(MsgpackReader, NeverTakesAFloatOrABoolForAnInteger) {
    for (const char* hex : {"cb4020000000000000", "ca41000000", "c3", "c2", "c0", "a131", "90", "80"}) {
        const std::string bytes = FromHex(hex);
        Reader reader{bytes};
        std::int64_t value = 0;
        EXPECT_FALSE(reader.ReadInt(value)) << hex;
        EXPECT_EQ(reader.error(), MsgError::kWrongType) << hex;
    }
}

TEST(MsgpackReader, SkipsOverAValueOfTheWrongTypeAfterRecovering) {
    const std::string bytes = FromHex("93 a3616263 07 c3");
    Reader reader{bytes};
    std::uint32_t count = 0;
    std::int64_t value = 0;
    ASSERT_TRUE(reader.ReadArray(count));
    EXPECT_FALSE(reader.ReadInt(value));
    ASSERT_TRUE(reader.Recover());
    ASSERT_TRUE(reader.Skip());
    ASSERT_TRUE(reader.ReadInt(value));
    EXPECT_EQ(value, 7);
    ASSERT_TRUE(reader.Skip());
    EXPECT_TRUE(reader.Done());
}

TEST(MsgpackReader, StaysFailedAfterTruncation) {
    const std::string bytes = FromHex("cd01");
    Reader reader{bytes};
    std::int64_t value = 0;
    EXPECT_FALSE(reader.ReadInt(value));
    EXPECT_EQ(reader.error(), MsgError::kTruncated);
    EXPECT_FALSE(reader.Recover());
    EXPECT_FALSE(reader.ReadInt(value));
    EXPECT_FALSE(reader.Skip());
    EXPECT_FALSE(reader.Done());
}

TEST(MsgpackReader, RefusesLengthsThatExceedTheFrame) {
    for (const char* hex : {"ddffffffff00", "dfffffffff0000", "dcffff", "deffff00", "91", "9f00", "8f00"}) {
        const std::string bytes = FromHex(hex);
        Reader reader{bytes};
        EXPECT_FALSE(reader.Skip()) << hex;
        Reader counted{bytes};
        std::uint32_t count = 7;
        const bool map = counted.Peek() == MsgType::kMap;
        EXPECT_FALSE(map ? counted.ReadMap(count) : counted.ReadArray(count)) << hex;
        EXPECT_EQ(count, 0U) << hex;
        EXPECT_EQ(counted.error(), MsgError::kBadLength) << hex;
    }
    for (const char* hex : {"dbffffffff61", "c6ffffffff61", "c9ffffffff0361", "d8030000", "d903"}) {
        const std::string bytes = FromHex(hex);
        Reader reader{bytes};
        EXPECT_FALSE(reader.Skip()) << hex;
        EXPECT_EQ(reader.error(), MsgError::kTruncated) << hex;
    }
}

TEST(MsgpackReader, RefusesTheReservedByteAndEmptyInput) {
    const std::string reserved = FromHex("c1");
    Reader reader{reserved};
    EXPECT_FALSE(reader.Skip());
    EXPECT_EQ(reader.error(), MsgError::kReserved);
    Reader empty{std::string_view{}};
    EXPECT_FALSE(empty.Skip());
    EXPECT_EQ(empty.error(), MsgError::kTruncated);
    EXPECT_EQ(empty.Peek(), MsgType::kEnd);
}

TEST(MsgpackReader, SkipsHundredThousandLevelsWithoutRecursion) {
    std::string deep(100000, '\x91');
    deep.push_back('\xc0');
    Reader reader{deep};
    EXPECT_TRUE(reader.Skip());
    EXPECT_TRUE(reader.Done());
    std::string maps;
    for (int i = 0; i < 100000; ++i) {
        maps += FromHex("81 a0");
    }
    Reader cut{maps};
    EXPECT_FALSE(cut.Skip());
}

TEST(MsgpackReader, FailsAtEveryTruncationOfAMixedValue) {
    std::string bytes;
    Writer writer{bytes};
    writer.Array(7);
    writer.Map(1);
    writer.Str("key");
    writer.Float(1.5);
    writer.Int(-70000);
    writer.Bin("binary");
    writer.Ext(5, "extension");
    writer.Str(std::string(300, 'x'));
    writer.Uint(1ULL << 40);
    writer.Bool(true);
    for (std::size_t size = 0; size < bytes.size(); ++size) {
        Reader reader{std::string_view{bytes}.substr(0, size)};
        EXPECT_FALSE(reader.Skip()) << size;
    }
    Reader whole{bytes};
    EXPECT_TRUE(whole.Skip());
    EXPECT_TRUE(whole.Done());
}

TEST(MsgpackReader, RefusesFramesAboveTheLimitUnread) {
    // A view is enough: the limit is checked before any byte is looked at.
    const char byte = '\xc0';
    Reader reader{std::string_view{&byte, 1}};
    EXPECT_TRUE(reader.Skip());
    std::string huge(kMaxPayloadBytes + 1, '\xc0');
    Reader refused{huge};
    EXPECT_FALSE(refused.Skip());
    EXPECT_EQ(refused.error(), MsgError::kTooLarge);
}

TEST(MsgpackJson, WritesValuesAsJson) {
    const auto text = [](std::string_view hex) {
        const std::string bytes = FromHex(hex);
        Reader reader{bytes};
        std::string out;
        EXPECT_TRUE(AppendJson(reader, out));
        EXPECT_TRUE(reader.Done());
        return out;
    };
    EXPECT_EQ(text("c0"), "null");
    EXPECT_EQ(text("92c3c2"), "[true,false]");
    EXPECT_EQ(text("82a16105a162cb3fe0000000000000"), R"({"a":5,"b":0.5})");
    EXPECT_EQ(text("8105a0"), R"({"5":""})");
    EXPECT_EQ(text("cfffffffffffffffff"), "18446744073709551615");
    EXPECT_EQ(text("cb7ff0000000000000"), "null");
    EXPECT_EQ(text("a3220a5c"), R"("\"\n\\")");
    EXPECT_EQ(text("d40305"), "null");
}

TEST(MsgpackJson, LeavesTheOutputAloneWhenTheValueIsBrokenOrTooDeep) {
    std::string out = "kept";
    const std::string broken = FromHex("92c3");
    Reader reader{broken};
    EXPECT_FALSE(AppendJson(reader, out));
    std::string deep(kMaxJsonDepth + 2, '\x91');
    deep.push_back('\xc0');
    Reader deep_reader{deep};
    EXPECT_FALSE(AppendJson(deep_reader, out));
    EXPECT_EQ(out, "kept");
}

}  // namespace
}  // namespace rankgate::wire
