// SPDX-License-Identifier: Apache-2.0
// The tensor-parallel relay: rank 0 hands every list of requests to ranks 1..N-1, so that all ranks act on
// the same list in the same step. One step = one list of opaque frames, the empty list included; a step
// arrives whole or not at all, nothing is ever dropped, and the first failure anywhere ends the whole group
// with one recorded cause (fail-stop; restart with a new epoch).
//
//   Leader leader{config};                       Follower follower{config};
//   leader.Join();                               follower.Join();
//   leader.Publish(frames);                      auto step = follower.NextStep(std::nullopt);
//
// Threads: Publish / NextStep belong to one scheduler thread at a time (a mutex enforces it); Fail, Check,
// failure_fd, Close may be called from any thread. Each object runs one monitor thread from the end of Join.
// After fork() the child's copy is inert.
#pragma once

#include <memory>
#include <span>

#include "relay/types.h"

namespace rankgate::relay {

using Frame = std::span<const std::byte>;

/// One received step. Owns its bytes: it may outlive the Follower and never holds up the leader. Movable, no
/// copies.
class Step {
  public:
    Step() = default;
    std::uint64_t number() const noexcept { return number_; }
    std::size_t size() const noexcept { return count_; }
    Frame operator[](std::size_t i) const noexcept;
    std::size_t bytes() const noexcept { return total_ - count_ * sizeof(std::uint64_t); }

  private:
    friend class Assembler;
    std::uint64_t number_{0};
    std::size_t count_{0};
    std::size_t total_{0};
    std::unique_ptr<std::byte[]>
        data_;  // count_ offsets (ends, relative to the first frame), then the frames
};

/// The outcome of a wait that is not a failure of the group.
enum class Wait : std::uint8_t { kReady, kTimeout, kInterrupted };

class Session;

/// What both ends share.
class Endpoint {
  public:
    Endpoint(const Endpoint&) = delete;
    Endpoint& operator=(const Endpoint&) = delete;

    const Config& config() const noexcept;
    /// The recorded failure of the group, if there is one. Cheap: one load when there is none.
    std::optional<Failure> failure() const;
    Status Check() const;
    /// Readable from the moment there is a failure, for ever. Valid from construction to destruction; belongs
    /// to this object.
    int failure_fd() const noexcept;
    /// Ends the group with this cause; the first cause wins. On return every rank on this host can read it.
    void Fail(Code code, std::string_view text);
    /// State hash of the step last published (or read). Needs Config::digest. Diverging ranks end the group
    /// at that step.
    Status SetDigest(std::uint64_t value);
    /// The orderly end, called by every rank: waits until all have called it. Afterwards a closed socket is
    /// no death. Wait::kInterrupted only if `interrupt` said so. A rank that does not come within the budget
    /// ends the group (peer_stalled).
    Result<Wait> Finish(Seconds budget, const InterruptCheck& interrupt = {});
    /// Seconds since each rank's scheduler loop last showed life, by rank; for reports. Only the leader knows
    /// every rank.
    std::vector<double> BeatAges() const;
    /// Releases everything. Without Finish the others see this rank die. Wakes a call that waits in another
    /// thread. Idempotent.
    void Close() noexcept;

  protected:
    explicit Endpoint(std::shared_ptr<Session> session);
    ~Endpoint();
    std::shared_ptr<Session> session_;
};

class Leader : public Endpoint {
  public:
    /// Throws std::invalid_argument for a bad config.
    explicit Leader(Config config);
    ~Leader();
    /// Returns when every rank has received the first frame of the data plane, or with join_timeout and the
    /// missing ranks. nullopt = interrupted; the group is then ended.
    Result<std::optional<JoinReport>> Join(const InterruptCheck& interrupt = {});
    /// Publishes one step; *number is set to its number (from 1). Waits (back-pressure) while a reader is
    /// max_lag_steps behind. kInterrupted: the step was not published, its number will be used again.
    Result<Wait> Publish(std::span<const Frame> frames, std::uint64_t* number,
                         const InterruptCheck& interrupt = {});
};

class Follower : public Endpoint {
  public:
    explicit Follower(Config config);
    ~Follower();
    /// nullopt = interrupted: this rank has left the join and may call again. From GO on its going ends the
    /// group.
    Result<std::optional<JoinReport>> Join(const InterruptCheck& interrupt = {});
    /// The next whole step. timeout = nullopt waits while the leader lives. Once the leader has finished and
    /// every step of its was read: Failure kClosed (not sticky).
    Result<Wait> NextStep(std::optional<Seconds> timeout, Step* step, const InterruptCheck& interrupt = {});
    /// True and *step if a whole step is there; never waits.
    Result<bool> TryNextStep(Step* step);
};

}  // namespace rankgate::relay
