// SPDX-License-Identifier: Apache-2.0
// The state that all ranks of a group share: the first cause, the cursors, the beats and the digests. With
// the ring back-end it lies in a memfd that every rank maps; with the stream back-ends each process has its
// own copy and control messages keep them in step. Synchronised: every word is atomic. Invariant:
// `first_cause` goes from 0 to one rank + 1, once, after that rank's record is whole.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "relay/os.h"
#include "relay/types.h"

namespace rankgate::relay {

inline constexpr std::uint64_t kBoardMagic = 0x6472616F42474B52ULL;

struct BoardHead {
    std::uint64_t magic;
    std::uint32_t abi;
    std::uint32_t size;
    std::uint64_t epoch;
    std::uint64_t ring_slots;
    std::uint32_t digest_depth;
    std::uint32_t reserved;
    /// 0, or rank + 1 of the rank whose record is the group's first cause.
    alignas(64) std::atomic<std::uint32_t> first_cause;
    /// Futex word of the readers: grows whenever there is something to see (slots, a failure).
    alignas(64) std::atomic<std::uint32_t> head_word;
    std::atomic<std::uint32_t> readers_waiting;
    /// Steady-clock nanoseconds until which no reader looks instead of sleeping (prewake.h).
    std::atomic<std::int64_t> rest_until;
    /// Futex word of the writer, and what it waits for.
    alignas(64) std::atomic<std::uint32_t> space_word;
    std::atomic<std::uint32_t> writer_waiting;
    std::atomic<std::uint64_t> want_seq;
    std::atomic<std::uint64_t> want_step;
};

/// Written by one rank only.
struct alignas(64) RankLine {
    std::atomic<std::uint64_t> consumed_seq;
    std::atomic<std::uint64_t> consumed_step;
    /// Grows with every relay call and wait slice of the scheduler's own thread.
    std::atomic<std::uint32_t> loop_beat;
    /// Grows with the monitor thread: tells a stopped process from a busy loop.
    std::atomic<std::uint32_t> process_beat;
    /// 1 from the first call after Join: until then a rank may take its time (warm-up, compiling).
    std::atomic<std::uint32_t> in_loop;
    std::uint32_t reserved;
};

struct DigestCell {
    std::atomic<std::uint64_t> step;
    std::atomic<std::uint64_t> value;
};

class Board {
  public:
    /// A fresh board: shared (a memfd) or private to this process. nullptr and errno on failure.
    static std::unique_ptr<Board> Create(const Config& config, bool shared);
    /// Maps a board made by the leader and checks that it is the right one; `failure` says why not.
    static std::unique_ptr<Board> Attach(UniqueFd fd, const Config& config, Failure* failure);

    BoardHead& head() noexcept { return *reinterpret_cast<BoardHead*>(map_.data()); }
    RankLine& line(int rank) noexcept { return reinterpret_cast<RankLine*>(map_.data() + kLinesAt)[rank]; }
    int fd() const noexcept { return fd_.get(); }

    /// Cheap: one load while there is no failure.
    std::optional<Failure> failure() noexcept;
    bool failed() noexcept { return head().first_cause.load(std::memory_order_acquire) != 0; }
    /// Writes this rank's record and tries to make it the first cause; wakes every sleeper. True if it became
    /// the cause. The caller serialises calls of one process.
    bool Record(int rank, const Failure& failure) noexcept;
    void WakeAll() noexcept;

    void Beat(int rank) noexcept { line(rank).loop_beat.fetch_add(1, std::memory_order_relaxed); }

    /// Stores a rank's digest of a step. If that was the last one missing and they differ: the failure.
    /// The odd one out is blamed: who differs from the majority, on a tie from rank 0. A step older than what
    /// its place holds is ignored. Calls for one rank are serialised by the caller.
    std::optional<Failure> StoreDigest(int rank, std::uint64_t step, std::uint64_t value) noexcept;

    /// The slowest follower by slots and steps; among equals one whose process does not run at all is blamed
    /// first.
    struct Slowest {
        int rank{-1};
        std::uint64_t seq{0};
        std::uint64_t step{0};
    };
    Slowest SlowestFollower() noexcept;

    static std::size_t BytesFor(int size, std::uint32_t digest_depth) noexcept;
    static std::uint32_t DigestDepth(const Config& config) noexcept;

  private:
    static constexpr std::size_t kLinesAt = 512;
    static_assert(sizeof(BoardHead) <= kLinesAt);

    Board(UniqueFd fd, Mapping map, int size, std::uint32_t depth) noexcept
        : fd_{std::move(fd)}, map_{std::move(map)}, size_{size}, depth_{depth} {}
    Failure* record(int rank) noexcept;
    DigestCell& cell(int rank, std::uint64_t step) noexcept;

    UniqueFd fd_;
    Mapping map_;
    int size_;
    std::uint32_t depth_;
    bool recorded_{false};  // this process has used its record (one process = one rank)
};

}  // namespace rankgate::relay
