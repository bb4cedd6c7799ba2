// SPDX-License-Identifier: Apache-2.0
#include "transport/zmtp_socket.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/check.h"

namespace rankgate::transport {
namespace {

constexpr int kAcceptsPerWake = 64;
constexpr std::size_t kKeptOutput = 64 * 1024;
/// A peer that has this much unread gets no answers to its PINGs.
constexpr std::size_t kMaxQueuedReplies = 64 * 1024;

}  // namespace

Result<std::unique_ptr<ZmtpListener>> ZmtpListener::Bind(const std::string& path, Options options) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const auto failed = [&](int error) {
        return Error{SettingError(error), std::strerror(error), {}, false};
    };
    if (path.size() >= sizeof address.sun_path) {
        return failed(ENAMETOOLONG);
    }
    std::memcpy(address.sun_path, path.data(), path.size());
    std::unique_ptr<ZmtpListener> made{new ZmtpListener(options)};
    made->listener_ = UniqueFd{::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)};
    if (!made->listener_.valid()) {
        return failed(errno);
    }
    const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size() + 1);
    if (::bind(made->listener_.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0) {
        return failed(errno);
    }
    made->path_ = path;
    if (::listen(made->listener_.get(), options.backlog) != 0) {
        return failed(errno);
    }
    made->Arm(made->listener_.get(), EPOLLIN, EPOLL_CTL_ADD);
    return made;
}

ZmtpListener::~ZmtpListener() {
    Close(Duration::zero());
}

void ZmtpListener::Close(Duration linger) {
    const auto until = std::chrono::steady_clock::now() + linger;
    for (auto& [fd, connection] : connections_) {
        while (connection->out_offset < connection->out.size()) {
            Write(*connection);
            const auto left =
                std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
            if (connection->out_offset >= connection->out.size() || left.count() <= 0) {
                break;
            }
            pollfd item{fd, POLLOUT, 0};
            ::poll(&item, 1, static_cast<int>(left.count()));
        }
    }
    pending_.clear();
    peers_.clear();
    connections_.clear();
    events_.clear();
    introducing_ = 0;
    if (listener_.valid()) {
        listener_.reset();
        if (!path_.empty()) {
            ::unlink(path_.c_str());
        }
    }
}

void ZmtpListener::Arm(int fd, std::uint32_t events, int operation) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = static_cast<std::uint64_t>(options_.tag) << 32U | static_cast<std::uint32_t>(fd);
    RG_CHECK(::epoll_ctl(options_.epoll, operation, fd, &event) == 0);
}

void ZmtpListener::OnEpoll(std::uint64_t data, std::uint32_t events, TimePoint now) {
    const auto fd = static_cast<int>(data & 0xffff'ffffU);
    if (fd == listener_.get()) {
        Accept(now);
        return;
    }
    const auto found = connections_.find(fd);
    if (found == connections_.end()) {
        return;
    }
    Connection& connection = *found->second;
    if ((events & EPOLLOUT) != 0) {
        Write(connection);
    }
    if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0 && !connection.eof) {
        connection.unread = true;
        MarkPending(connection);
    }
}

void ZmtpListener::LookEverywhere() {
    for (auto& [fd, connection] : connections_) {
        if (!connection->eof) {
            connection->unread = true;
            MarkPending(*connection);
        }
    }
}

void ZmtpListener::Tick(TimePoint now) {
    if (!accepting_) {
        accepting_ = true;
        Arm(listener_.get(), EPOLLIN, EPOLL_CTL_ADD);
    }
    if (introducing_ == 0) {
        return;
    }
    for (auto& [fd, connection] : connections_) {
        if (!connection->introduced && !connection->eof && now - connection->accepted > kZmtpIntroduction) {
            ::shutdown(fd, SHUT_RDWR);  // its end is read like any other
        }
    }
}

