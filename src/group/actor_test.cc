// SPDX-License-Identifier: Apache-2.0
// The group actor over real sockets, with fake ranks in this process and in processes of their own. Times are
// generous where a busy machine matters and strict where the product promises a number.
#include "group/group_actor.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zmq.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "engine/mailbox.h"
#include "group/actor_fixture.h"
#include "transport/fake_rank.h"
#include "transport/zmq_util.h"
#include "wire/handshake.h"

namespace rankgate::group {
namespace {

TEST_F(GroupActorTest, CarriesARequestThereAndItsTokensBack) {
    Start(Options(1));
    FakeRank& rank = AddRank(RankOptions(0));
    ASSERT_TRUE(WaitLive(1));
    const StreamKey key = client().Submit(5, 10);
    ASSERT_TRUE(client().WaitEnd(key));
    EXPECT_EQ(client()[key].tokens, (std::vector<wire::TokenId>{10, 11, 12, 13, 14}));
    EXPECT_EQ(client()[key].finish, wire::FinishReason::kLength);
    EXPECT_EQ(client()[key].rank, 0);
    EXPECT_EQ(rank.CountReceived(0), 1U);
    EXPECT_EQ(rank.CountReceived(1), 0U) << "a normal end sends no ABORT";
    EXPECT_EQ(InFlight(), 0);
    const auto snapshot = actor_->Snapshot();
    EXPECT_EQ(snapshot->max_model_len, 32768);
    EXPECT_EQ(snapshot->ranks[0].engine_version, "0.32.0");
}

TEST_F(GroupActorTest, SpreadsAColdBurstOverTheRanks) {
    Start(Options(2));
    FakeRankOptions slow0 = RankOptions(0);
    FakeRankOptions slow1 = RankOptions(1);
    slow0.step_time = slow1.step_time = milliseconds(20);
    AddRank(slow0);
    AddRank(slow1);
    ASSERT_TRUE(WaitLive(2));
    const StreamKey a = client().Submit(4);
    const StreamKey b = client().Submit(4);
    ASSERT_TRUE(client().WaitAll());
    EXPECT_NE(client()[a].rank, client()[b].rank);
}

TEST_F(GroupActorTest, ServesTokenSpeedRanksFromABaseIndex) {
    GroupActorOptions options = Options(2, transport::Dialect::kTokenSpeed);
    options.link.base_index = 40;
    Start(options);
    AddRank(RankOptions(40, transport::Dialect::kTokenSpeed));
    AddRank(RankOptions(41, transport::Dialect::kTokenSpeed));
    ASSERT_TRUE(WaitLive(2));
    for (int i = 0; i < 8; ++i) {
        client().Submit(6);
    }
    ASSERT_TRUE(client().WaitAll());
    std::set<std::int32_t> used;
    for (auto& [key, stream] : client().streams()) {
        EXPECT_EQ(stream.tokens.size(), 6U);
        EXPECT_FALSE(stream.error.has_value());
        used.insert(stream.rank);
    }
    EXPECT_EQ(used, (std::set<std::int32_t>{0, 1}));
    EXPECT_EQ(InFlight(), 0);
}

TEST_F(GroupActorTest, RefusesAtOnceWhileNoEngineIsThere) {
    Start(Options(2));
    const auto before = SteadyNow::now();
    for (int i = 0; i < 20; ++i) {
        client().Submit(4);
    }
    ASSERT_TRUE(client().WaitAll(seconds(1)));
    EXPECT_LT(SteadyNow::now() - before, seconds(1));
    for (auto& [key, stream] : client().streams()) {
        ASSERT_TRUE(stream.error.has_value());
        EXPECT_EQ(stream.error->code, ErrorCode::kUnavailable);
        EXPECT_EQ(stream.terminals, 1);
    }
}

TEST_F(GroupActorTest, DeliversTheFirstRequestOfThreeHundredColdStartsExactlyOnce) {
    std::mt19937 random{3};
    for (int round = 0; round < 300; ++round) {
        ranks_.clear();
        Start(Options(1));
        FakeRankOptions options = RankOptions(0);
        options.register_late = milliseconds(random() % 25);
        options.load_time = milliseconds(random() % 5);
        options.register_twice = random() % 3 == 0;
        FakeRank& rank = AddRank(options);
        ASSERT_TRUE(WaitSnapshot([](const GroupSnapshot& s) { return s.serving; })) << "round " << round;
        const StreamKey key = client().Submit(1);
        ASSERT_TRUE(client().WaitEnd(key, seconds(10))) << "round " << round;
        ASSERT_FALSE(client()[key].error.has_value()) << client()[key].error->message;
        ASSERT_EQ(rank.CountReceived(0), 1U);
        actor_.reset();
        boxes_.clear();
    }
}

TEST_F(GroupActorTest, SixteenGroupsStartAtOnce) {
    std::vector<std::unique_ptr<GroupActor>> actors(16);
    std::vector<std::thread> starters;
    for (auto& slot : actors) {
        starters.emplace_back([&slot] {
            GroupActorOptions options;
            auto actor = GroupActor::Start(options);
            ASSERT_TRUE(actor.ok()) << actor.error().message;
            slot = std::move(*actor);
        });
    }
    for (auto& thread : starters) {
        thread.join();
    }
    std::set<std::string> addresses;
    for (auto& actor : actors) {
        ASSERT_NE(actor, nullptr);
        addresses.insert(actor->handshake_address());
    }
    EXPECT_EQ(addresses.size(), 16U);
}

TEST_F(GroupActorTest, NamesATakenPortAndItsSetting) {
    Start(Options(1));
    GroupActorOptions options = Options(1);
    options.link.handshake_address = actor_->handshake_address();
    const auto second = GroupActor::Start(options);
    ASSERT_FALSE(second.ok());
    EXPECT_NE(second.error().message.find(actor_->handshake_address()), std::string::npos);
    EXPECT_NE(second.error().message.find("--data-parallel-rpc-port"), std::string::npos);
}

TEST_F(GroupActorTest, RestartsFiftyTimesInARowOnOnePort) {
    GroupActorOptions options = Options(1);
    Start(options);
    options.link.handshake_address = actor_->handshake_address();
    for (int round = 0; round < 50; ++round) {
        FakeRank rank{RankOptions(0)};  // its connection leaves the port in TIME_WAIT
        ASSERT_TRUE(WaitLive(1)) << round;
        actor_.reset();
        auto again = GroupActor::Start(options);
        ASSERT_TRUE(again.ok()) << round << ": " << again.error().message;
        actor_ = std::move(*again);
    }
}

TEST_F(GroupActorTest, RefusesTheSocketDirectoryOfALiveGateway) {
    GroupActorOptions options = Options(1);
    options.link.socket_dir = Root();
    Start(options);
    const auto second = GroupActor::Start(options);
    ASSERT_FALSE(second.ok());
    EXPECT_NE(second.error().message.find("another gateway"), std::string::npos);
    FakeRank& rank = AddRank(RankOptions(0));
    (void)rank;
    ASSERT_TRUE(WaitLive(1)) << "the live one's sockets must still be there";
}

TEST_F(GroupActorTest, ServesOverTcpAndIpv6) {
    GroupActorOptions options = Options(2);
    options.link.handshake_address = "tcp://[::1]:0";
    options.link.data_host = "::1";
    Start(options);
    FakeRankProcess& first = AddProcess(RankOptions(0));
    AddProcess(RankOptions(1));
    ASSERT_TRUE(WaitLive(2));
    for (int i = 0; i < 10; ++i) {
        client().Submit(3);
    }
    ASSERT_TRUE(client().WaitAll());
    const auto killed = SteadyNow::now();
    first.Kill();
    ASSERT_TRUE(WaitState(0, RankState::kDead, seconds(5)));
    EXPECT_LT(SteadyNow::now() - killed, seconds(1));
    ServeInTurn(10, 2);
}

// ---- loss ----

TEST_F(GroupActorTest, ARankKilledUnderLoadFailsOnlyWhatItHadBegun) {
    Start(Options(2));
    FakeRankOptions a = RankOptions(0);
    FakeRankOptions b = RankOptions(1);
    a.step_time = b.step_time = milliseconds(10);
    FakeRankProcess& victim = AddProcess(a);
    AddProcess(b);
    ASSERT_TRUE(WaitLive(2));
    for (int i = 0; i < 64; ++i) {
        client().Submit(100);
    }
    ASSERT_TRUE(client().Wait([&] {
        return std::all_of(client().streams().begin(), client().streams().end(),
                           [](const auto& s) { return s.second.tokens.size() >= 2; });
    }));
    const auto killed = SteadyNow::now();
    victim.Kill();
    ASSERT_TRUE(client().Wait(
        [&] {
            return std::count_if(client().streams().begin(), client().streams().end(),
                                 [](const auto& s) { return s.second.error.has_value(); }) == 32;
        },
        seconds(5)));
    EXPECT_LT(SteadyNow::now() - killed, seconds(1));
    ASSERT_TRUE(client().WaitAll());
    int whole = 0;
    for (auto& [key, stream] : client().streams()) {
        EXPECT_EQ(stream.terminals, 1);
        if (stream.error) {
            EXPECT_EQ(stream.error->code, ErrorCode::kRankLost);
            EXPECT_EQ(stream.rank, 0);
        } else {
            EXPECT_EQ(stream.tokens.size(), 100U);
            EXPECT_EQ(stream.rank, 1);
            ++whole;
        }
    }
    EXPECT_EQ(whole, 32);
    ServeInTurn(20, 2);
    EXPECT_EQ(InFlight(), 0);
}

TEST_F(GroupActorTest, RequestsWithoutATokenMoveToTheOtherRank) {
    Start(Options(2));
    FakeRankOptions silent = RankOptions(0);
    silent.auto_answer = false;
    FakeRank& victim = AddRank(silent);
    AddRank(RankOptions(1));
    ASSERT_TRUE(WaitLive(2));
    for (int i = 0; i < 10; ++i) {
        client().Submit(4);
    }
    ASSERT_FALSE(victim.NextAdd().empty());
    ASSERT_FALSE(victim.NextAdd().empty());
    victim.Die(/*last_words=*/true);
    ASSERT_TRUE(client().WaitAll());
    for (auto& [key, stream] : client().streams()) {
        EXPECT_FALSE(stream.error.has_value()) << stream.error->message;
        EXPECT_EQ(stream.tokens.size(), 4U);
        EXPECT_EQ(stream.rank, 1);
    }
    EXPECT_TRUE(WaitState(0, RankState::kDead));
}

TEST_F(GroupActorTest, ARankKilledWhileIdleIsNeverChosenAgain) {
    Start(Options(2));
    FakeRankProcess& victim = AddProcess(RankOptions(0));
    AddProcess(RankOptions(1));
    ASSERT_TRUE(WaitLive(2));
    const auto killed = SteadyNow::now();
    victim.Kill();
    ASSERT_TRUE(WaitState(0, RankState::kDead, seconds(5)));
    EXPECT_LT(SteadyNow::now() - killed, seconds(1));
    ServeInTurn(20, 2);
}

TEST_F(GroupActorTest, EvenRequestsSentWithinTheLossGraceAreServed) {
    Start(Options(2));
    FakeRankProcess& victim = AddProcess(RankOptions(0));
    AddProcess(RankOptions(1));
    ASSERT_TRUE(WaitLive(2));
    victim.Kill();
    for (int i = 0; i < 50; ++i) {
        client().Submit(2);
    }
    ASSERT_TRUE(client().WaitAll());
    for (auto& [key, stream] : client().streams()) {
        EXPECT_FALSE(stream.error.has_value()) << stream.error->message;
    }
}

TEST_F(GroupActorTest, ARestartedRankServesWithinASecondOfItsReady) {
    Start(Options(2));
    AddProcess(RankOptions(0));
    AddProcess(RankOptions(1));
    ASSERT_TRUE(WaitLive(2));
    for (int round = 0; round < 3; ++round) {
        processes_[0]->Kill();
        ASSERT_TRUE(WaitLive(1, seconds(3)));
        const auto started = SteadyNow::now();
        processes_[0] = std::make_unique<FakeRankProcess>(RG_FAKE_RANK, RankOptions(0));
        ASSERT_TRUE(WaitLive(2, seconds(5)));
        EXPECT_LT(SteadyNow::now() - started, seconds(1)) << "start of the process included";
        const StreamKey key = client().Submit(2, 3, {}, 0);
        ASSERT_TRUE(client().WaitEnd(key));
        EXPECT_FALSE(client()[key].error.has_value());
        EXPECT_EQ(client()[key].rank, 0);
    }
}

TEST_F(GroupActorTest, ARankRestartedBeforeItsLossWasSeenFailsOnlyItsOldRequests) {
    Start(Options(1));
    FakeRankOptions options = RankOptions(0);
    options.auto_answer = false;
    AddRank(options);
    ASSERT_TRUE(WaitLive(1));
    const StreamKey old = client().Submit(4);
    ASSERT_FALSE(ranks_[0]->NextAdd().empty());
    ranks_[0]->SayTokens("nobody-knows", {1, 2});  // a stray output must not matter
    FakeRankOptions again = RankOptions(0);
    again.instance_id = "second";
    AddRank(again);
    ASSERT_TRUE(client().WaitEnd(old));
    EXPECT_TRUE(client()[old].error.has_value());
    ASSERT_TRUE(WaitLive(1));
    ranks_.erase(ranks_.begin());
}

TEST_F(GroupActorTest, ADeafRankFinishesWhatItHasAndGetsNothingNew) {
    Start(Options(2));
    FakeRankOptions slow = RankOptions(0);
    slow.step_time = milliseconds(20);
    FakeRank& deaf = AddRank(slow);
    AddRank(RankOptions(1));
    ASSERT_TRUE(WaitLive(2));
    const StreamKey running = client().Submit(30, 3, {}, 0);
    ASSERT_TRUE(client().Wait([&] { return client()[running].tokens.size() >= 2; }));
    deaf.Deaf();
    ASSERT_TRUE(WaitState(0, RankState::kDeaf, seconds(2)));
    ServeInTurn(10, 2, /*rank=*/1);
    ASSERT_TRUE(client().WaitEnd(running));
    EXPECT_FALSE(client()[running].error.has_value());
    EXPECT_EQ(client()[running].tokens.size(), 30U);
}

TEST_F(GroupActorTest, ADeafRankIsFoundEvenWhereItsConnectionNeverSaidWhoseItIs) {
    // After a re-attach no registration names the input connections, and there is no other process to ask.
    for (int round = 0; round < 10; ++round) {
        GroupActorOptions options = Options(2);
        options.link.socket_dir = Root();
        Start(options);
        AddRank(RankOptions(0));
        AddRank(RankOptions(1));
        ASSERT_TRUE(WaitLive(2));
        client().Submit(2, 3, {}, 0);
        client().Submit(2, 3, {}, 1);
        ASSERT_TRUE(client().WaitAll());
        options.link.handshake_address = actor_->handshake_address();
        actor_.reset();
        Start(options);
        ASSERT_TRUE(WaitLive(2, seconds(10)));
        ranks_[0]->Deaf();
        const bool both = round % 2 == 1;
        if (both) {
            ranks_[1]->Deaf();
        }
        ASSERT_TRUE(WaitState(0, RankState::kDeaf, seconds(2)));
        ASSERT_TRUE(WaitState(1, both ? RankState::kDeaf : RankState::kLive, seconds(2)));
        ranks_.clear();
        actor_.reset();
        std::filesystem::remove_all(root_);
    }
}

TEST_F(GroupActorTest, AMuteRankIsNamedAndItsRequestsEnd) {
    Start(Options(2));
    FakeRankOptions slow = RankOptions(0);
    slow.step_time = milliseconds(20);
    FakeRank& mute = AddRank(slow);
    AddRank(RankOptions(1));
    ASSERT_TRUE(WaitLive(2));
    const StreamKey running = client().Submit(1000, 3, {}, 0);
    ASSERT_TRUE(client().Wait([&] { return client()[running].tokens.size() >= 2; }));
    const auto before = SteadyNow::now();
    mute.Mute();
    ASSERT_TRUE(client().WaitEnd(running));
    EXPECT_LT(SteadyNow::now() - before, seconds(1));
    EXPECT_TRUE(client()[running].error.has_value());
    EXPECT_TRUE(WaitState(0, RankState::kMute, seconds(2)));
}

TEST_F(GroupActorTest, AnIdleMuteProcessIsAttributedByItsPid) {
    // It has never sent an output: only the peer credentials say whose connection closed.
    Start(Options(2));
    FakeRankProcess& victim = AddProcess(RankOptions(0));
    AddProcess(RankOptions(1));
    ASSERT_TRUE(WaitLive(2));
    victim.Kill();
    ASSERT_TRUE(WaitState(0, RankState::kDead, seconds(2)));
    EXPECT_TRUE(WaitState(1, RankState::kLive, seconds(1)));
}

TEST_F(GroupActorTest, AStoppedRankIsFoundWedgedWithinThreeSecondsAndComesBackByItself) {
    Start(Options(2));
    FakeRankProcess& victim = AddProcess(RankOptions(0));
    AddProcess(RankOptions(1));
    ASSERT_TRUE(WaitLive(2));
    victim.Signal(SIGSTOP);
    const auto stopped = SteadyNow::now();
    ASSERT_TRUE(WaitState(0, RankState::kWedged, seconds(10)));
    EXPECT_LT(SteadyNow::now() - stopped, milliseconds(3500));
    const StreamKey key = client().Submit(2);
    ASSERT_TRUE(client().WaitEnd(key));
    EXPECT_EQ(client()[key].rank, 1);
    victim.Signal(SIGCONT);
    ASSERT_TRUE(WaitState(0, RankState::kLive, seconds(5)));
}

TEST_F(GroupActorTest, ASilentComputationIsNotAWedge) {
    Start(Options(1));
    FakeRankOptions options = RankOptions(0);
    options.auto_answer = false;
    FakeRank& rank = AddRank(options);
    ASSERT_TRUE(WaitLive(1));
    const StreamKey key = client().Submit(4, 100);
    const std::string id = rank.NextAdd();
    ASSERT_FALSE(id.empty());
    rank.Freeze(true);  // computing: answers nothing, reads nothing
    std::this_thread::sleep_for(seconds(5));
    EXPECT_EQ(actor_->Snapshot()->ranks[0].state, RankState::kLive);
    rank.Freeze(false);
    rank.SayTokens(id, {1}, wire::FinishReason::kStop);
    ASSERT_TRUE(client().WaitEnd(key));
    EXPECT_FALSE(client()[key].error.has_value());
}

TEST_F(GroupActorTest, ARankThatDiesWhileLoadingIsReportedAtOnce) {
    Start(Options(4));
    FakeRankOptions slow = RankOptions(0);
    slow.load_time = seconds(60);
    AddRank(slow);
    FakeRankOptions doomed = RankOptions(2);
    doomed.load_time = seconds(60);
    FakeRankProcess& victim = AddProcess(doomed);
    ASSERT_TRUE(WaitState(2, RankState::kInitialised));
    ASSERT_TRUE(WaitState(0, RankState::kInitialised));
    const auto killed = SteadyNow::now();
    victim.Kill();
    ASSERT_TRUE(WaitState(2, RankState::kAbsent, seconds(5)));
    EXPECT_LT(SteadyNow::now() - killed, seconds(2));
    EXPECT_NE(actor_->Snapshot()->ranks[2].reason.find("READY"), std::string::npos)
        << actor_->Snapshot()->ranks[2].reason;
    EXPECT_EQ(actor_->Snapshot()->ranks[0].state, RankState::kInitialised);
}

TEST_F(GroupActorTest, ASecondEngineForAServedRankWaitsForTheFirstToGo) {
    Start(Options(1));
    FakeRankProcess& first = AddProcess(RankOptions(0));
    ASSERT_TRUE(WaitLive(1));
    AddProcess(RankOptions(0));
    std::this_thread::sleep_for(milliseconds(500));
    const StreamKey key = client().Submit(3);
    ASSERT_TRUE(client().WaitEnd(key));
    EXPECT_FALSE(client()[key].error.has_value()) << "the first engine serves on, undisturbed";
    first.Kill();
    const auto served = [&] {
        const StreamKey next = client().Submit(3);
        return client().WaitEnd(next) && !client()[next].error.has_value();
    };
    const auto until = SteadyNow::now() + seconds(5);
    bool ok = false;
    while (!(ok = served()) && SteadyNow::now() < until) {
        std::this_thread::sleep_for(milliseconds(20));
    }
    EXPECT_TRUE(ok) << "then the second takes over";
    const RankInfo rank = actor_->Snapshot()->ranks[0];
    EXPECT_EQ(rank.state, RankState::kLive);
}

// ---- gateway restart ----

TEST_F(GroupActorTest, ARestartedGatewayReattachesToRunningEnginesWithoutAHandshake) {
    GroupActorOptions options = Options(2);
    options.link.socket_dir = Root();
    Start(options);
    FakeRankOptions a = RankOptions(0);
    FakeRankOptions b = RankOptions(1);
    a.step_time = b.step_time = milliseconds(20);
    AddProcess(a);
    AddProcess(b);
    ASSERT_TRUE(WaitLive(2));
    options.link.handshake_address = actor_->handshake_address();
    client().Submit(3);
    ASSERT_TRUE(client().WaitAll());
    actor_.reset();
    const auto restarted = SteadyNow::now();
    Start(options);
    ASSERT_TRUE(WaitLive(2, seconds(10)));
    EXPECT_LT(SteadyNow::now() - restarted, seconds(3));
    EXPECT_EQ(actor_->Snapshot()->max_model_len, 32768);
    for (int i = 0; i < 10; ++i) {
        client().Submit(3);
    }
    ASSERT_TRUE(client().WaitAll());
    for (auto& [key, stream] : client().streams()) {
        EXPECT_FALSE(stream.error.has_value()) << stream.error->message;
        EXPECT_EQ(stream.tokens.size(), 3U);
    }
    // And a rank that dies under the new gateway is seen like any other.
    processes_[0]->Kill();
    ASSERT_TRUE(WaitState(0, RankState::kDead, seconds(2)));
}

TEST_F(GroupActorTest, ReattachesToAnEngineThatIsTooBusyToAnswer) {
    GroupActorOptions options = Options(1);
    options.link.socket_dir = Root();
    Start(options);
    AddProcess(RankOptions(0));
    ASSERT_TRUE(WaitLive(1));
    const StreamKey warm = client().Submit(1);
    ASSERT_TRUE(client().WaitEnd(warm));
    options.link.handshake_address = actor_->handshake_address();
    actor_.reset();
    processes_[0]->Signal(SIGUSR1);  // computes from now on, and answers nothing
    const auto restarted = SteadyNow::now();
    Start(options);
    ASSERT_TRUE(WaitLive(1, seconds(10)));
    EXPECT_LT(SteadyNow::now() - restarted, seconds(3));
}

TEST_F(GroupActorTest, RequestsOfADeadGatewayAreStoppedByTheNextOne) {
    GroupActorOptions options = Options(1);
    options.link.socket_dir = Root();
    Start(options);
    FakeRankOptions slow = RankOptions(0);
    slow.step_time = milliseconds(20);
    FakeRank& rank = AddRank(slow);
    ASSERT_TRUE(WaitLive(1));
    options.link.handshake_address = actor_->handshake_address();
    // A request that the first gateway never aborted, as if it had been killed.
    rank.SayTokens("older-gateway-1-00000001000000000100000a", {5});
    actor_.reset();
    Start(options);
    ASSERT_TRUE(WaitLive(1, seconds(10)));
    rank.SayTokens("older-gateway-1-00000001000000000100000b", {5});
    EXPECT_TRUE(rank.WaitFor([](const FakeRank::Received& r) {
        return r.type == 1 && r.payload.find("older-gateway-1") != std::string::npos;
    }));
}

TEST_F(GroupActorTest, ReattachesTokenSpeedRanksToo) {
    GroupActorOptions options = Options(1, transport::Dialect::kTokenSpeed);
    options.link.socket_dir = Root();
    Start(options);
    AddProcess(RankOptions(0, transport::Dialect::kTokenSpeed));
    ASSERT_TRUE(WaitLive(1));
    options.link.handshake_address = actor_->handshake_address();
    actor_.reset();
    Start(options);
    ASSERT_TRUE(WaitLive(1, seconds(5)));
    const StreamKey key = client().Submit(3);
    ASSERT_TRUE(client().WaitEnd(key));
    EXPECT_EQ(client()[key].tokens.size(), 3U);
}

TEST_F(GroupActorTest, AnEngineThatReplacedAnotherWhileTheGatewayWasAwayShakesHandsAfresh) {
    GroupActorOptions options = Options(1);
    options.link.socket_dir = Root();
    Start(options);
    AddProcess(RankOptions(0));
    ASSERT_TRUE(WaitLive(1));
    options.link.handshake_address = actor_->handshake_address();
    FakeRankOptions fresh = RankOptions(0);
    actor_.reset();
    processes_[0]->Kill();
    processes_[0] = std::make_unique<FakeRankProcess>(RG_FAKE_RANK, fresh);
    Start(options);
    ASSERT_TRUE(WaitLive(1, seconds(10)));
    const StreamKey key = client().Submit(3);
    ASSERT_TRUE(client().WaitEnd(key));
    EXPECT_FALSE(client()[key].error.has_value());
}

// ---- the runtime that nobody declared ----

constexpr transport::Dialect kBothDialects[]{transport::Dialect::kVllm, transport::Dialect::kTokenSpeed};

TEST_F(GroupActorTest, AnUndeclaredGroupSpeaksTheWireOfItsFirstRank) {
    for (const transport::Dialect dialect : kBothDialects) {
        Start(AutoOptions(2));
        EXPECT_EQ(actor_->Snapshot()->runtime, "auto");
        EXPECT_TRUE(actor_->Snapshot()->forming);
        FakeRankOptions late = RankOptions(1, dialect);
        late.load_time = milliseconds(150);
        AddRank(RankOptions(0, dialect));
        AddRank(late);
        ASSERT_TRUE(WaitLive(2));
        EXPECT_EQ(actor_->Snapshot()->runtime, wire::DialectName(dialect));
        EXPECT_FALSE(actor_->Snapshot()->forming);
        for (int i = 0; i < 8; ++i) {
            client().Submit(6);
        }
        ASSERT_TRUE(client().WaitAll());
        std::set<std::int32_t> used;
        for (auto& [key, stream] : client().streams()) {
            EXPECT_EQ(stream.tokens.size(), 6U);
            EXPECT_FALSE(stream.error.has_value());
            used.insert(stream.rank);
        }
        EXPECT_EQ(used, (std::set<std::int32_t>{0, 1}));
        EXPECT_EQ(InFlight(), 0);
        ranks_.clear();
    }
}

TEST_F(GroupActorTest, AnUndeclaredGroupAnswersAtOnceWhileItForms) {
    Start(AutoOptions(2));
    const StreamKey key = client().Submit(4);
    client().Cancel(key);
    ASSERT_TRUE(client().WaitAll(seconds(1)));
    ASSERT_TRUE(client()[key].error.has_value());
    EXPECT_EQ(client()[key].error->code, ErrorCode::kUnavailable);
    EXPECT_TRUE(client()[key].error->retryable);
    const auto replies = CallAdmin({});
    ASSERT_EQ(replies.size(), 2U);
    EXPECT_EQ(replies[1].status.error().code, ErrorCode::kUnavailable);
    FakeRankOptions loading = RankOptions(1);
    loading.load_time = seconds(20);
    AddRank(loading);
    ASSERT_TRUE(WaitState(1, RankState::kInitialised));
    EXPECT_FALSE(actor_->drained());
    actor_->BeginDrain();
    EXPECT_TRUE(actor_->drained());
    const auto before = SteadyNow::now();
    actor_->Close();
    EXPECT_LT(SteadyNow::now() - before, seconds(2));
}

TEST_F(GroupActorTest, ADrainThatBeganWhileFormingHoldsForTheRanksThatCome) {
    Start(AutoOptions(1));
    actor_->BeginDrain();
    AddRank(RankOptions(0));
    ASSERT_TRUE(WaitLive(1));
    const StreamKey key = client().Submit(4);
    ASSERT_TRUE(client().WaitEnd(key));
    ASSERT_TRUE(client()[key].error.has_value());
    EXPECT_EQ(client()[key].error->code, ErrorCode::kDraining);
}

TEST_F(GroupActorTest, AGroupHasOneRuntimeAndTheOtherIsRefusedByName) {
    for (const transport::Dialect first : kBothDialects) {
        const transport::Dialect second = first == kBothDialects[0] ? kBothDialects[1] : kBothDialects[0];
        Start(AutoOptions(2));
        FakeRank& good = AddRank(RankOptions(0, first));
        ASSERT_TRUE(WaitLive(1));
        AddRank(RankOptions(1, second));
        ASSERT_TRUE(WaitSnapshot([&](const GroupSnapshot&) { return Reason(1).starts_with("refused"); }));
        for (const transport::Dialect dialect : kBothDialects) {
            EXPECT_NE(Reason(1).find(wire::DialectName(dialect)), std::string::npos) << Reason(1);
        }
        EXPECT_EQ(actor_->Snapshot()->ranks[1].state, RankState::kAbsent);
        EXPECT_EQ(actor_->Snapshot()->live, 1);
        const StreamKey key = client().Submit(3);
        ASSERT_TRUE(client().WaitEnd(key));
        EXPECT_FALSE(client()[key].error.has_value());
        EXPECT_EQ(client()[key].rank, 0);
        EXPECT_EQ(good.CountReceived(0), 1U);
        // The right engine takes the place at any time.
        ranks_.pop_back();
        AddRank(RankOptions(1, first));
        ASSERT_TRUE(WaitLive(2));
        EXPECT_TRUE(Reason(1).empty()) << Reason(1);
        ranks_.clear();
    }
}

TEST_F(GroupActorTest, AWrongDeclarationIsRefusedByNameAndNobodyWaits) {
    for (const transport::Dialect declared : kBothDialects) {
        const transport::Dialect real = declared == kBothDialects[0] ? kBothDialects[1] : kBothDialects[0];
        GroupActorOptions options = Options(1);
        options.link.dialect = declared;
        Start(options);
        AddRank(RankOptions(0, real));
        ASSERT_TRUE(
            WaitSnapshot([&](const GroupSnapshot&) { return Reason(0).starts_with("refused"); }, seconds(5)));
        for (const transport::Dialect dialect : kBothDialects) {
            EXPECT_NE(Reason(0).find(wire::DialectName(dialect)), std::string::npos) << Reason(0);
        }
        EXPECT_NE(Reason(0).find("--runtime"), std::string::npos) << Reason(0);
        const StreamKey key = client().Submit(3);
        ASSERT_TRUE(client().WaitEnd(key, seconds(1)));
        EXPECT_TRUE(client()[key].error.has_value());
        ranks_.clear();
    }
}

TEST_F(GroupActorTest, AnUndeclaredGroupReattachesToRunningEnginesOfEitherWire) {
    for (const transport::Dialect dialect : kBothDialects) {
        GroupActorOptions options = AutoOptions(2);
        options.link.socket_dir = Root();
        Start(options);
        AddProcess(RankOptions(0, dialect));
        AddProcess(RankOptions(1, dialect));
        ASSERT_TRUE(WaitLive(2));
        options.link.handshake_address = actor_->handshake_address();
        for (int round = 0; round < 2; ++round) {
            actor_.reset();
            Start(options);
            ASSERT_TRUE(WaitLive(2, seconds(10)));
            EXPECT_EQ(actor_->Snapshot()->runtime, wire::DialectName(dialect));
            EXPECT_FALSE(actor_->Snapshot()->forming);
            for (int i = 0; i < 4; ++i) {
                client().Submit(3);
            }
            ASSERT_TRUE(client().WaitAll());
            for (auto& [key, stream] : client().streams()) {
                EXPECT_FALSE(stream.error.has_value()) << stream.error->message;
                EXPECT_EQ(stream.tokens.size(), 3U);
            }
        }
        processes_.clear();
        actor_.reset();
        std::filesystem::remove_all(root_);
    }
}

TEST_F(GroupActorTest, EnginesOfTheOtherRuntimeMayFollowWhereTheFirstAreGone) {
    GroupActorOptions options = AutoOptions(1);
    options.link.socket_dir = Root();
    Start(options);
    AddProcess(RankOptions(0));
    ASSERT_TRUE(WaitLive(1));
    options.link.handshake_address = actor_->handshake_address();
    actor_.reset();
    processes_.clear();
    Start(options);  // remembers a vLLM rank
    AddRank(RankOptions(0, transport::Dialect::kTokenSpeed));
    ASSERT_TRUE(WaitLive(1, seconds(10)));
    EXPECT_EQ(actor_->Snapshot()->runtime, "tokenspeed");
    const StreamKey key = client().Submit(3);
    ASSERT_TRUE(client().WaitEnd(key));
    EXPECT_EQ(client()[key].tokens.size(), 3U);
}

TEST_F(GroupActorTest, AnUndeclaredGroupRunsOnTheOwnersLoop) {
    GroupActorOptions options = AutoOptions(1);
    options.own_thread = false;
    Start(options);
    const int fd = actor_->poll_fd();
    AddRank(RankOptions(0, transport::Dialect::kTokenSpeed));
    const auto until = SteadyNow::now() + seconds(10);
    while (actor_->Snapshot()->live == 0 && SteadyNow::now() < until) {
        pollfd item{fd, POLLIN, 0};
        ::poll(&item, 1, 20);
        actor_->RunOnce(Duration::zero());
    }
    const StreamKey key = client().Submit(4);
    ASSERT_TRUE(client().Wait([&] {
        actor_->RunOnce(milliseconds(1));
        return client()[key].terminals > 0;
    }));
    EXPECT_EQ(client()[key].tokens.size(), 4U);
    EXPECT_EQ(actor_->poll_fd(), fd) << "the owner watches what it was given first";
}

// ---- hostile peers ----

TEST_F(GroupActorTest, StraysDoNotDisturbTheGroup) {
    Start(Options(1));
    void* context = ::zmq_ctx_new();
    std::vector<void*> strays;
    const auto stray = [&](std::string_view identity, std::string_view bytes) {
        void* socket = ::zmq_socket(context, ZMQ_DEALER);
        const int linger = 0;
        ::zmq_setsockopt(socket, ZMQ_LINGER, &linger, sizeof linger);
        if (!identity.empty()) {
            ::zmq_setsockopt(socket, ZMQ_ROUTING_ID, identity.data(), identity.size());
        }
        ::zmq_connect(socket, actor_->handshake_address().c_str());
        ::zmq_send(socket, bytes.data(), bytes.size(), 0);
        strays.push_back(socket);
    };
    wire::Greeting hello;
    std::string bytes;
    wire::EncodeGreeting(hello, transport::Dialect::kVllm, bytes);
    stray("", bytes);
    stray("abc", bytes);
    stray(std::string("\x09\x00", 2), bytes);
    // It holds a rank's identity, and has it before the rank comes (its answer says so).
    stray(std::string("\x00\x00", 2), bytes);
    zmq_pollitem_t answered{strays.back(), 0, ZMQ_POLLIN, 0};
    ASSERT_EQ(::zmq_poll(&answered, 1, 15'000), 1);
    ::zmq_send(strays.back(), "garbage", 7, 0);
    // Something that is no ZeroMQ peer at all.
    const std::string address = actor_->handshake_address();
    const int port = std::atoi(address.substr(address.rfind(':') + 1).c_str());
    for (int i = 0; i < 20; ++i) {
        const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
        sockaddr_in to{};
        to.sin_family = AF_INET;
        to.sin_port = htons(static_cast<std::uint16_t>(port));
        to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        ASSERT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to), 0);
        const std::string_view http = "GET / HTTP/1.1\r\nHost: x\r\n\r\n";
        EXPECT_GT(::send(fd, http.data(), http.size(), MSG_NOSIGNAL), 0);
        ::close(fd);
    }
    AddRank(RankOptions(0));
    ASSERT_TRUE(WaitLive(1));
    const StreamKey key = client().Submit(2);
    ASSERT_TRUE(client().WaitEnd(key));
    EXPECT_FALSE(client()[key].error.has_value());
    for (void* socket : strays) {
        ::zmq_close(socket);
    }
    ::zmq_ctx_term(context);
}

/// Sockets that talk to the handshake port under names that they have no right to.
class Strays {
  public:
    explicit Strays(const std::string& address) : address_{address} {}
    ~Strays() {
        while (!sockets_.empty()) {
            Leave();
        }
        ::zmq_ctx_term(context_);
    }
    Strays(const Strays&) = delete;
    Strays& operator=(const Strays&) = delete;
    void* Come(std::string_view identity) {
        void* socket = ::zmq_socket(context_, ZMQ_DEALER);
        const int linger = 0;
        ::zmq_setsockopt(socket, ZMQ_LINGER, &linger, sizeof linger);
        ::zmq_setsockopt(socket, ZMQ_ROUTING_ID, identity.data(), identity.size());
        ::zmq_connect(socket, address_.c_str());
        sockets_.push_back(socket);
        return socket;
    }
    static void Say(void* socket, std::string_view bytes) {
        ::zmq_send(socket, bytes.data(), bytes.size(), 0);
    }
    static bool Hears(void* socket, Duration limit) {
        zmq_pollitem_t item{socket, 0, ZMQ_POLLIN, 0};
        const auto ms = std::chrono::duration_cast<milliseconds>(limit).count();
        if (::zmq_poll(&item, 1, static_cast<long>(ms)) != 1) {
            return false;
        }
        char text[4096];
        return ::zmq_recv(socket, text, sizeof text, 0) > 0;
    }
    void Leave() {
        ::zmq_close(sockets_.back());
        sockets_.pop_back();
    }

