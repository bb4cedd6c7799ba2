// SPDX-License-Identifier: Apache-2.0
// The real core in front of the lockstep double with the sync intervals of real engines: hundreds of requests
// at random moments, cancels, pauses, a gateway restart, every delivery delayed at random. Deterministic: a
// seed is a run. The core's self-healing wake is off, so what passes here passes by the protocol alone. The
// wrong policies hang in the same world first.
#include "group/lockstep_double.h"

#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "group/core.h"
#include "group/wave_model.h"

namespace rankgate::group {
namespace {

struct Random {
    std::uint64_t state;
    std::uint32_t Below(std::uint32_t n) noexcept {
        state += 0x9e3779b97f4a7c15ULL;
        return static_cast<std::uint32_t>(Mix(state) % n);
    }
    bool OneIn(std::uint32_t n) noexcept { return Below(n) == 0; }
};

enum class Kind { kAdd, kStart, kAbort, kPause, kResume, kPing };

struct Input {
    Kind kind;
    std::string id;
    std::int64_t number{0};
    int length{0};
};
struct Emission {
    struct Row {
        std::string id;
        bool terminal;
    };
    std::vector<Row> rows;
    std::optional<wire::LoadSnapshot> load;
    std::optional<std::int64_t> complete;
    std::optional<std::int64_t> start;
    std::optional<std::int64_t> answer;
    bool paused{false};
    bool resumed{false};
};

struct SimRank {
    EngineRank engine;
    std::map<std::string, int> work;  // id -> tokens to go
    std::deque<Input> in;
    std::deque<Emission> out;
};

/// What stands in front of the ranks: the core, or a wrong policy.
class Gateway {
  public:
    virtual ~Gateway() = default;
    virtual void Submit(StreamKey stream, int length) = 0;
    virtual void Cancel(StreamKey) {}
    virtual void Receive(std::int32_t rank, const Emission& emission) = 0;
    virtual std::size_t open() const = 0;
    virtual void Pause() {}
    virtual void Resume() {}
    virtual bool paused() const { return false; }
    virtual void Silence() {}  // nothing can move: time passes
};

struct World {
    World(std::uint64_t seed, int size, EngineRules r)
        : random{seed}, rules{r}, ranks(static_cast<std::size_t>(size)) {}

    bool Runnable(const SimRank& rank) const { return rank.engine.Runnable(!rank.work.empty()); }

    /// One random move of the engines or the network; false = nothing can move.
    bool Move(Gateway& gateway) {
        bool forward = true;
        bool sync = true;
        bool resume = true;
        std::vector<std::pair<char, std::size_t>> moves;
        for (std::size_t r = 0; r < ranks.size(); ++r) {
            SimRank& rank = ranks[r];
            forward = forward && rank.engine.phase == EnginePhase::kForward;
            sync = sync && rank.engine.phase == EnginePhase::kSync;
            resume = resume && rank.engine.phase == EnginePhase::kResume;
            if (!rank.out.empty()) {
                moves.emplace_back('G', r);
            }
            if (rank.engine.phase == EnginePhase::kTop && !rank.in.empty()) {
                moves.emplace_back('R', r);
            }
            if (Runnable(rank)) {
                moves.emplace_back('F', r);
            }
        }
        if (forward || sync || resume) {
            moves.emplace_back(forward ? 'f' : sync ? 's' : 'r', 0);
        }
        if (moves.empty()) {
            return false;
        }
        const auto [move, r] = moves[random.Below(static_cast<std::uint32_t>(moves.size()))];
        switch (move) {
            case 'G': {
                const Emission emission = std::move(ranks[r].out.front());
                ranks[r].out.pop_front();
                gateway.Receive(static_cast<std::int32_t>(r), emission);
                break;
            }
            case 'R':
                Read(ranks[r]);
                break;
            case 'F':
                ranks[r].engine.EnterForward();
                break;
            case 'f':
                Forward();
                break;
            case 's':
                Sync();
                break;
            case 'r':
                Resumed();
                break;
            default:
                break;
        }
        return true;
    }

