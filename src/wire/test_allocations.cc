// SPDX-License-Identifier: Apache-2.0
// Counts the allocations of the test program, for tests that promise none. In a file of its own: next to the
// calls a compiler sees malloc and operator delete meet and warns.
#include <atomic>
#include <cstdlib>
#include <new>

#include "wire/test_vectors.h"

namespace {
std::atomic<std::uint64_t> g_allocations{0};
}  // namespace

std::uint64_t rankgate::wire::test::AllocationCount() noexcept {
    return g_allocations.load();
}

void* operator new(std::size_t size) {
    g_allocations.fetch_add(1, std::memory_order_relaxed);
    if (void* memory = std::malloc(size)) {
        return memory;
    }
    throw std::bad_alloc{};
}
void operator delete(void* memory) noexcept {
    std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
    std::free(memory);
}
