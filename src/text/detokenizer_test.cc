// SPDX-License-Identifier: Apache-2.0
#include "text/detokenizer.h"

#include <gtest/gtest.h>

#include <random>

#include "base/utf8.h"

namespace rankgate::text {
namespace {

constexpr std::string_view kFffd = "\xEF\xBF\xBD";

TokenTable ByteLevel(const std::vector<std::string>& pieces, const std::vector<std::string>& specials = {}) {
    TokenTable::Builder builder;
    for (const std::string& piece : pieces) {
        builder.Add(piece, 0);
    }
    for (const std::string& special : specials) {
        builder.Add(special, TokenTable::kSpecial | TokenTable::kAdded);
    }
    return std::move(builder).Build(false);
}

// <unk> <s> </s>, the 256 byte pieces, then some words: the shape of Llama-2's vocabulary.
TokenTable Metaspace() {
    TokenTable::Builder builder;
    for (const char* special : {"<unk>", "<s>", "</s>"}) {
        builder.Add(special, TokenTable::kSpecial | TokenTable::kAdded);
    }
    for (int byte = 0; byte < 256; ++byte) {
        const char c = static_cast<char>(byte);
        builder.Add({&c, 1}, TokenTable::kByteFallback);
    }
    for (const char* piece : {" Hello", " world", " ", "  ", "!"}) {
        builder.Add(piece, 0);
    }
    return std::move(builder).Build(true);
}
constexpr TokenId kHello = 259;
constexpr TokenId kWorld = 260;
constexpr TokenId kSpace = 261;
constexpr TokenId kTwoSpaces = 262;
TokenId Byte(int byte) {
    return 3 + byte;
}

std::string Stream(const TokenTable& table, const std::vector<TokenId>& ids,
                   Detokenizer::Options options = {}, std::size_t per_frame = 1) {
    std::string out;
    Detokenizer detokenizer{table, options};
    for (std::size_t at = 0; at < ids.size(); at += per_frame) {
        detokenizer.Append(std::span{ids}.subspan(at, std::min(per_frame, ids.size() - at)), out);
        EXPECT_TRUE(IsValidUtf8(out));
    }
    detokenizer.Flush(out);
    EXPECT_TRUE(IsValidUtf8(out));
    return out;
}

TEST(Detokenizer, HoldsBackPartialUtf8UntilComplete) {
    const TokenTable table = ByteLevel({"\xEC\x82", "\xBC", "x"});
    Detokenizer detokenizer{table, {}};
    std::string out;
    detokenizer.Append(TokenId{0}, out);
    EXPECT_EQ(out, "");
    EXPECT_EQ(detokenizer.held(), 2U);
    detokenizer.Append(TokenId{1}, out);
    EXPECT_EQ(out, "\xEC\x82\xBC");
    EXPECT_EQ(detokenizer.held(), 0U);
}

TEST(Detokenizer, CharactersSplitOverTokensAndFramesJoinToTheWholeText) {
    const std::string text =
        "n\xC3\xA9 \xEC\x82\xBC\xEA\xB2\xB9\xEC\x82\xB4 \xF0\x9F\x91\xA9\xE2\x80\x8D\xF0\x9F\x91\xA9 ok";
    const auto bytes = MakeByteTokenizer();
    std::vector<TokenId> ids;
    ASSERT_TRUE(bytes->Encode(text, {}, ids).ok());
    for (const std::size_t per_frame : {1U, 2U, 3U, 5U, 1000U}) {
        EXPECT_EQ(Stream(bytes->table(), ids, {}, per_frame), text);
    }
}

TEST(Detokenizer, OneReplacementPerMaximalInvalidSubpart) {
    // Expected texts are those of Python's bytes.decode("utf-8", "replace").
    const struct {
        std::string bytes;
        int replacements;
    } cases[] = {
        {"\x80", 1},         {"\xC3", 1},     {"\xE2\x82", 1}, {"\xF0\x9F\x91", 1}, {"\xE2\x82\xE2\x82", 2},
        {"\xC0\x80", 2},     {"\xED\xA0", 2}, {"\xFF", 1},     {"\xF4\x90", 2},     {"\xF0\x80\x80", 3},
        {"\xE0\x80\x80", 3}, {"\xF5", 1}};
    const auto bytes = MakeByteTokenizer();
    for (const auto& c : cases) {
        std::vector<TokenId> ids;
        for (const char b : c.bytes) {
            ids.push_back(static_cast<unsigned char>(b));
        }
        std::string want;
        for (int i = 0; i < c.replacements; ++i) {
            want += kFffd;
        }
        EXPECT_EQ(Stream(bytes->table(), ids), want);
        ids.push_back('x');
        EXPECT_EQ(Stream(bytes->table(), ids), want + "x");
    }
}

TEST(Detokenizer, RandomIdsNeverStallAndEqualTheLossyDecodingOfTheirBytes) {
    const auto bytes = MakeByteTokenizer();
    std::mt19937 random{7};
    for (int round = 0; round < 300; ++round) {
        std::vector<TokenId> ids;
        std::string raw;
        for (int i = 0; i < 64; ++i) {
            // Mostly bytes that begin or continue characters; sometimes ids that do not exist.
            const auto dice = random() % 20;
            const TokenId id = dice == 0   ? static_cast<TokenId>(300 + random() % 100000)
                               : dice == 1 ? -static_cast<TokenId>(random() % 1000)
                               : dice < 12 ? static_cast<TokenId>(0x80 + random() % 0x80)
                                           : static_cast<TokenId>(random() % 256);
            ids.push_back(id);
            if (id >= 0 && id < 256) {
                raw += static_cast<char>(id);
            }
        }
        std::string out;
        Detokenizer detokenizer{bytes->table(), {}};
        for (const TokenId id : ids) {
            detokenizer.Append(id, out);
            ASSERT_LE(detokenizer.held(), 3U);
        }
        detokenizer.Flush(out);
        EXPECT_EQ(out, ToValidUtf8(raw));
    }
}

TEST(Detokenizer, IdsOutsideOfTheVocabularyAddNothing) {
    const TokenTable table = ByteLevel({"a", "b"});
    EXPECT_EQ(Stream(table, {0, 2, 1'000'000, -1, INT32_MIN, INT32_MAX, 1}), "ab");
}

TEST(Detokenizer, HolesInTheVocabularyAddNothing) {
    TokenTable::Builder builder;
    builder.Add("a", 0);
    builder.Add("", TokenTable::kHole);
    builder.Add("b", 0);
    const TokenTable table = std::move(builder).Build(false);
    EXPECT_FALSE(table.contains(1));
    EXPECT_EQ(Stream(table, {0, 1, 2}), "ab");
}

TEST(Detokenizer, SpecialTokensAreHiddenByDefaultAndShownOnRequest) {
    const TokenTable table = ByteLevel({"Hi", " there"}, {"<s>", "</s>"});
    EXPECT_EQ(Stream(table, {0, 2, 1, 3}), "Hi there");
    EXPECT_EQ(Stream(table, {0, 2, 1, 3}, {.skip_special_tokens = false}), "Hi<s> there</s>");
}

TEST(Detokenizer, AHiddenSpecialTokenInsideACharacterDoesNotBreakIt) {
    const TokenTable table = ByteLevel({"\xC3", "\xA9"}, {"<s>"});
    EXPECT_EQ(Stream(table, {0, 2, 1}), "\xC3\xA9");
}

TEST(Detokenizer, AddedTokensThatAreNotSpecialAreAlwaysShown) {
    TokenTable::Builder builder;
    builder.Add("a", 0);
    builder.Add("<think>", TokenTable::kAdded);
    const TokenTable table = std::move(builder).Build(false);
    EXPECT_EQ(Stream(table, {1, 0}), "<think>a");
}

TEST(Detokenizer, LeadingSpaceIsStrippedOnceAtTheVeryStart) {
    const TokenTable table = Metaspace();
    EXPECT_EQ(Stream(table, {kHello, kWorld}), "Hello world");
    EXPECT_EQ(Stream(table, {1, kHello, kWorld}), "Hello world");  // hidden BOS first
    EXPECT_EQ(Stream(table, {kSpace, kHello}), " Hello");
    EXPECT_EQ(Stream(table, {kTwoSpaces, kHello}), "  Hello");
    EXPECT_EQ(Stream(table, {Byte(' '), kHello}), " Hello");
    EXPECT_EQ(Stream(table, {kHello, kWorld}, {.at_text_start = false}), " Hello world");
    EXPECT_EQ(Stream(table, {1, kHello}, {.skip_special_tokens = false}), "<s> Hello");
}

TEST(Detokenizer, ByteFallbackPiecesJoinIntoCharacters) {
    const TokenTable table = Metaspace();
    EXPECT_EQ(Stream(table, {kHello, Byte(0xED), Byte(0x95), Byte(0x9C), kWorld}), "Hello\xED\x95\x9C world");
    EXPECT_EQ(Stream(table, {kHello, Byte(0xED), Byte(0x95), kWorld}),
              "Hello" + std::string{kFffd} + " world");
}

TEST(Detokenizer, AReplacementThatCouldHaveBecomeACharacterIsOnlySaidOnceItCannot) {
    // A length comparison of decoded windows fails here: U+FFFD and the character it becomes are both three
    // bytes long.
    const TokenTable table = ByteLevel({"\xE4", "\xBD\xA0", "."});
    Detokenizer detokenizer{table, {}};
    std::string out;
    detokenizer.Append(TokenId{0}, out);
    detokenizer.Append(TokenId{1}, out);
    EXPECT_EQ(out, "\xE4\xBD\xA0");
}

TEST(Detokenizer, CanBeUsedAgainAfterFlush) {
    const TokenTable table = Metaspace();
    Detokenizer detokenizer{table, {}};
    std::string out;
    detokenizer.Append(kHello, out);
    detokenizer.Append(Byte(0xE2), out);
    detokenizer.Flush(out);
    detokenizer.Append(kWorld, out);
    EXPECT_EQ(out, "Hello" + std::string{kFffd} + "world");
}

TEST(TokenTable, FindsAddedTokensByTheirText) {
    const TokenTable table = ByteLevel({"a", "<s>"}, {"<s>", "</s>", "<pad>"});
    EXPECT_EQ(table.Find("<s>"), 2);
    EXPECT_EQ(table.Find("</s>"), 3);
    EXPECT_EQ(table.Find("<pad>"), 4);
    EXPECT_EQ(table.Find("a"), std::nullopt);
    EXPECT_EQ(table.Find(""), std::nullopt);
    EXPECT_EQ(table.max_token_bytes(), 5U);
}

TEST(ByteTokenizer, ReadsSpecialTokensOnlyWhereAsked) {
    const auto bytes = MakeByteTokenizer();
    std::vector<TokenId> ids;
    ASSERT_TRUE(bytes->Encode("a<|im_end|>", {}, ids).ok());
    EXPECT_EQ(ids, (std::vector<TokenId>{'a', 257}));
    ids.clear();
    const TextSpan spans[] = {{"<|im_start|>", true}, {"<|im_end|>", false}, {"<|im_end|>", true}};
    ASSERT_TRUE(bytes->EncodeSegments(spans, false, ids).ok());
    EXPECT_EQ(ids.front(), 256);
    EXPECT_EQ(ids.back(), 257);
    EXPECT_EQ(ids.size(), 12U);
    EXPECT_EQ(Detokenize(bytes->table(), ids, {.skip_special_tokens = false}),
              "<|im_start|><|im_end|><|im_end|>");
}

}  // namespace
}  // namespace rankgate::text
