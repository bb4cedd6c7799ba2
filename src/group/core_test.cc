// SPDX-License-Identifier: Apache-2.0
// Behaviour of GroupCore, event by event: admission, rank choice, release, loss of ranks by kind, liveness,
// waves, drain.
#include "group/core.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>

namespace rankgate::group {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

struct Sent {
    std::int32_t rank;
    std::string id;
    AttemptId attempt;
    StreamKey stream;
    std::optional<std::int64_t> seed;
};
struct Ended {
    StreamKey stream;
    ErrorCode code;
    bool retryable;
    std::string message;
};

/// A core, its clock and everything it asked for, sorted by kind.
template <class P>
class Driver {
  public:
    explicit Driver(std::int32_t size, CoreConfig config = {}, bool lockstep = false)
        : core{With(config, size)} {
        now += seconds{1000};
        for (std::int32_t r = 0; r < size; ++r) {
            Up(r, lockstep ? size : 1);
        }
        Drain();
        Forget();
    }

    void Up(std::int32_t rank, std::int64_t dp = 1) {
        RankFacts facts;
        facts.data_parallel_size = dp;
        facts.max_model_len = 1000 + rank;
        ASSERT_TRUE(core.RankRegistered(rank, facts, now).ok());
        core.RankUp(rank, now);
    }

    StreamKey Submit(std::size_t prompt = 8, std::optional<std::int32_t> pin = {}, std::string id = {}) {
        auto request = std::make_unique<wire::GenerateRequest>();
        const StreamKey stream = next_stream++;
        request->id = id.empty() ? "req-" + std::to_string(stream) : id;
        request->prompt_token_ids.assign(prompt, 7);
        request->sampling.seed = static_cast<std::int64_t>(stream) * 11;
        request->data_parallel_rank = pin;
        core.Submit(0, stream, std::move(request), now);
        Drain();
        return stream;
    }

    /// The last attempt of a stream.
    const Sent& Of(StreamKey stream) const {
        const auto it =
            std::find_if(sent.rbegin(), sent.rend(), [&](const Sent& s) { return s.stream == stream; });
        EXPECT_TRUE(it != sent.rend());
        return *it;
    }

    void Output(std::int32_t rank, std::string_view id, wire::FinishReason finish = wire::FinishReason::kNone,
                const wire::LoadSnapshot* load = nullptr) {
        StepOutput row;
        row.request_id = id;
        row.num_tokens = 1;
        row.finish_reason = finish;
        EngineStep step;
        step.rank = rank;
        step.outputs = std::span{&row, 1};
        step.load = load;
        core.OnStep(step, now);
        Drain();
    }
    void Token(StreamKey stream) { Output(Of(stream).rank, std::string{Of(stream).id}); }
    void Finish(StreamKey stream, const wire::LoadSnapshot* load = nullptr) {
        Output(Of(stream).rank, std::string{Of(stream).id}, wire::FinishReason::kStop, load);
    }
    void Report(std::int32_t rank, std::int64_t running, std::int64_t waiting, double kv = -1) {
        wire::LoadSnapshot load;
        load.num_running = running;
        load.num_waiting = waiting;
        load.kv_usage = kv;
        EngineStep step;
        step.rank = rank;
        step.load = &load;
        core.OnStep(step, now);
        Drain();
    }
    void Pong(std::int32_t rank) {
        const std::int64_t id = static_cast<std::int64_t>(pings.at(rank));
        pings.erase(rank);
        EngineStep step;
        step.rank = rank;
        step.utility_call_ids = std::span{&id, 1};
        core.OnStep(step, now);
        Drain();
    }
    void WaveComplete(std::int32_t rank, std::int64_t wave) {
        EngineStep step;
        step.rank = rank;
        step.wave_complete = wave;
        core.OnStep(step, now);
        Drain();
    }
    /// Ticks for `span`; ranks outside `silent` answer their pings at once.
    void Pass(Duration span, const std::set<std::int32_t>& silent = {}) {
        for (Duration done{0}; done < span; done += milliseconds{100}) {
            now += milliseconds{100};
            core.Tick(now);
            Drain();
            const auto asked = pings;
            for (const auto& [rank, id] : asked) {
                if (!silent.contains(rank)) {
                    Pong(rank);
                }
            }
        }
    }

    void Drain() {
        core.Flush();
        for (Action a; core.PopAction(a);) {
            switch (a.kind) {
                case ActionKind::kSendAdd: {
                    // "req-17-<epoch><attempt>": the stream is in the external id the tests chose, or the
                    // newest one.
                    const std::string id = a.request->id;
                    StreamKey stream = next_stream - 1;
                    if (id.starts_with("req-")) {
                        stream = std::stoull(id.substr(4));
                    }
                    sent.push_back({a.rank, id, a.number, stream, a.request->sampling.seed});
                    if (refuse_send.contains(a.rank)) {
                        core.SendFailed(a.number, "no route", now);
                    } else if (refuse_encode) {
                        core.EncodeFailed(a.number, Error{ErrorCode::kInvalidArgument, "no", "", false}, now);
                    }
                    break;
                }
                case ActionKind::kDeliver:
                    delivered.push_back(a);
                    break;
                case ActionKind::kFail:
                    failed.push_back({a.stream, a.error->code, a.error->retryable, a.error->message});
                    break;
                case ActionKind::kSendAbort:
                    for (const std::string_view id : core.AbortIds(a)) {
                        aborted.emplace_back(a.rank, id);
                    }
                    ++abort_frames;
                    break;
                case ActionKind::kSendWave:
                    wakes.emplace_back(a.rank, a.number);
                    if constexpr (HasWaves<P>) {
                        if (refuse_wake.contains(a.rank)) {
                            core.WakeFailed(a.rank, now);
                        }
                    }
                    break;
                case ActionKind::kPing:
                    pings[a.rank] = a.number;
                    break;
                case ActionKind::kDeclareLost:
                    declared.emplace_back(a.rank, a.loss);
                    break;
                case ActionKind::kRankRecovered:
                    ++recovered;
                    break;
                case ActionKind::kRankChanged:
                    break;
                case ActionKind::kDrained:
                    ++drained;
                    break;
            }
        }
        EXPECT_EQ(core.Audit(), "");
    }
    void Forget() {
        sent.clear();
        delivered.clear();
        failed.clear();
        aborted.clear();
        wakes.clear();
        declared.clear();
        abort_frames = 0;
    }

    static CoreConfig With(CoreConfig config, std::int32_t size) {
        config.size = size;
        config.id_epoch = 0xabcd1234;
        return config;
    }

