// SPDX-License-Identifier: Apache-2.0
#include "http/server.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/basic_stream_descriptor.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <map>
#include <random>
#include <thread>
#include <unordered_map>
#include <utility>

#include "base/check.h"
#include "base/error_json.h"
#include "base/log.h"
#include "http/request_parser.h"
#include "http/socket.h"
#include "http/timer_wheel.h"

namespace rankgate::http {
namespace {

namespace asio = boost::asio;
using IoExecutor = asio::io_context::executor_type;
using Descriptor = asio::posix::basic_stream_descriptor<IoExecutor>;

constexpr std::size_t kReadBuffer = 64 * 1024;
constexpr int kReadsPerWake = 16;
constexpr int kAcceptsPerWake = 64;
constexpr Duration kAcceptRetry = std::chrono::milliseconds{100};
/// Bytes of further requests that may wait behind an answer; above it the connection is not read until the
/// answer is out.
constexpr std::size_t kMaxPipelined = 64 * 1024;
/// A refused body up to this size is read and thrown away, so that the connection lives on.
constexpr std::int64_t kMaxSkippedBody = 256 * 1024;
/// After an answer that leaves unread input behind: how long and how much is read so that the answer is not
/// lost to a reset.
constexpr Duration kLingerTime = std::chrono::seconds{2};
constexpr std::size_t kLingerBytes = 4 * 1024 * 1024;
/// An empty output buffer larger than this is given back.
constexpr std::size_t kKeptBuffer = 2048;
constexpr std::size_t kCompactAt = 64 * 1024;
/// Chunk heads are written as six hex digits and CRLF into a gap that was left for them.
constexpr std::size_t kChunkHead = 8;
constexpr std::size_t kMaxChunk = 4 * 1024 * 1024;
constexpr std::size_t kMaxRequestId = 128;
constexpr std::size_t kNone = static_cast<std::size_t>(-1);

std::string_view ReasonPhrase(int status) noexcept {
    switch (status) {
        case 200:
            return "OK";
        case 201:
            return "Created";
        case 202:
            return "Accepted";
        case 204:
            return "No Content";
        case 400:
            return "Bad Request";
        case 401:
            return "Unauthorized";
        case 403:
            return "Forbidden";
        case 404:
            return "Not Found";
        case 405:
            return "Method Not Allowed";
        case 408:
            return "Request Timeout";
        case 409:
            return "Conflict";
        case 413:
            return "Content Too Large";
        case 415:
            return "Unsupported Media Type";
        case 422:
            return "Unprocessable Content";
        case 429:
            return "Too Many Requests";
        case 431:
            return "Request Header Fields Too Large";
        case 500:
            return "Internal Server Error";
        case 501:
            return "Not Implemented";
        case 502:
            return "Bad Gateway";
        case 503:
            return "Service Unavailable";
        case 504:
            return "Gateway Timeout";
        default:
            return "Status";
    }
}

void AppendNumber(std::string& out, std::size_t number) {
    std::array<char, 20> digits{};
    std::size_t i = digits.size();
    do {
        digits[--i] = static_cast<char>('0' + number % 10);
        number /= 10;
    } while (number != 0);
    out.append(digits.data() + i, digits.size() - i);
}

/// Counters have one writer: a plain load and store, no locked instruction.
template <class T, class U>
void Add(std::atomic<T>& counter, U by) noexcept {
    counter.store(static_cast<T>(counter.load(std::memory_order_relaxed) + static_cast<T>(by)),
                  std::memory_order_relaxed);
}

bool SafeToEcho(std::string_view id) noexcept {
    return !id.empty() && id.size() <= kMaxRequestId &&
           std::all_of(id.begin(), id.end(), [](char c) { return c > ' ' && c < 0x7f; });
}

bool PrintableAscii(std::string_view text) noexcept {
    return std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c < 0x7f; });
}

}  // namespace

class ShardImpl;

/// One accepted socket: its parser, its current exchange and its buffers. Destroyed by the shard once no wait
/// refers to it.
class Connection final : public Exchange, public WheelEntry {
  public:
    /// kReading: between requests or inside one. kHandling: the handler owes an answer. kStreaming: it has
    /// begun one. kFinishing: the answer is complete and being written. kLingering: said goodbye, reading so
    /// that the peer can read our last words.
    enum class Phase : std::uint8_t { kReading, kHandling, kStreaming, kFinishing, kLingering, kClosed };

    Connection(ShardImpl& shard, int fd, const TlsContext* tls);
    ~Connection() = default;

    void Start();
    void OnDeadline();
    void Flush();
    void Close(CloseReason reason, bool reset, bool tell);

    // Exchange
    void Respond(int status, std::string_view content_type, std::string_view body,
                 std::span<const HeaderView> headers) noexcept;
    void StartStream(std::span<const HeaderView> headers) noexcept;
    std::string& Stream() noexcept;
    void Touch() noexcept;
    void EndStream() noexcept;
    std::size_t HeldBytes() const noexcept { return out_.size() - out_offset_; }
    void DropKeepAlive() noexcept { keep_alive_ = false; }

    ShardImpl& shard_;
    Request request_;
    ExchangeListener* listener_{nullptr};
    Phase phase_{Phase::kReading};
    std::size_t touched_at_{kNone};  // place in the shard's flush list
    Connection* next_{nullptr};      // the shard's list of all connections
    Connection* previous_{nullptr};
    int waits_{0};  // asynchronous waits that still refer to this

  private:
    void ArmRead();
    void ArmWrite();
    void OnReadable();
    void Consume(std::string_view bytes);
    std::string_view Parse(std::string_view data);
    bool OnHeadDone(bool more_bytes);
    void Dispatch();
    void Refuse(const Response& refusal, bool close);
    void FailRequest(const Error& error);
    void FinishExchange();
    void OnPeerGone();
    void BeginLinger();
    void ArmDeadline(Duration from_now);
    void ArmBodyDeadline();
    void OpenChunk();
    void CloseChunk();
    void AppendHead(int status, std::string_view content_type, std::size_t length, bool has_length,
                    std::span<const HeaderView> headers);
    bool OriginAllowed(std::string_view origin) const;
    void ReportHeld();
    void SetStreaming(bool on);

