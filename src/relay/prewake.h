// SPDX-License-Identifier: Apache-2.0
// When a follower should be awake before its step comes. Waking an idle CPU takes longer than the hand-over
// itself (25 us on a virtual machine, most of a step's latency), so a follower that can foresee the next step
// sleeps until shortly before it and then looks at the slot for a bounded time. Only what is foreseeable is
// waited for awake: an idle or irregular leader finds its followers asleep. Used by the followers' planes;
// one thread; all times are passed in.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "relay/budget.h"

namespace rankgate::relay {

class PreWake {
  public:
    /// The last gaps between steps that are judged. The shortest and the longest of them do not count.
    static constexpr std::size_t kGaps = 7;
    /// Steps this close follow each other while one is looking: no sleep in between.
    static constexpr Nanos kShortGap = std::chrono::microseconds{200};
    /// A longer gap is a pause: neither foreseen nor counted.
    static constexpr Nanos kLongestGap = std::chrono::milliseconds{100};
    /// Gaps that differ by more than a quarter, or by more than this, are irregular.
    static constexpr Nanos kWidest = std::chrono::microseconds{400};
    static constexpr Nanos kNarrow = std::chrono::microseconds{100};
    /// Awake before the earliest moment by at least this: the timer slack of an ordinary thread (50 us) and
    /// the waking of a CPU. By more, up to kMostEarly and a quarter of the gap, if one of the last kSleeps
    /// sleeps would have needed it: a virtual CPU that halted takes 20 to 300 us to wake, and a leader is
    /// sometimes early. Who would have needed twice kMostEarly waited for somebody's turn on the CPU, which
    /// waking earlier does not help.
    static constexpr Nanos kEarly = std::chrono::microseconds{90};
    static constexpr Nanos kMostEarly = std::chrono::microseconds{300};
    static constexpr Nanos kMargin = std::chrono::microseconds{20};
    static constexpr std::size_t kSleeps = 64;
    /// Still awake after the latest moment. Costs nothing when the step comes.
    static constexpr Nanos kLate = std::chrono::microseconds{200};
    /// A sleep shorter than this is not worth its wake-up.
    static constexpr Nanos kShortestSleep = std::chrono::microseconds{60};
    /// Looking in vain may take this much at once, and 1 / kWasteShare of the time in the long run.
    static constexpr Nanos kMostWaste = std::chrono::milliseconds{1};
    static constexpr int kWasteShare = 32;
    /// A thread that yields and is away from its CPU for longer than this was kept from it. Once in a while
    /// that is the kernel's own work; again within so many windows, somebody else wants this CPU, and whoever
    /// looks instead of sleeping falls behind in its queue. No looking for a while then, twice as long each
    /// time that it happens again.
    static constexpr Nanos kLongestAbsence = std::chrono::microseconds{250};
    static constexpr std::uint64_t kAbsenceWithin = 8;
    static constexpr Nanos kFirstRest = std::chrono::milliseconds{50};
    static constexpr Nanos kLongestRest = std::chrono::seconds{10};
    /// Upper bound of one window, hence of how long a follower looks without a sleep.
    static constexpr Nanos kLongestLook = kWidest + kMostEarly + kLate + kShortestSleep;

    /// Sleep until `from`, look until `until`. Empty: sleep until woken.
    struct Window {
        SteadyTime from{};
        SteadyTime until{};
        bool empty() const noexcept { return from >= until; }
    };

    /// `rest_until`: what all followers of this host know about rests; borrowed.
    explicit PreWake(std::atomic<std::int64_t>& rest_until) noexcept : rest_until_{rest_until} {}

    /// A step has come that was sent at `sent`, by this host's clock; a time that cannot be is not believed.
    void Arrived(SteadyTime sent, SteadyTime now) noexcept;
    /// The sleep until `due`, which Next had asked for, has ended: by the clock or by a step.
    void Slept(SteadyTime due, SteadyTime now) noexcept;
    /// A look of this length that ended without a step.
    void Missed(Nanos looked, SteadyTime now) noexcept;
    /// The thread was kept from its CPU while it looked.
    void Displaced(SteadyTime now) noexcept;
    /// Where the next step is expected, seen from now.
    Window Next(SteadyTime now) noexcept;

  private:
    void PayOff(SteadyTime now) noexcept;
    Nanos Early(Nanos shortest) const noexcept;

    std::array<Nanos, kGaps> gaps_{};
    std::size_t count_{0};
    bool started_{false};
    SteadyTime last_{};
    SteadyTime expected_{};  // the earliest moment of the last window
    bool slept_{false};      // for this step, until shortly before that moment
    Nanos late_{0};          // of the last sleep that the clock ended
    std::array<Nanos, kSleeps> needed_{};
    std::size_t sleeps_{0};
    Nanos wasted_{0};  // not yet made up for by time
    SteadyTime paid_{};
    std::uint64_t windows_{0};
    std::uint64_t absent_at_{0};             // one more than windows_ at the last absence; 0 = never
    std::atomic<std::int64_t>& rest_until_;  // nanoseconds of the steady clock
    Nanos rest_{kFirstRest};
};

}  // namespace rankgate::relay
