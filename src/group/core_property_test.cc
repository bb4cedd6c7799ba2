// SPDX-License-Identifier: Apache-2.0
// Random interleavings of everything that can name a request: submit, duplicate id, rows, finished lists,
// cancels, refused encodes, sends and wakes, loss of ranks by every kind, rejoin, ticks, pauses, foreign and
// unknown ids. A model of its own, which shares no code with the core, checks after every step: slots = open
// streams, one terminal a stream, an id on one rank only, ids never reused, retries within the rules, nothing
// sent to a rank that is not live. Failures print the seed; RG_SEED repeats one.
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "group/core.h"

namespace rankgate::group {
namespace {

constexpr std::uint64_t kInterleavings = 1'000'000;  // over all cases below
constexpr std::uint64_t kCases = 4;

struct Random {
    std::uint64_t state;
    std::uint64_t Next() noexcept {
        state += 0x9e3779b97f4a7c15ULL;
        return Mix(state);
    }
    std::uint32_t Below(std::uint32_t n) noexcept { return static_cast<std::uint32_t>(Next() % n); }
    bool OneIn(std::uint32_t n) noexcept { return Below(n) == 0; }
};

enum class End { kOpen, kTerminal, kCancelled };

struct ModelAttempt {
    std::size_t stream;
    std::int32_t rank;
    std::string id;
    AttemptId attempt;
    bool aborted{false};
};
struct ModelStream {
    std::int64_t seed;
    std::string external_id;
    ReplyId reply;
    End end{End::kOpen};
    bool delivered{false};
    bool pinned{false};
    bool poison{false};
    bool unsendable{false};  // a frame of it was refused: the next ADD is no retry
    int attempts{0};
    int moves{0};  // ADDs after the first that no refused frame explains
    std::int32_t rank{-1};
};

template <class P>
class Scenario {
  public:
    explicit Scenario(std::uint64_t seed) : random_{seed}, lockstep_{HasWaves<P> && random_.OneIn(3)} {
        CoreConfig config;
        config.size = static_cast<std::int32_t>(1 + random_.Below(4));
        if (lockstep_) {
            config.size = std::max(config.size, 2);
        }
        config.sole_feeder = !random_.OneIn(4);
        config.max_requests = random_.OneIn(8) ? 3 : 64;
        config.id_epoch = 0x1234;
        size_ = config.size;
        core_ = std::make_unique<GroupCore<P>>(config);
        for (std::int32_t r = 0; r < size_; ++r) {
            Up(r);
        }
        Pump();
    }

    std::string Run() {
        const std::uint32_t steps = 12 + random_.Below(30);
        for (std::uint32_t i = 0; i < steps && error_.empty(); ++i) {
            now_ += std::chrono::milliseconds{random_.Below(40)};
            Step();
            if (!random_.OneIn(3)) {  // otherwise the next event meets actions that were not executed yet
                Pump();
            }
            Check(i % 4 == 3);
        }
        Pump();
        Check(true);
        // Every way the group can die clears the sets.
        for (std::int32_t r = 0; r < size_; ++r) {
            core_->RankLost(r, LossKind::kDead, "end", now_);
        }
        Pump();
        Check(true);
        if (error_.empty() && core_->live_requests() != 0) {
            error_ = "requests outlive the group";
        }
        for (const ModelStream& s : streams_) {
            if (error_.empty() && s.end == End::kOpen) {
                error_ = "a stream never ended";
            }
        }
        return error_;
    }

  private:
    void Up(std::int32_t r) {
        RankFacts facts;
        facts.data_parallel_size = lockstep_ ? size_ : 1;
        if (core_->RankRegistered(r, facts, now_).ok()) {
            core_->RankUp(r, now_);
        }
    }

