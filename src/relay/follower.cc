// SPDX-License-Identifier: Apache-2.0
// Ranks 1..N-1: dial, map what rank 0 passes, prove it with GO and ACK, read steps.
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <random>

#include "relay/hooks.h"
#include "relay/rendezvous.h"
#include "relay/session.h"

namespace rankgate::relay {
namespace {

/// A follower gives rank 0 this much longer than rank 0 gives itself: the verdict with the missing list comes
/// from there.
constexpr Seconds kSlack{1.0};
constexpr Nanos kFirstRedial = std::chrono::microseconds{200};
constexpr Nanos kQuickRedial = std::chrono::milliseconds{1};  // while all ranks are likely to be starting
constexpr Nanos kLastRedial = std::chrono::milliseconds{5};
constexpr Nanos kPatientRedial =
    std::chrono::milliseconds{20};  // after the first seconds; an idle wait must cost nothing

class FollowerSession final : public Session {
  public:
    explicit FollowerSession(Config config) : Session{std::move(config), false} {
        std::random_device random;
        nonce_ = (std::uint64_t{random()} << 32) | random();
    }

    Result<std::optional<JoinReport>> Join(const InterruptCheck& interrupt);
    Result<Wait> NextStep(std::optional<Seconds> timeout, Step* step, const InterruptCheck& interrupt);
    Result<bool> TryNextStep(Step* step);

  private:
    enum class Dialled : std::uint8_t { kWelcome, kAgain, kOver };

    HelloBody Hello(ConnectionKind kind) const noexcept;
    Dialled DialOnce(Call& call, Budget& budget, Stop* stop, Failure* failure);
    /// True if rank 0 has told why it ended the group.
    static bool HearVerdict(Peer& peer, Failure* failure);
    /// False with a failure, or with none (kOk) if it may be tried again.
    bool SetUp(const WelcomeBody& welcome, std::vector<UniqueFd>& fds, Failure* failure);
    Failure Missing(Phase phase, std::string_view text) const;
    Failure GiveUp(const Failure& failure);
    void TakeBackJoin();
    void SetPlane(std::unique_ptr<FollowerPlane> plane) noexcept;
    void Delivered(Step* step);

    void OnMessage(Peer& peer, const Message& message) noexcept override;
    void OnPeerGone(Peer& peer, bool process_gone) noexcept override;
    /// An idle leader waits outside the relay for requests: only its process is asked to show life.
    bool WatchLoop(const Peer& /*peer*/) noexcept override { return false; }
    void WakePlane() noexcept override {
        const std::lock_guard lock{state_mutex_};
        if (plane_) {
            plane_->Wake();
        }
    }
    void ClosePlane() noexcept override { SetPlane(nullptr); }
    void SendDigest(std::uint64_t step, std::uint64_t value) noexcept override {
        // Twice: over the data connection, where the order keeps rank 0 from running ahead of it, and over
        // the control connection, which rank 0 reads at once even when it publishes nothing.
        plane_->SendDigest(step, value);
        Send(*peers_.front(), Encode(MessageType::kDigest, DigestBody{step, value}));
    }
    Status AnnounceFinish() override {
        Send(*peers_.front(), EncodeBare(MessageType::kBye));
        return std::monostate{};
    }

