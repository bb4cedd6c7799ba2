// SPDX-License-Identifier: Apache-2.0
#include "relay/turns.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <thread>

namespace rankgate::relay {
namespace {

/// Of the calling thread, ns. 0 on a kernel where an ordinary thread has no turn of its own.
std::uint64_t Turn() {
    std::array<std::byte, 48> attributes{};
    EXPECT_EQ(::syscall(SYS_sched_getattr, 0, attributes.data(), attributes.size(), 0), 0);
    std::uint64_t runtime = 0;
    std::memcpy(&runtime, attributes.data() + 24, sizeof runtime);
    return runtime;
}

std::uint64_t Short() {
    return static_cast<std::uint64_t>(ShortTurns::kTurn.count());
}

TEST(ShortTurnsTest, AThreadThatAsksHasThemUntilTheRequestEnds) {
    const std::uint64_t before = Turn();
    {
        ShortTurns turns;
        EXPECT_EQ(Turn(), before);
        turns.Ask();
        turns.Ask();
        EXPECT_EQ(Turn(), before == 0 ? 0 : Short());
    }
    EXPECT_EQ(Turn(), before);
}

TEST(ShortTurnsTest, EachThreadThatWaitsAsksForItself) {
    const std::uint64_t before = Turn();
    ShortTurns turns;
    turns.Ask();
    std::thread{[&] {
        // Threads inherit what their creator has.
        EXPECT_EQ(Turn(), before == 0 ? 0 : Short());
        turns.Ask();
        EXPECT_EQ(Turn(), before == 0 ? 0 : Short());
    }}.join();
}

TEST(ShortTurnsTest, AnotherPolicyIsLeftAlone) {
    std::thread{[] {
        const sched_param none{};
        ASSERT_EQ(sched_setscheduler(0, SCHED_BATCH, &none), 0);
        const std::uint64_t before = Turn();
        ShortTurns turns;
        turns.Ask();
        EXPECT_EQ(Turn(), before);
        EXPECT_EQ(sched_getscheduler(0), SCHED_BATCH);
    }}.join();
}

TEST(ShortTurnsTest, WhatSomebodyElseSetSinceThenIsKept) {
    std::thread{[] {
        const sched_param none{};
        std::optional<ShortTurns> turns{std::in_place};
        turns->Ask();
        ASSERT_EQ(sched_setscheduler(0, SCHED_BATCH, &none), 0);
        turns.reset();
        EXPECT_EQ(sched_getscheduler(0), SCHED_BATCH);
    }}.join();
}

TEST(ShortTurnsTest, NiceIsKept) {
    std::thread{[] {
        const int own = std::min(nice(0) + 3, 19);  // whoever tests may be nice already
        errno = 0;
        ASSERT_TRUE(nice(3) != -1 || errno == 0);
        {
            ShortTurns turns;
            turns.Ask();
            EXPECT_EQ(nice(0), own);
        }
        EXPECT_EQ(nice(0), own);
    }}.join();
}

}  // namespace
}  // namespace rankgate::relay