    Descriptor descriptor_;
    Transport transport_;
    std::unique_ptr<RequestParser> parser_;
    std::unique_ptr<Response> refusal_;  // waits for the end of a skipped body
    std::string in_;                     // read but not yet parsed
    std::string out_;
    std::size_t out_offset_{0};
    std::size_t chunk_at_{kNone};
    std::size_t reported_held_{0};
    std::size_t body_seen_{0};
    std::size_t lingered_{0};
    TimePoint body_start_{};
    bool read_armed_{false};
    bool write_armed_{false};
    bool read_wants_write_{false};  // TLS
    bool keep_alive_{true};
    bool head_only_{false};
    bool chunked_out_{false};
    bool linger_{false};
    bool eof_{false};
    bool streaming_counted_{false};
};

class ShardImpl final : public Shard {
  public:
    ShardImpl(int index, const ServerOptions& options, const TlsContext* tls, std::size_t max_connections,
              std::atomic<bool>& draining);
    ~ShardImpl();

    /// Everything that runs user code or writes to a connection runs inside one: its end flushes what was
    /// touched.
    class Batch {
      public:
        explicit Batch(ShardImpl& shard) : shard_{shard} {
            if (shard_.depth_++ == 0) {
                shard_.now_ = shard_.clock_.Now();
            }
        }
        ~Batch() {
            if (--shard_.depth_ == 0) {
                shard_.EndBatch();
            }
        }
        Batch(const Batch&) = delete;
        Batch& operator=(const Batch&) = delete;

      private:
        ShardImpl& shard_;
    };

    void AddListener(UniqueFd fd, bool tcp, bool tls);
    void Run();
    void RequestStop();
    void Release(Connection& connection);
    std::string_view Date();
    std::string MakeRequestId();

    struct Watcher {
        explicit Watcher(asio::io_context& context) : descriptor{context} {}
        Descriptor descriptor;
        std::function<void()> on_readable;
        bool live{true};
    };

    const int index_;
    const ServerOptions& options_;
    const std::size_t max_connections_;
    std::atomic<bool>& draining_;
    ShardStats stats_;
    SteadyClock clock_;
    TimePoint now_;
    asio::io_context context_{1};
    TimerWheel wheel_;
    std::array<char, kReadBuffer> buffer_;
    std::unique_ptr<Handler> handler_;
    std::vector<Connection*> touched_;
    bool stopping_{false};

    void WatchAgain(const std::shared_ptr<Watcher>& watcher);
    std::unordered_map<int, std::shared_ptr<Watcher>> watchers_;
    using Timers = std::multimap<TimePoint, std::pair<TimerId, std::function<void()>>>;
    Timers timers_;
    std::unordered_map<TimerId, Timers::iterator> timer_index_;
    TimerId next_timer_{1};

  private:
    struct Listener {
        explicit Listener(asio::io_context& context) : descriptor{context}, retry{context} {}
        Descriptor descriptor;
        asio::steady_timer retry;
        bool tcp{true};
        bool tls{false};
    };
    void Accept(Listener& listener);
    void WaitAccept(Listener& listener);
    void RetryAccept(Listener& listener);
    void EndBatch();
    void Tick();
    void DoStop();

    const TlsContext* tls_;
    std::vector<std::unique_ptr<Listener>> listeners_;
    std::vector<Connection*> graveyard_;
    Connection* connections_{nullptr};
    asio::steady_timer tick_{context_};
    int depth_{0};
    std::time_t date_second_{0};
    std::array<char, 40> date_{};
    std::size_t date_size_{0};
    std::mt19937_64 random_{std::random_device{}()};
};

// ----------------------------------------------------------------------------------------------------------------
// Connection

Connection::Connection(ShardImpl& shard, int fd, const TlsContext* tls)
    : shard_{shard}, descriptor_{shard.context_, fd}, transport_{fd, tls} {}

void Connection::Start() {
    ArmDeadline(shard_.options_.limits.header_timeout);
    ArmRead();
}

void Connection::ArmDeadline(Duration from_now) {
    shard_.wheel_.Arm(*this, shard_.now_ + from_now);
}

void Connection::ArmBodyDeadline() {
    const Limits& limits = shard_.options_.limits;
    const auto granted = std::chrono::seconds{body_seen_ / std::max<std::size_t>(1, limits.min_body_rate)};
    shard_.wheel_.Arm(*this, body_start_ + limits.body_timeout + granted);
}

void Connection::ArmRead() {
    if (read_armed_ || phase_ == Phase::kClosed || eof_) {
        return;
    }
    read_armed_ = true;
    ++waits_;
    descriptor_.async_wait(Descriptor::wait_read, [this](const boost::system::error_code& ec) {
        const ShardImpl::Batch batch{shard_};
        --waits_;
        read_armed_ = false;
        if (phase_ == Phase::kClosed) {
            shard_.Release(*this);
        } else if (ec) {
            OnPeerGone();
        } else {
            OnReadable();
        }
    });
}

void Connection::ArmWrite() {
    if (write_armed_ || phase_ == Phase::kClosed) {
        return;
    }
    write_armed_ = true;
    ++waits_;
    descriptor_.async_wait(Descriptor::wait_write, [this](const boost::system::error_code& ec) {
        const ShardImpl::Batch batch{shard_};
        --waits_;
        write_armed_ = false;
        if (phase_ == Phase::kClosed) {
            shard_.Release(*this);
        } else if (ec) {
            OnPeerGone();
        } else {
            if (read_wants_write_) {
                read_wants_write_ = false;
                OnReadable();
            }
            if (phase_ != Phase::kClosed) {
                Flush();
            }
        }
    });
}

