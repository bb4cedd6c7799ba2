// SPDX-License-Identifier: Apache-2.0
// Both handshake machines against peers that say anything in any order: only a rank of the group becomes
// live, only one that registered or was known from before, ranks that are live together speak one wire and
// are of one deployment, and what is asked to be sent is a whole INIT. The first byte says which machine and
// whether the frontend's dialect is declared; then a list of events [what][rank][length][payload].
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/check.h"
#include "base/log.h"
#include "transport/fuzz_ready.h"
#include "transport/handshake.h"
#include "wire/handshake.h"

namespace {

using namespace rankgate;             // NOLINT: a program of one file
using namespace rankgate::transport;  // NOLINT
using Kind = HandshakeEvent::Kind;
using Step = FrontendHandshake::Step;

constexpr std::int32_t kSize = 3;
constexpr std::int32_t kBase = 2;

std::string GoodGreeting(Dialect dialect, wire::Greeting::Kind kind, std::uint8_t hash) {
    wire::Greeting greeting;
    greeting.kind = kind;
    if (hash != 0) {
        greeting.parallel_config_hash = std::string(1, static_cast<char>('a' + hash % 3));
    }
    std::string out;
    wire::EncodeGreeting(greeting, dialect, out);
    return out;
}

void TakeEvents(FrontendHandshake& machine, bool deliver) {
    // Telling the machine how a send went may make it ask again; that must come to an end.
    for (int round = 0; round < 16; ++round) {
        const std::vector<HandshakeEvent> events = machine.TakeEvents();
        if (events.empty()) {
            return;
        }
        for (const HandshakeEvent& event : events) {
            RG_CHECK(event.rank >= -1 && event.rank < kSize);
            switch (event.kind) {
                case Kind::kSendInit:
                    RG_CHECK(wire::DecodeInit(event.bytes).ok());
                    RG_CHECK(event.identity == machine.IdentityOfRank(event.rank));
                    if (event.offer) {  // as FrontendLink does
                        if (deliver && machine.step(event.rank) == Step::kAbsent) {
                            machine.OnOfferTaken(event.rank);
                            RG_CHECK(machine.step(event.rank) == Step::kInitialised);
                        }
                        break;
                    }
                    deliver ? machine.OnInitSent(event.rank) : machine.OnInitUndeliverable(event.rank);
                    break;
                case Kind::kLive:
                case Kind::kRegistered:
                    RG_CHECK(machine.facts(event.rank).ready.max_model_len >= 0);
                    break;
                case Kind::kRefused:
                    RG_CHECK(!event.reason.empty());
                    break;
                default:
                    break;
            }
        }
    }
    RG_CHECK(machine.TakeEvents().empty());
}

/// What is true of a group at any time, whoever said what.
void CheckGroup(const FrontendHandshake& machine, std::optional<Dialect> declared) {
    const RankFacts* first = nullptr;
    const RankFacts* hashed = nullptr;
    for (std::int32_t rank = 0; rank < kSize; ++rank) {
        if (machine.step(rank) < Step::kRegistered) {
            continue;
        }
        const RankFacts& facts = machine.facts(rank);
        RG_CHECK(!declared || facts.ready.dialect == *declared);
        first = first != nullptr ? first : &facts;
        RG_CHECK(facts.ready.dialect == first->ready.dialect &&
                 facts.ready.data_parallel_size == first->ready.data_parallel_size);
        if (machine.step(rank) != Step::kLive) {
            continue;
        }
        RG_CHECK(machine.dialect() == facts.ready.dialect);
        if (!facts.parallel_config_hash.empty()) {
            hashed = hashed != nullptr ? hashed : &facts;
            RG_CHECK(facts.parallel_config_hash == hashed->parallel_config_hash);
        }
    }
}

void Frontend(std::optional<Dialect> declared, std::string_view input) {
    FakeClock clock;
    FrontendHandshakeOptions options;
    options.dialect = declared;
    options.size = kSize;
    options.base_index = kBase;
    options.addresses.inputs = {"ipc:///in"};
    options.addresses.outputs = {"ipc:///out"};
    options.ready_timeout = std::chrono::seconds(20);
    FrontendHandshake machine{options, clock};
    std::array<bool, kSize> registered{};
    std::optional<Dialect> runtime;  // once there is one it stays
    while (input.size() >= 3) {
        const auto what = static_cast<std::uint8_t>(input[0]);
        const auto who = static_cast<std::uint8_t>(input[1]);
        const std::size_t length = static_cast<unsigned char>(input[2]);
        input.remove_prefix(3);
        std::string payload{input.substr(0, length)};
        input.remove_prefix(payload.size());
        const std::int32_t rank = who % kSize;
        // Mostly members of the group, sometimes anybody.
        std::string identity =
            (who & 0x80) != 0 ? payload.substr(0, who & 7) : wire::RankIdentity(kBase + rank);
        const bool mend = (what & 0x40) != 0;
        const Dialect dialect =
            declared ? *declared : ((what & 0x10) != 0 ? Dialect::kTokenSpeed : Dialect::kVllm);
        const std::int32_t sender = machine.RankOf(identity);
        RG_CHECK(sender >= -1 && sender < kSize);
        switch (what & 7) {
            case 0:
            case 1: {
                if (mend) {
                    payload = GoodGreeting(
                        dialect,
                        (what & 1) != 0 ? wire::Greeting::Kind::kReady : wire::Greeting::Kind::kHello,
                        who >> 4 & 3);
                }
                const std::array<std::string_view, 2> frames{payload, identity};
                machine.OnHandshakeMessage(identity, {frames.data(), std::size_t{who} >> 3 & 3U ? 1U : 2U},
                                           (what & 0x20) != 0);
                break;
            }
            case 2: {
                if (mend) {
                    payload = GoodReady(dialect, (who & 0x40) != 0 ? kSize : 1);
                }
                const std::string_view frame = payload;
                machine.OnRegistration(identity, {&frame, (who & 0x20) != 0 ? 0U : 1U});
                if (sender >= 0) {
                    registered[static_cast<std::size_t>(sender)] = true;
                }
                break;
            }
            case 3:
                machine.OnHandshakeClosed(rank);
                break;
            case 4:
                machine.OnLost(rank);
                RG_CHECK(machine.step(rank) < Step::kRegistered);
                registered[static_cast<std::size_t>(rank)] = false;
                break;
            case 5:
                clock.Advance(std::chrono::milliseconds(10) * who);
                machine.OnTick();
                RG_CHECK(!machine.next_deadline() || *machine.next_deadline() > clock.Now());
                break;
            case 6:
                machine.OfferInit(rank);
                break;
            default: {
                if (mend) {
                    payload = GoodReady(dialect, (who & 0x40) != 0 ? kSize : 1);
                }
                auto facts = ParseReadyResponse(payload, declared);
                RG_CHECK(facts.ok() || !facts.error().message.empty());
                if (facts.ok()) {
                    facts->parallel_config_hash = std::string((who & 0x20) != 0 ? 1 : 0, 'b');
                    machine.Reattach(rank, *facts);
                    registered[static_cast<std::size_t>(rank)] = true;
                }
            }
        }
        TakeEvents(machine, (what & 0x80) == 0);
        for (std::int32_t r = 0; r < kSize; ++r) {
            RG_CHECK(machine.step(r) < Step::kRegistered || registered[static_cast<std::size_t>(r)]);
        }
        CheckGroup(machine, declared);
        RG_CHECK(!runtime || machine.dialect() == runtime);
        runtime = machine.dialect();
        const auto deadline = machine.next_deadline();
        RG_CHECK(!deadline || *deadline > clock.Now() - std::chrono::hours(1));
    }
}

void Engine(Dialect dialect, std::string_view input) {
    FakeClock clock;
    EngineLinkOptions options;
    options.dialect = dialect;
    options.handshake_address = "tcp://127.0.0.1:1";
    EngineHandshake machine{options, clock};
    RG_CHECK(wire::DecodeGreeting(machine.Hello()).ok());
    while (!input.empty()) {
        const std::size_t length = static_cast<unsigned char>(input[0]);
        input.remove_prefix(1);
        const std::string_view frame = input.substr(0, length);
        input.remove_prefix(frame.size());
        const Status taken = machine.OnHandshakeMessage(frame);
        RG_CHECK(taken.ok() || !taken.error().message.empty());
        if (machine.step() == EngineHandshake::Step::kInitialised) {
            RG_CHECK(!machine.addresses().inputs.empty() && !machine.addresses().outputs.empty());
        }
    }
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
    InitLog(LogLevel::kError, LogFormat::kText);
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size == 0) {
        return 0;
    }
    const std::string_view input{reinterpret_cast<const char*>(data) + 1, size - 1};
    const Dialect dialect = (data[0] & 1) != 0 ? Dialect::kTokenSpeed : Dialect::kVllm;
    if ((data[0] & 2) != 0) {
        Engine(dialect, input);
    } else {
        Frontend((data[0] & 4) != 0 ? std::nullopt : std::optional{dialect}, input);
    }
    return 0;
}