    void Read(SimRank& rank) {
        const Input input = std::move(rank.in.front());
        rank.in.pop_front();
        switch (input.kind) {
            case Kind::kAdd:
                duplicates += rank.work.contains(input.id) ? 1 : 0;
                rank.work.emplace(input.id, input.length);
                if (rank.engine.OnAdd(rules, input.number)) {
                    Emission e;
                    e.start = rank.engine.wave;
                    rank.out.push_back(e);
                }
                break;
            case Kind::kStart:
                rank.engine.OnStart(input.number);
                break;
            case Kind::kAbort:
                rank.work.erase(input.id);
                break;
            case Kind::kPause:
                rank.engine.OnPause();
                break;
            case Kind::kResume:
                if (rank.engine.OnResume() != ResumeAnswer::kBarrier) {
                    Emission e;
                    e.resumed = true;
                    rank.out.push_back(e);
                }
                break;
            case Kind::kPing: {
                Emission e;
                e.answer = input.number;
                rank.out.push_back(e);
                break;
            }
        }
    }

    void Forward() {
        for (SimRank& rank : ranks) {
            Emission e;
            if (!rank.engine.paused) {
                for (auto it = rank.work.begin(); it != rank.work.end();) {
                    const bool last = --it->second == 0;
                    e.rows.push_back({it->first, last});
                    it = last ? rank.work.erase(it) : std::next(it);
                }
            }
            if (!e.rows.empty()) {
                if (stats) {
                    e.load.emplace();
                    e.load->num_running = static_cast<std::int64_t>(rank.work.size());
                    e.load->current_wave = rank.engine.wave;
                }
                rank.out.push_back(std::move(e));
            }
            rank.engine.LeaveForward(rules);
            ++steps;
        }
    }

    void Sync() {
        int unfinished = 0;
        int pending = 0;
        for (const SimRank& rank : ranks) {
            unfinished += rank.engine.Counts(!rank.work.empty()) ? 1 : 0;
            pending += rank.engine.pending_pause ? 1 : 0;
        }
        const int size = static_cast<int>(ranks.size());
        const bool on = WaveGoesOn(unfinished, pending, size);
        for (SimRank& rank : ranks) {
            Emission e;
            std::int64_t completed = 0;
            if (rank.engine.LeaveSync(on, pending == size, completed)) {
                e.complete = completed;
                ++waves;
            }
            if (pending == size) {
                Emission answer;
                answer.paused = true;
                rank.out.push_back(answer);
            }
            if (e.complete.has_value()) {
                rank.out.push_back(e);
            }
        }
    }

    void Resumed() {
        bool work = false;
        for (const SimRank& rank : ranks) {
            work = work || !rank.work.empty();
        }
        for (SimRank& rank : ranks) {
            rank.engine.LeaveResume(work);
            Emission e;
            e.resumed = true;
            rank.out.push_back(e);
        }
    }

    Random random;
    EngineRules rules;
    std::vector<SimRank> ranks;
    bool stats{true};
    int duplicates{0};
    std::uint64_t steps{0};
    std::uint64_t waves{0};
};

class CoreGateway final : public Gateway {
  public:
    CoreGateway(World& world, std::uint64_t initial_wave, std::uint32_t epoch, bool nudge = false)
        : world_{world} {
        CoreConfig config;
        config.size = static_cast<std::int32_t>(world.ranks.size());
        config.initial_wave = initial_wave;
        config.id_epoch = epoch;
        config.nudge_after = nudge ? Duration{std::chrono::seconds{1}} : Duration{0};
        config.ping_deadline = std::chrono::hours{1};
        core_ = std::make_unique<GroupCore<VllmProtocol>>(config);
        for (std::int32_t r = 0; r < config.size; ++r) {
            RankFacts facts;
            facts.data_parallel_size = config.size;
            EXPECT_TRUE(core_->RankRegistered(r, facts, now_).ok());
            core_->RankUp(r, now_);
        }
        Pump();
    }

