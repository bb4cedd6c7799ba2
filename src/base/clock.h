// SPDX-License-Identifier: Apache-2.0
// The injected time source: state machines take a Clock&, tests own a FakeClock, nobody sleeps in a unit
// test.
#pragma once

#include <chrono>

namespace rankgate {

using Duration = std::chrono::nanoseconds;
using TimePoint = std::chrono::time_point<std::chrono::steady_clock, Duration>;

class Clock {
  public:
    virtual ~Clock() = default;
    virtual TimePoint Now() const noexcept = 0;
};

class SteadyClock final : public Clock {
  public:
    TimePoint Now() const noexcept override { return std::chrono::steady_clock::now(); }
};

class FakeClock final : public Clock {
  public:
    TimePoint Now() const noexcept override { return now_; }
    void Advance(Duration by) noexcept { now_ += by; }

  private:
    TimePoint now_{};
};

}  // namespace rankgate