void ZmtpListener::Accept(TimePoint now) {
    for (int i = 0; i < kAcceptsPerWake; ++i) {
        const int fd = ::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            if (errno == EINTR || errno == ECONNABORTED) {
                continue;
            }
            if (errno != EAGAIN) {
                // No descriptor left, or the like: the pending connection would wake us for ever.
                ::epoll_ctl(options_.epoll, EPOLL_CTL_DEL, listener_.get(), nullptr);
                accepting_ = false;
            }
            return;
        }
        auto connection = std::make_unique<Connection>(fd, options_);
        if (connections_.size() >= options_.max_connections) {
            continue;  // closed again
        }
        connection->accepted = now;
        ++introducing_;
        Connection& one = *connection;
        connections_[fd] = std::move(connection);
        Arm(fd, EPOLLIN, EPOLL_CTL_ADD);
        events_.emplace_back(Event{Event::Kind::kAccepted, fd}, UniqueFd{});
        AppendZmtpHello(one.out, options_.role, {});
        Write(one);
    }
}

void ZmtpListener::MarkPending(Connection& connection) {
    if (!connection.pending) {
        connection.pending = true;
        pending_.push_back(&connection);
    }
}

void ZmtpListener::Read(Connection& connection) {
    const std::span<char> space = connection.in.Space();
    ssize_t n = 0;
    do {
        n = ::recv(connection.fd.get(), space.data(), space.size(), 0);
    } while (n < 0 && errno == EINTR);
    if (n > 0) {
        connection.in.Filled(static_cast<std::size_t>(n));
        // A short read has emptied the socket, or epoll will say so.
        connection.unread = static_cast<std::size_t>(n) == space.size();
    } else if (n < 0 && errno == EAGAIN) {
        connection.unread = false;
    } else {
        connection.unread = false;
        connection.eof = true;
        Unname(connection);  // what it said is still delivered, but it hears nothing any more
    }
}

ZmtpListener::Got ZmtpListener::Receive() {
    frames_ = {};
    while (!pending_.empty()) {
        Connection& connection = *pending_.front();
        const ZmtpDecoder::Got got = connection.in.Next();
        if (!connection.in.replies().empty()) {
            // Not into the middle of what was cut off, and not without end for a peer that does not read.
            if (!connection.eof && !connection.replaced &&
                connection.out.size() - connection.out_offset < kMaxQueuedReplies) {
                connection.out += connection.in.replies();
                Write(connection);
            }
            connection.in.replies().clear();
        }
        switch (got) {
            case ZmtpDecoder::Got::kReady:
                OnReady(connection);
                continue;
            case ZmtpDecoder::Got::kMessage:
            case ZmtpDecoder::Got::kMalformed: {
                if (connection.replaced) {
                    continue;
                }
                source_fd_ = connection.fd.get();
                frames_ = connection.in.frames();
                if (options_.role == ZmtpRole::kRouter) {
                    routed_.clear();
                    routed_.emplace_back(connection.in.identity());
                    routed_.insert(routed_.end(), frames_.begin(), frames_.end());
                    frames_ = routed_;
                }
                return got == ZmtpDecoder::Got::kMessage ? Got::kMessage : Got::kMalformed;
            }
            case ZmtpDecoder::Got::kBroken:
                Finish(connection);
                continue;
            case ZmtpDecoder::Got::kNothing:
                break;
        }
        if (connection.unread) {
            Read(connection);
            if (pending_.size() > 1) {  // in turn: one of many must not be all that is heard
                pending_.pop_front();
                pending_.push_back(&connection);
            }
        } else if (connection.eof) {
            Finish(connection);
        } else {
            pending_.pop_front();
            connection.pending = false;
        }
    }
    return Got::kNothing;
}

void ZmtpListener::OnReady(Connection& connection) {
    --introducing_;
    connection.introduced = true;
    events_.emplace_back(Event{Event::Kind::kReady, connection.fd.get()}, UniqueFd{});
    if (options_.role != ZmtpRole::kRouter) {
        return;
    }
    std::string identity = connection.in.identity();
    if (identity.empty()) {
        return;  // it may speak, and there is no name under which to answer
    }
    Connection*& place = peers_[identity];
    if (place != nullptr) {
        // ROUTER_HANDOVER. The older connection stays open: closed, it would dial again and take the name
        // back.
        place->replaced = true;
        DropOutput(*place);
    }
    place = &connection;
}

