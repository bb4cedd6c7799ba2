// SPDX-License-Identifier: Apache-2.0
#include "relay/session.h"

#include <linux/sockios.h>
#include <poll.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <csignal>
#include <stdexcept>
#include <system_error>

#include "relay/hooks.h"
#include "relay/rendezvous.h"

namespace rankgate::relay {
namespace {

/// How long a follower waits for rank 0, which knows more, to say what the group's first cause is: without
/// shared memory always, and at the end of its time in Finish if rank 0 is there.
constexpr Seconds kVerdict{1.0};
/// Beats are not sent into a connection whose peer has not read this much: it is stopped, and FAIL must still
/// fit.
constexpr int kBeatBacklog = 16 * 1024;
constexpr int kExitCode = 70;
constexpr Nanos kShortestTick = std::chrono::milliseconds{5};

}  // namespace

Session::Session(Config config, bool leader)
    : config_{std::move(config)}, leader_{leader}, failure_fd_{MakeEventFd()}, monitor_wake_{MakeEventFd()} {
    if (std::string why = config_.Validate(); !why.empty()) {
        throw std::invalid_argument{why};
    }
    if (leader_ != (config_.rank == 0)) {
        throw std::invalid_argument{leader_ ? "rank: the leader is rank 0"
                                            : "rank: a follower's rank is 1 or more"};
    }
    // Only a group of several has anything to share; the leader makes the board that all map.
    own_board_ = Board::Create(config_, leader_ && config_.size > 1 && shared_board());
    if (!own_board_ || !failure_fd_.valid() || !monitor_wake_.valid()) {
        throw std::system_error{errno, std::generic_category(), "relay: no memory or descriptors"};
    }
    board_.store(own_board_.get());
    stall_after_.store(config_.stall_after.count());
    if (config_.parent_death_signal != 0) {
        ::prctl(PR_SET_PDEATHSIG, config_.parent_death_signal);
    }
}

Session::~Session() {
    if (forked()) {
        // These descriptors were closed by the fork handler; their numbers may belong to somebody else by
        // now.
        for (auto& peer : peers_) {
            static_cast<void>(peer->control.release());
        }
    }
    if (monitor_.joinable()) {
        // In a forked child the thread does not exist; otherwise this is the monitor itself, letting go of
        // the last reference.
        monitor_.detach();
    }
    if (exit_timer_.joinable()) {
        exit_timer_.detach();
    }
}

std::optional<Failure> Session::failure() noexcept {
    if (closed_clean_.load(std::memory_order_acquire)) {
        return std::nullopt;
    }
    std::optional<Failure> cause = board().failure();
    if (cause && !forked()) {
        Latch();
    }
    return cause;
}

Failure Session::ClosedFailure(std::string_view text) const {
    Failure failure;
    failure.code = Code::kClosed;
    failure.phase = Phase::kClose;
    failure.origin_rank = static_cast<std::int16_t>(config_.rank);
    failure.SetText(text);
    return failure;
}

Failure Session::Cause() {
    if (std::optional<Failure> cause = failure()) {
        return *cause;
    }
    return ClosedFailure("this end is closed");
}

Status Session::Check() noexcept {
    if (std::optional<Failure> cause = failure()) {
        return *cause;
    }
    return std::monostate{};
}

void Session::Latch() noexcept {
    if (latched_.load(std::memory_order_acquire) || closed_clean_.load() || !board().failed()) {
        return;
    }
    // First: whoever finds it latched by another thread may raise at once, and the descriptor must say so
    // then.
    SignalEventFd(failure_fd_.get());
    if (!latched_.exchange(true)) {
        if (bell_.valid()) {
            SignalEventFd(bell_.get());
        }
        SignalEventFd(monitor_wake_.get());
        WakeCalls();
    }
}

void Session::WakeCalls() noexcept {
    { const std::lock_guard lock{state_mutex_}; }
    state_changed_.notify_all();
    WakePlane();
}

void Session::Fail(const Failure& failure, bool here) noexcept {
    if (forked()) {
        return;
    }
    Board& b = board();
    const auto message = Encode(MessageType::kFail, failure);
    if (!b.failed() && !leader_ && !shared_board()) {
        // Rank 0 decides which cause was the first; its FAIL comes back to everybody, us included. A rank 0
        // that cannot answer now (stopped) still finds our FAIL in front of our closed socket.
        if (Peer* peer = FindPeer(0); peer != nullptr && Send(*peer, message) && !here) {
            Budget budget{kVerdict};
            std::unique_lock state{state_mutex_};
            while (!b.failed() && !budget.Spend()) {
                state_changed_.wait_for(state, std::chrono::milliseconds{5});
            }
        }
    }
    {
        const std::lock_guard lock{fail_mutex_};
        if (!b.failed() && !(leader_ && ended_.load())) {
            if (leader_ && !shared_board()) {
                // Told before it can be raised here: this process may end on the raise.
                Broadcast(message);
            }
            b.Record(config_.rank, failure);
        }
    }
    Latch();
}

Peer* Session::FindPeer(int rank) noexcept {
    for (auto& peer : peers_) {
        if (peer->rank == rank && peer->control.valid()) {
            return peer.get();
        }
    }
    return nullptr;
}

bool Session::Send(Peer& peer, std::span<const std::byte> bytes, std::span<const int> fds) noexcept {
    const std::lock_guard lock{send_mutex_};
    return peer.control.valid() && SendAll(peer.control.get(), bytes, fds);
}

void Session::Broadcast(std::span<const std::byte> bytes) noexcept {
    for (auto& peer : peers_) {
        Send(*peer, bytes);
    }
}

void Session::DropPeer(Peer& peer) noexcept {
    const std::lock_guard lock{send_mutex_};
    if (peer.control.valid()) {
        UnguardFromFork(peer.control.get());
        peer.control.reset();
    }
    peer.pidfd.reset();
}

bool Session::ReadControl(Peer& peer) noexcept {
    for (;;) {
        const std::span<std::byte> room = peer.parser.Room();
        const ssize_t n = ::recv(peer.control.get(), room.data(), room.size(), MSG_DONTWAIT);
        if (n < 0) {
            return errno == EAGAIN || errno == EINTR;
        }
        if (n == 0) {
            return false;
        }
        peer.parser.Added(static_cast<std::size_t>(n));
        Message message;
        MessageParser::State state;
        while ((state = peer.parser.Next(&message)) == MessageParser::State::kMessage) {
            OnMessage(peer, message);
        }
        if (state == MessageParser::State::kBad) {
            Failure failure;
            failure.code = Code::kForeignFrame;
            failure.phase = Phase::kRun;
            failure.origin_rank = static_cast<std::int16_t>(peer.rank);
            failure.SetText("not a message of this protocol on the control connection");
            Fail(failure, true);
            return false;
        }
    }
}

Nanos Session::CallSlice() const noexcept {
    const double stall = stall_after_.load(std::memory_order_relaxed);
    Nanos slice = std::chrono::milliseconds{200};
    if (stall > 0) {
        slice = std::min(slice, ToNanos(Seconds{stall / 8}));
    }
    return std::min(slice, std::max(ToNanos(config_.beat), Nanos{std::chrono::milliseconds{10}}));
}

Nanos Session::Tick() const noexcept {
    const double stall = stall_after_.load(std::memory_order_relaxed);
    Nanos tick = ToNanos(config_.beat);
    if (stall > 0) {
        tick = std::min(tick, std::clamp(ToNanos(Seconds{stall / 10}), kShortestTick, Budget::kSlice));
    }
    // A stalled publish is blamed on a process that does not run: its beat must be younger than that budget.
    tick = std::min(tick, std::max(ToNanos(config_.publish_stall / 10), kShortestTick));
    return tick;
}

void Session::StartMonitor() {
    // No signal may land on the monitor: Python's handlers belong to the main thread, and a wait there must
    // see EINTR.
    sigset_t all;
    sigset_t old;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &old);
    last_beat_check_ = Now();
    monitor_ = std::thread{[self = shared_from_this()] { self->Monitor(); }};
    ::pthread_sigmask(SIG_SETMASK, &old, nullptr);
}

