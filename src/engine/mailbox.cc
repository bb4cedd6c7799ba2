// SPDX-License-Identifier: Apache-2.0
#include "engine/mailbox.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <random>

#include "base/unique_fd.h"

namespace rankgate::engine {

namespace {

constexpr std::uint64_t kMagic = 0x0031'4441'4f4c'4752ULL;  // "RGLOAD1\0" read as little-endian
constexpr int kReadTries = 64;

std::int64_t MonotonicNs() noexcept {
    timespec now{};
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

Error Failed(const std::string& what, const std::string& path) {
    return Error{ErrorCode::kUnavailable, what + " " + path + ": " + std::strerror(errno), {}, false};
}

}  // namespace

/// Every field is an atomic word, so that a reader racing the writer is defined behaviour; the sequence makes
/// it consistent.
struct LoadPage {
    std::atomic<std::uint64_t> magic;
    std::atomic<std::uint64_t> version;
    std::atomic<std::uint64_t> epoch;
    std::atomic<std::uint64_t> pid;
    std::atomic<std::uint64_t> sequence;
    std::atomic<std::uint64_t> num_running;
    std::atomic<std::uint64_t> num_waiting;
    std::atomic<std::uint64_t> kv_active_pages;
    std::atomic<std::uint64_t> kv_total_pages;
    std::atomic<std::uint64_t> step_counter;
    std::atomic<std::uint64_t> stamp_ns;
    std::atomic<std::uint64_t> closed;
};
static_assert(sizeof(LoadPage) == 96 && std::atomic<std::uint64_t>::is_always_lock_free);

LoadPageWriter::~LoadPageWriter() {
    if (page_ != nullptr) {
        page_->closed.store(1, std::memory_order_release);
        ::munmap(page_, kLoadPageSize);
        ::unlink(path_.c_str());
    }
}

Status LoadPageWriter::Open(const std::string& directory, const std::string& name) {
    if (page_ != nullptr) {
        return Error{ErrorCode::kConflict, "the load page is open already", {}, false};
    }
    if (::mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) {
        return Failed("mkdir", directory);
    }
    struct stat info {};
    if (::lstat(directory.c_str(), &info) != 0) {
        return Failed("stat", directory);
    }
    if (!S_ISDIR(info.st_mode) || info.st_uid != ::geteuid() || (info.st_mode & 0077) != 0) {
        return Error{
            ErrorCode::kForbidden, directory + " is not a directory of ours with mode 0700", {}, false};
    }
    path_ = directory + "/" + name;
    // A fresh inode each time: a reader of the old one must not see a new writer's numbers under the old
    // epoch.
    ::unlink(path_.c_str());
    const UniqueFd fd{::open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600)};
    if (!fd.valid()) {
        return Failed("create", path_);
    }
    if (::ftruncate(fd.get(), static_cast<off_t>(kLoadPageSize)) != 0) {
        return Failed("size", path_);
    }
    void* memory = ::mmap(nullptr, kLoadPageSize, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    if (memory == MAP_FAILED) {
        return Failed("map", path_);
    }
    page_ = static_cast<LoadPage*>(memory);
    std::random_device random;
    const std::uint64_t epoch = (std::uint64_t{random()} << 32) | random();
    page_->version.store(kLoadPageVersion, std::memory_order_relaxed);
    page_->epoch.store(epoch, std::memory_order_relaxed);
    page_->pid.store(static_cast<std::uint64_t>(::getpid()), std::memory_order_relaxed);
    page_->magic.store(kMagic, std::memory_order_release);
    return Status::Ok();
}

void LoadPageWriter::Publish(const wire::LoadSnapshot& load) noexcept {
    if (page_ == nullptr) {
        return;
    }
    const auto word = [](std::int64_t value) { return static_cast<std::uint64_t>(value); };
    const std::uint64_t sequence = page_->sequence.load(std::memory_order_relaxed);
    page_->sequence.store(sequence + 1, std::memory_order_relaxed);
    // Each field is stored with release, so none of them can be seen without the odd sequence before it
    // (Boehm, "Can seqlocks get along with programming language memory models?"); on x86 that is free.
    page_->num_running.store(word(load.num_running), std::memory_order_release);
    page_->num_waiting.store(word(load.num_waiting), std::memory_order_release);
    page_->kv_active_pages.store(word(load.kv_active_pages), std::memory_order_release);
    page_->kv_total_pages.store(word(load.kv_total_pages), std::memory_order_release);
    page_->step_counter.store(word(load.step_counter), std::memory_order_release);
    page_->stamp_ns.store(word(MonotonicNs()), std::memory_order_release);
    page_->sequence.store(sequence + 2, std::memory_order_release);
}

LoadPageReader::~LoadPageReader() {
    Close();
}

void LoadPageReader::Close() noexcept {
    if (page_ != nullptr) {
        ::munmap(const_cast<LoadPage*>(page_), kLoadPageSize);
        page_ = nullptr;
    }
}

Status LoadPageReader::Open(const std::string& path) {
    Close();
    const std::size_t slash = path.rfind('/');
    if (slash == std::string::npos || slash == 0) {
        return Error::Invalid("path", "the load page needs an absolute path, got " + path);
    }
    struct stat info {};
    const std::string directory = path.substr(0, slash);
    if (::lstat(directory.c_str(), &info) != 0) {
        return Failed("stat", directory);
    }
    if (!S_ISDIR(info.st_mode) || info.st_uid != ::geteuid() || (info.st_mode & 0077) != 0) {
        return Error{
            ErrorCode::kForbidden, directory + " is not a directory of ours with mode 0700", {}, false};
    }
    const UniqueFd fd{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK)};
    if (!fd.valid()) {
        return Failed("open", path);
    }
    if (::fstat(fd.get(), &info) != 0) {
        return Failed("stat", path);
    }
    // The size check keeps a truncated file from turning a read into SIGBUS.
    if (!S_ISREG(info.st_mode) || info.st_uid != ::geteuid() || (info.st_mode & 0177) != 0 ||
        info.st_size < static_cast<off_t>(kLoadPageSize)) {
        return Error{ErrorCode::kForbidden, path + " is not a load page of ours (0600, one page)", {}, false};
    }
    void* memory = ::mmap(nullptr, kLoadPageSize, PROT_READ, MAP_SHARED, fd.get(), 0);
    if (memory == MAP_FAILED) {
        return Failed("map", path);
    }
    page_ = static_cast<const LoadPage*>(memory);
    if (page_->magic.load(std::memory_order_acquire) != kMagic ||
        page_->version.load(std::memory_order_relaxed) != kLoadPageVersion) {
        Close();
        return Error{ErrorCode::kDecode, path + " has another magic or version", {}, false};
    }
    return Status::Ok();
}

std::optional<LoadReading> LoadPageReader::Read() const noexcept {
    if (page_ == nullptr || page_->closed.load(std::memory_order_acquire) != 0) {
        return std::nullopt;
    }
    const auto number = [](const std::atomic<std::uint64_t>& word) {
        return static_cast<std::int64_t>(word.load(std::memory_order_acquire));
    };
    for (int i = 0; i < kReadTries; ++i) {
        const std::uint64_t before = page_->sequence.load(std::memory_order_acquire);
        if (before == 0) {
            return std::nullopt;  // nothing published yet
        }
        if ((before & 1) != 0) {
            continue;
        }
        LoadReading reading;
        reading.load.num_running = number(page_->num_running);
        reading.load.num_waiting = number(page_->num_waiting);
        reading.load.kv_active_pages = number(page_->kv_active_pages);
        reading.load.kv_total_pages = number(page_->kv_total_pages);
        reading.load.step_counter = number(page_->step_counter);
        const std::int64_t stamp = number(page_->stamp_ns);
        if (page_->sequence.load(std::memory_order_relaxed) != before) {
            continue;
        }
        reading.epoch = page_->epoch.load(std::memory_order_relaxed);
        const auto& load = reading.load;
        if (load.num_running < 0 || load.num_waiting < 0 || load.kv_active_pages < 0 ||
            load.kv_total_pages < load.kv_active_pages || stamp < 0) {
            return std::nullopt;  // not one of ours, or broken: unknown is the honest answer
        }
        if (load.kv_total_pages > 0) {
            reading.load.kv_usage =
                static_cast<double>(load.kv_active_pages) / static_cast<double>(load.kv_total_pages);
        }
        reading.age_ns = std::max<std::int64_t>(MonotonicNs() - stamp, 0);
        return reading;
    }
    return std::nullopt;
}

bool LoadPageReader::WriterGone() const noexcept {
    if (page_ == nullptr || page_->closed.load(std::memory_order_acquire) != 0) {
        return true;
    }
    const auto pid = static_cast<pid_t>(page_->pid.load(std::memory_order_relaxed));
    return pid <= 0 || (::kill(pid, 0) != 0 && errno == ESRCH);
}

}  // namespace rankgate::engine
