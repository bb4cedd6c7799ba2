// SPDX-License-Identifier: Apache-2.0
#include "relay/turns.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace rankgate::relay {
namespace {

/// The first version of the kernel's struct sched_attr, which not every C library declares.
struct Attributes {
    std::uint32_t size;
    std::uint32_t policy;
    std::uint64_t flags;
    std::int32_t nice;
    std::uint32_t priority;
    std::uint64_t runtime_ns;
    std::uint64_t deadline_ns;
    std::uint64_t period_ns;
};
static_assert(sizeof(Attributes) == 48);

/// An older kernel says 0 for the turn of an ordinary thread.
bool Get(Attributes* attributes) noexcept {
    return ::syscall(SYS_sched_getattr, 0, attributes, sizeof *attributes, 0) == 0 &&
           attributes->policy == SCHED_OTHER && attributes->runtime_ns != 0;
}

bool Set(Attributes attributes, std::uint64_t runtime_ns) noexcept {
    attributes.size = sizeof attributes;
    attributes.runtime_ns = runtime_ns;
    return ::syscall(SYS_sched_setattr, 0, &attributes, 0) == 0;
}

}  // namespace

void ShortTurns::AskKernel() noexcept {
    asked_ = true;
    thread_ = pthread_self();
    before_ns_ = 0;
    Attributes attributes{};
    if (Get(&attributes) && attributes.runtime_ns > static_cast<std::uint64_t>(kTurn.count()) &&
        Set(attributes, static_cast<std::uint64_t>(kTurn.count()))) {
        before_ns_ = attributes.runtime_ns;
    }
}

ShortTurns::~ShortTurns() {
    // Whoever has set another turn or policy since then keeps it.
    Attributes attributes{};
    if (before_ns_ != 0 && pthread_equal(thread_, pthread_self()) != 0 && Get(&attributes) &&
        attributes.runtime_ns == static_cast<std::uint64_t>(kTurn.count())) {
        Set(attributes, before_ns_);
    }
}

}  // namespace rankgate::relay
