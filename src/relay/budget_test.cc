// SPDX-License-Identifier: Apache-2.0
#include "relay/budget.h"

#include <gtest/gtest.h>

namespace rankgate::relay {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(BudgetTest, CountsOrdinarySlicesInFull) {
    SteadyTime now{};
    Budget budget{Seconds{1.0}, now};
    for (int i = 0; i < 19; ++i) {
        EXPECT_FALSE(budget.Spend(now += milliseconds{50})) << i;
    }
    EXPECT_TRUE(budget.Spend(now += milliseconds{50}));
}

TEST(BudgetTest, AFrozenMachineSpendsOneSliceOnly) {
    SteadyTime now{};
    Budget budget{Seconds{1.5}, now};
    EXPECT_FALSE(budget.Spend(now += seconds{3600}));
    EXPECT_EQ(budget.left(), milliseconds{1400});
}

TEST(BudgetTest, AClockThatGoesBackSpendsNothing) {
    SteadyTime now{seconds{10}};
    Budget budget{Seconds{1.0}, now};
    EXPECT_FALSE(budget.Spend(now - seconds{5}));
    EXPECT_EQ(budget.left(), seconds{1});
}

TEST(BudgetTest, ExtensionNeverShortens) {
    SteadyTime now{};
    Budget budget{Seconds{2.0}, now};
    budget.Spend(now += milliseconds{100});
    budget.ExtendTo(Seconds{0.5});
    EXPECT_EQ(budget.left(), milliseconds{1900});
    budget.ExtendTo(Seconds{5});
    EXPECT_EQ(budget.left(), seconds{5});
}

}  // namespace
}  // namespace rankgate::relay
