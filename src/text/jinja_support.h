// SPDX-License-Identifier: Apache-2.0
// What is patched into llama.cpp's template engine (jinja_patch.py). Limits: a budget of steps, CPU time,
// live values, bytes and recursion depth, per thread and per render. A chat template comes with the model or
// from an operator, so it is only half trusted: its loops must end, its output must fit, and its recursion
// must not reach the end of the stack. Thread rule: everything here is thread-local. No budget installed =
// the defaults of Budget.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace rankgate::text::jinja_support {

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
    std::int64_t bytes{std::int64_t{256} << 20};  // copied in total, not held
    std::int64_t values{1'000'000};               // alive at once; about 250 bytes each
    int depth{600};                               // nested evaluations
};

/// Installs `budget` for this thread until it leaves the scope. With `collect`, values made inside and still
/// alive at its end can only be holding each other in a circle (a list that contains itself): they are let go
/// of.
class Scope {
  public:
    Scope(const Budget& budget, bool collect) noexcept;
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
};

/// One unit of work. Throws LimitExceeded.
void Step();
/// `bytes` are about to be copied. Throws LimitExceeded.
void Charge(std::size_t bytes);
/// `bytes` are read or copied for a moment: brings the next look at the clock nearer. Never throws.
void Work(std::size_t bytes) noexcept;

/// What every value of the engine is: counted while it lives, and known to the Scope it was made in.
class Tracked {
  public:
    /// Throws LimitExceeded when there are too many (the value then never lived).
    Tracked();
    virtual ~Tracked();
    Tracked(const Tracked&) = delete;
    Tracked& operator=(const Tracked&) = delete;
    /// Lets go of all values this one holds; may delete this one.
    virtual void DropChildren() noexcept = 0;

  private:
    friend class Scope;
    void Unlink() noexcept;
    Tracked* previous_{nullptr};
    Tracked* next_{nullptr};
    bool linked_{false};
};

/// One level of recursion.
class Depth {
  public:
    Depth();
    ~Depth();
    Depth(const Depth&) = delete;
    Depth& operator=(const Depth&) = delete;
};

/// Python's repr of a float (shortest digits that read back), and of a string ('...' with escapes).
std::string FloatRepr(double value);
std::string StringRepr(std::string_view text);
/// str.strip() without an argument: Unicode white space at the ends.
std::string Strip(std::string_view text, bool left, bool right);
/// str.split() without an argument.
std::vector<std::string> SplitWhitespace(std::string_view text, std::int64_t max_splits);
/// The code points of a text, each as its own UTF-8 string; an invalid byte stands for itself.
std::vector<std::string> CodePoints(std::string_view text);
std::size_t CountCodePoints(std::string_view text) noexcept;
/// Appends a code point (surrogates and beyond: U+FFFD).
void AppendUtf8(std::string& out, std::uint32_t code_point);
/// Whether Python has a method of this name on a dict, list or str; the engine's own filters must not hide
/// keys of that name.
bool IsDictMethod(std::string_view name) noexcept;
bool IsListMethod(std::string_view name) noexcept;
bool IsStrMethod(std::string_view name) noexcept;

}  // namespace rankgate::text::jinja_support
