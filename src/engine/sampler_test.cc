// SPDX-License-Identifier: Apache-2.0
#include "engine/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <vector>

namespace rankgate::engine {
namespace {

Sequence Greedy() {
    Sequence sequence;
    sequence.request.id = "r";
    sequence.request.prompt_token_ids = {0};
    sequence.request.sampling.temperature = 0;
    return sequence;
}

const std::vector<float> kLogits{1.0F, 3.0F, 2.0F, 3.0F, -1.0F};

TEST(Sampler, GreedyTakesTheFirstOfTheBest) {
    SamplerScratch scratch;
    const Sequence sequence = Greedy();
    EXPECT_EQ(SampleToken(sequence, kLogits, {}, scratch), 1);
}

TEST(Sampler, MasksApplyToGreedyToo) {
    SamplerScratch scratch;
    Sequence sequence = Greedy();
    sequence.request.sampling.allowed_token_ids = std::vector<TokenId>{0, 2, 4, 99};
    EXPECT_EQ(SampleToken(sequence, kLogits, {}, scratch), 2);
    EXPECT_EQ(SampleToken(sequence, kLogits, {}, scratch), 2) << "the scratch is clean again";
    sequence = Greedy();
    sequence.request.sampling.bad_words_token_ids = {{1}, {7, 3}};
    EXPECT_EQ(SampleToken(sequence, kLogits, {}, scratch), 3);
    sequence.output = {7};
    EXPECT_EQ(SampleToken(sequence, kLogits, {}, scratch), 2) << "7 3 is a bad word now";
    sequence = Greedy();
    sequence.request.sampling.min_tokens = 1;
    sequence.request.sampling.all_stop_token_ids = {1};
    sequence.request.sampling.eos_token_id = 3;
    EXPECT_EQ(SampleToken(sequence, kLogits, {}, scratch), 2);
    sequence.output = {7};
    EXPECT_EQ(SampleToken(sequence, kLogits, {}, scratch), 1) << "min_tokens reached";
    sequence = Greedy();
    sequence.request.sampling.logit_bias = {{4, 50.0}, {12345, 1.0}};
    EXPECT_EQ(SampleToken(sequence, kLogits, {}, scratch), 4);
    const std::vector<std::uint8_t> grammar{1, 0, 0, 0, 1};
    EXPECT_EQ(SampleToken(Greedy(), kLogits, grammar, scratch), 0);
}

TEST(Sampler, PenaltiesAreThoseOfTheRuntime) {
    SamplerScratch scratch;
    Sequence sequence = Greedy();
    sequence.request.sampling.frequency_penalty = 0.6;
    sequence.output = {1, 1, 3};
    // 1: 3 - 1.2, 3: 3 - 0.6
    EXPECT_EQ(SampleToken(sequence, kLogits, {}, scratch), 3);
    sequence.request.sampling.frequency_penalty = 0;
    sequence.request.sampling.presence_penalty = 1.5;
    EXPECT_EQ(SampleToken(sequence, kLogits, {}, scratch), 2);
    sequence.request.sampling.presence_penalty = 0;
    sequence.request.sampling.repetition_penalty = 2.0;
    EXPECT_EQ(SampleToken(sequence, kLogits, {}, scratch), 2);
    // The prompt counts for repetition, and negative logits move down, not up.
    Sequence prompt = Greedy();
    prompt.request.prompt_token_ids = {0};
    prompt.request.sampling.repetition_penalty = 2.0;
    EXPECT_EQ(SampleToken(prompt, std::vector<float>{-1.0F, -1.5F}, {}, scratch), 1);
    EXPECT_EQ(SampleToken(prompt, std::vector<float>{-1.0F, -1.5F}, {}, scratch), 1)
        << "the scratch is clean again";
}

std::map<TokenId, int> Draws(Sequence sequence, const std::vector<float>& logits, int n) {
    SamplerScratch scratch;
    std::map<TokenId, int> counts;
    for (int i = 0; i < n; ++i) {
        sequence.request.sampling.seed = i;
        counts[SampleToken(sequence, logits, {}, scratch)] += 1;
    }
    return counts;
}

TEST(Sampler, DrawsFollowTheDistribution) {
    Sequence sequence = Greedy();
    sequence.request.sampling.temperature = 1.0;
    const std::vector<float> logits{std::log(0.5F), std::log(0.3F), std::log(0.2F)};
    const auto counts = Draws(sequence, logits, 20'000);
    EXPECT_NEAR(counts.at(0), 10'000, 300);
    EXPECT_NEAR(counts.at(1), 6'000, 300);
    EXPECT_NEAR(counts.at(2), 4'000, 300);
    sequence.request.sampling.temperature = 0.5;  // squares: 25 9 4
    const auto cold = Draws(sequence, logits, 20'000);
    EXPECT_NEAR(cold.at(0), 20'000.0 * 25 / 38, 300);
}

TEST(Sampler, TopKTopPAndMinPCut) {
    Sequence sequence = Greedy();
    sequence.request.sampling.temperature = 1.0;
    std::vector<float> logits;
    for (int i = 0; i < 1000; ++i) {
        logits.push_back(std::log(0.5F) * static_cast<float>(i));  // 1/2, 1/4, 1/8 ...
    }
    sequence.request.sampling.top_k = 2;
    auto counts = Draws(sequence, logits, 3000);
    EXPECT_EQ(counts.size(), 2u);
    EXPECT_NEAR(counts.at(0), 2000, 150);
    sequence.request.sampling.top_k = 0;
    sequence.request.sampling.top_p = 0.8;  // 0.5 + 0.25 < 0.8 <= + 0.125
    counts = Draws(sequence, logits, 3000);
    EXPECT_EQ(counts.size(), 3u);
    sequence.request.sampling.top_p = 1e-9;
    EXPECT_EQ(Draws(sequence, logits, 50).size(), 1u);
    sequence.request.sampling.top_p = 1.0;
    sequence.request.sampling.min_p = 0.2;  // 1, 1/2, 1/4 of the best survive
    counts = Draws(sequence, logits, 3000);
    EXPECT_EQ(counts.size(), 3u);
}

TEST(Sampler, TopPOverAFlatDistributionKeepsItsShare) {
    Sequence sequence = Greedy();
    sequence.request.sampling.temperature = 1.0;
    sequence.request.sampling.top_p = 0.5;
    const std::vector<float> logits(1000, 0.0F);
    const auto counts = Draws(sequence, logits, 20'000);
    EXPECT_EQ(counts.size(), 500u);
    EXPECT_LT(counts.rbegin()->first, 500);
}

TEST(Sampler, OneSeedIsOneSequenceAndNoSeedDependsOnTheId) {
    SamplerScratch scratch;
    Sequence sequence = Greedy();
    sequence.request.sampling.temperature = 1.0;
    const std::vector<float> logits(500, 0.0F);
    const auto stream = [&](Sequence s) {
        for (int i = 0; i < 30; ++i) {
            s.output.push_back(SampleToken(s, logits, {}, scratch));
        }
        return s.output;
    };
    Sequence other = sequence;
    other.request.id = "s";
    EXPECT_EQ(stream(sequence), stream(sequence));
    EXPECT_NE(stream(sequence), stream(other));
    sequence.request.sampling.seed = 5;
    other.request.sampling.seed = 5;
    EXPECT_EQ(stream(sequence), stream(other));
}

TEST(Sampler, LogprobsAreTheLogSoftmaxOfTheRawLogits) {
    SamplerScratch scratch;
    wire::Logprobs scored;
    const std::vector<float> logits{std::log(0.5F) + 7, std::log(0.2F) + 7, std::log(0.3F) + 7};
    AppendLogprobs(logits, 1, 2, scratch, scored);
    EXPECT_EQ(scored.positions, 1);
    EXPECT_EQ(scored.width, 3);
    EXPECT_EQ(scored.token_ids, (std::vector<TokenId>{1, 0, 2}));
    EXPECT_EQ(scored.ranks, (std::vector<std::int64_t>{3}));
    EXPECT_NEAR(scored.logprobs[0], std::log(0.2), 1e-5);
    EXPECT_NEAR(scored.logprobs[1], std::log(0.5), 1e-5);
    AppendLogprobs(logits, 0, -1, scratch, scored);
    EXPECT_EQ(scored.width, 4);
}

}  // namespace
}  // namespace rankgate::engine
