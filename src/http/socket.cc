// SPDX-License-Identifier: Apache-2.0
#include "http/socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>

#include "base/log.h"

namespace rankgate::http {
namespace {

constexpr int kBacklog = 4096;

std::string ErrnoText(int error) {
    return std::strerror(error);
}

/// A flag whose value no start could use.
Error BadSetting(std::string message) {
    return Error::Invalid("", std::move(message));
}

/// A system call failed with `error`, and that may or may not be the value's fault.
Error SystemError(const std::string& what, int error) {
    return Error{SettingError(error), what + ": " + ErrnoText(error) + ".", "", false};
}

struct AddressListDeleter {
    void operator()(addrinfo* list) const noexcept { ::freeaddrinfo(list); }
};
using AddressList = std::unique_ptr<addrinfo, AddressListDeleter>;

std::uint16_t LocalPort(int fd) {
    sockaddr_storage address{};
    socklen_t size = sizeof address;
    if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
        return 0;
    }
    return address.ss_family == AF_INET6 ? ntohs(reinterpret_cast<sockaddr_in6*>(&address)->sin6_port)
                                         : ntohs(reinterpret_cast<sockaddr_in*>(&address)->sin_port);
}

void SetPort(sockaddr* address, std::uint16_t port) {
    if (address->sa_family == AF_INET6) {
        reinterpret_cast<sockaddr_in6*>(address)->sin6_port = htons(port);
    } else {
        reinterpret_cast<sockaddr_in*>(address)->sin_port = htons(port);
    }
}

/// errno on failure, 0 on success.
int BindOne(const addrinfo& info, bool v6_only, bool reuse_port, UniqueFd& out) {
    UniqueFd fd{::socket(info.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)};
    if (!fd.valid()) {
        return errno;
    }
    const int one = 1;
    const int zero = 0;
    ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (reuse_port) {
        ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEPORT, &one, sizeof one);
    }
    if (info.ai_family == AF_INET6) {
        ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, v6_only ? &one : &zero, sizeof one);
    }
    if (::bind(fd.get(), info.ai_addr, info.ai_addrlen) != 0) {
        return errno;
    }
    // Set after the bind of the first socket: its bind then fails when anybody else holds the port, and our
    // own shards may join.
    ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEPORT, &one, sizeof one);
    if (::listen(fd.get(), kBacklog) != 0) {
        return errno;
    }
    out = std::move(fd);
    return 0;
}

int PreferHttp11(SSL* /*ssl*/, const unsigned char** out, unsigned char* out_size, const unsigned char* in,
                 unsigned int in_size, void* /*arg*/) {
    static constexpr unsigned char kProtocol[] = "\x08http/1.1";
    if (SSL_select_next_proto(const_cast<unsigned char**>(out), out_size, kProtocol, sizeof kProtocol - 1, in,
                              in_size) == OPENSSL_NPN_NEGOTIATED) {
        return SSL_TLSEXT_ERR_OK;
    }
    return SSL_TLSEXT_ERR_NOACK;
}

std::string OpenSslError() {
    char text[256] = "unknown error";
    const unsigned long code = ERR_get_error();
    if (code != 0) {
        ERR_error_string_n(code, text, sizeof text);
    }
    ERR_clear_error();
    return text;
}

}  // namespace

std::string StripBrackets(const std::string& host) {
    if (host.size() >= 2 && host.front() == '[' && host.back() == ']') {
        return host.substr(1, host.size() - 2);
    }
    return host;
}

std::string HostPort(const std::string& host, std::uint16_t port) {
    const std::string bare = StripBrackets(host);
    const std::string text = std::to_string(port);
    return bare.find(':') != std::string::npos ? "[" + bare + "]:" + text : bare + ":" + text;
}

