// SPDX-License-Identifier: Apache-2.0
#include "engine/sim_runner.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

namespace rankgate::engine {
namespace {

/// Moves a fake clock instead of sleeping.
class FakeSleeper final : public Sleeper {
  public:
    explicit FakeSleeper(FakeClock& clock) : clock_{clock} {}
    void SleepUntil(TimePoint when) noexcept override {
        if (when > clock_.Now()) {
            clock_.Advance(when - clock_.Now());
        }
    }

  private:
    FakeClock& clock_;
};

SimConfig Config() {
    SimConfig config;
    config.model.vocab_size = 1000;
    config.first_token = 100;
    config.last_token = 199;
    config.block_size = 4;
    config.num_blocks = 8;
    config.max_num_seqs = 4;
    return config;
}

std::unique_ptr<Sequence> Make(std::vector<TokenId> prompt) {
    auto sequence = std::make_unique<Sequence>();
    sequence->request.prompt_token_ids = std::move(prompt);
    return sequence;
}

const std::vector<std::int32_t> kSlots{0, 1, 2, 3};

ItemResult RunOne(SimRunner& runner, Sequence& sequence, std::int32_t slot) {
    StepPlan plan;
    PlanItem item;
    item.sequence = &sequence;
    item.slot = slot;
    item.first_position = sequence.computed;
    item.num_tokens = static_cast<std::int32_t>(sequence.num_tokens() - sequence.computed);
    item.sample = true;
    plan.items.push_back(item);
    plan.num_prefill_tokens = sequence.output.empty() ? item.num_tokens : 0;
    StepResult result;
    EXPECT_TRUE(runner.Run(plan, result).ok());
    return result.items.at(0);
}

TEST(SimRunner, TokensDependOnPromptAndPositionOnly) {
    FakeClock clock;
    SimRunner runner{Config(), clock, std::make_unique<FakeSleeper>(clock)};
    auto a = Make({1, 2, 3});
    auto b = Make({1, 2, 3});
    const Placement place_a = runner.Place(*a, kSlots);
    const Placement place_b = runner.Place(*b, std::vector<std::int32_t>{2});
    for (int i = 0; i < 20; ++i) {
        const ItemResult x = RunOne(runner, *a, place_a.slot);
        const ItemResult y = RunOne(runner, *b, place_b.slot);
        EXPECT_EQ(x.token, y.token);
        EXPECT_EQ(x.token, SimToken(SimHash(a->request), static_cast<std::uint64_t>(i), 100, 199));
        EXPECT_GE(x.token, 100);
        EXPECT_LE(x.token, 199);
        a->output.push_back(x.token);
        b->output.push_back(y.token);
    }
    auto c = Make({1, 2, 4});
    EXPECT_NE(SimHash(a->request), SimHash(c->request));
}

TEST(SimRunner, StepsTakeWhatTheFormulaSays) {
    FakeClock clock;
    SimConfig config = Config();
    config.prefill_tps = 1000;
    config.step_us = 500;
    config.step_us_per_seq = 100;
    SimRunner runner{config, clock, std::make_unique<FakeSleeper>(clock)};
    auto a = Make({1, 2, 3, 4, 5});
    const Placement place = runner.Place(*a, kSlots);
    const TimePoint start = clock.Now();
    a->output.push_back(RunOne(runner, *a, place.slot).token);
    EXPECT_EQ(clock.Now() - start, std::chrono::microseconds(5000 + 600));
    a->computed = 5;
    RunOne(runner, *a, place.slot);
    EXPECT_EQ(clock.Now() - start, std::chrono::microseconds(5000 + 600 + 600));
}

TEST(SimRunner, FindsACachedPrefixInWholeBlocksAndHonoursTheSalt) {
    FakeClock clock;
    SimRunner runner{Config(), clock, std::make_unique<FakeSleeper>(clock)};
    auto first = Make({1, 2, 3, 4, 5, 6, 7, 8, 9});
    EXPECT_EQ(runner.Place(*first, kSlots).cached, 0);
    auto again = Make({1, 2, 3, 4, 5, 6, 7, 8, 9});
    EXPECT_EQ(runner.Place(*again, kSlots).cached, 8);
    auto whole = Make({1, 2, 3, 4, 5, 6, 7, 8});
    EXPECT_EQ(runner.Place(*whole, kSlots).cached, 4) << "one token at least is computed";
    auto half = Make({1, 2, 3, 4, 9, 9, 9, 9, 9});
    EXPECT_EQ(runner.Place(*half, kSlots).cached, 4);
    auto salted = Make({1, 2, 3, 4, 5, 6, 7, 8, 9});
    salted->request.cache_salt = "tenant";
    EXPECT_EQ(runner.Place(*salted, kSlots).cached, 0);
    auto skipping = Make({1, 2, 3, 4, 5, 6, 7, 8, 9});
    skipping->request.sampling.skip_reading_prefix_cache = true;
    EXPECT_EQ(runner.Place(*skipping, kSlots).cached, 0);
    runner.ResetPrefixCache();
    EXPECT_EQ(runner.Place(*again, kSlots).cached, 0);
}

TEST(SimRunner, EvictsTheLeastRecentlyUsedBlocks) {
    FakeClock clock;
    SimRunner runner{Config(), clock, std::make_unique<FakeSleeper>(clock)};  // 8 blocks of 4
    auto hot = Make({1, 1, 1, 1, 1});
    runner.Place(*hot, kSlots);
    for (TokenId i = 10; i < 100; ++i) {
        auto other = Make({i, i, i, i, i});
        runner.Place(*other, kSlots);
        EXPECT_EQ(runner.Place(*hot, kSlots).cached, 4) << "used all the time, never evicted";
    }
    auto cold = Make({10, 10, 10, 10, 10});
    EXPECT_EQ(runner.Place(*cold, kSlots).cached, 0);
}

TEST(SimRunner, EndsWithEosWhenToldTo) {
    FakeClock clock;
    SimConfig config = Config();
    config.eos_after = 3;
    SimRunner runner{config, clock, std::make_unique<FakeSleeper>(clock)};
    auto a = Make({1, 2, 3});
    a->request.sampling.eos_token_id = 7;
    const Placement place = runner.Place(*a, kSlots);
    for (int i = 0; i < 3; ++i) {
        a->output.push_back(RunOne(runner, *a, place.slot).token);
    }
    EXPECT_NE(a->output[1], 7);
    EXPECT_EQ(a->output[2], 7);
}

}  // namespace
}  // namespace rankgate::engine