void Connection::OnReadable() {
    for (int i = 0; i < kReadsPerWake; ++i) {
        const Transport::Outcome outcome = transport_.Read(shard_.buffer_.data(), shard_.buffer_.size());
        if (outcome.io == Transport::Io::kDone) {
            Consume({shard_.buffer_.data(), outcome.bytes});
            if (phase_ == Phase::kClosed) {
                return;
            }
            if (in_.size() > kMaxPipelined && phase_ != Phase::kReading) {
                return;  // FinishExchange reads on
            }
            if (outcome.bytes < shard_.buffer_.size() && !transport_.tls()) {
                break;
            }
            continue;
        }
        if (outcome.io == Transport::Io::kWantRead) {
            break;
        }
        if (outcome.io == Transport::Io::kWantWrite) {
            read_wants_write_ = true;
            ArmWrite();
            return;
        }
        if (outcome.io == Transport::Io::kEof && phase_ == Phase::kFinishing) {
            eof_ = true;  // the answer is complete: it may still be read
            keep_alive_ = false;
            return;
        }
        OnPeerGone();
        return;
    }
    if (transport_.tls() && HeldBytes() != 0 && !write_armed_) {
        Touch();  // a TLS write may have waited for this read
    }
    ArmRead();
}

void Connection::OnPeerGone() {
    if (phase_ == Phase::kHandling || phase_ == Phase::kStreaming) {
        Add(shard_.stats_.clients_gone_total, 1);
    }
    Close(CloseReason::kClientGone, false, true);
}

void Connection::Consume(std::string_view bytes) {
    if (phase_ == Phase::kLingering) {
        lingered_ += bytes.size();
        if (lingered_ > kLingerBytes) {
            Close(CloseReason::kServerStop, true, false);
        }
        return;
    }
    if (phase_ != Phase::kReading) {
        in_.append(bytes);
        return;
    }
    if (in_.empty()) {
        const std::string_view rest = Parse(bytes);
        if (phase_ != Phase::kClosed && !rest.empty()) {
            in_.assign(rest);
        }
        return;
    }
    in_.append(bytes);
    const std::size_t before = in_.size();
    const std::size_t rest = Parse(in_).size();
    if (phase_ != Phase::kClosed) {
        in_.erase(0, before - rest);
        if (in_.empty() && in_.capacity() > kKeptBuffer) {
            std::string{}.swap(in_);
        }
    }
}

/// Parses requests until one awaits its answer. Returns what is left.
std::string_view Connection::Parse(std::string_view data) {
    while (phase_ == Phase::kReading && !data.empty()) {
        if (parser_ == nullptr) {
            // An empty line in front of a request is forgiven (old clients end bodies with one).
            while (!data.empty() && (data.front() == '\r' || data.front() == '\n')) {
                data.remove_prefix(1);
            }
            if (data.empty()) {
                break;
            }
            request_ = Request{};
            parser_ = std::make_unique<RequestParser>(shard_.options_.limits, request_);
            ArmDeadline(shard_.options_.limits.header_timeout);
        }
        const bool in_body = parser_->state() == RequestParser::State::kBody;
        const std::size_t used = parser_->Feed(data);
        data.remove_prefix(used);
        if (in_body) {
            body_seen_ += used;
        }
        if (parser_->state() == RequestParser::State::kHeadDone) {
            if (!OnHeadDone(!data.empty())) {
                return data;
            }
            const std::size_t body_bytes = parser_->Feed(data);
            body_seen_ += body_bytes;
            data.remove_prefix(body_bytes);
        }
        switch (parser_->state()) {
            case RequestParser::State::kDone:
                Dispatch();
                break;
            case RequestParser::State::kError:
                FailRequest(parser_->error());
                return {};
            case RequestParser::State::kBody:
                ArmBodyDeadline();
                if (used == 0) {
                    return data;
                }
                break;
            default:
                return data;  // an incomplete head
        }
    }
    return data;
}

/// False: answered already, the body is not read.
bool Connection::OnHeadDone(bool more_bytes) {
    keep_alive_ = parser_->keep_alive();
    head_only_ = request_.method == Method::kHead;
    const std::string_view client_id = request_.Header("x-request-id");
    request_.id = SafeToEcho(client_id) ? std::string{client_id} : shard_.MakeRequestId();
    body_start_ = shard_.now_;
    body_seen_ = 0;

    Response refusal;
    bool refused = false;
    const std::string_view coding = request_.Header("content-encoding");
    const std::string_view origin = request_.Header("origin");
    if (!shard_.options_.allowed_origins.empty() && request_.method == Method::kOptions && !origin.empty() &&
        request_.Has("access-control-request-method")) {
        refused = true;
        refusal.status = 204;
        refusal.content_type.clear();
        if (OriginAllowed(origin)) {
            refusal.headers.emplace_back("Access-Control-Allow-Methods", "GET, HEAD, POST, DELETE, OPTIONS");
            const std::string_view wanted = request_.Header("access-control-request-headers");
            if (!wanted.empty() && PrintableAscii(wanted)) {
                refusal.headers.emplace_back("Access-Control-Allow-Headers", wanted);
            }
            refusal.headers.emplace_back("Access-Control-Max-Age", "600");
        }
    } else if (!coding.empty() && coding != "identity") {
        refused = true;
        const Error error{ErrorCode::kUnsupportedMediaType,
                          "Content-Encoding is not supported: send the body as it is.", "", false};
        refusal.status = HttpStatus(error.code);
        refusal.body = ErrorJson(error);
    } else {
        refused = !shard_.handler_->OnHeaders(request_, refusal);
    }
    const bool has_body = request_.chunked || request_.content_length > 0;
    if (!refused) {
        if (parser_->expects_continue() && has_body && !more_bytes) {
            out_ += "HTTP/1.1 100 Continue\r\n\r\n";
            Touch();
        }
        return true;
    }
    if (has_body && !request_.chunked && request_.content_length <= kMaxSkippedBody &&
        !parser_->expects_continue()) {
        refusal_ = std::make_unique<Response>(std::move(refusal));
        parser_->DiscardBody();
        return true;
    }
    Refuse(refusal, has_body);
    return false;
}