    void Submit(StreamKey stream, int length) override {
        auto request = std::make_unique<wire::GenerateRequest>();
        request->id = "r" + std::to_string(stream);
        request->prompt_token_ids = {1};
        request->sampling.max_tokens = length;
        core_->Submit(0, stream, std::move(request), Now());
        Pump();
    }
    void Cancel(StreamKey stream) override {
        core_->Cancel(0, stream, CancelCause::kClientGone, Now());
        Pump();
    }
    void Receive(std::int32_t rank, const Emission& e) override {
        std::vector<StepOutput> rows;
        for (const Emission::Row& row : e.rows) {
            StepOutput& out = rows.emplace_back();
            out.request_id = row.id;
            out.num_tokens = 1;
            out.finish_reason = row.terminal ? wire::FinishReason::kStop : wire::FinishReason::kNone;
        }
        EngineStep step;
        step.rank = rank;
        step.outputs = rows;
        step.load = e.load.has_value() ? &*e.load : nullptr;
        step.wave_complete = e.complete;
        step.start_wave = e.start;
        const std::int64_t answer = e.answer.value_or(0);
        if (e.answer.has_value()) {
            step.utility_call_ids = std::span{&answer, 1};
        }
        core_->OnStep(step, Now());
        Pump();
        if (e.paused && ++answers_ == world_.ranks.size()) {
            core_->AdminEnded(AdminMethod::kPause, true, Now());
            state_ = State::kPaused;
        }
        if (e.resumed && state_ == State::kResuming && ++answers_ == world_.ranks.size()) {
            core_->AdminEnded(AdminMethod::kResume, true, Now());
            state_ = State::kOn;
        }
        Pump();
    }
    std::size_t open() const override { return core_->live_requests(); }
    void Pause() override {
        if (state_ == State::kOn) {
            state_ = State::kPausing;
            answers_ = 0;
            core_->AdminBegins(AdminMethod::kPause, Now());
            for (SimRank& rank : world_.ranks) {
                rank.in.push_back({Kind::kPause, "", 0, 0});
            }
        }
    }
    void Resume() override {
        if (state_ == State::kPaused) {
            state_ = State::kResuming;
            answers_ = 0;
            core_->AdminBegins(AdminMethod::kResume, Now());
            for (SimRank& rank : world_.ranks) {
                rank.in.push_back({Kind::kResume, "", 0, 0});
            }
        }
    }
    bool paused() const override { return state_ != State::kOn; }
    void Silence() override {
        for (int i = 0; i < 12; ++i) {
            now_ += std::chrono::milliseconds{100};
            core_->Tick(now_);
        }
        Pump();
    }
    const CoreCounters& counters() const { return core_->counters(); }
    std::size_t failures() const { return failures_; }
    std::string Audit() const { return core_->Audit(); }

  private:
    enum class State { kOn, kPausing, kPaused, kResuming };

    TimePoint Now() {
        now_ += std::chrono::microseconds{10};
        return now_;
    }
    void Pump() {
        core_->Flush();
        for (Action a; core_->PopAction(a);) {
            if (a.rank < 0) {
                continue;
            }
            std::deque<Input>& in = world_.ranks[static_cast<std::size_t>(a.rank)].in;
            switch (a.kind) {
                case ActionKind::kSendAdd:
                    in.push_back({Kind::kAdd, a.request->id, a.request->current_wave,
                                  static_cast<int>(a.request->sampling.max_tokens)});
                    break;
                case ActionKind::kSendWave:
                    in.push_back({Kind::kStart, "", static_cast<std::int64_t>(a.number), 0});
                    break;
                case ActionKind::kSendAbort:
                    for (const std::string_view id : core_->AbortIds(a)) {
                        in.push_back({Kind::kAbort, std::string{id}, 0, 0});
                    }
                    break;
                case ActionKind::kPing:
                    in.push_back({Kind::kPing, "", static_cast<std::int64_t>(a.number), 0});
                    break;
                case ActionKind::kFail:
                    ++failures_;
                    break;
                default:
                    break;
            }
        }
    }

