// SPDX-License-Identifier: Apache-2.0
#include "transport/zmtp_dialer.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "base/check.h"

namespace rankgate::transport {
namespace {

constexpr Duration kFirstRedial = std::chrono::milliseconds(50);
constexpr Duration kLastRedial = std::chrono::seconds(1);
constexpr std::uint64_t kControl = ~std::uint64_t{0};
constexpr std::uint64_t kLeaving = std::uint64_t{1} << 63U;  // + its id; lines have turns below 2^31
constexpr std::uint32_t kMaxTurn = (std::uint32_t{1} << 31U) - 1;
constexpr std::size_t kKeptOutput = 64 * 1024;

void Ring(int fd) noexcept {
    const std::uint64_t one = 1;
    const ssize_t n = ::write(fd, &one, sizeof one);
    (void)n;  // a full counter is a ringing bell
}

}  // namespace

// ---- the keeper ----

ZmtpKeeper::ZmtpKeeper()
    : epoll_{::epoll_create1(EPOLL_CLOEXEC)},
      control_{::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)},
      news_{::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)} {
    RG_CHECK(epoll_.valid() && control_.valid() && news_.valid());
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = kControl;
    RG_CHECK(::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, control_.get(), &event) == 0);
    // Signals are for the threads that expect them.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { Run(); });
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    ::pthread_setname_np(thread_.native_handle(), "rg-dial");
}

ZmtpKeeper::~ZmtpKeeper() {
    {
        const std::lock_guard lock{mutex_};
        stopping_ = true;
    }
    Wake();
    thread_.join();
}

void ZmtpKeeper::Wake() const noexcept {
    Ring(control_.get());
}

std::size_t ZmtpKeeper::Add(std::string path, ZmtpRole role, std::string identity, const ZmtpLimits& limits,
                            std::string_view first) {
    std::size_t number = 0;
    {
        const std::lock_guard lock{mutex_};
        number = lines_.size();
        Line& line = lines_.emplace_back();
        line.path = std::move(path);
        line.role = role;
        line.identity = std::move(identity);
        line.limits = limits;
        if (!first.empty()) {
            char header[kMaxZmtpFrameHeader];
            line.first.assign(header, ZmtpFrameHeader(header, first.size(), false));
            line.first += first;
        }
        line.back_off = kFirstRedial;
        line.due = clock_.Now();
    }
    Wake();
    return number;
}

void ZmtpKeeper::Remove(std::size_t number) {
    const std::lock_guard lock{mutex_};
    Line& line = lines_[number];
    line.removed = true;
    line.arrival = {};
    line.ready = false;
    line.due = TimePoint::max();
}

bool ZmtpKeeper::Take(std::size_t number, ZmtpArrival& arrival) {
    const std::lock_guard lock{mutex_};
    Line& line = lines_[number];
    if (!line.ready) {
        return false;
    }
    line.ready = false;
    arrival = std::move(line.arrival);
    arrival.turn = line.turn;
    return true;
}

void ZmtpKeeper::Ended(std::size_t number, std::uint32_t turn) {
    {
        const std::lock_guard lock{mutex_};
        if (lines_[number].removed || lines_[number].turn != turn) {
            return;
        }
        Lost(number, true);
    }
    Wake();
}

void ZmtpKeeper::SeeOff(UniqueFd fd, std::string rest, TimePoint until) {
    {
        const std::lock_guard lock{mutex_};
        Leaving& leaving = leaving_.emplace_back(
            Leaving{std::move(fd), std::move(rest), 0, until, next_leaving_++ & ~kLeaving});
        epoll_event event{};
        event.events = EPOLLOUT;
        event.data.u64 = kLeaving | leaving.id;
        // It may still be watched as a line's connection.
        if (::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, leaving.fd.get(), &event) != 0) {
            RG_CHECK(::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, leaving.fd.get(), &event) == 0);
        }
    }
    Wake();
}