void ZmtpListener::Unname(Connection& connection) {
    if (const auto peer = peers_.find(connection.in.identity());
        peer != peers_.end() && peer->second == &connection) {
        peers_.erase(peer);
    }
}

/// The front of pending_ has come to its end.
void ZmtpListener::Finish(Connection& connection) {
    pending_.pop_front();
    if (!connection.introduced) {
        --introducing_;
        events_.emplace_back(Event{Event::Kind::kFailed, connection.fd.get()}, UniqueFd{});
    }
    Unname(connection);
    const int fd = connection.fd.get();
    ::epoll_ctl(options_.epoll, EPOLL_CTL_DEL, fd, nullptr);
    events_.emplace_back(Event{Event::Kind::kClosed, fd}, std::move(connection.fd));
    connections_.erase(fd);
}

bool ZmtpListener::NextEvent(Event& event, UniqueFd& closed) {
    if (events_.empty()) {
        return false;
    }
    event = events_.front().first;
    closed = std::move(events_.front().second);
    events_.pop_front();
    return true;
}

void ZmtpListener::DropOutput(Connection& connection) {
    std::string{}.swap(connection.out);
    connection.out_offset = 0;
    if (std::exchange(connection.out_armed, false)) {
        Arm(connection.fd.get(), EPOLLIN, EPOLL_CTL_MOD);
    }
}

void ZmtpListener::Write(Connection& connection) {
    while (connection.out_offset < connection.out.size()) {
        const ssize_t n = ::send(connection.fd.get(), connection.out.data() + connection.out_offset,
                                 connection.out.size() - connection.out_offset, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n >= 0) {
            connection.out_offset += static_cast<std::size_t>(n);
        } else if (errno == EAGAIN) {
            if (!std::exchange(connection.out_armed, true)) {
                Arm(connection.fd.get(), EPOLLIN | EPOLLOUT, EPOLL_CTL_MOD);
            }
            if (connection.out_offset > connection.out.size() / 2) {
                connection.out.erase(0, std::exchange(connection.out_offset, 0));
            }
            return;
        } else if (errno != EINTR) {
            break;  // the other side is gone, which reading will find too
        }
    }
    if (connection.out.capacity() > kKeptOutput || connection.out_armed ||
        connection.out_offset < connection.out.size()) {
        DropOutput(connection);
    } else {
        connection.out.clear();
        connection.out_offset = 0;
    }
}

int ZmtpListener::Send(const std::string& identity, std::string_view type, std::string_view payload,
                       std::span<const std::string_view> aux) {
    const auto found = peers_.find(identity);
    if (found == peers_.end()) {
        return EHOSTUNREACH;
    }
    Connection& connection = *found->second;
    message_.Begin(2 + aux.size());
    message_.Add(type);
    message_.Add(payload);
    for (const std::string_view frame : aux) {
        message_.Add(frame);
    }
    std::size_t written = 0;
    if (connection.out.empty()) {
        const ssize_t n = message_.Send(connection.fd.get());
        if (n < 0 && errno != EAGAIN) {
            peers_.erase(found);
            return EHOSTUNREACH;
        }
        written = static_cast<std::size_t>(std::max<ssize_t>(n, 0));
    }
    if (written < message_.size()) {
        message_.AppendTo(connection.out, written);
        if (!connection.out_armed) {
            Write(connection);  // a socket that is not full yet takes more
        }
    }
    return 0;
}

std::uint64_t ZmtpListener::queued_bytes(const std::string& identity) const {
    const auto found = peers_.find(identity);
    return found == peers_.end() ? 0 : found->second->out.size() - found->second->out_offset;
}

}  // namespace rankgate::transport
