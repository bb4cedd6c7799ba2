// SPDX-License-Identifier: Apache-2.0
#include "relay/rendezvous.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <random>

namespace rankgate::relay {
namespace {

constexpr std::string_view kTcpPrefix = "tcp://";
constexpr std::size_t kMaxPath = 4000;
constexpr std::size_t kMaxName = 80;  // so that /proc/self/fd/N/<name> always fits into a socket address
constexpr int kBacklog = 256;

bool IsTcp(std::string_view where) {
    return where.starts_with(kTcpPrefix);
}

/// A name without a file (abstract socket), which goes with its process.
bool IsAbstract(std::string_view where) {
    return where.starts_with('@');
}

bool SplitTcp(std::string_view where, std::string* host, std::string* port) {
    const std::string_view rest = where.substr(kTcpPrefix.size());
    const std::size_t colon = rest.rfind(':');
    if (colon == std::string_view::npos || colon == 0) {
        return false;
    }
    std::string_view h = rest.substr(0, colon);
    if (h.size() > 2 && h.front() == '[' && h.back() == ']') {
        h = h.substr(1, h.size() - 2);
    }
    const std::string_view p = rest.substr(colon + 1);
    unsigned value = 0;
    const auto [end, error] = std::from_chars(p.data(), p.data() + p.size(), value);
    if (error != std::errc{} || end != p.data() + p.size() || value == 0 || value > 65535) {
        return false;
    }
    *host = h;
    *port = p;
    return true;
}

/// A path as a socket address. Longer ones than sun_path go through the folder's descriptor, which must live
/// as long as the address.
struct UnixAddress {
    sockaddr_un address{};
    socklen_t length{0};
    UniqueFd folder;

    bool Set(const std::string& path) noexcept {
        address.sun_family = AF_UNIX;
        if (IsAbstract(path)) {
            if (path.size() > sizeof address.sun_path) {
                errno = ENAMETOOLONG;
                return false;
            }
            std::memcpy(address.sun_path + 1, path.data() + 1, path.size() - 1);  // behind a NUL
            length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size());
            return true;
        }
        std::string name = path;
        if (path.size() >= sizeof address.sun_path) {
            const std::size_t slash = path.rfind('/');
            const std::string parent =
                slash == std::string::npos ? "." : (slash == 0 ? "/" : path.substr(0, slash));
            folder.reset(::open(parent.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
            if (!folder.valid()) {
                return false;
            }
            name = "/proc/self/fd/" + std::to_string(folder.get()) + "/" +
                   path.substr(slash == std::string::npos ? 0 : slash + 1);
        }
        if (name.size() >= sizeof address.sun_path) {
            errno = ENAMETOOLONG;
            return false;
        }
        std::memcpy(address.sun_path, name.c_str(), name.size() + 1);
        length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size() + 1);
        return true;
    }
    const sockaddr* get() const noexcept { return reinterpret_cast<const sockaddr*>(&address); }
};

UniqueFd UnixSocket() noexcept {
    return UniqueFd{::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)};
}

void TuneTcp(int fd) noexcept {
    const int on = 1;
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    const int idle = 5;
    const int count = 3;
    const unsigned user_timeout = 20'000;
    ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &idle, sizeof idle);
    ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
    ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &user_timeout, sizeof user_timeout);
}

struct AddressList {
    addrinfo* first{nullptr};
    int error{EAI_NONAME};
    AddressList(const std::string& where, bool passive) noexcept {
        std::string host;
        std::string port;
        addrinfo hints{};
        hints.ai_socktype = SOCK_STREAM;
        hints.ai_flags = AI_NUMERICSERV | (passive ? AI_PASSIVE : 0);
        if (SplitTcp(where, &host, &port)) {
            error = ::getaddrinfo(host.c_str(), port.c_str(), &hints, &first);
        }
        if (error != 0) {
            first = nullptr;
        }
    }
    AddressList(const AddressList&) = delete;
    AddressList& operator=(const AddressList&) = delete;
    ~AddressList() {
        if (first != nullptr) {
            ::freeaddrinfo(first);
        }
    }
};

UniqueFd DialUnix(const std::string& path) noexcept {
    UnixAddress address;
    if (!address.Set(path)) {
        return UniqueFd{};
    }
    UniqueFd fd = UnixSocket();
    if (!fd.valid() || ::connect(fd.get(), address.get(), address.length) != 0) {
        return UniqueFd{};
    }
    return fd;
}