/// True when there is no more to do for it.
bool ZmtpKeeper::WriteRest(Leaving& leaving) const {
    while (leaving.offset < leaving.rest.size()) {
        const ssize_t n = ::send(leaving.fd.get(), leaving.rest.data() + leaving.offset,
                                 leaving.rest.size() - leaving.offset, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n >= 0) {
            leaving.offset += static_cast<std::size_t>(n);
        } else if (errno != EINTR) {
            return errno != EAGAIN;
        }
    }
    return true;
}

void ZmtpKeeper::Run() {
    for (;;) {
        int wait = -1;
        {
            const std::lock_guard lock{mutex_};
            const TimePoint now = clock_.Now();
            std::erase_if(leaving_, [now](const Leaving& leaving) { return leaving.until <= now; });
            if (stopping_ && leaving_.empty()) {
                return;
            }
            TimePoint next = TimePoint::max();
            for (const Leaving& leaving : leaving_) {
                next = std::min(next, leaving.until);
            }
            for (std::size_t i = 0; i < lines_.size(); ++i) {
                if (!lines_[i].removed && lines_[i].due <= now) {
                    lines_[i].watched < 0 ? Dial(i) : Lost(i, false);  // else it never introduced itself
                }
                next = lines_[i].removed ? next : std::min(next, lines_[i].due);
            }
            if (next != TimePoint::max()) {
                const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - clock_.Now()).count();
                wait = static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000));
            }
        }
        std::array<epoll_event, 16> events;
        const int n = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), wait);
        const std::lock_guard lock{mutex_};
        for (int i = 0; i < n; ++i) {
            const epoll_event& event = events[static_cast<std::size_t>(i)];
            if (event.data.u64 == kControl) {
                std::uint64_t count = 0;
                const ssize_t r = ::read(control_.get(), &count, sizeof count);
                (void)r;
                continue;
            }
            if ((event.data.u64 & kLeaving) != 0) {
                std::erase_if(leaving_, [&](Leaving& leaving) {
                    return (leaving.id | kLeaving) == event.data.u64 && WriteRest(leaving);
                });
                continue;
            }
            const auto number = static_cast<std::size_t>(event.data.u64 & 0xffff'ffffU);
            Line& line = lines_[number];
            if (line.removed || line.watched < 0 || line.turn != event.data.u64 >> 32U) {
                continue;  // news of a connection that has been given up
            }
            if (line.arrival.fd.valid() && !line.ready) {
                Introduce(number);
            } else if ((event.events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) {
                Lost(number, true);
            }
        }
    }
}

void ZmtpKeeper::Dial(std::size_t number) {
    Line& line = lines_[number];
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const std::size_t length = std::min(line.path.size(), sizeof address.sun_path - 1);
    std::memcpy(address.sun_path, line.path.data(), length);
    const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + length + 1);
    UniqueFd fd{::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)};
    std::string hello;
    AppendZmtpHello(hello, line.role, line.identity);
    if (!fd.valid() || ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
        ::send(fd.get(), hello.data(), hello.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(hello.size())) {
        line.due = clock_.Now() + line.back_off;
        line.back_off = std::min<Duration>(2 * line.back_off, kLastRedial);
        return;
    }
    line.watched = fd.get();
    line.arrival.fd = std::move(fd);
    line.arrival.in = std::make_unique<ZmtpDecoder>(line.role, line.limits);
    line.ready = false;
    line.turn = (line.turn + 1) & kMaxTurn;
    line.due = clock_.Now() + kZmtpIntroduction;
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    event.data.u64 = static_cast<std::uint64_t>(line.turn) << 32U | number;
    RG_CHECK(::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, line.watched, &event) == 0);
}