    void Step() {
        switch (random_.Below(20)) {
            case 0:
            case 1:
            case 2:
            case 3:
            case 4:
                Submit();
                break;
            case 5:
            case 6:
            case 7:
            case 8:
            case 9:
                Rows();
                break;
            case 10:
            case 11:
                Cancel();
                break;
            case 12: {
                const auto r = static_cast<std::int32_t>(random_.Below(static_cast<std::uint32_t>(size_)));
                const auto kind = static_cast<LossKind>(random_.Below(5));
                Pump();
                const bool company = core_->in_flight(r) > 1 ||
                                     (core_->rank_state(r) != RankState::kLive && now_ < company_until_[r]);
                if (core_->in_flight(r) > 1) {
                    company_until_[r] = now_ + std::chrono::seconds{2};
                }
                if (core_->in_flight(r) == 1 && !company && kind != LossKind::kLauncher) {
                    for (ModelStream& s : streams_) {
                        // Alone on the rank that is lost: it must not be carried to the next.
                        s.poison = s.poison || (s.end == End::kOpen && s.rank == r);
                    }
                }
                core_->RankLost(r, kind, "random", now_);
                if (core_->in_flight(r) == 1) {  // deaf, and it goes on
                    for (ModelStream& s : streams_) {
                        s.poison = s.poison && s.rank != r;
                    }
                }
                break;
            }
            case 13:
                Up(static_cast<std::int32_t>(random_.Below(static_cast<std::uint32_t>(size_))));
                break;
            case 14:
                core_->Tick(now_);
                if (random_.OneIn(8)) {
                    for (int i = 0; i < 40; ++i) {  // long enough for a silent rank to be given up
                        now_ += std::chrono::milliseconds{100};
                        core_->Tick(now_);
                    }
                }
                break;
            case 15:
                refuse_sends_ = random_.OneIn(2);
                break;
            case 16:
                refuse_encodes_ = random_.OneIn(3);
                break;
            case 17:
                refuse_wakes_ = random_.OneIn(2);
                break;
            case 18:
                if constexpr (P::kHasUtility) {
                    const auto method = random_.OneIn(2) ? AdminMethod::kPause : AdminMethod::kResume;
                    core_->AdminBegins(method, now_);
                    core_->AdminEnded(method, !random_.OneIn(4), now_);
                }
                break;
            case 19:
                if (!attempts_.empty()) {  // a refusal that comes late, or twice
                    const ModelAttempt& a = Any();
                    if (streams_[a.stream].end == End::kOpen && a.attempt == Latest(a.stream)) {
                        streams_[a.stream].unsendable = true;
                    }
                    core_->SendFailed(a.attempt, "late", now_);
                }
                break;
            default:
                break;
        }
    }

    const ModelAttempt& Any() {
        return attempts_[random_.Below(static_cast<std::uint32_t>(attempts_.size()))];
    }
    AttemptId Latest(std::size_t stream) const {
        for (std::size_t i = attempts_.size(); i-- > 0;) {
            if (attempts_[i].stream == stream) {
                return attempts_[i].attempt;
            }
        }
        return 0;
    }

    void Submit() {
        if (!streams_.empty() && random_.OneIn(5)) {
            duplicate_now_ = true;
            Pump();  // so that the model knows who has ended
        }
        ModelStream s;
        s.reply = random_.Below(2);
        s.seed = static_cast<std::int64_t>(random_.Next() >> 1);
        const bool duplicate = std::exchange(duplicate_now_, false);
        s.external_id = duplicate
                            ? streams_[random_.Below(static_cast<std::uint32_t>(streams_.size()))].external_id
                            : "id" + std::to_string(streams_.size());
        auto request = std::make_unique<wire::GenerateRequest>();
        request->id = s.external_id;
        request->prompt_token_ids.assign(1 + random_.Below(4), 5);
        request->sampling.seed = s.seed;
        if (random_.OneIn(6)) {
            request->data_parallel_rank = static_cast<std::int32_t>(random_.Below(5)) - 1;
            s.pinned = true;
        }
        const auto key = static_cast<StreamKey>(streams_.size());
        const ReplyId reply = s.reply;
        bool in_use = false;
        for (const ModelStream& other : streams_) {
            in_use = in_use || (other.end == End::kOpen && other.external_id == s.external_id);
        }
        streams_.push_back(std::move(s));
        core_->Submit(reply, key, std::move(request), now_);
        if (in_use) {
            Pump();
            if (streams_.back().end != End::kTerminal || streams_.back().attempts > 0) {
                Error("a duplicate id was admitted");
            }
        }
    }

