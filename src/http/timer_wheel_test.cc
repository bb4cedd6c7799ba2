// SPDX-License-Identifier: Apache-2.0
#include "http/timer_wheel.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace rankgate::http {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

struct Item : WheelEntry {
    int fired{0};
};

TEST(TimerWheel, NeverFiresEarlyAndAtMostTwoTicksLate) {
    FakeClock clock;
    clock.Advance(seconds{1000});
    TimerWheel wheel{clock.Now()};
    std::vector<Item> items(2000);
    std::mt19937 random{7};
    for (Item& item : items) {
        wheel.Arm(item, clock.Now() + milliseconds{static_cast<int>(random() % 400'000)});
    }
    std::size_t fired = 0;
    for (int step = 0; step < 10'000 && fired < items.size(); ++step) {
        clock.Advance(milliseconds{53});
        wheel.Advance(clock.Now(), [&](WheelEntry& entry) {
            auto& item = static_cast<Item&>(entry);
            EXPECT_EQ(++item.fired, 1);
            EXPECT_LE(item.deadline, clock.Now());
            EXPECT_LE(clock.Now() - item.deadline, 2 * TimerWheel::kTick);
            ++fired;
        });
    }
    EXPECT_EQ(fired, items.size());
}

TEST(TimerWheel, DisarmedEntriesDoNotFireAndMovedOnesFireOnce) {
    FakeClock clock;
    TimerWheel wheel{clock.Now()};
    Item gone;
    Item moved;
    wheel.Arm(gone, clock.Now() + seconds{1});
    wheel.Arm(moved, clock.Now() + seconds{1});
    wheel.Arm(moved, clock.Now() + seconds{3});
    wheel.Disarm(gone);
    for (int i = 0; i < 25; ++i) {
        clock.Advance(milliseconds{100});
        wheel.Advance(clock.Now(), [](WheelEntry& entry) { ++static_cast<Item&>(entry).fired; });
    }
    EXPECT_EQ(moved.fired, 0);
    clock.Advance(seconds{1});
    wheel.Advance(clock.Now(), [](WheelEntry& entry) { ++static_cast<Item&>(entry).fired; });
    EXPECT_EQ(moved.fired, 1);
    EXPECT_EQ(gone.fired, 0);
}

TEST(TimerWheel, CallbacksMayArmAndDisarmOthers) {
    FakeClock clock;
    TimerWheel wheel{clock.Now()};
    Item first;
    Item second;
    wheel.Arm(first, clock.Now() + milliseconds{10});
    wheel.Arm(second, clock.Now() + milliseconds{10});
    clock.Advance(seconds{1});
    int calls = 0;
    wheel.Advance(clock.Now(), [&](WheelEntry& entry) {
        ++calls;
        wheel.Disarm(&entry == &first ? second : first);
        wheel.Arm(entry, clock.Now() + seconds{500});
    });
    EXPECT_EQ(calls, 1);
    clock.Advance(seconds{5000});  // a loop that slept through many turns
    wheel.Advance(clock.Now(), [&](WheelEntry&) { ++calls; });
    EXPECT_EQ(calls, 2);
}

}  // namespace
}  // namespace rankgate::http
