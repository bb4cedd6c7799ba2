// SPDX-License-Identifier: Apache-2.0
// Both ends of the start-up handshake as state machines: no sockets, no threads, time injected. FrontendLink
// and EngineLink feed them with messages and carry out what they answer. Nothing a peer sends is fatal: it is
// answered, or refused with a log line.
//
// Frontend, per rank:  Absent -> Greeted -> Initialised -> Registered -> Live
//   HELLO is answered with INIT; READY (handshake socket) and the registration (input socket) may come in any
//   order, interleaved with other ranks. A rank is Live when both are here, or kReadyGrace after the
//   registration: a READY may have been lost with an earlier gateway. A HELLO for a rank that already got
//   further is a restart, unless the old engine provably still serves: then it waits and is answered the
//   moment the old one is lost.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "transport/engine_link.h"
#include "wire/handshake.h"

namespace rankgate::transport {

/// What a rank said of itself at registration. `raw` is the map as it came (kept for re-attach).
struct RankFacts {
    std::string raw;
    wire::ReadyResponse ready;
    std::string parallel_config_hash;  // from READY; lockstep ranks only
    /// Its process, 0 = not known. Filled in by the link; what lets a restarted gateway recognise a busy
    /// engine's connections.
    std::int32_t pid{0};
};

/// Reads a ready response and refuses what the frontend cannot serve: a vLLM before 0.26, and where `dialect`
/// is given, the other one.
Result<RankFacts> ParseReadyResponse(std::string_view map, std::optional<Dialect> dialect);

struct FrontendHandshakeOptions {
    /// Unset = that of the first rank that registers: all the others must speak it too.
    std::optional<Dialect> dialect{Dialect::kVllm};
    std::int32_t size{1};        // exactly this many ranks
    std::int32_t base_index{0};  // identity of rank r = base_index + r
    EngineAddresses addresses;   // sent in INIT
    /// A greeted rank that is not Live after this long is reported (once); it may still arrive. Zero = never.
    Duration ready_timeout{0};
};

/// What the machine asks for or tells. Refusals are logged by the machine itself (rate-limited).
struct HandshakeEvent {
    enum class Kind : std::uint8_t {
        kSendInit,       // send `bytes` to `identity` on the handshake socket; report a failed send with
                         // OnInitUndeliverable
        kGreeted,        // HELLO came
        kRestarted,      // HELLO of a rank that had registered before: fail what it held
        kRegistered,     // facts are known
        kLive,           // facts are in facts(rank)
        kRefused,        // stray, wrong width, bad message: `reason`
        kReadyTimedOut,  // `reason` names the rank, the limit and the setting
        kLostInStart,    // died between HELLO and Live
    };
    Kind kind{Kind::kRefused};
    std::int32_t rank{-1};
    std::string identity;
    std::string bytes;
    std::string reason;
    bool again{false};  // kSendInit: not the first one; delivered or not, nobody needs to hear of it
    bool offer{false};  // kSendInit: nobody asked; report a delivered one with OnOfferTaken, else nothing
};

/// One struct per state of a rank, in the order of FrontendHandshake::Step.
namespace handshake_state {
struct Absent {
    bool ready_seen{false};  // a READY without HELLO: greeted an earlier gateway
};
struct Greeted {};  // INIT is on its way out
struct Initialised {
    TimePoint since;
    bool ready_seen{false};
    bool timeout_reported{false};
    TimePoint next_progress_log{};
    std::optional<TimePoint> closed_at;  // handshake connection gone, registration still due
    TimePoint next_init{};
    std::int32_t repeats{0};      // INITs sent again
    std::int32_t unreachable{0};  // of those, the last so many found nobody
};
struct Registered {
    TimePoint since;
};
struct Live {
    bool ready_seen{false};
};
}  // namespace handshake_state

class FrontendHandshake {
  public:
    enum class Step : std::uint8_t { kAbsent, kGreeted, kInitialised, kRegistered, kLive };
    static constexpr Duration kReadyGrace = std::chrono::seconds(2);
    static constexpr Duration kRegistrationGrace = std::chrono::seconds(10);
    static constexpr Duration kProgressLogEvery = std::chrono::seconds(30);
    /// An engine says HELLO once and waits for minutes; an INIT can miss it, when somebody else holds its
    /// identity at that moment. So INIT is repeated until READY or the registration shows that it arrived.
    static constexpr Duration kInitEvery = std::chrono::seconds(1);
    /// The longest that an engine waits for INIT (TokenSpeed: 600 s).
    static constexpr std::int32_t kMaxInitRepeats = 600;
    /// Repeats in a row that find nobody under the identity: gone. A connection that was told to dial again
    /// needs 0.1 s.
    static constexpr std::int32_t kMaxUnreachable = 5;

    FrontendHandshake(FrontendHandshakeOptions options, const Clock& clock);

