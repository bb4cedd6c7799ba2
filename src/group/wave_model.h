// SPDX-License-Identifier: Apache-2.0
// Exhaustive search of the wave protocol: every order in which requests, wakes, pauses, reports and the steps
// of the lockstep double can meet, for a few ranks and requests. Breadth first with a hash of the canonical
// state (wave numbers shifted to zero, ranks sorted), so that equal situations are visited once; a 64-bit
// hash stands for a state (collision odds below 1e-5 at 10 million states). Tests only. The gateway under
// test is a policy with the methods of WaveClock; wrong ones serve as negative controls.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/check.h"
#include "group/flat_index.h"
#include "group/lockstep_double.h"
#include "group/wave_clock.h"

namespace rankgate::group {

struct ModelConfig {
    int ranks{3};
    int requests{4};
    EngineRules rules{2, true, false};
    bool reports{false};        // outputs carry the rank's wave (stats are on)
    bool long_requests{false};  // every other one takes two steps, so that waves outlive their first sync
    bool pause{false};          // the operator pauses once, and resumes once all have answered
    int pause_ranks{99};        // ... to only so many ranks (the wrong way)
    int resume_unpaused{0};     // resumes the first so many ranks with nothing paused (always the wrong way)
    std::array<std::int64_t, 3> waves{};  // what the ranks hold when the gateway starts
    bool orphan{false};  // rank 0 is in the middle of an earlier gateway's request, the others with it
    /// A rank's unread output is at most this: without it a gateway that never reads one rank while it reads
    /// the other could go on for ever. The engines wait for it, so it can hide no hang: what is unread can
    /// always be read.
    std::size_t out_cap{6};  // of 10
    /// Leaves out orders that cannot matter, for the large searches (not with pauses). A parked rank reads
    /// what it has at once: nobody else can touch it or move past it meanwhile. And a rank that waits in a
    /// step may as well still be in front of it: reading on or not is free either way, and what it reads
    /// there sends nothing.
    bool reduce{false};
    bool check_progress{false};  // remembers the graph: small configurations only
    std::size_t max_states{60'000'000};
};

struct ModelResult {
    std::size_t states{0};
    std::size_t depth{0};
    bool complete{false};           // the whole space was seen
    bool hang{false};               // a state in which nothing can move and something is unfinished
    bool finished{false};           // some path ends with everything answered
    bool always_can_finish{false};  // from every state such a path exists (only with check_progress)
    bool pause_answered{false};
    std::size_t max_wakes{0};  // on any path
    std::string trace;
};

/// Policy: copyable, with OnRequestSent(rank), OnFinished(rank), OnWaveComplete(rank, wave, in_flight),
/// OnReported(wave, in_flight), OnStartWave(wave), Pause(), Resume(in_flight), each wake a Wake{number,
/// excluded mask}; Least() and Fingerprint(base) over its state.
struct Wake {
    std::int64_t number;
    unsigned excluded{0};  // bit per rank that gets none
};

/// `Trace`: bytes of the event trace kept in every state of the frontier; the large searches keep none and
/// are repeated smaller.
template <class Policy, std::size_t Trace = 96>
class WaveModel {
  public:
    WaveModel(const ModelConfig& config, const Policy& policy) : config_{config}, policy_{policy} {}

    ModelResult Run() {
        RG_CHECK(!config_.reduce ||
                 (!config_.check_progress && !config_.pause && config_.resume_unpaused == 0));
        State start{policy_};
        start.to_submit = static_cast<std::uint8_t>(config_.requests);
        for (int r = 0; r < config_.ranks; ++r) {
            start.ranks[At(r)].engine.wave = config_.waves[At(r)];
            if (config_.orphan) {
                start.ranks[At(r)].engine.running = true;
            }
        }
        if (config_.orphan) {
            start.ranks[0].orphans = 1;
        }
        std::vector<State> level{start};
        std::vector<State> next;
        Visit(start);
        while (!level.empty() && !result_.hang && result_.states < config_.max_states) {
            next.clear();
            for (const State& state : level) {
                Expand(state, next);
                if (result_.hang) {
                    break;
                }
            }
            level.swap(next);
            ++result_.depth;
        }
        result_.complete = level.empty() && !result_.hang;
        result_.always_can_finish = config_.check_progress && result_.complete && AllReachEnd();
        return result_;
    }