void ZmtpKeeper::Introduce(std::size_t number) {
    Line& line = lines_[number];
    for (;;) {
        const std::span<char> space = line.arrival.in->Space();
        const ssize_t n = ::recv(line.watched, space.data(), space.size(), 0);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0 && errno == EAGAIN) {
            return;
        }
        if (n <= 0) {
            Lost(number, false);
            return;
        }
        line.arrival.in->Filled(static_cast<std::size_t>(n));
        switch (line.arrival.in->Next()) {
            case ZmtpDecoder::Got::kNothing:
                continue;
            case ZmtpDecoder::Got::kReady: {
                // Edge-triggered, and only for the end: what comes in is the owner's.
                epoll_event event{};
                event.events = EPOLLRDHUP | EPOLLET;
                event.data.u64 = static_cast<std::uint64_t>(line.turn) << 32U | number;
                RG_CHECK(::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, line.watched, &event) == 0);
                if (!line.first.empty() && ::send(line.watched, line.first.data(), line.first.size(),
                                                  MSG_NOSIGNAL) != static_cast<ssize_t>(line.first.size())) {
                    Lost(number, false);  // an empty socket takes it whole, or is no use
                    return;
                }
                line.first.clear();
                line.ready = true;
                line.due = TimePoint::max();
                line.back_off = kFirstRedial;
                Ring(news_.get());
                return;
            }
            default:
                Lost(number, false);
                return;
        }
    }
}

/// The connection has ended, or was no use. Taken ones are closed by their owner, who reads them to the end
/// first.
void ZmtpKeeper::Lost(std::size_t number, bool at_once) {
    Line& line = lines_[number];
    line.watched = -1;
    line.ready = false;
    line.arrival = {};
    line.turn = (line.turn + 1) & kMaxTurn;
    line.due = clock_.Now() + (at_once ? kFirstRedial : line.back_off);
    line.back_off = std::min<Duration>(2 * line.back_off, kLastRedial);
}

// ---- the owner's side ----

ZmtpDialer::ZmtpDialer(ZmtpKeeper& keeper, std::string path, ZmtpRole role, std::string identity,
                       const ZmtpLimits& limits, int epoll, std::uint64_t tag, std::string_view first)
    : keeper_{keeper}, epoll_{epoll}, tag_{tag} {
    number_ = keeper_.Add(std::move(path), role, std::move(identity), limits, first);
}

void ZmtpDialer::Close(Duration linger) {
    if (!open_) {
        return;
    }
    const TimePoint until = SteadyClock{}.Now() + linger;
    while (!fd_.valid() && !out_.empty() && !Adopt() && SteadyClock{}.Now() < until) {
        ::poll(nullptr, 0, 10);  // the keeper may have a connection in a moment
    }
    if (fd_.valid()) {
        Flush();
        ::epoll_ctl(epoll_, EPOLL_CTL_DEL, fd_.get(), nullptr);
    }
    open_ = false;
    keeper_.Remove(number_);
    if (fd_.valid() && out_offset_ < out_.size() && linger > Duration::zero()) {
        keeper_.SeeOff(std::move(fd_), out_.substr(out_offset_), until);
    }
    fd_.reset();
    out_.clear();
    out_front_ = out_offset_ = 0;
    sizes_.clear();
    queued_.store(out_.size() - out_offset_, std::memory_order_relaxed);
}

void ZmtpDialer::Arm(std::uint32_t events, int operation) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = tag_;
    RG_CHECK(::epoll_ctl(epoll_, operation, fd_.get(), &event) == 0);
}

/// Takes the keeper's new connection, if it has one and there is none.
bool ZmtpDialer::Adopt() {
    ZmtpArrival arrival;
    if (!open_ || fd_.valid() || !keeper_.Take(number_, arrival)) {
        return false;
    }
    fd_ = std::move(arrival.fd);
    in_ = std::move(arrival.in);
    turn_ = arrival.turn;
    unread_ = true;
    out_armed_ = false;
    Arm(EPOLLIN, EPOLL_CTL_ADD);
    Flush();
    return true;
}

/// The connection is over. A message that is half out is lost with it, those behind it wait for the next one.
void ZmtpDialer::Drop() {
    ::epoll_ctl(epoll_, EPOLL_CTL_DEL, fd_.get(), nullptr);
    fd_.reset();
    keeper_.Ended(number_, turn_);
    out_armed_ = false;
    if (out_offset_ > out_front_) {
        out_offset_ = out_front_ + sizes_.front();
    }
    Trim();
}

