// SPDX-License-Identifier: Apache-2.0
#include "engine/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace rankgate::engine {
namespace {

using wire::FinishReason;

/// Next token = (last token + 1) mod 1000, a function of the sequence alone. Remembers what it was asked to
/// do.
class CountingRunner final : public ModelRunner {
  public:
    const ModelFacts& facts() const noexcept override { return facts_; }
    Status Check(const wire::GenerateRequest&) noexcept override { return Status::Ok(); }
    Placement Place(const Sequence& sequence, std::span<const std::int32_t> free_slots) noexcept override {
        admitted.push_back(sequence.request.id);
        return Placement{free_slots.front(), std::min(cached, sequence.num_tokens() - 1)};
    }
    Status Run(const StepPlan& plan, StepResult& result) noexcept override {
        result.items.clear();
        for (const PlanItem& item : plan.items) {
            EXPECT_GE(item.num_tokens, 1);
            ItemResult outcome;
            if (item.sample) {
                outcome.kind = ItemResult::Kind::kToken;
                outcome.token = (item.sequence->TokenAt(item.sequence->num_tokens() - 1) + 1) % 1000;
            }
            result.items.push_back(outcome);
        }
        return Status::Ok();
    }
    void ResetPrefixCache() noexcept override {}

    std::vector<std::string> admitted;
    std::int64_t cached{0};

  private:
    ModelFacts facts_;
};

struct Fixture {
    explicit Fixture(SchedulerConfig config) {
        EXPECT_TRUE(config.Normalise().ok());
        scheduler = std::make_unique<Scheduler>(config, runner);
    }
    static std::unique_ptr<Sequence> Make(const std::string& id, int prompt, std::int64_t max_tokens,
                                          std::int64_t priority = 0) {
        auto sequence = std::make_unique<Sequence>();
        sequence->request.id = id;
        for (int i = 0; i < prompt; ++i) {
            sequence->request.prompt_token_ids.push_back(i + 10);
        }
        sequence->request.sampling.max_tokens = max_tokens;
        sequence->request.priority = priority;
        return sequence;
    }
    Status Add(const std::string& id, int prompt, std::int64_t max_tokens, std::int64_t priority = 0) {
        auto sequence = Make(id, prompt, max_tokens, priority);
        return scheduler->Add(sequence);
    }
    /// One step; false when there was nothing to run.
    bool Step() {
        const StepPlan& plan = scheduler->Plan();
        last_plan = plan;
        if (plan.empty()) {
            return false;
        }
        EXPECT_TRUE(runner.Run(plan, result).ok());
        std::vector<Row> rows;
        scheduler->Advance(result, rows);
        for (const Row& row : rows) {
            Sequence& sequence = *row.sequence;
            auto& got = outputs[sequence.request.id];
            got.insert(got.end(), sequence.unsent().begin(), sequence.unsent().end());
            sequence.sent = sequence.output.size();
            if (sequence.finish != FinishReason::kNone) {
                finished[sequence.request.id] = sequence.finish;
                reasons[sequence.request.id] = sequence.stop_reason;
            }
        }
        return true;
    }
    int RunAll(int limit = 100'000) {
        int steps = 0;
        while (steps < limit && Step()) {
            ++steps;
        }
        return steps;
    }

