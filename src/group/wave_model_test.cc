// SPDX-License-Identifier: Apache-2.0
// The wave protocol under every order of events: each known hang first, with the policy that has it, then the
// clock that has none. The small searches run with the unit tests; the large ones (3 ranks, 4 requests) are
// in wave_model_full_test.
#include "group/wave_model.h"

#include <gtest/gtest.h>

namespace rankgate::group {
namespace {

#ifdef RG_WAVE_MODEL_FULL
constexpr bool kFull = true;
#else
constexpr bool kFull = false;
#endif

template <class Policy>
ModelResult Search(const ModelConfig& config, const Policy& policy) {
    return WaveModel<Policy>{config, policy}.Run();
}

EngineRules Older() {
    return {2, false, false};
}
EngineRules Current() {
    return {2, true, false};
}
EngineRules StartsAlone() {
    return {2, true, true};
}

void ExpectHang(ModelConfig config, const NaivePolicy& policy) {
    config.reduce = true;
    EXPECT_TRUE(Search(config, policy).hang) << "the reduced search overlooks it";
    config.reduce = false;
    const ModelResult result = Search(config, policy);
    EXPECT_TRUE(result.hang) << "the double does not show the hang that the field knows, after "
                             << result.states;
    if (result.hang) {
        std::printf("  hangs after %zu events: %s\n", result.trace.size() / 2, result.trace.c_str());
    }
}

ModelConfig Small() {
    ModelConfig config;
    config.ranks = 2;
    config.requests = 3;
    return config;
}

// ---- the hangs of the field ------------------------------------------------------------------------------

TEST(WaveHangs, WakeSkippedOnAStaleRunningFlag) {
    for (const EngineRules& rules : {Older(), Current()}) {
        ModelConfig config = Small();
        config.rules = rules;
        ExpectHang(config, NaivePolicy{});
    }
}

TEST(WaveHangs, WakeThatReplaysTheLastReportedNumber) {
    for (const EngineRules& rules : {Older(), Current()}) {
        ModelConfig config = Small();
        config.rules = rules;
        NaivePolicy policy;
        policy.skip_if_running = false;
        policy.replay_reported = true;
        ExpectHang(config, policy);
    }
}

TEST(WaveHangs, HolderExcludedFromTheWake) {
    for (const EngineRules& rules : {Older(), Current()}) {
        ModelConfig config = Small();
        config.rules = rules;
        NaivePolicy policy;
        policy.bump = true;
        policy.re_arm = true;
        policy.exclude_holders = true;
        ExpectHang(config, policy);
    }
}

TEST(WaveHangs, LateAddRacingTheAllReduceThoughEverySubmitWakes) {
    for (const EngineRules& rules : {Older(), Current()}) {
        ModelConfig config = Small();
        config.rules = rules;
        NaivePolicy policy;
        policy.skip_if_running = false;
        policy.bump = true;
        ExpectHang(config, policy);
    }
}

TEST(WaveHangs, RankAheadAfterAGatewayRestart) {
    ModelConfig config = Small();
    config.waves = {5, 5, 5};
    ExpectHang(config, NaivePolicy{});
    EXPECT_TRUE(Search(config, ClockPolicy{0}).hang) << "a clock that starts at zero has it too";
    EXPECT_FALSE(Search(config, ClockPolicy{1'000'000}).hang) << "one that starts at the time of day has not";
}

TEST(WaveHangs, PauseToOneRankIsNeverAnswered) {
    ModelConfig config = Small();
    config.requests = 1;
    config.pause = true;
    config.pause_ranks = 1;
    config.check_progress = true;
    const ModelResult result = Search(config, ClockPolicy{10});
    EXPECT_TRUE(result.complete || result.hang);
    EXPECT_FALSE(result.pause_answered);
    EXPECT_FALSE(result.always_can_finish);
    EXPECT_FALSE(result.finished);
}

TEST(WaveHangs, ResumeToOneRankOfAnIdleGroupBlocksIt) {
    ModelConfig config = Small();
    config.requests = 1;
    config.resume_unpaused = 1;
    EXPECT_TRUE(Search(config, ClockPolicy{10}).hang);
}

TEST(WaveHangs, ResumeToAllRanksOfAGroupThatIsNotPausedMayBlockItToo) {
    // One rank runs and has nothing to resume, its peer is parked and enters the barrier of the resume: each
    // waits for the other. Hence CheckAdmin: no resume unless the group is known to be paused, and one such
    // call at a time.
    ModelConfig config = Small();
    config.requests = 2;
    config.resume_unpaused = 2;
    EXPECT_TRUE(Search(config, ClockPolicy{10}).hang);
}

// ---- the clock -------------------------------------------------------------------------------------------

void ExpectNoHang(ModelConfig config, std::uint64_t initial = 1000) {
    const bool large = kFull && config.ranks == 3;
    config.reduce = config.ranks == 3 && !config.pause;
    const ModelResult result = large ? WaveModel<ClockPolicy, 2>{config, ClockPolicy{initial}}.Run()
                                     : Search(config, ClockPolicy{initial});
    EXPECT_FALSE(result.hang) << result.trace;
    EXPECT_TRUE(result.complete) << result.states;
    EXPECT_TRUE(result.finished);
    if (config.check_progress) {
        EXPECT_TRUE(result.always_can_finish);
    }
    std::printf("  %d ranks, %d requests, interval %d%s%s%s%s: %zu states, depth %zu, at most %zu wakes\n",
                config.ranks, config.requests, config.rules.interval,
                config.rules.sync_on_first ? " and step 1" : "",
                config.rules.starts_alone ? ", starts alone" : "",
                config.long_requests ? ", two lengths"
                : config.reports     ? ", reports"
                                     : "",
                config.pause ? ", pause and resume" : "", result.states, result.depth, result.max_wakes);
}

std::vector<EngineRules> Generations() {
    return {Older(), Current(), EngineRules{3, true, false}, EngineRules{3, false, false}, StartsAlone()};
}

TEST(WaveClockModel, TwoRanksThreeRequestsNeverHang) {
    for (const EngineRules& rules : Generations()) {
        for (const bool reports : {false, true}) {
            ModelConfig config = Small();
            config.rules = rules;
            config.reports = reports;
            ExpectNoHang(config);
        }
    }
}

TEST(WaveClockModel, WavesThatOutliveTheirFirstSyncNeverHangAndAlwaysCanFinish) {
    for (const EngineRules& rules : {Older(), Current(), EngineRules{3, true, false}}) {
        ModelConfig config = Small();
        config.rules = rules;
        config.long_requests = true;
        config.check_progress = true;
        config.requests = kFull ? 3 : 2;
        ExpectNoHang(config);
    }
}

TEST(WaveClockModel, RanksFoundAheadUnequalOrBusyNeverHang) {
    for (const EngineRules& rules : Generations()) {
        for (const bool orphan : {false, true}) {
            ModelConfig config = Small();
            config.requests = 2;
            config.rules = rules;
            config.orphan = orphan;
            config.reports = true;
            for (std::int64_t ahead = 0; ahead < 3; ++ahead) {
                config.waves = {ahead, 2, 0};
                ExpectNoHang(config);
            }
        }
    }
}

TEST(WaveClockModel, PauseAndResumeToAllNeverHang) {
    for (const EngineRules& rules : {Older(), Current(), StartsAlone()}) {
        ModelConfig config = Small();
        config.requests = kFull ? 2 : 1;
        config.rules = rules;
        config.check_progress = !rules.starts_alone;
        config.pause = true;
        ExpectNoHang(config);
    }
}

TEST(WaveClockModel, ThreeRanksNeverHang) {
    ModelConfig config;
    config.requests = kFull ? 4 : 2;
    for (const EngineRules& rules : {Current(), Older()}) {
        config.rules = rules;
        ExpectNoHang(config);
    }
}

TEST(WaveClockModel, ThreeRanksWithRequestsOfTwoLengthsNeverHang) {
    ModelConfig config;
    config.requests = kFull ? 3 : 1;
    config.long_requests = true;
    config.reports = true;
    for (const EngineRules& rules : {Current(), Older()}) {
        config.rules = rules;
        ExpectNoHang(config);
    }
}

TEST(WaveClockModel, ThreeRanksThatStartAloneNeverHang) {
    ModelConfig config;
    config.requests = kFull ? 2 : 1;
    config.rules = StartsAlone();
    ExpectNoHang(config);
}

}  // namespace
}  // namespace rankgate::group
