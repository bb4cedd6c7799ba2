// SPDX-License-Identifier: Apache-2.0
// The TokenSpeed wire's case list where it takes a whole gateway group and a peer that says odd things: field
// reports (A02, D03, D07, F01, F04 in docs/field-cases.md) and the rules for a rank that dies. The codec's
// share of the list is src/wire/tokenspeed/cases_test.cc.
#include <algorithm>
#include <array>
#include <set>

#include "group/actor_fixture.h"
#include "wire/msgpack.h"
#include "wire/tokenspeed/outputs.h"
#include "wire/tokenspeed/request.h"

namespace rankgate::group {
namespace {

/// A batch written by hand, column by column, so that it can be wrong.
struct Batch {
    std::vector<std::string> rids;
    std::vector<std::vector<wire::TokenId>> ids;
    std::vector<std::string> finished;
    std::vector<std::vector<double>> values;
    std::vector<std::vector<wire::TokenId>> scored;
    std::vector<std::int64_t> tail;  // engine_index, running, waiting, active, total, ...

    static Batch Of(std::string rid, std::vector<wire::TokenId> ids, std::string finished,
                    std::vector<std::int64_t> tail = {0}) {
        return Batch{{std::move(rid)}, {std::move(ids)}, {std::move(finished)}, {{}}, {{}}, std::move(tail)};
    }
    std::string Bytes() const {
        std::string out;
        wire::Writer w{out};
        w.Array(9 + tail.size());
        w.Str("BatchTokenIDOutSlim");
        const auto column = [&w](const auto& cells, auto&& write) {
            w.Array(cells.size());
            for (const auto& cell : cells) {
                write(cell);
            }
        };
        const auto text = [&w](const std::string& cell) { w.Str(cell); };
        const auto list = [&w](const std::vector<wire::TokenId>& cell) {
            w.Array(cell.size());
            for (const wire::TokenId token : cell) {
                w.Int(token);
            }
        };
        column(rids, text);
        column(ids, list);
        column(finished, text);
        for (int i = 0; i < 3; ++i) {
            column(rids, [&w](const std::string&) { w.Int(1); });
        }
        column(values, [&w](const std::vector<double>& cell) {
            w.Array(cell.size());
            for (const double value : cell) {
                w.Float(value);
            }
        });
        column(scored, list);
        for (const std::int64_t number : tail) {
            w.Int(number);
        }
        return out;
    }
};

class TokenSpeedGroupTest : public GroupActorTest {
  protected:
    /// Ranks that answer as told, or by themselves.
    void Serve(std::int32_t size, bool auto_answer = false) {
        Start(Options(size, transport::Dialect::kTokenSpeed));
        for (std::int32_t rank = 0; rank < size; ++rank) {
            FakeRankOptions options =
                RankOptions(static_cast<std::uint16_t>(rank), transport::Dialect::kTokenSpeed);
            options.auto_answer = auto_answer;
            options.with_stats = false;
            AddRank(options);
        }
        ASSERT_TRUE(WaitLive(size));
    }
    FakeRank& rank(std::size_t index) { return *ranks_[index]; }
    void Say(std::size_t index, const Batch& batch) { rank(index).SayRaw({batch.Bytes()}); }
    /// The wire id of a request just submitted to `index`.
    std::string Given(std::size_t index) {
        const std::string id = rank(index).NextAdd();
        EXPECT_FALSE(id.empty());
        return id;
    }
    bool WaitTokens(StreamKey key, std::size_t count) {
        return client().Wait([&] { return client()[key].tokens.size() >= count; }, seconds(5));
    }
};

// ---- A02 ----

TEST_F(TokenSpeedGroupTest, ATerminalRowWithoutTokensEndsTheStreamOnce) {
    Serve(1);
    const StreamKey key = client().Submit(50);
    const std::string id = Given(0);
    Say(0, Batch::Of(id, {65}, ""));
    ASSERT_TRUE(WaitTokens(key, 1));
    Say(0, Batch::Of(id, {}, "stop"));
    ASSERT_TRUE(client().WaitEnd(key));
    EXPECT_EQ(client()[key].tokens, (std::vector<wire::TokenId>{65}));
    EXPECT_EQ(client()[key].finish, wire::FinishReason::kStop);
    EXPECT_FALSE(client()[key].error.has_value());
    // What comes after the end is nobody's.
    Say(0, Batch::Of(id, {66}, "stop"));
    const StreamKey next = client().Submit(1);
    Say(0, Batch::Of(Given(0), {7}, "length"));
    ASSERT_TRUE(client().WaitEnd(next));
    EXPECT_EQ(client()[key].terminals, 1);
    EXPECT_EQ(client()[key].tokens.size(), 1U);
}

// ---- D03 ----

TEST_F(TokenSpeedGroupTest, AnIdleRankWhoseLastWordWasBusyGetsItsShareAtOnce) {
    Serve(2, true);
    const StreamKey last = client().Submit(2, 3, {}, 1);
    ASSERT_TRUE(client().WaitEnd(last));
    Batch busy;
    busy.tail = {1, 50, 50, 90, 100};
    Say(1, busy);
    ASSERT_TRUE(WaitSnapshot([](const GroupSnapshot& s) { return s.ranks[1].load.num_running == 50; }));
    client().streams().clear();
    std::array<int, 2> share{};
    for (int i = 0; i < 40; ++i) {
        const StreamKey key = client().Submit(2);
        ASSERT_TRUE(client().WaitEnd(key));
        ++share[static_cast<std::size_t>(client()[key].rank)];
    }
    EXPECT_EQ(share[0], 20);
    EXPECT_EQ(share[1], 20);
}

TEST_F(TokenSpeedGroupTest, AMassCancelVoidsTheLastReportAndAFullGroupStillServes) {
    Serve(2);
    std::vector<StreamKey> keys;
    for (int i = 0; i < 20; ++i) {
        keys.push_back(client().Submit(500, 3, {}, i % 2));
    }
    for (std::size_t r = 0; r < 2; ++r) {
        Batch full = Batch::Of(Given(r), {5}, "", {static_cast<std::int64_t>(r), 50, 50, 100, 100});
        Say(r, full);
    }
    ASSERT_TRUE(WaitSnapshot([](const GroupSnapshot& s) {
        return s.ranks[0].load.num_running == 50 && s.ranks[1].load.num_running == 50;
    }));
    for (const StreamKey key : keys) {
        client().Cancel(key);
    }
    EXPECT_EQ(InFlight(), 0) << "this wire acknowledges no abort: the end is local";
    for (std::size_t r = 0; r < 2; ++r) {
        EXPECT_TRUE(rank(r).WaitFor([](const FakeRank::Received& m) { return m.type == 1; }));
        (void)rank(r).TakeReceived();
    }
    std::array<std::size_t, 2> share{};
    for (int i = 0; i < 10; ++i) {
        client().Submit(4);
    }
    ASSERT_TRUE(WaitSnapshot(
        [](const GroupSnapshot& s) { return s.ranks[0].in_flight + s.ranks[1].in_flight == 10; }));
    for (std::size_t r = 0; r < 2; ++r) {
        share[r] = static_cast<std::size_t>(actor_->Snapshot()->ranks[r].in_flight);
    }
    EXPECT_EQ(share[0], 5U);
    EXPECT_EQ(share[1], 5U);
}

TEST_F(TokenSpeedGroupTest, NoPagesInAllIsNoReport) {
    Serve(1);
    Batch nothing;
    nothing.tail = {0, 50, 50, 0, 0};
    Say(0, nothing);
    const StreamKey key = client().Submit(1);
    Say(0, Batch::Of(Given(0), {7}, "length", {0, 50, 50, 0, 0}));
    ASSERT_TRUE(client().WaitEnd(key));
    EXPECT_LT(actor_->Snapshot()->ranks[0].load_age_seconds, 0.0) << "never reported";
    EXPECT_EQ(actor_->Snapshot()->ranks[0].load.num_running, 0);
}

// ---- D07 ----

TEST_F(TokenSpeedGroupTest, ABatchWithoutARankIsTheLoneRanksOnly) {
    Serve(1);
    StreamKey key = client().Submit(1);
    Say(0, Batch::Of(Given(0), {7}, "length", {}));
    ASSERT_TRUE(client().WaitEnd(key));
    EXPECT_EQ(client()[key].rank, 0);
    EXPECT_EQ(InFlight(), 0);
}

TEST_F(TokenSpeedGroupTest, ReleaseGoesByIdAndARankOutOfRangeIsCountedNotObeyed) {
    Serve(2);
    for (const std::int64_t said : {std::int64_t{1}, std::int64_t{0}}) {
        // Rank 1 answers, or claims to, what rank 0 was asked.
        const StreamKey key = client().Submit(1, 3, {}, 0);
        const std::string id = Given(0);
        Say(1, Batch::Of(id, {7}, "length", {said}));
        ASSERT_TRUE(client().WaitEnd(key));
        EXPECT_EQ(InFlight(), 0) << "its one slot, on the rank that held it";
    }
    for (const std::int64_t said : {std::int64_t{99}, std::int64_t{-1}, std::int64_t{2}}) {
        const std::int64_t errors = actor_->Snapshot()->decode_errors;
        Say(0, Batch::Of("nobody", {7}, "", {said, 40, 40, 10, 100}));
        ASSERT_TRUE(WaitSnapshot([&](const GroupSnapshot& s) { return s.decode_errors == errors + 1; }));
        const std::shared_ptr<const GroupSnapshot> snapshot = actor_->Snapshot();
        for (const RankInfo& info : snapshot->ranks) {
            EXPECT_NE(info.load.num_running, 40) << "rank " << said << " is nobody's load";
            EXPECT_EQ(info.state, RankState::kLive);
        }
    }
}

TEST_F(TokenSpeedGroupTest, ASecondEngineUnderAnIdentityWaitsUntilTheFirstIsGone) {
    Start(Options(1, transport::Dialect::kTokenSpeed));
    FakeRankProcess& first = AddProcess(RankOptions(0, transport::Dialect::kTokenSpeed));
    ASSERT_TRUE(WaitLive(1));
    const auto serves = [&] {
        const StreamKey key = client().Submit(3);
        return client().WaitEnd(key) && !client()[key].error.has_value() && client()[key].tokens.size() == 3;
    };
    ASSERT_TRUE(serves());
    AddProcess(RankOptions(0, transport::Dialect::kTokenSpeed));
    for (int i = 0; i < 10; ++i) {
        std::this_thread::sleep_for(milliseconds(50));
        ASSERT_TRUE(serves()) << "the first one is not torn down by its twin";
        EXPECT_EQ(actor_->Snapshot()->live, 1);
    }
    first.Kill();
    const auto until = SteadyNow::now() + seconds(5);
    bool ok = false;
    while (!(ok = serves()) && SteadyNow::now() < until) {
        std::this_thread::sleep_for(milliseconds(20));
    }
    EXPECT_TRUE(ok) << "then the second takes over";
}

// ---- F01 ----

TEST_F(TokenSpeedGroupTest, BatchesOfEveryAgeAreServed) {
    Serve(1);
    for (const std::size_t elements : {9U, 10U, 14U, 15U, 18U}) {
        const StreamKey key = client().Submit(1);
        std::vector<std::int64_t> tail(elements - 9, 0);
        if (elements >= 14) {
            tail[1] = static_cast<std::int64_t>(elements);  // running
            tail[4] = 100;
        }
        Say(0, Batch::Of(Given(0), {7}, "length", tail));
        ASSERT_TRUE(client().WaitEnd(key)) << elements;
        EXPECT_FALSE(client()[key].error.has_value()) << elements;
        if (elements >= 14) {
            EXPECT_TRUE(WaitSnapshot([&](const GroupSnapshot& s) {
                return s.ranks[0].load.num_running == static_cast<std::int64_t>(elements);
            }));
        }
    }
    EXPECT_EQ(actor_->Snapshot()->decode_errors, 0);
    std::string short_one;
    wire::Writer w{short_one};
    w.Array(8);
    w.Str("BatchTokenIDOutSlim");
    for (int i = 0; i < 7; ++i) {
        w.Array(0);
    }
    rank(0).SayRaw({short_one});
    EXPECT_TRUE(WaitSnapshot([](const GroupSnapshot& s) { return s.decode_errors == 1; }));
}

// ---- F04 ----

TEST_F(TokenSpeedGroupTest, RaggedColumnsCostTheBatchAndMixUpNobody) {
    Serve(1);
    std::vector<StreamKey> keys;
    std::vector<std::string> ids;
    for (int i = 0; i < 3; ++i) {
        keys.push_back(client().Submit(10));
        ids.push_back(Given(0));
    }
    Batch ragged{ids, {{11}, {12}}, {"", "", ""}, {{}, {}, {}}, {{}, {}, {}}, {0}};
    Say(0, ragged);
    ASSERT_TRUE(WaitSnapshot([](const GroupSnapshot& s) { return s.decode_errors == 1; }));
    Batch whole{ids, {{21}, {22}, {23}}, {"length", "length", "length"}, {{}, {}, {}}, {{}, {}, {}}, {0}};
    Say(0, whole);
    ASSERT_TRUE(client().WaitAll());
    for (int i = 0; i < 3; ++i) {
        EXPECT_EQ(client()[keys[static_cast<std::size_t>(i)]].tokens, (std::vector<wire::TokenId>{21 + i}));
    }
}

TEST_F(TokenSpeedGroupTest, MixedShapesOfOneBatchStayApart) {
    Serve(1);
    const StreamKey a = client().Submit(10);
    const std::string id_a = Given(0);
    const StreamKey b = client().Submit(10);
    const std::string id_b = Given(0);
    // Logprobs longer than the delta: they are lost, the tokens are not. The same rid twice: in order.
    Batch batch{{id_a, id_b, id_a},     {{1}, {2}, {3}},  {"", "", ""},
                {{-0.5, -0.5}, {}, {}}, {{1, 1}, {}, {}}, {0}};
    Say(0, batch);
    ASSERT_TRUE(WaitTokens(a, 2) && WaitTokens(b, 1));
    EXPECT_EQ(client()[a].tokens, (std::vector<wire::TokenId>{1, 3}));
    EXPECT_EQ(client()[b].tokens, (std::vector<wire::TokenId>{2}));
    // No rows, a load.
    Batch load;
    load.tail = {0, 1, 2, 3, 100};
    Say(0, load);
    EXPECT_TRUE(WaitSnapshot([](const GroupSnapshot& s) { return s.ranks[0].load.num_waiting == 2; }));
    // An end of a kind that nobody knows is an error, never a good end.
    Say(0, Batch::Of(id_a, {4}, "banana"));
    ASSERT_TRUE(client().WaitEnd(a));
    EXPECT_EQ(client()[a].finish, wire::FinishReason::kError);
    Say(0, Batch::Of(id_b, {5}, "stop"));
    ASSERT_TRUE(client().WaitEnd(b));
    EXPECT_EQ(client()[b].finish, wire::FinishReason::kStop);
    EXPECT_EQ(InFlight(), 0);
}

TEST_F(TokenSpeedGroupTest, ABatchOfFourThousandRequestsIsOneBatch) {
    Serve(1);
    constexpr std::size_t kMany = 4096;
    for (std::size_t i = 0; i < kMany; ++i) {
        client().Submit(1);
    }
    Batch batch;
    for (std::size_t i = 0; i < kMany; ++i) {
        batch.rids.push_back(Given(0));
        batch.ids.push_back({static_cast<wire::TokenId>(i)});
        batch.finished.emplace_back("length");
        batch.values.emplace_back();
        batch.scored.emplace_back();
    }
    batch.tail = {0};
    Say(0, batch);
    ASSERT_TRUE(client().WaitAll());
    std::set<wire::TokenId> seen;
    for (auto& [key, stream] : client().streams()) {
        ASSERT_EQ(stream.tokens.size(), 1U);
        seen.insert(stream.tokens[0]);
    }
    EXPECT_EQ(seen.size(), kMany) << "each has its own token";
}

// ---- errors and death ----

TEST_F(TokenSpeedGroupTest, ThreeBadOutputsInARowAreCountedAndTheRankGoesOn) {
    Serve(1);
    const StreamKey key = client().Submit(2);
    const std::string id = Given(0);
    for (int i = 0; i < 3; ++i) {
        rank(0).SayRaw({"\xc1 no msgpack"});
    }
    Say(0, Batch::Of(id, {7}, "length"));
    ASSERT_TRUE(client().WaitEnd(key));
    EXPECT_FALSE(client()[key].error.has_value());
    EXPECT_TRUE(WaitSnapshot([](const GroupSnapshot& snap) { return snap.decode_errors == 3; }));
    EXPECT_EQ(actor_->Snapshot()->ranks[0].state, RankState::kLive);
}

TEST_F(TokenSpeedGroupTest, TheSentinelInMidStreamFailsThatRankAlone) {
    Serve(2);
    const StreamKey dying = client().Submit(10, 3, {}, 0);
    const std::string id = Given(0);
    const StreamKey other = client().Submit(10, 3, {}, 1);
    const std::string id_other = Given(1);
    Say(0, Batch::Of(id, {1}, "", {0}));
    Say(1, Batch::Of(id_other, {1}, "", {1}));
    ASSERT_TRUE(WaitTokens(dying, 1) && WaitTokens(other, 1));
    rank(0).Die(true);
    ASSERT_TRUE(client().WaitEnd(dying, seconds(2)));
    EXPECT_TRUE(client()[dying].error.has_value());
    EXPECT_TRUE(WaitState(0, RankState::kDead, seconds(2)));
    Say(1, Batch::Of(id_other, {2}, "stop", {1}));
    ASSERT_TRUE(client().WaitEnd(other));
    EXPECT_FALSE(client()[other].error.has_value());
    EXPECT_EQ(client()[other].tokens.size(), 2U);
}

TEST_F(TokenSpeedGroupTest, APromptThatWasAloneWhenItsRankDiedIsNotCarriedToTheNext) {
    Serve(2);
    const StreamKey poison = client().Submit(10);
    const std::size_t holder = rank(0).NextAdd(milliseconds(500)).empty() ? 1 : 0;
    rank(holder).Die(false);
    ASSERT_TRUE(client().WaitEnd(poison, seconds(3)));
    ASSERT_TRUE(client()[poison].error.has_value());
    EXPECT_FALSE(client()[poison].error->retryable);
    EXPECT_TRUE(rank(1 - holder).NextAdd(milliseconds(300)).empty()) << "the other rank never saw it";
    EXPECT_EQ(actor_->Snapshot()->live, 1);
    EXPECT_EQ(actor_->Snapshot()->retries, 0);
}

TEST_F(TokenSpeedGroupTest, WhatWasNotAloneMovesOnceUnderAnIdThatWasNeverUsed) {
    Serve(3);
    // Two on rank 0, nothing shown yet: both may move, once.
    const StreamKey a = client().Submit(10, 3, {}, 0);
    const StreamKey b = client().Submit(10);
    const StreamKey c = client().Submit(10);
    const StreamKey d = client().Submit(10);
    std::set<std::string> first;
    std::array<std::size_t, 3> had{};
    for (std::size_t r = 0; r < 3; ++r) {
        for (std::string id; !(id = rank(r).NextAdd(milliseconds(300))).empty();) {
            first.insert(id);
            ++had[r];
        }
    }
    ASSERT_EQ(first.size(), 4U);
    const std::size_t victim =
        static_cast<std::size_t>(std::max_element(had.begin(), had.end()) - had.begin());
    ASSERT_EQ(had[victim], 2U);
    rank(victim).Die(false);
    // The pinned one fails where it was on the victim; the other one moves.
    std::size_t moved = 0;
    for (std::size_t r = 0; r < 3; ++r) {
        for (std::string id; r != victim && !(id = rank(r).NextAdd(milliseconds(700))).empty();) {
            ++moved;
            EXPECT_TRUE(first.insert(id).second) << id << " was used before";
        }
    }
    EXPECT_GE(moved, 1U);
    EXPECT_EQ(static_cast<std::size_t>(actor_->Snapshot()->retries), moved);
    for (const StreamKey key : {a, b, c, d}) {
        client().Cancel(key);
    }
    EXPECT_EQ(InFlight(), 0);
}

TEST_F(TokenSpeedGroupTest, EveryRequestOnTheWireHasAFiniteBudgetAndAnIdOfItsOwn) {
    Serve(1);
    std::set<std::string> ids;
    for (const std::int64_t budget : {std::int64_t{1}, std::int64_t{16}, std::int64_t{32000}}) {
        for (int again = 0; again < 2; ++again) {
            client().Submit(budget, 3, "same");  // one id of the client's for all of them
            FakeRank::Received add;
            ASSERT_TRUE(rank(0).WaitFor([](const FakeRank::Received& m) { return m.type == 0; }, &add));
            wire::tokenspeed::DecodedRequest decoded;
            wire::tokenspeed::DecodeRequest(add.payload, decoded);
            ASSERT_TRUE(decoded.status.ok()) << decoded.status.error().message;
            ASSERT_TRUE(decoded.request.sampling.max_new_tokens.has_value());
            EXPECT_EQ(*decoded.request.sampling.max_new_tokens, budget);
            EXPECT_TRUE(ids.insert(add.id).second) << add.id;
            Say(0, Batch::Of(add.id, {7}, "length"));
            ASSERT_TRUE(client().WaitAll());
        }
    }
}

TEST_F(TokenSpeedGroupTest, AnAbortEndsTheRequestHereWhateverTheEngineStillSays) {
    Serve(1);
    const StreamKey key = client().Submit(500);
    const std::string id = Given(0);
    Say(0, Batch::Of(id, {1}, ""));
    ASSERT_TRUE(WaitTokens(key, 1));
    client().Cancel(key);
    FakeRank::Received abort;
    ASSERT_TRUE(rank(0).WaitFor([](const FakeRank::Received& m) { return m.type == 1; }, &abort));
    EXPECT_NE(abort.payload.find(id), std::string::npos);
    EXPECT_EQ(InFlight(), 0);
    // A late row, as from a request that was aborted while its grammar compiled.
    Say(0, Batch::Of(id, {}, "abort"));
    const StreamKey next = client().Submit(1);
    Say(0, Batch::Of(Given(0), {7}, "length"));
    ASSERT_TRUE(client().WaitEnd(next));
    EXPECT_EQ(client()[key].tokens.size(), 1U);
    EXPECT_TRUE(WaitSnapshot([](const GroupSnapshot& snap) { return snap.late_outputs >= 1; }));
    EXPECT_EQ(rank(0).CountReceived(1), 1U) << "and is not aborted twice";
}

}  // namespace
}  // namespace rankgate::group
