// SPDX-License-Identifier: Apache-2.0
// A group of undeclared runtime, front and actor, on a link whose peers say anything in any order: handshake
// messages and registrations of both dialects, outputs (well-formed ones of requests that were really sent,
// and noise), losses, re-attached ranks, refused sends; between them submits, cancels, administrative calls,
// time and a drain. The group has one runtime, a rank gets only what its wire knows, a stream ends once, and
// nothing is left at the close. Sockets are left out: the link here is FrontendLink's state machine alone.
// Input: a list of events [what][who][length, 2 bytes][payload].
#include <poll.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/log.h"
#include "group/group_actor.h"
#include "transport/fuzz_ready.h"
#include "transport/handshake.h"
#include "wire/tokenspeed/outputs.h"
#include "wire/tokenspeed/request.h"
#include "wire/vllm/outputs.h"
#include "wire/vllm/request.h"

namespace {

using namespace rankgate;         // NOLINT: a program of one file
using namespace rankgate::group;  // NOLINT
using transport::Dialect;
using transport::FrontendHandshake;
using transport::FrontendLink;
using transport::HandshakeEvent;
using transport::PeerLoss;
using Step = FrontendHandshake::Step;

constexpr std::int32_t kSize = 2;
constexpr std::int32_t kBase = 1;
constexpr std::size_t kMaxEvents = 200;
constexpr std::size_t kIdsKept = 16;

struct Event {
    std::uint8_t what{0};
    std::uint8_t who{0};
    std::string_view payload;
};

/// What the driver and the link share; outlives the link, which the actor owns.
struct World {
    std::shared_ptr<FakeClock> clock{std::make_shared<FakeClock>()};
    std::optional<Event> event;  // found by the next Poll
    std::optional<Dialect> runtime;
    std::vector<std::string> ids;  // of requests that a rank was sent
    bool refuse_sends{false};
    bool process_gone{false};
    std::uint64_t last_call{0};
};

class LinkWithoutSockets final : public FrontendLink {
  public:
    explicit LinkWithoutSockets(World& world) : world_{world}, machine_{Options(), *world.clock} {}

    const std::string& handshake_address() const override { return address_; }
    const transport::EngineAddresses& addresses() const override { return addresses_; }
    std::optional<Dialect> dialect() const override { return machine_.dialect(); }
    void Watch(int fd) override { watched_.push_back({fd, POLLIN, 0}); }
    bool Wait(Duration /*timeout*/) override { return ::poll(watched_.data(), watched_.size(), 0) > 0; }
    int poll_fd() const override { return -1; }
    std::optional<TimePoint> next_deadline() const override { return machine_.next_deadline(); }
    std::uint64_t queued_bytes(std::int32_t /*rank*/) const override { return 0; }
    void SetWedged(std::int32_t rank, bool /*wedged*/) override { RG_CHECK(rank >= 0 && rank < kSize); }
    Step step(std::int32_t rank) const override { return machine_.step(rank); }
    std::int32_t pid(std::int32_t /*rank*/) const override { return 0; }
    bool ProcessGone(std::int32_t /*rank*/) const override { return world_.process_gone; }
    bool input_connected(std::int32_t /*rank*/) const override { return true; }
    bool output_connected(std::int32_t /*rank*/) const override { return false; }

    bool Poll(Handler& handler) override {
        if (const auto event = std::exchange(world_.event, std::nullopt)) {
            Happen(*event, handler);
        }
        machine_.OnTick();
        Dispatch(handler);
        return false;
    }

    Status Send(std::int32_t rank, std::uint8_t type, std::string_view payload, Urgency /*urgency*/,
                std::span<const std::string_view> /*aux*/) override {
        RG_CHECK(rank >= 0 && rank < kSize && world_.runtime);
        RG_CHECK(type <= (*world_.runtime == Dialect::kVllm ? 3 : 1));
        std::vector<std::string_view> aborted;
        if (type == 0) {
            RG_CHECK(machine_.step(rank) == Step::kLive);
            Remember(payload);
        } else if (type == 1 && *world_.runtime == Dialect::kVllm) {
            RG_CHECK(wire::vllm::DecodeAbort(payload, aborted).ok() && !aborted.empty());
        } else if (type == 1) {
            RG_CHECK(wire::tokenspeed::DecodeAbort(payload, aborted).ok() && !aborted.empty());
        } else if (type == 2) {
            RG_CHECK(wire::vllm::DecodeStartDpWave(payload).ok());
        } else {
            const wire::vllm::UtilityCall call = wire::vllm::DecodeUtility(payload);
            RG_CHECK(call.status.ok());
            world_.last_call = call.call_id;
        }
        if (world_.refuse_sends) {
            return Error{ErrorCode::kSendFailed, "fuzz", {}, true};
        }
        return {};
    }