  private:
    static constexpr std::size_t kInput = 20;
    static constexpr std::size_t kOutput = 10;

    enum class Message : std::uint8_t {
        kAdd,
        kAddLong,
        kStart,
        kPause,
        kResume,
        kFinish,
        kOrphanDone,
        kComplete,
        kStartWave,
        kPaused,
        kResumed
    };
    struct Item {
        Item() = default;
        Item(Message k, std::int64_t n)
            : bits{static_cast<std::int32_t>(n) * 16 + static_cast<std::int32_t>(k)} {}
        Message kind() const { return static_cast<Message>(bits & 15); }
        std::int64_t number() const { return bits >> 4; }
        std::int32_t bits;
    };
    template <std::size_t kQueue>
    struct Queue {
        std::uint8_t size{0};
        std::array<Item, kQueue> items;
        void Push(Item item) {
            RG_CHECK(size < kQueue);
            items[size++] = item;
        }
        Item Pop() {
            const Item first = items[0];
            std::copy(items.begin() + 1, items.begin() + size, items.begin());
            --size;
            return first;
        }
    };
    struct Rank {
        EngineRank engine;
        std::uint8_t work{0};       // requests with one step to go
        std::uint8_t long_work{0};  // with two
        std::uint8_t orphans{0};
        Queue<kInput> in;
        Queue<kOutput> out;
        bool has_work() const { return work + long_work + orphans > 0; }
    };
    struct State {
        explicit State(const Policy& p) : policy{p} {}
        Policy policy;
        std::array<Rank, 3> ranks;
        std::uint8_t to_submit{0};
        std::uint8_t in_flight{0};
        std::uint8_t pause{0};  // 0 not yet, 1 pausing, 2 paused, 3 resuming, 4 over
        std::uint8_t answers{0};
        std::uint16_t wakes{0};
        std::uint8_t steps{0};
        std::array<char, Trace> trace;
    };

    static std::size_t At(int r) { return static_cast<std::size_t>(r); }

    static bool IsAdd(Message kind) { return kind == Message::kAdd || kind == Message::kAddLong; }
    static bool Numbered(Message kind) {
        return kind == Message::kStart || kind == Message::kComplete || kind == Message::kStartWave ||
               IsAdd(kind) || kind == Message::kFinish;
    }
    bool Stamped(Message kind) const {
        // A number that nobody reads must not tell states apart.
        return Numbered(kind) && !(IsAdd(kind) && !config_.rules.starts_alone) &&
               !(kind == Message::kFinish && !config_.reports);
    }

    template <class Queue>
    void LowerBase(const Queue& queue, std::int64_t& base) const {
        for (std::size_t i = 0; i < queue.size; ++i) {
            if (Stamped(queue.items[i].kind())) {
                base = std::min(base, queue.items[i].number());
            }
        }
    }
    static void Add(std::uint64_t& h, std::uint64_t value) { h = Mix(h * 0x9e3779b97f4a7c15ULL + value + 1); }
    template <class Queue>
    void AddQueue(const Queue& queue, std::int64_t base, std::uint64_t& h) const {
        Add(h, queue.size);
        for (std::size_t i = 0; i < queue.size; ++i) {
            const Item item = queue.items[i];
            const bool stamped = Stamped(item.kind());
            Add(h, static_cast<std::uint64_t>(item.kind()) |
                       (stamped ? static_cast<std::uint64_t>(item.number() - base) << 8 : 0));
        }
    }

