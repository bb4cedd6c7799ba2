// SPDX-License-Identifier: Apache-2.0
#include "base/utf8.h"

#include <gtest/gtest.h>

namespace rankgate {
namespace {

std::string Escaped(std::string_view text) {
    std::string out;
    AppendJsonEscaped(out, text);
    return out;
}

TEST(Utf8Test, AcceptsWholeRangeAndRefusesOverlongsAndSurrogates) {
    EXPECT_TRUE(IsValidUtf8("a\xC3\xA9\xEC\x82\xBC\xF0\x9F\x91\xA9"));
    EXPECT_FALSE(IsValidUtf8("\xC0\x80"));
    EXPECT_FALSE(IsValidUtf8("\xE0\x80\x80"));
    EXPECT_FALSE(IsValidUtf8("\xED\xA0\x80"));
    EXPECT_FALSE(IsValidUtf8("\xF4\x90\x80\x80"));
    EXPECT_FALSE(IsValidUtf8("\xFF"));
}

TEST(Utf8Test, FindsTheTailThatCouldStillBecomeACharacter) {
    EXPECT_EQ(IncompleteUtf8Tail("ab"), 0u);
    EXPECT_EQ(IncompleteUtf8Tail("ab\xE2"), 1u);
    EXPECT_EQ(IncompleteUtf8Tail("ab\xE2\x82"), 2u);
    EXPECT_EQ(IncompleteUtf8Tail("ab\xE2\x82\xAC"), 0u);
    EXPECT_EQ(IncompleteUtf8Tail("ab\xF0\x9F\x91"), 3u);
    EXPECT_EQ(IncompleteUtf8Tail("ab\xE0\x80"), 0u);  // can never be valid
    EXPECT_EQ(IncompleteUtf8Tail("\x80\x80\x80"), 0u);
}

TEST(Utf8Test, ReplacesEachMaximalInvalidSubpartOnce) {
    EXPECT_EQ(ToValidUtf8("a\xE2\x82z"), "a\xEF\xBF\xBDz");
    EXPECT_EQ(ToValidUtf8("\xE0\x80"), "\xEF\xBF\xBD\xEF\xBF\xBD");
    EXPECT_EQ(ToValidUtf8("\xF0\x9F\x91"), "\xEF\xBF\xBD");
}

TEST(Utf8Test, EscapesForJsonAndForOldSseParsers) {
    EXPECT_EQ(Escaped("a\"b\\c\n\r\t\x01"), "a\\\"b\\\\c\\n\\r\\t\\u0001");
    EXPECT_EQ(Escaped("\xE2\x80\xA8\xE2\x80\xA9\xC2\x85\xC3\xA9"), "\\u2028\\u2029\\u0085\xC3\xA9");
    EXPECT_EQ(Escaped("a\xFFz"), "a\xEF\xBF\xBDz");
}

}  // namespace
}  // namespace rankgate