    void Forget(std::int32_t rank, bool may_return) override {
        if (may_return && machine_.step(rank) >= Step::kRegistered) {
            known_[rank] = machine_.facts(rank);
        } else {
            known_.erase(rank);
        }
        machine_.OnLost(rank);
    }

  private:
    static transport::FrontendHandshakeOptions Options() {
        transport::FrontendHandshakeOptions options;
        options.dialect.reset();
        options.size = kSize;
        options.base_index = kBase;
        options.addresses.inputs = {"ipc:///in"};
        options.addresses.outputs = {"ipc:///out"};
        options.ready_timeout = std::chrono::seconds(5);
        return options;
    }

    void Remember(std::string_view payload) {
        std::string id;
        if (*world_.runtime == Dialect::kVllm) {
            wire::vllm::DecodedAdd add;
            wire::vllm::DecodeAdd(payload, add);
            RG_CHECK(add.status.ok());
            id = add.request.id;
        } else {
            wire::tokenspeed::DecodedRequest add;
            wire::tokenspeed::DecodeRequest(payload, add);
            RG_CHECK(add.status.ok());
            id = add.request.rid;
        }
        world_.ids.push_back(std::move(id));
        if (world_.ids.size() > kIdsKept) {
            world_.ids.erase(world_.ids.begin());
        }
    }

    void Happen(const Event& event, Handler& handler) {
        const std::int32_t rank = event.who % kSize;
        const std::string identity = wire::RankIdentity(kBase + rank);
        const bool mend = (event.who & 0x40) != 0;
        const Dialect dialect = (event.who & 0x20) != 0 ? Dialect::kTokenSpeed : Dialect::kVllm;
        std::string payload{event.payload};
        switch (event.what & 0x0f) {
            case 0: {
                if (mend) {
                    wire::Greeting greeting;
                    greeting.kind =
                        (event.who & 0x10) != 0 ? wire::Greeting::Kind::kReady : wire::Greeting::Kind::kHello;
                    payload.clear();
                    wire::EncodeGreeting(greeting, dialect, payload);
                }
                const std::string_view frame = payload;
                machine_.OnHandshakeMessage(identity, {&frame, 1}, (event.who & 8) != 0);
                break;
            }
            case 1: {
                if (mend) {
                    payload = transport::GoodReady(dialect, (event.who & 0x10) != 0 ? kSize : 1);
                }
                const std::string_view frame = payload;
                machine_.OnRegistration(identity, {&frame, 1});
                break;
            }
            case 2: {
                const std::array<std::string_view, 3> frames{event.payload, "aux", ""};
                Hand(handler, {frames.data(), std::size_t{event.who} >> 3U & 3U});
                break;
            }
            case 3:
                GoodOutput(event, handler, rank);
                break;
            case 4:
                // A link tells of connections that it knew, so of the actor's ranks, or of one nobody knew.
                if (mend) {
                    handler.OnPeerLost(-1, PeerLoss::kOutputClosed);
                } else if (machine_.step(rank) == Step::kLive) {
                    handler.OnPeerLost(rank, static_cast<PeerLoss>(event.who >> 3U & 3U));
                }
                break;
            case 5:
                machine_.OnHandshakeClosed(rank);
                break;
            case 6:
                machine_.OfferInit(rank);
                break;
            default: {
                std::uint8_t type = 0;
                const std::string probe{handler.ProbePayload(rank, type)};
                RG_CHECK(!probe.empty() && (type == 1 || type == 3));
                if (const auto known = known_.find(rank); known != known_.end()) {
                    machine_.Reattach(rank, known->second);
                } else if (!world_.runtime) {
                    auto facts =
                        transport::ParseReadyResponse(transport::GoodReady(dialect, 1), std::nullopt);
                    RG_CHECK(facts.ok());
                    known_[rank] = *facts;
                    machine_.Reattach(rank, *facts);
                }
            }
        }
    }

    void Hand(Handler& handler, std::span<const std::string_view> frames) {
        const std::int32_t named = handler.OnOutput(frames, -1);
        RG_CHECK(named >= -1 && named < kSize);
    }

