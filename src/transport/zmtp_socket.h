// SPDX-License-Identifier: Apache-2.0
// The bind side of a group's data sockets on ipc, native: ROUTER or PULL without libzmq, without its thread
// and the two hand-overs it costs every message. FrontendLink owns one per data socket and lends its epoll
// set: a message is read and written on the thread that wants it. What libzmq's sockets promise holds here
// too: ROUTER_MANDATORY, ROUTER_HANDOVER, every whole message before the news of its connection's end. Thread
// rule: one thread makes every call.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "base/unique_fd.h"
#include "transport/zmtp.h"
#include "transport/zmtp_message.h"

namespace rankgate::transport {

class ZmtpListener {
  public:
    struct Options {
        ZmtpRole role{ZmtpRole::kPull};
        ZmtpLimits limits;
        int backlog{1024};
        std::size_t max_connections{1024};
        int epoll{-1};  // of the owner; events with `tag` in the upper half of their data go to OnEpoll
        std::uint32_t tag{0};
    };
    struct Event {
        enum class Kind : std::uint8_t { kAccepted, kReady, kFailed, kClosed };
        Kind kind{Kind::kAccepted};
        int fd{-1};
    };
    enum class Got : std::uint8_t { kMessage, kMalformed, kNothing };

    /// `path` must not exist: SocketDir::Claim has seen to that.
    static Result<std::unique_ptr<ZmtpListener>> Bind(const std::string& path, Options options);
    /// Gives what is queued at most `linger` to leave, closes everything, removes the socket's file.
    void Close(Duration linger);
    ~ZmtpListener();
    ZmtpListener(const ZmtpListener&) = delete;
    ZmtpListener& operator=(const ZmtpListener&) = delete;

    void OnEpoll(std::uint64_t data, std::uint32_t events, TimePoint now);
    /// Looks at every connection, whatever epoll said: the peer's process has ended.
    void LookEverywhere();
    /// Once in a while: strays that never introduce themselves, an accept that found no descriptor.
    void Tick(TimePoint now);

    /// A Receive may have something to do.
    bool readable() const noexcept { return !pending_.empty(); }
    /// The next message. ROUTER: the sender's identity comes first. Views live until the next call.
    Got Receive();
    std::span<const std::string_view> frames() const noexcept { return frames_; }
    int source_fd() const noexcept { return source_fd_; }

    bool has_events() const noexcept { return !events_.empty(); }
    /// In order with the messages: kClosed comes after the connection's last message was received, with the
    /// descriptor: as long as it is held, its number cannot mean another connection.
    bool NextEvent(Event& event, UniqueFd& closed);

    /// ROUTER: `[type][payload][aux...]` to a peer. 0, or EHOSTUNREACH: nobody has this identity. Never
    /// blocks; what the socket does not take is queued.
    int Send(const std::string& identity, std::string_view type, std::string_view payload,
             std::span<const std::string_view> aux);
    std::uint64_t queued_bytes(const std::string& identity) const;

  private:
    struct Connection {
        Connection(int socket, const Options& options) : fd{socket}, in{options.role, options.limits} {}
        UniqueFd fd;
        ZmtpDecoder in;
        TimePoint accepted;
        std::string out;
        std::size_t out_offset{0};
        bool introduced{false};  // has said READY
        bool pending{false};     // in pending_
        bool unread{false};      // the kernel may hold more
        bool eof{false};         // nothing more will come; what came is still delivered
        bool replaced{false};    // another connection has its identity: kept open, not heard
        bool out_armed{false};
    };

    explicit ZmtpListener(Options options) : options_{options} {}
    void Arm(int fd, std::uint32_t events, int operation);
    void Accept(TimePoint now);
    void MarkPending(Connection& connection);
    void Read(Connection& connection);
    void OnReady(Connection& connection);
    void Unname(Connection& connection);
    void Finish(Connection& connection);
    void Write(Connection& connection);
    void DropOutput(Connection& connection);

    const Options options_;
    std::string path_;
    UniqueFd listener_;
    bool accepting_{true};
    std::unordered_map<int, std::unique_ptr<Connection>> connections_;
    std::unordered_map<std::string, Connection*> peers_;  // ROUTER: who is sent to under an identity
    std::size_t introducing_{0};                          // connections that have not said READY
    std::deque<Connection*> pending_;
    std::deque<std::pair<Event, UniqueFd>> events_;
    std::vector<std::string_view> routed_;
    std::span<const std::string_view> frames_;
    int source_fd_{-1};
    ZmtpMessage message_;
};

}  // namespace rankgate::transport
