// SPDX-License-Identifier: Apache-2.0
#include "relay/prewake.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace rankgate::relay {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

/// A follower in a world of its own: it waits for steps as the ring's follower does, and the time that it
/// looks is added up.
class PreWakeTest : public testing::Test {
  protected:
    /// Of a sleeper, by a step.
    static constexpr Nanos kWaking = microseconds{30};

    /// The next step comes after `gap`; the follower has waited for it all the time. Its sleeps end `late_`
    /// late.
    void StepAfter(Nanos gap) {
        const SteadyTime comes = now_ + gap;
        const PreWake::Window window = pre_wake_.Next(now_);
        awake_ = false;
        if (!window.empty()) {
            SteadyTime from = window.from;
            if (window.from > now_) {
                from += late_;
                pre_wake_.Slept(window.from, std::min(from, comes + kWaking));
            }
            if (from < comes) {
                const SteadyTime ends = std::max(from, std::min(window.until, comes));
                looked_ += ends - from;
                longest_look_ = std::max(longest_look_, ends - from);
                awake_ = window.until >= comes;
                if (!awake_) {
                    pre_wake_.Missed(ends - from, ends);
                }
            }
        }
        now_ = comes;
        pre_wake_.Arrived(comes, awake_ ? comes : comes + kWaking);
    }
    /// How long before the earliest moment of the next step, a gap of `gap` after the last, it means to wake.
    Nanos Early(Nanos gap) { return now_ + gap - pre_wake_.Next(now_).from; }
    void Steps(int n, Nanos gap) {
        for (int i = 0; i < n; ++i) {
            StepAfter(gap);
        }
    }

    std::atomic<std::int64_t> rest_until_{0};
    PreWake pre_wake_{rest_until_};
    SteadyTime now_{seconds{1000}};
    Nanos looked_{0};
    Nanos longest_look_{0};
    bool awake_{false};  // when the last step came
    Nanos late_{0};
};

TEST_F(PreWakeTest, NothingIsForeseenBeforeSevenGapsWereSeen) {
    Steps(7, milliseconds{1});  // the first of them starts the first gap
    EXPECT_TRUE(pre_wake_.Next(now_).empty());
    Steps(1, milliseconds{1});
    EXPECT_FALSE(pre_wake_.Next(now_).empty());
}

TEST_F(PreWakeTest, ARegularStepFindsItsFollowerAwakeAndHavingSleptTillShortlyBefore) {
    for (const Nanos gap :
         std::vector<Nanos>{microseconds{400}, milliseconds{1}, milliseconds{10}, milliseconds{90}}) {
        Steps(8, gap);
        looked_ = Nanos{0};
        for (int i = 0; i < 100; ++i) {
            StepAfter(gap);
            EXPECT_TRUE(awake_);
        }
        EXPECT_EQ(looked_, 100 * PreWake::kEarly) << gap.count();
    }
}

TEST_F(PreWakeTest, ASleepThatEndsLateIsBegunEarlierToBeOver) {
    for (const Nanos late : std::vector<Nanos>{microseconds{120}, microseconds{200}, microseconds{270}}) {
        late_ = late;
        Steps(9, milliseconds{2});
        looked_ = Nanos{0};
        for (int i = 0; i < 100; ++i) {
            StepAfter(milliseconds{2});
            EXPECT_TRUE(awake_) << late.count();
        }
        EXPECT_EQ(looked_, 100 * PreWake::kMargin) << late.count();
    }
    late_ = Nanos{0};
    Steps(PreWake::kSleeps, milliseconds{2});
    EXPECT_EQ(Early(milliseconds{2}), PreWake::kEarly) << "what was long ago is forgotten";
}

TEST_F(PreWakeTest, ALeaderThatIsSometimesEarlyIsWaitedForFromEarlierOn) {
    Steps(8, milliseconds{2});
    for (int i = 0; i < 8; ++i) {
        Steps(7, milliseconds{2});
        StepAfter(microseconds{1850});
        EXPECT_EQ(awake_, i > 0);
    }
}

TEST_F(PreWakeTest, ItWakesAtMostAQuarterOfTheGapTooEarly) {
    late_ = microseconds{250};
    Steps(20, microseconds{600});
    EXPECT_EQ(Early(microseconds{600}), microseconds{150});
    late_ = 2 * PreWake::kMostEarly - PreWake::kMargin;
    Steps(20, milliseconds{10});
    EXPECT_EQ(Early(milliseconds{10}), PreWake::kMostEarly);
}