    std::uint64_t nonce_{0};
    std::unique_ptr<FollowerPlane> plane_;
    /// Boards of joins that were taken back: another thread may still look at one.
    std::vector<std::unique_ptr<Board>> left_boards_;
};

HelloBody FollowerSession::Hello(ConnectionKind kind) const noexcept {
    HelloBody hello;
    hello.abi = AbiHash();
    hello.epoch = config_.epoch;
    hello.nonce = nonce_;
    hello.rank = static_cast<std::uint32_t>(config_.rank);
    hello.size = static_cast<std::uint32_t>(config_.size);
    hello.pid = static_cast<std::uint32_t>(::getpid());
    hello.backend = static_cast<std::uint32_t>(config_.backend);
    hello.digest = config_.digest ? 1 : 0;
    hello.kind = static_cast<std::uint32_t>(kind);
    return hello;
}

Failure FollowerSession::Missing(Phase phase, std::string_view text) const {
    Failure failure;
    failure.code = Code::kJoinTimeout;
    failure.phase = phase;
    failure.origin_rank = 0;
    failure.missing = 1;
    failure.deadline_s = config_.join.count();
    failure.SetText(text);
    return failure;
}

Failure FollowerSession::GiveUp(const Failure& failure) {
    Fail(failure, true);
    const Failure cause = Cause();
    // If rank 0 was killed before it could remove the name, somebody who outlives it has to. Whatever rank 0
    // itself has said comes after it has removed the name.
    if (cause.code == Code::kLeaderDied || (cause.code == Code::kJoinTimeout && (cause.missing & 1U) != 0)) {
        RemoveIfStale(config_.where);
    }
    return cause;
}

void FollowerSession::SetPlane(std::unique_ptr<FollowerPlane> plane) noexcept {
    const std::lock_guard lock{state_mutex_};  // Close and Fail of another thread wake the plane
    plane_.swap(plane);
}

/// An interrupted join leaves nothing behind: rank 0 sees this rank go, and it may come again until GO.
void FollowerSession::TakeBackJoin() {
    if (!monitor_runs()) {
        return;  // nothing of rank 0 is here yet
    }
    StopMonitor();
    if (board().failed()) {
        StartMonitor();  // the group has ended meanwhile: that stays, and is told
        return;
    }
    Peer& peer = *peers_.front();
    DropPeer(peer);
    peer.loop_stale = peer.process_stale = Nanos{0};
    board_.store(own_board_.get(), std::memory_order_release);
    SetPlane(nullptr);
    if (group_board_) {
        left_boards_.push_back(std::move(group_board_));
    }
}

/// Receives WELCOME or FAIL with the descriptors that come along.
ssize_t ReceiveWithFds(int socket, std::span<std::byte> room, std::vector<UniqueFd>* fds) noexcept {
    iovec part{room.data(), room.size()};
    alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int) * kMaxPassedFds)> control{};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t n = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n >= 0) {
        for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
             header = CMSG_NXTHDR(&message, header)) {
            if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
                const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
                for (std::size_t i = 0; i < count; ++i) {
                    int fd = -1;
                    std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof fd);
                    fds->emplace_back(fd);
                }
            }
        }
    }
    return n;
}

FollowerSession::Dialled FollowerSession::DialOnce(Call& call, Budget& budget, Stop* stop, Failure* failure) {
    Hook(Point::kBeforeDial);
    UniqueFd fd = Dial(config_.where);
    if (!fd.valid()) {
        return Dialled::kAgain;
    }
    pid_t pid = 0;
    if (!CheckPeerUser(fd.get(), &pid)) {
        return Dialled::kAgain;  // not ours; the real leader may come
    }
    if (!SendAll(fd.get(), Encode(MessageType::kHello, Hello(ConnectionKind::kControl)))) {
        return Dialled::kAgain;
    }
    Hook(Point::kAfterHello);
    Peer& peer = *peers_.front();
    peer.parser = MessageParser{};
    std::vector<UniqueFd> fds;
    for (;;) {
        pollfd p{fd.get(), POLLIN, 0};
        const auto slice = std::chrono::duration_cast<std::chrono::milliseconds>(call.Slice()).count();
        if (::poll(&p, 1, static_cast<int>(std::max<std::int64_t>(slice, 1))) <= 0) {
            if (*stop = call.Pause(); *stop != Stop::kNone) {
                *failure = Missing(Phase::kWelcome, "rank 0 did not answer HELLO");
                return Dialled::kOver;
            }
            continue;
        }
        const std::span<std::byte> room = peer.parser.Room();
        const ssize_t n = ReceiveWithFds(fd.get(), room, &fds);
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
            return Dialled::kAgain;
        }
        peer.parser.Added(n > 0 ? static_cast<std::size_t>(n) : 0);
        Message message;
        const MessageParser::State state = peer.parser.Next(&message);
        if (state == MessageParser::State::kNeedMore) {
            if (*stop = call.Pause(); *stop != Stop::kNone) {
                return Dialled::kOver;
            }
            continue;
        }
        if (state == MessageParser::State::kBad) {
            return Dialled::kAgain;
        }
        if (message.type == MessageType::kFail) {
            *failure = message.AsFailure();
            *stop = Stop::kFailed;
            return Dialled::kOver;
        }
        if (message.type != MessageType::kWelcome) {
            return Dialled::kAgain;
        }
        const auto welcome = message.As<WelcomeBody>();
        if (fds.size() != welcome.fds) {
            return Dialled::kAgain;
        }
        budget.ExtendTo(Seconds{std::clamp(welcome.join_left_s, 0.0, 86400.0)} + kSlack);
        peer.pidfd = OpenPidFd(fd.get(), pid);
        peer.control = std::move(fd);
        GuardFromFork(peer.control.get());
        if (!SetUp(welcome, fds, failure)) {
            if (!HearVerdict(peer, failure) && failure->code == Code::kOk) {
                // Nothing is wrong but the network: both connections are made anew.
                DropPeer(peer);
                *failure = Missing(Phase::kWelcome, "no second connection to rank 0");
                return Dialled::kAgain;
            }
            *stop = Stop::kFailed;
            return Dialled::kOver;
        }
        return Dialled::kWelcome;
    }
}