void Session::StopMonitor() noexcept {
    stop_monitor_ = true;
    SignalEventFd(monitor_wake_.get());
    if (monitor_.joinable()) {
        monitor_.join();
    }
    stop_monitor_ = closed_.load();
}

void Session::Monitor() {
    ::pthread_setname_np(::pthread_self(), "relay-monitor");
    std::vector<pollfd> polls;
    std::vector<std::pair<Peer*, bool>> who;  // true = the pidfd of this peer
    while (!stop_monitor_.load(std::memory_order_acquire)) {
        polls.clear();
        who.clear();
        const auto watch = [&](int fd, short events, Peer* peer, bool pidfd) {
            if (fd >= 0) {
                polls.push_back({fd, events, 0});
                who.emplace_back(peer, pidfd);
            }
        };
        watch(monitor_wake_.get(), POLLIN, nullptr, false);
        const bool failed = latched_.load(std::memory_order_acquire);
        watch(failed ? -1 : bell_.get(), POLLIN, nullptr, false);
        const std::size_t guard = polls.size();
        watch(failed ? -1 : config_.guard_fd, 0, nullptr, false);
        const std::size_t first_peer = polls.size();
        for (auto& peer : peers_) {
            watch(peer->control.get(), POLLIN, peer.get(), false);
            watch(peer->pidfd.get(), POLLIN, peer.get(), true);
        }
        const int n =
            ::poll(polls.data(), polls.size(),
                   static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(Tick()).count()));
        board().line(config_.rank).process_beat.fetch_add(1, std::memory_order_relaxed);
        if (n > 0) {
            if (polls[0].revents != 0) {
                std::uint64_t value = 0;
                [[maybe_unused]] const ssize_t got = ::read(monitor_wake_.get(), &value, sizeof value);
            }
            if (guard < first_peer && (polls[guard].revents & (POLLHUP | POLLERR | POLLNVAL)) != 0) {
                Failure failure;
                failure.code = Code::kRemoteFailure;
                failure.phase = Phase::kRun;
                failure.origin_rank = static_cast<std::int16_t>(config_.rank);
                failure.SetText("the launcher of this rank is gone (guard_fd closed)");
                Fail(failure, true);
            }
            // Connections first: a FAIL or BYE that was sent before the death says more than the death.
            for (std::size_t i = first_peer; i < polls.size(); ++i) {
                Peer* peer = who[i].first;
                if (polls[i].revents != 0 && !who[i].second && peer->control.valid() && !ReadControl(*peer)) {
                    OnPeerGone(*peer, false);
                    DropPeer(*peer);
                }
            }
            for (std::size_t i = first_peer; i < polls.size(); ++i) {
                Peer* peer = who[i].first;
                if (polls[i].revents != 0 && who[i].second && peer->pidfd.valid()) {
                    if (peer->control.valid()) {
                        ReadControl(*peer);
                    }
                    OnPeerGone(*peer, true);
                    DropPeer(*peer);
                }
            }
        }
        if (board().failed()) {
            Latch();
        }
        CheckBeats(Now());
        RunFailureActions();
    }
}

