// SPDX-License-Identifier: Apache-2.0
// The stream back-ends (unix and TCP): the same slots, written to one connection per follower; an Ack of 16
// bytes comes back for each step. The kernel's socket buffers take the place of the ring; a whole step is
// encoded once and sent to everybody.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <vector>

#include "relay/hooks.h"
#include "relay/plane.h"

namespace rankgate::relay {
namespace {

struct Ack {
    std::uint64_t seq{0};  // 0: not an ack but a digest
    std::uint64_t step{0};
    std::uint64_t digest{0};
};

/// How long a broken data connection waits for the control plane to say who died and why.
constexpr Seconds kVerdict{1.0};

int ToMs(Nanos n) noexcept {
    return static_cast<int>(
        std::max<std::int64_t>(1, std::chrono::duration_cast<std::chrono::milliseconds>(n).count()));
}

void Drain(int fd) noexcept {
    std::uint64_t value = 0;
    [[maybe_unused]] const ssize_t n = ::read(fd, &value, sizeof value);
}

/// Sleeps on the call's wake-up descriptor until the monitor has found the cause, or the patience is over.
Stop AwaitVerdict(int wake, Waiting& waiting) {
    Budget budget{kVerdict};
    for (;;) {
        if (const Stop stop = waiting.Check(); stop != Stop::kNone) {
            return stop;
        }
        if (budget.Spend()) {
            return Stop::kNone;
        }
        pollfd p{wake, POLLIN, 0};
        ::poll(&p, 1, 10);
        Drain(wake);
    }
}

Failure Gone(Code code, int rank, Phase phase, int error) {
    Failure failure;
    failure.code = code;
    failure.phase = phase;
    failure.origin_rank = static_cast<std::int16_t>(rank);
    failure.sys = error;
    failure.SetText("the data connection to this rank is closed");
    return failure;
}

class StreamLeader final : public LeaderPlane {
  public:
    StreamLeader(const Config& config, Board& board, DigestSink on_digest)
        : config_{config},
          board_{board},
          on_digest_{std::move(on_digest)},
          wake_{MakeEventFd()},
          readers_(static_cast<std::size_t>(config.size)) {}

    std::vector<int> Offer(int rank) override {
        if (config_.backend == Backend::kTcp) {
            return {};
        }
        std::array<int, 2> pair{-1, -1};
        if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair.data()) != 0) {
            return {};
        }
        Attach(rank, UniqueFd{pair[0]});
        theirs_.reset(pair[1]);
        return {pair[1]};
    }
    void Offered(int /*rank*/) override { theirs_.reset(); }
    void Attach(int rank, UniqueFd fd) override {
        Forget(rank);
        At(rank).fd = std::move(fd);
        if (At(rank).fd.valid()) {
            GuardFromFork(At(rank).fd.get());
        }
    }
    bool Ready(int rank) const override { return readers_[static_cast<std::size_t>(rank)].fd.valid(); }
    void Forget(int rank) override {
        if (At(rank).fd.valid()) {
            UnguardFromFork(At(rank).fd.get());
        }
        At(rank) = Reader{};
    }
    ~StreamLeader() override {
        for (int r = 1; r < config_.size; ++r) {
            if (ForkGeneration() != generation_) {
                static_cast<void>(At(r).fd.release());  // closed in the child already
            } else {
                Forget(r);
            }
        }
        if (ForkGeneration() != generation_) {
            static_cast<void>(wake_.release());
        }
    }

    Stop SendGo(Waiting& waiting, Failure* failure) override {
        buffer_.clear();
        Append(Header(0, kSlotGo), nullptr, HookAction::kNone);
        return Flush(0, waiting, failure);
    }

    Stop Send(std::span<const Frame> frames, std::uint64_t step, Waiting& waiting,
              Failure* failure) override {
        const auto lag = static_cast<std::uint64_t>(config_.max_lag_steps);
        if (const Stop stop = WaitForLag(step > lag ? step - lag : 0, waiting, failure);
            stop != Stop::kNone) {
            return stop;
        }
        const std::uint64_t first_seq = seq_;
        buffer_.clear();
        StepSource source{frames, step};
        std::uint64_t left = source.total();
        std::uint32_t fragment = 0;
        do {
            SlotHeader header = Header(step, fragment == 0 ? kSlotFirst : 0U);
            header.total = source.total();
            header.n_frames = source.n_frames();
            header.fragment = fragment++;
            header.length = static_cast<std::uint32_t>(std::min<std::uint64_t>(left, kStreamPayload));
            left -= header.length;
            if (left == 0) {
                header.flags |= kSlotLast;
            }
            Append(header, &source, Hook(Point::kInPublish, step));
        } while (left > 0);
        const Stop stop = Flush(step, waiting, failure);
        if (stop == Stop::kInterrupted || stop == Stop::kTimeout) {
            seq_ = first_seq;  // Flush has made sure that nothing of it is out
        }
        if (buffer_.capacity() > kKeep) {
            buffer_ = {};
        }
        return stop;
    }