TEST_F(PreWakeTest, SomebodyElsesTurnIsNotAllowedFor) {
    Steps(20, milliseconds{10});
    for (int i = 0; i < 20; ++i) {
        const PreWake::Window window = pre_wake_.Next(now_);
        const SteadyTime runs = window.from + milliseconds{4};  // its step had woken it long before
        now_ += milliseconds{10};
        pre_wake_.Slept(window.from, runs);
        pre_wake_.Arrived(now_, runs);
    }
    EXPECT_EQ(Early(milliseconds{10}), PreWake::kEarly);
}

TEST_F(PreWakeTest, AFollowerThatWasLateForeseesFromWhenTheStepWasSent) {
    Steps(20, milliseconds{1});
    const SteadyTime sent = now_ + milliseconds{1};
    pre_wake_.Arrived(sent, sent + microseconds{600});
    EXPECT_EQ(pre_wake_.Next(sent + microseconds{600}).until, sent + milliseconds{1} + PreWake::kLate);
}

TEST_F(PreWakeTest, ATimeOfSendingThatCannotBeIsNotBelieved) {
    for (const Nanos wrong :
         std::vector<Nanos>{seconds{1}, -seconds{1}, Nanos::max() / 2, -Nanos::max() / 2}) {
        Steps(20, milliseconds{1});
        now_ += milliseconds{1};
        pre_wake_.Arrived(SteadyTime{now_.time_since_epoch() / 2 + wrong}, now_);
        EXPECT_EQ(pre_wake_.Next(now_).until, now_ + milliseconds{1} + PreWake::kLate) << wrong.count();
    }
    Steps(20, milliseconds{1});
    now_ += milliseconds{1};
    pre_wake_.Arrived(now_ + Nanos{1}, now_);
    EXPECT_EQ(pre_wake_.Next(now_).until, now_ + milliseconds{1} + PreWake::kLate);
}

TEST_F(PreWakeTest, ShortGapsAreWaitedForWithoutASleep) {
    Steps(8, microseconds{100});
    const PreWake::Window window = pre_wake_.Next(now_);
    EXPECT_EQ(window.from, now_);
    EXPECT_EQ(window.until, now_ + microseconds{100} + PreWake::kLate);
}

TEST_F(PreWakeTest, TheWindowSpansAllButTheShortestAndTheLongestOfTheLastGaps) {
    for (const int us : {1000, 900, 1050, 1000, 5000, 950, 10, 1000}) {
        StepAfter(microseconds{us});
    }
    const PreWake::Window window = pre_wake_.Next(now_);
    EXPECT_EQ(window.from, now_ + microseconds{900} - PreWake::kEarly);
    EXPECT_EQ(window.until, now_ + microseconds{1050} + PreWake::kLate);
}

TEST_F(PreWakeTest, AnIdleLeaderIsWaitedForAsleep) {
    Steps(20, milliseconds{1});
    const PreWake::Window window = pre_wake_.Next(now_);
    ASSERT_FALSE(window.empty());
    pre_wake_.Missed(window.until - window.from, window.until);
    for (const Nanos later : std::vector<Nanos>{Nanos{0}, milliseconds{1}, seconds{1}, seconds{3600}}) {
        EXPECT_TRUE(pre_wake_.Next(window.until + later).empty());
    }
}

TEST_F(PreWakeTest, APauseIsNoGap) {
    Steps(20, milliseconds{1});
    StepAfter(seconds{5});
    StepAfter(milliseconds{1});
    EXPECT_TRUE(awake_) << "the pace from before the pause still counts";
}

TEST_F(PreWakeTest, StepsThatComeSlowerThanTheLongestGapAreNeverLookedFor) {
    Steps(50, PreWake::kLongestGap + milliseconds{1});
    EXPECT_EQ(looked_, Nanos{0});
}

