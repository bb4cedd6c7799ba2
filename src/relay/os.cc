// SPDX-License-Identifier: Apache-2.0
#include "relay/os.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <mutex>
#include <utility>

namespace rankgate::relay {
namespace {

#ifndef SO_PEERPIDFD
constexpr int kSoPeerPidFd = 77;
#else
constexpr int kSoPeerPidFd = SO_PEERPIDFD;
#endif

constexpr std::size_t kForkTable = 2048;
std::array<std::atomic<int>, kForkTable> g_fork_table;
std::atomic<std::uint64_t> g_fork_generation{0};

// Runs in the child of fork(), where only async-signal-safe calls are allowed: close() and plain stores are.
void InForkedChild() {
    g_fork_generation.fetch_add(1, std::memory_order_relaxed);
    for (std::atomic<int>& entry : g_fork_table) {
        const int stored = entry.exchange(0, std::memory_order_relaxed);
        if (stored != 0) {
            ::close(stored - 1);
        }
    }
}

void InstallForkHandler() {
    static std::once_flag once;
    std::call_once(once, [] { ::pthread_atfork(nullptr, nullptr, &InForkedChild); });
}

}  // namespace

int FutexWait(const std::atomic<std::uint32_t>& word, std::uint32_t seen, Nanos limit) noexcept {
    timespec time{};
    time.tv_sec = static_cast<time_t>(limit.count() / 1'000'000'000);
    time.tv_nsec = static_cast<long>(limit.count() % 1'000'000'000);
    const long rc = ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0);
    if (rc == 0 || errno == EAGAIN) {
        return 0;
    }
    return errno;
}

void FutexWakeAll(const std::atomic<std::uint32_t>& word) noexcept {
    ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

UniqueFd MakeEventFd() noexcept {
    return UniqueFd{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
}

void SignalEventFd(int fd) noexcept {
    const std::uint64_t one = 1;
    // EAGAIN means the counter is full, hence readable already.
    [[maybe_unused]] const ssize_t n = ::write(fd, &one, sizeof one);
}

UniqueFd OpenPidFd(int socket, pid_t pid) noexcept {
    int fd = -1;
    socklen_t length = sizeof fd;
    if (socket >= 0 && ::getsockopt(socket, SOL_SOCKET, kSoPeerPidFd, &fd, &length) == 0 && fd >= 0) {
        ::fcntl(fd, F_SETFD, FD_CLOEXEC);
        return UniqueFd{fd};
    }
    if (pid <= 0) {
        return UniqueFd{};
    }
    return UniqueFd{static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))};
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_{std::exchange(other.data_, nullptr)}, size_{std::exchange(other.size_, 0)} {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
}

Mapping::~Mapping() {
    if (data_ != nullptr) {
        ::munmap(data_, size_);
    }
}

Mapping Mapping::Create(int fd, std::size_t size, bool writable) noexcept {
    const int flags = fd >= 0 ? MAP_SHARED | MAP_POPULATE : MAP_PRIVATE | MAP_ANONYMOUS;
    void* p = ::mmap(nullptr, size, writable ? PROT_READ | PROT_WRITE : PROT_READ, flags, fd, 0);
    Mapping mapping;
    if (p != MAP_FAILED) {
        mapping.data_ = static_cast<std::byte*>(p);
        mapping.size_ = size;
    }
    return mapping;
}

UniqueFd MakeMemFd(const char* name, std::size_t size) noexcept {
    UniqueFd fd{static_cast<int>(::syscall(SYS_memfd_create, name, MFD_CLOEXEC | MFD_ALLOW_SEALING))};
    if (!fd.valid() || ::ftruncate(fd.get(), static_cast<off_t>(size)) != 0 ||
        ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
        return UniqueFd{};
    }
    return fd;
}

void SealWrites(int memfd) noexcept {
#ifdef F_SEAL_FUTURE_WRITE
    ::fcntl(memfd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL);
#else
    static_cast<void>(memfd);
#endif
}

bool SendAll(int socket, std::span<const std::byte> bytes, std::span<const int> fds) noexcept {
    iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int) * kMaxPassedFds)> control{};
    if (!fds.empty()) {
        message.msg_control = control.data();
        message.msg_controllen = CMSG_SPACE(sizeof(int) * fds.size());
        cmsghdr* header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
        std::memcpy(CMSG_DATA(header), fds.data(), sizeof(int) * fds.size());
    }
    for (;;) {
        const ssize_t n = ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        // Control messages are far smaller than any socket buffer: a short write means a peer that has not
        // read for minutes.
        return n == static_cast<ssize_t>(bytes.size());
    }
}

void GuardFromFork(int fd) noexcept {
    InstallForkHandler();
    for (std::atomic<int>& entry : g_fork_table) {
        int empty = 0;
        if (entry.compare_exchange_strong(empty, fd + 1, std::memory_order_relaxed)) {
            return;
        }
    }
}

void UnguardFromFork(int fd) noexcept {
    for (std::atomic<int>& entry : g_fork_table) {
        int stored = fd + 1;
        if (entry.compare_exchange_strong(stored, 0, std::memory_order_relaxed)) {
            return;
        }
    }
}

std::uint64_t ForkGeneration() noexcept {
    InstallForkHandler();
    return g_fork_generation.load(std::memory_order_relaxed);
}

}  // namespace rankgate::relay