    std::uint64_t Canonical(const State& s) const {
        std::int64_t base = s.policy.Least();
        for (int r = 0; r < config_.ranks; ++r) {
            const Rank& rank = s.ranks[At(r)];
            base = std::min(base, rank.engine.wave);
            LowerBase(rank.in, base);
            LowerBase(rank.out, base);
        }
        std::array<std::uint64_t, 3> hashes{};
        for (int r = 0; r < config_.ranks; ++r) {
            const Rank& rank = s.ranks[At(r)];
            const EngineRank& e = rank.engine;
            std::uint64_t h = s.policy.RankFingerprint(r);
            Add(h, static_cast<std::uint64_t>(e.wave - base));
            Add(h, static_cast<std::uint64_t>(e.counter) << 16 | static_cast<std::uint64_t>(e.phase) << 8 |
                       (e.running ? 1u : 0u) | (e.paused ? 2u : 0u) | (e.pending_pause ? 4u : 0u) |
                       (e.ignore_start ? 8u : 0u));
            Add(h, static_cast<std::uint64_t>(rank.work) << 16 |
                       static_cast<std::uint64_t>(rank.long_work) << 8 | rank.orphans);
            AddQueue(rank.in, base, h);
            AddQueue(rank.out, base, h);
            // The wrong pauses treat rank 0 differently: then ranks are not interchangeable.
            if (config_.pause_ranks < config_.ranks || config_.resume_unpaused > 0) {
                Add(h, static_cast<std::uint64_t>(r));
            }
            hashes[At(r)] = h;
        }
        std::sort(hashes.begin(), hashes.begin() + config_.ranks);
        std::uint64_t h = s.policy.Fingerprint(base);
        for (int r = 0; r < config_.ranks; ++r) {
            Add(h, hashes[At(r)]);
        }
        h = Mix(h ^ (static_cast<std::uint64_t>(s.to_submit) << 24 |
                     static_cast<std::uint64_t>(s.in_flight) << 16 |
                     static_cast<std::uint64_t>(s.pause) << 8 | s.answers));
        return h == 0 ? 1 : h;
    }

    bool Visit(const State& s) {
        const std::uint64_t hash = Canonical(s);
        if ((result_.states + 1) * 2 > seen_.size()) {
            std::vector<std::uint64_t> bigger(std::max<std::size_t>(seen_.size() * 2, 1 << 12));
            for (const std::uint64_t old : seen_) {
                if (old != 0) {
                    Put(bigger, old);
                }
            }
            seen_.swap(bigger);
        }
        if (!Put(seen_, hash)) {
            return false;
        }
        ++result_.states;
        return true;
    }
    static bool Put(std::vector<std::uint64_t>& table, std::uint64_t hash) {
        const std::size_t mask = table.size() - 1;
        std::size_t i = hash & mask;
        while (table[i] != 0) {
            if (table[i] == hash) {
                return false;
            }
            i = (i + 1) & mask;
        }
        table[i] = hash;
        return true;
    }

    void Next(State&& s, char event, int rank, std::vector<State>& out) {
        if (config_.check_progress) {
            edges_.emplace_back(Id(Canonical(s)), from_);
        }
        if (s.steps + 2u <= Trace) {
            s.trace[s.steps] = event;
            s.trace[s.steps + 1u] = static_cast<char>('0' + rank);
            s.steps = static_cast<std::uint8_t>(s.steps + 2);
        }
        result_.max_wakes = std::max<std::size_t>(result_.max_wakes, s.wakes);
        if (Visit(s)) {
            out.push_back(std::move(s));
        }
    }

    void Send(State& s, std::optional<Wake> wake) {
        if (!wake.has_value()) {
            return;
        }
        ++s.wakes;
        for (int r = 0; r < config_.ranks; ++r) {
            if ((wake->excluded >> r & 1) == 0) {
                s.ranks[At(r)].in.Push({Message::kStart, wake->number});
            }
        }
    }

    bool Done(const State& s) const {
        return s.to_submit == 0 && s.in_flight == 0 && (!config_.pause || s.pause == 4);
    }

    std::uint32_t Id(std::uint64_t hash) {
        return ids_.try_emplace(hash, static_cast<std::uint32_t>(ids_.size())).first->second;
    }

    /// Backwards from the finished states: whoever is not reached has lost its way for good, deadlocked or
    /// not.
    bool AllReachEnd() const {
        std::vector<std::vector<std::uint32_t>> before(ids_.size());
        for (const auto& [to, from] : edges_) {
            before[to].push_back(from);
        }
        std::vector<bool> good(ids_.size(), false);
        std::vector<std::uint32_t> work = ends_;
        for (const std::uint32_t end : ends_) {
            good[end] = true;
        }
        std::size_t count = work.size();
        while (!work.empty()) {
            const std::uint32_t at = work.back();
            work.pop_back();
            for (const std::uint32_t from : before[at]) {
                if (!good[from]) {
                    good[from] = true;
                    ++count;
                    work.push_back(from);
                }
            }
        }
        return count == ids_.size();
    }