    World& world_;
    std::unique_ptr<GroupCore<VllmProtocol>> core_;
    TimePoint now_{std::chrono::seconds{1}};
    State state_{State::kOn};
    std::size_t answers_{0};
    std::size_t failures_{0};
};

class NaiveGateway final : public Gateway {
  public:
    NaiveGateway(World& world, const NaivePolicy& policy) : world_{world}, policy_{policy} {}
    void Submit(StreamKey stream, int length) override {
        const auto r = static_cast<std::int32_t>(next_++ % world_.ranks.size());
        const std::string id = std::to_string(stream);
        holder_[id] = r;
        const std::optional<Wake> wake = policy_.OnRequestSent(r);
        world_.ranks[static_cast<std::size_t>(r)].in.push_back({Kind::kAdd, id, policy_.Stamp(), length});
        Send(wake);
    }
    void Receive(std::int32_t, const Emission& e) override {
        for (const Emission::Row& row : e.rows) {
            if (row.terminal) {
                policy_.OnFinished(holder_.at(row.id));
                holder_.erase(row.id);
            }
        }
        if (e.complete.has_value()) {
            Send(policy_.OnWaveComplete(*e.complete, !holder_.empty()));
        }
    }
    std::size_t open() const override { return holder_.size(); }

  private:
    void Send(std::optional<Wake> wake) {
        for (std::size_t r = 0; wake.has_value() && r < world_.ranks.size(); ++r) {
            if ((wake->excluded >> r & 1) == 0) {
                world_.ranks[r].in.push_back({Kind::kStart, "", wake->number, 0});
            }
        }
    }
    World& world_;
    NaivePolicy policy_;
    std::size_t next_{0};
    std::map<std::string, std::int32_t> holder_;
};

struct Load {
    int requests{300};
    std::uint32_t cancel_one_in{0};
    bool pauses{false};
};

/// Feeds the load at random moments, bursts and silences alike, and then lets everything run out. True:
/// nothing is left open.
bool Drive(World& world, Gateway& gateway, const Load& load, StreamKey first = 0) {
    Random& random = world.random;
    StreamKey next = first;
    const StreamKey last = first + static_cast<StreamKey>(load.requests);
    while (next < last) {
        const std::uint32_t burst = 1 + random.Below(4);
        for (std::uint32_t i = 0; i < burst && next < last; ++i) {
            gateway.Submit(next++, 1 + static_cast<int>(random.Below(40)));
        }
        if (load.cancel_one_in > 0 && random.OneIn(load.cancel_one_in)) {
            gateway.Cancel(first + random.Below(static_cast<std::uint32_t>(next - first)));
        }
        if (load.pauses && random.OneIn(6)) {
            gateway.paused() ? gateway.Resume() : gateway.Pause();
        }
        // From "before anything moved" over "in the middle of the last sync" to "long parked".
        const std::uint32_t moves = random.OneIn(3) ? random.Below(6) : random.Below(900);
        for (std::uint32_t i = 0; i < moves && world.Move(gateway); ++i) {
        }
    }
    for (int round = 0; round < 3; ++round) {
        for (int i = 0; i < 2'000'000 && world.Move(gateway); ++i) {
        }
        gateway.Resume();
    }
    return gateway.open() == 0;
}

std::vector<EngineRules> Generations() {
    return {{32, false, false}, {16, true, false}, {16, true, true}};
}

TEST(LockstepDouble, EveryWrongPolicyHangsHereToo) {
    NaivePolicy stale;
    NaivePolicy replay;
    replay.skip_if_running = false;
    replay.replay_reported = true;
    NaivePolicy exclude;
    exclude.bump = true;
    exclude.re_arm = true;
    exclude.exclude_holders = true;
    NaivePolicy racing;
    racing.skip_if_running = false;
    racing.bump = true;
    int which = 0;
    for (const NaivePolicy& policy : {stale, replay, exclude, racing}) {
        for (const EngineRules& rules : {EngineRules{32, false, false}, EngineRules{16, true, false}}) {
            std::uint64_t seed = 0;
            bool hung = false;
            for (; seed < 20'000 && !hung; ++seed) {
                World world{seed, 2, rules};
                NaiveGateway gateway{world, policy};
                hung = !Drive(world, gateway, {4});
            }
            EXPECT_TRUE(hung) << "policy " << which << ", interval " << rules.interval;
            std::printf("  policy %d, interval %d: hangs at seed %llu\n", which, rules.interval,
                        static_cast<unsigned long long>(seed - 1));
        }
        ++which;
    }
}

TEST(LockstepDouble, TheCoreLosesNoneOfThreeHundredAtRandomMoments) {
    for (const EngineRules& rules : Generations()) {
        std::uint64_t wakes = 0;
        for (std::uint64_t seed = 0; seed < 40; ++seed) {
            World world{seed, 2 + static_cast<int>(seed % 3), rules};
            world.stats = seed % 2 == 0;
            CoreGateway gateway{world, 1'000'000, 1};
            ASSERT_TRUE(Drive(world, gateway, {300})) << "seed " << seed << ", interval " << rules.interval;
            EXPECT_EQ(gateway.counters().finished, 300u);
            EXPECT_EQ(gateway.failures(), 0u);
            EXPECT_EQ(gateway.counters().nudges, 0u);
            EXPECT_EQ(gateway.Audit(), "");
            wakes += gateway.counters().wakes;
        }
        std::printf("  interval %d%s: %.1f wakes for 300 requests\n", rules.interval,
                    rules.starts_alone ? ", starts alone" : "", static_cast<double>(wakes) / 40);
    }
}

TEST(LockstepDouble, CancelsLeaveNeitherWorkNorSlots) {
    for (const EngineRules& rules : Generations()) {
        for (std::uint64_t seed = 0; seed < 30; ++seed) {
            World world{seed, 2 + static_cast<int>(seed % 3), rules};
            CoreGateway gateway{world, 1'000'000, 1};
            ASSERT_TRUE(Drive(world, gateway, {200, 2})) << "seed " << seed;
            EXPECT_EQ(gateway.counters().finished + gateway.counters().cancels[0], 200u);
            for (const SimRank& rank : world.ranks) {
                EXPECT_TRUE(rank.work.empty());
            }
        }
    }
}

TEST(LockstepDouble, PausesAndResumesOfTheWholeGroupLoseNothing) {
    for (const EngineRules& rules : Generations()) {
        for (std::uint64_t seed = 0; seed < 40; ++seed) {
            World world{seed, 2 + static_cast<int>(seed % 3), rules};
            CoreGateway gateway{world, 1'000'000, 1};
            ASSERT_TRUE(Drive(world, gateway, {200, 5, true}))
                << "seed " << seed << ", interval " << rules.interval;
        }
    }
}

TEST(LockstepDouble, AGatewayRestartClearsRanksThatAreAheadAndStopsTheirOrphans) {
    for (const EngineRules& rules : Generations()) {
        std::uint64_t orphans = 0;
        for (std::uint64_t seed = 0; seed < 40; ++seed) {
            World world{seed, 2 + static_cast<int>(seed % 2), rules};
            {
                CoreGateway old{world, 1'000, 1};
                for (StreamKey i = 0; i < 50; ++i) {
                    old.Submit(i, 200);
                    const std::uint32_t moves = world.random.Below(200);
                    for (std::uint32_t m = 0; m < moves && world.Move(old); ++m) {
                    }
                }
            }
            CoreGateway gateway{world, 2'000'000, 2};  // later in the day
            ASSERT_TRUE(Drive(world, gateway, {60}, 1000)) << "seed " << seed;
            EXPECT_EQ(gateway.counters().finished, 60u);
            orphans += gateway.counters().orphan_aborts;
            for (const SimRank& rank : world.ranks) {
                EXPECT_TRUE(rank.work.empty());
            }
            EXPECT_EQ(world.duplicates, 0) << "ids of two gateways met";
        }
        EXPECT_GT(orphans, 0u);
    }
}

TEST(LockstepDouble, EvenAClockThatWasSetBackHealsBySilence) {
    World world{3, 2, {16, true, false}};
    for (SimRank& rank : world.ranks) {
        rank.engine.wave = 3'600'000'000;  // an hour
    }
    CoreGateway gateway{world, 0, 1, true};
    gateway.Submit(1, 5);
    int silences = 0;
    while (gateway.open() > 0 && silences < 40) {
        for (int i = 0; i < 100'000 && world.Move(gateway); ++i) {
        }
        gateway.Silence();
        ++silences;
    }
    EXPECT_EQ(gateway.open(), 0u);
    EXPECT_GE(gateway.counters().nudges, 2u);
}

}  // namespace
}  // namespace rankgate::group
