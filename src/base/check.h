// SPDX-License-Identifier: Apache-2.0
// Invariants. RG_CHECK always aborts, RG_DCHECK only in debug builds, RG_BUG logs once per site, counts, and
// goes on. None of them may be reachable from input: input errors are Results.
#pragma once

#include <atomic>
#include <cstdint>

namespace rankgate {

[[noreturn]] void CheckFailed(const char* file, int line, const char* expression) noexcept;
/// Logs `expression` the first time this site is hit and adds one to BugCount().
void ReportBug(const char* file, int line, const char* expression, std::atomic<bool>& seen) noexcept;
/// How many RG_BUG sites were hit since start, repeats included (metric rankgate_bugs_total).
std::uint64_t BugCount() noexcept;

}  // namespace rankgate

#define RG_CHECK(condition) \
    (static_cast<bool>(condition) ? void(0) : ::rankgate::CheckFailed(__FILE__, __LINE__, #condition))
#ifdef NDEBUG
#define RG_DCHECK(condition) void(0)
#else
#define RG_DCHECK(condition) RG_CHECK(condition)
#endif
#define RG_BUG(text)                                                  \
    do {                                                              \
        static std::atomic<bool> rg_bug_seen{false};                  \
        ::rankgate::ReportBug(__FILE__, __LINE__, text, rg_bug_seen); \
    } while (false)
