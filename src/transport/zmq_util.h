// SPDX-License-Identifier: Apache-2.0
// Thin owners over libzmq's C API: context, socket, message, monitor. No exceptions, no blocking calls.
// Internal to transport/ (and to tests that play a stray peer): public headers never include zmq.h. A socket
// belongs to one thread.
#pragma once

#include <zmq.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/result.h"

namespace rankgate::transport {

/// Frames of one message that we are ready to look at; surplus ones are drained and the message counts as
/// malformed. A step of thousands of requests with logprobs has two or three frames for each.
inline constexpr std::size_t kMaxFramesPerMessage = 65536;
/// Handshake and registration maps are a few hundred bytes; a peer that sends more is cut off by libzmq.
inline constexpr std::int64_t kMaxControlFrameBytes = 1 << 20;
/// Outputs with full-vocabulary logprobs are megabytes; this is where we stop believing the length.
inline constexpr std::int64_t kMaxOutputFrameBytes = 256 << 20;

class ZmqMessage {
  public:
    ZmqMessage() noexcept { ::zmq_msg_init(&msg_); }
    ZmqMessage(ZmqMessage&& other) noexcept {
        ::zmq_msg_init(&msg_);
        ::zmq_msg_move(&msg_, &other.msg_);
    }
    ZmqMessage& operator=(ZmqMessage&& other) noexcept {
        ::zmq_msg_move(&msg_, &other.msg_);
        return *this;
    }
    ZmqMessage(const ZmqMessage&) = delete;
    ZmqMessage& operator=(const ZmqMessage&) = delete;
    ~ZmqMessage() { ::zmq_msg_close(&msg_); }

    zmq_msg_t* get() noexcept { return &msg_; }
    std::string_view view() noexcept {
        return {static_cast<const char*>(::zmq_msg_data(&msg_)), ::zmq_msg_size(&msg_)};
    }
    bool more() noexcept { return ::zmq_msg_more(&msg_) != 0; }
    /// Descriptor of the connection it came in on, -1 = not known.
    int source_fd() noexcept { return ::zmq_msg_get(&msg_, ZMQ_SRCFD); }

  private:
    zmq_msg_t msg_;
};

class ZmqContext {
  public:
    ZmqContext() : context_{::zmq_ctx_new()} { RG_CHECK(context_ != nullptr); }
    ZmqContext(const ZmqContext&) = delete;
    ZmqContext& operator=(const ZmqContext&) = delete;
    /// Waits for what lingers in closed sockets: bounded by their linger.
    ~ZmqContext() {
        while (::zmq_ctx_term(context_) != 0 && errno == EINTR) {
        }
    }
    void* get() const noexcept { return context_; }

  private:
    void* context_;
};

/// Counts the bytes that libzmq holds for one peer. Shared with libzmq's thread, hence atomic; outlives the
/// context.
struct QueuedBytes {
    std::atomic<std::uint64_t> bytes{0};
};

class ZmqSocket {
  public:
    ZmqSocket() = default;
    ZmqSocket(const ZmqContext& context, int type) : socket_{::zmq_socket(context.get(), type)} {
        RG_CHECK(socket_ != nullptr);
    }
    ZmqSocket(ZmqSocket&& other) noexcept : socket_{std::exchange(other.socket_, nullptr)} {}
    ZmqSocket& operator=(ZmqSocket&& other) noexcept {
        if (this != &other) {
            Close();
            socket_ = std::exchange(other.socket_, nullptr);
        }
        return *this;
    }
    ~ZmqSocket() { Close(); }

    void Close() noexcept {
        if (socket_ != nullptr) {
            ::zmq_close(socket_);
            socket_ = nullptr;
        }
    }
    bool valid() const noexcept { return socket_ != nullptr; }
    void* get() const noexcept { return socket_; }

    void Set(int option, int value) noexcept {
        RG_CHECK(::zmq_setsockopt(socket_, option, &value, sizeof value) == 0);
    }
    void Set(int option, std::int64_t value) noexcept {
        RG_CHECK(::zmq_setsockopt(socket_, option, &value, sizeof value) == 0);
    }
    void Set(int option, std::string_view value) noexcept {
        RG_CHECK(::zmq_setsockopt(socket_, option, value.data(), value.size()) == 0);
    }
    /// 0 or errno.
    int Bind(const std::string& address) noexcept {
        return ::zmq_bind(socket_, address.c_str()) == 0 ? 0 : errno;
    }
    int Connect(const std::string& address) noexcept {
        return ::zmq_connect(socket_, address.c_str()) == 0 ? 0 : errno;
    }
    std::string LastEndpoint() const;
    /// Readable when the socket's state changed (see the pitfalls in docs/transport.md).
    int fd() const;

    enum class Got : std::uint8_t { kFrame, kNothing };
    Got Receive(ZmqMessage& message) noexcept {
        for (;;) {
            if (::zmq_msg_recv(message.get(), socket_, ZMQ_DONTWAIT) >= 0) {
                return Got::kFrame;
            }
            if (errno != EINTR) {
                return Got::kNothing;
            }
        }
    }
    /// Copies `bytes` (small frames live inside the message). 0 or errno: EAGAIN, EHOSTUNREACH, ...
    int Send(std::string_view bytes, bool more) noexcept;
    /// Like Send, and counts the bytes in `counter` until libzmq wrote or dropped them.
    int SendCounted(std::string_view bytes, bool more, QueuedBytes& counter) noexcept;

  private:
    void* socket_{nullptr};
};

/// Receives whole messages into reused storage. Views are valid until the next Receive.
class MultipartReader {
  public:
    enum class Got : std::uint8_t { kMessage, kMalformed, kNothing };
    Got Receive(ZmqSocket& socket);
    std::span<const std::string_view> frames() const noexcept { return {views_.data(), count_}; }
    int source_fd() const noexcept { return fd_; }
    /// Frees the frames now instead of at the next Receive.
    void Release() noexcept;

  private:
    std::vector<ZmqMessage> messages_;
    std::vector<std::string_view> views_;
    std::size_t count_{0};
    int fd_{-1};
};

/// Connection events of one socket.
class ZmqMonitor {
  public:
    struct Event {
        std::uint16_t kind{0};  // ZMQ_EVENT_...
        std::int32_t value{0};  // a descriptor, mostly
    };
    ZmqMonitor() = default;
    ZmqMonitor(const ZmqContext& context, ZmqSocket& socket, const std::string& name, int events);
    bool valid() const noexcept { return pair_.valid(); }
    int fd() const { return pair_.fd(); }
    bool Next(Event& event);
    void Close(ZmqSocket& socket) noexcept;

  private:
    ZmqSocket pair_;
};

bool IsIpc(std::string_view address) noexcept;
/// An ipc address whose name is a file that a socket address can hold; not the abstract names ("@...") that
/// libzmq also takes.
bool IsIpcFile(std::string_view address) noexcept;
/// The environment says RANKGATE_TRANSPORT=libzmq: data sockets on ipc are libzmq's, too.
bool LibzmqWanted() noexcept;
/// tcp://127.0.0.1:5 -> true; a name or [::1] -> false. Such sockets are made without IPv6, so that no peer
/// is ever told a mapped address ([::ffff:127.0.0.1]) that its own socket may not be able to dial.
bool IsIpv4Literal(std::string_view address);
/// tcp://[::1]:5 -> true.
bool IsIpv6Literal(std::string_view address) noexcept;
/// ZMQ's own text for an errno.
std::string ZmqErrorText(int error);

}  // namespace rankgate::transport