void Session::CheckBeats(SteadyTime now) noexcept {
    const Nanos passed =
        std::min(std::max(now - last_beat_check_, Nanos{0}), std::max(Budget::kClamp, 2 * Tick()));
    last_beat_check_ = now;
    if (!armed_.load(std::memory_order_acquire) || latched_.load() || ended_.load()) {
        return;
    }
    if (!shared_board()) {
        since_sent_ += passed;
        if (since_sent_ >= Tick() / 2) {
            since_sent_ = Nanos{0};
            SendBeats();
        }
    }
    const double limit = stall_after_.load(std::memory_order_relaxed);
    Peer* worst = nullptr;
    bool worst_is_process = false;
    for (auto& owned : peers_) {
        Peer& peer = *owned;
        if (!peer.control.valid()) {
            continue;
        }
        RankLine& line = board().line(peer.rank);
        const std::uint32_t loop = line.loop_beat.load(std::memory_order_relaxed);
        const std::uint32_t process = line.process_beat.load(std::memory_order_relaxed);
        peer.loop_stale = loop != peer.last_loop ? Nanos{0} : peer.loop_stale + passed;
        peer.process_stale = process != peer.last_process ? Nanos{0} : peer.process_stale + passed;
        peer.last_loop = loop;
        peer.last_process = process;
        const bool by_loop = WatchLoop(peer);
        const Nanos stale = by_loop ? peer.loop_stale : peer.process_stale;
        ages_[static_cast<std::size_t>(peer.rank)].store(Seconds{stale}.count(), std::memory_order_relaxed);
        process_ages_[static_cast<std::size_t>(peer.rank)].store(Seconds{peer.process_stale}.count(),
                                                                 std::memory_order_relaxed);
        if (limit <= 0 || stale < ToNanos(Seconds{limit})) {
            continue;
        }
        // Several may stand still because one does: the one whose process does not run at all is the cause.
        const bool is_process = peer.process_stale >= ToNanos(Seconds{limit / 2});
        if (worst == nullptr || (is_process && !worst_is_process)) {
            worst = &peer;
            worst_is_process = is_process;
        }
    }
    if (worst != nullptr) {
        Failure failure;
        failure.code = Code::kPeerStalled;
        failure.phase = Phase::kRun;
        failure.origin_rank = static_cast<std::int16_t>(worst->rank);
        // Without shared memory every follower judges a silent rank 0 alone, and all must say the same.
        failure.step = leader_ || shared_board() ? current_step() : 0;
        failure.deadline_s = limit;
        failure.SetText(worst_is_process ? "this rank's process does not run (stopped or frozen)"
                                         : "this rank's scheduler loop shows no life");
        // A follower whose leader is stopped cannot ask it.
        Fail(failure, true);
    }
}

