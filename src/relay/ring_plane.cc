// SPDX-License-Identifier: Apache-2.0
// The ring back-end: slots in a memfd that followers map read-only, cursors and futex words on the shared
// board. The writer waits for the slowest reader and never overwrites; a reader copies a slot out, checks the
// copy, and then moves its cursor.
#include <immintrin.h>
#include <sched.h>
#include <sys/stat.h>

#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>

#include "relay/hooks.h"
#include "relay/plane.h"
#include "relay/prewake.h"
#include "relay/turns.h"

namespace rankgate::relay {
namespace {

/// Readers are woken at the latest after this many slots of one step, so that a large one streams through.
constexpr std::uint64_t kWakeEvery = 32;

std::atomic_ref<std::uint64_t> SeqOf(std::byte* slot) noexcept {
    return std::atomic_ref<std::uint64_t>{*reinterpret_cast<std::uint64_t*>(slot)};
}

int UsableCpus() noexcept {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    return ::sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
}

void Relax() noexcept {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

class RingLeader final : public LeaderPlane {
  public:
    RingLeader(const Config& config, Board& board, UniqueFd fd, Mapping map)
        : config_{config},
          board_{board},
          fd_{std::move(fd)},
          map_{std::move(map)},
          mask_{config.ring_slots - 1},
          spin_{SpinTime(config)} {}

    std::vector<int> Offer(int /*rank*/) override { return {board_.fd(), fd_.get()}; }
    void Offered(int /*rank*/) override {}
    void Attach(int /*rank*/, UniqueFd /*fd*/) override {}
    bool Ready(int /*rank*/) const override { return true; }
    void Forget(int /*rank*/) override {}

    Stop SendGo(Waiting& waiting, Failure* failure) override {
        SlotHeader header = Header(0, kSlotGo);
        if (const Stop stop = WaitFor(seq_, 0, waiting, failure); stop != Stop::kNone) {
            return stop;
        }
        Put(header, nullptr, 0);
        WakeReaders();
        return Stop::kNone;
    }

    Stop Send(std::span<const Frame> frames, std::uint64_t step, Waiting& waiting,
              Failure* failure) override {
        const auto lag = static_cast<std::uint64_t>(config_.max_lag_steps);
        if (const Stop stop = WaitFor(seq_, step > lag ? step - lag : 0, waiting, failure);
            stop != Stop::kNone) {
            return stop;
        }
        if (torn_) {
            Put(Header(step, kSlotAbort), nullptr, 0);
            torn_ = false;
        }
        const std::int64_t sent_at = Now().time_since_epoch().count();
        StepSource source{frames, step};
        std::uint64_t left = source.total();
        std::uint32_t fragment = 0;
        do {
            // Between two parts only space matters: the lag was waited for at the start.
            if (const Stop stop = WaitFor(seq_, 0, waiting, failure); stop != Stop::kNone) {
                torn_ = fragment > 0;
                return stop;
            }
            const HookAction action = Hook(Point::kInPublish, step);
            SlotHeader header = Header(step, fragment == 0 ? kSlotFirst : 0U);
            header.total = source.total();
            header.n_frames = source.n_frames();
            header.fragment = fragment++;
            header.sent_at = sent_at;
            header.length = static_cast<std::uint32_t>(std::min<std::uint64_t>(left, kRingPayload));
            left -= header.length;
            if (left == 0) {
                header.flags |= kSlotLast;
            }
            Damage(action, &header);
            source.Copy(PayloadAt(seq_), header.length);
            Put(header, PayloadAt(seq_), action == HookAction::kCorrupt ? 1 : 0);
            if (left > 0 && fragment % kWakeEvery == 0) {
                WakeReaders();
            }
        } while (left > 0);
        WakeReaders();
        return Stop::kNone;
    }

    void Wake() noexcept override { board_.WakeAll(); }

  private:
    std::byte* SlotAt(std::uint64_t seq) noexcept { return map_.data() + (seq & mask_) * kSlotBytes; }
    std::byte* PayloadAt(std::uint64_t seq) noexcept { return SlotAt(seq) + sizeof(SlotHeader); }

    SlotHeader Header(std::uint64_t step, std::uint32_t flags) const noexcept {
        SlotHeader header;
        header.seq = seq_;
        header.epoch = config_.epoch;
        header.step = step;
        header.flags = flags;
        return header;
    }

    static void Damage(HookAction action, SlotHeader* header) noexcept {
        switch (action) {
            case HookAction::kDrop:
            case HookAction::kSkip:
                header->seq += 1;
                break;
            case HookAction::kDuplicate:
            case HookAction::kReplay:
                header->seq -= 1;
                break;
            case HookAction::kOldEpoch:
                header->epoch -= 1;
                break;
            case HookAction::kCorrupt:
            case HookAction::kNone:
                break;
        }
    }

    /// Writes the header behind the payload, the sequence number last.
    void Put(SlotHeader header, const std::byte* payload, std::uint32_t crc_damage) noexcept {
        header.crc = (config_.checksum ? SlotChecksum(header, payload) : 0) ^ crc_damage;
        std::byte* slot = SlotAt(seq_);
        std::memcpy(slot + sizeof(std::uint64_t),
                    reinterpret_cast<const std::byte*>(&header) + sizeof(std::uint64_t),
                    sizeof header - sizeof(std::uint64_t));
        SeqOf(slot).store(header.seq, std::memory_order_release);
        ++seq_;
    }

    void WakeReaders() noexcept {
        // The kernel is called only when somebody sleeps; nobody is overlooked. A reader takes head_word,
        // raises readers_waiting, looks at its slot and has the kernel compare head_word once more before it
        // sleeps. If the word it took has this increment, it sees the slot, which was written before. If not,
        // either the increment comes before the kernel's comparison, which then refuses the sleep, or after
        // it, hence after the count was raised, and the count is seen here.
        BoardHead& head = board_.head();
        head.head_word.fetch_add(1, std::memory_order_seq_cst);
        if (head.readers_waiting.load(std::memory_order_seq_cst) != 0 &&
            Hook(Point::kBeforeWake) != HookAction::kDrop) {
            FutexWakeAll(head.head_word);
        }
    }

    bool Enough(std::uint64_t need_seq, std::uint64_t need_step) noexcept {
        if (min_seq_ >= need_seq && min_step_ >= need_step) {
            return true;
        }
        const Board::Slowest slowest = board_.SlowestFollower();
        min_seq_ = slowest.seq;
        min_step_ = slowest.step;
        return min_seq_ >= need_seq && min_step_ >= need_step;
    }

    /// Until slot `seq` may be overwritten and every reader has taken step `need_step`.
    Stop WaitFor(std::uint64_t seq, std::uint64_t need_step, Waiting& waiting, Failure* failure) {
        const std::uint64_t need_seq = seq > config_.ring_slots ? seq - config_.ring_slots : 0;
        if (const Stop stop = waiting.Check(); stop != Stop::kNone) {
            return stop;
        }
        if (Enough(need_seq, need_step)) {
            return Stop::kNone;
        }
        WakeReaders();  // what is written so far may be all that a sleeping reader needs to make room
        if (spin_.count() > 0) {
            const SteadyTime until = Now() + spin_;
            while (Now() < until) {
                for (int i = 0; i < 16; ++i) {
                    Relax();
                }
                if (Enough(need_seq, need_step)) {
                    return Stop::kNone;
                }
            }
        }
        BoardHead& head = board_.head();
        Budget budget{config_.publish_stall};
        std::uint64_t progress = min_seq_ + min_step_;
        head.want_seq.store(need_seq, std::memory_order_relaxed);
        head.want_step.store(need_step, std::memory_order_relaxed);
        Stop stop = Stop::kNone;
        for (;;) {
            const std::uint32_t seen = head.space_word.load(std::memory_order_seq_cst);
            head.writer_waiting.store(1, std::memory_order_seq_cst);
            if (Enough(need_seq, need_step)) {
                break;
            }
            if (stop = waiting.Check(); stop != Stop::kNone) {
                break;
            }
            Hook(Point::kBeforeWait);
            const int rc = FutexWait(head.space_word, seen, std::min(waiting.Slice(), Budget::kSlice));
            if (Enough(need_seq, need_step)) {
                break;
            }
            if (rc != 0) {
                if (stop = waiting.Pause(); stop != Stop::kNone) {
                    break;
                }
            }
            if (min_seq_ + min_step_ != progress) {
                progress = min_seq_ + min_step_;
                budget.Restart();
            } else if (budget.Spend()) {
                *failure = StalledReader(config_, board_, need_step);
                stop = Stop::kFailed;
                break;
            }
        }
        head.writer_waiting.store(0, std::memory_order_seq_cst);
        return stop;
    }

    const Config& config_;
    Board& board_;
    UniqueFd fd_;
    Mapping map_;
    std::uint64_t mask_;
    Nanos spin_;
    std::uint64_t seq_{1};
    std::uint64_t min_seq_{0};
    std::uint64_t min_step_{0};
    bool torn_{false};  // an interrupted step has parts in the ring that must be called off
};

class RingFollower final : public FollowerPlane {
  public:
    RingFollower(const Config& config, Board& board, Mapping map, std::uint64_t slots)
        : config_{config},
          board_{board},
          map_{std::move(map)},
          slots_{slots},
          spin_{std::chrono::microseconds{std::max(config.spin_us, 0)}},
          foresees_{config.spin_us < 0},
          crowded_{UsableCpus() < config.size},
          pre_wake_{board.head().rest_until},
          assembler_{config, kRingPayload} {}

    Assembler& assembler() noexcept override { return assembler_; }
    void SendDigest(std::uint64_t /*step*/, std::uint64_t /*value*/) noexcept override {}
    void Wake() noexcept override { board_.WakeAll(); }

    Stop Receive(Waiting* waiting, Got* got, Failure* failure) override {
        *got = Got::kNothing;
        for (;;) {
            while (Available()) {
                switch (TakeSlot()) {
                    case Assembler::Fed::kMore:
                        break;
                    case Assembler::Fed::kStep:
                        pre_wake_.Arrived(sent_at_, Now());
                        *got = Got::kStep;
                        return Stop::kNone;
                    case Assembler::Fed::kGo:
                        *got = Got::kGo;
                        return Stop::kNone;
                    case Assembler::Fed::kFailed:
                        *failure = assembler_.failure();
                        return Stop::kFailed;
                }
                if (waiting != nullptr) {
                    if (const Stop stop = waiting->Check(); stop != Stop::kNone) {
                        return stop;
                    }
                }
            }
            if (waiting == nullptr) {
                return Stop::kNone;
            }
            if (const Stop stop = Sleep(*waiting); stop != Stop::kNone) {
                return stop;
            }
        }
    }

  private:
    std::byte* Slot() noexcept { return map_.data() + (assembler_.next_seq() & (slots_ - 1)) * kSlotBytes; }

    /// True unless the slot still holds what it held one lap ago. Anything unexpected is for the assembler to
    /// refuse by name.
    bool Available() noexcept {
        const std::uint64_t next = assembler_.next_seq();
        // A load of a read-only mapping: lock-free 64-bit loads never write.
        const std::uint64_t seq = SeqOf(Slot()).load(std::memory_order_acquire);
        const std::uint64_t before = next > slots_ ? next - slots_ : 0;
        return seq != before;
    }

    Assembler::Fed TakeSlot() noexcept {
        SlotHeader header;
        const std::byte* slot = Slot();
        std::memcpy(&header, slot, sizeof header);
        const Assembler::Fed fed = assembler_.Feed(header, slot + sizeof header);
        if (fed == Assembler::Fed::kFailed) {
            return fed;
        }
        Hook(Point::kInRead, header.step);
        sent_at_ = SteadyTime{Nanos{header.sent_at}};
        RankLine& line = board_.line(config_.rank);
        if (fed == Assembler::Fed::kStep) {
            line.consumed_step.store(header.step, std::memory_order_seq_cst);
        }
        line.consumed_seq.store(header.seq, std::memory_order_seq_cst);
        BoardHead& head = board_.head();
        // The counterpart of WaitFor: cursor first, then the flag; the writer sets the flag first, then reads
        // the cursors.
        if (head.writer_waiting.load(std::memory_order_seq_cst) != 0 &&
            header.seq >= head.want_seq.load(std::memory_order_relaxed) &&
            line.consumed_step.load(std::memory_order_relaxed) >=
                head.want_step.load(std::memory_order_relaxed)) {
            head.space_word.fetch_add(1, std::memory_order_seq_cst);
            FutexWakeAll(head.space_word);
        }
        return fed;
    }

    /// Until there may be something to take: asleep, but awake shortly before a step that can be foreseen.
    Stop Sleep(Waiting& waiting) {
        if (config_.spin_us != 0) {
            turns_.Ask();
        }
        const SteadyTime now = Now();
        PreWake::Window window;
        if (spin_.count() > 0) {
            window = {now, now + spin_};
        } else if (foresees_) {
            window = pre_wake_.Next(now);
        }
        if (window.empty()) {
            return SleepFor(waiting, waiting.Slice(), true);
        }
        if (window.from > now) {
            const Nanos slice = waiting.Slice();
            const bool whole = window.from - now <= slice;
            const Stop stop = SleepFor(waiting, whole ? window.from - now : slice, !whole);
            const SteadyTime woke = Now();
            const bool early = woke < window.from;
            // Woken for another reader, by a signal, or the slice is over: the rest is slept as well, not
            // looked.
            if (stop != Stop::kNone || (early && !Available())) {
                return stop;
            }
            if (whole) {
                pre_wake_.Slept(window.from, woke);
            }
            if (!whole || Available()) {
                return stop;
            }
        }
        bool came = false;
        if (const Stop stop = Look(waiting, window.until, &came); stop != Stop::kNone || came) {
            return stop;
        }
        // A signal that came while nobody slept has interrupted nothing.
        if (const Stop stop = waiting.Pause(); stop != Stop::kNone) {
            return stop;
        }
        return SleepFor(waiting, waiting.Slice(), true);
    }

    /// Looks at the slot without sleeping, until `until` or the end of this call's time.
    Stop Look(Waiting& waiting, SteadyTime until, bool* came) {
        const SteadyTime start = Now();
        until = std::min(until, start + waiting.Slice());
        SteadyTime now = start;
        Stop stop = Stop::kNone;
        while (now < until && stop == Stop::kNone) {
            if (crowded_) {
                ::sched_yield();
            } else {
                Relax();
            }
            const SteadyTime before = now;
            now = Now();
            if (now - before > PreWake::kLongestAbsence) {
                pre_wake_.Displaced(now);
                until = now;
            }
            if (Available()) {
                *came = true;
                return Stop::kNone;
            }
            stop = waiting.Check();
        }
        pre_wake_.Missed(now - start, now);
        return stop;
    }

    /// One sleep of at most `limit`. `pause`: its end by the clock is the moment to look around.
    Stop SleepFor(Waiting& waiting, Nanos limit, bool pause) {
        if (const Stop stop = waiting.Check(); stop != Stop::kNone) {
            return stop;
        }
        BoardHead& head = board_.head();
        const std::uint32_t seen = head.head_word.load(std::memory_order_seq_cst);
        head.readers_waiting.fetch_add(1, std::memory_order_seq_cst);
        int rc = 0;
        Stop stop = Stop::kNone;
        if (!Available()) {
            stop = waiting.Check();
            if (stop == Stop::kNone) {
                Hook(Point::kBeforeWait);
                rc = FutexWait(head.head_word, seen, limit);
            }
        }
        head.readers_waiting.fetch_sub(1, std::memory_order_seq_cst);
        if (stop == Stop::kNone && rc != 0 && (pause || rc != ETIMEDOUT) && !Available()) {
            stop = waiting.Pause();
        }
        return stop;
    }

    const Config& config_;
    Board& board_;
    Mapping map_;
    std::uint64_t slots_;
    Nanos spin_;  // a fixed time of looking before every sleep, if the configuration asks for one
    bool foresees_;
    bool crowded_;  // ranks share CPUs: whoever looks lets others run between two looks
    PreWake pre_wake_;
    SteadyTime sent_at_{};  // of the slot taken last
    Assembler assembler_;
    ShortTurns turns_;
};

}  // namespace

Nanos SpinTime(const Config& config) noexcept {
    if (config.spin_us >= 0) {
        return std::chrono::microseconds{config.spin_us};
    }
    return UsableCpus() >= config.size ? std::chrono::microseconds{20} : Nanos{0};
}

Failure StalledReader(const Config& config, Board& board, std::uint64_t step) {
    const Board::Slowest slowest = board.SlowestFollower();
    Failure failure;
    failure.code = Code::kPublishStalled;
    failure.phase = Phase::kPublish;
    failure.origin_rank = static_cast<std::int16_t>(slowest.rank);
    failure.step = slowest.step + 1;
    failure.expected = step;
    failure.got = slowest.step;
    failure.deadline_s = config.publish_stall.count();
    failure.SetText("the slowest reader has taken no further step; it holds up rank 0");
    return failure;
}

std::unique_ptr<LeaderPlane> MakeRingLeader(const Config& config, Board& board) {
    const std::size_t bytes = config.ring_slots * kSlotBytes;
    UniqueFd fd = MakeMemFd("rankgate-relay-ring", bytes);
    if (!fd.valid()) {
        return nullptr;
    }
    Mapping map = Mapping::Create(fd.get(), bytes, true);
    if (!map) {
        return nullptr;
    }
    SealWrites(fd.get());
    return std::make_unique<RingLeader>(config, board, std::move(fd), std::move(map));
}

std::unique_ptr<FollowerPlane> MakeRingFollower(const Config& config, Board& board, UniqueFd slots,
                                                std::uint64_t ring_slots, Failure* failure) {
    struct stat info {};
    failure->code = Code::kVersionMismatch;
    failure->phase = Phase::kWelcome;
    failure->origin_rank = 0;
    if (!std::has_single_bit(ring_slots) || ring_slots > 65536 || ::fstat(slots.get(), &info) != 0 ||
        info.st_size != static_cast<off_t>(ring_slots * kSlotBytes)) {
        failure->SetText("the ring has another size than rank 0 said");
        return nullptr;
    }
    Mapping map = Mapping::Create(slots.get(), ring_slots * kSlotBytes, false);
    if (!map) {
        failure->sys = errno;
        failure->SetText("the ring cannot be mapped");
        return nullptr;
    }
    *failure = Failure{};
    return std::make_unique<RingFollower>(config, board, std::move(map), ring_slots);
}

}  // namespace rankgate::relay
