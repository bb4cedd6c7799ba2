// SPDX-License-Identifier: Apache-2.0
// Rank 0: listens, lets everybody in, proves the data plane with GO, publishes.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>

#include "relay/hooks.h"
#include "relay/rendezvous.h"
#include "relay/session.h"

namespace rankgate::relay {
namespace {

constexpr std::size_t kMaxPending = 256;
/// A connection that says nothing sensible for this long is not one of ours.
constexpr Seconds kHelloBudget{10.0};

/// Somebody who has connected and not yet said who it is.
struct Pending {
    UniqueFd fd;
    pid_t pid{0};
    MessageParser parser;
    Budget budget{kHelloBudget};
};

/// How far a rank has come.
enum class Progress : std::uint8_t { kAbsent, kWelcomed, kReady, kAcked };

struct Seat {
    Progress progress{Progress::kAbsent};
    bool seen{false};  // has said HELLO at least once
    std::uint64_t nonce{0};
    double in_s{0};
};

class LeaderSession final : public Session {
  public:
    explicit LeaderSession(Config config)
        : Session{std::move(config), true}, seats_(static_cast<std::size_t>(config_.size)) {}
    ~LeaderSession() override {
        if (forked()) {
            listener_.Abandon();
        }
    }

    Result<std::optional<JoinReport>> Join(const InterruptCheck& interrupt);
    Result<Wait> Publish(std::span<const Frame> frames, std::uint64_t* number,
                         const InterruptCheck& interrupt);

  private:
    Seat& At(int rank) noexcept { return seats_[static_cast<std::size_t>(rank)]; }
    Peer& PeerOf(int rank) noexcept { return *peers_[static_cast<std::size_t>(rank) - 1]; }

    Status Open();
    void PollOnce(Call& call);
    void TakePending(Pending& pending, const Message& message);
    void Welcome(Pending& pending, const HelloBody& hello);
    static void Refuse(int socket, const Failure& failure) noexcept;
    bool AllAt(Progress progress) const noexcept;
    Failure TimedOut() const;
    void BlameTheStopped(Failure* failure) noexcept;
    Failure GiveUp(const Failure& failure);

    void OnMessage(Peer& peer, const Message& message) noexcept override;
    void OnPeerGone(Peer& peer, bool process_gone) noexcept override;
    bool WatchLoop(const Peer& peer) noexcept override {
        return board().line(peer.rank).in_loop.load(std::memory_order_relaxed) != 0;
    }
    void WakePlane() noexcept override {
        const std::lock_guard lock{state_mutex_};
        if (plane_) {
            plane_->Wake();
        }
    }
    void ClosePlane() noexcept override {
        listener_.Close();
        pendings_.clear();
        const std::lock_guard lock{state_mutex_};
        plane_.reset();
    }
    void SendDigest(std::uint64_t /*step*/, std::uint64_t /*value*/) noexcept override {}
    Status AnnounceFinish() override {
        final_step_ = current_step();
        Broadcast(Encode(MessageType::kFin, FinBody{current_step()}));
        return std::monostate{};
    }

