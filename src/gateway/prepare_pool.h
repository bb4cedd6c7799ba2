// SPDX-License-Identifier: Apache-2.0
// Bounded threads for the slow step of a request (template and tokenizer), so that a long prompt stalls no
// stream and no probe. Two queues: large jobs may never occupy every thread. Submit and Cancel from any
// thread; a job's Run is on a pool thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace rankgate::gateway {

/// Shared by the submitter and the pool. The submitter drops interest with cancelled; a job that has not
/// begun is then skipped.
class PrepareJob {
  public:
    virtual ~PrepareJob() = default;
    /// On a pool thread. Hands its own result back.
    virtual void Run() noexcept = 0;
    std::atomic<bool> cancelled{false};
};

class PreparePool {
  public:
    /// From this many bytes of text a job counts as large.
    static constexpr std::size_t kLargeBytes = 64 * 1024;

    PreparePool(int threads, std::size_t max_queue);
    ~PreparePool();
    PreparePool(const PreparePool&) = delete;
    PreparePool& operator=(const PreparePool&) = delete;

    /// False: the queue is full, nothing was taken.
    bool Submit(std::shared_ptr<PrepareJob> job, std::size_t bytes);
    std::int64_t queued() const noexcept { return queued_.load(std::memory_order_relaxed); }
    /// Waits for running jobs; waiting ones are dropped.
    void Stop();

  private:
    void Work();

    const std::size_t max_queue_;
    const std::size_t max_large_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<std::shared_ptr<PrepareJob>> small_;
    std::deque<std::shared_ptr<PrepareJob>> large_;
    std::size_t large_running_{0};
    bool stopping_{false};
    std::atomic<std::int64_t> queued_{0};
    std::vector<std::thread> threads_;
};

}  // namespace rankgate::gateway
