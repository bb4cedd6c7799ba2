// SPDX-License-Identifier: Apache-2.0
// Scheduler: continuous batching for one rank. Plan out, results in; nothing else changes state, no I/O, no
// clock, no threads, so that the same inputs give the same plans on every tensor-parallel rank. Owned and
// called by EngineCore.
//
// Order is (priority, arrival). Running sequences go first, then the queue. Pages are taken as tokens are
// computed; when they run out the last running sequence is preempted (recomputed later, its output kept).
// max_model_len never exceeds the pool, so the first sequence in order can always proceed and nothing can
// deadlock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/result.h"
#include "engine/runner.h"
#include "engine/sequence.h"
#include "wire/generate.h"

namespace rankgate::engine {

inline constexpr std::int32_t kMaxSeqs = 65'536;
inline constexpr std::int32_t kMaxBlockSize = 65'536;
/// More queued requests than this are refused: a runaway client must not fill the host's memory.
inline constexpr std::size_t kMaxQueued = 1'000'000;

struct SchedulerConfig {
    std::int64_t max_model_len{8192};
    std::int32_t max_num_seqs{256};
    std::int32_t max_num_batched_tokens{8192};
    std::int32_t block_size{16};
    std::int64_t num_gpu_blocks{0};  // usable pages; 0 = max_num_seqs full sequences
    /// TokenSpeed tests the length before the stop ids, vLLM after.
    bool length_before_stop{false};

    /// Fills num_gpu_blocks, lowers max_model_len to what the pool holds, refuses nonsense naming the field.
    Status Normalise();
    std::int64_t PagesFor(std::int64_t tokens) const noexcept {
        return (tokens + block_size - 1) / block_size;
    }
};

/// One request's news of a step. `sequence` stays valid until the next Plan(), finished or not.
struct Row {
    Sequence* sequence{nullptr};
};

/// Deltas since the last TakePrefixStats (vLLM reports deltas).
struct PrefixStats {
    std::int64_t requests{0};
    std::int64_t queries{0};
    std::int64_t hits{0};
    std::int64_t preempted_requests{0};
    std::int64_t preempted_queries{0};
    std::int64_t preempted_hits{0};
    bool reset{false};
};

enum class PauseState : std::uint8_t { kRunning, kPausedNew, kPausedAll };

class Scheduler {
  public:
    Scheduler(const SchedulerConfig& config, ModelRunner& runner);
    Scheduler(const Scheduler&) = delete;
    Scheduler& operator=(const Scheduler&) = delete;
    ~Scheduler();

    /// Takes a validated request. Refuses a live id (kConflict), a full queue (kOverloaded) and a prompt that
    /// cannot fit (kContextLength); a refused request leaves no trace and stays with the caller.
    Status Add(std::unique_ptr<Sequence>& sequence);
    /// Ends a request in any state; its pages and slot are free when this returns. The sequence stays
    /// readable until the next Plan(). Null when unknown.
    Sequence* Abort(std::string_view id);
    /// The live request of that id, or null.
    const Sequence* Find(std::string_view id) const noexcept;
    /// Every live request, running ones first, in order.
    std::vector<Sequence*> Live() const;

    /// The next step; empty when there is nothing to run. Valid until the next call.
    const StepPlan& Plan();
    /// Applies a step: tokens, stop rules, finishes. `rows` gets one entry per sequence with a new token or
    /// an end.
    void Advance(const StepResult& result, std::vector<Row>& rows);

    void SetPause(PauseState state) noexcept { pause_ = state; }
    PauseState pause() const noexcept { return pause_; }
    /// Sends every running sequence back to the queue (its output kept).
    void PreemptAll();

    /// After finishes and aborts, always.
    wire::LoadSnapshot Load() const noexcept;
    const PrefixStats& PeekPrefixStats() const noexcept { return prefix_stats_; }
    PrefixStats TakePrefixStats() noexcept;
    bool has_work() const noexcept { return !running_.empty() || !waiting_.empty(); }
    std::size_t num_running() const noexcept { return running_.size(); }
    std::size_t num_waiting() const noexcept { return waiting_.size(); }
    const SchedulerConfig& config() const noexcept { return config_; }
    /// Mixes everything the plans depend on; equal on all tensor-parallel ranks or something diverged.
    std::uint64_t Digest() const noexcept { return digest_; }

  private:
    struct Before {
        bool operator()(const Sequence* a, const Sequence* b) const noexcept {
            return a->request.priority != b->request.priority ? a->request.priority < b->request.priority
                                                              : a->arrival < b->arrival;
        }
    };
    struct IdHash {
        using is_transparent = void;
        std::size_t operator()(std::string_view id) const noexcept {
            return std::hash<std::string_view>{}(id);
        }
    };

    bool Reserve(Sequence& sequence, std::int64_t tokens);
    void Admit(Sequence& sequence);
    void Preempt(Sequence& sequence);
    void Release(Sequence& sequence) noexcept;
    void Retire(Sequence& sequence);
    void ApplyStopRules(Sequence& sequence) const;
    void Mix(std::uint64_t value) noexcept;

    SchedulerConfig config_;
    ModelRunner& runner_;
    std::unordered_map<std::string, std::unique_ptr<Sequence>, IdHash, std::equal_to<>> by_id_;
    std::set<Sequence*, Before> waiting_;
    std::vector<Sequence*> running_;  // kept in (priority, arrival) order
    std::vector<std::int32_t> free_slots_;
    std::vector<std::unique_ptr<Sequence>> retired_;  // readable until the next Plan()
    StepPlan plan_;
    std::int64_t used_pages_{0};
    std::uint64_t next_arrival_{1};
    std::int64_t step_counter_{0};
    PauseState pause_{PauseState::kRunning};
    PrefixStats prefix_stats_;
    std::uint64_t digest_{0x243f6a8885a308d3};
};

}  // namespace rankgate::engine