UniqueFd DialTcp(const std::string& where) noexcept {
    const AddressList list{where, false};
    errno = ENOENT;
    for (const addrinfo* a = list.first; a != nullptr; a = a->ai_next) {
        UniqueFd fd{::socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)};
        if (!fd.valid()) {
            continue;
        }
        if (::connect(fd.get(), a->ai_addr, a->ai_addrlen) != 0) {
            if (errno != EINPROGRESS) {
                continue;
            }
            pollfd p{fd.get(), POLLOUT, 0};
            int error = 0;
            socklen_t length = sizeof error;
            // Short: the caller dials again within its budget and must stay interruptible.
            if (::poll(&p, 1, 100) != 1 ||
                ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0 || error != 0) {
                errno = error != 0 ? error : ETIMEDOUT;
                continue;
            }
        }
        TuneTcp(fd.get());
        return fd;
    }
    return UniqueFd{};
}

enum class Owner : std::uint8_t { kNobody, kGone, kLive };

/// Nobody accepts there: refused for a while, since a starting leader refuses too between its bind and its
/// listen. A process that is being killed may close its connections some milliseconds before its listener: a
/// connection that it then drops is no life either.
Owner WhoListens(const std::string& path) noexcept {
    constexpr int kLiveMs = 200;
    int refused = 0;
    for (int i = 0; i < 20 && refused < 10; ++i) {
        const UniqueFd fd = DialUnix(path);
        if (fd.valid()) {
            pollfd p{fd.get(), POLLIN, 0};
            if (::poll(&p, 1, kLiveMs) == 0) {
                return Owner::kLive;  // it waits for our HELLO
            }
            continue;
        }
        if (errno != ECONNREFUSED) {
            return errno == ENOENT ? Owner::kGone : Owner::kLive;
        }
        ++refused;
        timespec pause{0, 3'000'000};
        ::nanosleep(&pause, nullptr);
    }
    return refused == 10 ? Owner::kNobody : Owner::kLive;
}

Failure ListenFailure(Code code, int error, std::string_view text) {
    Failure failure;
    failure.code = code;
    failure.phase = Phase::kDial;
    failure.origin_rank = 0;
    failure.sys = error;
    failure.SetText(text);
    return failure;
}

}  // namespace

std::string CheckAddress(std::string_view where) {
    if (where.empty()) {
        return "must be a path, @name or tcp://host:port";
    }
    if (where.find('\0') != std::string_view::npos) {
        return "contains a NUL byte";
    }
    if (IsTcp(where)) {
        std::string host;
        std::string port;
        return SplitTcp(where, &host, &port) ? "" : "must be tcp://host:port with a port in 1..65535";
    }
    if (IsAbstract(where)) {
        if (where.size() == 1 || where.size() > sizeof(sockaddr_un{}.sun_path)) {
            return "the name behind @ must have 1.." + std::to_string(sizeof(sockaddr_un{}.sun_path) - 1) +
                   " bytes";
        }
        return {};
    }
    if (where.size() > kMaxPath) {
        return "path is longer than " + std::to_string(kMaxPath) + " bytes";
    }
    const std::size_t slash = where.rfind('/');
    const std::string_view name = slash == std::string_view::npos ? where : where.substr(slash + 1);
    if (name.empty()) {
        return "names a folder, not a file in it";
    }
    // A path that fits as it is needs no detour through its folder, so its name may be longer.
    if (where.size() >= sizeof(sockaddr_un{}.sun_path) && name.size() > kMaxName) {
        return "the file name is longer than " + std::to_string(kMaxName) + " bytes";
    }
    return {};
}

bool RemoveIfStale(const std::string& where) noexcept {
    struct stat before {};
    if (IsTcp(where) || IsAbstract(where) || where.empty() || ::lstat(where.c_str(), &before) != 0) {
        return true;
    }
    if (!S_ISSOCK(before.st_mode)) {
        return false;
    }
    if (const Owner owner = WhoListens(where); owner != Owner::kNobody) {
        return owner == Owner::kGone;
    }
    // Another leader may have put its own socket there in the meantime: move the name aside, look at what was
    // moved, and only then delete it. A live one is put back.
    std::random_device random;
    const std::string aside = where.substr(0, where.rfind('/') + 1) + ".stale-" + std::to_string(random());
    if (::rename(where.c_str(), aside.c_str()) != 0) {
        return true;  // another newcomer was faster
    }
    struct stat moved {};
    const bool same =
        ::lstat(aside.c_str(), &moved) == 0 && moved.st_ino == before.st_ino && moved.st_dev == before.st_dev;
    if (!same && ::link(aside.c_str(), where.c_str()) != 0) {
        // Somebody else has the name by now; the one we moved has lost it either way.
        errno = 0;
    }
    ::unlink(aside.c_str());
    return true;
}