  private:
    const std::string address_;
    void* context_{::zmq_ctx_new()};
    std::vector<void*> sockets_;
};

const std::string kIdentity0("\0\0", 2);

std::string HelloBytes() {
    std::string bytes;
    wire::EncodeGreeting({}, transport::Dialect::kVllm, bytes);
    return bytes;
}

/// The engine's side of the handshake, by hand: says HELLO and reads INITs when the test wants it to.
std::string InitInput(void* socket, Duration limit) {
    zmq_pollitem_t item{socket, 0, ZMQ_POLLIN, 0};
    if (::zmq_poll(&item, 1, static_cast<long>(std::chrono::duration_cast<milliseconds>(limit).count())) !=
        1) {
        return {};
    }
    char text[4096];
    const int n = ::zmq_recv(socket, text, sizeof text, 0);
    const auto init = wire::DecodeInit({text, static_cast<std::size_t>(std::max(n, 0))});
    return init.ok() ? init->inputs[0] : std::string{};
}

TEST_F(GroupActorTest, ARankWhoseIdentityAStrayTookAfterItsHelloStillGetsItsInit) {
    // Once with a stray that greets, once with one that talks nonsense.
    for (const std::string& words : {HelloBytes(), std::string("nonsense")}) {
        Start(Options(1));
        Strays strays(actor_->handshake_address());
        void* engine = strays.Come(kIdentity0);
        Strays::Say(engine, HelloBytes());
        ASSERT_FALSE(InitInput(engine, seconds(15)).empty());
        // From here on as if that INIT had been for somebody else: the engine waits for one.
        void* stray = strays.Come(kIdentity0);
        Strays::Say(stray, words);
        // INITs on their way before the stray came are none that it waits for.
        const bool greets = words == HelloBytes();
        ASSERT_EQ(greets && !InitInput(stray, seconds(15)).empty(), greets);
        if (!greets) {
            std::this_thread::sleep_for(milliseconds(200));
        }
        while (Strays::Hears(engine, milliseconds(0))) {
        }
        strays.Leave();
        EXPECT_FALSE(InitInput(engine, seconds(15)).empty()) << words;
        // And it can still register under that very address.
        actor_.reset();
    }
}

TEST_F(GroupActorTest, ARankWhoseIdentityAStrayTookBeforeItsHelloWasReadStillServes) {
    for (const bool stray_leaves : {false, true}) {
        GroupActorOptions options = Options(2);
        options.own_thread = false;  // so that nothing is read while the stray comes
        Start(options);
        AddRank(RankOptions(0));
        std::this_thread::sleep_for(milliseconds(200));  // its HELLO is in the gateway's socket, unread
        transport::ZmqContext context;
        transport::ZmqSocket stray(context, ZMQ_DEALER);
        stray.Set(ZMQ_LINGER, 0);
        const std::string identity = wire::RankIdentity(0);
        ASSERT_EQ(::zmq_setsockopt(stray.get(), ZMQ_ROUTING_ID, identity.data(), identity.size()), 0);
        ASSERT_EQ(stray.Connect(actor_->handshake_address()), 0);
        std::this_thread::sleep_for(milliseconds(200));
        const auto turn_until = [&](Duration limit, const auto& done) {
            const auto until = SteadyNow::now() + limit;
            while (!done() && SteadyNow::now() < until) {
                actor_->RunOnce(milliseconds(10));
            }
            return done();
        };
        (void)turn_until(milliseconds(100), [] { return false; });
        ASSERT_EQ(actor_->Snapshot()->ranks[0].state, RankState::kAbsent)
            << "the HELLO went down with its pipe";
        if (stray_leaves) {
            stray.Close();
        }
        ASSERT_TRUE(turn_until(seconds(15), [&] { return actor_->Snapshot()->live == 1; }));
        // And a rank that comes late is not kept out by what was offered in vain.
        AddRank(RankOptions(1));
        ASSERT_TRUE(turn_until(seconds(15), [&] { return actor_->Snapshot()->live == 2; }));
        ranks_.clear();
        actor_.reset();
    }
}

TEST_F(GroupActorTest, OneUndecodableOutputIsCountedAndAStreakEndsTheRank) {
    Start(Options(2));
    FakeRankOptions slow = RankOptions(0);
    slow.step_time = milliseconds(5);
    FakeRank& bad = AddRank(slow);
    AddRank(RankOptions(1));
    ASSERT_TRUE(WaitLive(2));
    const StreamKey running = client().Submit(1000000, 3, {}, 0);
    ASSERT_TRUE(client().Wait([&] { return client()[running].tokens.size() >= 2; }));
    const std::vector<std::string> garbage{"",
                                           "\x9f",
                                           std::string(3, '\xc1'),
                                           std::string("\xdd\xff\xff\xff\xff\x00", 6),
                                           "\x80",
                                           std::string(100000, '\x91'),
                                           std::string("\x93\x00\x90\xc0\x00", 5)};
    for (const std::string& one : garbage) {
        bad.SayRaw({one});
    }
    bad.SayRaw({garbage[1], "surplus", "frames", "here"});
    const std::size_t seen = client()[running].tokens.size();
    ASSERT_TRUE(client().Wait([&] { return client()[running].tokens.size() > seen + 20; }))
        << "good traffic flows on";
    ASSERT_TRUE(WaitSnapshot([](const GroupSnapshot& s) { return s.decode_errors >= 6; }));
    EXPECT_EQ(actor_->Snapshot()->ranks[0].state, RankState::kLive);
    bad.Freeze(false);
    for (int i = 0; i < 1000; ++i) {
        bad.SayRaw({garbage[static_cast<std::size_t>(i) % 4]});
    }
    ASSERT_TRUE(client().WaitEnd(running)) << "a persistent offender's requests end";
    const StreamKey next = client().Submit(3);
    ASSERT_TRUE(client().WaitEnd(next));
    EXPECT_EQ(client()[next].rank, 1) << "the reader lives";
}

TEST_F(GroupActorTest, APeerThatStopsReadingIsBoundedAndHarmsNobody) {
    GroupActorOptions options = Options(4);
    options.link.max_queued_bytes_per_rank = 4 << 20;
    options.core.ping_deadline = seconds(60);  // this test is about the queue, not about the wedge
    Start(options);
    for (std::uint16_t rank = 0; rank < 4; ++rank) {
        auto rank_options = RankOptions(rank);
        rank_options.max_model_len = 131'072;
        AddProcess(rank_options);
    }
    ASSERT_TRUE(WaitLive(4));
    processes_[0]->Signal(SIGSTOP);
    constexpr int kRequests = 3000;
    for (int i = 0; i < kRequests; ++i) {
        client().Submit(1, 12500);
        if (i % 100 == 0) {
            client().Wait([] { return true; }, milliseconds(1));
        }
    }
    // Everything that did not go to rank 0 ends, and so does what rank 0 had no room for.
    std::size_t pending = kRequests;
    client().Wait(
        [&] {
            pending = static_cast<std::size_t>(
                std::count_if(client().streams().begin(), client().streams().end(),
                              [](const auto& s) { return s.second.terminals == 0; }));
            return pending < 500;
        },
        seconds(30));
    EXPECT_LT(pending, 500U);
    EXPECT_GT(pending, 0U) << "rank 0 holds what fits its bound";
    EXPECT_TRUE(WaitSnapshot([](const GroupSnapshot& s) { return s.ranks[0].queued_bytes > 0; }))
        << "and it can be seen";
    EXPECT_LE(actor_->Snapshot()->ranks[0].queued_bytes, 4 << 20);
    processes_[0]->Signal(SIGCONT);
    ASSERT_TRUE(client().WaitAll(seconds(60)));
    for (auto& [key, stream] : client().streams()) {
        EXPECT_EQ(stream.terminals, 1);
        if (stream.error) {
            ASSERT_TRUE(stream.error->code == ErrorCode::kSendFailed ||
                        stream.error->code == ErrorCode::kRankLost)
                << stream.error->message;
        } else {
            ASSERT_EQ(stream.tokens.size(), 1U);
        }
    }
    EXPECT_EQ(InFlight(), 0);
}

// ---- cancellation, drain, close ----

TEST_F(GroupActorTest, ACancelReachesTheRightRankAtOnceAndFreesTheSlot) {
    Start(Options(2));
    FakeRankOptions a = RankOptions(0);
    FakeRankOptions b = RankOptions(1);
    a.auto_answer = b.auto_answer = false;
    AddRank(a);
    AddRank(b);
    ASSERT_TRUE(WaitLive(2));
    const StreamKey key = client().Submit(4096, 3, "victim", 1);
    const std::string id = ranks_[1]->NextAdd();
    ASSERT_FALSE(id.empty());
    client().Cancel(key);
    FakeRank::Received abort;
    ASSERT_TRUE(ranks_[1]->WaitFor([](const auto& r) { return r.type == 1; }, &abort, seconds(1)));
    EXPECT_NE(abort.payload.find(id), std::string::npos);
    EXPECT_EQ(ranks_[0]->CountReceived(1), 0U);
    EXPECT_EQ(InFlight(), 0);
    EXPECT_EQ(actor_->Snapshot()->aborts_client, 1);
}

TEST_F(GroupActorTest, AThousandSilentStreamsAreAbortedWithinASecond) {
    Start(Options(1));
    FakeRankOptions options = RankOptions(0);
    options.auto_answer = false;
    FakeRank& rank = AddRank(options);
    ASSERT_TRUE(WaitLive(1));
    std::vector<StreamKey> keys;
    for (int i = 0; i < 1000; ++i) {
        keys.push_back(client().Submit(100));
    }
    for (int i = 0; i < 1000; ++i) {
        ASSERT_FALSE(rank.NextAdd().empty());
    }
    const auto before = SteadyNow::now();
    for (const StreamKey key : keys) {
        client().Cancel(key);
    }
    std::size_t aborted = 0;
    while (aborted < 1000 && SteadyNow::now() - before < seconds(5)) {
        FakeRank::Received abort;
        if (rank.WaitFor([](const auto& r) { return r.type == 1; }, &abort, milliseconds(100))) {
            for (std::size_t at = abort.payload.find("t-"); at != std::string::npos;
                 at = abort.payload.find("t-", at + 1)) {
                ++aborted;
            }
        }
    }
    EXPECT_EQ(aborted, 1000U);
    EXPECT_LT(SteadyNow::now() - before, seconds(1));
    EXPECT_EQ(InFlight(), 0);
}

TEST_F(GroupActorTest, AbortMeetsFinishWithoutDoubleCounting) {
    Start(Options(1));
    FakeRankOptions options = RankOptions(0);
    options.auto_answer = false;
    FakeRank& rank = AddRank(options);
    ASSERT_TRUE(WaitLive(1));
    for (int round = 0; round < 300; ++round) {
        const StreamKey key = client().Submit(4);
        const std::string id = rank.NextAdd();
        ASSERT_FALSE(id.empty());
        rank.SayTokens(id, {1}, wire::FinishReason::kStop);
        rank.SayTokens(id, {1}, wire::FinishReason::kStop);
        client().Cancel(key);
    }
    rank.SayFinished({"never", "seen"});
    for (int i = 0; i < 2000; ++i) {
        rank.SayTokens("dead-" + std::to_string(i), {1});
    }
    const StreamKey last = client().Submit(4);
    const std::string id = rank.NextAdd();
    rank.SayTokens(id, {9}, wire::FinishReason::kStop);
    ASSERT_TRUE(client().WaitEnd(last));
    EXPECT_EQ(client()[last].tokens, (std::vector<wire::TokenId>{9}));
    for (auto& [key, stream] : client().streams()) {
        EXPECT_LE(stream.terminals, 1);
    }
    EXPECT_EQ(InFlight(), 0);
    EXPECT_EQ(actor_->Snapshot()->ranks[0].state, RankState::kLive);
}

TEST_F(GroupActorTest, DrainRefusesNewWorkAndEndsWhenTheLastStreamDoes) {
    Start(Options(1));
    FakeRankOptions options = RankOptions(0);
    options.step_time = milliseconds(5);
    AddRank(options);
    ASSERT_TRUE(WaitLive(1));
    const StreamKey running = client().Submit(40);
    ASSERT_TRUE(client().Wait([&] { return !client()[running].tokens.empty(); }));
    actor_->BeginDrain();
    const StreamKey refused = client().Submit(4);
    ASSERT_TRUE(client().WaitEnd(refused));
    ASSERT_TRUE(client()[refused].error.has_value());
    EXPECT_EQ(client()[refused].error->code, ErrorCode::kDraining);
    ASSERT_TRUE(client().WaitEnd(running));
    EXPECT_EQ(client()[running].tokens.size(), 40U);
    EXPECT_TRUE(client().Wait([&] { return actor_->drained(); }, seconds(2)));
}

TEST_F(GroupActorTest, CloseEndsEveryStreamTellsTheRankAndIsQuick) {
    Start(Options(1));
    FakeRankOptions options = RankOptions(0);
    options.auto_answer = false;
    FakeRank& rank = AddRank(options);
    ASSERT_TRUE(WaitLive(1));
    for (int i = 0; i < 50; ++i) {
        client().Submit(100);
    }
    for (int i = 0; i < 50; ++i) {
        ASSERT_FALSE(rank.NextAdd().empty());
    }
    const auto before = SteadyNow::now();
    actor_->Close();
    EXPECT_LT(SteadyNow::now() - before, seconds(1));
    ASSERT_TRUE(client().WaitAll(seconds(1)));
    EXPECT_TRUE(rank.WaitFor([](const auto& r) { return r.type == 1; }, nullptr, seconds(2)));
}

// ---- administration, snapshots ----

TEST_F(GroupActorTest, AnAdministrativeCallAsksEveryRank) {
    Start(Options(2));
    AddRank(RankOptions(0));
    AddRank(RankOptions(1));
    ASSERT_TRUE(WaitLive(2));
    const auto call = [&](AdminCall what) { return CallAdmin(std::move(what)); };
    AdminCall loras;
    loras.method = AdminMethod::kListLoras;
    auto replies = call(loras);
    ASSERT_EQ(replies.size(), 2U);
    EXPECT_EQ(replies[0].value, "[1,2]");
    EXPECT_EQ(replies[1].value, "[1,2]");
    AdminCall reset;
    reset.method = AdminMethod::kResetPrefixCache;
    replies = call(reset);
    EXPECT_EQ(replies[1].value, "true");
    ranks_[1]->Die(false);
    ASSERT_TRUE(WaitState(1, RankState::kDead));
    replies = call(reset);
    EXPECT_TRUE(replies[0].status.ok());
    ASSERT_FALSE(replies[1].status.ok());
    EXPECT_EQ(replies[1].status.error().code, ErrorCode::kUnavailable);
}

TEST_F(GroupActorTest, AnAdministrativeCallEndsWhenItsRankIsLost) {
    Start(Options(1));
    FakeRank& rank = AddRank(RankOptions(0));
    ASSERT_TRUE(WaitLive(1));
    rank.Freeze(true);
    std::atomic<int> done{0};
    ErrorCode code{ErrorCode::kInternal};
    AdminCall pause;
    pause.method = AdminMethod::kPause;
    actor_->Admin(pause, [&](std::vector<AdminReply> replies) {
        code = replies[0].status.ok() ? ErrorCode::kInternal : replies[0].status.error().code;
        done.store(1, std::memory_order_release);
    });
    std::this_thread::sleep_for(milliseconds(100));
    ranks_.clear();
    ASSERT_TRUE(client().Wait([&] { return done.load(std::memory_order_acquire) == 1; }, seconds(5)));
    EXPECT_EQ(code, ErrorCode::kRankLost);
}

TEST_F(GroupActorTest, ALockstepGroupThatIsNotPausedIsNeverToldToResume) {
    Start(Options(2));
    for (std::uint16_t rank = 0; rank < 2; ++rank) {
        FakeRankOptions options = RankOptions(rank);
        options.data_parallel_size = 2;
        AddRank(options);
    }
    ASSERT_TRUE(WaitLive(2));
    ASSERT_TRUE(actor_->Snapshot()->lockstep);
    const auto method = [](std::string_view name) {
        return [name](const FakeRank::Received& r) {
            return r.type == 3 && r.payload.find(name) != std::string::npos;
        };
    };
    AdminCall resume;
    resume.method = AdminMethod::kResume;
    auto replies = CallAdmin(resume);
    ASSERT_EQ(replies.size(), 2U);
    for (std::size_t i = 0; i < 2; ++i) {
        EXPECT_TRUE(replies[i].status.ok());
        EXPECT_EQ(replies[i].value, "null");
        EXPECT_TRUE(ranks_[i]->WaitFor(method("is_scheduler_paused")));
        EXPECT_FALSE(ranks_[i]->WaitFor(method("resume_scheduler"), nullptr, milliseconds(20)));
    }
    AdminCall pause;
    pause.method = AdminMethod::kPause;
    EXPECT_TRUE(CallAdmin(pause)[1].status.ok());
    EXPECT_TRUE(CallAdmin(resume)[1].status.ok());
    for (auto& rank : ranks_) {
        EXPECT_TRUE(rank->WaitFor(method("pause_scheduler")));
        EXPECT_TRUE(rank->WaitFor(method("resume_scheduler")));
    }
}

TEST_F(GroupActorTest, ALockstepGroupIsWokenOnEveryRankAndLostAsOne) {
    Start(Options(2));
    for (std::uint16_t rank = 0; rank < 2; ++rank) {
        FakeRankOptions options = RankOptions(rank);
        options.data_parallel_size = 2;
        options.auto_answer = false;
        AddRank(options);
    }
    ASSERT_TRUE(WaitLive(2));
    const StreamKey key = client().Submit(4);
    const auto wave = [](const FakeRank::Received& r) { return r.type == 2; };
    EXPECT_TRUE(ranks_[0]->WaitFor(wave));
    EXPECT_TRUE(ranks_[1]->WaitFor(wave));
    ranks_[1]->Die(false);
    ASSERT_TRUE(client().WaitEnd(key, seconds(2)));
    EXPECT_TRUE(client()[key].error.has_value());
    EXPECT_TRUE(WaitState(0, RankState::kDead, seconds(2)));
    EXPECT_TRUE(WaitState(1, RankState::kDead, seconds(2)));
    ranks_.clear();
    for (std::uint16_t rank = 0; rank < 2; ++rank) {
        FakeRankOptions options = RankOptions(rank);
        options.data_parallel_size = 2;
        AddRank(options);
    }
    ASSERT_TRUE(WaitLive(2));
    const StreamKey next = client().Submit(4);
    ASSERT_TRUE(client().WaitEnd(next));
    EXPECT_FALSE(client()[next].error.has_value());
}

TEST_F(GroupActorTest, ReadsTheLoadFromARanksSharedPage) {
    engine::LoadPageWriter page;
    ASSERT_TRUE(page.Open(Root(), "rank0").ok());
    wire::LoadSnapshot load;
    load.num_running = 7;
    load.kv_active_pages = 3;
    load.kv_total_pages = 10;
    page.Publish(load);
    Start(Options(1));
    FakeRankOptions options = RankOptions(0);
    options.load_page = page.path();
    options.with_stats = false;
    AddRank(options);
    ASSERT_TRUE(WaitLive(1));
    const StreamKey key = client().Submit(2);
    ASSERT_TRUE(client().WaitEnd(key));
    ASSERT_TRUE(WaitSnapshot([](const GroupSnapshot& s) { return s.ranks[0].load.num_running == 7; }));
    EXPECT_EQ(actor_->Snapshot()->ranks[0].load.kv_active_pages, 3);
    load.num_running = 5;
    page.Publish(load);
    EXPECT_TRUE(
        WaitSnapshot([](const GroupSnapshot& s) { return s.ranks[0].load.num_running == 5; }, seconds(2)))
        << "also while nothing is submitted";
}

/// A process that writes a rank's load page every millisecond, for tests that kill or stop it.
class PageWriter {
  public:
    explicit PageWriter(const std::string& folder) : path_{folder + "/page0"} {
        pid_ = ::fork();
        if (pid_ == 0) {
            engine::LoadPageWriter page;
            if (!page.Open(folder, "page0").ok()) {
                ::_exit(1);
            }
            wire::LoadSnapshot load;
            load.num_running = 7;
            load.kv_active_pages = 3;
            load.kv_total_pages = 10;
            for (;;) {
                page.Publish(load);
                ::usleep(1000);
            }
        }
        const auto until = SteadyNow::now() + seconds(10);
        engine::LoadPageReader reader;
        while (!(reader.Open(path()).ok() && reader.Read()) && SteadyNow::now() < until) {
            std::this_thread::sleep_for(milliseconds(1));
        }
    }
    ~PageWriter() { End(); }
    PageWriter(const PageWriter&) = delete;
    PageWriter& operator=(const PageWriter&) = delete;
    std::string path() const { return path_; }
    void Signal(int signal) const { ::kill(pid_, signal); }
    void End() {
        if (pid_ > 0) {
            ::kill(pid_, SIGKILL);
            ::waitpid(std::exchange(pid_, -1), nullptr, 0);
        }
    }

