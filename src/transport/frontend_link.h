// SPDX-License-Identifier: Apache-2.0
// The gateway's end of the wire for ONE engine group: handshake ROUTER, input ROUTER, output PULL, their
// monitors, the socket directory and the facts file. It tells ranks apart, finds out which of them lost which
// socket, and bounds what is queued for each. It does not decode outputs and decides nothing about requests:
// GroupActor does, through FrontendLink::Handler.
//
// Attribution of a connection to a rank, strongest first: the descriptor a message came in on (every
// registration and every output names its rank) -> the pid of the ipc peer (SO_PEERCRED), where only one rank
// has it -> for a lost, never attributed input connection, a probe of every rank (ROUTER_MANDATORY refuses
// the one that is gone). Thread rule: one thread owns the link and makes every call.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "transport/handshake.h"

namespace rankgate::transport {

struct FrontendLinkOptions {
    /// Unset = that of the first rank that registers.
    std::optional<Dialect> dialect{Dialect::kVllm};
    std::int32_t group{0};
    std::int32_t size{1};
    std::int32_t base_index{0};
    /// tcp://host:port; port 0 = any (see FrontendLink::handshake_address). Empty = no handshake socket
    /// (re-attach only).
    std::string handshake_address{"tcp://127.0.0.1:0"};
    /// Sockets and facts live here (0700, created if missing). Empty = a private directory that is removed at
    /// close, and no re-attach after a restart.
    std::string socket_dir;
    /// Data sockets on tcp instead of ipc: this is the host name or address that engines on other machines
    /// dial. Empty = ipc.
    std::string data_host;
    /// Bytes queued for one rank beyond which a request to it fails (kSendFailed). Aborts and pings have a
    /// reserve on top.
    std::uint64_t max_queued_bytes_per_rank{64ULL << 20};
    Duration ready_timeout{0};
    /// Data sockets on ipc are read and written on the owner's thread (zmtp_socket.h) instead of libzmq's.
    /// The environment's RANKGATE_TRANSPORT=libzmq overrules it.
    bool native{true};
};

/// What happened to a rank's connection.
enum class PeerLoss : std::uint8_t {
    kInputClosed,   // its input connection closed (deaf unless more follows)
    kOutputClosed,  // its output connection closed (mute unless more follows)
    kProcessGone,   // the process behind it ended
    kUnreachable,   // a send was refused: ROUTER knows no such peer
};

class FrontendLink {
  public:
    /// Called from Poll only, on the owner's thread, never re-entrantly; it may call Send and Forget. Order
    /// per rank: OnProgress -> OnRegistered -> OnLive. OnPeerLost may come several times with different
    /// reasons, and never before outputs that preceded it.
    class Handler {
      public:
        virtual ~Handler() = default;
        /// kGreeted, kInitialised; kAbsent when it went away while starting (`reason`).
        virtual void OnProgress(std::int32_t rank, FrontendHandshake::Step step, std::string_view reason) = 0;
        /// A new engine took the place of a rank that had registered: everything sent to the old one is lost.
        virtual void OnRestarted(std::int32_t rank) = 0;
        /// `reattached`: same engine as before (gateway restart, lost connection); its old requests may still
        /// be running.
        virtual void OnLive(std::int32_t rank, const RankFacts& facts, bool reattached) = 0;
        /// One message of the output socket. Returns the rank that it names (0-based in the group) so that
        /// the connection can be attributed, or -1 if it does not say (ENGINE_CORE_DEAD, undecodable).
        /// `connection_rank`: who it is known to come from, or -1.
        virtual std::int32_t OnOutput(std::span<const std::string_view> frames,
                                      std::int32_t connection_rank) = 0;
        /// Rank -1 with kOutputClosed: an output connection closed that never showed whose it was.
        virtual void OnPeerLost(std::int32_t rank, PeerLoss loss) = 0;
        /// A harmless control message for `rank` (utility ping; empty ABORT), sent to find out who is
        /// connected. The view must live until the next call.
        virtual std::string_view ProbePayload(std::int32_t rank, std::uint8_t& type) = 0;
    };

    static Result<std::unique_ptr<FrontendLink>> Bind(FrontendLinkOptions options, const Clock& clock);
    virtual ~FrontendLink() = default;

    /// Where engines must dial, with the real port.
    virtual const std::string& handshake_address() const = 0;
    virtual const EngineAddresses& addresses() const = 0;
    /// Declared, or since a rank is Live its own; before that the one of the ranks that a restarted gateway
    /// looks for (another may still come first), or unset.
    virtual std::optional<Dialect> dialect() const = 0;

    /// Adds a descriptor of the owner (its mailbox) to what Wait waits for.
    virtual void Watch(int fd) = 0;
    /// Sleeps until something is readable or `timeout` passed (zero = look only). True if a watched
    /// descriptor is readable.
    virtual bool Wait(Duration timeout) = 0;
    /// Readable when Wait would return at once; for owners that live on another event loop.
    virtual int poll_fd() const = 0;
    /// Handles what Wait found, without waiting, at most kMaxOutputsPerPoll output messages. True if more is
    /// there right now.
    virtual bool Poll(Handler& handler) = 0;
    /// When Poll must be called even if nothing is readable.
    virtual std::optional<TimePoint> next_deadline() const = 0;

    enum class Urgency : std::uint8_t { kRequest, kControl };
    /// Queues `[identity][type][payload][aux...]`. kSendFailed: over the bound (retryable elsewhere);
    /// kRankLost: no such peer.
    virtual Status Send(std::int32_t rank, std::uint8_t type, std::string_view payload,
                        Urgency urgency = Urgency::kRequest, std::span<const std::string_view> aux = {}) = 0;
    virtual std::uint64_t queued_bytes(std::int32_t rank) const = 0;

    /// The owner gave the rank up. Its next HELLO is a fresh start; with `may_return`, a reconnection of the
    /// same engine counts too.
    virtual void Forget(std::int32_t rank, bool may_return) = 0;
    /// A wedged rank keeps its place until it answers, but a HELLO replaces it at once.
    virtual void SetWedged(std::int32_t rank, bool wedged) = 0;
    virtual FrontendHandshake::Step step(std::int32_t rank) const = 0;
    /// pid of the engine process, 0 = not known (tcp, other pid namespace, this process).
    virtual std::int32_t pid(std::int32_t rank) const = 0;
    /// True if the process is known to be gone right now (asks the kernel).
    virtual bool ProcessGone(std::int32_t rank) const = 0;
    /// Its connection is there and known to be its own.
    virtual bool input_connected(std::int32_t rank) const = 0;
    virtual bool output_connected(std::int32_t rank) const = 0;

    static constexpr std::size_t kMaxOutputsPerPoll = 64;
    static constexpr std::size_t kMaxControlPerPoll = 256;
    static constexpr Duration kProbeEvery = std::chrono::milliseconds(50);
    static constexpr Duration kProbeSlowly = std::chrono::seconds(1);
    static constexpr Duration kProbeFastFor = std::chrono::seconds(15);
    static constexpr std::uint64_t kControlReserveBytes = 16ULL << 20;
};

}  // namespace rankgate::transport
