// SPDX-License-Identifier: Apache-2.0
// Vocabulary of the tensor-parallel relay: codes, the one failure record, the configuration. Plain values, no
// threads. Read docs/relay.md first; Leader and Follower are in relay.h. Nothing here depends on zmq, torch
// or gloo.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace rankgate::relay {

using Seconds = std::chrono::duration<double>;

inline constexpr int kMaxRanks = 64;  // one leader, 63 followers; a bit mask of ranks is 64 bits
inline constexpr std::size_t kMaxFrameLimit = std::size_t{1} << 30;  // upper bound of Config::max_frame
inline constexpr std::size_t kMaxFramesPerStep = std::size_t{1} << 20;
inline constexpr std::uint64_t kMaxStepBytes = std::uint64_t{2}
                                               << 30;  // frames and their length table together
inline constexpr int kMaxLagSteps = 4096;

/// Why a group ended, or why one call was refused. The names (CodeName) are part of the Python API.
enum class Code : std::uint8_t {
    kOk,
    kJoinTimeout,     // a rank was missing when the join budget ended
    kPeerDied,        // a follower's process or connection is gone: certain
    kLeaderDied,      // the same for rank 0
    kPeerStalled,     // a rank's beat stood still for stall_after_s (or it never came to finish): a suspicion
                      // made fatal
    kPublishStalled,  // the slowest reader made no progress for publish_stall_s
    kSequenceGap,     // a slot was skipped
    kBadEpoch,        // a rank or slot of another epoch
    kForeignFrame,    // something that is not the next frame of this stream (a replay, random bytes)
    kCorrupt,         // checksum or length of a slot is wrong
    kTooLarge,        // a frame above max_frame; nothing was sent, the stream is intact (not sticky)
    kVersionMismatch,  // other protocol, ABI, group size or step format
    kDuplicateRank,    // this rank is taken by a live process, or a second leader on one address
    kDiverged,         // a rank's digest differs at this step
    kRemoteFailure,    // a rank called Fail(), was interrupted half-way through a step, or lost its launcher
    kClosed,  // this end is closed, or the leader has finished and all its steps were read (not sticky)
};
inline constexpr int kCodeCount = 16;

std::string_view CodeName(Code code) noexcept;
std::optional<Code> CodeFromName(std::string_view name) noexcept;

/// Where in its life the group was. In a join_timeout it is the phase the first missing rank never completed.
enum class Phase : std::uint8_t {
    kNone,
    kDial,
    kHello,
    kWelcome,
    kReady,
    kGo,
    kAck,
    kPublish,
    kRead,
    kRun,
    kDigest,
    kFinish,
    kClose
};
std::string_view PhaseName(Phase phase) noexcept;

/// The first cause. Trivially copyable: it lives in shared memory and travels in FAIL messages.
struct Failure {
    Code code{Code::kOk};
    Phase phase{Phase::kNone};
    std::int16_t origin_rank{-1};  // the rank the failure is about; -1 = nobody in particular
    std::int32_t sys{0};           // errno, if one was involved
    std::uint64_t step{0};         // 0 = not about a step
    std::uint64_t expected{0};     // sequence numbers, epochs or digests, as the code says
    std::uint64_t got{0};
    std::uint64_t missing{0};      // bit r = rank r is missing
    double deadline_s{-1.0};       // the budget that ran out; < 0 = none did
    std::array<char, 448> text{};  // always NUL-terminated

    void SetText(std::string_view what) noexcept;
    std::string_view text_view() const noexcept;
    std::vector<int> MissingRanks() const;
    /// One line for logs: code, rank, phase, step, deadline and the text.
    std::string Describe() const;
};
static_assert(std::is_trivially_copyable_v<Failure>);

/// A value, or the Failure that this call ends with. Of the non-sticky codes (too_large, closed) the group
/// lives on.
template <class T>
class [[nodiscard]] Result {
  public:
    Result(T value)
        : state_{std::in_place_index<0>, std::move(value)} {}  // NOLINT(google-explicit-constructor)
    Result(const Failure& failure)
        : state_{std::in_place_index<1>, failure} {}  // NOLINT(google-explicit-constructor)
    bool ok() const noexcept { return state_.index() == 0; }
    explicit operator bool() const noexcept { return ok(); }
    T& operator*() & { return std::get<0>(state_); }
    T&& operator*() && { return std::get<0>(std::move(state_)); }
    T* operator->() { return &std::get<0>(state_); }
    const Failure& failure() const { return std::get<1>(state_); }

  private:
    std::variant<T, Failure> state_;
};
using Status = Result<std::monostate>;

enum class Backend : std::uint8_t {
    kRing,    // memfd ring and futex; one host
    kStream,  // AF_UNIX stream per follower; one host, no shared memory
    kTcp,     // where = "tcp://host:port"; hosts apart
};
std::string_view BackendName(Backend backend) noexcept;

/// All of a rank's settings. Every rank of a group is given the same ones but for `rank`. Validated once, by
/// the constructor of Leader or Follower (std::invalid_argument names the field) or beforehand by Validate().
struct Config {
    int rank{0};
    int size{1};
    /// A path of our own in a folder that only this user can write to, @name (a socket without a file, for
    /// ranks of one network namespace), or tcp://host:port.
    std::string where;
    /// Names this start of the group. A restarted group takes a new one; late comers of the old one are
    /// refused.
    std::uint64_t epoch{0};
    Backend backend{Backend::kRing};  // a tcp:// address implies kTcp

    Seconds join{30.0};           // one budget for the whole join
    Seconds publish_stall{60.0};  // how long publish waits without progress of the slowest reader
    Seconds stall_after{
        0.0};  // a beat that stands still this long is a failure; 0 = only reported (BeatAges)
    Seconds beat{1.0};
    int max_lag_steps{2};
    std::size_t max_frame{std::size_t{64} << 20};
    bool digest{false};

    /// Called once, from the relay's own thread, when there is a failure: for an engine whose main thread is
    /// inside a device call.
    std::function<void(const Failure&)> on_failure;
    /// If > 0: _exit(70) this long after a failure. For ranks whose main thread cannot be woken.
    Seconds exit_after{0.0};
    /// The read end of a pipe whose write end only the launcher holds: its end of file ends the group
    /// (remote_failure). -1 = none.
    int guard_fd{-1};
    /// A signal for this process when its parent thread dies (PR_SET_PDEATHSIG); 0 = none.
    int parent_death_signal{0};

    bool checksum{true};
    /// How long a waiting rank looks before it sleeps. -1: a follower only around the moment at which it can
    /// foresee the next step (prewake.h). 0: never.
    int spin_us{-1};
    std::size_t ring_slots{256};  // power of two; 4 KiB each

    /// Empty, or "field: what is wrong and what is allowed".
    std::string Validate() const;
};

struct JoinReport {
    double elapsed_s{0.0};
    /// Per rank: seconds from the start of this rank's join until that rank was in. A follower knows only
    /// rank 0 and itself.
    std::vector<std::pair<int, double>> rank_s;
};

/// How a blocking call is broken off from outside (a Python signal handler, a supervisor). Called from the
/// waiting thread on EINTR and at least every 250 ms, never with a lock that the callee could want; true =
/// give up with Interrupted.
using InterruptCheck = std::function<bool()>;

}  // namespace rankgate::relay
