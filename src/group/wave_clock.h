// SPDX-License-Identifier: Apache-2.0
// The wave number of a lockstep group as a logical clock that the gateway owns. Ranks of a lockstep group
// park together after a wave and only run again when every one of them is woken by START(number); a rank
// drops a number below its own, and raises its own by one each time it parks. Pure arithmetic, no I/O; used
// by GroupCore<VllmProtocol> and, unchanged, by the model checker.
//
// Why it cannot hang (full argument: docs/decisions/waves.md). Let c be the number of the last wake. A rank
// that took START(c), or dropped it because it was ahead, reports w >= c when it parks. So a report w < c
// proves that START(c) is still on its way to that rank and will be taken; a report w >= c proves that the
// wake is used up, and if anything is in flight the clock wakes again, above w. Hence between two such
// reports no request needs a wake of its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

namespace rankgate::group {

/// Owned by one core, same thread. Every method that returns a number asks for START(number) to EVERY rank,
/// the holder of the request included, after the ADD that caused it.
class WaveClock {
  public:
    /// `initial` must be above any number that ranks which outlived an earlier gateway can hold: wall-clock
    /// microseconds will do.
    explicit WaveClock(std::uint64_t initial = 0) noexcept : clock_{initial} {}

    /// A request was just handed to a rank. A wake is due unless one is known to be still in force.
    std::optional<std::uint64_t> OnRequestSent() noexcept {
        if (paused_ || in_force_) {
            return std::nullopt;
        }
        return Wake();
    }

    /// A rank parked and said so. Each of N ranks reports every wave; only a report that uses up the last
    /// wake counts.
    std::optional<std::uint64_t> OnWaveComplete(std::uint64_t wave, bool in_flight) noexcept {
        Raise(Next(wave));
        if (wave < last_wake_) {
            return std::nullopt;
        }
        in_force_ = false;
        return in_flight && !paused_ ? std::optional{Wake()} : std::nullopt;
    }

    /// A rank mentioned the wave it is in (load reports do). One that is ahead of the last wake has dropped,
    /// or will drop, that wake.
    std::optional<std::uint64_t> OnReported(std::uint64_t wave, bool in_flight) noexcept {
        Raise(wave);
        if (wave <= last_wake_) {
            return std::nullopt;
        }
        in_force_ = false;
        return in_flight && !paused_ ? std::optional{Wake()} : std::nullopt;
    }

    /// A rank started wave `wave` by itself and asks for the others (engine generations that start on an
    /// ADD).
    std::optional<std::uint64_t> OnStartWave(std::uint64_t wave) noexcept {
        Raise(wave);
        return paused_ ? std::nullopt : std::optional{Wake()};
    }

    /// From the moment a pause or sleep is asked for: ranks drop wakes then.
    void Pause() noexcept {
        paused_ = true;
        in_force_ = false;
    }
    /// When every rank has answered the resume.
    std::optional<std::uint64_t> Resume(bool in_flight) noexcept {
        paused_ = false;
        in_force_ = false;
        return in_flight ? std::optional{Wake()} : std::nullopt;
    }

    /// All ranks are new processes or the link to one was lost: nothing is known to be in force.
    void Forget() noexcept {
        in_force_ = false;
        paused_ = false;
    }

    /// Self-healing wake after unexplained silence: jumps far, so that a rank that is ahead by any amount is
    /// passed in a few tries.
    std::optional<std::uint64_t> Nudge() noexcept {
        if (paused_) {
            return std::nullopt;
        }
        clock_ = std::min(clock_ + nudge_step_, kMaxWave);
        nudge_step_ = std::min(nudge_step_ * 16, kMaxNudgeStep);
        return Wake();
    }
    /// The group spoke: the next episode of silence starts with a small jump.
    void NudgeHelped() noexcept { nudge_step_ = kFirstNudgeStep; }

    std::uint64_t now() const noexcept { return clock_; }
    std::uint64_t last_wake() const noexcept { return last_wake_; }
    bool in_force() const noexcept { return in_force_; }
    bool paused() const noexcept { return paused_; }

    /// Numbers stay exact in a double and in int64 on every engine. A report is only believed up to half of
    /// that, so that no broken engine can use up the numbers.
    static constexpr std::uint64_t kMaxWave = std::uint64_t{1} << 53;

  private:
    static constexpr std::uint64_t kMaxReported = kMaxWave / 2;
    static constexpr std::uint64_t kFirstNudgeStep = std::uint64_t{1} << 20;
    static constexpr std::uint64_t kMaxNudgeStep = std::uint64_t{1} << 36;

    static std::uint64_t Next(std::uint64_t wave) noexcept { return wave < kMaxWave ? wave + 1 : wave; }
    void Raise(std::uint64_t wave) noexcept {
        if (wave <= kMaxReported) {
            clock_ = std::max(clock_, wave);
        }
    }
    std::uint64_t Wake() noexcept {
        clock_ = Next(clock_);
        last_wake_ = clock_;
        in_force_ = true;
        return last_wake_;
    }

    std::uint64_t clock_{0};      // no rank is known to hold more
    std::uint64_t last_wake_{0};  // number of the last START sent to all
    std::uint64_t nudge_step_{kFirstNudgeStep};
    bool in_force_{false};  // a START was sent and no rank has reported its end
    bool paused_{false};
};

}  // namespace rankgate::group