    void Wake() noexcept override { SignalEventFd(wake_.get()); }

  private:
    static constexpr std::size_t kKeep = std::size_t{4} << 20;

    struct Reader {
        UniqueFd fd;
        std::size_t sent{0};
        std::array<std::byte, sizeof(Ack)> ack{};
        std::size_t ack_filled{0};
    };
    Reader& At(int rank) noexcept { return readers_[static_cast<std::size_t>(rank)]; }

    SlotHeader Header(std::uint64_t step, std::uint32_t flags) noexcept {
        SlotHeader header;
        header.seq = seq_++;
        header.epoch = config_.epoch;
        header.step = step;
        header.flags = flags;
        return header;
    }

    void Append(SlotHeader header, StepSource* source, HookAction action) {
        const std::size_t at = buffer_.size();
        buffer_.resize(at + sizeof header + header.length);
        std::byte* payload = buffer_.data() + at + sizeof header;
        if (source != nullptr) {
            source->Copy(payload, header.length);
        }
        if (action == HookAction::kOldEpoch) {
            header.epoch -= 1;
        } else if (action == HookAction::kSkip) {
            header.seq += 1;
        } else if (action == HookAction::kReplay) {
            header.seq -= 1;
        }
        header.crc = config_.checksum ? SlotChecksum(header, payload) : 0;
        if (action == HookAction::kCorrupt) {
            header.crc ^= 1;
        }
        std::memcpy(buffer_.data() + at, &header, sizeof header);
        if (action == HookAction::kDrop) {
            buffer_.resize(at);
        } else if (action == HookAction::kDuplicate) {
            const std::vector<std::byte> copy(buffer_.begin() + static_cast<std::ptrdiff_t>(at),
                                              buffer_.end());
            buffer_.insert(buffer_.end(), copy.begin(), copy.end());
        }
    }

    /// Takes in the acks of one reader; false if its connection is gone.
    bool ReadAcks(int rank) noexcept {
        Reader& reader = At(rank);
        for (;;) {
            const ssize_t n = ::recv(reader.fd.get(), reader.ack.data() + reader.ack_filled,
                                     sizeof(Ack) - reader.ack_filled, MSG_DONTWAIT);
            if (n < 0) {
                return errno == EAGAIN || errno == EINTR;
            }
            if (n == 0) {
                return false;
            }
            reader.ack_filled += static_cast<std::size_t>(n);
            if (reader.ack_filled == sizeof(Ack)) {
                reader.ack_filled = 0;
                Ack ack;
                std::memcpy(&ack, reader.ack.data(), sizeof ack);
                if (ack.seq == 0) {
                    on_digest_(rank, ack.step, ack.digest);
                    continue;
                }
                RankLine& line = board_.line(rank);
                line.consumed_step.store(ack.step, std::memory_order_seq_cst);
                line.consumed_seq.store(ack.seq, std::memory_order_seq_cst);
            }
        }
    }

    Stop Lost(int rank, int error, Waiting& waiting, Failure* failure) {
        const Stop stop = AwaitVerdict(wake_.get(), waiting);
        if (stop != Stop::kNone) {
            return stop;
        }
        *failure = Gone(Code::kPeerDied, rank, Phase::kPublish, error);
        return Stop::kFailed;
    }

    /// One sleep for whatever is still missing. `unsent`: wait for room, too.
    Stop Sleep(bool unsent, Waiting& waiting, Failure* failure) {
        polls_.clear();
        polls_.push_back({wake_.get(), POLLIN, 0});
        for (int r = 1; r < config_.size; ++r) {
            const bool out = unsent && At(r).sent < buffer_.size();
            polls_.push_back({At(r).fd.get(), static_cast<short>(POLLIN | (out ? POLLOUT : 0)), 0});
        }
        if (const Stop stop = waiting.Check(); stop != Stop::kNone) {
            return stop;
        }
        Hook(Point::kBeforeWait);
        const int n = ::poll(polls_.data(), polls_.size(), ToMs(std::min(waiting.Slice(), Budget::kSlice)));
        if (n <= 0) {
            return waiting.Pause();
        }
        if (polls_[0].revents != 0) {
            Drain(wake_.get());
        }
        for (int r = 1; r < config_.size; ++r) {
            if ((polls_[static_cast<std::size_t>(r)].revents & (POLLIN | POLLHUP | POLLERR)) != 0 &&
                !ReadAcks(r)) {
                return Lost(r, errno, waiting, failure);
            }
        }
        return waiting.Check();
    }

