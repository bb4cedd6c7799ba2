// SPDX-License-Identifier: Apache-2.0
// HTTP/1.1 server with server-sent events: K shards, one thread and one event loop each, that share a port by
// SO_REUSEPORT. The gateway gives one Handler per shard; everything about a connection (its exchange, its
// timers, its buffers) stays on that thread. Plain sockets are written at once and wait for writability only
// when full; TLS runs over the same descriptors.
//
// Life of an exchange: Handler::OnHeaders (may refuse before the body is read) -> Handler::OnRequest, once ->
// exactly one of
//   Respond(...)                              the whole answer, or
//   StartStream(...), stream()+Touch()*, EndStream()
// or, if the client goes first, one ExchangeListener::OnClosed. After the answer's end or OnClosed the
// Exchange must not be touched.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "http/message.h"

namespace rankgate::http {

/// Every bound of the server in one place; docs/http.md explains each.
struct Limits {
    std::size_t max_header_bytes{64 * 1024};
    std::size_t max_headers{256};
    std::size_t max_body_bytes{64 * 1024 * 1024};
    /// Bytes held for one stream whose client does not read; above it the stream is cut and counted.
    std::size_t max_held_bytes{1024 * 1024};
    std::size_t max_connections{0};                     // 0 = ConnectionsFor(RLIMIT_NOFILE)
    std::size_t reserved_descriptors{64};               // for engines, files and listeners
    Duration header_timeout{std::chrono::seconds{30}};  // first byte (or accept) .. end of the headers
    Duration body_timeout{
        std::chrono::seconds{30}};  // end of headers .. end of body, plus the time min_body_rate grants
    std::size_t min_body_rate{16 * 1024};  // bytes a second that extend the body deadline
    Duration keep_alive_timeout{
        std::chrono::seconds{120}};  // between two requests; above the 90 s of common proxy pools
    Duration write_timeout{std::chrono::seconds{60}};  // unsent bytes without any progress
};

/// How many client connections a process with `files` descriptors may hold: a tenth is kept, and at least
/// `reserved`, so that clients who take all they can never keep an engine from connecting.
std::size_t ConnectionsFor(std::size_t files, std::size_t reserved) noexcept;

struct ListenOptions {
    std::string host{"127.0.0.1"};  // name or address, "[::1]" and "::" too; empty = no TCP listener
    std::uint16_t port{8000};       // 0 = any free one (see Server::port)
    std::string uds;                // path of a Unix socket; empty = none
    std::string ssl_certfile;       // PEM chain; with it the TCP listener speaks TLS only
    std::string ssl_keyfile;
};

struct ServerOptions {
    ListenOptions listen;
    Limits limits;
    int shards{1};
    /// Origins that browsers may call from ("*" = any); empty = no CORS headers at all.
    std::vector<std::string> allowed_origins;
};

/// Counters of one shard; written by it, read by anyone.
struct ShardStats {
    std::atomic<std::int64_t> connections_open{0};
    std::atomic<std::int64_t> streams_open{0};
    std::atomic<std::int64_t> bytes_held{0};
    std::atomic<std::uint64_t> connections_total{0};
    std::atomic<std::uint64_t> requests_total{0};
    std::atomic<std::uint64_t> slow_readers_total{0};
    std::atomic<std::uint64_t> timeouts_total{0};
    std::atomic<std::uint64_t> bad_requests_total{0};
    std::atomic<std::uint64_t> clients_gone_total{0};
};

enum class CloseReason : std::uint8_t {
    kClientGone,  // FIN, RST or a failed write. A half-closed client counts as gone: docs/http.md
    kSlowReader,  // max_held_bytes or write_timeout
    kServerStop
};

/// Told when the client's side ends before the answer does. Called at most once per exchange, on the shard's
/// thread, and never from inside one of the Exchange's own methods.
class ExchangeListener {
  public:
    virtual void OnClosed(CloseReason reason) noexcept = 0;

  protected:
    ~ExchangeListener() = default;
};

class Shard;

/// What an error reply says beside its body: Retry-After with 503 and 429, WWW-Authenticate with 401, and
/// `x-should-retry: false` where the SDKs of OpenAI would try again by the status alone but must not: what is
/// not built, a request that its rank may have died of, and one that took longer than the server allows.
std::span<const HeaderView> ErrorHeaders(const Error& error) noexcept;

/// One request and its answer on a connection. Shard-confined; owned by the server.
class Exchange {
  public:
    Request& request() noexcept;
    Shard& shard() noexcept;
    /// Must be set before OnRequest returns if the answer is not complete by then.
    void set_listener(ExchangeListener* listener) noexcept;