Result<BoundTcp> BindTcp(const std::string& host, std::uint16_t port, int shards) {
    const std::string bare = StripBrackets(host);
    addrinfo hints{};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_PASSIVE;
    addrinfo* raw = nullptr;
    if (const int failure = ::getaddrinfo(bare.c_str(), "0", &hints, &raw); failure != 0) {
        const std::string message =
            "--host " + host + ": the name does not resolve (" + ::gai_strerror(failure) + ").";
        return failure == EAI_AGAIN || failure == EAI_MEMORY || failure == EAI_SYSTEM
                   ? Error{ErrorCode::kUnavailable, message, "", false}
                   : BadSetting(message);
    }
    const AddressList list{raw};
    int addresses = 0;
    for (const addrinfo* info = raw; info != nullptr; info = info->ai_next) {
        ++addresses;
    }
    BoundTcp bound;
    bound.port = port;
    bound.per_shard.resize(static_cast<std::size_t>(shards));
    for (int shard = 0; shard < shards; ++shard) {
        auto& own = bound.per_shard[static_cast<std::size_t>(shard)];
        for (addrinfo* info = raw; info != nullptr; info = info->ai_next) {
            SetPort(info->ai_addr, bound.port);
            UniqueFd fd;
            const int failure = BindOne(*info, addresses > 1, shard > 0, fd);
            if ((failure == EADDRNOTAVAIL || failure == EAFNOSUPPORT) && addresses > 1) {
                // A name such as "localhost" lists both families on machines that run only one.
                if (shard == 0) {
                    LogWarning("http_address_skipped",
                               {{"host", host},
                                {"family", info->ai_family == AF_INET6 ? "ipv6" : "ipv4"},
                                {"reason", ErrnoText(failure)}});
                }
                continue;
            }
            if (failure != 0) {
                return SystemError("Cannot listen on " + HostPort(host, bound.port) + " (--host, --port)",
                                   failure);
            }
            if (bound.port == 0) {
                bound.port = LocalPort(fd.get());
            }
            own.push_back(std::move(fd));
        }
        if (own.empty()) {
            return BadSetting("Cannot listen on " + HostPort(host, port) +
                              " (--host): no address of it is available here.");
        }
    }
    return bound;
}

Result<UniqueFd> BindUnix(const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.size() >= sizeof address.sun_path) {
        return BadSetting("--uds " + path + ": the path is longer than the " +
                          std::to_string(sizeof address.sun_path - 1) + " bytes a Unix socket allows.");
    }
    std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
    struct stat info {};
    if (::lstat(path.c_str(), &info) == 0) {
        if (!S_ISSOCK(info.st_mode)) {
            return BadSetting("--uds " + path + ": a file that is not a socket stands there.");
        }
        const UniqueFd probe{::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)};
        const int connected = ::connect(probe.get(), reinterpret_cast<sockaddr*>(&address), sizeof address);
        if (connected == 0 || errno == EAGAIN || errno == EINPROGRESS) {
            return Error{ErrorCode::kUnavailable, "--uds " + path + ": another process listens there.", "",
                         false};
        }
        if (errno != ECONNREFUSED) {
            return SystemError("--uds " + path, errno);
        }
        ::unlink(path.c_str());
    }
    UniqueFd fd{::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)};
    if (!fd.valid() || ::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 ||
        ::chmod(path.c_str(), S_IRUSR | S_IWUSR) != 0 || ::listen(fd.get(), kBacklog) != 0) {
        return SystemError("--uds " + path, errno);
    }
    return fd;
}

Result<std::unique_ptr<TlsContext>> TlsContext::Load(const std::string& certfile,
                                                     const std::string& keyfile) {
    ERR_clear_error();
    SSL_CTX* context = SSL_CTX_new(TLS_server_method());
    if (context == nullptr) {
        return Error{ErrorCode::kInternal, "TLS: " + OpenSslError(), "", false};
    }
    std::unique_ptr<TlsContext> owner{new TlsContext{context}};
    SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION);
    SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER |
                                  SSL_MODE_RELEASE_BUFFERS);
    SSL_CTX_set_options(context, SSL_OP_NO_RENEGOTIATION | SSL_OP_IGNORE_UNEXPECTED_EOF);
    SSL_CTX_set_alpn_select_cb(context, PreferHttp11, nullptr);
    if (SSL_CTX_use_certificate_chain_file(context, certfile.c_str()) != 1) {
        return BadSetting("--ssl-certfile " + certfile + ": " + OpenSslError() +
                          "; a readable PEM file with the certificate chain is wanted.");
    }
    const std::string& key = keyfile.empty() ? certfile : keyfile;
    if (SSL_CTX_use_PrivateKey_file(context, key.c_str(), SSL_FILETYPE_PEM) != 1) {
        return BadSetting("--ssl-keyfile " + key + ": " + OpenSslError() +
                          "; a readable PEM file with the certificate's private key is wanted.");
    }
    if (SSL_CTX_check_private_key(context) != 1) {
        return BadSetting("--ssl-keyfile " + key + ": the key does not belong to the certificate.");
    }
    return owner;
}