    /// A message of the handshake ROUTER. `old_engine_serves`: the rank's previous process is known to be
    /// alive and connected.
    void OnHandshakeMessage(std::string_view identity, std::span<const std::string_view> frames,
                            bool old_engine_serves);
    /// A message of the input ROUTER (registration).
    void OnRegistration(std::string_view identity, std::span<const std::string_view> frames);
    /// The kSendInit of `rank` could not be delivered: the engine is gone again.
    void OnInitUndeliverable(std::int32_t rank);
    /// The handshake connection of a rank closed (after READY that is normal).
    void OnHandshakeClosed(std::int32_t rank);
    /// Registered or Live rank lost (dead, deaf, mute, wedged ...). It must greet again; a waiting HELLO is
    /// answered now.
    void OnLost(std::int32_t rank);
    /// Gateway restart: the rank's facts are known from before, and a probe reached it. Goes straight to
    /// Live, unless ranks that came meanwhile are of another deployment.
    void Reattach(std::int32_t rank, RankFacts facts);
    /// Timeouts; call at next_deadline() or more often.
    void OnTick();
    /// When OnTick has something to do; nullopt = nothing pending.
    std::optional<TimePoint> next_deadline() const;
    /// The kSendInit of `rank` went out.
    void OnInitSent(std::int32_t rank);
    /// Somebody was connected who has not been heard, so `rank` may have said HELLO in vain: INIT is offered
    /// to whoever has its identity. Does nothing for a rank that is further than Absent.
    void OfferInit(std::int32_t rank);
    void OnOfferTaken(std::int32_t rank);

    /// Events since the last call, in order.
    std::vector<HandshakeEvent> TakeEvents();

    Step step(std::int32_t rank) const;
    const RankFacts& facts(std::int32_t rank) const;
    /// Rank of an identity, or -1: wrong width or outside the group.
    std::int32_t RankOf(std::string_view identity) const noexcept;
    std::string IdentityOfRank(std::int32_t rank) const;
    /// The declared dialect, or that of the first rank that was Live; unset before.
    std::optional<Dialect> dialect() const noexcept { return dialect_; }
    std::uint64_t refused() const noexcept { return refused_; }

  private:
    using Absent = handshake_state::Absent;
    using Greeted = handshake_state::Greeted;
    using Initialised = handshake_state::Initialised;
    using Registered = handshake_state::Registered;
    using Live = handshake_state::Live;
    using State = std::variant<Absent, Greeted, Initialised, Registered, Live>;
    struct Rank {
        State state;
        RankFacts facts;
        bool waiting_hello{false};  // a second engine greeted while the first still serves
        std::string hash;           // of the last READY
    };

    static Initialised FreshlyInitialised(TimePoint now);
    void Greet(std::int32_t rank);
    void EmitInit(std::int32_t rank, bool again);
    void OnHello(std::int32_t rank, bool old_engine_serves);
    void OnReady(std::int32_t rank, const wire::Greeting& greeting);
    void Refuse(std::int32_t rank, std::string_view identity, std::string reason);
    void RefuseEngine(std::int32_t rank, const std::string& reason);
    void Emit(HandshakeEvent::Kind kind, std::int32_t rank, std::string reason = {}, std::string bytes = {});
    void BecomeLive(std::int32_t rank);
    /// Empty = fits the group and the ranks that registered before it.
    std::string Misfit(std::int32_t rank, const RankFacts& facts) const;
    bool HashMisfit(std::int32_t rank) const;

    const FrontendHandshakeOptions options_;
    const Clock& clock_;
    std::optional<Dialect> dialect_;
    std::vector<Rank> ranks_;
    std::vector<HandshakeEvent> events_;
    std::uint64_t refused_{0};
};

/// The engine's half: what to send next and what was learnt. One struct per state.
class EngineHandshake {
  public:
    enum class Step : std::uint8_t { kStart, kGreeting, kInitialised, kAwaitingCoordinator, kReady };

    EngineHandshake(EngineLinkOptions options, const Clock& clock);

    std::string Hello();  // kStart -> kGreeting
    Status OnHandshakeMessage(
        std::string_view last_frame);  // kGreeting -> kInitialised; INIT again is ignored
    /// After the registration went out: kInitialised -> kReady, or kAwaitingCoordinator where INIT named one.
    void OnRegistrationSent();
    void OnCoordinatorReady();
    std::string Ready(std::string_view parallel_config_hash) const;

    Step step() const noexcept { return step_; }
    const EngineAddresses& addresses() const noexcept { return addresses_; }
    Duration waited() const { return clock_.Now() - since_; }

  private:
    const EngineLinkOptions options_;
    const Clock& clock_;
    Step step_{Step::kStart};
    TimePoint since_{};
    EngineAddresses addresses_;
};

}  // namespace rankgate::transport