Result<Listener> Listener::Open(const Config& config) {
    Listener listener;
    if (IsTcp(config.where)) {
        const AddressList list{config.where, true};
        if (list.first == nullptr) {
            return ListenFailure(Code::kRemoteFailure, EADDRNOTAVAIL,
                                 "cannot listen on " + config.where + ": " + ::gai_strerror(list.error));
        }
        int error = EADDRNOTAVAIL;
        for (const addrinfo* a = list.first; a != nullptr; a = a->ai_next) {
            UniqueFd fd{::socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)};
            const int on = 1;
            // A port in TIME_WAIT is free; a port with a listener is not, with or without this option.
            ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
            if (fd.valid() && ::bind(fd.get(), a->ai_addr, a->ai_addrlen) == 0 &&
                ::listen(fd.get(), kBacklog) == 0) {
                listener.fd_ = std::move(fd);
                listener.tcp_ = true;
                return listener;
            }
            error = errno;
        }
        return ListenFailure(error == EADDRINUSE ? Code::kDuplicateRank : Code::kRemoteFailure, error,
                             "cannot listen on " + config.where + ": " + std::strerror(error));
    }
    for (int attempt = 0; attempt < 3; ++attempt) {
        UnixAddress address;
        UniqueFd fd = UnixSocket();
        if (!fd.valid() || !address.Set(config.where)) {
            return ListenFailure(Code::kRemoteFailure, errno,
                                 "cannot listen on " + config.where + ": " + std::strerror(errno));
        }
        // The mode must be right from the first moment: bind() takes it from the unbound socket.
        ::fchmod(fd.get(), S_IRUSR | S_IWUSR);
        if (::bind(fd.get(), address.get(), address.length) == 0) {
            if (IsAbstract(config.where)) {
                if (::listen(fd.get(), kBacklog) != 0) {
                    return ListenFailure(Code::kRemoteFailure, errno, "cannot listen on " + config.where);
                }
                listener.fd_ = std::move(fd);
                return listener;
            }
            struct stat info {};
            if (::listen(fd.get(), kBacklog) != 0 || ::lstat(config.where.c_str(), &info) != 0) {
                const int error = errno;
                ::unlink(config.where.c_str());
                return ListenFailure(Code::kRemoteFailure, error,
                                     "cannot listen on " + config.where + ": " + std::strerror(error));
            }
            listener.fd_ = std::move(fd);
            listener.path_ = config.where;
            listener.device_ = info.st_dev;
            listener.inode_ = info.st_ino;
            return listener;
        }
        const int error = errno;
        if (error != EADDRINUSE) {
            return ListenFailure(Code::kRemoteFailure, error,
                                 "cannot listen on " + config.where + ": " + std::strerror(error));
        }
        if (IsAbstract(config.where) || !RemoveIfStale(config.where)) {
            break;  // at once: by the next attempt a live leader may have its group and have freed the name
        }
    }
    return ListenFailure(Code::kDuplicateRank, EADDRINUSE,
                         "another leader listens on " + config.where + ", or it is not a socket");
}

UniqueFd Listener::Accept() noexcept {
    UniqueFd fd{::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)};
    if (fd.valid() && tcp_) {
        TuneTcp(fd.get());
    }
    return fd;
}

void Listener::Close() noexcept {
    if (!fd_.valid()) {
        return;
    }
    if (!path_.empty()) {
        struct stat info {};
        if (::lstat(path_.c_str(), &info) == 0 && info.st_ino == inode_ && info.st_dev == device_) {
            ::unlink(path_.c_str());
        }
        path_.clear();
    }
    fd_.reset();
}

UniqueFd Dial(const std::string& where) noexcept {
    return IsTcp(where) ? DialTcp(where) : DialUnix(where);
}

bool CheckPeerUser(int socket, pid_t* pid) noexcept {
    ucred credentials{};
    socklen_t length = sizeof credentials;
    *pid = 0;
    int domain = 0;
    socklen_t domain_length = sizeof domain;
    if (::getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &domain, &domain_length) == 0 && domain != AF_UNIX) {
        return true;  // nothing to know over TCP
    }
    if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
        return false;
    }
    *pid = credentials.pid;
    return credentials.uid == ::geteuid();
}

}  // namespace rankgate::relay