TlsContext::~TlsContext() {
    SSL_CTX_free(static_cast<SSL_CTX*>(context_));
}

namespace {

/// What a failed call on `ssl` waits for, or why it cannot go on.
Transport::Io TlsOutcome(SSL* ssl) noexcept {
    switch (SSL_get_error(ssl, 0)) {
        case SSL_ERROR_WANT_READ:
            return Transport::Io::kWantRead;
        case SSL_ERROR_WANT_WRITE:
            return Transport::Io::kWantWrite;
        case SSL_ERROR_ZERO_RETURN:
            return Transport::Io::kEof;
        default:
            return Transport::Io::kError;
    }
}

}  // namespace

Transport::Transport(int descriptor, const TlsContext* tls) : fd_{descriptor} {
    if (tls != nullptr) {
        SSL* ssl = SSL_new(static_cast<SSL_CTX*>(tls->native()));
        if (ssl != nullptr && SSL_set_fd(ssl, descriptor) == 1) {
            SSL_set_accept_state(ssl);
            ssl_ = ssl;
        } else {
            SSL_free(ssl);
            fd_ = -1;  // every call fails: never plain bytes where TLS was asked for
        }
    }
}

Transport::~Transport() {
    SSL_free(static_cast<SSL*>(ssl_));
}

Transport::Outcome Transport::Read(char* data, std::size_t size) noexcept {
    if (ssl_ == nullptr) {
        ssize_t n = 0;
        do {
            n = ::recv(fd_, data, size, 0);
        } while (n < 0 && errno == EINTR);
        if (n > 0) {
            return {Io::kDone, static_cast<std::size_t>(n)};
        }
        if (n == 0) {
            return {Io::kEof, 0};
        }
        return {errno == EAGAIN || errno == EWOULDBLOCK ? Io::kWantRead : Io::kError, 0};
    }
    ERR_clear_error();
    auto* ssl = static_cast<SSL*>(ssl_);
    std::size_t n = 0;
    if (SSL_read_ex(ssl, data, size, &n) == 1) {
        return {Io::kDone, n};
    }
    return {TlsOutcome(ssl), 0};
}

Transport::Outcome Transport::Write(const char* data, std::size_t size) noexcept {
    if (ssl_ == nullptr) {
        ssize_t n = 0;
        do {
            n = ::send(fd_, data, size, MSG_NOSIGNAL);
        } while (n < 0 && errno == EINTR);
        if (n >= 0) {
            return {Io::kDone, static_cast<std::size_t>(n)};
        }
        return {errno == EAGAIN || errno == EWOULDBLOCK ? Io::kWantWrite : Io::kError, 0};
    }
    ERR_clear_error();
    auto* ssl = static_cast<SSL*>(ssl_);
    std::size_t n = 0;
    if (SSL_write_ex(ssl, data, size, &n) == 1) {
        return {Io::kDone, n};
    }
    const Io outcome = TlsOutcome(ssl);
    return {outcome == Io::kEof ? Io::kError : outcome, 0};
}

void Transport::ShutdownWrite() noexcept {
    if (ssl_ != nullptr) {
        ERR_clear_error();
        SSL_shutdown(static_cast<SSL*>(ssl_));
    }
    ::shutdown(fd_, SHUT_WR);
}

}  // namespace rankgate::http
