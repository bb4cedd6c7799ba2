// SPDX-License-Identifier: Apache-2.0
#include "gateway/prepare_pool.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace rankgate::gateway {
namespace {

/// Streams that are already running go first where cores are short.
constexpr int kNice = 5;

}  // namespace

PreparePool::PreparePool(int threads, std::size_t max_queue)
    : max_queue_{max_queue}, max_large_{static_cast<std::size_t>(std::max(1, threads - 1))} {
    for (int i = 0; i < threads; ++i) {
        threads_.emplace_back([this] { Work(); });
    }
}

PreparePool::~PreparePool() {
    Stop();
}

bool PreparePool::Submit(std::shared_ptr<PrepareJob> job, std::size_t bytes) {
    {
        const std::lock_guard lock{mutex_};
        if (stopping_ || small_.size() + large_.size() >= max_queue_) {
            return false;
        }
        (bytes >= kLargeBytes ? large_ : small_).push_back(std::move(job));
        queued_.fetch_add(1, std::memory_order_relaxed);
    }
    wake_.notify_one();
    return true;
}

void PreparePool::Stop() {
    {
        const std::lock_guard lock{mutex_};
        if (stopping_) {
            return;
        }
        stopping_ = true;
        small_.clear();
        large_.clear();
        queued_.store(0, std::memory_order_relaxed);
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) {
        thread.join();
    }
}

void PreparePool::Work() {
    ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), kNice);
    std::unique_lock lock{mutex_};
    for (;;) {
        const auto has_work = [this] {
            return stopping_ || !small_.empty() || (!large_.empty() && large_running_ < max_large_);
        };
        wake_.wait(lock, has_work);
        if (stopping_) {
            return;
        }
        const bool large = small_.empty();
        auto& queue = large ? large_ : small_;
        std::shared_ptr<PrepareJob> job = std::move(queue.front());
        queue.pop_front();
        queued_.fetch_sub(1, std::memory_order_relaxed);
        large_running_ += large ? 1 : 0;
        lock.unlock();
        if (!job->cancelled.load(std::memory_order_relaxed)) {
            job->Run();
        }
        job.reset();
        lock.lock();
        if (large) {
            --large_running_;
            if (!large_.empty()) {
                wake_.notify_one();
            }
        }
    }
}

}  // namespace rankgate::gateway
