// SPDX-License-Identifier: Apache-2.0
// The limits that are patched into llama.cpp's template engine (jinja_patch.py): a budget of steps, CPU time,
// live values, bytes and recursion depth, per thread and per render. A chat template comes with the model or
// from an operator, so it is only half trusted: its loops must end, its output must fit, and its recursion
// must not reach the end of the stack. Thread rule: everything here is thread-local. No budget installed =
// the defaults of Budget.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace rankgate::text::jinja_limits {

/// Thrown when a budget is used up. Not a std::exception on purpose: the engine catches those and goes on.
struct LimitExceeded {
    const char* what;
};

/// Thrown by the template's own raise_exception(sentence); likewise not a std::exception, so that nothing is
/// wrapped around it.
struct Raised {
    std::string sentence;
};

struct Budget {
    std::int64_t steps{50'000'000};
    std::int64_t cpu_ns{2'000'000'000};
    std::int64_t bytes{std::int64_t{512} << 20};  // copied in total, not held
    std::int64_t values{1'000'000};               // alive at once; about 250 bytes each
    int depth{600};                               // nested evaluations
};

/// Installs `budget` for this thread until it leaves the scope.
class Scope {
  public:
    explicit Scope(const Budget& budget) noexcept;
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
};

/// One unit of work. Throws LimitExceeded.
void Step();
/// `bytes` are about to be copied. Throws LimitExceeded.
void Charge(std::size_t bytes);
/// A value came to life or died. ValueBorn throws LimitExceeded (the value then never lived).
void ValueBorn();
void ValueDied() noexcept;

/// One level of recursion.
class Depth {
  public:
    Depth();
    ~Depth();
    Depth(const Depth&) = delete;
    Depth& operator=(const Depth&) = delete;
};

}  // namespace rankgate::text::jinja_limits
