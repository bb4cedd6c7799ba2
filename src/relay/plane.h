// SPDX-License-Identifier: Apache-2.0
// The data plane's seam: two back-ends (ring, stream) behind the same two interfaces, used by leader.cc and
// follower.cc and by the tests. A plane moves slots; who may wait how long, and what ends a wait, is the
// caller's business (Waiting).
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "relay/board.h"
#include "relay/slot.h"

namespace rankgate::relay {

/// Why a wait is over.
enum class Stop : std::uint8_t { kNone, kFailed, kClosed, kInterrupted, kTimeout, kFinished };

/// One blocking call, as the plane sees it.
class Waiting {
  public:
    /// Before every sleep; cheap.
    virtual Stop Check() = 0;
    /// After a sleep that a signal or the clock ended; may run foreign code (signal handlers).
    virtual Stop Pause() = 0;
    /// The longest sleep allowed now.
    virtual Nanos Slice() = 0;

  protected:
    ~Waiting() = default;
};

class LeaderPlane {
  public:
    virtual ~LeaderPlane() = default;
    /// Descriptors that WELCOME passes to this rank (not owned by the caller). May make the rank's
    /// connection.
    virtual std::vector<int> Offer(int rank) = 0;
    /// After Offer's descriptors were sent.
    virtual void Offered(int rank) = 0;
    /// A connection that the follower made itself (TCP).
    virtual void Attach(int rank, UniqueFd fd) = 0;
    virtual bool Ready(int rank) const = 0;
    virtual void Forget(int rank) = 0;

    /// GO: the first slot.
    virtual Stop SendGo(Waiting& waiting, Failure* failure) = 0;
    /// One whole step. kFailed with failure->code set: the plane's own finding, which the caller records;
    /// with kOk: look at the board.
    virtual Stop Send(std::span<const Frame> frames, std::uint64_t step, Waiting& waiting,
                      Failure* failure) = 0;
    /// Makes a sleeping Send look around.
    virtual void Wake() noexcept = 0;
};

class FollowerPlane {
  public:
    virtual ~FollowerPlane() = default;
    enum class Got : std::uint8_t { kStep, kGo, kNothing };
    /// Reads on until a step (or GO) is complete. waiting = nullptr: returns kNothing instead of sleeping.
    virtual Stop Receive(Waiting* waiting, Got* got, Failure* failure) = 0;
    virtual Assembler& assembler() noexcept = 0;
    /// Passes on this rank's digest in order with the acks; nothing to do where the board is shared.
    virtual void SendDigest(std::uint64_t step, std::uint64_t value) noexcept = 0;
    virtual void Wake() noexcept = 0;
};

std::unique_ptr<LeaderPlane> MakeRingLeader(const Config& config, Board& board);
/// `slots` is the memfd from WELCOME. nullptr and *failure if it is not what it should be.
std::unique_ptr<FollowerPlane> MakeRingFollower(const Config& config, Board& board, UniqueFd slots,
                                                std::uint64_t ring_slots, Failure* failure);
/// A follower's digest, read from its data connection inside Send. Because acks and digests come in order,
/// rank 0 can never be so far ahead that a digest's place on the board has been taken by a later step.
using DigestSink = std::function<void(int rank, std::uint64_t step, std::uint64_t value)>;
std::unique_ptr<LeaderPlane> MakeStreamLeader(const Config& config, Board& board, DigestSink on_digest);
std::unique_ptr<FollowerPlane> MakeStreamFollower(const Config& config, Board& board, UniqueFd data);

/// Busy-wait time before a sleep: none where ranks must share CPUs.
Nanos SpinTime(const Config& config) noexcept;
/// publish_stalled, naming the slowest reader.
Failure StalledReader(const Config& config, Board& board, std::uint64_t step);

}  // namespace rankgate::relay
