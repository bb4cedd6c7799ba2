// SPDX-License-Identifier: Apache-2.0
// Hashed timer wheel for connection deadlines: arming, moving and disarming are O(1) and allocate nothing,
// whatever the number of connections. Coarse on purpose (one slot per tick). Shard-confined; entries are
// embedded in their owners, who disarm before they die.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/check.h"
#include "base/clock.h"

namespace rankgate::http {

class TimerWheel;

/// The link inside an owner. Circular doubly linked list per slot.
struct WheelEntry {
    WheelEntry* next{nullptr};
    WheelEntry* previous{nullptr};
    TimePoint deadline{};

    bool armed() const noexcept { return next != nullptr; }
};

class TimerWheel {
  public:
    static constexpr Duration kTick = std::chrono::milliseconds{100};
    static constexpr std::size_t kSlots = 1024;  // one turn is 102 s; longer deadlines go round again

    explicit TimerWheel(TimePoint now) : current_{Index(now)} {
        for (WheelEntry& head : slots_) {
            head.next = head.previous = &head;
        }
    }
    TimerWheel(const TimerWheel&) = delete;
    TimerWheel& operator=(const TimerWheel&) = delete;

    void Arm(WheelEntry& entry, TimePoint deadline) noexcept {
        Disarm(entry);
        entry.deadline = deadline;
        // Rounded up, so that nothing fires early; at least the next tick.
        std::int64_t index = Index(deadline) + 1;
        if (index <= current_) {
            index = current_ + 1;
        }
        WheelEntry& head = slots_[static_cast<std::size_t>(index) % kSlots];
        entry.previous = head.previous;
        entry.next = &head;
        head.previous->next = &entry;
        head.previous = &entry;
    }

    void Disarm(WheelEntry& entry) noexcept {
        if (entry.armed()) {
            entry.previous->next = entry.next;
            entry.next->previous = entry.previous;
            entry.next = entry.previous = nullptr;
        }
    }

    /// Calls `expired(entry)` for each entry whose deadline has passed, disarmed already. The callback may
    /// arm and disarm any entry.
    template <class F>
    void Advance(TimePoint now, F&& expired) {
        const std::int64_t target = Index(now);
        // A loop that slept through more than one turn needs to see each slot once only.
        std::int64_t steps = target - current_;
        if (steps > static_cast<std::int64_t>(kSlots)) {
            current_ = target - static_cast<std::int64_t>(kSlots);
            steps = static_cast<std::int64_t>(kSlots);
        }
        for (; steps > 0; --steps) {
            ++current_;
            WheelEntry& head = slots_[static_cast<std::size_t>(current_) % kSlots];
            // Take the slot's list over first: what a callback arms into this slot belongs to the next turn.
            WheelEntry batch;
            if (head.next == &head) {
                continue;
            }
            batch.next = head.next;
            batch.previous = head.previous;
            batch.next->previous = &batch;
            batch.previous->next = &batch;
            head.next = head.previous = &head;
            while (batch.next != &batch) {
                WheelEntry& entry = *batch.next;
                const TimePoint deadline = entry.deadline;
                Disarm(entry);
                if (deadline <= now) {
                    expired(entry);
                } else {
                    Arm(entry, deadline);
                }
            }
        }
    }

  private:
    static std::int64_t Index(TimePoint time) noexcept { return time.time_since_epoch() / kTick; }

    std::array<WheelEntry, kSlots> slots_;
    std::int64_t current_;
};

}  // namespace rankgate::http