void Session::ShowLife() noexcept {
    board().line(config_.rank).process_beat.fetch_add(1, std::memory_order_relaxed);
    if (!shared_board()) {
        SendBeats();
    }
}

void Session::SendBeats() noexcept {
    RankLine& line = board().line(config_.rank);
    BeatBody beat;
    beat.loop = line.loop_beat.load(std::memory_order_relaxed);
    beat.process = line.process_beat.load(std::memory_order_relaxed);
    beat.in_loop = line.in_loop.load(std::memory_order_relaxed);
    const auto message = Encode(MessageType::kBeat, beat);
    for (auto& peer : peers_) {
        int unread = 0;
        if (peer->control.valid() && ::ioctl(peer->control.get(), SIOCOUTQ, &unread) == 0 &&
            unread < kBeatBacklog) {
            Send(*peer, message);
        }
    }
}

void Session::RunFailureActions() noexcept {
    if (!latched_.load(std::memory_order_acquire)) {
        return;
    }
    if (!callback_done_) {
        callback_done_ = true;
        if (config_.exit_after.count() > 0) {
            // A thread of its own: the callback may never return, where the main thread holds what it needs.
            exit_timer_ = std::thread{[self = shared_from_this()] { self->ExitAfter(); }};
        }
        if (config_.on_failure) {
            config_.on_failure(Cause());
        }
    }
}

void Session::ExitAfter() {
    Budget budget{config_.exit_after};
    std::unique_lock lock{state_mutex_};
    while (!state_changed_.wait_for(lock, budget.slice(), [this] { return closed_.load(); })) {
        if (budget.Spend()) {
            ::_exit(kExitCode);
        }
    }
}

std::vector<double> Session::BeatAges() const {
    std::vector<double> ages;
    ages.reserve(ages_.size());
    for (int r = 0; r < config_.size; ++r) {
        ages.push_back(ages_[static_cast<std::size_t>(r)].load(std::memory_order_relaxed));
    }
    return ages;
}

Status Session::SetDigest(std::uint64_t value) {
    const InterruptCheck none;
    Call call{*this, none};
    if (std::optional<Failure> refused = call.Enter(true)) {
        return *refused;
    }
    const std::uint64_t step = current_step();
    if (!config_.digest || config_.size == 1 || step == 0) {
        return std::monostate{};
    }
    if (shared_board() || leader_) {
        TakeDigest(config_.rank, step, value);
        return Check();
    }
    SendDigest(step, value);
    return std::monostate{};
}