    Stop WaitForLag(std::uint64_t need_step, Waiting& waiting, Failure* failure) {
        if (const Stop stop = waiting.Check(); stop != Stop::kNone) {
            return stop;
        }
        if (need_step == 0) {
            return Stop::kNone;
        }
        Budget budget{config_.publish_stall};
        std::uint64_t progress = 0;
        for (bool first = true;; first = false) {
            Board::Slowest slowest = board_.SlowestFollower();
            if (slowest.step >= need_step) {
                return Stop::kNone;
            }
            if (first) {
                for (int r = 1; r < config_.size; ++r) {
                    if (board_.line(r).consumed_step.load(std::memory_order_relaxed) < need_step &&
                        !ReadAcks(r)) {
                        return Lost(r, errno, waiting, failure);
                    }
                }
                continue;
            }
            if (slowest.step != progress) {
                progress = slowest.step;
                budget.Restart();
            } else if (budget.Spend()) {
                *failure = StalledReader(config_, board_, need_step);
                return Stop::kFailed;
            }
            if (const Stop stop = Sleep(false, waiting, failure); stop != Stop::kNone) {
                return stop;
            }
        }
    }

    /// Sends buffer_ to every reader, all of it or (before the first byte is out) nothing.
    Stop Flush(std::uint64_t step, Waiting& waiting, Failure* failure) {
        for (Reader& reader : readers_) {
            reader.sent = 0;
        }
        Budget budget{config_.publish_stall};
        bool any_out = false;
        for (;;) {
            bool all = true;
            bool moved = false;
            for (int r = 1; r < config_.size; ++r) {
                Reader& reader = At(r);
                while (reader.sent < buffer_.size()) {
                    const ssize_t n = ::send(reader.fd.get(), buffer_.data() + reader.sent,
                                             buffer_.size() - reader.sent, MSG_DONTWAIT | MSG_NOSIGNAL);
                    if (n > 0) {
                        reader.sent += static_cast<std::size_t>(n);
                        moved = any_out = true;
                    } else if (n < 0 && errno == EINTR) {
                        continue;
                    } else if (n < 0 && errno == EAGAIN) {
                        all = false;
                        break;
                    } else {
                        return Lost(r, errno, waiting, failure);
                    }
                }
            }
            if (all) {
                return Stop::kNone;
            }
            if (moved) {
                budget.Restart();
            } else if (budget.Spend()) {
                *failure = StalledReader(config_, board_, step);
                for (int r = 1; r < config_.size;
                     ++r) {  // who has not even taken the bytes is slower than who has not acked
                    if (At(r).sent < buffer_.size()) {
                        failure->origin_rank = static_cast<std::int16_t>(r);
                        break;
                    }
                }
                return Stop::kFailed;
            }
            const Stop stop = Sleep(true, waiting, failure);
            if (stop == Stop::kInterrupted && any_out) {
                // Some readers may have all of it: it can neither be taken back nor waited for.
                failure->code = Code::kRemoteFailure;
                failure->phase = Phase::kPublish;
                failure->origin_rank = 0;
                failure->step = step;
                failure->SetText("rank 0 was interrupted half-way through this step");
                return Stop::kInterrupted;
            }
            if (stop != Stop::kNone) {
                return stop;
            }
        }
    }

    const Config& config_;
    Board& board_;
    DigestSink on_digest_;
    UniqueFd wake_;
    UniqueFd theirs_;
    std::uint64_t generation_{ForkGeneration()};
    std::vector<Reader> readers_;
    std::vector<std::byte> buffer_;
    std::vector<pollfd> polls_;
    std::uint64_t seq_{1};
};

class StreamFollower final : public FollowerPlane {
  public:
    StreamFollower(const Config& config, Board& board, UniqueFd fd)
        : config_{config},
          board_{board},
          fd_{std::move(fd)},
          wake_{MakeEventFd()},
          assembler_{config, kStreamPayload},
          buffer_(kBuffer) {
        GuardFromFork(fd_.get());
    }
    ~StreamFollower() override {
        if (ForkGeneration() != generation_) {
            static_cast<void>(fd_.release());
            static_cast<void>(wake_.release());
        } else {
            UnguardFromFork(fd_.get());
        }
    }

