// SPDX-License-Identifier: Apache-2.0
// What leader and follower have in common: the board, the one failure, the control connections, the monitor
// thread, the orderly end. Threads: the scheduler's thread is inside one Call at a time (call_mutex_); the
// monitor thread owns the reading side of the control connections once it runs; Fail / Check / Close may come
// from anywhere. Lock order: call_mutex_, fail_mutex_, send_mutex_; state_mutex_ is a leaf.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "relay/control.h"
#include "relay/plane.h"
#include "relay/relay.h"

namespace rankgate::relay {

/// The other end of one control connection.
struct Peer {
    int rank{-1};
    UniqueFd control;
    UniqueFd pidfd;
    MessageParser parser;
    // monitor's view of its liveness
    std::uint32_t last_loop{0};
    std::uint32_t last_process{0};
    Nanos loop_stale{0};
    Nanos process_stale{0};
};

class Session : public std::enable_shared_from_this<Session> {
  public:
    Session(Config config, bool leader);
    virtual ~Session();
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

    const Config& config() const noexcept { return config_; }
    std::optional<Failure> failure() noexcept;
    Status Check() noexcept;
    int failure_fd() const noexcept { return failure_fd_.get(); }
    /// Records a failure so that every rank can read it before this returns (as far as they can be reached).
    /// `here`: do not ask the leader first (monitor thread, or the leader is the one that is lost).
    void Fail(const Failure& failure, bool here = false) noexcept;
    Status SetDigest(std::uint64_t value);
    Result<Wait> Finish(Seconds budget, const InterruptCheck& interrupt);
    std::vector<double> BeatAges() const;
    void Close() noexcept;

  protected:
    friend class Call;

    bool forked() const noexcept { return ForkGeneration() != generation_; }
    Failure ClosedFailure(std::string_view text) const;
    /// The recorded failure; never absent after Stop::kFailed.
    Failure Cause();

    Board& board() noexcept { return *board_.load(std::memory_order_acquire); }
    /// After the board has a failure: tell everybody in this process, and the other processes' monitors.
    void Latch() noexcept;
    void StartMonitor();
    /// Only from the thread that is in Join: nobody else may stop it meanwhile.
    void StopMonitor() noexcept;
    bool monitor_runs() const noexcept { return monitor_.joinable(); }
    /// This process runs: what the monitor says all the time, for the end of rank 0's join, which has none
    /// yet.
    void ShowLife() noexcept;
    void WakeCalls() noexcept;
    bool Send(Peer& peer, std::span<const std::byte> bytes, std::span<const int> fds = {}) noexcept;
    void Broadcast(std::span<const std::byte> bytes) noexcept;
    void DropPeer(Peer& peer) noexcept;
    /// Reads what is there; false at end of file or error. Messages go to OnMessage.
    bool ReadControl(Peer& peer) noexcept;
    bool shared_board() const noexcept { return config_.backend == Backend::kRing; }
    std::uint64_t current_step() const noexcept { return step_.load(std::memory_order_relaxed); }
    Nanos CallSlice() const noexcept;
    /// byes_ once every follower has called Finish.
    std::uint64_t AllByes() const noexcept {
        return ((config_.size == kMaxRanks ? 0 : std::uint64_t{1} << config_.size) - 1) & ~std::uint64_t{1};
    }
    Peer* FindPeer(int rank) noexcept;

    virtual void OnMessage(Peer& peer, const Message& message) noexcept = 0;
    virtual void OnPeerGone(Peer& peer, bool process_gone) noexcept = 0;
    /// Which peers' beats count, and by which rule.
    virtual bool WatchLoop(const Peer& peer) noexcept = 0;
    virtual void WakePlane() noexcept = 0;
    virtual void ClosePlane() noexcept = 0;
    virtual Status AnnounceFinish() = 0;
    /// A follower without a shared board sends its digest to rank 0.
    virtual void SendDigest(std::uint64_t step, std::uint64_t value) noexcept = 0;
    /// Puts a digest onto the board and ends the group if it shows a divergence.
    void TakeDigest(int rank, std::uint64_t step, std::uint64_t value) noexcept;

    Config config_;
    const bool leader_;
    const std::uint64_t generation_{ForkGeneration()};

    std::unique_ptr<Board> own_board_;
    std::unique_ptr<Board> group_board_;  // a follower's view of the leader's board
    std::atomic<Board*> board_{nullptr};

    UniqueFd failure_fd_;
    UniqueFd monitor_wake_;
    UniqueFd bell_;  // shared by all ranks of a ring group: rung at a failure, never silenced

    std::vector<std::unique_ptr<Peer>> peers_;
    std::mutex send_mutex_;

    std::mutex call_mutex_;
    std::atomic<std::thread::id> caller_{};
    std::mutex fail_mutex_;
    std::mutex
        digest_mutex_;  // rank 0 without a shared board: its monitor and its publisher both take digests in
    mutable std::mutex state_mutex_;
    std::condition_variable state_changed_;

    std::atomic<bool> latched_{false};
    std::atomic<bool> joined_{false};
    std::atomic<bool> armed_{false};  // beats count from here on
    std::atomic<bool> closed_{false};
    std::atomic<bool> closed_clean_{
        false};  // closed without a failure: what others record afterwards is not ours to raise
    std::atomic<bool> finished_{false};  // Finish has succeeded
    std::atomic<bool> ended_{false};     // all ranks have called Finish: a closed socket is no death
    std::atomic<std::uint64_t> byes_{0};
    static constexpr std::uint64_t kNoFinalStep = ~std::uint64_t{0};
    std::atomic<std::uint64_t> final_step_{kNoFinalStep};  // known once rank 0 is in Finish
    std::atomic<std::uint64_t> step_{0};                   // last published or read
    std::atomic<double> stall_after_{0};
    std::array<std::atomic<double>, kMaxRanks> process_ages_{};

  private:
    void Monitor();
    void CheckBeats(SteadyTime now) noexcept;
    void SendBeats() noexcept;
    Nanos Tick() const noexcept;
    void RunFailureActions() noexcept;
    void ExitAfter();

    std::thread monitor_;
    std::thread exit_timer_;  // from the first failure on, if Config::exit_after asks for it
    std::atomic<bool> stop_monitor_{false};
    SteadyTime last_beat_check_{};
    Nanos since_sent_{0};
    bool callback_done_{false};
    std::array<std::atomic<double>, kMaxRanks> ages_{};
};

/// One blocking call of the scheduler's thread: who it is, how long it may wait, what ends it.
class Call final : public Waiting {
  public:
    Call(Session& session, const InterruptCheck& interrupt) noexcept;
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    /// Locks the session and checks that the call is possible at all; the Failure to return if not.
    std::optional<Failure> Enter(bool must_be_joined);
    void Until(SteadyTime time) noexcept { until_ = time; }
    void Within(Budget* budget) noexcept { budget_ = budget; }
    /// Ends the wait with kFinished once the stream is over behind this step.
    void EndsAfter(std::uint64_t next_step) noexcept { next_step_ = next_step; }

    Stop Check() override;
    Stop Pause() override;
    Nanos Slice() override;

  private:
    Session& session_;
    const InterruptCheck& interrupt_;
    std::optional<SteadyTime> until_;
    Budget* budget_{nullptr};
    std::uint64_t next_step_{0};
    bool locked_{false};
};

std::shared_ptr<Session> MakeLeaderSession(Config config);
std::shared_ptr<Session> MakeFollowerSession(Config config);

}  // namespace rankgate::relay
