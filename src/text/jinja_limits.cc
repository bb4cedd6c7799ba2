// SPDX-License-Identifier: Apache-2.0
#include "text/jinja_limits.h"

#include <ctime>

namespace rankgate::text::jinja_limits {
namespace {

// How many steps pass between two looks at the clock (a system call).
constexpr std::int64_t kStepsPerClock = 2048;

struct State {
    Budget left;
    std::int64_t until_clock{kStepsPerClock};
    std::int64_t cpu_deadline{0};
    std::int64_t live{0};
    int depth{0};
};
thread_local State state;

std::int64_t ThreadCpuNs() noexcept {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

Scope::Scope(const Budget& budget) noexcept {
    state.left = budget;
    state.until_clock = kStepsPerClock;
    state.cpu_deadline = ThreadCpuNs() + budget.cpu_ns;
    state.depth = 0;
    state.live = 0;
}
Scope::~Scope() {
    state.left = Budget{};
    state.cpu_deadline = 0;
    state.depth = 0;
}

void Step() {
    if (--state.left.steps < 0) {
        throw LimitExceeded{"takes too many steps"};
    }
    if (--state.until_clock <= 0) {
        state.until_clock = kStepsPerClock;
        if (state.cpu_deadline != 0 && ThreadCpuNs() > state.cpu_deadline) {
            state.until_clock = 1;  // whoever swallows this meets it again at the next step
            throw LimitExceeded{"takes too long"};
        }
    }
}

void Charge(std::size_t bytes) {
    state.left.bytes -=
        static_cast<std::int64_t>(bytes > (std::size_t{1} << 40) ? std::size_t{1} << 40 : bytes);
    if (state.left.bytes < 0) {
        throw LimitExceeded{"produces too much text"};
    }
}

void ValueBorn() {
    Step();
    if (state.live >= state.left.values) {
        throw LimitExceeded{"holds too many values"};
    }
    ++state.live;
}
void ValueDied() noexcept {
    --state.live;
}

Depth::Depth() {
    if (state.depth >= state.left.depth) {
        throw LimitExceeded{"recurses too deeply"};
    }
    ++state.depth;
}
Depth::~Depth() {
    --state.depth;
}

}  // namespace rankgate::text::jinja_limits