void Session::TakeDigest(int rank, std::uint64_t step, std::uint64_t value) noexcept {
    std::optional<Failure> diverged;
    if (shared_board()) {
        diverged = board().StoreDigest(rank, step, value);
    } else {
        const std::lock_guard lock{digest_mutex_};
        diverged = board().StoreDigest(rank, step, value);
    }
    if (diverged) {
        Fail(*diverged);
    }
}

Result<Wait> Session::Finish(Seconds budget_s, const InterruptCheck& interrupt) {
    Call call{*this, interrupt};
    if (finished_) {
        return Wait::kReady;
    }
    if (std::optional<Failure> refused = call.Enter(true)) {
        return *refused;
    }
    if (config_.size == 1) {
        finished_ = true;
        return Wait::kReady;
    }
    Budget budget{budget_s};
    call.Within(&budget);
    if (Status announced = AnnounceFinish(); !announced) {
        Fail(announced.failure());
        return Cause();
    }
    const std::uint64_t everybody = AllByes();
    // A follower has waited its time and gives rank 0, which knows who is missing, a moment more.
    bool patient = false;
    for (;;) {
        const bool done = leader_ ? byes_.load() == everybody : ended_.load();
        if (done) {
            // A rank that was lost before the last BYE came has been reported to all: then this is no orderly
            // end.
            // It is one or the other: Fail looks at ended_ under the same lock.
            const std::lock_guard lock{fail_mutex_};
            if (leader_ && board().failed()) {
                return Cause();
            }
            ended_ = true;
            break;
        }
        if (const Stop stop = call.Check(); stop == Stop::kFailed || stop == Stop::kClosed) {
            return Cause();
        }
        {
            std::unique_lock lock{state_mutex_};
            state_changed_.wait_for(lock, std::min<Nanos>(call.Slice(), std::chrono::milliseconds{50}), [&] {
                return board().failed() || closed_ || (leader_ ? byes_.load() == everybody : ended_.load());
            });
        }
        switch (call.Pause()) {
            case Stop::kInterrupted:
                return Wait::kInterrupted;
            case Stop::kTimeout: {
                if (leader_ ? byes_.load() == everybody : ended_.load()) {
                    continue;
                }
                const bool leader_came = final_step_.load() != kNoFinalStep;
                if (!leader_ && leader_came && !patient) {
                    patient = true;
                    budget.ExtendTo(kVerdict);
                    continue;
                }
                Failure failure;
                failure.code = Code::kPeerStalled;
                failure.phase = Phase::kFinish;
                failure.step = leader_ || shared_board() ? current_step() : 0;
                failure.deadline_s = budget_s.count();
                if (leader_ || !leader_came) {
                    failure.missing = leader_ ? everybody & ~byes_.load() : 1;
                    failure.origin_rank = static_cast<std::int16_t>(std::countr_zero(failure.missing));
                    failure.SetText("not every rank came to the orderly end in time");
                } else {
                    failure.SetText("rank 0 came to the orderly end and still waits for others");
                }
                Fail(failure);
                return Cause();
            }
            default:
                break;
        }
    }
    if (leader_) {
        Broadcast(EncodeBare(MessageType::kEnd));
    }
    finished_ = true;
    return Wait::kReady;
}

void Session::Close() noexcept {
    if (forked()) {
        return;
    }
    if (!closed_.load() && !board().failed()) {
        closed_clean_ = true;
    }
    closed_ = true;
    WakeCalls();
    // A signal handler that runs inside a call of this very thread may close: the call then ends, and the
    // rest is done by the second Close, which the destructor makes at the latest.
    const bool inside = caller_.load() == std::this_thread::get_id();
    std::unique_lock<std::mutex> lock;
    if (!inside) {
        lock = std::unique_lock{call_mutex_};
    }
    stop_monitor_ = true;
    SignalEventFd(monitor_wake_.get());
    if (monitor_.joinable()) {
        if (monitor_.get_id() == std::this_thread::get_id()) {
            return;  // from on_failure: the thread ends by itself; the destructor's Close finds it elsewhere
        }
        if (inside) {
            return;
        }
        monitor_.join();
    }
    if (inside) {
        return;
    }
    if (exit_timer_.joinable()) {
        exit_timer_.join();
    }
    for (auto& peer : peers_) {
        DropPeer(*peer);
    }
    ClosePlane();
}