bool FollowerSession::HearVerdict(Peer& peer, Failure* failure) {
    // If the group has ended meanwhile, rank 0 has said why.
    Budget budget{kSlack};
    for (;;) {
        Message message;
        MessageParser::State state;
        while ((state = peer.parser.Next(&message)) == MessageParser::State::kMessage) {
            if (message.type == MessageType::kFail) {
                *failure = message.AsFailure();
                return true;
            }
        }
        pollfd p{peer.control.get(), POLLIN, 0};
        if (state == MessageParser::State::kBad || budget.Spend() || ::poll(&p, 1, 50) < 0) {
            return false;
        }
        const std::span<std::byte> room = peer.parser.Room();
        const ssize_t n = ::recv(peer.control.get(), room.data(), room.size(), MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
            return false;
        }
        peer.parser.Added(n > 0 ? static_cast<std::size_t>(n) : 0);
    }
}

bool FollowerSession::SetUp(const WelcomeBody& welcome, std::vector<UniqueFd>& fds, Failure* failure) {
    Hook(Point::kBeforeMap);
    const auto wrong = [&](Code code, std::string_view text) {
        *failure = Failure{};
        failure->code = code;
        failure->phase = Phase::kWelcome;
        failure->origin_rank = 0;
        failure->SetText(text);
        return false;
    };
    if (welcome.epoch != config_.epoch || welcome.abi != AbiHash()) {
        return wrong(welcome.epoch != config_.epoch ? Code::kBadEpoch : Code::kVersionMismatch,
                     "rank 0 is of another epoch or version");
    }
    if (welcome.max_lag_steps == 0 || welcome.max_lag_steps > static_cast<std::uint32_t>(kMaxLagSteps) ||
        welcome.max_frame > kMaxFrameLimit || !(welcome.stall_after_s >= 0)) {
        return wrong(Code::kVersionMismatch, "rank 0's configuration is out of bounds");
    }
    // The group runs by rank 0's numbers.
    config_.max_frame = static_cast<std::size_t>(welcome.max_frame);
    config_.max_lag_steps = static_cast<int>(welcome.max_lag_steps);
    config_.checksum = welcome.checksum != 0;
    config_.stall_after = Seconds{welcome.stall_after_s};
    stall_after_.store(welcome.stall_after_s);
    switch (config_.backend) {
        case Backend::kRing: {
            if (fds.size() != 3) {
                return wrong(Code::kVersionMismatch, "WELCOME without its descriptors");
            }
            group_board_ = Board::Attach(std::move(fds[0]), config_, failure);
            if (!group_board_) {
                return false;
            }
            bell_ = std::move(fds[2]);
            SetPlane(
                MakeRingFollower(config_, *group_board_, std::move(fds[1]), welcome.ring_slots, failure));
            if (!plane_) {
                return false;
            }
            board_.store(group_board_.get(), std::memory_order_release);
            break;
        }
        case Backend::kStream:
            if (fds.size() != 1) {
                return wrong(Code::kVersionMismatch, "WELCOME without its descriptor");
            }
            SetPlane(MakeStreamFollower(config_, board(), std::move(fds[0])));
            break;
        case Backend::kTcp: {
            UniqueFd data = Dial(config_.where);
            if (!data.valid() ||
                !SendAll(data.get(), Encode(MessageType::kHello, Hello(ConnectionKind::kData)))) {
                *failure = Failure{};  // a lost packet must not cost the group its start
                return false;
            }
            SetPlane(MakeStreamFollower(config_, board(), std::move(data)));
            break;
        }
    }
    return true;
}