void Connection::Refuse(const Response& refusal, bool close) {
    parser_.reset();
    phase_ = Phase::kHandling;
    if (close) {
        keep_alive_ = false;
        linger_ = true;
    }
    Exchange::Respond(refusal);
}

void Connection::Dispatch() {
    parser_.reset();
    shard_.wheel_.Disarm(*this);
    phase_ = Phase::kHandling;
    Add(shard_.stats_.requests_total, 1);
    if (refusal_ != nullptr) {
        const std::unique_ptr<Response> refusal = std::move(refusal_);
        Exchange::Respond(*refusal);
        return;
    }
    if (!request_.body.empty() && request_.body.capacity() < request_.body.size() + kBodyPadding) {
        request_.body.reserve(request_.body.size() + kBodyPadding);
    }
    shard_.handler_->OnRequest(*this);
}

/// The bytes are not a request we can answer in step: one last error object, then the end.
void Connection::FailRequest(const Error& error) {
    Add(shard_.stats_.bad_requests_total, 1);
    if (request_.id.empty()) {
        request_.id = shard_.MakeRequestId();
    }
    const Error copy = error;  // NOLINT(performance-unnecessary-copy-initialization): it lives in the parser
    parser_.reset();
    phase_ = Phase::kHandling;
    keep_alive_ = false;
    linger_ = true;
    head_only_ = false;
    RespondError(copy);
}

bool Connection::OriginAllowed(std::string_view origin) const {
    const auto& allowed = shard_.options_.allowed_origins;
    return !origin.empty() && std::any_of(allowed.begin(), allowed.end(), [&](const std::string& one) {
        return one == "*" || one == origin;
    });
}

void Connection::AppendHead(int status, std::string_view content_type, std::size_t length, bool has_length,
                            std::span<const HeaderView> headers) {
    if (shard_.draining_.load(std::memory_order_relaxed)) {
        keep_alive_ = false;
    }
    out_ += "HTTP/1.1 ";
    AppendNumber(out_, static_cast<std::size_t>(status));
    out_ += ' ';
    out_ += ReasonPhrase(status);
    out_ += "\r\nDate: ";
    out_ += shard_.Date();
    if (!content_type.empty()) {
        out_ += "\r\nContent-Type: ";
        out_ += content_type;
    }
    if (has_length) {
        if (status != 204) {
            out_ += "\r\nContent-Length: ";
            AppendNumber(out_, length);
        }
    } else if (chunked_out_) {
        out_ += "\r\nTransfer-Encoding: chunked";
    }
    out_ += "\r\nX-Request-Id: ";
    out_ += request_.id;
    if (!keep_alive_) {
        out_ += "\r\nConnection: close";
    } else if (request_.http10) {
        out_ += "\r\nConnection: keep-alive";
    }
    if (!shard_.options_.allowed_origins.empty()) {
        const std::string_view origin = request_.Header("origin");
        if (OriginAllowed(origin)) {
            out_ += "\r\nAccess-Control-Allow-Origin: ";
            out_ += origin;
            out_ += "\r\nAccess-Control-Expose-Headers: x-request-id";
        }
        out_ += "\r\nVary: Origin";
    }
    for (const auto& [name, value] : headers) {
        out_ += "\r\n";
        out_ += name;
        out_ += ": ";
        out_ += value;
    }
    out_ += "\r\n\r\n";
}

void Connection::Respond(int status, std::string_view content_type, std::string_view body,
                         std::span<const HeaderView> headers) noexcept {
    if (phase_ != Phase::kHandling) {
        RG_DCHECK(false);
        return;
    }
    out_.reserve(out_.size() + 512 + (head_only_ ? 0 : body.size()));
    AppendHead(status, content_type, body.size(), true, headers);
    if (!head_only_) {
        out_ += body;
    }
    listener_ = nullptr;
    phase_ = Phase::kFinishing;
    Touch();
}

void Connection::StartStream(std::span<const HeaderView> headers) noexcept {
    if (phase_ != Phase::kHandling) {
        RG_DCHECK(false);
        return;
    }
    chunked_out_ = !request_.http10;
    if (!chunked_out_) {
        keep_alive_ = false;
    }
    AppendHead(200, "text/event-stream; charset=utf-8", 0, false, headers);
    request_.ReleaseHead();
    phase_ = Phase::kStreaming;
    SetStreaming(true);
    Touch();
}

void Connection::SetStreaming(bool on) {
    if (streaming_counted_ != on) {
        streaming_counted_ = on;
        Add(shard_.stats_.streams_open, on ? 1 : -1);
    }
}

void Connection::OpenChunk() {
    chunk_at_ = out_.size();
    out_.append(kChunkHead, '0');
}

/// Fills the gap in front of the bytes appended since OpenChunk; an empty chunk (which would end the body) is
/// taken back.
void Connection::CloseChunk() {
    if (chunk_at_ == kNone) {
        return;
    }
    const std::size_t size = out_.size() - chunk_at_ - kChunkHead;
    if (size == 0) {
        out_.resize(chunk_at_);
    } else {
        static constexpr char kHex[] = "0123456789abcdef";
        std::size_t rest = size;
        std::size_t digits = 0;
        for (std::size_t i = kChunkHead - 2; i-- > 0 && rest != 0; rest >>= 4, ++digits) {
            out_[chunk_at_ + i] = kHex[rest & 15];
        }
        out_[chunk_at_ + kChunkHead - 2] = '\r';
        out_[chunk_at_ + kChunkHead - 1] = '\n';
        out_ += "\r\n";
        if (out_offset_ == chunk_at_) {
            out_offset_ += kChunkHead - 2 - digits;  // leading zeros need not travel
        }
    }
    chunk_at_ = kNone;
}