  private:
    std::string path_;
    pid_t pid_{-1};
};

TEST_F(GroupActorTest, NoticesThatTheWriterOfALoadPageDiedAndGoesOnWithReports) {
    PageWriter writer{Root()};
    Start(Options(1));
    FakeRankOptions options = RankOptions(0);
    options.load_page = writer.path();
    AddRank(options);
    ASSERT_TRUE(WaitLive(1));
    const auto source = [&](std::string_view wanted) {
        return WaitSnapshot([&](const GroupSnapshot& s) { return s.ranks[0].load_source == wanted; },
                            seconds(5));
    };
    ASSERT_TRUE(source("mailbox"));
    writer.End();
    ASSERT_TRUE(source("own")) << "nobody vouches for what it said last";
    const StreamKey key = client().Submit(4);
    ASSERT_TRUE(client().WaitEnd(key));
    EXPECT_FALSE(client()[key].error.has_value());
    EXPECT_NE(actor_->Snapshot()->ranks[0].load_source, "mailbox");
    EXPECT_EQ(actor_->Snapshot()->ranks[0].state, RankState::kLive) << "the rank is another process";
}

TEST_F(GroupActorTest, AStoppedWriterOfALoadPageIsOutdoneByReportsUntilItGoesOn) {
    PageWriter writer{Root()};
    Start(Options(1));
    FakeRankOptions options = RankOptions(0);
    options.load_page = writer.path();
    options.step_time = milliseconds(20);
    AddRank(options);
    ASSERT_TRUE(WaitLive(1));
    const auto source = [&](std::string_view wanted) {
        return WaitSnapshot([&](const GroupSnapshot& s) { return s.ranks[0].load_source == wanted; },
                            seconds(5));
    };
    client().Submit(400);
    ASSERT_TRUE(source("mailbox"));
    writer.Signal(SIGSTOP);
    ASSERT_TRUE(source("report"));
    writer.Signal(SIGCONT);
    ASSERT_TRUE(source("mailbox"));
}

TEST_F(GroupActorTest, HandsOneBatchToAShardPerStepNotPerToken) {
    Start(Options(1));
    FakeRankOptions options = RankOptions(0);
    options.step_time = milliseconds(10);
    AddRank(options);
    ASSERT_TRUE(WaitLive(1));
    for (int i = 0; i < 100; ++i) {
        client().Submit(20);
    }
    ASSERT_TRUE(client().WaitAll());
    EXPECT_LT(client().batches(), 100U) << "2000 tokens in some 20-40 steps";
}

TEST_F(GroupActorTest, RunsOnTheOwnersLoopWithoutAThread) {
    GroupActorOptions options = Options(1);
    options.own_thread = false;
    Start(options);
    FakeRank& rank = AddRank(RankOptions(0));
    const StreamKey key = [&] {
        const auto until = SteadyNow::now() + seconds(10);
        while (actor_->Snapshot()->live == 0 && SteadyNow::now() < until) {
            pollfd item{actor_->poll_fd(), POLLIN, 0};
            ::poll(&item, 1, 20);
            actor_->RunOnce(Duration::zero());
        }
        return client().Submit(4);
    }();
    ASSERT_TRUE(client().Wait([&] {
        actor_->RunOnce(milliseconds(1));
        return client()[key].terminals > 0;
    }));
    EXPECT_EQ(client()[key].tokens.size(), 4U);
    // What the loop itself submits leaves on its own stack: no descriptor fires, no turn is needed to send
    // it.
    actor_->HoldCommands();
    const StreamKey held = client().Submit(4);
    pollfd item{actor_->poll_fd(), POLLIN, 0};
    EXPECT_EQ(::poll(&item, 1, 0), 0) << "a held submit wakes nobody";
    actor_->RunCommands();
    (void)rank.NextAdd();  // the first one
    EXPECT_FALSE(rank.NextAdd().empty()) << "sent without a turn";
    ASSERT_TRUE(client().Wait([&] {
        actor_->RunOnce(milliseconds(1));
        return client()[held].terminals > 0;
    }));
    EXPECT_EQ(client()[held].tokens.size(), 4U);
}

}  // namespace
}  // namespace rankgate::group