/// Takes out what is sent.
void ZmtpDialer::Trim() {
    while (!sizes_.empty() && out_offset_ - out_front_ >= sizes_.front()) {
        out_front_ += sizes_.front();
        sizes_.pop_front();
    }
    if (sizes_.empty()) {
        out_front_ = out_offset_ = 0;
        if (out_.capacity() > kKeptOutput) {
            std::string{}.swap(out_);
        } else {
            out_.clear();
        }
    } else if (out_front_ > out_.size() / 2) {
        out_.erase(0, out_front_);
        out_offset_ -= std::exchange(out_front_, 0);
    }
    queued_.store(out_.size() - out_offset_, std::memory_order_relaxed);
}

void ZmtpDialer::OnEpoll(std::uint32_t events) {
    if ((events & EPOLLOUT) != 0) {
        Flush();
    }
    if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) {
        unread_ = true;
    }
}

ZmtpDialer::Got ZmtpDialer::Receive() {
    for (;;) {
        if (!fd_.valid() && !Adopt()) {
            unread_ = false;
            held_ = false;
            return Got::kNothing;
        }
        const ZmtpDecoder::Got got = in_->Next();
        if (!in_->replies().empty()) {
            // Only when nothing waits: a peer that does not read gets no answers to its PINGs.
            if (out_.empty()) {
                Queue(in_->replies());
                Flush();
            }
            in_->replies().clear();
        }
        switch (got) {
            case ZmtpDecoder::Got::kMessage:
                held_ = true;
                return Got::kMessage;
            case ZmtpDecoder::Got::kMalformed:
                held_ = true;
                return Got::kMalformed;
            case ZmtpDecoder::Got::kReady:
                continue;
            case ZmtpDecoder::Got::kBroken:
                Drop();
                continue;
            case ZmtpDecoder::Got::kNothing:
                break;
        }
        held_ = false;
        if (!unread_) {
            return Got::kNothing;
        }
        const std::span<char> space = in_->Space();
        const ssize_t n = ::recv(fd_.get(), space.data(), space.size(), MSG_DONTWAIT);
        if (n > 0) {
            in_->Filled(static_cast<std::size_t>(n));
            unread_ = static_cast<std::size_t>(n) == space.size();
        } else if (n < 0 && errno == EAGAIN) {
            unread_ = false;
        } else if (n == 0 || errno != EINTR) {
            Drop();
        }
    }
}

void ZmtpDialer::Queue(std::string_view whole) {
    out_ += whole;
    sizes_.push_back(whole.size());
}

void ZmtpDialer::Flush() {
    while (fd_.valid() && out_offset_ < out_.size()) {
        const ssize_t n = ::send(fd_.get(), out_.data() + out_offset_, out_.size() - out_offset_,
                                 MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n >= 0) {
            out_offset_ += static_cast<std::size_t>(n);
        } else if (errno == EAGAIN) {
            if (!std::exchange(out_armed_, true)) {
                Arm(EPOLLIN | EPOLLOUT, EPOLL_CTL_MOD);
            }
            break;
        } else if (errno != EINTR) {
            unread_ = true;  // reading will find its end, after what it still said
            break;
        }
    }
    Trim();
    if (out_.empty() && std::exchange(out_armed_, false)) {
        Arm(EPOLLIN, EPOLL_CTL_MOD);
    }
}

void ZmtpDialer::Send(std::string_view first, std::span<const std::string_view> rest) {
    if (!fd_.valid()) {
        Adopt();
    }
    message_.Begin(1 + rest.size());
    message_.Add(first);
    for (const std::string_view frame : rest) {
        message_.Add(frame);
    }
    std::size_t written = 0;
    if (fd_.valid() && out_.empty()) {
        const ssize_t n = message_.Send(fd_.get());
        unread_ = unread_ || (n < 0 && errno != EAGAIN);
        written = static_cast<std::size_t>(std::max<ssize_t>(n, 0));
    }
    if (written == message_.size()) {
        return;
    }
    if (out_.empty()) {
        out_offset_ = written;  // its beginning stays, to be known as half out if the connection ends
    }
    message_.AppendTo(out_, 0);
    sizes_.push_back(message_.size());
    if (fd_.valid() && !out_armed_) {
        Flush();  // a socket that is not full yet takes more
    }
    queued_.store(out_.size() - out_offset_, std::memory_order_relaxed);
}

}  // namespace rankgate::transport
