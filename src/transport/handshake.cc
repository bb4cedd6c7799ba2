// SPDX-License-Identifier: Apache-2.0
#include "transport/handshake.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "base/utf8.h"

namespace rankgate::transport {
namespace {

constexpr std::int64_t kOldestVllmMinor = 26;
constexpr std::size_t kMaxTextInLog = 80;
constexpr std::string_view kHashDiffers =
    "parallel_config_hash differs from the other ranks': not one deployment";

LogLimiter& RefusalLimiter() {
    static LogLimiter limiter{20};
    return limiter;
}

std::string Hex(std::string_view bytes) {
    std::string out;
    for (const char c : bytes.substr(0, 16)) {
        constexpr std::string_view kDigits = "0123456789abcdef";
        out.push_back(kDigits[static_cast<unsigned char>(c) >> 4U]);
        out.push_back(kDigits[static_cast<unsigned char>(c) & 15U]);
    }
    return out;
}

/// True for "0.N..." with N below what we speak; development versions and other schemes pass.
bool TooOld(std::string_view version) {
    if (!version.starts_with("0.")) {
        return false;
    }
    version.remove_prefix(2);
    std::int64_t minor = 0;
    const auto [end, error] = std::from_chars(version.data(), version.data() + version.size(), minor);
    return error == std::errc{} && end != version.data() + version.size() && *end == '.' && minor > 0 &&
           minor < kOldestVllmMinor;
}

/// READY says that INIT came.
bool AwaitsInit(const handshake_state::Initialised& rank) {
    return !rank.ready_seen && rank.repeats < FrontendHandshake::kMaxInitRepeats;
}

std::string Seconds(Duration duration) {
    return std::to_string(std::chrono::duration_cast<std::chrono::seconds>(duration).count()) + " s";
}

}  // namespace

Result<RankFacts> ParseReadyResponse(std::string_view map, std::optional<Dialect> dialect) {
    const auto refuse = [](std::string text) {
        return Error{ErrorCode::kDecode, std::move(text), {}, false};
    };
    if (map.empty()) {
        return refuse("empty registration: an engine older than vLLM 0.26?");
    }
    auto ready = wire::DecodeReadyResponse(map);
    if (!ready.ok()) {
        return ready.error();
    }
    if (dialect && ready->dialect != *dialect) {
        return refuse("speaks the " + std::string(wire::DialectName(ready->dialect)) + " wire (version " +
                      ready->vllm_version + "), this group is declared " +
                      std::string(wire::DialectName(*dialect)) + ": --runtime " +
                      std::string(wire::DialectName(ready->dialect)) + " or auto serves it");
    }
    if (ready->dialect == Dialect::kVllm && TooOld(ready->vllm_version)) {
        return refuse("vLLM " + ready->vllm_version + " is older than 0." + std::to_string(kOldestVllmMinor));
    }
    if (ready->max_model_len < 1) {
        return refuse("max_model_len " + std::to_string(ready->max_model_len));
    }
    RankFacts facts;
    facts.raw = map;
    facts.ready = std::move(*ready);
    return facts;
}

FrontendHandshake::FrontendHandshake(FrontendHandshakeOptions options, const Clock& clock)
    : options_{std::move(options)},
      clock_{clock},
      dialect_{options_.dialect},
      ranks_(static_cast<std::size_t>(options_.size)) {
    RG_CHECK(options_.size >= 1 && options_.base_index >= 0 &&
             options_.base_index + options_.size <= wire::kMaxRank + 1);
}

std::int32_t FrontendHandshake::RankOf(std::string_view identity) const noexcept {
    const auto index = wire::RankOfIdentity(identity);
    if (!index || *index < options_.base_index || *index >= options_.base_index + options_.size) {
        return -1;
    }
    return *index - options_.base_index;
}

std::string FrontendHandshake::IdentityOfRank(std::int32_t rank) const {
    return wire::RankIdentity(options_.base_index + rank);
}

FrontendHandshake::Step FrontendHandshake::step(std::int32_t rank) const {
    return static_cast<Step>(ranks_[static_cast<std::size_t>(rank)].state.index());
}

const RankFacts& FrontendHandshake::facts(std::int32_t rank) const {
    return ranks_[static_cast<std::size_t>(rank)].facts;
}

void FrontendHandshake::Emit(HandshakeEvent::Kind kind, std::int32_t rank, std::string reason,
                             std::string bytes) {
    events_.push_back(
        {kind, rank, rank >= 0 ? IdentityOfRank(rank) : std::string{}, std::move(bytes), std::move(reason)});
}

std::vector<HandshakeEvent> FrontendHandshake::TakeEvents() {
    return std::exchange(events_, {});
}

void FrontendHandshake::Refuse(std::int32_t rank, std::string_view identity, std::string reason) {
    ++refused_;
    std::uint64_t suppressed = 0;
    if (RefusalLimiter().Allow(suppressed)) {
        LogWarning("handshake_refused", {{"rank", rank},
                                         {"identity", Hex(identity)},
                                         {"reason", std::string_view{reason}},
                                         {"suppressed", suppressed}});
    }
    Emit(HandshakeEvent::Kind::kRefused, rank, std::move(reason));
    events_.back().identity = identity.substr(0, kMaxTextInLog);
}

/// An engine that said what it is and does not fit: it will not say anything else, so nobody waits for it.
void FrontendHandshake::RefuseEngine(std::int32_t rank, const std::string& reason) {
    Rank& state = ranks_[static_cast<std::size_t>(rank)];
    Refuse(rank, IdentityOfRank(rank), reason);
    if (step(rank) < Step::kRegistered) {
        state.state = Absent{};
        Emit(HandshakeEvent::Kind::kLostInStart, rank, "refused: " + reason);
    }
}

void FrontendHandshake::OnHandshakeMessage(std::string_view identity,
                                           std::span<const std::string_view> frames, bool old_engine_serves) {
    if (frames.empty()) {
        return Refuse(-1, identity, "message without a payload");
    }
    // Engines read the last frame; so do we, and we take no more than that.
    auto greeting = wire::DecodeGreeting(frames.back());
    const std::int32_t rank = RankOf(identity);
    if (rank < 0) {
        return Refuse(-1, identity,
                      identity.size() != 2
                          ? "identity of " + std::to_string(identity.size()) + " bytes, an engine has 2"
                          : "engine index outside " + std::to_string(options_.base_index) + ".." +
                                std::to_string(options_.base_index + options_.size - 1) +
                                ": is --data-parallel-size the same on both sides?");
    }
    if (!greeting.ok()) {
        return Refuse(rank, identity, greeting.error().message);
    }
    if (greeting->kind == wire::Greeting::Kind::kHello) {
        OnHello(rank, old_engine_serves);
    } else {
        OnReady(rank, *greeting);
    }
}

void FrontendHandshake::OnHello(std::int32_t rank, bool old_engine_serves) {
    Rank& state = ranks_[static_cast<std::size_t>(rank)];
    const Step at = step(rank);
    if (at >= Step::kRegistered) {
        if (old_engine_serves) {
            state.waiting_hello = true;
            return Refuse(
                rank, IdentityOfRank(rank),
                "a second engine greets as this rank while the first still serves; it will be answered when "
                "the first one is gone");
        }
        Emit(HandshakeEvent::Kind::kRestarted, rank);
    } else if (at != Step::kAbsent) {
        LogInfo("rank_greeted_again", {{"rank", rank}});
    }
    Greet(rank);
}

void FrontendHandshake::Greet(std::int32_t rank) {
    Rank& state = ranks_[static_cast<std::size_t>(rank)];
    state.waiting_hello = false;
    state.facts = {};
    state.hash.clear();
    state.state = Greeted{};
    Emit(HandshakeEvent::Kind::kGreeted, rank);
    EmitInit(rank, false);
}

void FrontendHandshake::EmitInit(std::int32_t rank, bool again) {
    wire::InitMessage init;
    init.inputs = options_.addresses.inputs;
    init.outputs = options_.addresses.outputs;
    std::string bytes;
    wire::EncodeInit(init, bytes);
    Emit(HandshakeEvent::Kind::kSendInit, rank, {}, std::move(bytes));
    events_.back().again = again;
}

void FrontendHandshake::OfferInit(std::int32_t rank) {
    if (step(rank) == Step::kAbsent) {
        EmitInit(rank, true);
        events_.back().offer = true;
    }
}

void FrontendHandshake::OnOfferTaken(std::int32_t rank) {
    Rank& state = ranks_[static_cast<std::size_t>(rank)];
    if (std::holds_alternative<Absent>(state.state)) {
        LogInfo("init_offered", {{"rank", rank}});
        state.facts = {};
        state.hash.clear();
        state.state = FreshlyInitialised(clock_.Now());
    }
}

handshake_state::Initialised FrontendHandshake::FreshlyInitialised(TimePoint now) {
    Initialised next;
    next.since = now;
    next.next_progress_log = now + kProgressLogEvery;
    next.next_init = now + kInitEvery;
    return next;
}

void FrontendHandshake::OnInitSent(std::int32_t rank) {
    Rank& state = ranks_[static_cast<std::size_t>(rank)];
    if (std::holds_alternative<Greeted>(state.state)) {
        state.state = FreshlyInitialised(clock_.Now());
    } else if (auto* initialised = std::get_if<Initialised>(&state.state)) {
        initialised->unreachable = 0;
    }
}

void FrontendHandshake::OnInitUndeliverable(std::int32_t rank) {
    Rank& state = ranks_[static_cast<std::size_t>(rank)];
    if (std::holds_alternative<Greeted>(state.state)) {
        state.state = Absent{};
        Emit(HandshakeEvent::Kind::kLostInStart, rank, "went away before INIT reached it");
    } else if (auto* initialised = std::get_if<Initialised>(&state.state)) {
        if (++initialised->unreachable >= kMaxUnreachable) {
            state.state = Absent{};
            Emit(HandshakeEvent::Kind::kLostInStart, rank, "its handshake connection is gone");
        }
    }
}

void FrontendHandshake::OnReady(std::int32_t rank, const wire::Greeting& greeting) {
    Rank& state = ranks_[static_cast<std::size_t>(rank)];
    state.hash = greeting.parallel_config_hash.value_or("");
    if (HashMisfit(rank)) {
        return Refuse(rank, IdentityOfRank(rank), std::string(kHashDiffers));
    }
    if (auto* initialised = std::get_if<Initialised>(&state.state)) {
        initialised->ready_seen = true;
    } else if (std::holds_alternative<Registered>(state.state)) {
        state.facts.parallel_config_hash = state.hash;
        BecomeLive(rank);
    } else if (auto* live = std::get_if<Live>(&state.state)) {
        if (live->ready_seen) {
            LogInfo("ready_again", {{"rank", rank}});
        }
        live->ready_seen = true;
    } else if (auto* absent = std::get_if<Absent>(&state.state)) {
        // It greeted an earlier gateway that gave it the same addresses; its registration decides.
        absent->ready_seen = true;
        LogWarning("ready_without_hello", {{"rank", rank}});
    } else {
        Refuse(rank, IdentityOfRank(rank), "READY before INIT was sent");
    }
}

bool FrontendHandshake::HashMisfit(std::int32_t rank) const {
    const std::string& mine = ranks_[static_cast<std::size_t>(rank)].hash;
    if (mine.empty()) {
        return false;
    }
    for (std::size_t other = 0; other < ranks_.size(); ++other) {
        const Rank& they = ranks_[other];
        // Live ones only: one that was refused itself says nothing about the group.
        if (other != static_cast<std::size_t>(rank) && std::holds_alternative<Live>(they.state) &&
            !they.facts.parallel_config_hash.empty() && they.facts.parallel_config_hash != mine) {
            return true;
        }
    }
    return false;
}

std::string FrontendHandshake::Misfit(std::int32_t rank, const RankFacts& facts) const {
    const auto speaks = [](const wire::ReadyResponse& ready) {
        return std::string(wire::DialectName(ready.dialect)) + " wire (version " + ready.vllm_version + ")";
    };
    if (dialect_ && facts.ready.dialect != *dialect_) {
        return "speaks the " + speaks(facts.ready) + ", this group is " +
               std::string(wire::DialectName(*dialect_)) + " since its first rank: a group has one runtime";
    }
    const std::int64_t claimed = facts.ready.data_parallel_size;
    if (claimed != 1 && claimed != options_.size) {
        return "engine runs with data_parallel_size " + std::to_string(claimed) + ", this group awaits " +
               std::to_string(options_.size) + " ranks";
    }
    for (std::size_t other = 0; other < ranks_.size(); ++other) {
        const Rank& they = ranks_[other];
        if (other == static_cast<std::size_t>(rank) ||
            they.state.index() < static_cast<std::size_t>(Step::kRegistered)) {
            continue;
        }
        if (they.facts.ready.dialect != facts.ready.dialect) {
            return "speaks the " + speaks(facts.ready) + ", rank " + std::to_string(other) + " the " +
                   speaks(they.facts.ready) + ": a group has one runtime";
        }
        if (they.facts.ready.data_parallel_size != claimed) {
            return "data_parallel_size " + std::to_string(claimed) + " here, " +
                   std::to_string(they.facts.ready.data_parallel_size) + " on rank " + std::to_string(other) +
                   ": lockstep and independent ranks do not mix";
        }
    }
    return {};
}

void FrontendHandshake::OnRegistration(std::string_view identity, std::span<const std::string_view> frames) {
    const std::int32_t rank = RankOf(identity);
    if (rank < 0) {
        return Refuse(-1, identity, "registration from an identity outside the group");
    }
    if (frames.size() != 1) {
        return Refuse(rank, identity, "registration of " + std::to_string(frames.size()) + " frames");
    }
    auto facts = ParseReadyResponse(frames[0], options_.dialect);
    if (!facts.ok()) {
        // Noise under this identity is not its engine's word.
        const bool engine = frames[0].empty() || wire::DecodeReadyResponse(frames[0]).ok();
        return engine ? RefuseEngine(rank, facts.error().message)
                      : Refuse(rank, identity, facts.error().message);
    }
    if (const std::string misfit = Misfit(rank, *facts); !misfit.empty()) {
        return RefuseEngine(rank, misfit);
    }
    Rank& state = ranks_[static_cast<std::size_t>(rank)];
    const Step at = step(rank);
    if (at >= Step::kRegistered) {
        if (state.facts.raw == facts->raw) {
            LogInfo("registered_again", {{"rank", rank}});
            return;
        }
        // Another engine took over the identity without greeting us: it greeted an earlier gateway.
        Emit(HandshakeEvent::Kind::kRestarted, rank);
    }
    bool ready_seen = false;
    if (const auto* initialised = std::get_if<Initialised>(&state.state)) {
        ready_seen = initialised->ready_seen;
    } else if (const auto* absent = std::get_if<Absent>(&state.state)) {
        ready_seen = absent->ready_seen;
        LogWarning("registration_without_hello", {{"rank", rank}});
    }
    state.facts = std::move(*facts);
    state.facts.parallel_config_hash = state.hash;
    state.state = Registered{clock_.Now()};
    Emit(HandshakeEvent::Kind::kRegistered, rank);
    if (!ready_seen) {
        return;
    }
    if (HashMisfit(rank)) {  // its READY came first, and the others of another deployment meanwhile
        return Refuse(rank, IdentityOfRank(rank), std::string(kHashDiffers));
    }
    BecomeLive(rank);
    std::get<Live>(state.state).ready_seen = true;
}

void FrontendHandshake::BecomeLive(std::int32_t rank) {
    Rank& state = ranks_[static_cast<std::size_t>(rank)];
    state.state = Live{true};
    dialect_ = state.facts.ready.dialect;
    Emit(HandshakeEvent::Kind::kLive, rank);
}

void FrontendHandshake::OnHandshakeClosed(std::int32_t rank) {
    Rank& state = ranks_[static_cast<std::size_t>(rank)];
    if (state.waiting_hello) {
        // Could also be the first engine's old connection: then the second one's INIT just fails later,
        // harmlessly.
        return;
    }
    if (auto* initialised = std::get_if<Initialised>(&state.state)) {
        if (!initialised->ready_seen) {
            state.state = Absent{};
            Emit(HandshakeEvent::Kind::kLostInStart, rank, "closed its handshake connection before READY");
        } else if (!initialised->closed_at) {
            initialised->closed_at = clock_.Now();
        }
    } else if (std::holds_alternative<Greeted>(state.state)) {
        state.state = Absent{};
        Emit(HandshakeEvent::Kind::kLostInStart, rank, "closed its handshake connection before INIT");
    } else if (std::holds_alternative<Absent>(state.state)) {
        state.state = Absent{};
    }
}

void FrontendHandshake::OnLost(std::int32_t rank) {
    Rank& state = ranks_[static_cast<std::size_t>(rank)];
    if (step(rank) < Step::kRegistered) {
        return;  // a newer engine is already in its start
    }
    state.state = Absent{};
    state.hash.clear();
    if (state.waiting_hello) {
        Greet(rank);
    }
}

void FrontendHandshake::Reattach(std::int32_t rank, RankFacts facts) {
    Rank& state = ranks_[static_cast<std::size_t>(rank)];
    if (!std::holds_alternative<Absent>(state.state)) {
        return;
    }
    // Others of another runtime or shape may have come before it was found again.
    state.hash = facts.parallel_config_hash;
    std::string misfit = Misfit(rank, facts);
    if (misfit.empty() && HashMisfit(rank)) {
        misfit = kHashDiffers;
    }
    if (!misfit.empty()) {
        state.hash.clear();
        return Refuse(rank, IdentityOfRank(rank), std::move(misfit));
    }
    state.facts = std::move(facts);
    BecomeLive(rank);
}

void FrontendHandshake::OnTick() {
    const TimePoint now = clock_.Now();
    for (std::int32_t rank = 0; rank < options_.size; ++rank) {
        Rank& state = ranks_[static_cast<std::size_t>(rank)];
        if (auto* registered = std::get_if<Registered>(&state.state)) {
            // One whose READY was refused waits for those that it differs from to go.
            if (now - registered->since >= kReadyGrace && !HashMisfit(rank)) {
                LogWarning("ready_missing",
                           {{"rank", rank}, {"detail", "registered but sent no READY; serving it"}});
                BecomeLive(rank);
                std::get<Live>(state.state).ready_seen = false;
            }
            continue;
        }
        auto* initialised = std::get_if<Initialised>(&state.state);
        if (initialised == nullptr) {
            continue;
        }
        if (AwaitsInit(*initialised) && now >= initialised->next_init) {
            ++initialised->repeats;
            initialised->next_init = now + kInitEvery;
            EmitInit(rank, true);
        }
        if (initialised->closed_at && now - *initialised->closed_at >= kRegistrationGrace) {
            state.state = Absent{};
            Emit(HandshakeEvent::Kind::kLostInStart, rank,
                 "said READY but never registered on the input socket");
            continue;
        }
        if (options_.ready_timeout > Duration::zero() && !initialised->timeout_reported &&
            now - initialised->since >= options_.ready_timeout) {
            initialised->timeout_reported = true;
            Emit(HandshakeEvent::Kind::kReadyTimedOut, rank,
                 "rank " + std::to_string(rank) + " greeted but is not ready after " +
                     Seconds(options_.ready_timeout) +
                     " (setting engine-ready-timeout); still waiting for it");
        }
        if (now >= initialised->next_progress_log) {
            initialised->next_progress_log = now + kProgressLogEvery;
            LogInfo("rank_loading", {{"rank", rank}, {"for", Seconds(now - initialised->since)}});
        }
    }
}

std::optional<TimePoint> FrontendHandshake::next_deadline() const {
    std::optional<TimePoint> next;
    const auto consider = [&next](TimePoint at) {
        if (!next || at < *next) {
            next = at;
        }
    };
    for (std::int32_t number = 0; number < options_.size; ++number) {
        const Rank& rank = ranks_[static_cast<std::size_t>(number)];
        if (const auto* registered = std::get_if<Registered>(&rank.state)) {
            if (!HashMisfit(number)) {
                consider(registered->since + kReadyGrace);
            }
        } else if (const auto* initialised = std::get_if<Initialised>(&rank.state)) {
            consider(initialised->next_progress_log);
            if (AwaitsInit(*initialised)) {
                consider(initialised->next_init);
            }
            if (initialised->closed_at) {
                consider(*initialised->closed_at + kRegistrationGrace);
            }
            if (options_.ready_timeout > Duration::zero() && !initialised->timeout_reported) {
                consider(initialised->since + options_.ready_timeout);
            }
        }
    }
    return next;
}

EngineHandshake::EngineHandshake(EngineLinkOptions options, const Clock& clock)
    : options_{std::move(options)}, clock_{clock} {}

std::string EngineHandshake::Hello() {
    RG_DCHECK(step_ == Step::kStart);
    step_ = Step::kGreeting;
    since_ = clock_.Now();
    wire::Greeting hello;
    hello.kind = wire::Greeting::Kind::kHello;
    hello.local = options_.local;
    hello.headless = options_.headless;
    std::string bytes;
    wire::EncodeGreeting(hello, options_.dialect, bytes);
    return bytes;
}

Status EngineHandshake::OnHandshakeMessage(std::string_view last_frame) {
    auto init = wire::DecodeInit(last_frame);
    if (!init.ok()) {
        return init.error();
    }
    if (step_ != Step::kGreeting) {
        LogInfo("init_again", {{"engine", options_.engine_index}});
        return {};
    }
    addresses_.inputs = std::move(init->inputs);
    addresses_.outputs = std::move(init->outputs);
    addresses_.coordinator_input = init->coordinator_input.value_or("");
    addresses_.coordinator_output = init->coordinator_output.value_or("");
    step_ = Step::kInitialised;
    return {};
}

void EngineHandshake::OnRegistrationSent() {
    if (step_ == Step::kInitialised) {
        step_ = addresses_.coordinator_input.empty() ? Step::kReady : Step::kAwaitingCoordinator;
    }
}

void EngineHandshake::OnCoordinatorReady() {
    if (step_ == Step::kAwaitingCoordinator) {
        step_ = Step::kReady;
    }
}

std::string EngineHandshake::Ready(std::string_view parallel_config_hash) const {
    wire::Greeting ready;
    ready.kind = wire::Greeting::Kind::kReady;
    ready.local = options_.local;
    ready.headless = options_.headless;
    if (!parallel_config_hash.empty()) {
        ready.parallel_config_hash = std::string(parallel_config_hash);
    }
    std::string bytes;
    wire::EncodeGreeting(ready, options_.dialect, bytes);
    return bytes;
}

}  // namespace rankgate::transport
