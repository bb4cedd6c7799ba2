// SPDX-License-Identifier: Apache-2.0
#include "transport/handshake.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "wire/handshake.h"

namespace rankgate::transport {
namespace {

using Kind = HandshakeEvent::Kind;
using Step = FrontendHandshake::Step;

std::string Ready(std::int64_t dp_size = 1, std::string version = "0.32.0", std::string instance = "i",
                  Dialect dialect = Dialect::kVllm) {
    wire::ReadyResponse ready;
    ready.max_model_len = 512;
    ready.num_gpu_blocks = 10;
    ready.block_size = 16;
    ready.vllm_version = std::move(version);
    ready.data_parallel_size = dp_size;
    ready.instance_id = std::move(instance);
    std::string out;
    wire::EncodeReadyResponse(ready, dialect, out);
    return out;
}

std::string Greeting(wire::Greeting::Kind kind, std::string hash = {}) {
    wire::Greeting greeting;
    greeting.kind = kind;
    if (!hash.empty()) {
        greeting.parallel_config_hash = hash;
    }
    std::string out;
    wire::EncodeGreeting(greeting, Dialect::kVllm, out);
    return out;
}

class FrontendHandshakeTest : public ::testing::Test {
  protected:
    FrontendHandshake& Make(std::int32_t size, Duration ready_timeout = Duration::zero(),
                            std::int32_t base = 0, Dialect dialect = Dialect::kVllm) {
        FrontendHandshakeOptions options;
        options.size = size;
        options.base_index = base;
        options.dialect = dialect;
        options.addresses.inputs = {"ipc:///in"};
        options.addresses.outputs = {"ipc:///out"};
        options.ready_timeout = ready_timeout;
        machine_ = std::make_unique<FrontendHandshake>(options, clock_);
        base_ = base;
        return *machine_;
    }
    FrontendHandshake& MakeAuto(std::int32_t size) {
        FrontendHandshakeOptions options;
        options.size = size;
        options.dialect.reset();
        options.addresses.inputs = {"ipc:///in"};
        options.addresses.outputs = {"ipc:///out"};
        machine_ = std::make_unique<FrontendHandshake>(options, clock_);
        return *machine_;
    }
    void Hello(std::int32_t rank, bool old_serves = false) {
        Send(wire::RankIdentity(base_ + rank), Greeting(wire::Greeting::Kind::kHello), old_serves);
        Pump();
    }
    void SayReady(std::int32_t rank, std::string hash = {}) {
        Send(wire::RankIdentity(base_ + rank), Greeting(wire::Greeting::Kind::kReady, std::move(hash)),
             false);
        Pump();
    }
    void Send(std::string identity, std::string bytes, bool old_serves = false) {
        const std::string_view frame = bytes;
        machine_->OnHandshakeMessage(identity, {&frame, 1}, old_serves);
    }
    void Register(std::int32_t rank, std::string map = Ready()) {
        const std::string_view frame = map;
        machine_->OnRegistration(wire::RankIdentity(base_ + rank), {&frame, 1});
        Pump();
    }
    void Tick() {
        machine_->OnTick();
        Pump();
    }
    /// Plays the link: delivers INITs, keeps the events.
    void Pump() {
        for (HandshakeEvent& event : machine_->TakeEvents()) {
            if (event.kind == Kind::kSendInit && deliver_init_) {
                machine_->OnInitSent(event.rank);
            }
            events_.push_back(std::move(event));
        }
    }
    std::size_t Count(Kind kind, std::int32_t rank = -2) const {
        return static_cast<std::size_t>(std::count_if(
            events_.begin(), events_.end(),
            [&](const HandshakeEvent& e) { return e.kind == kind && (rank == -2 || e.rank == rank); }));
    }
    std::string LastReason(Kind kind) const {
        for (auto it = events_.rbegin(); it != events_.rend(); ++it) {
            if (it->kind == kind) {
                return it->reason;
            }
        }
        return {};
    }