    void Expand(const State& s, std::vector<State>& out) {
        if (config_.reduce) {
            for (int r = 0; r < config_.ranks; ++r) {
                const Rank& rank = s.ranks[At(r)];
                if (rank.in.size > 0 && rank.engine.phase == EnginePhase::kTop &&
                    !rank.engine.Runnable(rank.has_work())) {
                    State n = s;
                    Read(n, r);
                    Next(std::move(n), 'R', r, out);
                    return;
                }
            }
        }
        if (config_.check_progress) {
            from_ = Id(Canonical(s));
            if (Done(s)) {
                ends_.push_back(from_);
            }
        }
        bool moved = false;
        bool all_forward = true;
        bool all_sync = true;
        bool all_resume = true;
        for (int r = 0; r < config_.ranks; ++r) {
            const Rank& rank = s.ranks[At(r)];
            all_forward = all_forward && (config_.reduce ? rank.engine.Runnable(rank.has_work())
                                                         : rank.engine.phase == EnginePhase::kForward);
            all_sync = all_sync && rank.engine.phase == EnginePhase::kSync;
            all_resume = all_resume && rank.engine.phase == EnginePhase::kResume;
            if (s.to_submit > 0) {
                State n = s;
                --n.to_submit;
                ++n.in_flight;
                const std::optional<Wake> wake = n.policy.OnRequestSent(r);
                const bool is_long = config_.long_requests && n.to_submit % 2 == 0;
                n.ranks[At(r)].in.Push({is_long ? Message::kAddLong : Message::kAdd, n.policy.Stamp()});
                Send(n, wake);
                moved = true;
                Next(std::move(n), 'S', r, out);
            }
            if (rank.out.size > 0) {
                moved = true;
                State n = s;
                Receive(n, r);
                Next(std::move(n), 'G', r, out);
            }
            if (rank.in.size > 0 && rank.engine.phase == EnginePhase::kTop) {
                moved = true;
                State n = s;
                Read(n, r);
                Next(std::move(n), 'R', r, out);
            }
            if (!config_.reduce && rank.engine.Runnable(rank.has_work())) {
                moved = true;
                State n = s;
                n.ranks[At(r)].engine.EnterForward();
                Next(std::move(n), 'F', r, out);
            }
        }
        if (config_.pause && s.pause == 0) {
            moved = true;
            State n = s;
            n.pause = 1;
            n.policy.Pause();
            for (int r = 0; r < std::min(config_.ranks, config_.pause_ranks); ++r) {
                n.ranks[At(r)].in.Push({Message::kPause, 0});
            }
            Next(std::move(n), 'P', 0, out);
        }
        if (config_.pause && s.pause == 2) {
            moved = true;
            State n = s;
            n.pause = 3;
            n.answers = 0;
            for (int r = 0; r < config_.ranks; ++r) {
                n.ranks[At(r)].in.Push({Message::kResume, 0});
            }
            Next(std::move(n), 'Q', 0, out);
        }
        if (config_.resume_unpaused > 0 && s.pause == 0) {
            State n = s;
            n.pause = 4;
            for (int r = 0; r < config_.resume_unpaused; ++r) {
                n.ranks[At(r)].in.Push({Message::kResume, 0});
            }
            Next(std::move(n), 'Q', 0, out);
        }
        if ((all_forward || all_sync || all_resume) && HasRoom(s)) {
            moved = true;
            State n = s;
            all_forward ? Forward(n) : all_sync ? Sync(n) : Resume(n);
            Next(std::move(n), all_forward ? 'f' : all_sync ? 'y' : 'q', 0, out);
        }
        if (Done(s)) {
            result_.finished = true;
        } else if (!moved) {
            result_.hang = true;
            result_.trace.assign(s.trace.data(), s.steps);
        }
    }

