// SPDX-License-Identifier: Apache-2.0
// A budget of waiting time that a frozen machine does not spend: it is charged in slices and at most kClamp
// per slice, so a process that was stopped (SIGSTOP, cgroup freezer, suspended VM) does not blame its peers
// when it wakes up. One thread.
#pragma once

#include <algorithm>
#include <chrono>

#include "relay/types.h"

namespace rankgate::relay {

using SteadyTime = std::chrono::steady_clock::time_point;
using Nanos = std::chrono::nanoseconds;
inline SteadyTime Now() noexcept {
    return std::chrono::steady_clock::now();
}
inline Nanos ToNanos(Seconds s) noexcept {
    return std::chrono::duration_cast<Nanos>(s);
}

class Budget {
  public:
    static constexpr Nanos kSlice = std::chrono::milliseconds{50};
    static constexpr Nanos kClamp = std::chrono::milliseconds{100};

    explicit Budget(Seconds total, SteadyTime now = Now()) noexcept : total_{ToNanos(total)}, last_{now} {}

    /// Charges the time since the last call; true when the budget is used up.
    bool Spend(SteadyTime now = Now()) noexcept {
        used_ += std::min(std::max(now - last_, Nanos{0}), kClamp);
        last_ = now;
        return used_ >= total_;
    }
    void Restart(SteadyTime now = Now()) noexcept {
        used_ = Nanos{0};
        last_ = now;
    }
    /// Makes it last at least `more` from here.
    void ExtendTo(Seconds more) noexcept { total_ = std::max(total_, used_ + ToNanos(more)); }
    Nanos left() const noexcept { return std::max(total_ - used_, Nanos{0}); }
    Nanos slice() const noexcept { return std::min(kSlice, left()); }
    double total_s() const noexcept { return Seconds{total_}.count(); }

  private:
    Nanos total_;
    Nanos used_{0};
    SteadyTime last_;
};

}  // namespace rankgate::relay