    CountingRunner runner;
    std::unique_ptr<Scheduler> scheduler;
    StepResult result;
    StepPlan last_plan;
    std::map<std::string, std::vector<TokenId>> outputs;
    std::map<std::string, FinishReason> finished;
    std::map<std::string, wire::StopReason> reasons;
};

SchedulerConfig Config(std::int32_t seqs, std::int32_t budget, std::int32_t block, std::int64_t blocks,
                       std::int64_t len = 512) {
    SchedulerConfig config;
    config.max_model_len = len;
    config.max_num_seqs = seqs;
    config.max_num_batched_tokens = budget;
    config.block_size = block;
    config.num_gpu_blocks = blocks;
    return config;
}

std::vector<TokenId> Expected(int prompt, int n) {
    std::vector<TokenId> tokens;
    for (int i = 0; i < n; ++i) {
        tokens.push_back((prompt + 9 + i + 1) % 1000);
    }
    return tokens;
}

void ExpectEmpty(const Scheduler& scheduler) {
    const auto load = scheduler.Load();
    EXPECT_EQ(load.num_running, 0);
    EXPECT_EQ(load.num_waiting, 0);
    EXPECT_EQ(load.kv_active_pages, 0);
    EXPECT_FALSE(scheduler.has_work());
}

TEST(Scheduler, RefusesNonsenseConfigNamingTheField) {
    SchedulerConfig config;
    config.max_num_seqs = 0;
    EXPECT_EQ(config.Normalise().error().param, "max-num-seqs");
    config = {};
    config.block_size = -1;
    EXPECT_EQ(config.Normalise().error().param, "block-size");
    config = {};
    config.max_num_batched_tokens = 0;
    EXPECT_EQ(config.Normalise().error().param, "max-num-batched-tokens");
    config = {};
    config.max_model_len = 1;
    EXPECT_EQ(config.Normalise().error().param, "max-model-len");
}

TEST(Scheduler, LowersMaxModelLenToWhatThePoolHolds) {
    SchedulerConfig config = Config(8, 512, 16, 4, 4096);
    ASSERT_TRUE(config.Normalise().ok());
    EXPECT_EQ(config.max_model_len, 64);
}

TEST(Scheduler, ServesInArrivalOrder) {
    Fixture f{Config(1, 512, 16, 100)};
    for (const char* id : {"c", "a", "b"}) {
        ASSERT_TRUE(f.Add(id, 3, 2).ok());
    }
    f.RunAll();
    EXPECT_EQ(f.runner.admitted, (std::vector<std::string>{"c", "a", "b"}));
    ExpectEmpty(*f.scheduler);
}

TEST(Scheduler, LowerPriorityNumberGoesFirstThenArrival) {
    Fixture f{Config(1, 512, 16, 100)};
    ASSERT_TRUE(f.Add("late", 3, 1, 5).ok());
    ASSERT_TRUE(f.Add("first", 3, 1, -1).ok());
    ASSERT_TRUE(f.Add("second", 3, 1, -1).ok());
    f.RunAll();
    EXPECT_EQ(f.runner.admitted, (std::vector<std::string>{"first", "second", "late"}));
}

TEST(Scheduler, BatchesUpToMaxNumSeqs) {
    Fixture f{Config(4, 512, 16, 100)};
    for (int i = 0; i < 6; ++i) {
        ASSERT_TRUE(f.Add("r" + std::to_string(i), 4, 3).ok());
    }
    ASSERT_TRUE(f.Step());
    EXPECT_EQ(f.last_plan.items.size(), 4u);
    EXPECT_EQ(f.scheduler->Load().num_running, 4);
    EXPECT_EQ(f.scheduler->Load().num_waiting, 2);
    f.RunAll();
    EXPECT_EQ(f.finished.size(), 6u);
    ExpectEmpty(*f.scheduler);
}

TEST(Scheduler, ChunksAPromptLongerThanTheBudgetAndGivesTheSameTokens) {
    Fixture whole{Config(2, 512, 16, 100)};
    Fixture chunked{Config(2, 7, 16, 100)};
    for (Fixture* f : {&whole, &chunked}) {
        ASSERT_TRUE(f->Add("r", 100, 5).ok());
    }
    EXPECT_EQ(whole.RunAll(), 5);
    ASSERT_TRUE(chunked.Step());
    EXPECT_FALSE(chunked.last_plan.items[0].sample);
    EXPECT_TRUE(chunked.outputs.empty()) << "an intermediate chunk has no row";
    EXPECT_EQ(chunked.RunAll(), 15 + 4 - 1);
    EXPECT_EQ(whole.outputs, chunked.outputs);
    EXPECT_EQ(whole.outputs["r"], Expected(100, 5));
}

TEST(Scheduler, ADecodeIsNotHeldUpByALongPrefill) {
    Fixture f{Config(2, 8, 16, 100)};
    ASSERT_TRUE(f.Add("decode", 2, 50).ok());
    ASSERT_TRUE(f.Step());
    ASSERT_TRUE(f.Add("long", 100, 1).ok());
    const std::size_t before = f.outputs["decode"].size();
    ASSERT_TRUE(f.Step());
    EXPECT_EQ(f.outputs["decode"].size(), before + 1);
    EXPECT_EQ(f.last_plan.num_tokens, 8);
}

TEST(Scheduler, EndsWithLengthAtMaxTokensAndAtMaxModelLen) {
    Fixture f{Config(2, 512, 16, 64, 512)};
    ASSERT_TRUE(f.Add("tokens", 3, 4).ok());
    ASSERT_TRUE(f.Add("model", 511, 1'000'000'000'000).ok());
    EXPECT_EQ(f.Add("too long", 512, 4).error().code, ErrorCode::kContextLength);
    f.RunAll();
    EXPECT_EQ(f.finished["tokens"], FinishReason::kLength);
    EXPECT_EQ(f.outputs["tokens"].size(), 4u);
    EXPECT_EQ(f.finished["model"], FinishReason::kLength);
    EXPECT_EQ(f.outputs["model"].size(), 1u);
}

TEST(Scheduler, StopsAtEosWithoutAReasonAndAtAStopIdWithIt) {
    Fixture f{Config(2, 512, 16, 100)};
    auto eos = Fixture::Make("eos", 3, 100);
    eos->request.sampling.eos_token_id = 15;  // the prompt ends with 12
    auto stop = Fixture::Make("stop", 3, 100);
    stop->request.sampling.stop_token_ids = {999, 14};
    ASSERT_TRUE(f.scheduler->Add(eos).ok());
    ASSERT_TRUE(f.scheduler->Add(stop).ok());
    f.RunAll();
    EXPECT_EQ(f.finished["eos"], FinishReason::kStop);
    EXPECT_TRUE(std::holds_alternative<std::monostate>(f.reasons["eos"]));
    EXPECT_EQ(f.outputs["eos"], (std::vector<TokenId>{13, 14, 15}));
    EXPECT_EQ(f.finished["stop"], FinishReason::kStop);
    EXPECT_EQ(f.reasons["stop"], wire::StopReason{std::int64_t{14}});
    EXPECT_EQ(f.outputs["stop"], (std::vector<TokenId>{13, 14}));
}

TEST(Scheduler, IgnoresStopsBeforeMinTokens) {
    Fixture f{Config(2, 512, 16, 100)};
    auto sequence = Fixture::Make("r", 3, 5);
    sequence->request.sampling.stop_token_ids = {13};
    sequence->request.sampling.min_tokens = 2;
    ASSERT_TRUE(f.scheduler->Add(sequence).ok());
    f.RunAll();
    EXPECT_EQ(f.finished["r"], FinishReason::kLength);
    EXPECT_EQ(f.outputs["r"].size(), 5u);
}

TEST(Scheduler, LengthOrStopFirstIsTheDialectsChoice) {
    for (const bool length_first : {false, true}) {
        SchedulerConfig config = Config(2, 512, 16, 100);
        config.length_before_stop = length_first;
        Fixture f{config};
        auto sequence = Fixture::Make("r", 3, 2);
        sequence->request.sampling.stop_token_ids = {14};
        ASSERT_TRUE(f.scheduler->Add(sequence).ok());
        f.RunAll();
        EXPECT_EQ(f.finished["r"], length_first ? FinishReason::kLength : FinishReason::kStop);
    }
}

TEST(Scheduler, RefusesALiveIdAndTakesItAgainAfterTheEnd) {
    Fixture f{Config(2, 512, 16, 100)};
    ASSERT_TRUE(f.Add("r", 3, 2).ok());
    EXPECT_EQ(f.Add("r", 3, 2).error().code, ErrorCode::kConflict);
    f.RunAll();
    EXPECT_EQ(f.outputs["r"].size(), 2u);
    EXPECT_TRUE(f.Add("r", 3, 2).ok());
}

TEST(Scheduler, AbortsInEveryStateAndFreesAtOnce) {
    Fixture f{Config(2, 8, 16, 100)};
    ASSERT_TRUE(f.Add("decoding", 2, 50).ok());
    ASSERT_TRUE(f.Step());
    ASSERT_TRUE(f.Add("prefilling", 60, 50).ok());
    ASSERT_TRUE(f.Add("waiting", 5, 50).ok());
    ASSERT_TRUE(f.Step());
    EXPECT_EQ(f.scheduler->Load().num_running, 2);
    for (const char* id : {"waiting", "prefilling", "decoding"}) {
        Sequence* aborted = f.scheduler->Abort(id);
        ASSERT_NE(aborted, nullptr) << id;
        EXPECT_EQ(aborted->finish, FinishReason::kAbort);
        EXPECT_EQ(f.scheduler->Abort(id), nullptr) << "idempotent";
    }
    EXPECT_EQ(f.scheduler->Abort("unknown"), nullptr);
    ExpectEmpty(*f.scheduler);
    EXPECT_FALSE(f.Step());
}

TEST(Scheduler, AnAbortWhileTheStepRunsDropsItsToken) {
    Fixture f{Config(2, 512, 16, 100)};
    ASSERT_TRUE(f.Add("a", 3, 10).ok());
    ASSERT_TRUE(f.Add("b", 3, 10).ok());
    const StepPlan& plan = f.scheduler->Plan();
    ASSERT_TRUE(f.runner.Run(plan, f.result).ok());
    f.scheduler->Abort("a");
    std::vector<Row> rows;
    f.scheduler->Advance(f.result, rows);
    ASSERT_EQ(rows.size(), 1u);
    EXPECT_EQ(rows[0].sequence->request.id, "b");
}

TEST(Scheduler, PreemptsTheLastWhenPagesRunOutAndLosesNoToken) {
    // Room for 6 pages of 4; three requests of 4 + 8 tokens want 9.
    Fixture f{Config(4, 512, 4, 6, 24)};
    for (const char* id : {"a", "b", "c"}) {
        ASSERT_TRUE(f.Add(id, 4, 8).ok());
    }
    f.RunAll(1000);
    for (const char* id : {"a", "b", "c"}) {
        EXPECT_EQ(f.outputs[id], Expected(4, 8)) << id;
    }
    EXPECT_GT(f.scheduler->TakePrefixStats().preempted_requests, 0);
    ExpectEmpty(*f.scheduler);
}

TEST(Scheduler, ABigRequestAtTheHeadOfTheQueueIsNotOvertaken) {
    Fixture f{Config(4, 512, 4, 8, 32)};
    ASSERT_TRUE(f.Add("running", 8, 8).ok());
    ASSERT_TRUE(f.Step());
    ASSERT_TRUE(f.Add("big", 24, 2).ok());
    ASSERT_TRUE(f.Add("small", 1, 2).ok());
    f.RunAll();
    EXPECT_EQ(f.runner.admitted, (std::vector<std::string>{"running", "big", "small"}));
}

TEST(Scheduler, LoadAfterTheLastStepShowsNothing) {
    Fixture f{Config(4, 512, 16, 100)};
    ASSERT_TRUE(f.Add("a", 40, 1).ok());
    ASSERT_TRUE(f.Step());
    ExpectEmpty(*f.scheduler);
}

TEST(Scheduler, PausedNewFinishesWhatRunsAndPausedAllFreezes) {
    Fixture f{Config(4, 512, 16, 100)};
    ASSERT_TRUE(f.Add("a", 3, 5).ok());
    ASSERT_TRUE(f.Step());
    f.scheduler->SetPause(PauseState::kPausedAll);
    ASSERT_TRUE(f.Add("b", 3, 5).ok());
    EXPECT_FALSE(f.Step());
    f.scheduler->SetPause(PauseState::kPausedNew);
    f.RunAll();
    EXPECT_TRUE(f.finished.contains("a"));
    EXPECT_FALSE(f.finished.contains("b"));
    f.scheduler->SetPause(PauseState::kRunning);
    f.RunAll();
    EXPECT_EQ(f.outputs["b"], Expected(3, 5));
}

TEST(Scheduler, PreemptAllKeepsOutputAndResumes) {
    Fixture f{Config(4, 512, 16, 100)};
    ASSERT_TRUE(f.Add("a", 3, 5).ok());
    ASSERT_TRUE(f.Step());
    ASSERT_TRUE(f.Step());
    f.scheduler->PreemptAll();
    EXPECT_EQ(f.scheduler->Load().num_running, 0);
    EXPECT_EQ(f.scheduler->Load().kv_active_pages, 0);
    f.RunAll();
    EXPECT_EQ(f.outputs["a"], Expected(3, 5));
}

TEST(Scheduler, ACachedPrefixIsNotComputedAgainAndIsReported) {
    Fixture f{Config(4, 512, 16, 100)};
    f.runner.cached = 8;
    ASSERT_TRUE(f.Add("a", 12, 1).ok());
    ASSERT_TRUE(f.Step());
    EXPECT_EQ(f.last_plan.num_tokens, 4);
    EXPECT_EQ(f.last_plan.items[0].first_position, 8);
    const PrefixStats stats = f.scheduler->TakePrefixStats();
    EXPECT_EQ(stats.queries, 12);
    EXPECT_EQ(stats.hits, 8);
    EXPECT_EQ(f.scheduler->TakePrefixStats().queries, 0) << "deltas";
}

TEST(Scheduler, EqualInputsGiveEqualDigests) {
    Fixture a{Config(4, 16, 4, 20, 64)};
    Fixture b{Config(4, 16, 4, 20, 64)};
    for (Fixture* f : {&a, &b}) {
        for (int i = 0; i < 9; ++i) {
            ASSERT_TRUE(f->Add(std::to_string(i), 3 + i, 6).ok());
        }
        f->RunAll();
    }
    EXPECT_EQ(a.scheduler->Digest(), b.scheduler->Digest());
    Fixture c{Config(4, 16, 4, 20, 64)};
    ASSERT_TRUE(c.Add("0", 4, 6).ok());
    c.RunAll();
    EXPECT_NE(a.scheduler->Digest(), c.scheduler->Digest());
}

// Any interleaving of adds, aborts, pauses and steps: pages and slots balance, order holds, everything ends,
// tokens are exact.
TEST(Scheduler, RandomInterleavingsNeitherLeakNorDeadlock) {
    for (std::uint32_t seed = 1; seed <= 60; ++seed) {
        std::mt19937 random{seed};
        const auto pick = [&](int low, int high) {
            return std::uniform_int_distribution<int>{low, high}(random);
        };
        const int block = pick(1, 9);
        const int blocks = pick(3, 30);
        SchedulerConfig config = Config(pick(1, 6), pick(1, 24), block, blocks, 4096);
        ASSERT_TRUE(config.Normalise().ok() || blocks * block < 2);
        if (config.max_model_len > blocks * block || config.max_model_len < 3) {
            continue;
        }
        Fixture f{config};
        std::map<std::string, std::pair<int, int>> wanted;
        std::vector<std::string> aborted;
        int next = 0;
        for (int round = 0; round < 400; ++round) {
            const int what = pick(0, 9);
            if (what < 3) {
                const std::string id = std::to_string(next++);
                const int prompt =
                    pick(1, static_cast<int>(std::min<std::int64_t>(config.max_model_len - 1, 40)));
                const int max_tokens = pick(1, 12);
                ASSERT_TRUE(f.Add(id, prompt, max_tokens, pick(0, 2)).ok());
                wanted[id] = {prompt, max_tokens};
            } else if (what == 3 && next > 0) {
                const std::string id = std::to_string(pick(0, next - 1));
                if (f.scheduler->Abort(id) != nullptr) {
                    aborted.push_back(id);
                }
            } else {
                f.Step();
                const auto load = f.scheduler->Load();
                ASSERT_LE(load.kv_active_pages, load.kv_total_pages);
                ASSERT_LE(load.num_running, config.max_num_seqs);
                ASSERT_LE(f.last_plan.num_tokens, config.max_num_batched_tokens);
            }
        }
        ASSERT_LT(f.RunAll(200'000), 200'000) << "seed " << seed;
        ExpectEmpty(*f.scheduler);
        for (const auto& [id, shape] : wanted) {
            if (std::find(aborted.begin(), aborted.end(), id) != aborted.end()) {
                continue;
            }
            const auto room = static_cast<int>(config.max_model_len) - shape.first;
            ASSERT_EQ(f.outputs[id], Expected(shape.first, std::min(shape.second, room)))
                << "seed " << seed << " id " << id;
            ASSERT_EQ(f.finished[id], FinishReason::kLength);
        }
    }
}

}  // namespace
}  // namespace rankgate::engine