    bool HasRoom(const State& s) const {
        for (int r = 0; r < config_.ranks; ++r) {
            const Rank& rank = s.ranks[At(r)];
            const std::size_t due =
                rank.engine.phase == EnginePhase::kSync ? 2u : rank.work + rank.orphans + 0u;
            if (rank.out.size > 0 && rank.out.size + due > config_.out_cap) {
                return false;
            }
        }
        return true;
    }

    void Read(State& s, int r) {
        Rank& rank = s.ranks[At(r)];
        const Item item = rank.in.Pop();
        switch (item.kind()) {
            case Message::kAdd:
            case Message::kAddLong:
                ++(item.kind() == Message::kAdd ? rank.work : rank.long_work);
                if (rank.engine.OnAdd(config_.rules, item.number())) {
                    rank.out.Push({Message::kStartWave, rank.engine.wave});
                }
                break;
            case Message::kStart:
                rank.engine.OnStart(item.number());
                break;
            case Message::kPause:
                rank.engine.OnPause();
                break;
            case Message::kResume:
                if (rank.engine.OnResume() != ResumeAnswer::kBarrier) {
                    rank.out.Push({Message::kResumed, 0});
                }
                break;
            default:
                RG_CHECK(false);
        }
    }

    void Forward(State& s) {
        for (int r = 0; r < config_.ranks; ++r) {
            Rank& rank = s.ranks[At(r)];
            if (!rank.engine.paused) {
                for (; rank.work > 0; --rank.work) {
                    rank.out.Push({Message::kFinish, rank.engine.wave});
                }
                rank.work = std::exchange(rank.long_work, std::uint8_t{0});
                for (; rank.orphans > 0; --rank.orphans) {
                    rank.out.Push({Message::kOrphanDone, 0});
                }
            }
            rank.engine.LeaveForward(config_.rules);
        }
    }

    void Sync(State& s) {
        int unfinished = 0;
        int pending = 0;
        for (int r = 0; r < config_.ranks; ++r) {
            unfinished += s.ranks[At(r)].engine.Counts(s.ranks[At(r)].has_work()) ? 1 : 0;
            pending += s.ranks[At(r)].engine.pending_pause ? 1 : 0;
        }
        const bool on = WaveGoesOn(unfinished, pending, config_.ranks);
        const bool all_pause = pending == config_.ranks;
        for (int r = 0; r < config_.ranks; ++r) {
            Rank& rank = s.ranks[At(r)];
            std::int64_t completed = 0;
            const bool parked = rank.engine.LeaveSync(on, all_pause, completed);
            if (all_pause) {
                rank.out.Push({Message::kPaused, 0});
            }
            if (parked) {
                rank.out.Push({Message::kComplete, completed});
            }
        }
    }

    void Resume(State& s) {
        bool work = false;
        for (int r = 0; r < config_.ranks; ++r) {
            work = work || s.ranks[At(r)].has_work();
        }
        for (int r = 0; r < config_.ranks; ++r) {
            s.ranks[At(r)].engine.LeaveResume(work);
            s.ranks[At(r)].out.Push({Message::kResumed, 0});
        }
    }

    void Receive(State& s, int r) {
        const Item item = s.ranks[At(r)].out.Pop();
        switch (item.kind()) {
            case Message::kFinish:
                --s.in_flight;
                s.policy.OnFinished(r);
                if (config_.reports) {
                    Send(s, s.policy.OnReported(item.number(), s.in_flight > 0));
                }
                break;
            case Message::kComplete:
                Send(s, s.policy.OnWaveComplete(item.number(), s.in_flight > 0));
                break;
            case Message::kStartWave:
                Send(s, s.policy.OnStartWave(item.number()));
                break;
            case Message::kPaused:
                result_.pause_answered = true;
                if (++s.answers == config_.ranks && s.pause == 1) {
                    s.pause = 2;
                }
                break;
            case Message::kResumed:
                if (config_.pause && ++s.answers == config_.ranks && s.pause == 3) {
                    s.pause = 4;
                    Send(s, s.policy.Resume(s.in_flight > 0));
                }
                break;
            case Message::kOrphanDone:
                break;
            default:
                RG_CHECK(false);
        }
    }

