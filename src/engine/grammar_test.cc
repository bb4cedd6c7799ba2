// SPDX-License-Identifier: Apache-2.0
#include "engine/grammar.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace rankgate::engine {
namespace {

std::shared_ptr<const Grammar> Parse(const std::string& text) {
    auto grammar = Grammar::Parse(text);
    EXPECT_TRUE(grammar.ok()) << (grammar.ok() ? "" : grammar.error().message);
    return grammar.ok() ? *grammar : nullptr;
}

/// Is `text` a whole sentence?
bool Matches(const std::string& grammar, const std::string& text) {
    GrammarState state{Parse(grammar)};
    return state.Accept(text).ok() && state.complete();
}

bool Begins(const std::string& grammar, const std::string& text) {
    GrammarState state{Parse(grammar)};
    return state.Accept(text).ok();
}

std::string Repeat(const std::string& what, int n) {
    std::string text;
    for (int i = 0; i < n; ++i) {
        text += what;
    }
    return text;
}

TEST(Grammar, LiteralsAlternativesAndGroups) {
    const std::string g = "root ::= \"yes\" | \"no\" (\"!\" | \"?\")";
    EXPECT_TRUE(Matches(g, "yes"));
    EXPECT_TRUE(Matches(g, "no!"));
    EXPECT_FALSE(Matches(g, "no"));
    EXPECT_TRUE(Begins(g, "no"));
    EXPECT_FALSE(Begins(g, "yes!"));
    EXPECT_FALSE(Begins(g, "x"));
}

TEST(Grammar, Repetitions) {
    EXPECT_TRUE(Matches("root ::= \"a\"*", ""));
    EXPECT_TRUE(Matches("root ::= \"a\"*", std::string(3000, 'a')));
    EXPECT_FALSE(Matches("root ::= \"a\"+", ""));
    EXPECT_TRUE(Matches("root ::= \"ab\"+ \"c\"?", "ababc"));
    EXPECT_TRUE(Matches("root ::= \"ab\"+ \"c\"?", "abab"));
    for (int n = 0; n < 8; ++n) {
        EXPECT_EQ(Matches("root ::= [0-9]{2,5}", std::string(static_cast<std::size_t>(n), '7')),
                  n >= 2 && n <= 5)
            << n;
        EXPECT_EQ(Matches("root ::= [0-9]{3}", std::string(static_cast<std::size_t>(n), '7')), n == 3) << n;
        EXPECT_EQ(Matches("root ::= [0-9]{3,}", std::string(static_cast<std::size_t>(n), '7')), n >= 3) << n;
    }
}

TEST(Grammar, ClassesCoverUtf8) {
    EXPECT_TRUE(Matches("root ::= [a-cX]", "b"));
    EXPECT_FALSE(Begins("root ::= [a-cX]", "d"));
    EXPECT_TRUE(Matches("root ::= [^a-c]", "\xe2\x82\xac")) << "the euro sign is not a, b or c";
    EXPECT_FALSE(Begins("root ::= [^a-c]", "b"));
    EXPECT_TRUE(Matches("root ::= [\\u00e0-\\u00ff]+", "\xc3\xa9\xc3\xa0"));
    EXPECT_FALSE(Begins("root ::= [\\u00e0-\\u00ff]+", "\xc3\x9f"));
    EXPECT_TRUE(Matches("root ::= .", "\xf0\x9f\x98\x80"));
    EXPECT_TRUE(Begins("root ::= .", "\xf0\x9f")) << "half a character is a beginning";
    EXPECT_FALSE(Begins("root ::= .", "\xed\xa0\x80")) << "a surrogate is not UTF-8";
    EXPECT_FALSE(Begins("root ::= .", "\xff"));
    EXPECT_TRUE(Matches("root ::= [-+] [+-] [\\]\\\\]", "-+]"));
}

TEST(Grammar, RulesMayCallThemselvesOnEitherSide) {
    const std::string right = "root ::= \"(\" root \")\" | \"x\"";
    EXPECT_TRUE(Matches(right, Repeat("(", 200) + "x" + Repeat(")", 200)));
    const std::string left = "root ::= root \"+\" [0-9] | [0-9]";
    EXPECT_TRUE(Matches(left, "1" + Repeat("+2", 500)));
    const std::string expression =
        "root ::= e\ne ::= t (\"+\" t)*\nt ::= f (\"*\" f)*\nf ::= [0-9]+ | \"(\" e \")\"";
    EXPECT_TRUE(Matches(expression, "1+2*(3+4)*5"));
    EXPECT_FALSE(Matches(expression, "1+2*(3+4"));
    EXPECT_FALSE(Begins(expression, "1+*"));
}

TEST(Grammar, CommentsAndLinesAreWhiteSpace) {
    EXPECT_TRUE(
        Matches("# what we say\nroot ::= greeting # hello\n  \" \" name\n\ngreeting ::= \"hi\" |\n  "
                "\"ho\"\nname ::= [a-z]+\n",
                "ho bob"));
}

TEST(Grammar, RefusesWhatItCannotRead) {
    for (const char* bad :
         {"", "root", "root ::= \"a", "root ::= [a", "root ::= (\"a\"", "root ::= b", "start ::= \"a\"",
          "root ::= \"a\"\nroot ::= \"b\"", "root ::= \"a\"{3,2}", "root ::= \"a\"{x", "root ::= \"\\q\"",
          "root ::= [\\uD800]", "root ::= [z-a]", "root ::= )", "root ::= *", "root ::= \"\\x1\""}) {
        EXPECT_FALSE(Grammar::Parse(bad).ok()) << bad;
    }
}

TEST(Grammar, TheMaskIsExactlyWhatCouldFollow) {
    const TokenTable table{{"", "y", "ye", "yes", "yesterday", "n", "no", "nope", "es", "s", "a"}};
    GrammarState state{Parse("root ::= \"yes\" | \"nope\"")};
    std::vector<std::uint8_t> allowed;
    ASSERT_TRUE(state.Mask(table, allowed).ok());
    EXPECT_EQ(allowed, (std::vector<std::uint8_t>{0, 1, 1, 1, 0, 1, 1, 1, 0, 0, 0}));
    ASSERT_TRUE(state.Accept("y").ok());
    ASSERT_TRUE(state.Mask(table, allowed).ok());
    EXPECT_EQ(allowed, (std::vector<std::uint8_t>{0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0}));
    EXPECT_FALSE(state.Accept("n").ok()) << "refused, and nothing is changed by it";
    ASSERT_TRUE(state.Accept("es").ok());
    EXPECT_TRUE(state.complete());
    ASSERT_TRUE(state.Mask(table, allowed).ok());
    EXPECT_EQ(allowed, std::vector<std::uint8_t>(11, 0));
}

TEST(Grammar, HostileGrammarsEndAsErrorsOrAnswersNeverAsAStall) {
    std::vector<std::string> pieces{"a", "b", "aa", "ab", "aaaa", "x", "y", "z", "h", "h0"};
    for (int i = 0; i < 2000; ++i) {
        pieces.push_back("a" + std::to_string(i));
    }
    const TokenTable table{std::move(pieces)};
    std::string chain = "root ::= a0\n";
    for (int i = 0; i < 3000; ++i) {
        chain += "a" + std::to_string(i) + " ::= a" + std::to_string(i + 1) + "\n";
    }
    chain += "a3000 ::= \"x\"\n";
    const std::string grammars[] = {
        "root ::= " + Repeat("(", 30000) + "\"a\"" + Repeat(")", 30000),
        "root ::= ((\"a\"{2000}){2000}){2000}",
        "root ::= \"a\"{0,1000000000}",
        "root ::= ((\"a\"?){500}){4}",
        "root ::= (\"a\"?){2000}",
        chain,
        "root ::= " + Repeat("\"a\"? ", 5000),
        "root ::= " + Repeat("(\"a\" | \"b\")* ", 3000),
        // NOLINTNEXTLINE(bugprone-suspicious-missing-comma): one grammar on two lines
        "root ::= a a a a a a a a a a\na ::= b b b b b b b b b b\nb ::= c? c? c? c? c? c? c? c?\nc ::= "
        "\"a\"? \"y\"? \"z\"?",
        "root ::= [" + Repeat("a", 60000) + "]",
        "root ::= root root | \"a\" | \"\"",
        "root ::= (((\"a\"*)*)*)*",
        "root ::= " + Repeat("root ", 1000) + "| \"a\" |",
    };
    for (const std::string& text : grammars) {
        auto grammar = Grammar::Parse(text);
        if (!grammar.ok()) {
            continue;
        }
        GrammarState state{*grammar};
        std::vector<std::uint8_t> allowed;
        for (int step = 0; step < 3 && state.Mask(table, allowed).ok(); ++step) {
            if (!state.Accept("aaaa").ok()) {
                break;
            }
        }
    }
    SUCCEED() << "every call came back";
}

}  // namespace
}  // namespace rankgate::engine
