// SPDX-License-Identifier: Apache-2.0
// What a follower asks of the ordinary scheduler. A thread that wakes for a moment and sleeps again should
// have short turns: then it takes the CPU from a busy process when its step comes (Linux 6.12 and newer let a
// short turn go before a long one) instead of waiting up to a clock tick, 4 ms, and each look that it gives
// away costs it a short turn instead of a long one. Its share of the CPU stays what it was. Used by the
// ring's follower on the thread that waits.
#pragma once

#include <pthread.h>

#include <chrono>
#include <cstdint>

#include "relay/budget.h"

namespace rankgate::relay {

/// One thread's request. Does nothing for a thread under another policy than SCHED_OTHER, on an older kernel,
/// or where the call is not allowed.
class ShortTurns {
  public:
    /// The shortest that the kernel grants.
    static constexpr Nanos kTurn = std::chrono::microseconds{100};

    ShortTurns() = default;
    ShortTurns(const ShortTurns&) = delete;
    ShortTurns& operator=(const ShortTurns&) = delete;
    /// The calling thread gets back what it had, if it is the one that asked last.
    ~ShortTurns();

    /// For the calling thread. Cheap when it has asked before.
    void Ask() noexcept {
        if (!asked_ || pthread_equal(thread_, pthread_self()) == 0) {
            AskKernel();
        }
    }

  private:
    void AskKernel() noexcept;

    bool asked_{false};
    pthread_t thread_{};
    std::uint64_t before_ns_{0};  // 0 = nothing was changed
};

}  // namespace rankgate::relay