    /// Payload: one row a byte, and what the message carries beside them in the first.
    void GoodOutput(const Event& event, Handler& handler, std::int32_t rank) {
        std::vector<wire::RequestOutput> rows;
        for (std::size_t i = 1; i < event.payload.size() && i < 8 && !world_.ids.empty(); ++i) {
            const auto byte = static_cast<std::uint8_t>(event.payload[i]);
            wire::RequestOutput& row = rows.emplace_back();
            row.request_id = world_.ids[byte % world_.ids.size()];
            row.new_token_ids.assign(byte >> 4U & 3U, 7);
            row.num_prompt_tokens = 3;
            row.completion_tokens = 1;
            row.num_cached_tokens = 0;
            if ((byte & 0x80) != 0) {
                row.finish_reason = static_cast<wire::FinishReason>(byte >> 4U & 3U);
            }
            if ((byte & 0x40) != 0) {
                row.logprobs = wire::Logprobs{1, 1, {7}, {-1.0F}, {1}};
                row.new_token_ids.assign(1, 7);
            }
        }
        const auto with = static_cast<std::uint8_t>(event.payload.empty() ? 0 : event.payload[0]);
        wire::LoadSnapshot load;
        load.kv_total_pages = with & 1;
        load.num_running = with >> 4U;
        std::string payload;
        wire::AuxFrames aux;
        if (world_.runtime == Dialect::kTokenSpeed) {
            wire::tokenspeed::OutputsBatch batch;
            batch.engine_index = kBase + rank;
            batch.outputs = rows;
            batch.load = load;
            wire::tokenspeed::EncodeOutputs(batch, payload);
        } else {
            wire::vllm::SchedulerStats stats;
            stats.load = load;
            wire::vllm::UtilityReply reply;
            reply.call_id = world_.last_call;
            wire::vllm::OutputsBatch batch;
            batch.engine_index = kBase + rank;
            batch.outputs = rows;
            batch.stats = (with & 1) != 0 ? &stats : nullptr;
            batch.utility = (with & 2) != 0 ? &reply : nullptr;
            batch.finished_requests = {world_.ids.data(), (with & 4) != 0 && !world_.ids.empty() ? 1U : 0U};
            if ((with & 8) != 0) {
                batch.wave_complete = with >> 5U;
                batch.start_wave = with >> 4U;
            }
            wire::vllm::EncodeOutputs(batch, payload, aux);
        }
        std::vector<std::string_view> frames{payload};
        for (std::size_t i = 0; i < aux.size(); ++i) {
            frames.emplace_back(aux[i]);
        }
        Hand(handler, frames);
    }

    void Dispatch(Handler& handler) {
        using Kind = HandshakeEvent::Kind;
        int budget = 1000;
        for (auto events = machine_.TakeEvents(); !events.empty(); events = machine_.TakeEvents()) {
            for (const HandshakeEvent& event : events) {
                RG_CHECK(--budget > 0);
                switch (event.kind) {
                    case Kind::kGreeted:
                        known_.erase(event.rank);
                        handler.OnProgress(event.rank, Step::kGreeted, {});
                        break;
                    case Kind::kSendInit:
                        if (event.offer && machine_.step(event.rank) == Step::kAbsent) {
                            machine_.OnOfferTaken(event.rank);
                            handler.OnProgress(event.rank, Step::kInitialised, {});
                        } else if (!event.offer && world_.refuse_sends) {
                            machine_.OnInitUndeliverable(event.rank);
                        } else if (!event.offer) {
                            machine_.OnInitSent(event.rank);
                            handler.OnProgress(event.rank, Step::kInitialised, {});
                        }
                        break;
                    case Kind::kRestarted:
                        handler.OnRestarted(event.rank);
                        break;
                    case Kind::kRegistered:
                        handler.OnProgress(event.rank, Step::kRegistered, {});
                        break;
                    case Kind::kLive:
                        if (machine_.step(event.rank) == Step::kLive) {
                            const Dialect dialect = machine_.facts(event.rank).ready.dialect;
                            RG_CHECK(!world_.runtime || *world_.runtime == dialect);
                            world_.runtime = dialect;
                            const bool reattached = known_.erase(event.rank) != 0;
                            handler.OnLive(event.rank, machine_.facts(event.rank), reattached);
                        }
                        break;
                    case Kind::kRefused:
                        break;
                    case Kind::kReadyTimedOut:
                        handler.OnProgress(event.rank, Step::kInitialised, event.reason);
                        break;
                    case Kind::kLostInStart:
                        handler.OnProgress(event.rank, Step::kAbsent, event.reason);
                        break;
                }
            }
        }
    }

    World& world_;
    FrontendHandshake machine_;
    const std::string address_{"tcp://127.0.0.1:1"};
    const transport::EngineAddresses addresses_;
    std::vector<pollfd> watched_;
    std::map<std::int32_t, transport::RankFacts> known_;
};

class Run {
  public:
    Run() {
        GroupActorOptions options;
        options.own_thread = false;
        options.link.dialect.reset();
        options.link.size = kSize;
        options.link.base_index = kBase;
        options.core.id_epoch = 1;
        options.core.initial_wave = 1;
        options.core.max_requests = 16;
        world_.clock->Advance(std::chrono::hours(1));
        actor_ = GroupActor::StartOn(std::move(options), std::make_unique<LinkWithoutSockets>(world_),
                                     world_.clock);
    }

