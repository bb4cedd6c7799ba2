// SPDX-License-Identifier: Apache-2.0
// Counts allocations for the tests of the token path. In a file of its own, so that the compiler does not see
// the pairs of new and delete together and take them for mistakes.
#include <cstddef>
#include <cstdlib>
#include <new>

namespace rankgate::api::test {
namespace {

thread_local std::size_t allocations = 0;

}  // namespace

std::size_t Allocations() noexcept;
std::size_t Allocations() noexcept {
    return allocations;
}
void CountAllocation() noexcept;
void CountAllocation() noexcept {
    ++allocations;
}

}  // namespace rankgate::api::test

void* operator new(std::size_t size) {
    rankgate::api::test::CountAllocation();
    if (void* memory = std::malloc(size == 0 ? 1 : size)) {
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
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
    rankgate::api::test::CountAllocation();
    return std::malloc(size == 0 ? 1 : size);
}
void operator delete(void* memory, const std::nothrow_t&) noexcept {
    std::free(memory);
}