    GroupCore<P> core;
    TimePoint now{};
    StreamKey next_stream{1};
    std::vector<Sent> sent;
    std::vector<Action> delivered;
    std::vector<Ended> failed;
    std::vector<std::pair<std::int32_t, std::string>> aborted;
    std::vector<std::pair<std::int32_t, std::uint64_t>> wakes;
    std::vector<std::pair<std::int32_t, LossKind>> declared;
    std::map<std::int32_t, std::uint64_t> pings;
    std::set<std::int32_t> refuse_send;
    std::set<std::int32_t> refuse_wake;
    bool refuse_encode{false};
    int abort_frames{0};
    int recovered{0};
    int drained{0};
};

using Vllm = Driver<VllmProtocol>;
using TokenSpeed = Driver<TokenSpeedProtocol>;

// The absence of waves and calls on the TokenSpeed wire is a property of its type.
template <class C>
concept CanFailAWake = requires(C core, TimePoint now) { core.WakeFailed(0, now); };
template <class C>
concept CanCall = requires(C core) { core.NextCallId(); };
static_assert(CanFailAWake<GroupCore<VllmProtocol>> && CanCall<GroupCore<VllmProtocol>>);
static_assert(!CanFailAWake<GroupCore<TokenSpeedProtocol>> && !CanCall<GroupCore<TokenSpeedProtocol>>);
static_assert(std::is_empty_v<TokenSpeedProtocol::Waves>);

std::vector<int> Counts(const Vllm& d, int size) {
    std::vector<int> counts(static_cast<std::size_t>(size));
    for (const Sent& s : d.sent) {
        ++counts[static_cast<std::size_t>(s.rank)];
    }
    return counts;
}

// ---- rank choice -----------------------------------------------------------------------------------------

TEST(RankChoice, ColdBurstOfTwoOnTwoRanksLandsOneEach) {
    Vllm d{2};
    d.Submit();
    d.Submit();
    EXPECT_NE(d.sent[0].rank, d.sent[1].rank);
}

TEST(RankChoice, SixtyFourAtOnceOverFourSilentRanksAreSpreadEvenly) {
    Vllm d{4};
    for (int i = 0; i < 64; ++i) {
        d.Submit();
    }
    EXPECT_EQ(Counts(d, 4), (std::vector<int>{16, 16, 16, 16}));
}

TEST(RankChoice, SerialRequestsRotate) {
    Vllm d{4};
    for (int i = 0; i < 40; ++i) {
        d.Finish(d.Submit());
    }
    EXPECT_EQ(Counts(d, 4), (std::vector<int>{10, 10, 10, 10}));
}

TEST(RankChoice, ARankThatNeverReportsIsNeitherStarvedNorFlooded) {
    Vllm d{4};
    for (int i = 0; i < 400; ++i) {
        d.Submit();
        for (std::int32_t r = 0; r < 3; ++r) {
            d.Report(r, static_cast<std::int64_t>(d.core.in_flight(r)), 0, 0.1);
        }
    }
    EXPECT_EQ(Counts(d, 4), (std::vector<int>{100, 100, 100, 100}));
}

TEST(RankChoice, ScoreIsTheFormula) {
    Vllm d{2};
    d.Token(d.Submit(8, 0));          // its prompt is through: only the formula is left
    EXPECT_EQ(d.core.Score(0), 1.0);  // never reported: own in-flight alone
    d.Report(0, 3, 4, 0.75);
    EXPECT_DOUBLE_EQ(d.core.Score(0), 7.0 + 4 * 6 * 0.25);
    d.Report(0, 3, 4, 0.5);
    EXPECT_DOUBLE_EQ(d.core.Score(0), 7.0);
    d.Report(0, 3, 4, 0.2);
    EXPECT_DOUBLE_EQ(d.core.Score(0), 7.0);  // low usage never lowers it
    d.Report(0, 0, 0, 1.0);
    EXPECT_DOUBLE_EQ(d.core.Score(0), 1.0);  // a report never pushes below own in-flight
    d.Report(0, 3, 4, 7.5);
    EXPECT_DOUBLE_EQ(d.core.Score(0), 7.0 + 4 * 6 * 0.5);  // usage is a ratio
    d.Report(0, -5, -7, std::nan(""));
    EXPECT_DOUBLE_EQ(d.core.Score(0), 1.0);
}

TEST(RankChoice, ZeroTotalPagesMeanUnknownNotEmptyAndNotFull) {
    TokenSpeed d{1};
    d.Token(d.Submit());
    wire::LoadSnapshot load;
    load.num_running = 2;
    load.num_waiting = 2;
    load.kv_active_pages = 90;
    load.kv_total_pages = 0;
    EngineStep step;
    step.load = &load;
    d.core.OnStep(step, d.now);
    EXPECT_DOUBLE_EQ(d.core.Score(0), 4.0);
    load.kv_total_pages = 100;
    d.core.OnStep(step, d.now);
    EXPECT_DOUBLE_EQ(d.core.Score(0), 4.0 + 2 * 6 * 0.4);
}

TEST(RankChoice, AnIdleRankWhoseLastWordWasBusyGetsItsShareAtOnce) {
    Vllm d{2};
    const StreamKey last = d.Submit(8, 1);
    wire::LoadSnapshot busy;
    busy.num_running = 50;
    busy.num_waiting = 50;
    d.Finish(last, &busy);  // sampled before the finish, never corrected
    d.Forget();
    for (int i = 0; i < 40; ++i) {
        d.Finish(d.Submit());
    }
    EXPECT_EQ(Counts(d, 2), (std::vector<int>{20, 20}));
}

TEST(RankChoice, MassCancelAlsoVoidsTheLastReport) {
    Vllm d{2};
    std::vector<StreamKey> streams;
    for (int i = 0; i < 20; ++i) {
        streams.push_back(d.Submit(8, 1));
    }
    d.Report(1, 10, 10, 0.9);
    for (const StreamKey stream : streams) {
        d.core.Cancel(0, stream, CancelCause::kClientGone, d.now);
    }
    d.Drain();
    EXPECT_EQ(d.abort_frames, 1) << "cancels of one turn travel in one frame";
    EXPECT_EQ(d.aborted.size(), 20u);
    d.Forget();
    d.Submit();
    d.Submit();
    EXPECT_EQ(Counts(d, 2), (std::vector<int>{1, 1}));
}

TEST(RankChoice, AGroupWhoseEveryLastWordWasFullStillServes) {
    Vllm d{2};
    for (std::int32_t r = 0; r < 2; ++r) {
        wire::LoadSnapshot full;
        full.num_running = 100;
        full.num_waiting = 100;
        full.kv_usage = 1.0;
        d.Finish(d.Submit(8, r), &full);
    }
    d.Forget();
    for (int i = 0; i < 4; ++i) {
        d.Submit();
    }
    EXPECT_EQ(d.failed.size(), 0u);
    EXPECT_EQ(Counts(d, 2), (std::vector<int>{2, 2}));
}

TEST(RankChoice, PromptBeforeTheNewcomerCountsInEngineSteps) {
    Vllm d{2};
    const StreamKey heavy = d.Submit(50'000);
    const std::int32_t rank = d.Of(heavy).rank;
    EXPECT_DOUBLE_EQ(d.core.Score(rank), 1.0 + 50'000 / 8192.0);
    for (int i = 0; i < 4; ++i) {
        EXPECT_NE(d.Of(d.Submit()).rank, rank);
    }
    d.Token(heavy);
    EXPECT_EQ(d.core.Score(rank), 1.0);
}

TEST(RankChoice, AFresherMailboxBeatsAnOlderReportAndTheOtherWayRound) {
    Vllm d{1};
    d.Token(d.Submit());
    d.Report(0, 9, 0);
    wire::LoadSnapshot page;
    page.num_running = 4;
    d.core.MailboxLoad(0, page, d.now - seconds{1});
    EXPECT_EQ(d.core.Score(0), 9.0);
    d.core.MailboxLoad(0, page, d.now);
    EXPECT_EQ(d.core.Score(0), 4.0);
    EXPECT_EQ(d.core.MakeSnapshot(d.now).ranks[0].load_source, "mailbox");
    d.Report(0, 6, 0);
    EXPECT_EQ(d.core.Score(0), 6.0);
    const GroupSnapshot snapshot = d.core.MakeSnapshot(d.now + seconds{3});
    EXPECT_EQ(snapshot.ranks[0].load_source, "report");
    EXPECT_DOUBLE_EQ(snapshot.ranks[0].load_age_seconds, 3.0);
    d.core.MailboxLoad(0, page, d.now - milliseconds{2});
    EXPECT_EQ(d.core.Score(0), 4.0) << "the report needed as long to get here";
}

TEST(RankChoice, AMailboxThatNobodyWritesAnyMoreDoesNotCount) {
    Vllm d{1};
    d.Token(d.Submit());
    wire::LoadSnapshot page;
    page.num_running = 50;
    d.core.MailboxLoad(0, page, d.now);
    EXPECT_EQ(d.core.Score(0), 50.0);
    d.core.MailboxGone(0);
    EXPECT_EQ(d.core.Score(0), 1.0);
    EXPECT_EQ(d.core.MakeSnapshot(d.now).ranks[0].load_source, "own");
    d.Report(0, 9, 0);
    d.core.MailboxGone(0);
    EXPECT_EQ(d.core.Score(0), 9.0) << "a report is not touched by it";
    d.core.MailboxGone(1);
}

TEST(RankChoice, TheLastWordOfARankThatGoesIdleIsNotLostBehindAFreshPage) {
    Vllm d{1};
    const StreamKey a = d.Submit();
    wire::LoadSnapshot page;
    page.num_running = 30;
    d.core.MailboxLoad(0, page, d.now);
    d.Finish(a);
    d.now += milliseconds{1};
    d.Report(0, 0, 0, 0.0);
    EXPECT_EQ(d.core.MakeSnapshot(d.now).ranks[0].load.num_running, 0);
}

TEST(RankChoice, PinnedGoesThereOrIsRefused) {
    Vllm d{2};
    for (int i = 0; i < 3; ++i) {
        EXPECT_EQ(d.Of(d.Submit(8, 1)).rank, 1);
    }
    for (const std::int32_t bad : {-1, 2, 1000}) {
        d.Submit(8, bad);
        EXPECT_EQ(d.failed.back().code, ErrorCode::kInvalidArgument);
    }
    d.core.RankLost(1, LossKind::kDead, "gone", d.now);
    d.Drain();
    d.Submit(8, 1);
    EXPECT_EQ(d.failed.back().code, ErrorCode::kUnavailable);
    EXPECT_TRUE(d.failed.back().retryable);
}

// ---- admission and release -------------------------------------------------------------------------------

TEST(Admission, ADuplicateIdIsRefusedAndTheFirstLivesOn) {
    Vllm d{1};
    const StreamKey first = d.Submit(8, {}, "same");
    const std::string id = d.sent.back().id;
    d.Submit(8, {}, "same");
    ASSERT_EQ(d.failed.size(), 1u);
    EXPECT_EQ(d.failed[0].code, ErrorCode::kConflict);
    EXPECT_EQ(d.core.live_requests(), 1u);
    d.Output(0, id, wire::FinishReason::kStop);
    EXPECT_EQ(d.delivered.back().stream, first);
    d.Submit(8, {}, "same");
    EXPECT_EQ(d.failed.size(), 1u) << "free again once the first has ended";
    EXPECT_NE(d.sent.back().id, id) << "but never the same id on the wire";
}

TEST(Admission, IdsOfAnyLengthAndContentStayApart) {
    Vllm d{1};
    const std::string longest(100'000, 'x');
    d.Submit(8, {}, longest + "a");
    d.Submit(8, {}, longest + "b");
    d.Submit(8, {}, std::string("\r\n\0\xff", 4));
    EXPECT_EQ(d.failed.size(), 0u);
    std::set<std::string> ids;
    for (const Sent& s : d.sent) {
        EXPECT_LE(s.id.size(), 95u);
        ids.insert(s.id);
    }
    EXPECT_EQ(ids.size(), 3u);
    d.Output(0, d.sent[1].id);
    EXPECT_EQ(d.delivered.back().stream, 2u);
}

TEST(Admission, WithoutALiveRankTheAnswerIs503AndMayBeRetried) {
    Vllm d{2};
    d.core.RankLost(0, LossKind::kDead, "x", d.now);
    d.core.RankLost(1, LossKind::kDead, "x", d.now);
    d.Submit();
    ASSERT_EQ(d.failed.size(), 1u);
    EXPECT_EQ(HttpStatus(d.failed[0].code), 503);
    EXPECT_TRUE(d.failed[0].retryable);
}

TEST(Admission, TheTableIsBounded) {
    CoreConfig config;
    config.max_requests = 3;
    Vllm d{1, config};
    for (int i = 0; i < 4; ++i) {
        d.Submit();
    }
    ASSERT_EQ(d.failed.size(), 1u);
    EXPECT_EQ(d.failed[0].code, ErrorCode::kOverloaded);
    EXPECT_EQ(d.core.live_requests(), 3u);
}

TEST(Admission, EncodeFailureGivesTheSlotBack) {
    Vllm d{2};
    d.refuse_encode = true;
    d.Submit();
    ASSERT_EQ(d.failed.size(), 1u);
    EXPECT_EQ(d.core.live_requests(), 0u);
    EXPECT_EQ(d.aborted.size(), 0u) << "the engine never saw it";
}

TEST(Admission, ARankThatRefusesFramesIsNoBlackHole) {
    Vllm d{2};
    d.refuse_send = {0};
    for (int i = 0; i < 12; ++i) {
        d.Finish(d.Submit());
    }
    EXPECT_EQ(d.failed.size(), 0u);
    EXPECT_EQ(d.delivered.size(), 12u);
    EXPECT_LE(Counts(d, 2)[0], 1) << "one refusal is enough to stop choosing it";
    d.now += milliseconds{300};
    d.refuse_send.clear();
    d.Forget();
    d.Submit();
    d.Submit();
    EXPECT_EQ(Counts(d, 2), (std::vector<int>{1, 1})) << "and it comes back";
}

TEST(Admission, WithoutAnotherRankARefusedFrameFailsTheRequest) {
    Vllm d{1};
    d.refuse_send = {0};
    d.Submit();
    ASSERT_EQ(d.failed.size(), 1u);
    EXPECT_EQ(d.failed[0].code, ErrorCode::kSendFailed);
    EXPECT_EQ(d.core.live_requests(), 0u);
}

TEST(Release, CancelBeforeTheAddWasSentSendsNeither) {
    Vllm d{1};
    auto request = std::make_unique<wire::GenerateRequest>();
    request->id = "a";
    request->prompt_token_ids = {1};
    d.core.Submit(0, 99, std::move(request), d.now);
    d.core.Cancel(0, 99, CancelCause::kClientGone, d.now);
    d.Drain();
    EXPECT_TRUE(d.sent.empty());
    EXPECT_TRUE(d.aborted.empty());
    EXPECT_EQ(d.core.live_requests(), 0u);
}

TEST(Release, WhateverNamesTheRequestFirstFreesItOnce) {
    Vllm d{1};
    const StreamKey a = d.Submit();
    const StreamKey b = d.Submit();
    const std::string id = d.Of(a).id;
    const std::string_view ids[] = {id, id, "unknown", ""};
    StepOutput rows[2];
    rows[0].request_id = id;
    rows[0].finish_reason = wire::FinishReason::kLength;
    rows[1] = rows[0];  // a terminal twice
    EngineStep step;
    step.outputs = rows;
    step.finished_ids = ids;
    d.core.OnStep(step, d.now);
    d.core.Cancel(0, a, CancelCause::kClientGone, d.now);
    d.core.Cancel(0, a, CancelCause::kStopString, d.now);
    d.Drain();
    EXPECT_EQ(d.delivered.size(), 1u);
    EXPECT_EQ(d.failed.size(), 0u);
    EXPECT_EQ(d.aborted.size(), 0u) << "a normal end sends no ABORT";
    EXPECT_EQ(d.core.in_flight(0), 1u);
    EXPECT_EQ(d.core.counters().late_outputs, 1u);
    d.Finish(b);
    EXPECT_EQ(d.core.live_requests(), 0u);
}

TEST(Release, AFinishedListWithoutAResultEndsTheStreamWithAnError) {
    Vllm d{1};
    const StreamKey a = d.Submit();
    const std::string_view ids[] = {d.Of(a).id};
    EngineStep step;
    step.finished_ids = ids;
    d.core.OnStep(step, d.now);
    d.Drain();
    ASSERT_EQ(d.failed.size(), 1u);
    EXPECT_EQ(d.failed[0].stream, a);
    EXPECT_EQ(d.core.live_requests(), 0u);
}

TEST(Release, LateRowsAreDroppedAndCountedAndDoNotDisturbTheBatch) {
    Vllm d{1};
    const StreamKey a = d.Submit();
    const StreamKey b = d.Submit();
    const std::string dead = d.Of(a).id;
    d.core.Cancel(0, a, CancelCause::kClientGone, d.now);
    d.Drain();
    std::vector<StepOutput> rows(10'001);
    for (StepOutput& row : rows) {
        row.request_id = dead;
        row.num_tokens = 1;
    }
    rows[5000].request_id = d.Of(b).id;
    EngineStep step;
    step.outputs = rows;
    d.core.OnStep(step, d.now);
    d.Drain();
    ASSERT_EQ(d.delivered.size(), 1u);
    EXPECT_EQ(d.delivered[0].index, 5000u);
    EXPECT_EQ(d.core.counters().late_outputs, 10'000u);
    EXPECT_EQ(d.aborted.size(), 1u) << "the one of the cancel; ours are not aborted again";
}

TEST(Release, RequestsOfAnEarlierGatewayAreAbortedOnce) {
    Vllm d{1};
    const std::string orphan = "chatcmpl-1-0000000100000000010000ff";
    for (int i = 0; i < 5; ++i) {
        d.Output(0, orphan);
    }
    ASSERT_EQ(d.aborted.size(), 1u);
    EXPECT_EQ(d.aborted[0].second, orphan);
    EXPECT_EQ(d.delivered.size(), 0u);
}

TEST(Release, ForgedIdsMatchNothing) {
    Vllm d{1};
    const StreamKey a = d.Submit();
    const std::string id = d.Of(a).id;
    std::string other_epoch = id;
    other_epoch[id.size() - 20] ^= 1;
    for (const std::string& forged : {std::string{}, id.substr(1), "x" + id, other_epoch,
                                      std::string(25, 'f'), id.substr(0, id.size() - 6) + "ffffff",
                                      id.substr(0, id.size() - 6) + "00000G", id.substr(0, id.size() - 1)}) {
        d.Output(0, forged, wire::FinishReason::kStop);
    }
    EXPECT_EQ(d.delivered.size(), 0u);
    EXPECT_EQ(d.core.live_requests(), 1u);
}

TEST(Attribution, ReleaseGoesByIdWhateverRankTheMessageNames) {
    TokenSpeed d{2};
    const StreamKey a = d.Submit(8, 0);
    d.Output(1, std::string{d.Of(a).id}, wire::FinishReason::kStop);
    EXPECT_EQ(d.core.in_flight(0), 0u);
    EXPECT_EQ(d.core.in_flight(1), 0u);
    EXPECT_EQ(d.core.counters().foreign_rank, 1u);
    EXPECT_EQ(d.delivered.size(), 1u);
    EXPECT_EQ(d.delivered[0].rank, 0);
}

TEST(Attribution, AMessageFromARankOutsideTheGroupIsRefusedAndCounted) {
    TokenSpeed d{2};
    const StreamKey a = d.Submit();
    for (const std::int32_t rank : {2, 99, -1, -32768}) {
        d.Output(rank, std::string{d.Of(a).id}, wire::FinishReason::kStop);
    }
    EXPECT_EQ(d.delivered.size(), 0u);
    EXPECT_EQ(d.core.counters().bad_rank_steps, 4u);
    EXPECT_EQ(d.core.live_requests(), 1u);
}

// ---- rank loss -------------------------------------------------------------------------------------------

TEST(RankLoss, OfADenseGroupFailsOnlyItsOwnAndRetriesWhatShowedNothing) {
    Vllm d{2};
    std::vector<StreamKey> streams;
    for (int i = 0; i < 64; ++i) {
        streams.push_back(d.Submit());
    }
    for (std::size_t i = 0; i < streams.size(); i += 2) {
        d.Token(streams[i]);
        d.Token(streams[i]);
    }
    std::set<StreamKey> must_fail;
    std::set<StreamKey> must_move;
    for (std::size_t i = 0; i < streams.size(); ++i) {
        if (d.Of(streams[i]).rank == 1) {
            (i % 2 == 0 ? must_fail : must_move).insert(streams[i]);
        }
    }
    std::map<StreamKey, Sent> before;
    for (const StreamKey s : must_move) {
        before.emplace(s, d.Of(s));
    }
    d.Forget();
    d.core.RankLost(1, LossKind::kDead, "killed", d.now);
    d.Drain();
    EXPECT_EQ(d.failed.size(), must_fail.size());
    for (const Ended& e : d.failed) {
        EXPECT_TRUE(must_fail.contains(e.stream));
        EXPECT_EQ(e.code, ErrorCode::kRankLost);
        EXPECT_FALSE(e.retryable);
    }
    EXPECT_EQ(d.sent.size(), must_move.size());
    for (const Sent& s : d.sent) {
        EXPECT_EQ(s.rank, 0);
        EXPECT_EQ(s.seed, before.at(s.stream).seed);
        EXPECT_NE(s.id, before.at(s.stream).id);
    }
    EXPECT_EQ(d.core.in_flight(0), 32 + must_move.size());
    EXPECT_EQ(d.core.in_flight(1), 0u);
    // Zero failures from here on.
    d.Forget();
    for (int i = 0; i < 12; ++i) {
        d.Finish(d.Submit());
    }
    EXPECT_EQ(d.failed.size(), 0u);
}

TEST(RankLoss, ARequestIsRetriedOnceAtMost) {
    Vllm d{3};
    const StreamKey a = d.Submit(8);
    const StreamKey other = d.Submit(8, d.Of(a).rank);  // company, so that the poison rule stays out
    d.core.RankLost(d.Of(a).rank, LossKind::kDead, "first", d.now);
    d.Drain();
    ASSERT_EQ(d.failed.size(), 1u) << "the pinned one cannot move";
    EXPECT_EQ(d.failed[0].stream, other);
    d.Submit(8, d.Of(a).rank);
    d.core.RankLost(d.Of(a).rank, LossKind::kDead, "second", d.now);
    d.Drain();
    EXPECT_TRUE(std::any_of(d.failed.begin(), d.failed.end(),
                            [&](const Ended& e) { return e.stream == a && !e.retryable; }));
    EXPECT_EQ(d.core.counters().retries, 1u);
}

TEST(RankLoss, WhatWasAloneOnTheDeadRankIsNotCarriedToTheNext) {
    for (const LossKind kind : {LossKind::kDead, LossKind::kDeaf, LossKind::kMute, LossKind::kWedged}) {
        Vllm d{2};
        const StreamKey poison = d.Submit();
        d.core.RankLost(d.Of(poison).rank, kind, "it died of it", d.now);
        d.Drain();
        ASSERT_EQ(d.failed.size(), 1u);
        EXPECT_FALSE(d.failed[0].retryable) << "nor may anybody above";
        EXPECT_EQ(d.sent.size(), 1u);
    }
}

TEST(RankLoss, InTwoHalvesIsOneDeathAndWhoIsLeftForTheSecondWasNotAlone) {
    Vllm d{2};
    const StreamKey decoded = d.Submit(8);
    const std::int32_t rank = d.Of(decoded).rank;
    d.Pass(milliseconds{700});  // asked, and answered: it has arrived
    std::vector<StreamKey> unread;
    for (int i = 0; i < 4; ++i) {
        const StreamKey stream = d.Submit(8);
        if (d.Of(stream).rank == rank) {
            unread.push_back(stream);
        }
    }
    ASSERT_FALSE(unread.empty());
    d.Forget();
    d.core.RankLost(rank, LossKind::kDeaf, "its input connection closed", d.now);
    d.Drain();
    ASSERT_EQ(d.sent.size(), unread.size());
    ASSERT_EQ(d.core.in_flight(rank), 1u);
    d.core.RankLost(rank, LossKind::kDead, "and then the other one", d.now + milliseconds{300});
    d.Drain();
    EXPECT_EQ(d.failed.size(), 0u);
    EXPECT_EQ(d.Of(decoded).rank, 1 - rank);
}

TEST(RankLoss, OfWhatWasAloneOnADeafRankForLongIsItsOwnFault) {
    Vllm d{2};
    const StreamKey decoded = d.Submit(8);
    const std::int32_t rank = d.Of(decoded).rank;
    d.Pass(milliseconds{700});
    while (d.Of(d.Submit(8)).rank != rank) {
    }
    d.core.RankLost(rank, LossKind::kDeaf, "its input connection closed", d.now);
    d.Drain();
    d.Forget();
    d.core.RankLost(rank, LossKind::kDead, "much later", d.now + std::chrono::seconds{10});
    d.Drain();
    ASSERT_EQ(d.failed.size(), 1u);
    EXPECT_EQ(d.failed[0].stream, decoded);
    EXPECT_FALSE(d.failed[0].retryable);
}

TEST(RankLoss, WithItsLauncherIsNobodysFault) {
    Vllm d{2};
    const StreamKey a = d.Submit();
    d.core.RankLost(d.Of(a).rank, LossKind::kLauncher, "launcher ended", d.now);
    d.Drain();
    EXPECT_EQ(d.failed.size(), 0u);
    EXPECT_EQ(d.sent.size(), 2u);
}

TEST(RankLoss, ADeafRankFinishesWhatItHasDecodedAndGetsNothingNew) {
    Vllm d{2};
    const StreamKey running = d.Submit(8, 1);
    d.Token(running);
    const StreamKey decoded = d.Submit(8, 1);  // a ping sent after it is answered: it has arrived
    d.Pass(milliseconds{700});
    d.Submit(8, 0);
    d.Submit(8, 0);
    const StreamKey unread = d.Submit(8);
    const StreamKey unread2 = d.Submit(8);
    const StreamKey on1 = d.Of(unread).rank == 1 ? unread : unread2;
    ASSERT_EQ(d.Of(on1).rank, 1);
    d.Forget();
    d.core.RankLost(1, LossKind::kDeaf, "input closed", d.now);
    d.Drain();
    EXPECT_EQ(d.failed.size(), 0u);
    ASSERT_EQ(d.sent.size(), 1u) << "only what it never read moves";
    EXPECT_EQ(d.sent[0].stream, on1);
    EXPECT_EQ(d.core.rank_state(1), RankState::kDeaf);
    for (int i = 0; i < 4; ++i) {
        EXPECT_EQ(d.Of(d.Submit()).rank, 0);
    }
    EXPECT_EQ(d.core.in_flight(1), 2u);
    (void)decoded;
}

TEST(RankLoss, DeafAndThenMuteOrDeadLosesTheRest) {
    for (const LossKind second : {LossKind::kMute, LossKind::kDead, LossKind::kWedged}) {
        Vllm d{2};
        const StreamKey a = d.Submit(8, 1);
        d.Token(a);
        d.core.RankLost(1, LossKind::kDeaf, "input closed", d.now);
        d.Drain();
        EXPECT_EQ(d.failed.size(), 0u);
        d.core.RankLost(1, second, "and the rest", d.now);
        d.Drain();
        EXPECT_EQ(d.failed.size(), 1u);
        EXPECT_EQ(d.core.rank_state(1), RankState::kDead);
        d.Output(1, "a late word");
        EXPECT_EQ(d.core.rank_state(1), RankState::kDead) << "it still cannot hear";
    }
}

TEST(RankLoss, AMuteRankLosesItsRunningRequestsAtOnce) {
    Vllm d{2};
    const StreamKey a = d.Submit(8, 1);
    d.Token(a);
    d.core.RankLost(1, LossKind::kMute, "output closed", d.now);
    d.Drain();
    ASSERT_EQ(d.failed.size(), 1u);
    EXPECT_EQ(d.core.rank_state(1), RankState::kMute);
}

TEST(RankLoss, SaidTwiceIsSaidOnce) {
    Vllm d{2};
    d.Submit(8, 1);
    d.core.RankLost(1, LossKind::kDead, "a", d.now);
    d.core.RankLost(1, LossKind::kDeaf, "b", d.now);
    d.core.RankLost(1, LossKind::kMute, "c", d.now);
    d.core.RankLost(1, LossKind::kDead, "d", d.now);
    d.Drain();
    EXPECT_EQ(d.failed.size(), 1u);
    EXPECT_EQ(d.core.live_ranks(), 1);
}

TEST(RankLoss, AReturningRankIsChosenAgainWithACleanSlate) {
    Vllm d{2};
    d.Submit(8, 1);
    d.Report(1, 90, 90, 0.99);
    d.core.RankLost(1, LossKind::kDead, "killed", d.now);
    d.Drain();
    d.Up(1);
    d.Drain();
    d.Forget();
    EXPECT_EQ(d.core.Score(1), 0.0);
    d.Submit();
    d.Submit();
    EXPECT_EQ(Counts(d, 2), (std::vector<int>{1, 1}));
}

TEST(RankLoss, ANewProcessUnderALiveIdentityFailsTheOldOnesRequests) {
    Vllm d{2};
    const StreamKey a = d.Submit(8, 1);
    d.Token(a);
    d.Up(1);
    d.Drain();
    ASSERT_EQ(d.failed.size(), 1u);
    EXPECT_EQ(d.core.in_flight(1), 0u);
    EXPECT_EQ(d.core.live_ranks(), 2);
}

TEST(RankLoss, OfALockstepGroupIsTheLossOfAll) {
    for (const LossKind kind : {LossKind::kDead, LossKind::kDeaf, LossKind::kMute, LossKind::kLauncher}) {
        Vllm d{3, {}, true};
        for (int i = 0; i < 9; ++i) {
            const StreamKey s = d.Submit();
            if (i % 2 == 0) {
                d.Token(s);
            }
        }
        d.Forget();
        d.core.RankLost(1, kind, "gone", d.now);
        d.Drain();
        EXPECT_EQ(d.failed.size(), 9u);
        EXPECT_EQ(d.core.live_requests(), 0u);
        EXPECT_FALSE(d.core.serving());
        ASSERT_EQ(d.declared.size(), 2u) << "the actor must take the survivors down";
        for (const auto& [rank, loss] : d.declared) {
            EXPECT_NE(rank, 1);
            EXPECT_EQ(loss, LossKind::kDead);
        }
        d.Submit();
        EXPECT_EQ(HttpStatus(d.failed.back().code), 503);
        // All must start again.
        d.Up(0, 3);
        d.Up(1, 3);
        d.Drain();
        EXPECT_FALSE(d.core.serving());
        d.Up(2, 3);
        d.Drain();
        EXPECT_TRUE(d.core.serving());
        d.Forget();
        d.Submit();
        EXPECT_EQ(d.wakes.size(), 3u);
    }
}

TEST(Registration, FactsThatContradictTheGroupAreRefusedByName) {
    CoreConfig config;
    config.size = 2;
    GroupCore<VllmProtocol> core{config};
    RankFacts facts;
    facts.data_parallel_size = 4;
    EXPECT_NE(core.RankRegistered(0, facts, {}).error().message.find("lockstep group of 4"),
              std::string::npos);
    facts.data_parallel_size = 2;
    EXPECT_TRUE(core.RankRegistered(0, facts, {}).ok());
    facts.data_parallel_size = 1;
    EXPECT_FALSE(core.RankRegistered(1, facts, {}).ok()) << "half a lockstep group";
    EXPECT_FALSE(core.RankRegistered(2, facts, {}).ok());
    EXPECT_FALSE(core.RankRegistered(-1, facts, {}).ok());
    core.RankUp(1, {});
    EXPECT_EQ(core.live_ranks(), 0);
}

TEST(Registration, TokenSpeedGroupsAreNeverLockstep) {
    CoreConfig config;
    config.size = 2;
    GroupCore<TokenSpeedProtocol> core{config};
    RankFacts facts;
    facts.data_parallel_size = 2;
    EXPECT_TRUE(core.RankRegistered(0, facts, {}).ok());
    core.RankUp(0, {});
    EXPECT_FALSE(core.lockstep());
    EXPECT_TRUE(core.serving());
}

// ---- liveness --------------------------------------------------------------------------------------------

TEST(Liveness, ASilentIdleRankIsFoundWithinThreeSecondsAndComesBackWhenItAnswers) {
    Vllm d{2};
    const TimePoint stopped = d.now;
    while (d.declared.empty() && d.now - stopped < seconds{10}) {
        d.Pass(milliseconds{100}, {1});
    }
    ASSERT_EQ(d.declared.size(), 1u);
    EXPECT_EQ(d.declared[0], (std::pair{1, LossKind::kWedged}));
    EXPECT_LE(d.now - stopped, seconds{3});
    EXPECT_EQ(d.core.live_ranks(), 1);
    d.Pass(seconds{20}, {1});
    EXPECT_EQ(d.core.rank_state(1), RankState::kWedged);
    d.Pong(1);
    EXPECT_EQ(d.core.rank_state(1), RankState::kLive);
    EXPECT_EQ(d.recovered, 1);
}

TEST(Liveness, ASilentDecodingRankIsFoundWithinThreeSecondsEvenWhileNewRequestsArrive) {
    Vllm d{2};
    for (int i = 0; i < 10; ++i) {
        d.Token(d.Submit(8, 1));
    }
    const TimePoint stopped = d.now;
    while (d.declared.empty() && d.now - stopped < seconds{10}) {
        d.Pass(milliseconds{100}, {1});
        if (d.now - stopped > milliseconds{700}) {
            d.Submit(8, 1);  // left after the unanswered question: excuses nothing
        }
    }
    ASSERT_EQ(d.declared.size(), 1u);
    EXPECT_LE(d.now - stopped, seconds{3});
    EXPECT_EQ(d.core.in_flight(1), 0u);
    EXPECT_GE(d.aborted.size(), 10u) << "if it wakes up it must not compute for nobody";
}

TEST(Liveness, ASixtySecondPrefillIsNotDeath) {
    Vllm d{1};
    const StreamKey a = d.Submit(600);
    d.Pass(seconds{60}, {0});
    EXPECT_TRUE(d.declared.empty());
    EXPECT_EQ(d.core.rank_state(0), RankState::kLive);
    d.Finish(a);
    EXPECT_EQ(d.failed.size(), 0u);
}

TEST(Liveness, TheFirstLogprobsCompileIsNotDeathForTheDecodesBesideIt) {
    Vllm d{1};
    for (int i = 0; i < 5; ++i) {
        d.Token(d.Submit());
    }
    d.Submit();  // the one that compiles for 45 s
    d.Pass(seconds{45}, {0});
    EXPECT_TRUE(d.declared.empty());
}

TEST(Liveness, AnUnboundedPrefillIsNotBelievedForEver) {
    Vllm d{1};
    d.Submit(600);
    d.Pass(seconds{130}, {0});
    EXPECT_EQ(d.declared.size(), 1u);
}

TEST(Liveness, AStoppedProcessHasNoExcuse) {
    Vllm d{2};
    d.Submit(600, 1);
    const TimePoint stopped = d.now;
    d.core.RankProcess(1, ProcessHint::kStopped, d.now);
    while (d.declared.empty() && d.now - stopped < seconds{10}) {
        d.Pass(milliseconds{100}, {1});
    }
    ASSERT_EQ(d.declared.size(), 1u);
    EXPECT_LE(d.now - stopped, seconds{3});
}

TEST(Liveness, OurOwnStandstillBlamesNobody) {
    Vllm d{2};
    d.Pass(seconds{1});
    d.now += seconds{600};
    d.core.Tick(d.now);
    d.Drain();
    d.Pass(milliseconds{600});
    EXPECT_TRUE(d.declared.empty());
    EXPECT_EQ(d.core.live_ranks(), 2);
}

TEST(Liveness, ASlowMachineIsGivenMoreTime) {
    Vllm d{1};
    for (int i = 0; i < 3; ++i) {  // answers after two seconds, with nothing to excuse it
        d.Pass(milliseconds{2600}, {0});
        ASSERT_TRUE(d.declared.empty());
        d.Pong(0);
    }
    d.Pass(seconds{5}, {0});
    EXPECT_TRUE(d.declared.empty());
    d.Pass(seconds{6}, {0});
    EXPECT_EQ(d.declared.size(), 1u);
}

TEST(Liveness, TokensAreAnAnswer) {
    Vllm d{1};
    const StreamKey a = d.Submit();
    for (int i = 0; i < 100; ++i) {
        d.Token(a);
        d.Pass(milliseconds{400}, {0});
    }
    EXPECT_TRUE(d.declared.empty());
    EXPECT_EQ(d.core.counters().pings, 0u);
}

TEST(Liveness, WithoutAPingOnlyADecodingRankCanBeTooSilent) {
    TokenSpeed d{2};
    d.Pass(seconds{3600});
    EXPECT_TRUE(d.declared.empty());
    d.Submit(8, 0);
    d.Pass(seconds{60});
    EXPECT_TRUE(d.declared.empty()) << "a long prefill";
    const StreamKey a = d.Submit(8, 1);
    d.Token(a);
    d.Pass(seconds{16});
    ASSERT_EQ(d.declared.size(), 1u);
    EXPECT_EQ(d.declared[0].first, 1);
}

TEST(Liveness, WithoutAPingAStoppedProcessIsFoundAndItsReturnSeen) {
    TokenSpeed d{2};
    d.core.RankProcess(0, ProcessHint::kStopped, d.now);
    d.Pass(seconds{3});
    ASSERT_EQ(d.declared.size(), 1u);
    d.core.RankProcess(0, ProcessHint::kRunning, d.now);
    d.Drain();
    EXPECT_EQ(d.core.rank_state(0), RankState::kLive);
}

TEST(Liveness, AWedgeInLockstepTakesTheGroupOutAndItsEndBringsItBack) {
    Vllm d{2, {}, true};
    const StreamKey a = d.Submit();
    d.Token(a);
    d.Pass(seconds{4}, {0, 1});  // one is stopped, the other waits for it in a collective
    EXPECT_FALSE(d.core.serving());
    EXPECT_EQ(d.failed.size(), 1u);
    EXPECT_EQ(d.aborted.size(), 1u);
    d.Pong(0);
    EXPECT_FALSE(d.core.serving());
    d.Pong(1);
    EXPECT_TRUE(d.core.serving());
    d.Forget();
    d.Submit();
    EXPECT_EQ(d.wakes.size(), 2u);
    EXPECT_EQ(d.core.live_ranks(), 2);
}

// ---- waves -----------------------------------------------------------------------------------------------

TEST(Waves, TheFirstRequestWakesEveryRankTheHolderIncluded) {
    CoreConfig config;
    config.initial_wave = 1000;
    Vllm d{3, config, true};
    d.Submit();
    EXPECT_EQ(d.wakes,
              (std::vector<std::pair<std::int32_t, std::uint64_t>>{{0, 1001}, {1, 1001}, {2, 1001}}));
    d.Submit();
    EXPECT_EQ(d.wakes.size(), 3u) << "the wake is in force";
}

TEST(Waves, AreNotSentToADenseGroup) {
    Vllm d{2};
    d.Submit();
    d.WaveComplete(0, 5);
    EXPECT_TRUE(d.wakes.empty());
}

TEST(Waves, TheCopiesOfACompletionReArmOnceAndOutrankIt) {
    Vllm d{3, {}, true};
    d.Submit();
    const std::uint64_t first = d.wakes[0].second;
    d.Forget();
    for (std::int32_t r = 0; r < 3; ++r) {
        d.WaveComplete(r, static_cast<std::int64_t>(first));
    }
    ASSERT_EQ(d.wakes.size(), 3u);
    EXPECT_GT(d.wakes[0].second, first + 1) << "above what the ranks hold after parking";
}

TEST(Waves, ACompletionWithNothingInFlightWakesNobody) {
    Vllm d{2, {}, true};
    d.Finish(d.Submit());
    const auto wave = static_cast<std::int64_t>(d.wakes[0].second);
    d.Forget();
    d.WaveComplete(0, wave);
    d.WaveComplete(1, wave);
    EXPECT_TRUE(d.wakes.empty());
    d.Submit();
    EXPECT_EQ(d.wakes.size(), 2u);
    EXPECT_GT(d.wakes[0].second, static_cast<std::uint64_t>(wave) + 1);
}

TEST(Waves, ARankFoundAheadIsPassedByTheNextWake) {
    Vllm d{2, {}, true};
    d.Submit();
    d.Forget();
    wire::LoadSnapshot load;
    load.current_wave = 777;
    EngineStep step;
    step.load = &load;
    d.core.OnStep(step, d.now);
    d.Drain();
    ASSERT_EQ(d.wakes.size(), 2u) << "it has dropped the wake that is in force";
    EXPECT_GT(d.wakes[0].second, 777u);
}

TEST(Waves, AReportNeverLowersTheClockAndAnAbsurdOneNeverExhaustsIt) {
    CoreConfig config;
    config.initial_wave = 50;
    Vllm d{2, config, true};
    d.WaveComplete(0, 3);
    d.WaveComplete(0, std::numeric_limits<std::int64_t>::max());
    d.WaveComplete(0, -4);
    d.Submit();
    EXPECT_EQ(d.wakes[0].second, 51u);
}

TEST(Waves, ARefusedWakeIsRepeatedAndThenTheRankIsDeaf) {
    Vllm d{2, {}, true};
    d.refuse_wake = {1};
    d.Submit();
    EXPECT_EQ(d.core.live_requests(), 1u);
    d.Pass(milliseconds{500});
    EXPECT_GE(std::count_if(d.wakes.begin(), d.wakes.end(), [](const auto& w) { return w.first == 1; }), 4);
    d.refuse_wake.clear();
    d.Pass(milliseconds{300});
    EXPECT_TRUE(d.declared.empty());
    d.refuse_wake = {1};
    d.WaveComplete(0, static_cast<std::int64_t>(d.core.waves().last_wake()));
    d.Pass(milliseconds{2500});
    EXPECT_FALSE(d.declared.empty());
    EXPECT_EQ(d.core.live_requests(), 0u) << "the slot is given back";
    EXPECT_EQ(d.failed.size(), 1u);
}

TEST(Waves, NoWakeWhilePausedAndOneAfterTheResume) {
    Vllm d{2, {}, true};
    d.core.AdminBegins(AdminMethod::kPause, d.now);
    d.core.AdminEnded(AdminMethod::kPause, true, d.now);
    d.Submit();
    d.WaveComplete(0, 9);
    d.WaveComplete(1, 9);
    d.Pass(seconds{10});
    EXPECT_TRUE(d.wakes.empty());
    d.core.AdminBegins(AdminMethod::kResume, d.now);
    d.Drain();
    EXPECT_TRUE(d.wakes.empty());
    d.core.AdminEnded(AdminMethod::kResume, true, d.now);
    d.Drain();
    ASSERT_EQ(d.wakes.size(), 2u);
    EXPECT_GT(d.wakes[0].second, 10u);
}

TEST(Waves, OnePauseOrResumeAtATimeAndNoResumeOfWhatIsNotPaused) {
    Vllm d{2, {}, true};
    EXPECT_EQ(d.core.CheckAdmin(AdminMethod::kResume), AdminGate::kNotPaused);
    EXPECT_EQ(d.core.CheckAdmin(AdminMethod::kWakeUp), AdminGate::kNotPaused);
    EXPECT_EQ(d.core.CheckAdmin(AdminMethod::kIsSleeping), AdminGate::kSend);
    EXPECT_EQ(d.core.CheckAdmin(AdminMethod::kPause), AdminGate::kSend);
    d.core.AdminBegins(AdminMethod::kPause, d.now);
    EXPECT_EQ(d.core.CheckAdmin(AdminMethod::kResume), AdminGate::kBusy);
    d.core.AdminEnded(AdminMethod::kPause, true, d.now);
    EXPECT_EQ(d.core.CheckAdmin(AdminMethod::kResume), AdminGate::kSend);
    d.core.AdminBegins(AdminMethod::kResume, d.now);
    EXPECT_EQ(d.core.CheckAdmin(AdminMethod::kResume), AdminGate::kBusy);
    d.core.AdminEnded(AdminMethod::kResume, true, d.now);
    EXPECT_EQ(d.core.CheckAdmin(AdminMethod::kResume), AdminGate::kNotPaused);
    d.core.FoundPaused(d.now);
    EXPECT_EQ(d.core.CheckAdmin(AdminMethod::kResume), AdminGate::kSend);
    Vllm dense{2};
    EXPECT_EQ(dense.core.CheckAdmin(AdminMethod::kResume), AdminGate::kSend);
}

TEST(Waves, AFailedPauseWakesRatherThanHangs) {
    Vllm d{2, {}, true};
    d.core.AdminBegins(AdminMethod::kPause, d.now);
    d.Submit();
    EXPECT_TRUE(d.wakes.empty());
    d.core.AdminEnded(AdminMethod::kPause, false, d.now);
    d.Drain();
    EXPECT_EQ(d.wakes.size(), 2u);
}

TEST(Waves, UnexplainedSilenceIsNudgedWithGrowingJumpsAndPausesBetween) {
    Vllm d{2, {}, true};
    d.Submit();
    const std::uint64_t first = d.wakes[0].second;
    d.Pass(seconds{10});  // pings are answered, nothing else comes
    EXPECT_GE(d.core.counters().nudges, 3u);
    EXPECT_LE(d.core.counters().nudges, 4u);
    EXPECT_GT(d.wakes.back().second, first + 4096);
}

// ---- drain -----------------------------------------------------------------------------------------------

TEST(Drain, RefusesTheNewFinishesTheOldAndSaysSoOnce) {
    Vllm d{1};
    const StreamKey a = d.Submit();
    d.core.BeginDrain();
    d.Submit();
    ASSERT_EQ(d.failed.size(), 1u);
    EXPECT_EQ(d.failed[0].code, ErrorCode::kDraining);
    EXPECT_EQ(d.drained, 0);
    d.Finish(a);
    EXPECT_EQ(d.drained, 1);
    d.core.BeginDrain();
    d.Drain();
    EXPECT_EQ(d.drained, 1);
}

TEST(Drain, ClosingEndsEveryRequestAndAbortsIt) {
    Vllm d{2};
    for (int i = 0; i < 6; ++i) {
        d.Submit();
    }
    d.core.FailAll(Error{ErrorCode::kDraining, "closing", "", true}, d.now);
    d.Drain();
    EXPECT_EQ(d.failed.size(), 6u);
    EXPECT_EQ(d.aborted.size(), 6u);
    EXPECT_EQ(d.core.live_requests(), 0u);
}

TEST(Snapshot, SaysWhichRankAndWhy) {
    Vllm d{2};
    d.core.RankLost(1, LossKind::kDeaf, "input closed", d.now);
    d.Drain();
    EXPECT_TRUE(d.core.TakeDirty());
    EXPECT_FALSE(d.core.TakeDirty());
    const GroupSnapshot s = d.core.MakeSnapshot(d.now);
    EXPECT_EQ(s.live, 1);
    EXPECT_EQ(s.max_model_len, 1000);
    EXPECT_EQ(RankStateName(s.ranks[1].state), "deaf");
    EXPECT_EQ(s.ranks[1].reason, "input closed");
    EXPECT_LT(s.ranks[0].load_age_seconds, 0);
}

TEST(Snapshot, AGroupIsFormingUntilEveryRankWasLiveOnce) {
    CoreConfig config;
    config.size = 2;
    GroupCore<VllmProtocol> core{config};
    const TimePoint now{std::chrono::seconds{1}};
    const auto up = [&](std::int32_t rank) {
        ASSERT_TRUE(core.RankRegistered(rank, RankFacts{}, now).ok());
        core.RankUp(rank, now);
    };
    EXPECT_TRUE(core.MakeSnapshot(now).forming);
    up(0);
    EXPECT_TRUE(core.MakeSnapshot(now).serving);
    EXPECT_TRUE(core.MakeSnapshot(now).forming);
    up(1);
    EXPECT_FALSE(core.MakeSnapshot(now).forming);
    core.RankLost(1, LossKind::kDead, "killed", now);
    EXPECT_FALSE(core.MakeSnapshot(now).forming) << "a loss is not a start";
}

}  // namespace
}  // namespace rankgate::group