    Assembler& assembler() noexcept override { return assembler_; }
    void SendDigest(std::uint64_t step, std::uint64_t value) noexcept override {
        const Ack digest{0, step, value};
        SendAll(fd_.get(), std::as_bytes(std::span{&digest, 1}));
    }
    void Wake() noexcept override { SignalEventFd(wake_.get()); }

    Stop Receive(Waiting* waiting, Got* got, Failure* failure) override {
        *got = Got::kNothing;
        for (;;) {
            SlotHeader header;
            while (end_ - begin_ >= sizeof header) {
                std::memcpy(&header, buffer_.data() + begin_, sizeof header);
                // A wrong length would make the parser wait for bytes that never come: refuse before that.
                if (PlausibleLength(header, kStreamPayload) &&
                    end_ - begin_ < sizeof header + header.length) {
                    break;
                }
                const Assembler::Fed fed = assembler_.Feed(header, buffer_.data() + begin_ + sizeof header);
                if (fed == Assembler::Fed::kFailed) {
                    *failure = assembler_.failure();
                    return Stop::kFailed;
                }
                begin_ += sizeof header + header.length;
                Hook(Point::kInRead, header.step);
                if (fed == Assembler::Fed::kGo) {
                    *got = Got::kGo;
                    return Stop::kNone;
                }
                if (fed == Assembler::Fed::kStep) {
                    const Ack ack{header.seq, header.step, 0};
                    board_.line(config_.rank).consumed_step.store(header.step, std::memory_order_seq_cst);
                    // Cannot be full: the leader reads the acks before it sends max_lag_steps more. If it is
                    // gone, the next read tells.
                    SendAll(fd_.get(), std::as_bytes(std::span{&ack, 1}));
                    *got = Got::kStep;
                    return Stop::kNone;
                }
            }
            if (begin_ > 0) {
                std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
                end_ -= begin_;
                begin_ = 0;
            }
            const ssize_t n = ::recv(fd_.get(), buffer_.data() + end_, buffer_.size() - end_, MSG_DONTWAIT);
            if (n > 0) {
                end_ += static_cast<std::size_t>(n);
                continue;
            }
            if (n < 0 && errno == EINTR) {
                continue;
            }
            if (n < 0 && errno == EAGAIN) {
                if (waiting == nullptr) {
                    return Stop::kNone;
                }
                if (const Stop stop = waiting->Check(); stop != Stop::kNone) {
                    return stop;
                }
                std::array<pollfd, 2> polls{pollfd{fd_.get(), POLLIN, 0}, pollfd{wake_.get(), POLLIN, 0}};
                Hook(Point::kBeforeWait);
                const int ready = ::poll(polls.data(), polls.size(), ToMs(waiting->Slice()));
                if (ready <= 0) {
                    if (const Stop stop = waiting->Pause(); stop != Stop::kNone) {
                        return stop;
                    }
                } else if (polls[1].revents != 0) {
                    Drain(wake_.get());
                }
                continue;
            }
            const int error = n == 0 ? 0 : errno;
            if (waiting == nullptr) {
                return Stop::kNone;  // the monitor finds out why
            }
            if (const Stop stop = AwaitVerdict(wake_.get(), *waiting); stop != Stop::kNone) {
                return stop;
            }
            *failure = Gone(Code::kLeaderDied, 0, Phase::kRead, error);
            return Stop::kFailed;
        }
    }

  private:
    static constexpr std::size_t kBuffer = std::size_t{4} * 64 * 1024;

    const Config& config_;
    Board& board_;
    UniqueFd fd_;
    UniqueFd wake_;
    std::uint64_t generation_{ForkGeneration()};
    Assembler assembler_;
    std::vector<std::byte> buffer_;
    std::size_t begin_{0};
    std::size_t end_{0};
};

}  // namespace

std::unique_ptr<LeaderPlane> MakeStreamLeader(const Config& config, Board& board, DigestSink on_digest) {
    return std::make_unique<StreamLeader>(config, board, std::move(on_digest));
}

std::unique_ptr<FollowerPlane> MakeStreamFollower(const Config& config, Board& board, UniqueFd data) {
    return std::make_unique<StreamFollower>(config, board, std::move(data));
}

}  // namespace rankgate::relay