    Listener listener_;
    std::unique_ptr<LeaderPlane> plane_;
    std::vector<Seat> seats_;
    std::vector<std::unique_ptr<Pending>> pendings_;
    SteadyTime started_{};
    Budget join_budget_{config_.join};
    bool going_{false};  // GO is out: from here on a lost rank ends the group
};

Status LeaderSession::Open() {
    Hook(Point::kBeforeListen);
    // The name first: whoever dials meanwhile waits in the backlog instead of backing off.
    Result<Listener> listener = Listener::Open(config_);
    if (!listener) {
        return listener.failure();
    }
    listener_ = std::move(*listener);
    GuardFromFork(listener_.fd());
    plane_ =
        config_.backend == Backend::kRing
            ? MakeRingLeader(config_, board())
            : MakeStreamLeader(config_, board(), [this](int rank, std::uint64_t step, std::uint64_t value) {
                  TakeDigest(rank, step, value);
              });
    bell_ = MakeEventFd();
    if (!plane_ || !bell_.valid()) {
        Failure failure = ClosedFailure("no memory or descriptors for the data plane");
        failure.code = Code::kRemoteFailure;
        failure.sys = errno;
        return failure;
    }
    for (int r = 1; r < config_.size; ++r) {
        peers_.push_back(std::make_unique<Peer>());
        peers_.back()->rank = r;
    }
    return std::monostate{};
}

bool LeaderSession::AllAt(Progress progress) const noexcept {
    for (int r = 1; r < config_.size; ++r) {
        if (seats_[static_cast<std::size_t>(r)].progress < progress) {
            return false;
        }
    }
    return true;
}

Failure LeaderSession::TimedOut() const {
    Failure failure;
    failure.code = Code::kJoinTimeout;
    failure.deadline_s = config_.join.count();
    std::string text = "missing:";
    for (int r = 1; r < config_.size; ++r) {
        const Seat& seat = seats_[static_cast<std::size_t>(r)];
        const char* what = nullptr;
        Phase phase = Phase::kNone;
        switch (seat.progress) {
            case Progress::kAbsent:
                what = seat.seen ? "was there and left" : "never said HELLO";
                phase = seat.seen ? Phase::kHello : Phase::kDial;
                break;
            case Progress::kWelcomed:
                what = "no READY";
                phase = Phase::kReady;
                break;
            case Progress::kReady:
                what = "no ACK";
                phase = Phase::kAck;
                break;
            case Progress::kAcked:
                break;
        }
        if (what == nullptr || (seat.progress == Progress::kReady && !going_)) {
            continue;
        }
        if (failure.missing == 0) {
            failure.phase = phase;
            failure.origin_rank = static_cast<std::int16_t>(r);
        }
        failure.missing |= std::uint64_t{1} << r;
        text += " rank " + std::to_string(r) + " (" + what + ")";
    }
    failure.SetText(text);
    return failure;
}

void LeaderSession::Refuse(int socket, const Failure& failure) noexcept {
    SendAll(socket, Encode(MessageType::kFail, failure));
}

Failure LeaderSession::GiveUp(const Failure& failure) {
    // The name goes first, so that nobody who is told has to look after it. Everybody who is connected is
    // told over its connection: not all have the shared board yet.
    UnguardFromFork(listener_.fd());
    listener_.Close();
    Fail(failure);
    const auto message = Encode(MessageType::kFail, board().failure().value_or(failure));
    Broadcast(message);
    for (auto& pending : pendings_) {
        SendAll(pending->fd.get(), message);
    }
    pendings_.clear();
    return Cause();
}

void LeaderSession::Welcome(Pending& pending, const HelloBody& hello) {
    const int rank = static_cast<int>(hello.rank);
    Seat& seat = At(rank);
    Peer& peer = PeerOf(rank);
    if (seat.progress != Progress::kAbsent) {
        // The old connection may have closed without our having looked yet.
        char byte = 0;
        const bool gone = ::recv(peer.control.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
        if (!gone && seat.nonce != hello.nonce) {
            Failure failure;
            failure.code = Code::kDuplicateRank;
            failure.phase = Phase::kHello;
            failure.origin_rank = static_cast<std::int16_t>(rank);
            failure.SetText("this rank is taken by a live process");
            Refuse(pending.fd.get(), failure);
            return;
        }
        DropPeer(peer);
        plane_->Forget(rank);
        seat.progress = Progress::kAbsent;
    }
    WelcomeBody welcome;
    welcome.epoch = config_.epoch;
    welcome.ring_slots = config_.ring_slots;
    welcome.max_frame = config_.max_frame;
    welcome.join_left_s = Seconds{join_budget_.left()}.count();
    welcome.stall_after_s = config_.stall_after.count();
    welcome.max_lag_steps = static_cast<std::uint32_t>(config_.max_lag_steps);
    welcome.abi = AbiHash();
    welcome.checksum = config_.checksum ? 1 : 0;
    std::vector<int> fds = plane_->Offer(rank);
    if (config_.backend == Backend::kRing) {
        fds.push_back(bell_.get());
    }
    welcome.fds = static_cast<std::uint32_t>(fds.size());
    const bool sent = SendAll(pending.fd.get(), Encode(MessageType::kWelcome, welcome), fds);
    plane_->Offered(rank);
    if (!sent) {
        plane_->Forget(rank);
        return;
    }
    peer.pidfd = OpenPidFd(pending.fd.get(), pending.pid);
    peer.parser = pending.parser;
    peer.control = std::move(pending.fd);
    GuardFromFork(peer.control.get());
    seat.progress = Progress::kWelcomed;
    seat.seen = true;
    seat.nonce = hello.nonce;
}

void LeaderSession::TakePending(Pending& pending, const Message& message) {
    if (message.type != MessageType::kHello) {
        pending.fd.reset();
        return;
    }
    const auto hello = message.As<HelloBody>();
    const HelloExpectation expected{config_.epoch, static_cast<std::uint32_t>(config_.size),
                                    static_cast<std::uint32_t>(config_.backend), config_.digest ? 1U : 0U};
    if (std::optional<Failure> refused = CheckHello(hello, expected)) {
        Refuse(pending.fd.get(), *refused);
    } else if (going_) {
        Failure failure;
        failure.code = Code::kDuplicateRank;
        failure.phase = Phase::kHello;
        failure.origin_rank = static_cast<std::int16_t>(hello.rank);
        failure.SetText("the group is complete");
        Refuse(pending.fd.get(), failure);
    } else if (hello.kind == static_cast<std::uint32_t>(ConnectionKind::kData)) {
        const int rank = static_cast<int>(hello.rank);
        if (config_.backend == Backend::kTcp && At(rank).progress != Progress::kAbsent &&
            At(rank).nonce == hello.nonce && !plane_->Ready(rank)) {
            plane_->Attach(rank, std::move(pending.fd));
        }
    } else {
        Welcome(pending, hello);
    }
    pending.fd.reset();
}

void LeaderSession::OnMessage(Peer& peer, const Message& message) noexcept {
    Seat& seat = At(peer.rank);
    const std::uint64_t bit = std::uint64_t{1} << peer.rank;
    switch (message.type) {
        case MessageType::kReady:
            if (seat.progress == Progress::kWelcomed) {
                seat.progress = Progress::kReady;
            }
            return;
        case MessageType::kAck:
            if (seat.progress == Progress::kReady) {
                seat.progress = Progress::kAcked;
                seat.in_s = Seconds{Now() - started_}.count();
            }
            return;
        case MessageType::kBye:
            byes_.fetch_or(bit);
            { const std::lock_guard lock{state_mutex_}; }
            state_changed_.notify_all();
            return;
        case MessageType::kBeat: {
            const auto beat = message.As<BeatBody>();
            RankLine& line = board().line(peer.rank);
            line.loop_beat.store(beat.loop, std::memory_order_relaxed);
            line.process_beat.store(beat.process, std::memory_order_relaxed);
            line.in_loop.store(beat.in_loop, std::memory_order_relaxed);
            return;
        }
        case MessageType::kDigest: {
            const auto digest = message.As<DigestBody>();
            if (config_.digest) {
                if (std::optional<Failure> diverged =
                        board().StoreDigest(peer.rank, digest.step, digest.value)) {
                    Fail(*diverged);
                }
            }
            return;
        }
        case MessageType::kFail: {
            Failure failure = message.AsFailure();
            Fail(failure);
            return;
        }
        default: {
            Failure failure;
            failure.code = Code::kForeignFrame;
            failure.phase = Phase::kRun;
            failure.origin_rank = static_cast<std::int16_t>(peer.rank);
            failure.got = static_cast<std::uint64_t>(message.type);
            failure.SetText("a message that only rank 0 may send");
            Fail(failure);
            return;
        }
    }
}

void LeaderSession::OnPeerGone(Peer& peer, bool process_gone) noexcept {
    // Once all are in Finish, rank 0 included, it may have returned on its way to END: whoever goes then has
    // finished. While rank 0 still works, a rank that waits in Finish and goes is missing.
    if (ended_.load() || (joined_ && byes_.load() == AllByes() && final_step_.load() != kNoFinalStep)) {
        return;
    }
    if (!going_) {
        // It may come back until GO.
        At(peer.rank).progress = Progress::kAbsent;
        plane_->Forget(peer.rank);
        return;
    }
    Failure failure;
    failure.code = Code::kPeerDied;
    failure.phase = joined_ ? (byes_.load() >> peer.rank & 1U ? Phase::kFinish : Phase::kRun) : Phase::kGo;
    failure.origin_rank = static_cast<std::int16_t>(peer.rank);
    failure.step = current_step();
    failure.SetText(process_gone ? "this rank's process has ended"
                                 : "this rank's connection is closed without finish");
    Fail(failure);
}

void LeaderSession::PollOnce(Call& call) {
    std::vector<pollfd> polls;
    polls.push_back({listener_.fd(), POLLIN, 0});
    const std::size_t first_pending = polls.size();
    const std::size_t pending_count = pendings_.size();
    for (auto& pending : pendings_) {
        polls.push_back({pending->fd.get(), POLLIN, 0});
    }
    const std::size_t first_peer = polls.size();
    for (auto& peer : peers_) {
        polls.push_back({peer->control.get(), POLLIN, 0});
        polls.push_back({peer->pidfd.get(), POLLIN, 0});
    }
    const auto slice = std::chrono::duration_cast<std::chrono::milliseconds>(call.Slice()).count();
    Hook(Point::kBeforeWait);
    ::poll(polls.data(), polls.size(), static_cast<int>(std::max<std::int64_t>(slice, 1)));
    // Peers first: a place that has become free must be free for a newcomer of the same turn.
    for (std::size_t i = 0; i < peers_.size(); ++i) {
        Peer& peer = *peers_[i];
        const pollfd& control = polls[first_peer + 2 * i];
        const pollfd& pidfd = polls[first_peer + 2 * i + 1];
        bool gone = false;
        if (control.revents != 0) {
            gone = !ReadControl(peer);
        }
        if (!gone && pidfd.revents != 0) {
            ReadControl(peer);
            gone = true;
        }
        if (gone) {
            OnPeerGone(peer, pidfd.revents != 0);
            DropPeer(peer);
        }
    }
    for (std::size_t i = 0; i < pending_count; ++i) {
        Pending& pending = *pendings_[i];
        if (polls[first_pending + i].revents != 0) {
            const std::span<std::byte> room = pending.parser.Room();
            const ssize_t n = ::recv(pending.fd.get(), room.data(), room.size(), MSG_DONTWAIT);
            if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
                pending.fd.reset();
                continue;
            }
            pending.parser.Added(n > 0 ? static_cast<std::size_t>(n) : 0);
            Message message;
            switch (pending.parser.Next(&message)) {
                case MessageParser::State::kMessage:
                    TakePending(pending, message);
                    break;
                case MessageParser::State::kBad:
                    pending.fd.reset();
                    break;
                case MessageParser::State::kNeedMore:
                    break;
            }
        }
        if (pending.fd.valid() && pending.budget.Spend()) {
            pending.fd.reset();
        }
    }
    std::erase_if(pendings_, [](const std::unique_ptr<Pending>& pending) { return !pending->fd.valid(); });
    if (polls[0].revents != 0) {
        for (UniqueFd fd = listener_.Accept(); fd.valid(); fd = listener_.Accept()) {
            auto pending = std::make_unique<Pending>();
            if (CheckPeerUser(fd.get(), &pending->pid) && pendings_.size() < kMaxPending) {
                pending->fd = std::move(fd);
                pendings_.push_back(std::move(pending));
            }
        }
    }
}

Result<std::optional<JoinReport>> LeaderSession::Join(const InterruptCheck& interrupt) {
    Call call{*this, interrupt};
    if (std::optional<Failure> refused = call.Enter(false)) {
        return *refused;
    }
    started_ = Now();
    join_budget_ = Budget{config_.join};
    JoinReport report;
    report.rank_s.emplace_back(0, 0.0);
    if (config_.size == 1) {
        joined_ = true;
        return std::optional{report};
    }
    call.Within(&join_budget_);
    if (Status opened = Open(); !opened) {
        return GiveUp(opened.failure());
    }
    // Only this end leaves the join; the others hear why, and that there is no more to wait for.
    const auto leave = [&](Code code, Phase phase, std::string_view text) {
        Failure failure;
        failure.code = code;
        failure.phase = phase;
        failure.origin_rank = 0;
        failure.SetText(text);
        GiveUp(failure);
    };
    const auto turn = [&]() -> std::optional<Result<std::optional<JoinReport>>> {
        PollOnce(call);
        switch (call.Pause()) {
            case Stop::kNone:
            case Stop::kFinished:
                return std::nullopt;
            case Stop::kTimeout:
                if (TimedOut().missing == 0) {
                    return std::nullopt;
                }
                return Result<std::optional<JoinReport>>{GiveUp(TimedOut())};
            case Stop::kInterrupted:
                leave(Code::kRemoteFailure, Phase::kDial,
                      "rank 0 was interrupted while it let the others in");
                return Result<std::optional<JoinReport>>{std::optional<JoinReport>{}};
            case Stop::kClosed:
                // To the others it is gone, as it would be at any later time.
                leave(Code::kLeaderDied, Phase::kGo, "rank 0 was closed while it let the others in");
                return Result<std::optional<JoinReport>>{Cause()};
            case Stop::kFailed:
                return Result<std::optional<JoinReport>>{GiveUp(Cause())};
        }
        return std::nullopt;
    };
    const auto ready = [&] {
        for (int r = 1; r < config_.size; ++r) {
            if (!plane_->Ready(r)) {
                return false;
            }
        }
        return AllAt(Progress::kReady);
    };
    while (!ready()) {
        if (auto over = turn()) {
            return std::move(*over);
        }
    }
    Hook(Point::kBeforeGo);
    // From GO on nobody can be replaced, so nobody may still find the way in: the name goes first.
    going_ = true;
    UnguardFromFork(listener_.fd());
    listener_.Close();
    pendings_.clear();
    Failure failure;
    if (const Stop stop = plane_->SendGo(call, &failure); stop != Stop::kNone) {
        // Nobody else reads the control connections yet: what a follower said before it went comes first.
        for (auto& peer : peers_) {
            if (peer->control.valid()) {
                ReadControl(*peer);
            }
        }
        if (stop == Stop::kInterrupted || failure.code == Code::kOk) {
            failure.code = failure.code == Code::kOk ? Code::kRemoteFailure : failure.code;
            failure.phase = Phase::kGo;
            failure.origin_rank = 0;
        }
        const Failure cause = GiveUp(stop == Stop::kFailed && board().failed() ? Cause() : failure);
        if (stop == Stop::kInterrupted) {
            return std::optional<JoinReport>{};
        }
        return cause;
    }
    while (!AllAt(Progress::kAcked)) {
        ShowLife();  // whoever has GO already watches rank 0's beat
        if (auto over = turn()) {
            return std::move(*over);
        }
    }
    for (int r = 1; r < config_.size; ++r) {
        report.rank_s.emplace_back(r, At(r).in_s);
    }
    report.elapsed_s = Seconds{Now() - started_}.count();
    joined_ = true;
    armed_ = true;
    StartMonitor();
    return std::optional{std::move(report)};
}

void LeaderSession::BlameTheStopped(Failure* failure) noexcept {
    // Several readers may be equally far behind because they wait for one of them: blame the one whose
    // process does not run.
    const std::uint64_t behind =
        board().line(failure->origin_rank).consumed_step.load(std::memory_order_seq_cst);
    Nanos worst{0};
    for (auto& peer : peers_) {
        if (board().line(peer->rank).consumed_step.load(std::memory_order_seq_cst) == behind) {
            const double age =
                process_ages_[static_cast<std::size_t>(peer->rank)].load(std::memory_order_relaxed);
            if (const Nanos stale = ToNanos(Seconds{age}); stale > worst) {
                worst = stale;
                failure->origin_rank = static_cast<std::int16_t>(peer->rank);
            }
        }
    }
}

Result<Wait> LeaderSession::Publish(std::span<const Frame> frames, std::uint64_t* number,
                                    const InterruptCheck& interrupt) {
    Call call{*this, interrupt};
    if (std::optional<Failure> refused = call.Enter(true)) {
        return *refused;
    }
    if (final_step_.load() != kNoFinalStep) {
        return ClosedFailure("no step can follow finish");
    }
    if (std::optional<Failure> large = StepSource::Check(frames, config_)) {
        return *large;
    }
    const std::uint64_t step = current_step() + 1;
    if (config_.size > 1) {
        Failure failure;
        switch (plane_->Send(frames, step, call, &failure)) {
            case Stop::kNone:
                break;
            case Stop::kInterrupted:
            case Stop::kTimeout:
                if (failure.code != Code::kOk) {
                    Fail(failure);
                }
                return Wait::kInterrupted;
            case Stop::kFailed:
                if (failure.code == Code::kPublishStalled) {
                    BlameTheStopped(&failure);
                }
                if (failure.code != Code::kOk) {
                    Fail(failure);
                }
                return Cause();
            case Stop::kClosed:
            case Stop::kFinished:
                return Cause();
        }
    }
    step_.store(step, std::memory_order_relaxed);
    *number = step;
    return Wait::kReady;
}

}  // namespace

std::shared_ptr<Session> MakeLeaderSession(Config config) {
    return std::make_shared<LeaderSession>(std::move(config));
}

Leader::Leader(Config config) : Endpoint{MakeLeaderSession(std::move(config))} {}
Leader::~Leader() = default;
Result<std::optional<JoinReport>> Leader::Join(const InterruptCheck& interrupt) {
    return static_cast<LeaderSession&>(*session_).Join(interrupt);
}
Result<Wait> Leader::Publish(std::span<const Frame> frames, std::uint64_t* number,
                             const InterruptCheck& interrupt) {
    return static_cast<LeaderSession&>(*session_).Publish(frames, number, interrupt);
}

}  // namespace rankgate::relay
