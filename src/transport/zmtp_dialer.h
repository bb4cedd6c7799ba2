// SPDX-License-Identifier: Apache-2.0
// The connect side of the data sockets on ipc, native: DEALER or PUSH without libzmq. Messages are read and
// written on the engine's own thread; dialling, introducing itself and dialling again is done by a keeper
// thread that sleeps while all is well. So an engine in a step of many seconds is still found by a gateway
// that comes back meanwhile, and pays no hand-over for its messages. Owned by EngineLink.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/unique_fd.h"
#include "transport/zmtp.h"
#include "transport/zmtp_message.h"

namespace rankgate::transport {

/// A connection that has been introduced, on its way from the keeper to its owner.
struct ZmtpArrival {
    UniqueFd fd;
    std::unique_ptr<ZmtpDecoder> in;
    std::uint32_t turn{0};  // which of its line's connections it is
};

/// One thread that dials for any number of dialers. Everything: any thread, unless said otherwise.
class ZmtpKeeper {
  public:
    ZmtpKeeper();
    ~ZmtpKeeper();
    ZmtpKeeper(const ZmtpKeeper&) = delete;
    ZmtpKeeper& operator=(const ZmtpKeeper&) = delete;

    /// Readable after an arrival; the owner reads it empty.
    int news_fd() const noexcept { return news_.get(); }
    /// Keeps a connection to `path` up from now on. Returns its number. `first` is the first message of the
    /// first connection that comes about.
    std::size_t Add(std::string path, ZmtpRole role, std::string identity, const ZmtpLimits& limits,
                    std::string_view first);
    /// Dials no more for this one, and drops an arrival that was not taken.
    void Remove(std::size_t number);
    /// A connection that came since the last call, if its peer has not left again.
    bool Take(std::size_t number, ZmtpArrival& arrival);
    /// The owner has found the end of a connection that it took, maybe before the keeper has.
    void Ended(std::size_t number, std::uint32_t turn);
    /// Writes the rest on a connection that its owner has left, and closes it: when all is out, at `until`,
    /// or when the peer has gone. The keeper's end waits for it.
    void SeeOff(UniqueFd fd, std::string rest, TimePoint until);

  private:
    struct Line {
        std::string path;
        ZmtpRole role;
        std::string identity;
        ZmtpLimits limits;
        std::string first;  // framed
        bool removed{false};
        // Introducing itself, or ready and not yet taken:
        ZmtpArrival arrival;
        bool ready{false};
        int watched{-1};  // the connection whose end is waited for, taken or not
        std::uint32_t turn{0};
        TimePoint due{};  // when to dial next, or to give an introduction up
        Duration back_off{};
    };

    struct Leaving {
        UniqueFd fd;
        std::string rest;
        std::size_t offset;
        TimePoint until;
        std::uint64_t id;
    };

    void Run();
    bool WriteRest(Leaving& leaving) const;
    void Dial(std::size_t number);
    void Introduce(std::size_t number);
    void Lost(std::size_t number, bool at_once);
    void Wake() const noexcept;

    SteadyClock clock_;
    UniqueFd epoll_;
    UniqueFd control_;
    UniqueFd news_;
    std::mutex mutex_;  // taken when connections come and go, never for a message
    std::deque<Line> lines_;
    std::deque<Leaving> leaving_;
    std::uint64_t next_leaving_{0};
    bool stopping_{false};
    std::thread thread_;
};

/// The owner's side. One thread, except queued_bytes.
class ZmtpDialer {
  public:
    enum class Got : std::uint8_t { kMessage, kMalformed, kNothing };

    ZmtpDialer(ZmtpKeeper& keeper, std::string path, ZmtpRole role, std::string identity,
               const ZmtpLimits& limits, int epoll, std::uint64_t tag, std::string_view first = {});
    ~ZmtpDialer() { Close(Duration::zero()); }
    ZmtpDialer(const ZmtpDialer&) = delete;
    ZmtpDialer& operator=(const ZmtpDialer&) = delete;

    /// Gives what is queued at most `linger` to leave. Nothing can be sent or received afterwards.
    void Close(Duration linger);
    bool valid() const noexcept { return open_; }
    bool connected() const noexcept { return fd_.valid(); }

    void OnEpoll(std::uint32_t events);
    /// The keeper has news: takes a new connection when the old one has been read to its end.
    void OnNews() { unread_ = true; }
    /// Something may be left to receive: here or in the socket.
    bool readable() const noexcept { return open_ && (unread_ || held_); }
    /// The next message; views live until the next call. Also notices that the connection has ended.
    Got Receive();
    std::span<const std::string_view> frames() const noexcept { return in_->frames(); }

    /// Sends now what the socket takes, queues the rest; while there is no connection, everything. A message
    /// that was half out when its connection ended is dropped, later ones go to the next connection.
    void Send(std::string_view first, std::span<const std::string_view> rest);
    std::uint64_t queued_bytes() const noexcept { return queued_.load(std::memory_order_relaxed); }
    /// Tries again to send what is queued.
    void Flush();

  private:
    void Arm(std::uint32_t events, int operation);
    bool Adopt();
    void Drop();
    void Trim();
    void Queue(std::string_view whole);

    ZmtpKeeper& keeper_;
    const int epoll_;
    const std::uint64_t tag_;
    std::size_t number_{0};
    bool open_{true};
    UniqueFd fd_;
    std::unique_ptr<ZmtpDecoder> in_;
    bool unread_{true};  // the socket may have more, or the keeper a connection
    bool held_{false};   // messages that were read and not yet received
    bool out_armed_{false};
    std::uint32_t turn_{0};
    std::string out_;                // whole messages, but for what was sent and not yet taken out
    std::size_t out_front_{0};       // where the first message begins that is not out entirely
    std::size_t out_offset_{0};      // sent up to here
    std::deque<std::size_t> sizes_;  // of the messages from out_front_ on
    std::atomic<std::uint64_t> queued_{0};
    ZmtpMessage message_;
};

}  // namespace rankgate::transport