void FollowerSession::OnMessage(Peer& peer, const Message& message) noexcept {
    switch (message.type) {
        case MessageType::kFail:
            Fail(message.AsFailure(), true);
            return;
        case MessageType::kBeat:
            board().line(0).loop_beat.store(message.As<BeatBody>().loop, std::memory_order_relaxed);
            board().line(0).process_beat.store(message.As<BeatBody>().process, std::memory_order_relaxed);
            return;
        case MessageType::kFin:
            final_step_.store(message.As<FinBody>().last_step, std::memory_order_release);
            WakeCalls();
            return;
        case MessageType::kEnd:
            ended_ = true;
            WakeCalls();
            return;
        default: {
            Failure failure;
            failure.code = Code::kForeignFrame;
            failure.phase = Phase::kRun;
            failure.origin_rank = static_cast<std::int16_t>(peer.rank);
            failure.got = static_cast<std::uint64_t>(message.type);
            failure.SetText("a message that only followers may send");
            Fail(failure, true);
            return;
        }
    }
}

void FollowerSession::OnPeerGone(Peer& /*peer*/, bool process_gone) noexcept {
    if (ended_.load()) {
        return;
    }
    Failure failure;
    failure.code = Code::kLeaderDied;
    failure.phase = armed_ ? Phase::kRun : Phase::kGo;
    failure.origin_rank = 0;
    failure.SetText(process_gone ? "rank 0's process has ended"
                                 : "rank 0's connection is closed without finish");
    Fail(failure, true);
}

Result<std::optional<JoinReport>> FollowerSession::Join(const InterruptCheck& interrupt) {
    Call call{*this, interrupt};
    if (std::optional<Failure> refused = call.Enter(false)) {
        return *refused;
    }
    const SteadyTime started = Now();
    Budget budget{config_.join};
    call.Within(&budget);
    if (peers_.empty()) {
        peers_.push_back(std::make_unique<Peer>());
        peers_.front()->rank = 0;
    }
    Failure failure = Missing(Phase::kDial, "rank 0 does not listen");
    const auto over = [&](Stop stop) -> Result<std::optional<JoinReport>> {
        if (stop == Stop::kInterrupted) {
            TakeBackJoin();
            return std::optional<JoinReport>{};
        }
        if (stop == Stop::kClosed) {
            TakeBackJoin();  // now, not only when the object goes
            return Cause();
        }
        return GiveUp(failure);
    };
    Nanos pause = kFirstRedial;
    for (;;) {
        Stop stop = Stop::kNone;
        const Dialled dialled = DialOnce(call, budget, &stop, &failure);
        if (dialled == Dialled::kWelcome) {
            break;
        }
        if (dialled == Dialled::kOver) {
            return over(stop);
        }
        const timespec sleep{0, static_cast<long>(pause.count())};
        ::nanosleep(&sleep, nullptr);
        if (stop = call.Pause(); stop != Stop::kNone) {
            return over(stop);
        }
        const Nanos waited = Now() - started;
        pause = std::min(pause * 2, waited > std::chrono::seconds{2}          ? kPatientRedial
                                    : waited > std::chrono::milliseconds{300} ? kLastRedial
                                                                              : kQuickRedial);
    }
    StartMonitor();
    Hook(Point::kBeforeReady);
    Send(*peers_.front(), EncodeBare(MessageType::kReady));
    failure = Missing(Phase::kGo, "rank 0 did not say GO");
    FollowerPlane::Got got = FollowerPlane::Got::kNothing;
    Failure found;
    const Stop stop = plane_->Receive(&call, &got, &found);
    if (stop != Stop::kNone || got != FollowerPlane::Got::kGo) {
        if (found.code != Code::kOk) {
            failure = found;
        }
        if (stop == Stop::kFailed && board().failed()) {
            failure = Cause();
        }
        return over(stop == Stop::kNone ? Stop::kFailed : stop);
    }
    Hook(Point::kBeforeGoAck);
    armed_ = true;
    joined_ = true;
    Send(*peers_.front(), EncodeBare(MessageType::kAck));
    JoinReport report;
    report.elapsed_s = Seconds{Now() - started}.count();
    report.rank_s.emplace_back(0, report.elapsed_s);
    report.rank_s.emplace_back(config_.rank, report.elapsed_s);
    return std::optional{std::move(report)};
}

