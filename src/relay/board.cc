// SPDX-License-Identifier: Apache-2.0
#include "relay/board.h"

#include <sys/stat.h>

#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <new>

#include "relay/control.h"

namespace rankgate::relay {
namespace {

constexpr std::size_t kRecordStride = (sizeof(Failure) + 63) / 64 * 64;

}  // namespace

std::uint32_t Board::DigestDepth(const Config& config) noexcept {
    // Between the slowest reader's step and the leader's newest there are at most max_lag_steps others.
    return config.digest ? std::bit_ceil(static_cast<std::uint32_t>(config.max_lag_steps) + 4U) : 1U;
}

std::size_t Board::BytesFor(int size, std::uint32_t digest_depth) noexcept {
    const auto n = static_cast<std::size_t>(size);
    return kLinesAt + n * sizeof(RankLine) + n * kRecordStride + n * digest_depth * sizeof(DigestCell);
}

Failure* Board::record(int rank) noexcept {
    return reinterpret_cast<Failure*>(map_.data() + kLinesAt +
                                      static_cast<std::size_t>(size_) * sizeof(RankLine) +
                                      static_cast<std::size_t>(rank) * kRecordStride);
}

DigestCell& Board::cell(int rank, std::uint64_t step) noexcept {
    auto* cells = reinterpret_cast<DigestCell*>(
        map_.data() + kLinesAt + static_cast<std::size_t>(size_) * (sizeof(RankLine) + kRecordStride));
    return cells[static_cast<std::size_t>(rank) * depth_ + (step & (depth_ - 1))];
}

std::unique_ptr<Board> Board::Create(const Config& config, bool shared) {
    const std::uint32_t depth = DigestDepth(config);
    const std::size_t bytes = BytesFor(config.size, depth);
    UniqueFd fd;
    if (shared) {
        fd = MakeMemFd("rankgate-relay-board", bytes);
        if (!fd.valid()) {
            return nullptr;
        }
    }
    Mapping map = Mapping::Create(fd.get(), bytes, true);
    if (!map) {
        return nullptr;
    }
    // Fresh memory is zero, which is the right start for every word but the description.
    auto* head = new (map.data()) BoardHead;
    head->magic = kBoardMagic;
    head->abi = AbiHash();
    head->size = static_cast<std::uint32_t>(config.size);
    head->epoch = config.epoch;
    head->ring_slots = config.ring_slots;
    head->digest_depth = depth;
    return std::unique_ptr<Board>{new Board{std::move(fd), std::move(map), config.size, depth}};
}

std::unique_ptr<Board> Board::Attach(UniqueFd fd, const Config& config, Failure* failure) {
    failure->code = Code::kVersionMismatch;
    failure->phase = Phase::kWelcome;
    failure->origin_rank = 0;
    struct stat info {};
    if (::fstat(fd.get(), &info) != 0 || info.st_size < static_cast<off_t>(kLinesAt) ||
        info.st_size > (1 << 28)) {
        failure->sys = errno;
        failure->SetText("the shared board has no usable size");
        return nullptr;
    }
    Mapping map = Mapping::Create(fd.get(), static_cast<std::size_t>(info.st_size), true);
    if (!map) {
        failure->sys = errno;
        failure->SetText("the shared board cannot be mapped");
        return nullptr;
    }
    const auto* head = reinterpret_cast<const BoardHead*>(map.data());
    if (head->magic != kBoardMagic || head->abi != AbiHash() ||
        head->size != static_cast<std::uint32_t>(config.size) || !std::has_single_bit(head->digest_depth) ||
        head->digest_depth > 2U * kMaxLagSteps || BytesFor(config.size, head->digest_depth) != map.size()) {
        failure->SetText("the shared board has another layout");
        return nullptr;
    }
    if (head->epoch != config.epoch) {
        failure->code = Code::kBadEpoch;
        failure->expected = config.epoch;
        failure->got = head->epoch;
        failure->SetText("the shared board belongs to another epoch");
        return nullptr;
    }
    const std::uint32_t depth = head->digest_depth;
    return std::unique_ptr<Board>{new Board{std::move(fd), std::move(map), config.size, depth}};
}

std::optional<Failure> Board::failure() noexcept {
    const std::uint32_t cause = head().first_cause.load(std::memory_order_acquire);
    if (cause == 0 || cause > static_cast<std::uint32_t>(size_)) {
        return std::nullopt;
    }
    return *record(static_cast<int>(cause) - 1);
}

bool Board::Record(int rank, const Failure& failure) noexcept {
    // The record is private to this rank until the exchange below succeeds, so nobody can ever read half of
    // one, whoever is killed when. It is never rewritten: a loser's record might be the winner's by a later
    // call otherwise.
    bool won = false;
    if (!recorded_) {
        recorded_ = true;
        std::memcpy(static_cast<void*>(record(rank)), &failure, sizeof failure);
        std::uint32_t none = 0;
        won = head().first_cause.compare_exchange_strong(none, static_cast<std::uint32_t>(rank) + 1,
                                                         std::memory_order_seq_cst);
    }
    WakeAll();
    return won;
}

void Board::WakeAll() noexcept {
    head().head_word.fetch_add(1, std::memory_order_seq_cst);
    FutexWakeAll(head().head_word);
    head().space_word.fetch_add(1, std::memory_order_seq_cst);
    FutexWakeAll(head().space_word);
}

std::optional<Failure> Board::StoreDigest(int rank, std::uint64_t step, std::uint64_t value) noexcept {
    DigestCell& mine = cell(rank, step);
    if (mine.step.load(std::memory_order_relaxed) > step) {
        return std::nullopt;
    }
    mine.step.store(0, std::memory_order_seq_cst);
    mine.value.store(value, std::memory_order_seq_cst);
    mine.step.store(step, std::memory_order_seq_cst);
    // Sequentially consistent on all sides: of the ranks that finish together at least one sees all the
    // others.
    std::array<std::uint64_t, kMaxRanks> values;
    bool same = true;
    for (int r = 0; r < size_; ++r) {
        DigestCell& other = cell(r, step);
        if (other.step.load(std::memory_order_seq_cst) != step) {
            return std::nullopt;
        }
        values[static_cast<std::size_t>(r)] = other.value.load(std::memory_order_seq_cst);
        same = same && values[static_cast<std::size_t>(r)] == values[0];
    }
    if (same) {
        return std::nullopt;
    }
    std::uint64_t reference = values[0];
    int votes = 0;
    for (int r = 0; r < size_; ++r) {
        int count = 0;
        for (int k = 0; k < size_; ++k) {
            count += values[static_cast<std::size_t>(k)] == values[static_cast<std::size_t>(r)] ? 1 : 0;
        }
        if (count > votes) {  // rank 0 comes first and keeps a tie
            votes = count;
            reference = values[static_cast<std::size_t>(r)];
        }
    }
    for (int r = 0; r < size_; ++r) {
        if (values[static_cast<std::size_t>(r)] != reference) {
            Failure failure;
            failure.code = Code::kDiverged;
            failure.phase = Phase::kDigest;
            failure.origin_rank = static_cast<std::int16_t>(r);
            failure.step = step;
            failure.expected = reference;
            failure.got = values[static_cast<std::size_t>(r)];
            failure.SetText("this rank's state hash differs from the others'");
            return failure;
        }
    }
    return std::nullopt;
}

Board::Slowest Board::SlowestFollower() noexcept {
    Slowest slowest;
    for (int r = 1; r < size_; ++r) {
        RankLine& l = line(r);
        const std::uint64_t seq = l.consumed_seq.load(std::memory_order_seq_cst);
        const std::uint64_t step = l.consumed_step.load(std::memory_order_seq_cst);
        if (slowest.rank < 0 || step < slowest.step || (step == slowest.step && seq < slowest.seq)) {
            slowest.rank = r;
        }
        slowest.seq = r == 1 ? seq : std::min(slowest.seq, seq);
        slowest.step = r == 1 ? step : std::min(slowest.step, step);
    }
    return slowest;
}

}  // namespace rankgate::relay