TEST_F(PreWakeTest, AnIrregularLoadCostsAtMostAFewPercent) {
    std::mt19937 random{3};
    for (const double mean_ms : {0.3, 1.0, 5.0, 40.0}) {
        Nanos in_vain{0};
        const SteadyTime start = now_;
        for (int i = 0; i < 5000; ++i) {
            const Nanos before = looked_;
            StepAfter(ToNanos(Seconds{std::exponential_distribution<>{1 / mean_ms}(random) / 1000}));
            if (!awake_) {
                in_vain += looked_ - before;
            }
        }
        const Nanos allowed =
            (now_ - start) / PreWake::kWasteShare + PreWake::kMostWaste + PreWake::kLongestLook;
        EXPECT_LE(in_vain, allowed) << mean_ms;
        EXPECT_LE(longest_look_, PreWake::kLongestLook);
        // In vain or not: what is irregular is hardly looked for at all.
        if (mean_ms >= 1) {
            EXPECT_LE(looked_, (now_ - start) / 10) << mean_ms;
        }
        looked_ = Nanos{0};
    }
}

TEST_F(PreWakeTest, AfterLooksInVainItSleepsUntilTheTimeHasMadeUpForThem) {
    Steps(20, milliseconds{10});
    int looks = 0;
    while (!pre_wake_.Next(now_).empty() && looks < 100) {
        pre_wake_.Missed(microseconds{300}, now_);
        ++looks;
    }
    EXPECT_EQ(looks, 4);
    // A fifth of a millisecond too much, of which a thirty-second part is made up for.
    Steps(1, milliseconds{6});
    EXPECT_FALSE(awake_);
    Steps(7, milliseconds{10});
    StepAfter(milliseconds{10});
    EXPECT_TRUE(awake_);
}

TEST_F(PreWakeTest, WhoeverIsKeptFromItsCpuRestsTwiceAsLongEachTime) {
    Steps(20, milliseconds{1});
    EXPECT_FALSE(pre_wake_.Next(now_).empty());
    Nanos rest = PreWake::kFirstRest;
    for (int i = 0; i < 8; ++i) {
        pre_wake_.Displaced(now_);
        pre_wake_.Displaced(now_);
        EXPECT_EQ(rest_until_.load(), (now_.time_since_epoch() + rest).count());
        Steps(1, milliseconds{1});
        EXPECT_TRUE(pre_wake_.Next(now_).empty());
        now_ = SteadyTime{Nanos{rest_until_.load()}};
        rest = std::min(rest * 2, PreWake::kLongestRest);
    }
    now_ += PreWake::kLongestRest + milliseconds{1};
    pre_wake_.Displaced(now_);
    pre_wake_.Displaced(now_);
    EXPECT_EQ(rest_until_.load(), (now_.time_since_epoch() + PreWake::kFirstRest).count());
}

TEST_F(PreWakeTest, WhoeverIsKeptFromItsCpuOnceInAWhileGoesOnLooking) {
    Steps(20, milliseconds{1});
    for (int i = 0; i < 20; ++i) {
        pre_wake_.Displaced(now_);
        EXPECT_EQ(rest_until_.load(), 0);
        for (std::uint64_t window = 0; window < PreWake::kAbsenceWithin; ++window) {
            Steps(1, milliseconds{1});
            EXPECT_FALSE(pre_wake_.Next(now_).empty());
        }
    }
    pre_wake_.Displaced(now_);
    Steps(1, milliseconds{1});
    EXPECT_FALSE(pre_wake_.Next(now_).empty());
    pre_wake_.Displaced(now_);
    EXPECT_EQ(rest_until_.load(), (now_.time_since_epoch() + PreWake::kFirstRest).count());
}

TEST_F(PreWakeTest, OneFollowersRestIsEverybodys) {
    PreWake other{rest_until_};
    Steps(20, milliseconds{1});
    other.Displaced(now_);
    other.Displaced(now_);
    EXPECT_TRUE(pre_wake_.Next(now_).empty());
    pre_wake_.Displaced(now_);  // says nothing new
    EXPECT_EQ(rest_until_.load(), (now_.time_since_epoch() + PreWake::kFirstRest).count());
}

TEST_F(PreWakeTest, AClockThatStandsStillOrAStepThatWasThereAlreadyIsNoHarm) {
    Steps(30, Nanos{0});
    EXPECT_LE(pre_wake_.Next(now_).until, now_ + PreWake::kLate);
}

}  // namespace
}  // namespace rankgate::relay