std::string& Connection::Stream() noexcept {
    if (chunked_out_) {
        if (chunk_at_ != kNone && out_.size() - chunk_at_ > kMaxChunk) {
            CloseChunk();
        }
        if (chunk_at_ == kNone) {
            OpenChunk();
        }
    }
    return out_;
}

void Connection::Touch() noexcept {
    if (touched_at_ == kNone && phase_ != Phase::kClosed) {
        touched_at_ = shard_.touched_.size();
        shard_.touched_.push_back(this);
    }
}

void Connection::EndStream() noexcept {
    if (phase_ != Phase::kStreaming) {
        RG_DCHECK(phase_ == Phase::kClosed);
        return;
    }
    if (chunked_out_) {
        CloseChunk();
        out_ += "0\r\n\r\n";
    }
    listener_ = nullptr;
    SetStreaming(false);
    phase_ = Phase::kFinishing;
    Touch();
}

void Connection::ReportHeld() {
    const std::size_t held = HeldBytes();
    if (held != reported_held_) {
        Add(shard_.stats_.bytes_held,
            static_cast<std::int64_t>(held) - static_cast<std::int64_t>(reported_held_));
        reported_held_ = held;
    }
}

void Connection::Flush() {
    if (phase_ == Phase::kClosed || phase_ == Phase::kLingering) {
        return;
    }
    // While the socket is full nothing is tried and the open chunk grows: later events travel in one piece.
    if (!write_armed_) {
        CloseChunk();
        bool progress = false;
        while (out_offset_ < out_.size()) {
            const Transport::Outcome outcome =
                transport_.Write(out_.data() + out_offset_, out_.size() - out_offset_);
            if (outcome.io == Transport::Io::kDone) {
                out_offset_ += outcome.bytes;
                progress = true;
                continue;
            }
            if (outcome.io == Transport::Io::kWantWrite) {
                ArmWrite();
                break;
            }
            if (outcome.io == Transport::Io::kWantRead) {
                break;  // TLS: the armed read comes back here
            }
            OnPeerGone();
            return;
        }
        if (out_offset_ == out_.size()) {
            out_offset_ = 0;
            if (out_.capacity() > kKeptBuffer) {
                std::string{}.swap(out_);
            } else {
                out_.clear();
            }
            if (phase_ == Phase::kStreaming) {
                shard_.wheel_.Disarm(*this);  // silence of the engine is not ours to time
            }
        } else {
            if (progress || !armed()) {
                ArmDeadline(shard_.options_.limits.write_timeout);
            }
            if (out_offset_ > kCompactAt) {
                out_.erase(0, out_offset_);
                out_offset_ = 0;
            }
        }
    }
    ReportHeld();
    if (phase_ == Phase::kStreaming && HeldBytes() > shard_.options_.limits.max_held_bytes) {
        Add(shard_.stats_.slow_readers_total, 1);
        Close(CloseReason::kSlowReader, true, true);
        return;
    }
    if (phase_ == Phase::kFinishing && out_.empty()) {
        FinishExchange();
    }
}

void Connection::FinishExchange() {
    listener_ = nullptr;
    request_ = Request{};
    chunked_out_ = false;
    head_only_ = false;
    if (!keep_alive_ || eof_) {
        if (linger_ && !eof_) {
            BeginLinger();
        } else {
            Close(CloseReason::kServerStop, false, false);
        }
        return;
    }
    phase_ = Phase::kReading;
    ArmDeadline(shard_.options_.limits.keep_alive_timeout);
    if (!in_.empty()) {
        std::string pending = std::move(in_);
        in_.clear();
        Consume(pending);
        if (phase_ == Phase::kClosed) {
            return;
        }
    }
    ArmRead();
}

void Connection::BeginLinger() {
    phase_ = Phase::kLingering;
    transport_.ShutdownWrite();
    std::string{}.swap(in_);
    ArmDeadline(kLingerTime);
    ArmRead();
}

void Connection::OnDeadline() {
    switch (phase_) {
        case Phase::kReading:
            Add(shard_.stats_.timeouts_total, 1);
            if (parser_ != nullptr) {
                FailRequest(Error{ErrorCode::kTimeout, "The request did not arrive in time.", "", true});
            } else {
                Close(CloseReason::kServerStop, false, false);
            }
            return;
        case Phase::kHandling:
            return;
        case Phase::kStreaming:
        case Phase::kFinishing:
            Add(shard_.stats_.slow_readers_total, 1);
            Close(CloseReason::kSlowReader, true, true);
            return;
        case Phase::kLingering:
            Close(CloseReason::kServerStop, false, false);
            return;
        case Phase::kClosed:
            return;
    }
}

