// SPDX-License-Identifier: Apache-2.0
// Listening sockets and the byte transport under a connection: a plain descriptor or TLS over one, both
// non-blocking and both with the same four outcomes. No event loop in here; the shard waits. Start-up (Bind*)
// and shard-confined (Transport).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "base/unique_fd.h"

namespace rankgate::http {

/// "[::1]" -> "::1"; "::1" and names stay.
std::string StripBrackets(const std::string& host);
/// "host:port" with brackets where the host is an IPv6 literal.
std::string HostPort(const std::string& host, std::uint16_t port);

struct BoundTcp {
    /// One list of listening descriptors a shard; every list covers all addresses of the host.
    std::vector<std::vector<UniqueFd>> per_shard;
    std::uint16_t port{0};
};

/// Binds every address the host resolves to. Taken ports are an error even if the other side used
/// SO_REUSEPORT.
Result<BoundTcp> BindTcp(const std::string& host, std::uint16_t port, int shards);
/// A listening Unix socket, mode 0600. A stale file is replaced only if nobody answers on it.
Result<UniqueFd> BindUnix(const std::string& path);

/// Loaded certificate; immutable, shared by all shards.
class TlsContext {
  public:
    static Result<std::unique_ptr<TlsContext>> Load(const std::string& certfile, const std::string& keyfile);
    ~TlsContext();
    TlsContext(const TlsContext&) = delete;
    TlsContext& operator=(const TlsContext&) = delete;
    void* native() const noexcept { return context_; }

  private:
    explicit TlsContext(void* context) : context_{context} {}
    void* context_;  // SSL_CTX*
};

class Transport {
  public:
    enum class Io : std::uint8_t { kDone, kWantRead, kWantWrite, kEof, kError };
    struct Outcome {
        Io io{Io::kError};
        std::size_t bytes{0};
    };

    /// `descriptor` stays the caller's. Null context = plain.
    Transport(int descriptor, const TlsContext* tls);
    ~Transport();
    Transport(const Transport&) = delete;
    Transport& operator=(const Transport&) = delete;

    Outcome Read(char* data, std::size_t size) noexcept;
    Outcome Write(const char* data, std::size_t size) noexcept;
    bool tls() const noexcept { return ssl_ != nullptr; }
    /// Says goodbye (TLS close_notify) and FIN; best effort.
    void ShutdownWrite() noexcept;

  private:
    int fd_;
    void* ssl_{nullptr};  // SSL*
};

}  // namespace rankgate::http