void FollowerSession::Delivered(Step* step) {
    *step = plane_->assembler().Take();
    step_.store(step->number(), std::memory_order_relaxed);
}

Result<Wait> FollowerSession::NextStep(std::optional<Seconds> timeout, Step* step,
                                       const InterruptCheck& interrupt) {
    Call call{*this, interrupt};
    if (std::optional<Failure> refused = call.Enter(true)) {
        return *refused;
    }
    if (timeout) {
        call.Until(Now() + ToNanos(Seconds{std::clamp(timeout->count(), 0.0, 1e9)}));
    }
    call.EndsAfter(plane_->assembler().next_step());
    FollowerPlane::Got got = FollowerPlane::Got::kNothing;
    Failure failure;
    switch (plane_->Receive(&call, &got, &failure)) {
        case Stop::kNone:
            break;
        case Stop::kTimeout:
            return Wait::kTimeout;
        case Stop::kInterrupted:
            return Wait::kInterrupted;
        case Stop::kFinished:
            return ClosedFailure("rank 0 has finished; every step was read");
        case Stop::kFailed:
            if (failure.code != Code::kOk) {
                Fail(failure);
            }
            return Cause();
        case Stop::kClosed:
            return Cause();
    }
    Delivered(step);
    return Wait::kReady;
}

Result<bool> FollowerSession::TryNextStep(Step* step) {
    const InterruptCheck none;
    Call call{*this, none};
    if (std::optional<Failure> refused = call.Enter(true)) {
        return *refused;
    }
    FollowerPlane::Got got = FollowerPlane::Got::kNothing;
    Failure failure;
    if (plane_->Receive(nullptr, &got, &failure) == Stop::kFailed) {
        Fail(failure);
        return Cause();
    }
    if (got != FollowerPlane::Got::kStep) {
        if (plane_->assembler().next_step() > final_step_.load(std::memory_order_acquire)) {
            return ClosedFailure("rank 0 has finished; every step was read");
        }
        return false;
    }
    Delivered(step);
    return true;
}

}  // namespace

std::shared_ptr<Session> MakeFollowerSession(Config config) {
    return std::make_shared<FollowerSession>(std::move(config));
}

Follower::Follower(Config config) : Endpoint{MakeFollowerSession(std::move(config))} {}
Follower::~Follower() = default;
Result<std::optional<JoinReport>> Follower::Join(const InterruptCheck& interrupt) {
    return static_cast<FollowerSession&>(*session_).Join(interrupt);
}
Result<Wait> Follower::NextStep(std::optional<Seconds> timeout, Step* step, const InterruptCheck& interrupt) {
    return static_cast<FollowerSession&>(*session_).NextStep(timeout, step, interrupt);
}
Result<bool> Follower::TryNextStep(Step* step) {
    return static_cast<FollowerSession&>(*session_).TryNextStep(step);
}

}  // namespace rankgate::relay