    void On(const Event& event) {
        switch (event.what & 0x0f) {
            case 8: {
                auto request = std::make_unique<wire::GenerateRequest>();
                // The HTTP side takes printable ASCII, up to 128 of it; two requests may come with one id.
                request->id = "r" + std::to_string(ends_.size());
                if ((event.who & 0x80) != 0) {
                    request->id = event.payload.substr(0, 128);
                    for (char& c : request->id) {
                        c = static_cast<char>('!' + static_cast<unsigned char>(c) % 94);
                    }
                }
                request->prompt_token_ids.assign((event.who & 0x40) != 0 ? 70 : 3, 1);
                request->sampling.logprobs = (event.who & 0x20) != 0 ? std::optional{0} : std::nullopt;
                if ((event.who & 0x10) != 0) {
                    request->data_parallel_rank = event.who % 4 - 1;
                }
                ends_.push_back(End::kOpen);
                actor_->Submit(ends_.size() - 1, std::move(request), box_);
                break;
            }
            case 9:
                if (!ends_.empty()) {
                    const std::size_t stream = event.who % ends_.size();
                    actor_->Cancel(stream, box_, static_cast<CancelCause>(event.who % 5));
                    ends_[stream] = ends_[stream] == End::kOpen ? End::kCancelled : ends_[stream];
                }
                break;
            case 10: {
                AdminCall call;
                call.method = static_cast<AdminMethod>(event.who % 12);
                call.mode = (event.who & 0x80) != 0 ? "keep" : "abort";
                ++admins_open_;
                actor_->Admin(std::move(call), [this](const std::vector<AdminReply>& replies) {
                    RG_CHECK(replies.size() == kSize && admins_open_ > 0);
                    --admins_open_;
                });
                break;
            }
            case 11:
                if (event.who == 0xff) {
                    actor_->BeginDrain();
                }
                break;
            case 12:
                world_.refuse_sends = (event.who & 1) != 0;
                world_.process_gone = (event.who & 2) != 0;
                break;
            case 13:
                world_.clock->Advance(std::chrono::milliseconds(20) * event.who);
                break;
            case 14:
                actor_->HoldCommands();
                break;
            case 15:
                actor_->RunCommands();
                break;
            default:
                world_.event = event;
        }
        if ((event.what & 0x80) == 0 || world_.event) {
            actor_->RunOnce(Duration::zero());
        }
        Read((event.what & 0x10) != 0);
        const auto snapshot = actor_->Snapshot();
        RG_CHECK(snapshot != nullptr && snapshot->ranks.size() == kSize);
        const std::string_view runtime = world_.runtime ? wire::DialectName(*world_.runtime) : "auto";
        RG_CHECK(snapshot->runtime == runtime);
        (void)actor_->next_deadline();
        (void)actor_->drained();
    }

    void Finish() {
        actor_->Close();
        Read(false);
        for (const End end : ends_) {
            RG_CHECK(end != End::kOpen);
        }
        RG_CHECK(admins_open_ == 0);
    }

  private:
    enum class End : std::uint8_t { kOpen, kCancelled, kTerminal };

    void Read(bool recycle) {
        box_.Acknowledge();
        while (auto batch = box_.Pop()) {
            for (const Output& output : batch->outputs) {
                RG_CHECK(output.stream < ends_.size() && ends_[output.stream] != End::kTerminal);
                RG_CHECK(std::size_t{output.first_token} + output.num_tokens <= batch->tokens.size());
                RG_CHECK(output.error < static_cast<std::int32_t>(batch->errors.size()));
                RG_CHECK(output.logprobs < static_cast<std::int32_t>(batch->logprobs.size()));
                if (output.finish_reason != wire::FinishReason::kNone || output.error >= 0) {
                    ends_[output.stream] = End::kTerminal;
                }
            }
            if (recycle) {
                actor_->Recycle(std::move(batch));
            }
        }
    }

    World world_;
    OutputMailbox box_;
    std::vector<End> ends_;
    int admins_open_{0};
    std::unique_ptr<GroupActor> actor_;
};

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
    InitLog(LogLevel::kError, LogFormat::kText);
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    std::string_view input{reinterpret_cast<const char*>(data), size};
    Run run;
    for (std::size_t events = 0; input.size() >= 4 && events < kMaxEvents; ++events) {
        const auto byte = [&](std::size_t at) { return static_cast<std::uint8_t>(input[at]); };
        Event event{byte(0), byte(1), {}};
        const std::size_t length = std::size_t{byte(2)} | std::size_t{byte(3)} << 8;
        input.remove_prefix(4);
        event.payload = input.substr(0, length);
        input.remove_prefix(event.payload.size());
        run.On(event);
    }
    run.Finish();
    return 0;
}