    ModelConfig config_;
    Policy policy_;
    ModelResult result_;
    std::vector<std::uint64_t> seen_;
    std::unordered_map<std::uint64_t, std::uint32_t> ids_;
    std::vector<std::pair<std::uint32_t, std::uint32_t>> edges_;  // (to, from)
    std::vector<std::uint32_t> ends_;
    std::uint32_t from_{0};
};

/// The product's clock as a policy.
class ClockPolicy {
  public:
    explicit ClockPolicy(std::uint64_t initial) : clock_{initial} {}
    std::optional<Wake> OnRequestSent(int) { return As(clock_.OnRequestSent()); }
    void OnFinished(int) {}
    std::optional<Wake> OnWaveComplete(std::int64_t w, bool busy) {
        return As(clock_.OnWaveComplete(U(w), busy));
    }
    std::optional<Wake> OnReported(std::int64_t w, bool busy) { return As(clock_.OnReported(U(w), busy)); }
    std::optional<Wake> OnStartWave(std::int64_t w) { return As(clock_.OnStartWave(U(w))); }
    void Pause() { clock_.Pause(); }
    std::optional<Wake> Resume(bool busy) { return As(clock_.Resume(busy)); }
    std::int64_t Stamp() const { return static_cast<std::int64_t>(clock_.now()); }
    std::int64_t Least() const {
        return static_cast<std::int64_t>(std::min(clock_.now(), clock_.last_wake()));
    }
    std::uint64_t Fingerprint(std::int64_t base) const {
        std::uint64_t h = Mix(clock_.now() - U(base) + 0x51);
        h = Mix(h ^ (clock_.last_wake() - U(base) + 0x1000));
        return Mix(h ^ (clock_.in_force() ? 2u : 0u) ^ (clock_.paused() ? 1u : 0u));
    }
    std::uint64_t RankFingerprint(int) const { return 7; }

  private:
    static std::uint64_t U(std::int64_t w) { return static_cast<std::uint64_t>(w); }
    static std::optional<Wake> As(std::optional<std::uint64_t> n) {
        return n.has_value() ? std::optional{Wake{static_cast<std::int64_t>(*n), 0}} : std::nullopt;
    }
    WaveClock clock_;
};

/// What the wrong policies have in common: a number, a belief, who holds what.
struct NaivePolicy {
    std::int64_t wave{0};
    bool running{false};
    bool bump{false};            // every submit wakes with a new number
    bool skip_if_running{true};  // else every submit wakes
    bool re_arm{false};
    bool exclude_holders{false};
    bool replay_reported{false};  // wakes carry the last number reported, not the next
    std::array<std::uint8_t, 3> held{};

    unsigned Holders() const {
        unsigned mask = 0;
        for (unsigned r = 0; exclude_holders && r < 3; ++r) {
            mask |= held[r] > 0 ? 1u << r : 0u;
        }
        return mask;
    }
    std::optional<Wake> OnRequestSent(int r) {
        ++held[static_cast<std::size_t>(r)];
        if (skip_if_running && running) {
            return std::nullopt;
        }
        running = true;
        wave += bump ? 1 : 0;
        return Wake{wave, Holders()};
    }
    void OnFinished(int r) { --held[static_cast<std::size_t>(r)]; }
    std::optional<Wake> OnWaveComplete(std::int64_t w, bool busy) {
        if (w < wave) {
            return std::nullopt;
        }
        wave = replay_reported ? w : w + 1;
        running = false;
        if (!re_arm || !busy) {
            return std::nullopt;
        }
        running = true;
        wave += bump ? 1 : 0;
        return Wake{wave, Holders()};
    }
    std::optional<Wake> OnReported(std::int64_t, bool) { return std::nullopt; }
    std::optional<Wake> OnStartWave(std::int64_t) { return std::nullopt; }
    void Pause() {}
    std::optional<Wake> Resume(bool) { return std::nullopt; }
    std::int64_t Stamp() const { return wave; }
    std::int64_t Least() const { return wave; }
    std::uint64_t Fingerprint(std::int64_t base) const {
        return Mix(static_cast<std::uint64_t>(wave - base) * 2 + (running ? 1 : 0) + 11);
    }
    std::uint64_t RankFingerprint(int r) const {
        return exclude_holders ? Mix(held[static_cast<std::size_t>(r)] + 77u) : 77;
    }
};

}  // namespace rankgate::group
