// SPDX-License-Identifier: Apache-2.0
// The few system calls the relay is made of: shared futexes, eventfds, memfd mappings, descriptor passing,
// pidfds, and the table of descriptors that a forked child must not keep open (a copy in a child would hide
// this process's death from its peers).
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/unique_fd.h"
#include "relay/budget.h"

namespace rankgate::relay {

/// Sleeps while *word == seen, at most `limit`. Returns 0 (woken or changed), ETIMEDOUT or EINTR.
int FutexWait(const std::atomic<std::uint32_t>& word, std::uint32_t seen, Nanos limit) noexcept;
void FutexWakeAll(const std::atomic<std::uint32_t>& word) noexcept;

UniqueFd MakeEventFd() noexcept;
void SignalEventFd(int fd) noexcept;
/// -1 where the kernel or the pid namespace does not allow it.
UniqueFd OpenPidFd(int socket, pid_t pid) noexcept;

/// One mapping; unmapped by the destructor.
class Mapping {
  public:
    Mapping() = default;
    Mapping(Mapping&& other) noexcept;
    Mapping& operator=(Mapping&& other) noexcept;
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    ~Mapping();
    /// fd = -1: private memory of this process. An empty mapping on error (errno is set).
    static Mapping Create(int fd, std::size_t size, bool writable) noexcept;
    std::byte* data() const noexcept { return data_; }
    std::size_t size() const noexcept { return size_; }
    explicit operator bool() const noexcept { return data_ != nullptr; }

  private:
    std::byte* data_{nullptr};
    std::size_t size_{0};
};

/// A memfd of this size that can no longer change it.
UniqueFd MakeMemFd(const char* name, std::size_t size) noexcept;
/// After this no new writable mapping of it can be made (existing ones stay).
void SealWrites(int memfd) noexcept;

inline constexpr std::size_t kMaxPassedFds = 4;
/// Sends all of `bytes` on a non-blocking socket or nothing at all counts: returns false on error or when the
/// socket is full.
bool SendAll(int socket, std::span<const std::byte> bytes, std::span<const int> fds = {}) noexcept;

/// Closed in every child of fork(); see os.cc. A full table only costs prompt death detection in programs
/// that fork.
void GuardFromFork(int fd) noexcept;
void UnguardFromFork(int fd) noexcept;
/// Grows by one in every forked child: an object that remembers another value belongs to the parent.
std::uint64_t ForkGeneration() noexcept;

}  // namespace rankgate::relay
