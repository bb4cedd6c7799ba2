// SPDX-License-Identifier: Apache-2.0
// Mailbox<T>: many producers, one consumer, no lock. Items are whole batches (one per shard and engine step,
// one per request), never single tokens. The consumer sleeps on fd(), an eventfd that is written at most once
// between two drains.
//
//   producer (any thread):  box.Push(std::make_unique<Batch>(...));
//   consumer (one thread):  when fd() is readable: box.Acknowledge(); while (auto batch = box.Pop()) {...}
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>

#include "base/check.h"
#include "base/unique_fd.h"

namespace rankgate {

/// Base of everything that travels in a Mailbox: the link is inside, so a push allocates nothing.
struct MailboxNode {
    std::atomic<MailboxNode*> mailbox_next{nullptr};
};

/// T derives from MailboxNode. Push: any thread. Everything else: the consumer's thread. FIFO per producer.
template <class T>
class Mailbox {
  public:
    Mailbox() : fd_{::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)} { RG_CHECK(fd_.valid()); }
    Mailbox(const Mailbox&) = delete;
    Mailbox& operator=(const Mailbox&) = delete;
    ~Mailbox() {
        while (Pop() != nullptr) {
        }
    }

    int fd() const noexcept { return fd_.get(); }

    void Push(std::unique_ptr<T> item) noexcept {
        Link(item.release());
        // seq_cst against Acknowledge(): either the consumer sees this item after clearing the flag, or we
        // see the flag cleared.
        if (!signalled_.exchange(true)) {
            const std::uint64_t one = 1;
            const ssize_t n = ::write(fd_.get(), &one, sizeof one);
            RG_DCHECK(n == sizeof one);
            (void)n;
        }
    }

    /// The consumer is awake and promises Acknowledge() and Pop() before it sleeps: until then a Push costs
    /// no system call. Idempotent.
    void Hold() noexcept { held_ = held_ || !signalled_.exchange(true); }
    bool held() const noexcept { return held_; }

    /// Call first after a wake-up (or a Hold), before Pop: re-arms the signal.
    void Acknowledge() noexcept {
        if (!held_) {
            std::uint64_t count = 0;
            const ssize_t n = ::read(fd_.get(), &count, sizeof count);
            (void)n;  // EAGAIN: a spurious call
        }
        held_ = false;
        signalled_.exchange(false);
    }

    /// The oldest item, or null when none is (fully) linked yet; the producer that is still linking signals
    /// again.
    std::unique_ptr<T> Pop() noexcept {
        MailboxNode* first = head_;
        MailboxNode* next = first->mailbox_next.load(std::memory_order_acquire);
        if (first == &stub_) {
            if (next == nullptr) {
                return nullptr;
            }
            head_ = next;
            first = next;
            next = first->mailbox_next.load(std::memory_order_acquire);
        }
        if (next == nullptr) {
            if (tail_.load(std::memory_order_acquire) != first) {
                return nullptr;
            }
            // `first` is the last item: put the stub behind it so that it can be taken out.
            stub_.mailbox_next.store(nullptr, std::memory_order_relaxed);
            Link(&stub_);
            next = first->mailbox_next.load(std::memory_order_acquire);
            if (next == nullptr) {
                return nullptr;
            }
        }
        head_ = next;
        first->mailbox_next.store(nullptr, std::memory_order_relaxed);
        return std::unique_ptr<T>(static_cast<T*>(first));
    }

  private:
    void Link(MailboxNode* node) noexcept {
        node->mailbox_next.store(nullptr, std::memory_order_relaxed);
        MailboxNode* previous = tail_.exchange(node, std::memory_order_acq_rel);
        previous->mailbox_next.store(node, std::memory_order_release);
    }

    MailboxNode stub_;
    std::atomic<MailboxNode*> tail_{&stub_};
    MailboxNode* head_{&stub_};
    std::atomic<bool> signalled_{false};
    bool held_{false};  // the consumer's: it raised signalled_ itself, nothing was written
    UniqueFd fd_;
};

}  // namespace rankgate