    void Rows() {
        std::vector<StepOutput> rows;
        std::vector<std::string_view> finished;
        std::vector<std::int64_t> calls;
        std::vector<std::size_t> named;
        const std::uint32_t count = random_.Below(4);
        for (std::uint32_t i = 0; i < count; ++i) {
            StepOutput row;
            row.num_tokens = random_.Below(3);
            if (random_.OneIn(3)) {
                row.finish_reason = static_cast<wire::FinishReason>(random_.Below(5));
            }
            if (attempts_.empty() || random_.OneIn(10)) {
                row.request_id = "nobody-00001234000000000000000a";
            } else {
                row.request_id = Any().id;
            }
            rows.push_back(row);
        }
        while (!attempts_.empty() && random_.OneIn(3)) {
            finished.push_back(Any().id);
        }
        wire::LoadSnapshot load;
        load.num_running = random_.Below(9);
        load.num_waiting = random_.Below(9);
        load.kv_usage = random_.Below(10) * 0.1;
        load.current_wave = random_.Below(5);
        if (last_ping_ != 0 && random_.OneIn(2)) {
            calls.push_back(static_cast<std::int64_t>(last_ping_));
        }
        EngineStep step;
        step.rank = random_.OneIn(12)
                        ? 17
                        : static_cast<std::int32_t>(random_.Below(static_cast<std::uint32_t>(size_)));
        step.outputs = rows;
        step.finished_ids = finished;
        step.utility_call_ids = calls;
        if (random_.OneIn(2)) {
            step.load = &load;
        }
        if (random_.OneIn(4)) {
            step.wave_complete = random_.Below(9);
        }
        if (random_.OneIn(9)) {
            step.start_wave = random_.Below(9);
        }
        rows_ = &rows;
        core_->OnStep(step, now_);
        Pump();
        rows_ = nullptr;
        for (const std::string_view id : finished) {
            for (const ModelAttempt& attempt : attempts_) {
                if (step.rank < size_ && attempt.id == id && streams_[attempt.stream].end == End::kOpen &&
                    attempt.attempt == Latest(attempt.stream)) {
                    Error("named in a finished list, and still open");
                }
            }
        }
    }

    void Cancel() {
        if (streams_.empty()) {
            return;
        }
        const std::size_t i = random_.Below(static_cast<std::uint32_t>(streams_.size()));
        // A terminal that is still queued was decided before this cancel and may arrive after it; the shard
        // drops it.
        core_->Cancel(streams_[i].reply, i, static_cast<CancelCause>(random_.Below(5)), now_);
        if (streams_[i].end == End::kOpen) {
            streams_[i].end = End::kCancelled;
        }
    }

    void Pump() {
        core_->Flush();
        for (Action a; core_->PopAction(a) && error_.empty();) {
            switch (a.kind) {
                case ActionKind::kSendAdd:
                    Sent(a);
                    break;
                case ActionKind::kDeliver:
                    Delivered(a);
                    break;
                case ActionKind::kFail:
                    Ended(a);
                    break;
                case ActionKind::kSendAbort:
                    Aborted(a);
                    break;
                case ActionKind::kSendWave:
                    if constexpr (HasWaves<P>) {
                        if (!lockstep_) {
                            Error("a wake for a dense group");
                        }
                        if (refuse_wakes_) {
                            core_->WakeFailed(a.rank, now_);
                        }
                    } else {
                        Error("a wake on a wire without waves");
                    }
                    break;
                case ActionKind::kPing:
                    last_ping_ = a.number;
                    break;
                default:
                    break;
            }
        }
    }

    void Sent(const Action& a) {
        const std::string& id = a.request->id;
        for (const ModelAttempt& other : attempts_) {
            if (other.id == id || other.attempt == a.number) {
                return Error("a wire id was used twice");
            }
        }
        // The stream is known by its seed, which must be the client's in every attempt.
        std::size_t stream = streams_.size();
        for (std::size_t i = 0; i < streams_.size(); ++i) {
            if (streams_[i].seed == a.request->sampling.seed) {
                stream = i;
            }
        }
        if (stream == streams_.size()) {
            return Error("an ADD with another seed");
        }
        ModelStream& s = streams_[stream];
        if (s.end != End::kOpen) {
            return Error("an ADD for a stream that has ended");
        }
        if (s.delivered) {
            return Error("a retry after something was delivered");
        }
        if (core_->rank_state(a.rank) != RankState::kLive) {
            return Error("an ADD to a rank that is not live");
        }
        if (s.poison && !s.unsendable) {
            return Error("the request that was alone on a lost rank was retried");
        }
        if (s.attempts > 0 && s.pinned) {
            return Error("a pinned request moved");
        }
        if (s.attempts > 0 && !s.unsendable && ++s.moves > 1) {
            return Error("retried twice");
        }
        if (s.attempts > 0 && lockstep_ && !s.unsendable) {
            return Error("a retry inside a lockstep group");
        }
        s.unsendable = false;
        ++s.attempts;
        s.rank = a.rank;
        attempts_.push_back({stream, a.rank, id, a.number});
        if (refuse_encodes_) {
            core_->EncodeFailed(a.number, rankgate::Error{ErrorCode::kInvalidArgument, "encode", "", false},
                                now_);
        } else if (refuse_sends_) {
            s.unsendable = true;
            core_->SendFailed(a.number, "send", now_);
        }
    }