    /// The whole answer; head and body leave in one write. HEAD gets the head only.
    void Respond(int status, std::string_view content_type, std::string_view body,
                 std::span<const HeaderView> headers = {}) noexcept;
    void Respond(const Response& response) noexcept;
    /// The error as an OpenAI error object with its status and its ErrorHeaders.
    void RespondError(const Error& error, std::span<const HeaderView> headers = {}) noexcept;

    /// 200, text/event-stream. The head leaves with the first flush. Chunked for HTTP/1.1, until close for
    /// HTTP/1.0.
    void StartStream(std::span<const HeaderView> headers = {}) noexcept;
    bool streaming() const noexcept;
    /// Append event bytes here, then Touch(). Chunk framing is added around whatever was appended since the
    /// last flush.
    std::string& stream() noexcept;
    /// Puts the stream on the shard's flush list: one send per stream, when the current batch of the loop is
    /// done.
    void Touch() noexcept;
    /// The last bytes are in stream(): closes the framing; the connection goes on to its next request.
    void EndStream() noexcept;
    /// Cuts the connection (RST); no OnClosed follows.
    void Abort() noexcept;
    /// Bytes appended but not yet taken by the kernel.
    std::size_t held_bytes() const noexcept;

    Exchange(const Exchange&) = delete;
    Exchange& operator=(const Exchange&) = delete;

  protected:
    Exchange() = default;
    ~Exchange() = default;
};

/// The application's side of one shard. All calls on the shard's thread.
class Handler {
  public:
    virtual ~Handler() = default;
    /// Headers are complete, the body is not read. True = go on; false = `refusal` is sent instead (the body
    /// is skipped if that is cheap, else the connection closes).
    virtual bool OnHeaders(const Request& request, Response& refusal) noexcept = 0;
    virtual void OnRequest(Exchange& exchange) noexcept = 0;
    /// The last call on the shard's thread; every exchange has been closed before.
    virtual void OnStop() noexcept {}
};

/// A shard's loop, offered to its Handler. Shard-confined but for Post.
class Shard {
  public:
    using TimerId = std::uint64_t;

    int index() const noexcept;
    /// Runs `fn` on the shard's thread, soon. Thread-safe; per batch, never per token.
    void Post(std::function<void()> fn);
    /// Calls `on_readable` whenever `fd` is readable (level-triggered), until Unwatch. The descriptor stays
    /// the caller's.
    void Watch(int fd, std::function<void()> on_readable);
    void Unwatch(int fd) noexcept;
    /// Coarse one-shot timer (resolution ~100 ms).
    TimerId SetTimer(Duration delay, std::function<void()> fn);
    void CancelTimer(TimerId id) noexcept;
    /// The loop's cached time: taken once per wake-up.
    TimePoint Now() const noexcept;
    const ShardStats& stats() const noexcept;

    Shard(const Shard&) = delete;
    Shard& operator=(const Shard&) = delete;

  protected:
    Shard() = default;
    ~Shard() = default;
};

using HandlerFactory = std::function<std::unique_ptr<Handler>(Shard&)>;

/// Create binds nothing; Listen binds and reports the address; Start runs the threads. Owner's thread only.
class Server {
  public:
    Server(ServerOptions options, HandlerFactory factory);
    ~Server();
    Server(const Server&) = delete;
    Server& operator=(const Server&) = delete;

    /// Binds every listener and loads the certificate. The error names the flag's value and the reason.
    Status Listen();
    /// The TCP port really bound.
    std::uint16_t port() const noexcept;
    /// "http://127.0.0.1:8000", brackets around IPv6.
    std::string url() const;
    void Start();
    /// From now on every answer says Connection: close.
    void BeginDrain() noexcept;
    /// Closes everything (open exchanges get OnClosed(kServerStop)) and joins the threads. Idempotent.
    void Stop();
    int num_shards() const noexcept;
    const ShardStats& stats(int shard) const noexcept;
    /// Runs `fn` on a shard's thread. Thread-safe.
    void Post(int shard, std::function<void()> fn);

  private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace rankgate::http
