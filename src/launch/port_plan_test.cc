// SPDX-License-Identifier: Apache-2.0
#include "launch/port_plan.h"

#include <gtest/gtest.h>

namespace rankgate::launch {
namespace {

bool NeverBusy(int) {
    return false;
}

TEST(PortPlanTest, HandshakePortsFollowTheKnownVectors) {
    EXPECT_EQ(HandshakePortOf("/tmp/smg-zmq/ts0.ipc"), 25152);
    EXPECT_EQ(HandshakePortOf("/tmp/smg-zmq/engine-31000"), 22714);
}

TEST(PortPlanTest, StorePortIsSoundForEveryWorkerPort) {
    for (int port = 1; port <= 65'535; ++port) {
        const int store = TokenSpeedStorePort(port);
        ASSERT_GE(store, 1) << port;
        ASSERT_LE(store, 65'535) << port;
        ASSERT_FALSE(store >= kHandshakeBandFirst && store <= kHandshakeBandLast) << port;
        ASSERT_NE(store, port);
    }
    EXPECT_EQ(TokenSpeedStorePort(8000), 8233);
    EXPECT_EQ(TokenSpeedStorePort(65'302), 65'535);
    EXPECT_EQ(TokenSpeedStorePort(65'303), 65'070);
    EXPECT_EQ(TokenSpeedStorePort(19'766), 19'999);
    EXPECT_EQ(TokenSpeedStorePort(19'767), 30'000);
    EXPECT_EQ(TokenSpeedStorePort(29'766), 39'999);
    EXPECT_EQ(TokenSpeedStorePort(29'767), 30'000);
}

TEST(PortPlanTest, PlannedWorkersNeverMeetOnAPort) {
    for (const int base : {1024, 8000, 19'600, 29'700, 31'000, 60'000}) {
        for (const int dp : {1, 2, 8, 64}) {
            const std::vector<std::string> paths = {"/run/a/0", "/run/a/1", "/run/a/2", "/run/a/3"};
            const auto plan = PlanTokenSpeed(base, 4, dp, paths, NeverBusy);
            ASSERT_TRUE(plan.ok()) << base << ' ' << dp << ' ' << plan.error().message;
            std::vector<PortRange> all;
            for (const TokenSpeedWorker& worker : *plan) {
                const auto ports = PortsOf(worker, "w");
                all.insert(all.end(), ports.begin(), ports.end());
            }
            EXPECT_TRUE(CheckDisjoint(all).ok());
        }
    }
}

TEST(PortPlanTest, EqualHandshakePortsAreRefusedWithBothOwnersNamed) {
    const auto plan = PlanTokenSpeed(31'000, 2, 1, {"/run/same", "/run/same"}, NeverBusy);
    ASSERT_FALSE(plan.ok());
    EXPECT_NE(plan.error().message.find("worker 0: handshake port"), std::string::npos)
        << plan.error().message;
    EXPECT_NE(plan.error().message.find("worker 1: handshake port"), std::string::npos);
}

TEST(PortPlanTest, AWorkerMovesOnWhenItsBlockIsTaken) {
    const auto plan = PlanTokenSpeed(31'000, 1, 2, {"/run/x"},
                                     [](int port) { return port == 31'000 || port == 31'018 + 235; });
    ASSERT_TRUE(plan.ok());
    EXPECT_EQ(plan->front().port, 31'000 + 2 * TokenSpeedWorkerSpacing(2));
}

TEST(PortPlanTest, TheTopOfTheRangeIsAnErrorNotAWrap) {
    const auto plan = PlanTokenSpeed(65'500, 4, 8, {"/a", "/b", "/c", "/d"}, NeverBusy);
    ASSERT_FALSE(plan.ok());
}

TEST(PortPlanTest, AllocatedPortsAreFree) {
    const auto port = AllocatePort();
    ASSERT_TRUE(port.ok());
    EXPECT_FALSE(PortBusy(*port));
}

}  // namespace
}  // namespace rankgate::launch