    void Delivered(const Action& a) {
        ModelStream& s = streams_[a.stream];
        if (s.end == End::kCancelled) {
            return;
        }
        if (s.end == End::kTerminal) {
            return Error("an output after the terminal");
        }
        if (rows_ == nullptr || a.index >= rows_->size() || a.reply != s.reply) {
            return Error("a delivery of nothing");
        }
        const StepOutput& row = (*rows_)[a.index];
        if (row.request_id != IdOf(a.stream)) {
            return Error("another request's output");
        }
        if ((row.finish_reason != wire::FinishReason::kNone) != a.terminal) {
            return Error("terminal flag and finish reason differ");
        }
        s.delivered = true;
        if (a.terminal) {
            s.end = End::kTerminal;
        }
    }

    std::string_view IdOf(std::size_t stream) const {
        for (std::size_t i = attempts_.size(); i-- > 0;) {
            if (attempts_[i].stream == stream) {
                return attempts_[i].id;
            }
        }
        return {};
    }

    void Ended(const Action& a) {
        ModelStream& s = streams_[a.stream];
        if (s.end == End::kTerminal) {
            return Error("two terminals");
        }
        if (a.error == nullptr || a.error->message.empty() || a.reply != s.reply) {
            return Error("a failure without a word");
        }
        if (a.error->code == ErrorCode::kRankLost && a.error->retryable &&
            ((s.poison && !s.unsendable) || s.moves > 0)) {
            return Error("called retryable though its rank may have died of it");
        }
        if (s.end == End::kOpen) {
            s.end = End::kTerminal;
        }
    }

    void Aborted(const Action& a) {
        for (const std::string_view id : core_->AbortIds(a)) {
            bool known = false;
            for (ModelAttempt& attempt : attempts_) {
                if (attempt.id == id) {
                    known = true;
                    if (attempt.aborted) {
                        Error("aborted twice");
                    }
                    if (attempt.rank != a.rank) {
                        Error("aborted on another rank");
                    }
                    attempt.aborted = true;
                }
            }
            if (!known && id != "nobody-00001234000000000000000a") {
                Error("aborted an id that was never sent");
            }
        }
    }

    void Check(bool deep) {
        if (!error_.empty()) {
            return;
        }
        std::size_t in_flight = 0;
        for (std::int32_t r = 0; r < size_; ++r) {
            in_flight += core_->in_flight(r);
        }
        if (in_flight != core_->live_requests()) {
            return Error("slots and sets differ");
        }
        if (deep) {
            Pump();
            std::size_t open = 0;
            for (const ModelStream& s : streams_) {
                open += s.end == End::kOpen ? 1 : 0;
            }
            if (open != core_->live_requests()) {
                return Error("open " + std::to_string(open) + ", live " +
                             std::to_string(core_->live_requests()));
            }
            error_ = core_->Audit();
        }
    }

    void Error(std::string what) {
        if (error_.empty()) {
            error_ = std::move(what);
        }
    }

    Random random_;
    bool lockstep_;
    std::int32_t size_{1};
    TimePoint now_{std::chrono::seconds{50}};
    std::unique_ptr<GroupCore<P>> core_;
    std::vector<ModelStream> streams_;
    std::vector<ModelAttempt> attempts_;
    const std::vector<StepOutput>* rows_{nullptr};
    bool refuse_sends_{false};
    bool refuse_encodes_{false};
    bool refuse_wakes_{false};
    bool duplicate_now_{false};
    std::map<std::int32_t, TimePoint> company_until_;  // of a loss in two halves
    std::uint64_t last_ping_{0};
    std::string error_;
};

std::string RunSeed(std::uint64_t seed) {
    return seed % 4 == 3 ? Scenario<TokenSpeedProtocol>{seed}.Run() : Scenario<VllmProtocol>{seed}.Run();
}

void RunCase(std::uint64_t which) {
    if (const char* one = std::getenv("RG_SEED"); one != nullptr) {
        const std::uint64_t seed = std::strtoull(one, nullptr, 0);
        EXPECT_EQ(RunSeed(seed), "") << "seed " << seed;
        return;
    }
    const std::uint64_t first = which * (kInterleavings / kCases);
    for (std::uint64_t seed = first; seed < first + kInterleavings / kCases; ++seed) {
        const std::string error = RunSeed(seed);
        ASSERT_EQ(error, "") << "repeat with RG_SEED=" << seed;
    }
}

TEST(CoreProperty, AnyInterleavingLeavesSlotsEqualToOpenStreamsFirstQuarter) {
    RunCase(0);
}
TEST(CoreProperty, AnyInterleavingLeavesSlotsEqualToOpenStreamsSecondQuarter) {
    RunCase(1);
}
TEST(CoreProperty, AnyInterleavingLeavesSlotsEqualToOpenStreamsThirdQuarter) {
    RunCase(2);
}
TEST(CoreProperty, AnyInterleavingLeavesSlotsEqualToOpenStreamsFourthQuarter) {
    RunCase(3);
}

}  // namespace
}  // namespace rankgate::group
