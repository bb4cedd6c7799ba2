// SPDX-License-Identifier: Apache-2.0
#include "relay/prewake.h"

#include <algorithm>

namespace rankgate::relay {

void PreWake::Arrived(SteadyTime sent, SteadyTime now) noexcept {
    // Not the arrival: a follower that was late once would expect the next step late, and be late for ever.
    const SteadyTime at = sent <= now && sent >= now - kLongestGap ? sent : now;
    if (slept_) {
        slept_ = false;
        const Nanos needed = late_ + (expected_ - at);
        if (needed < 2 * kMostEarly) {
            needed_[sleeps_++ % kSleeps] = needed;
        }
    }
    const Nanos gap = at - last_;
    if (started_ && gap <= kLongestGap) {
        gaps_[count_++ % kGaps] = std::max(gap, Nanos{0});
    }
    started_ = true;
    last_ = at;
}

void PreWake::Slept(SteadyTime due, SteadyTime now) noexcept {
    slept_ = true;
    if (now >= due) {
        late_ = now - due;
    }
}

Nanos PreWake::Early(Nanos shortest) const noexcept {
    const Nanos needed = *std::max_element(needed_.begin(), needed_.end()) + kMargin;
    return std::max(kEarly, std::min({needed, kMostEarly, shortest / 4}));
}

void PreWake::PayOff(SteadyTime now) noexcept {
    wasted_ -= std::min(wasted_, std::max(now - paid_, Nanos{0}) / kWasteShare);
    paid_ = now;
}

void PreWake::Missed(Nanos looked, SteadyTime now) noexcept {
    PayOff(now);
    wasted_ += std::max(looked, Nanos{0});
}

void PreWake::Displaced(SteadyTime now) noexcept {
    const bool again = absent_at_ != 0 && windows_ + 1 - absent_at_ < kAbsenceWithin;
    absent_at_ = windows_ + 1;
    if (!again) {
        return;
    }
    const Nanos at = now.time_since_epoch();
    const Nanos until{rest_until_.load(std::memory_order_relaxed)};
    if (at < until) {
        return;  // another follower has said so already
    }
    // As much time without as the last rest took, and it is the first time again.
    rest_ = at - until > rest_ ? kFirstRest : std::min(rest_ * 2, kLongestRest);
    rest_until_.store((at + rest_).count(), std::memory_order_relaxed);
}

PreWake::Window PreWake::Next(SteadyTime now) noexcept {
    if (count_ < kGaps || now.time_since_epoch().count() < rest_until_.load(std::memory_order_relaxed)) {
        return {};
    }
    std::array<Nanos, kGaps> sorted = gaps_;
    std::sort(sorted.begin(), sorted.end());
    const Nanos shortest = sorted[1];
    const Nanos longest = sorted[kGaps - 2];
    if (longest > kShortGap && longest - shortest > std::min(kWidest, std::max(kNarrow, longest / 4))) {
        return {};
    }
    PayOff(now);
    if (wasted_ >= kMostWaste) {
        return {};
    }
    expected_ = last_ + shortest;
    Window window{expected_ - Early(shortest), last_ + longest + kLate};
    if (window.until <= now) {
        return {};
    }
    if (window.from < now + kShortestSleep) {
        window.from = now;
    }
    ++windows_;
    return window;
}

}  // namespace rankgate::relay
