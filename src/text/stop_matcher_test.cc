// SPDX-License-Identifier: Apache-2.0
#include "text/stop_matcher.h"

#include <gtest/gtest.h>

#include <random>

namespace rankgate::text {
namespace {

struct Outcome {
    std::string text;
    std::optional<std::size_t> match;
    bool operator==(const Outcome&) const = default;
};

std::shared_ptr<const StopSet> Set(std::vector<std::string> strings) {
    auto set = StopSet::Compile(std::move(strings));
    EXPECT_TRUE(set.ok());
    return set.value();
}

Outcome Feed(const StopSet& set, const std::string& text, std::size_t piece, bool include = false) {
    StopMatcher matcher{&set, include};
    Outcome outcome;
    for (std::size_t at = 0; at < text.size(); at += piece) {
        if (const auto match = matcher.Append(std::string_view{text}.substr(at, piece), outcome.text)) {
            outcome.match = match->index;
            return outcome;
        }
    }
    matcher.Flush(outcome.text);
    return outcome;
}

// The rule in words: the match that ends first, the longest of those; equal strings: the first.
Outcome Reference(const std::vector<std::string>& stops, const std::string& text, bool include) {
    for (std::size_t end = 1; end <= text.size(); ++end) {
        std::optional<std::size_t> best;
        for (std::size_t i = 0; i < stops.size(); ++i) {
            if (std::string_view{text}.substr(0, end).ends_with(stops[i]) &&
                (!best || stops[i].size() > stops[*best].size())) {
                best = i;
            }
        }
        if (best) {
            return {text.substr(0, include ? end : end - stops[*best].size()), best};
        }
    }
    return {text, std::nullopt};
}

TEST(StopMatcher, LeftmostOfRepeatedMatchesInOneFrameWins) {
    const auto set = Set({"\n"});
    EXPECT_EQ(Feed(*set, "Answer\n\n", 100), (Outcome{"Answer", 0}));
}

TEST(StopMatcher, MatchesAcrossPieces) {
    const auto set = Set({"XYZ"});
    for (std::size_t piece = 1; piece < 8; ++piece) {
        EXPECT_EQ(Feed(*set, "abXYXYZcd", piece), (Outcome{"abXY", 0}));
        EXPECT_EQ(Feed(*set, "abXYXYZcd", piece, true), (Outcome{"abXYXYZ", 0}));
    }
}

TEST(StopMatcher, HeldBackTextComesOutAtTheEnd) {
    EXPECT_EQ(Feed(*Set({"XYZ"}), "abX", 1), (Outcome{"abX", std::nullopt}));
    EXPECT_EQ(Feed(*Set({"XYZ"}), "abXY", 4), (Outcome{"abXY", std::nullopt}));
    EXPECT_EQ(Feed(*Set({"XYZ"}), "X", 1), (Outcome{"X", std::nullopt}));
    const std::string reply(50, 'a');
    EXPECT_EQ(Feed(*Set({std::string(200, 'a')}), reply, 1), (Outcome{reply, std::nullopt}));
}

TEST(StopMatcher, HoldsBackNoMoreThanARealPartialMatch) {
    const auto set = Set({"XYZ", "Y--"});
    StopMatcher matcher{set.get(), false};
    std::string out;
    EXPECT_FALSE(matcher.Append("abc", out));
    EXPECT_EQ(out, "abc");
    EXPECT_FALSE(matcher.Append("X", out));
    EXPECT_EQ(out, "abc");
    EXPECT_FALSE(matcher.Append("Y", out));
    EXPECT_EQ(out, "abc");
    EXPECT_EQ(matcher.held(), 2U);
    EXPECT_FALSE(matcher.Append("-", out));  // "XY-": only "Y-" can still become a match
    EXPECT_EQ(out, "abcX");
    EXPECT_EQ(matcher.held(), 2U);
    EXPECT_FALSE(matcher.Append("q", out));
    EXPECT_EQ(out, "abcXY-q");
}

TEST(StopMatcher, TheMatchThatEndsFirstWinsThenTheLongest) {
    EXPECT_EQ(Feed(*Set({"abcd", "bc"}), "zabcd", 1), (Outcome{"za", 1}));
    EXPECT_EQ(Feed(*Set({"bc", "abc"}), "zabcd", 1), (Outcome{"z", 1}));
    EXPECT_EQ(Feed(*Set({"abc", "abc"}), "zabcd", 1), (Outcome{"z", 0}));
}

TEST(StopMatcher, MultibyteStopStringsNeverCutACharacter) {
    const auto set = Set({"\xEA\xB2\xB9!"});
    StopMatcher matcher{set.get(), false};
    std::string out;
    EXPECT_FALSE(matcher.Append("\xEC\x82\xBC\xEA\xB2\xB9", out));
    EXPECT_EQ(out, "\xEC\x82\xBC");
    EXPECT_FALSE(matcher.Append("?", out));
    EXPECT_EQ(out, "\xEC\x82\xBC\xEA\xB2\xB9?");
}

TEST(StopMatcher, EmptyStringsAreRefusedAndAnEmptySetNeverMatches) {
    EXPECT_FALSE(StopSet::Compile({""}).ok());
    const auto bad = StopSet::Compile({"x", ""});
    ASSERT_FALSE(bad.ok());
    EXPECT_EQ(bad.error().param, "stop");
    EXPECT_EQ(HttpStatus(bad.error().code), 400);
    EXPECT_EQ(Feed(*Set({}), "abc", 2), (Outcome{"abc", std::nullopt}));
    StopMatcher none{nullptr, false};
    std::string out;
    EXPECT_FALSE(none.Append("abc", out));
    none.Flush(out);
    EXPECT_EQ(out, "abc");
}

TEST(StopMatcher, AThousandStringsAndAHundredKilobytesWork) {
    std::vector<std::string> stops;
    for (int i = 0; i < 1000; ++i) {
        stops.push_back("stop number " + std::to_string(i) + ";");
    }
    EXPECT_EQ(Feed(*Set(stops), "text stop number 1stop number 77; more", 3),
              (Outcome{"text stop number 1", 77}));
    const std::string big = std::string(100'000, 'x') + "y";
    EXPECT_EQ(Feed(*Set({big}), "a" + std::string(5, 'x') + big + "b", 1000), (Outcome{"axxxxx", 0}));
    EXPECT_EQ(Feed(*Set({big}), std::string(99'999, 'x'), 7),
              (Outcome{std::string(99'999, 'x'), std::nullopt}));
}

TEST(StopMatcher, TooManyOrTooLongStringsAreRefused) {
    EXPECT_FALSE(StopSet::Compile(std::vector<std::string>(kMaxStopStrings + 1, "x")).ok());
    EXPECT_FALSE(StopSet::Compile({std::string(kMaxStopBytes + 1, 'x')}).ok());
}

TEST(StopMatcher, AgreesWithTheRuleOnRandomInputHoweverItIsCut) {
    std::mt19937 random{11};
    for (int round = 0; round < 3000; ++round) {
        std::vector<std::string> stops(1 + random() % 4);
        for (std::string& stop : stops) {
            stop.resize(1 + random() % 5);
            for (char& c : stop) {
                c = static_cast<char>('a' + random() % 3);
            }
        }
        std::string text(random() % 24, ' ');
        for (char& c : text) {
            c = static_cast<char>('a' + random() % 4);
        }
        const bool include = random() % 2 == 0;
        const auto set = Set(stops);
        const Outcome want = Reference(stops, text, include);
        for (const std::size_t piece : {1U, 2U, 3U, 7U, 100U}) {
            ASSERT_EQ(Feed(*set, text, piece, include), want) << text;
        }
    }
}

}  // namespace
}  // namespace rankgate::text
