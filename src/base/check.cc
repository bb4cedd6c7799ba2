// SPDX-License-Identifier: Apache-2.0
#include "base/check.h"

#include <cstdio>
#include <cstdlib>

#include "base/log.h"

namespace rankgate {
namespace {
std::atomic<std::uint64_t> bug_count{0};
}

void CheckFailed(const char* file, int line, const char* expression) noexcept {
    // stderr directly: the logger may be what is broken.
    std::fprintf(stderr, "%s:%d: check failed: %s\n", file, line, expression);
    std::fflush(stderr);
    std::abort();
}

void ReportBug(const char* file, int line, const char* expression, std::atomic<bool>& seen) noexcept {
    bug_count.fetch_add(1, std::memory_order_relaxed);
    if (!seen.exchange(true, std::memory_order_relaxed)) {
        LogError("bug", {{"file", file}, {"line", line}, {"what", expression}});
    }
}

std::uint64_t BugCount() noexcept {
    return bug_count.load(std::memory_order_relaxed);
}

}  // namespace rankgate