Call::Call(Session& session, const InterruptCheck& interrupt) noexcept
    : session_{session}, interrupt_{interrupt} {}

Call::~Call() {
    if (locked_) {
        session_.caller_.store(std::thread::id{});
        session_.call_mutex_.unlock();
    }
}

std::optional<Failure> Call::Enter(bool must_be_joined) {
    if (session_.forked()) {
        return session_.ClosedFailure("this object belongs to the parent process");
    }
    if (session_.caller_.load() == std::this_thread::get_id()) {
        return session_.ClosedFailure("called again from inside a waiting call of the same thread");
    }
    session_.call_mutex_.lock();
    locked_ = true;
    session_.caller_.store(std::this_thread::get_id());
    if (std::optional<Failure> cause = session_.failure()) {
        return cause;
    }
    if (session_.closed_) {
        return session_.ClosedFailure("this end is closed");
    }
    if (session_.finished_) {
        return session_.ClosedFailure("this end has finished");
    }
    if (must_be_joined != session_.joined_.load()) {
        return session_.ClosedFailure(must_be_joined ? "join comes first" : "joined already");
    }
    if (must_be_joined) {
        RankLine& line = session_.board().line(session_.config_.rank);
        line.in_loop.store(1, std::memory_order_relaxed);
        session_.board().Beat(session_.config_.rank);
    }
    return std::nullopt;
}

Stop Call::Check() {
    Board& board = session_.board();
    board.Beat(session_.config_.rank);
    if (board.failed()) {
        session_.Latch();
        return Stop::kFailed;
    }
    if (session_.closed_.load(std::memory_order_relaxed)) {
        return Stop::kClosed;
    }
    if (next_step_ != 0 && next_step_ > session_.final_step_.load(std::memory_order_acquire)) {
        return Stop::kFinished;
    }
    return Stop::kNone;
}

Stop Call::Pause() {
    if (const Stop stop = Check(); stop != Stop::kNone) {
        return stop;
    }
    if (interrupt_ && interrupt_()) {
        return Stop::kInterrupted;
    }
    if ((budget_ != nullptr && budget_->Spend()) || (until_ && Now() >= *until_)) {
        return Stop::kTimeout;
    }
    return Check();  // a handler may have closed or failed us
}

Nanos Call::Slice() {
    Nanos slice = session_.CallSlice();
    if (budget_ != nullptr) {
        slice = std::min(slice, budget_->slice());
    }
    if (until_) {
        slice = std::min(slice, std::max<Nanos>(*until_ - Now(), Nanos{0}));
    }
    return slice;
}

Endpoint::Endpoint(std::shared_ptr<Session> session) : session_{std::move(session)} {}
Endpoint::~Endpoint() {
    session_->Close();
}
const Config& Endpoint::config() const noexcept {
    return session_->config();
}
std::optional<Failure> Endpoint::failure() const {
    return session_->failure();
}
Status Endpoint::Check() const {
    return session_->Check();
}
int Endpoint::failure_fd() const noexcept {
    return session_->failure_fd();
}
void Endpoint::Fail(Code code, std::string_view text) {
    Failure failure;
    failure.code = code;
    failure.phase = Phase::kRun;
    failure.origin_rank = static_cast<std::int16_t>(config().rank);
    failure.SetText(text);
    session_->Fail(failure);
}
Status Endpoint::SetDigest(std::uint64_t value) {
    return session_->SetDigest(value);
}
Result<Wait> Endpoint::Finish(Seconds budget, const InterruptCheck& interrupt) {
    return session_->Finish(budget, interrupt);
}
std::vector<double> Endpoint::BeatAges() const {
    return session_->BeatAges();
}
void Endpoint::Close() noexcept {
    session_->Close();
}

}  // namespace rankgate::relay