    FakeClock clock_;
    std::unique_ptr<FrontendHandshake> machine_;
    std::vector<HandshakeEvent> events_;
    std::int32_t base_{0};
    bool deliver_init_{true};
};

TEST_F(FrontendHandshakeTest, AnswersHelloWithTheAddressesAndGoesLiveOnReadyAndRegistration) {
    Make(1);
    Hello(0);
    ASSERT_EQ(Count(Kind::kSendInit, 0), 1U);
    const auto sent =
        std::find_if(events_.begin(), events_.end(), [](const auto& e) { return e.kind == Kind::kSendInit; });
    const auto init = wire::DecodeInit(sent->bytes);
    ASSERT_TRUE(init.ok());
    EXPECT_EQ(init->inputs, std::vector<std::string>{"ipc:///in"});
    EXPECT_FALSE(init->coordinator_input.has_value());
    EXPECT_EQ(machine_->step(0), Step::kInitialised);
    Register(0);
    EXPECT_EQ(machine_->step(0), Step::kRegistered);
    EXPECT_EQ(Count(Kind::kLive), 0U);
    SayReady(0);
    EXPECT_EQ(machine_->step(0), Step::kLive);
    EXPECT_EQ(Count(Kind::kLive, 0), 1U);
    EXPECT_EQ(machine_->facts(0).ready.max_model_len, 512);
}

TEST_F(FrontendHandshakeTest, RepeatsInitEachSecondUntilTheRegistration) {
    Make(1);
    Hello(0);
    for (std::size_t second = 1; second <= 3; ++second) {
        clock_.Advance(FrontendHandshake::kInitEvery - std::chrono::milliseconds(1));
        Tick();
        EXPECT_EQ(Count(Kind::kSendInit, 0), second) << "not early";
        ASSERT_TRUE(machine_->next_deadline().has_value());
        EXPECT_EQ(*machine_->next_deadline(), clock_.Now() + std::chrono::milliseconds(1));
        clock_.Advance(std::chrono::milliseconds(1));
        Tick();
        EXPECT_EQ(Count(Kind::kSendInit, 0), second + 1);
        EXPECT_EQ(events_.back().again, true);
        EXPECT_EQ(events_.back().bytes, events_[1].bytes) << "the same INIT";
    }
    EXPECT_EQ(Count(Kind::kGreeted), 1U);
    Register(0);
    clock_.Advance(std::chrono::milliseconds(1500));
    Tick();
    EXPECT_EQ(Count(Kind::kSendInit), 4U);
}

TEST_F(FrontendHandshakeTest, ReadyEndsTheRepeatsAndSoDoesTheirBound) {
    Make(2);
    Hello(0);
    Hello(1);
    SayReady(0);
    for (int i = 0; i < FrontendHandshake::kMaxInitRepeats + 50; ++i) {
        clock_.Advance(FrontendHandshake::kInitEvery);
        Tick();
    }
    EXPECT_EQ(Count(Kind::kSendInit, 0), 1U);
    EXPECT_EQ(Count(Kind::kSendInit, 1), 1U + FrontendHandshake::kMaxInitRepeats);
    EXPECT_EQ(machine_->step(1), Step::kInitialised) << "it may still come";
    Register(1);
    EXPECT_EQ(machine_->step(1), Step::kRegistered);
}

TEST_F(FrontendHandshakeTest, RepeatsThatFindNobodyAreForgivenForAWhileAndThenMeanThatItIsGone) {
    Make(1);
    Hello(0);
    deliver_init_ = false;
    const auto miss = [&] {
        clock_.Advance(FrontendHandshake::kInitEvery);
        Tick();
        machine_->OnInitUndeliverable(0);
        Pump();
    };
    for (int i = 1; i < FrontendHandshake::kMaxUnreachable; ++i) {
        miss();
    }
    EXPECT_EQ(machine_->step(0), Step::kInitialised);
    deliver_init_ = true;  // it dialled again
    clock_.Advance(FrontendHandshake::kInitEvery);
    Tick();
    deliver_init_ = false;
    for (int i = 1; i < FrontendHandshake::kMaxUnreachable; ++i) {
        miss();
    }
    EXPECT_EQ(machine_->step(0), Step::kInitialised) << "only misses in a row count";
    EXPECT_EQ(Count(Kind::kLostInStart), 0U);
    miss();
    EXPECT_EQ(machine_->step(0), Step::kAbsent);
    EXPECT_EQ(Count(Kind::kLostInStart, 0), 1U);
}

TEST_F(FrontendHandshakeTest, TakesReadyBeforeTheRegistration) {
    Make(1);
    Hello(0);
    SayReady(0);
    EXPECT_EQ(Count(Kind::kLive), 0U) << "nothing may be sent to an identity that has not registered";
    Register(0);
    EXPECT_EQ(Count(Kind::kLive), 1U);
}

TEST_F(FrontendHandshakeTest, EveryInterleavingOfThreeRanksEndsLive) {
    // The three messages of each rank keep HELLO first; READY and registration swap freely.
    std::mt19937 random{7};
    for (int round = 0; round < 300; ++round) {
        events_.clear();
        Make(3);
        std::vector<std::vector<int>> steps(3);
        std::vector<int> order;
        for (int rank = 0; rank < 3; ++rank) {
            steps[static_cast<std::size_t>(rank)] =
                random() % 2 == 0 ? std::vector<int>{0, 1, 2} : std::vector<int>{0, 2, 1};
            order.insert(order.end(), 3, rank);
        }
        std::shuffle(order.begin(), order.end(), random);
        for (const int rank : order) {
            auto& mine = steps[static_cast<std::size_t>(rank)];
            const int what = mine.front();
            mine.erase(mine.begin());
            what == 0 ? Hello(rank) : what == 1 ? SayReady(rank) : Register(rank);
        }
        for (int rank = 0; rank < 3; ++rank) {
            EXPECT_EQ(machine_->step(rank), Step::kLive);
            EXPECT_EQ(Count(Kind::kLive, rank), 1U);
        }
    }
}

TEST_F(FrontendHandshakeTest, RefusesStraysWithoutHarmToTheGroup) {
    Make(2);
    Send(std::string(5, 'x'), Greeting(wire::Greeting::Kind::kHello));
    Send("", Greeting(wire::Greeting::Kind::kHello));
    Send(wire::RankIdentity(2), Greeting(wire::Greeting::Kind::kHello));
    Send(wire::RankIdentity(0), "not msgpack");
    Send(wire::RankIdentity(0), "");
    Send(wire::RankIdentity(0), std::string("\x81\xa6status\xa4WHAT", 13));
    machine_->OnHandshakeMessage(wire::RankIdentity(0), {}, false);
    machine_->OnRegistration("abc", {});
    machine_->OnRegistration(wire::RankIdentity(0), {});
    Pump();
    EXPECT_EQ(machine_->refused(), 9U);
    EXPECT_EQ(Count(Kind::kRefused), 9U);
    EXPECT_EQ(Count(Kind::kSendInit), 0U);
    Hello(0);
    Register(0);
    SayReady(0);
    EXPECT_EQ(machine_->step(0), Step::kLive);
}

TEST_F(FrontendHandshakeTest, RefusesTheOtherDialectAndOldEnginesByName) {
    Make(1);
    Hello(0);
    Register(0, Ready(1, "tokenspeed-0.1.1", "i", Dialect::kTokenSpeed));
    EXPECT_NE(LastReason(Kind::kRefused).find("tokenspeed"), std::string::npos);
    Register(0, Ready(1, "0.25.1"));
    EXPECT_NE(LastReason(Kind::kRefused).find("0.25.1"), std::string::npos);
    Register(0, "");
    EXPECT_NE(LastReason(Kind::kRefused).find("empty"), std::string::npos);
    EXPECT_EQ(machine_->step(0), Step::kAbsent) << "it will say nothing else: nobody waits for it";
    Register(0, Ready(1, "0.32.0+cpu"));
    EXPECT_EQ(machine_->step(0), Step::kRegistered);
}

TEST_F(FrontendHandshakeTest, ARefusedEngineIsLostWithTheReasonAndNoiseIsNot) {
    Make(1);
    Hello(0);
    Register(0, "noise");
    EXPECT_EQ(machine_->step(0), Step::kInitialised);
    EXPECT_EQ(Count(Kind::kLostInStart), 0U);
    Register(0, Ready(1, "tokenspeed-0.1.1", "i", Dialect::kTokenSpeed));
    EXPECT_EQ(machine_->step(0), Step::kAbsent);
    for (const char* name : {"refused", "tokenspeed", "vllm", "--runtime"}) {
        EXPECT_NE(LastReason(Kind::kLostInStart).find(name), std::string::npos) << name;
    }
    // What it still says changes nothing, and time neither.
    SayReady(0);
    machine_->OnHandshakeClosed(0);
    clock_.Advance(std::chrono::minutes(20));
    Tick();
    EXPECT_EQ(machine_->step(0), Step::kAbsent);
    EXPECT_EQ(Count(Kind::kLostInStart), 1U);
}

TEST_F(FrontendHandshakeTest, AnUndeclaredDialectIsThatOfTheFirstLiveRank) {
    for (const Dialect first : {Dialect::kVllm, Dialect::kTokenSpeed}) {
        const Dialect second = first == Dialect::kVllm ? Dialect::kTokenSpeed : Dialect::kVllm;
        const auto ready = [](Dialect dialect) {
            return Ready(1, dialect == Dialect::kVllm ? "0.32.0" : "tokenspeed-0.1.1", "i", dialect);
        };
        MakeAuto(2);
        events_.clear();
        EXPECT_FALSE(machine_->dialect());
        Hello(0);
        Hello(1);
        Register(0, ready(first));
        EXPECT_FALSE(machine_->dialect()) << "it may still go away";
        Register(1, ready(second));
        EXPECT_EQ(machine_->step(1), Step::kAbsent);
        EXPECT_NE(LastReason(Kind::kRefused).find(wire::DialectName(first)), std::string::npos);
        EXPECT_NE(LastReason(Kind::kRefused).find(wire::DialectName(second)), std::string::npos);
        SayReady(0);
        EXPECT_EQ(machine_->dialect(), first);
        Hello(1);
        Register(1, ready(second));
        EXPECT_EQ(machine_->step(1), Step::kAbsent);
        Hello(1);
        Register(1, ready(first));
        SayReady(1);
        EXPECT_EQ(machine_->step(1), Step::kLive);
        // The runtime is the group's for good.
        machine_->OnLost(0);
        machine_->OnLost(1);
        Hello(0);
        Register(0, ready(second));
        EXPECT_EQ(machine_->step(0), Step::kAbsent);
    }
}

TEST_F(FrontendHandshakeTest, AnUndeclaredGroupForgetsARankThatNeverWentLive) {
    MakeAuto(2);
    Hello(0);
    Register(0, Ready());
    machine_->OnLost(0);
    Hello(1);
    Register(1, Ready(1, "tokenspeed-0.1.1", "i", Dialect::kTokenSpeed));
    SayReady(1);
    EXPECT_EQ(machine_->step(1), Step::kLive);
    EXPECT_EQ(machine_->dialect(), Dialect::kTokenSpeed);
}

TEST_F(FrontendHandshakeTest, RefusesAGroupSizeThatDiffersAndMixedLockstep) {
    Make(2);
    Hello(0);
    Register(0, Ready(4));
    EXPECT_EQ(machine_->step(0), Step::kAbsent);
    EXPECT_NE(LastReason(Kind::kRefused).find("data_parallel_size 4"), std::string::npos);
    Register(0, Ready(2));
    EXPECT_EQ(machine_->step(0), Step::kRegistered);
    Hello(1);
    Register(1, Ready(1));
    EXPECT_EQ(machine_->step(1), Step::kAbsent);
}

TEST_F(FrontendHandshakeTest, RefusesReadyWithAnotherParallelConfigHash) {
    Make(2);
    Hello(0);
    Hello(1);
    Register(0, Ready(2));
    SayReady(0, "aaa");
    Register(1, Ready(2));
    SayReady(1, "bbb");
    EXPECT_EQ(machine_->step(1), Step::kRegistered);
    EXPECT_NE(LastReason(Kind::kRefused).find("hash"), std::string::npos);
    SayReady(1, "aaa");
    EXPECT_EQ(machine_->step(1), Step::kLive);
}

TEST_F(FrontendHandshakeTest, ARankOfAnotherConfigurationIsNotServedForWantOfAReady) {
    Make(3);
    for (std::int32_t rank = 0; rank < 3; ++rank) {
        Hello(rank);
    }
    Register(0, Ready(3));
    SayReady(0, "aaa");
    Register(1, Ready(3));
    SayReady(1, "bbb");
    clock_.Advance(FrontendHandshake::kReadyGrace);
    Tick();
    EXPECT_EQ(machine_->step(1), Step::kRegistered);
    // Nor does it ask to be looked at again and again, or keep out those that do fit.
    const auto deadline = machine_->next_deadline();
    EXPECT_TRUE(!deadline || *deadline > clock_.Now());
    Register(2, Ready(3));
    SayReady(2, "aaa");
    EXPECT_EQ(machine_->step(2), Step::kLive);
    machine_->OnLost(0);
    Tick();
    EXPECT_EQ(machine_->step(1), Step::kRegistered);
    machine_->OnLost(2);
    Tick();
    EXPECT_EQ(machine_->step(1), Step::kLive) << "the ranks that it did not fit are gone";
}

TEST_F(FrontendHandshakeTest, HashesAreComparedAlsoWhereEveryReadyCameBeforeTheRegistrations) {
    Make(2);
    Hello(0);
    Hello(1);
    SayReady(0, "aaa");
    SayReady(1, "bbb");
    Register(0, Ready(2));
    Register(1, Ready(2));
    EXPECT_EQ(machine_->step(0), Step::kLive);
    EXPECT_EQ(machine_->step(1), Step::kRegistered);
    EXPECT_NE(LastReason(Kind::kRefused).find("hash"), std::string::npos);
}

TEST_F(FrontendHandshakeTest, ARankKnownFromBeforeIsNotTakenBackIntoAnotherDeployment) {
    MakeAuto(2);
    Hello(0);
    Register(0, Ready(1, "tokenspeed-0.1.0", "i", Dialect::kTokenSpeed));
    auto known = ParseReadyResponse(Ready(), std::nullopt);
    ASSERT_TRUE(known.ok());
    machine_->Reattach(1, *known);
    Pump();
    EXPECT_EQ(machine_->step(1), Step::kAbsent);
    EXPECT_NE(LastReason(Kind::kRefused).find("wire"), std::string::npos);
    SayReady(0);
    EXPECT_EQ(machine_->dialect(), Dialect::kTokenSpeed);

    Make(2);
    Hello(0);
    Register(0, Ready(2));
    SayReady(0, "aaa");
    machine_->Reattach(1, *known);
    Pump();
    EXPECT_EQ(machine_->step(1), Step::kAbsent) << "an independent rank beside lockstep ones";
    known = ParseReadyResponse(Ready(2), std::nullopt);
    ASSERT_TRUE(known.ok());
    known->parallel_config_hash = "bbb";
    machine_->Reattach(1, *known);
    EXPECT_EQ(machine_->step(1), Step::kAbsent);
    known->parallel_config_hash = "aaa";
    machine_->Reattach(1, *known);
    EXPECT_EQ(machine_->step(1), Step::kLive);
}

TEST_F(FrontendHandshakeTest, HelloOfALiveRankIsARestart) {
    Make(1);
    Hello(0);
    Register(0);
    SayReady(0);
    Hello(0);
    EXPECT_EQ(Count(Kind::kRestarted, 0), 1U);
    EXPECT_EQ(Count(Kind::kSendInit, 0), 2U);
    EXPECT_EQ(machine_->step(0), Step::kInitialised);
    Register(0, Ready(1, "0.32.0", "second"));
    SayReady(0);
    EXPECT_EQ(Count(Kind::kLive, 0), 2U);
    EXPECT_EQ(machine_->facts(0).ready.instance_id, "second");
}

TEST_F(FrontendHandshakeTest, ASecondEngineWaitsUntilTheFirstIsGone) {
    Make(1);
    Hello(0);
    Register(0);
    SayReady(0);
    Hello(0, /*old_serves=*/true);
    EXPECT_EQ(Count(Kind::kRestarted), 0U);
    EXPECT_EQ(machine_->step(0), Step::kLive);
    machine_->OnLost(0);
    Pump();
    EXPECT_EQ(Count(Kind::kSendInit, 0), 2U);
    EXPECT_EQ(machine_->step(0), Step::kInitialised);
}

TEST_F(FrontendHandshakeTest, RegisteringTwiceIsHarmless) {
    Make(1);
    Hello(0);
    Register(0);
    Register(0);
    SayReady(0);
    Register(0);
    SayReady(0);
    EXPECT_EQ(Count(Kind::kLive, 0), 1U);
    EXPECT_EQ(Count(Kind::kRestarted, 0), 0U);
}

TEST_F(FrontendHandshakeTest, GreetingTwiceDuringTheLoadIsAnsweredTwice) {
    Make(1);
    Hello(0);
    Hello(0);
    EXPECT_EQ(Count(Kind::kSendInit, 0), 2U);
    Register(0);
    SayReady(0);
    EXPECT_EQ(machine_->step(0), Step::kLive);
}

TEST_F(FrontendHandshakeTest, AnEngineThatGreetedAnEarlierGatewayIsTakenOn) {
    Make(1);
    SayReady(0);
    Register(0);
    SayReady(0);
    EXPECT_EQ(machine_->step(0), Step::kLive);
}

TEST_F(FrontendHandshakeTest, ServesARegisteredRankWhoseReadyWasLost) {
    Make(1);
    Register(0);
    EXPECT_EQ(machine_->step(0), Step::kRegistered);
    ASSERT_TRUE(machine_->next_deadline().has_value());
    clock_.Advance(FrontendHandshake::kReadyGrace);
    machine_->OnTick();
    Pump();
    EXPECT_EQ(machine_->step(0), Step::kLive);
}

TEST_F(FrontendHandshakeTest, ADeathDuringTheLoadIsReportedAtOnceAndTheOthersGoOn) {
    Make(3);
    for (int rank = 0; rank < 3; ++rank) {
        Hello(rank);
    }
    machine_->OnHandshakeClosed(2);
    Pump();
    EXPECT_EQ(Count(Kind::kLostInStart, 2), 1U);
    EXPECT_EQ(machine_->step(2), Step::kAbsent);
    EXPECT_EQ(machine_->step(0), Step::kInitialised);
    Hello(2);
    EXPECT_EQ(machine_->step(2), Step::kInitialised);
}

TEST_F(FrontendHandshakeTest, AReadyThatIsNeverFollowedByARegistrationIsGivenUpInTime) {
    Make(1);
    Hello(0);
    SayReady(0);
    machine_->OnHandshakeClosed(0);
    clock_.Advance(FrontendHandshake::kRegistrationGrace / 2);
    machine_->OnTick();
    Pump();
    EXPECT_EQ(machine_->step(0), Step::kInitialised);
    clock_.Advance(FrontendHandshake::kRegistrationGrace);
    machine_->OnTick();
    Pump();
    EXPECT_EQ(Count(Kind::kLostInStart, 0), 1U);
}

TEST_F(FrontendHandshakeTest, ReportsTheRankThatIsLateOnceAndStillTakesIt) {
    Make(4, std::chrono::seconds(300));
    for (int rank = 0; rank < 4; ++rank) {
        Hello(rank);
    }
    for (int rank = 0; rank < 3; ++rank) {
        Register(rank);
        SayReady(rank);
    }
    clock_.Advance(std::chrono::seconds(295));
    machine_->OnTick();
    Pump();
    EXPECT_EQ(Count(Kind::kReadyTimedOut), 0U);
    for (int i = 0; i < 5; ++i) {
        clock_.Advance(std::chrono::seconds(5));
        machine_->OnTick();
        Pump();
    }
    EXPECT_EQ(Count(Kind::kReadyTimedOut), 1U);
    const std::string reason = LastReason(Kind::kReadyTimedOut);
    EXPECT_NE(reason.find("rank 3"), std::string::npos);
    EXPECT_NE(reason.find("300 s"), std::string::npos);
    EXPECT_NE(reason.find("engine-ready-timeout"), std::string::npos);
    Register(3);
    SayReady(3);
    EXPECT_EQ(machine_->step(3), Step::kLive);
}

TEST_F(FrontendHandshakeTest, AnInitThatCannotBeDeliveredLeavesTheRankAbsent) {
    Make(1);
    deliver_init_ = false;
    Hello(0);
    machine_->OnInitUndeliverable(0);
    Pump();
    EXPECT_EQ(machine_->step(0), Step::kAbsent);
    deliver_init_ = true;
    Hello(0);
    EXPECT_EQ(machine_->step(0), Step::kInitialised);
}

TEST_F(FrontendHandshakeTest, CountsRanksFromTheBaseIndex) {
    Make(2, Duration::zero(), 300, Dialect::kTokenSpeed);
    EXPECT_EQ(machine_->RankOf(wire::RankIdentity(301)), 1);
    EXPECT_EQ(machine_->RankOf(wire::RankIdentity(299)), -1);
    EXPECT_EQ(machine_->RankOf(wire::RankIdentity(302)), -1);
    Hello(1);
    Register(1, Ready(1, "tokenspeed-0.1.1", "i", Dialect::kTokenSpeed));
    SayReady(1);
    EXPECT_EQ(machine_->step(1), Step::kLive);
}

TEST_F(FrontendHandshakeTest, RandomMessagesNeverBreakIt) {
    std::mt19937 random{11};
    for (int round = 0; round < 2000; ++round) {
        if (round % 100 == 0) {
            Make(1 + static_cast<int>(random() % 3), std::chrono::seconds(5));
        }
        const int rank = static_cast<int>(random() % 3);
        switch (random() % 9) {
            case 0:
                Hello(rank, random() % 2 == 0);
                break;
            case 1:
                SayReady(rank, random() % 3 == 0 ? "h" : "");
                break;
            case 2:
                Register(rank, random() % 4 == 0 ? std::string("junk") : Ready());
                break;
            case 3:
                Register(rank, Ready(1, "0.32.0", std::to_string(random() % 3)));
                break;
            case 4:
                clock_.Advance(std::chrono::milliseconds(random() % 4000));
                machine_->OnTick();
                break;
            case 5:
                if (machine_->RankOf(wire::RankIdentity(rank)) >= 0) {
                    machine_->OnLost(rank);
                }
                break;
            case 6:
                if (machine_->RankOf(wire::RankIdentity(rank)) >= 0) {
                    machine_->OnHandshakeClosed(rank);
                }
                break;
            case 7:
                if (machine_->RankOf(wire::RankIdentity(rank)) >= 0) {
                    machine_->OnInitUndeliverable(rank);
                }
                break;
            default:
                Send(std::string(random() % 4, 'q'), std::string(random() % 20, '\x92'));
                break;
        }
        Pump();
    }
    // Whatever happened: a clean start of every rank still works.
    Make(1);
    Hello(0);
    Register(0);
    SayReady(0);
    EXPECT_EQ(machine_->step(0), Step::kLive);
}

TEST(EngineHandshakeTest, WalksFromHelloToReady) {
    FakeClock clock;
    EngineLinkOptions options;
    options.engine_index = 3;
    EngineHandshake engine{options, clock};
    const auto hello = wire::DecodeGreeting(engine.Hello());
    ASSERT_TRUE(hello.ok());
    EXPECT_EQ(hello->kind, wire::Greeting::Kind::kHello);
    EXPECT_FALSE(hello->local);
    EXPECT_TRUE(hello->headless);
    EXPECT_FALSE(engine.OnHandshakeMessage("junk").ok());
    EXPECT_EQ(engine.step(), EngineHandshake::Step::kGreeting);
    wire::InitMessage init;
    init.inputs = {"ipc:///a"};
    init.outputs = {"ipc:///b"};
    std::string bytes;
    wire::EncodeInit(init, bytes);
    ASSERT_TRUE(engine.OnHandshakeMessage(bytes).ok());
    EXPECT_EQ(engine.step(), EngineHandshake::Step::kInitialised);
    EXPECT_EQ(engine.addresses().inputs, init.inputs);
    ASSERT_TRUE(engine.OnHandshakeMessage(bytes).ok()) << "a repeated INIT is ignored";
    engine.OnRegistrationSent();
    EXPECT_EQ(engine.step(), EngineHandshake::Step::kReady);
    const auto ready = wire::DecodeGreeting(engine.Ready("hash"));
    ASSERT_TRUE(ready.ok());
    EXPECT_EQ(ready->kind, wire::Greeting::Kind::kReady);
    EXPECT_EQ(ready->parallel_config_hash, "hash");
}

TEST(EngineHandshakeTest, WaitsForTheCoordinatorWhereThereIsOne) {
    FakeClock clock;
    EngineHandshake engine{EngineLinkOptions{}, clock};
    (void)engine.Hello();
    wire::InitMessage init;
    init.inputs = {"ipc:///a"};
    init.outputs = {"ipc:///b"};
    init.coordinator_input = "ipc:///c";
    init.coordinator_output = "ipc:///d";
    std::string bytes;
    wire::EncodeInit(init, bytes);
    ASSERT_TRUE(engine.OnHandshakeMessage(bytes).ok());
    engine.OnRegistrationSent();
    EXPECT_EQ(engine.step(), EngineHandshake::Step::kAwaitingCoordinator);
    engine.OnCoordinatorReady();
    EXPECT_EQ(engine.step(), EngineHandshake::Step::kReady);
}

}  // namespace
}  // namespace rankgate::transport