void Connection::Close(CloseReason reason, bool reset, bool tell) {
    if (phase_ == Phase::kClosed) {
        return;
    }
    phase_ = Phase::kClosed;
    shard_.wheel_.Disarm(*this);
    SetStreaming(false);
    out_.clear();
    out_offset_ = 0;
    chunk_at_ = kNone;
    ReportHeld();
    if (touched_at_ != kNone) {
        shard_.touched_[touched_at_] = nullptr;
        touched_at_ = kNone;
    }
    if (reset) {
        const linger hard{1, 0};
        ::setsockopt(descriptor_.native_handle(), SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
    } else if (transport_.tls()) {
        transport_.ShutdownWrite();
    }
    boost::system::error_code ignored;
    descriptor_.close(ignored);
    Add(shard_.stats_.connections_open, -1);
    ExchangeListener* listener = std::exchange(listener_, nullptr);
    if (tell && listener != nullptr) {
        listener->OnClosed(reason);
    }
    shard_.Release(*this);
}

// ------------------------------------------------------------------------------------------------------------------
// Exchange

Request& Exchange::request() noexcept {
    return static_cast<Connection*>(this)->request_;
}
Shard& Exchange::shard() noexcept {
    return static_cast<Connection*>(this)->shard_;
}
void Exchange::set_listener(ExchangeListener* listener) noexcept {
    static_cast<Connection*>(this)->listener_ = listener;
}

void Exchange::Respond(int status, std::string_view content_type, std::string_view body,
                       std::span<const HeaderView> headers) noexcept {
    static_cast<Connection*>(this)->Respond(status, content_type, body, headers);
}

void Exchange::Respond(const Response& response) noexcept {
    auto* connection = static_cast<Connection*>(this);
    std::vector<HeaderView> headers;
    headers.reserve(response.headers.size() + 1);
    for (const auto& [name, value] : response.headers) {
        headers.emplace_back(name, value);
    }
    if (response.close) {
        connection->DropKeepAlive();
    }
    connection->Respond(response.status, response.content_type, response.body, headers);
}

std::size_t ConnectionsFor(std::size_t files, std::size_t reserved) noexcept {
    constexpr std::size_t kFewest = 16;
    const std::size_t kept = std::max(files / 10, reserved);
    return files > kept + kFewest ? files - kept : kFewest;
}

std::span<const HeaderView> ErrorHeaders(const Error& error) noexcept {
    static constexpr std::array<HeaderView, 1> kRetryAfter{{{"Retry-After", "1"}}};
    static constexpr std::array<HeaderView, 1> kAuthenticate{{{"WWW-Authenticate", "Bearer"}}};
    static constexpr std::array<HeaderView, 1> kDoNotRetry{{{"x-should-retry", "false"}}};
    const int status = HttpStatus(error.code);
    if (status == 429 || status == 503) {
        return kRetryAfter;
    }
    if (status == 401) {
        return kAuthenticate;
    }
    // A 408 of the server's own time limit: a second try would be computed for as long, and cut as well.
    const bool in_vain = error.code == ErrorCode::kRankLost || error.code == ErrorCode::kTimeout;
    if (error.code == ErrorCode::kNotImplemented || (in_vain && !error.retryable)) {
        return kDoNotRetry;
    }
    return {};
}

void Exchange::RespondError(const Error& error, std::span<const HeaderView> headers) noexcept {
    const int status = HttpStatus(error.code);
    std::vector<HeaderView> all{headers.begin(), headers.end()};
    const std::span<const HeaderView> own = ErrorHeaders(error);
    all.insert(all.end(), own.begin(), own.end());
    static_cast<Connection*>(this)->Respond(status, "application/json", ErrorJson(error), all);
}

void Exchange::StartStream(std::span<const HeaderView> headers) noexcept {
    static_cast<Connection*>(this)->StartStream(headers);
}
bool Exchange::streaming() const noexcept {
    return static_cast<const Connection*>(this)->phase_ == Connection::Phase::kStreaming;
}
std::string& Exchange::stream() noexcept {
    return static_cast<Connection*>(this)->Stream();
}
void Exchange::Touch() noexcept {
    static_cast<Connection*>(this)->Touch();
}
void Exchange::EndStream() noexcept {
    static_cast<Connection*>(this)->EndStream();
}
void Exchange::Abort() noexcept {
    static_cast<Connection*>(this)->Close(CloseReason::kServerStop, true, false);
}
std::size_t Exchange::held_bytes() const noexcept {
    return static_cast<const Connection*>(this)->HeldBytes();
}

// -----------------------------------------------------------------------------------------------------------------
// ShardImpl

ShardImpl::ShardImpl(int index, const ServerOptions& options, const TlsContext* tls,
                     std::size_t max_connections, std::atomic<bool>& draining)
    : index_{index},
      options_{options},
      max_connections_{max_connections},
      draining_{draining},
      now_{clock_.Now()},
      wheel_{now_},
      tls_{tls} {
    touched_.reserve(1024);
}

ShardImpl::~ShardImpl() {
    handler_.reset();
    // Waits that never completed refer to connections; both go now, in an order in which neither calls the
    // other.
    while (connections_ != nullptr) {
        Connection* connection = connections_;
        connections_ = connection->next_;
        wheel_.Disarm(*connection);
        delete connection;
    }
    for (auto& [fd, watcher] : watchers_) {
        if (watcher->descriptor.is_open()) {
            watcher->descriptor.release();
        }
    }
}

void ShardImpl::AddListener(UniqueFd fd, bool tcp, bool tls) {
    auto listener = std::make_unique<Listener>(context_);
    listener->descriptor.assign(fd.release());
    listener->tcp = tcp;
    listener->tls = tls;
    listeners_.push_back(std::move(listener));
}

void ShardImpl::WaitAccept(Listener& listener) {
    if (stopping_) {
        return;
    }
    listener.descriptor.async_wait(Descriptor::wait_read,
                                   [this, &listener](const boost::system::error_code& ec) {
                                       if (!ec && !stopping_) {
                                           const Batch batch{*this};
                                           Accept(listener);
                                       }
                                   });
}

void ShardImpl::RetryAccept(Listener& listener) {
    listener.retry.expires_after(kAcceptRetry);
    listener.retry.async_wait([this, &listener](const boost::system::error_code& ec) {
        if (!ec) {
            WaitAccept(listener);
        }
    });
}

void ShardImpl::Accept(Listener& listener) {
    static LogLimiter limiter{1};
    for (int i = 0; i < kAcceptsPerWake; ++i) {
        const std::int64_t open = stats_.connections_open.load(std::memory_order_relaxed);
        if (static_cast<std::size_t>(open) >= max_connections_) {
            if (std::uint64_t suppressed = 0; limiter.Allow(suppressed)) {
                LogWarning("http_connection_limit",
                           {{"shard", index_}, {"open", open}, {"suppressed", suppressed}});
            }
            RetryAccept(listener);
            return;
        }
        const int fd =
            ::accept4(listener.descriptor.native_handle(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
                if (std::uint64_t suppressed = 0; limiter.Allow(suppressed)) {
                    LogWarning(
                        "http_accept_failed",
                        {{"shard", index_}, {"reason", std::strerror(errno)}, {"suppressed", suppressed}});
                }
                RetryAccept(listener);
                return;
            }
            if (errno == EINTR || errno == ECONNABORTED) {
                continue;
            }
            break;
        }
        if (listener.tcp) {
            const int one = 1;
            ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        }
        auto* connection = new Connection(*this, fd, listener.tls ? tls_ : nullptr);
        connection->next_ = connections_;
        if (connections_ != nullptr) {
            connections_->previous_ = connection;
        }
        connections_ = connection;
        Add(stats_.connections_open, 1);
        Add(stats_.connections_total, 1);
        connection->Start();
    }
    WaitAccept(listener);
}

/// A closed connection is freed at the end of the batch, once no wait refers to it.
void ShardImpl::Release(Connection& connection) {
    if (connection.waits_ != 0) {
        return;
    }
    if (connection.previous_ != nullptr) {
        connection.previous_->next_ = connection.next_;
    } else {
        connections_ = connection.next_;
    }
    if (connection.next_ != nullptr) {
        connection.next_->previous_ = connection.previous_;
    }
    graveyard_.push_back(&connection);
}

void ShardImpl::EndBatch() {
    ++depth_;  // what runs below belongs to this batch
    for (std::size_t i = 0; i < touched_.size(); ++i) {
        if (Connection* connection = touched_[i]) {
            touched_[i] = nullptr;
            connection->touched_at_ = kNone;
            connection->Flush();
        }
    }
    touched_.clear();
    --depth_;
    for (Connection* connection : graveyard_) {
        delete connection;
    }
    graveyard_.clear();
}

void ShardImpl::Tick() {
    if (stopping_) {
        return;
    }
    tick_.expires_after(TimerWheel::kTick);
    tick_.async_wait([this](const boost::system::error_code& ec) {
        if (ec) {
            return;
        }
        {
            const Batch batch{*this};
            wheel_.Advance(now_, [](WheelEntry& entry) { static_cast<Connection&>(entry).OnDeadline(); });
            // As many as there are now: a timer that is set again by its own callback waits for the next
            // tick.
            for (std::size_t left = timers_.size();
                 left > 0 && !timers_.empty() && timers_.begin()->first <= now_; --left) {
                auto node = timers_.extract(timers_.begin());
                timer_index_.erase(node.mapped().first);
                node.mapped().second();
            }
        }
        Tick();
    });
}

void ShardImpl::Run() {
    for (const auto& listener : listeners_) {
        WaitAccept(*listener);
    }
    Tick();
    context_.run();
}

void ShardImpl::RequestStop() {
    asio::post(context_, [this] { DoStop(); });
}

void ShardImpl::DoStop() {
    if (stopping_) {
        return;
    }
    {
        const Batch batch{*this};
        stopping_ = true;
        boost::system::error_code ignored;
        for (const auto& listener : listeners_) {
            listener->descriptor.close(ignored);
            listener->retry.cancel();
        }
        for (Connection* connection = connections_; connection != nullptr;) {
            Connection* next = connection->next_;
            connection->Close(CloseReason::kServerStop, false, true);
            connection = next;
        }
        if (handler_ != nullptr) {
            handler_->OnStop();
        }
        timer_index_.clear();
        timers_.clear();
        tick_.cancel();
    }
    context_.stop();
}

std::string_view ShardImpl::Date() {
    const std::time_t second = std::time(nullptr);
    if (second != date_second_) {
        date_second_ = second;
        std::tm parts{};
        ::gmtime_r(&second, &parts);
        static constexpr const char* kDays[] = {"Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"};
        static constexpr const char* kMonths[] = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                                  "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
        const int size = std::snprintf(date_.data(), date_.size(), "%s, %02d %s %04d %02d:%02d:%02d GMT",
                                       kDays[parts.tm_wday], parts.tm_mday, kMonths[parts.tm_mon],
                                       parts.tm_year + 1900, parts.tm_hour, parts.tm_min, parts.tm_sec);
        date_size_ = static_cast<std::size_t>(std::max(0, size));
    }
    return {date_.data(), date_size_};
}

std::string ShardImpl::MakeRequestId() {
    static constexpr char kHex[] = "0123456789abcdef";
    std::string id = "req-";
    std::uint64_t bits = random_();
    for (int i = 0; i < 16; ++i, bits >>= 4) {
        id += kHex[bits & 15];
    }
    return id;
}

void ShardImpl::WatchAgain(const std::shared_ptr<Watcher>& watcher) {
    watcher->descriptor.async_wait(Descriptor::wait_read,
                                   [this, watcher](const boost::system::error_code& ec) {
                                       if (ec || !watcher->live) {
                                           return;
                                       }
                                       {
                                           const Batch batch{*this};
                                           watcher->on_readable();
                                       }
                                       if (watcher->live) {
                                           WatchAgain(watcher);
                                       }
                                   });
}

// ---------------------------------------------------------------------------------------------------------------------
// Shard

int Shard::index() const noexcept {
    return static_cast<const ShardImpl*>(this)->index_;
}

void Shard::Post(std::function<void()> fn) {
    auto* impl = static_cast<ShardImpl*>(this);
    asio::post(impl->context_, [impl, fn = std::move(fn)] {
        const ShardImpl::Batch batch{*impl};
        fn();
    });
}

void Shard::Watch(int fd, std::function<void()> on_readable) {
    auto* impl = static_cast<ShardImpl*>(this);
    auto watcher = std::make_shared<ShardImpl::Watcher>(impl->context_);
    watcher->descriptor.assign(fd);
    watcher->on_readable = std::move(on_readable);
    impl->watchers_[fd] = watcher;
    impl->WatchAgain(watcher);
}

void Shard::Unwatch(int fd) noexcept {
    auto* impl = static_cast<ShardImpl*>(this);
    const auto found = impl->watchers_.find(fd);
    if (found != impl->watchers_.end()) {
        found->second->live = false;
        found->second->descriptor.release();
        impl->watchers_.erase(found);
    }
}

Shard::TimerId Shard::SetTimer(Duration delay, std::function<void()> fn) {
    auto* impl = static_cast<ShardImpl*>(this);
    const TimerId id = impl->next_timer_++;
    impl->timer_index_[id] = impl->timers_.emplace(impl->now_ + delay, std::make_pair(id, std::move(fn)));
    return id;
}

void Shard::CancelTimer(TimerId id) noexcept {
    auto* impl = static_cast<ShardImpl*>(this);
    const auto found = impl->timer_index_.find(id);
    if (found != impl->timer_index_.end()) {
        impl->timers_.erase(found->second);
        impl->timer_index_.erase(found);
    }
}

TimePoint Shard::Now() const noexcept {
    return static_cast<const ShardImpl*>(this)->now_;
}
const ShardStats& Shard::stats() const noexcept {
    return static_cast<const ShardImpl*>(this)->stats_;
}

// --------------------------------------------------------------------------------------------------------------------
// Server

struct Server::Impl {
    ServerOptions options;
    HandlerFactory factory;
    std::unique_ptr<TlsContext> tls;
    std::vector<std::unique_ptr<ShardImpl>> shards;
    std::vector<std::thread> threads;
    std::atomic<bool> draining{false};
    std::uint16_t port{0};
    bool uds_bound{false};
    bool stopped{false};
};

Server::Server(ServerOptions options, HandlerFactory factory) : impl_{std::make_unique<Impl>()} {
    impl_->options = std::move(options);
    impl_->factory = std::move(factory);
    impl_->options.shards = std::max(1, impl_->options.shards);
}

Server::~Server() {
    Stop();
}

Status Server::Listen() {
    ServerOptions& options = impl_->options;
    if (!options.listen.ssl_certfile.empty()) {
        auto tls = TlsContext::Load(options.listen.ssl_certfile, options.listen.ssl_keyfile);
        if (!tls) {
            return tls.error();
        }
        impl_->tls = std::move(*tls);
    }
    std::size_t max_connections = options.limits.max_connections;
    if (max_connections == 0) {
        rlimit limit{};
        ::getrlimit(RLIMIT_NOFILE, &limit);
        const std::size_t files =
            limit.rlim_cur == RLIM_INFINITY ? 1'000'000 : static_cast<std::size_t>(limit.rlim_cur);
        max_connections = ConnectionsFor(files, options.limits.reserved_descriptors);
    }
    const auto shards = static_cast<std::size_t>(options.shards);
    for (std::size_t i = 0; i < shards; ++i) {
        impl_->shards.push_back(
            std::make_unique<ShardImpl>(static_cast<int>(i), options, impl_->tls.get(),
                                        std::max<std::size_t>(1, max_connections / shards), impl_->draining));
    }
    if (!options.listen.host.empty()) {
        auto bound = BindTcp(options.listen.host, options.listen.port, options.shards);
        if (!bound) {
            return bound.error();
        }
        impl_->port = bound->port;
        for (std::size_t i = 0; i < shards; ++i) {
            for (UniqueFd& fd : bound->per_shard[i]) {
                impl_->shards[i]->AddListener(std::move(fd), true, impl_->tls != nullptr);
            }
        }
    }
    if (!options.listen.uds.empty()) {
        auto bound = BindUnix(options.listen.uds);
        if (!bound) {
            return bound.error();
        }
        for (std::size_t i = 1; i < shards; ++i) {
            impl_->shards[i]->AddListener(UniqueFd{::dup(bound->get())}, false, false);
        }
        impl_->shards[0]->AddListener(std::move(*bound), false, false);
        impl_->uds_bound = true;
    }
    return Status::Ok();
}

std::uint16_t Server::port() const noexcept {
    return impl_->port;
}

std::string Server::url() const {
    const ListenOptions& listen = impl_->options.listen;
    if (listen.host.empty()) {
        return "unix:" + listen.uds;
    }
    return (impl_->tls != nullptr ? "https://" : "http://") + HostPort(listen.host, impl_->port);
}

void Server::Start() {
    // OpenSSL writes without MSG_NOSIGNAL; a client that leaves must not end the process.
    std::signal(SIGPIPE, SIG_IGN);
    for (const auto& shard : impl_->shards) {
        shard->handler_ = impl_->factory(*shard);
    }
    for (const auto& shard : impl_->shards) {
        impl_->threads.emplace_back([&shard = *shard] { shard.Run(); });
    }
}

void Server::BeginDrain() noexcept {
    impl_->draining.store(true, std::memory_order_relaxed);
}

void Server::Stop() {
    if (impl_->stopped) {
        return;
    }
    impl_->stopped = true;
    for (const auto& shard : impl_->shards) {
        shard->RequestStop();
    }
    for (std::thread& thread : impl_->threads) {
        thread.join();
    }
    if (impl_->uds_bound) {
        ::unlink(impl_->options.listen.uds.c_str());
    }
}

int Server::num_shards() const noexcept {
    return impl_->options.shards;
}
const ShardStats& Server::stats(int shard) const noexcept {
    return impl_->shards[static_cast<std::size_t>(shard)]->stats_;
}
void Server::Post(int shard, std::function<void()> fn) {
    impl_->shards[static_cast<std::size_t>(shard)]->Post(std::move(fn));
}

}  // namespace rankgate::http
