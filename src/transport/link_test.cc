// SPDX-License-Identifier: Apache-2.0
// Both links over real sockets, without a group behind them: framing, bounds, attribution, the coordinator,
// many frontends.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <thread>

#include "transport/engine_link.h"
#include "transport/fake_rank.h"
#include "transport/frontend_link.h"
#include "transport/zmq_util.h"
#include "wire/handshake.h"
#include "wire/vllm/outputs.h"
#include "wire/vllm/request.h"

namespace rankgate::transport {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

std::string ReadyMap(std::int64_t max_model_len = 512) {
    wire::ReadyResponse ready;
    ready.max_model_len = max_model_len;
    ready.num_gpu_blocks = 10;
    ready.block_size = 16;
    ready.vllm_version = "0.32.0";
    std::string out;
    wire::EncodeReadyResponse(ready, Dialect::kVllm, out);
    return out;
}

struct Recorder : FrontendLink::Handler {
    void OnProgress(std::int32_t rank, FrontendHandshake::Step step, std::string_view) override {
        log.push_back("progress " + std::to_string(rank) + " " + std::to_string(static_cast<int>(step)));
    }
    void OnRestarted(std::int32_t rank) override { log.push_back("restarted " + std::to_string(rank)); }
    void OnLive(std::int32_t rank, const RankFacts& facts, bool reattached) override {
        log.push_back((reattached ? "reattached " : "live ") + std::to_string(rank));
        max_model_len = facts.ready.max_model_len;
        ++live;
    }
    std::int32_t OnOutput(std::span<const std::string_view> frames, std::int32_t connection_rank) override {
        outputs.emplace_back(frames[0]);
        last_frames.assign(frames.begin(), frames.end());
        from.push_back(connection_rank);
        wire::vllm::OutputsMessage message;
        return wire::vllm::DecodeOutputs(frames, message).ok() ? message.engine_index : -1;
    }
    void OnPeerLost(std::int32_t rank, PeerLoss loss) override { lost.emplace_back(rank, loss); }
    std::string_view ProbePayload(std::int32_t, std::uint8_t& type) override {
        type = 3;
        probe.clear();
        wire::Writer writer{probe};
        wire::vllm::BeginUtility(writer, 0, 1, "is_sleeping", 0);
        return probe;
    }

    std::vector<std::string> log;
    std::vector<std::string> outputs;
    std::vector<std::int32_t> from;
    std::vector<std::string> last_frames;
    std::vector<std::pair<std::int32_t, PeerLoss>> lost;
    std::string probe;
    std::int64_t max_model_len{0};
    int live{0};
};

/// Which ends have native data sockets; the others have libzmq's.
struct Ends {
    bool frontend;
    bool engine;
};

class LinkTest : public ::testing::TestWithParam<Ends> {
  protected:
    FrontendLink& Bind(FrontendLinkOptions options) {
        options.native = GetParam().frontend;
        auto link = FrontendLink::Bind(std::move(options), clock_);
        EXPECT_TRUE(link.ok()) << link.error().message;
        link_ = std::move(*link);
        return *link_;
    }
    bool Pump(const std::function<bool()>& done, Duration limit = seconds(10)) {
        const TimePoint until = clock_.Now() + limit;
        while (!done()) {
            if (clock_.Now() >= until) {
                return false;
            }
            link_->Wait(milliseconds(5));
            link_->Poll(handler_);
        }
        return true;
    }
    std::unique_ptr<EngineLink> Dial(std::uint16_t index, std::string address = {}) {
        EngineLinkOptions options;
        options.handshake_address = address.empty() ? link_->handshake_address() : std::move(address);
        options.engine_index = index;
        options.linger = milliseconds(100);
        options.native = GetParam().engine;
        auto link = EngineLink::Connect(options, clock_);
        EXPECT_TRUE(link.ok()) << link.error().message;
        return std::move(*link);
    }
    /// Both ends of one start, in one thread.
    std::unique_ptr<EngineLink> Serve(std::uint16_t index) {
        auto engine = Dial(index);
        EXPECT_TRUE(Pump([&] { return engine->AwaitInit(clock_.Now() + milliseconds(1)).ok(); }));
        EXPECT_TRUE(engine->Register(ReadyMap(), "", clock_.Now() + seconds(5)).ok());
        const int before = handler_.live;
        EXPECT_TRUE(Pump([&] {
            engine->Poll(Duration::zero(), [](const InputFrames&) {});
            return handler_.live > before && engine->connected_clients() == 1;
        }));
        return engine;
    }
    static std::string Say(std::int32_t engine_index) {
        wire::vllm::SchedulerStats stats;
        wire::vllm::OutputsBatch batch;
        batch.engine_index = engine_index;
        batch.stats = &stats;
        std::string bytes;
        wire::AuxFrames aux;
        wire::vllm::EncodeOutputs(batch, bytes, aux);
        return bytes;
    }

    SteadyClock clock_;
    std::unique_ptr<FrontendLink> link_;
    Recorder handler_;
};

INSTANTIATE_TEST_SUITE_P(, LinkTest,
                         ::testing::Values(Ends{true, true}, Ends{true, false}, Ends{false, true},
                                           Ends{false, false}),
                         [](const ::testing::TestParamInfo<Ends>& ends) {
                             return std::string(ends.param.frontend ? "NativeFrontend" : "ZmqFrontend") +
                                    (ends.param.engine ? "NativeEngine" : "ZmqEngine");
                         });

TEST_P(LinkTest, CarriesFramesBothWaysUnchanged) {
    Bind({});
    auto engine = Serve(0);
    const std::vector<std::string_view> aux{"tensor", ""};
    ASSERT_TRUE(link_->Send(0, 0, "payload", FrontendLink::Urgency::kRequest, aux).ok());
    std::string got;
    const TimePoint until = clock_.Now() + seconds(5);
    while (got.empty() && clock_.Now() < until) {
        engine->Poll(milliseconds(50), [&](const InputFrames& in) {
            if (in.type != 0) {
                return;  // the link's own question who is who
            }
            got = std::to_string(in.type) + std::string(in.payload) + "/" + std::string(in.aux[0]) + "/" +
                  std::to_string(in.aux.size()) + "/" + std::to_string(in.client);
        });
    }
    EXPECT_EQ(got, "0payload/tensor/2/0");
    ASSERT_TRUE(engine->Send(0, Say(0)).ok());
    ASSERT_TRUE(Pump([&] { return handler_.outputs.size() == 1; }));
    EXPECT_EQ(handler_.outputs[0], Say(0));
}

TEST_P(LinkTest, AStepOfThousandsOfFramesArrivesWhole) {
    Bind({});
    auto engine = Serve(0);
    std::vector<std::string> frames{Say(0)};
    for (int i = 0; i < 20'000; ++i) {
        frames.push_back(std::string(static_cast<std::size_t>(i % 300), 'x') + std::to_string(i));
    }
    const std::vector<std::string_view> aux{frames.begin() + 1, frames.end()};
    ASSERT_TRUE(engine->Send(0, frames[0], aux).ok());
    ASSERT_TRUE(engine->Send(0, Say(0)).ok());
    ASSERT_TRUE(Pump([&] {
        if (handler_.outputs.size() == 1) {
            EXPECT_EQ(handler_.last_frames, frames);
        }
        engine->Poll(Duration::zero(), [](const InputFrames&) {});
        return handler_.outputs.size() == 2;
    }));
    EXPECT_EQ(handler_.last_frames, std::vector<std::string>{Say(0)});
}

TEST_P(LinkTest, TheEngineMayComeLongBeforeTheFrontend) {
    Bind({});
    const std::string address = link_->handshake_address();
    link_.reset();
    auto engine = Dial(0, address);
    EXPECT_FALSE(engine->AwaitInit(clock_.Now() + milliseconds(100)).ok());
    FrontendLinkOptions options;
    options.handshake_address = address;
    Bind(options);
    ASSERT_TRUE(Pump([&] { return engine->AwaitInit(clock_.Now() + milliseconds(1)).ok(); }));
    ASSERT_TRUE(engine->Register(ReadyMap(), "", clock_.Now() + seconds(5)).ok());
    EXPECT_TRUE(Pump([&] { return handler_.live == 1; }));
}

TEST_P(LinkTest, AddressesArePlain) {
    FrontendLinkOptions options;
    options.data_host = "127.0.0.1";
    Bind(options);
    EXPECT_TRUE(link_->handshake_address().starts_with("tcp://127.0.0.1:")) << link_->handshake_address();
    EXPECT_TRUE(link_->addresses().inputs[0].starts_with("tcp://127.0.0.1:"));
    Serve(0);
    options.handshake_address = "tcp://[::1]:0";
    options.data_host = "::1";
    Bind(options);
    EXPECT_TRUE(link_->handshake_address().starts_with("tcp://[::1]:")) << link_->handshake_address();
    Serve(0);
}

TEST_P(LinkTest, AWildcardTellsEachEngineTheAddressItCameInOn) {
    FrontendLinkOptions options;
    options.handshake_address = "tcp://0.0.0.0:0";
    options.data_host = "0.0.0.0";
    Bind(options);
    const std::string port = link_->handshake_address().substr(link_->handshake_address().rfind(':'));
    auto engine = Dial(0, "tcp://127.0.0.1" + port);
    ASSERT_TRUE(Pump([&] { return engine->AwaitInit(clock_.Now() + milliseconds(1)).ok(); }));
    EXPECT_TRUE(engine->addresses().inputs[0].starts_with("tcp://127.0.0.1:"))
        << engine->addresses().inputs[0];
    ASSERT_TRUE(engine->Register(ReadyMap(), "", clock_.Now() + seconds(5)).ok());
    EXPECT_TRUE(Pump([&] { return handler_.live == 1; }));
}

TEST_P(LinkTest, AnEngineThatWasNeverAnsweredLeavesAtOnce) {
    const TimePoint before = clock_.Now();
    Dial(0, "tcp://127.0.0.1:1").reset();
    EXPECT_LT(clock_.Now() - before, seconds(1));
}

TEST_P(LinkTest, SaysWhoItWaitedForWhenNoInitComes) {
    Bind({});
    auto engine = Dial(5);  // not one of the group: refused, never answered
    Pump([] { return false; }, milliseconds(50));
    const Status init = engine->AwaitInit(clock_.Now() + milliseconds(50));
    ASSERT_FALSE(init.ok());
    EXPECT_EQ(init.error().code, ErrorCode::kTimeout);
    EXPECT_NE(init.error().message.find(link_->handshake_address()), std::string::npos);
}

TEST_P(LinkTest, ARankThatNeverRegisteredCannotBeSentTo) {
    FrontendLinkOptions options;
    options.size = 2;
    Bind(options);
    auto engine = Serve(0);
    const Status sent = link_->Send(1, 0, "x");
    ASSERT_FALSE(sent.ok());
    EXPECT_EQ(sent.error().code, ErrorCode::kRankLost);
    EXPECT_TRUE(link_->Send(0, 0, "x").ok());
}

TEST_P(LinkTest, BoundsWhatIsQueuedForARankAndKeepsAReserveForAborts) {
    FrontendLinkOptions options;
    options.max_queued_bytes_per_rank = 1 << 20;
    Bind(options);
    FakeRankOptions rank;
    rank.handshake_address = link_->handshake_address();
    FakeRankProcess process{RG_FAKE_RANK, rank};
    ASSERT_TRUE(Pump([&] { return handler_.live == 1; }));
    process.Signal(SIGSTOP);
    const std::string big(100'000, 'x');
    Status sent;
    int accepted = 0;
    while ((sent = link_->Send(0, 1, big)).ok() && accepted < 1000) {
        ++accepted;
    }
    ASSERT_FALSE(sent.ok());
    EXPECT_EQ(sent.error().code, ErrorCode::kSendFailed);
    EXPECT_TRUE(sent.error().retryable);
    EXPECT_LE(link_->queued_bytes(0), options.max_queued_bytes_per_rank);
    EXPECT_TRUE(link_->Send(0, 1, "\x90", FrontendLink::Urgency::kControl).ok());
    process.Signal(SIGCONT);
    EXPECT_TRUE(Pump([&] { return link_->queued_bytes(0) == 0; }))
        << "what was queued leaves when it reads again";
    EXPECT_TRUE(link_->Send(0, 1, big).ok());
}

TEST_P(LinkTest, LearnsWhoseConnectionItIsFromTheFirstOutput) {
    FrontendLinkOptions options;
    options.size = 2;
    Bind(options);
    auto first = Serve(0);
    auto second = Serve(1);
    ASSERT_TRUE(first->Send(0, Say(0)).ok());
    ASSERT_TRUE(Pump([&] { return handler_.outputs.size() == 1; }));
    ASSERT_TRUE(second->Send(0, Say(1)).ok());
    ASSERT_TRUE(Pump([&] { return handler_.outputs.size() == 2; }));
    // The death notice names nobody; its connection does.
    second->SendDead();
    ASSERT_TRUE(Pump([&] { return handler_.outputs.size() == 3; }));
    EXPECT_EQ(handler_.outputs[2], "ENGINE_CORE_DEAD");
    EXPECT_EQ(handler_.from[2], 1);
    second->CloseOutputs();
    ASSERT_TRUE(Pump([&] { return !handler_.lost.empty(); }));
    EXPECT_EQ(handler_.lost[0], (std::pair{1, PeerLoss::kOutputClosed}));
    first->CloseInputs();
    ASSERT_TRUE(Pump([&] { return handler_.lost.size() == 2; }));
    EXPECT_EQ(handler_.lost[1], (std::pair{0, PeerLoss::kInputClosed}));
}

TEST_P(LinkTest, LastOutputsComeBeforeTheNewsOfTheLoss) {
    Bind({});
    for (int round = 0; round < 20; ++round) {
        handler_ = Recorder{};
        auto engine = Serve(0);
        handler_ = Recorder{};
        for (int i = 0; i < 200; ++i) {
            ASSERT_TRUE(engine->Send(0, Say(0)).ok());
        }
        engine->CloseOutputs();  // lingers until all are out, then the connection closes
        const std::pair<std::int32_t, PeerLoss> closed{0, PeerLoss::kOutputClosed};
        ASSERT_TRUE(Pump([&] {
            return std::find(handler_.lost.begin(), handler_.lost.end(), closed) != handler_.lost.end();
        }));
        EXPECT_EQ(handler_.outputs.size(), 200U);
        engine.reset();
        link_->Forget(0, false);
    }
}

TEST_P(LinkTest, AConnectionThatComesBackIsTakenUpAgainWithoutAHandshake) {
    FrontendLinkOptions options;
    std::string pattern = "/tmp/rg-link-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    options.socket_dir = pattern;
    Bind(options);
    options.handshake_address = link_->handshake_address();
    auto engine = Serve(0);
    for (int restart = 0; restart < 3; ++restart) {
        link_.reset();
        handler_ = Recorder{};
        Bind(options);
        ASSERT_TRUE(Pump([&] {
            engine->Poll(Duration::zero(), [&](const InputFrames& in) {
                if (in.type == 3) {
                    (void)engine->Send(0, Say(0));  // any output proves that the way back works
                }
            });
            return handler_.live == 1;
        }));
        EXPECT_EQ(handler_.log.back(), "reattached 0");
        EXPECT_EQ(handler_.max_model_len, 512);
    }
    engine.reset();
    link_.reset();
    std::filesystem::remove_all(pattern);
}

TEST_P(LinkTest, AnIndexThatInitDidNotListIsRefusedForThatMessageAlone) {
    Bind({});
    auto engine = Serve(0);
    EXPECT_FALSE(engine->Send(1, "x").ok());
    EXPECT_FALSE(engine->Send(-1, "x").ok());
    EXPECT_FALSE(engine->Send(-2, "x").ok());
    EXPECT_TRUE(engine->Send(0, Say(0)).ok());
}

TEST_P(LinkTest, MalformedInputsAreCountedAndSteppedOver) {
    Bind({});
    auto engine = Serve(0);
    // Straight onto the wire, past the frontend's own framing.
    ZmqContext context;
    ZmqSocket router{context, ZMQ_ROUTER};
    router.Set(ZMQ_LINGER, 0);
    router.Set(ZMQ_ROUTER_MANDATORY, 1);
    ASSERT_EQ(router.Bind("tcp://127.0.0.1:*"), 0);
    ZmqSocket pull{context, ZMQ_PULL};
    pull.Set(ZMQ_LINGER, 0);
    ASSERT_EQ(pull.Bind("tcp://127.0.0.1:*"), 0);
    ZmqSocket greeter{context, ZMQ_ROUTER};
    greeter.Set(ZMQ_LINGER, 0);
    ASSERT_EQ(greeter.Bind("tcp://127.0.0.1:*"), 0);
    auto victim = Dial(0, greeter.LastEndpoint());
    MultipartReader reader;
    const TimePoint until = clock_.Now() + seconds(10);
    while (reader.Receive(greeter) == MultipartReader::Got::kNothing && clock_.Now() < until) {
        std::this_thread::sleep_for(milliseconds(1));
    }
    wire::InitMessage init;
    init.inputs = {router.LastEndpoint()};
    init.outputs = {pull.LastEndpoint()};
    std::string bytes;
    wire::EncodeInit(init, bytes);
    ASSERT_EQ(greeter.Send(wire::RankIdentity(0), true), 0);
    ASSERT_EQ(greeter.Send(bytes, false), 0);
    ASSERT_TRUE(victim->AwaitInit(clock_.Now() + seconds(5)).ok());
    ASSERT_TRUE(victim->Register(ReadyMap(), "", clock_.Now() + seconds(5)).ok());
    while (reader.Receive(router) == MultipartReader::Got::kNothing && clock_.Now() < until) {
        std::this_thread::sleep_for(milliseconds(1));
    }
    const auto send = [&](std::vector<std::string> frames) {
        ASSERT_EQ(router.Send(wire::RankIdentity(0), true), 0);
        for (std::size_t i = 0; i < frames.size(); ++i) {
            ASSERT_EQ(router.Send(frames[i], i + 1 < frames.size()), 0);
        }
    };
    send({std::string("\0", 1)});         // no payload
    send({"", "payload"});                // no type
    send({std::string("\0\0", 2), "p"});  // type of two bytes
    send({std::string("\7", 1), "odd"});  // an unknown type is the engine's to refuse
    std::string got;
    while (got.empty() && clock_.Now() < until) {
        victim->Poll(milliseconds(50),
                     [&](const InputFrames& in) { got = std::to_string(in.type) + std::string(in.payload); });
    }
    EXPECT_EQ(got, "7odd");
    EXPECT_EQ(victim->malformed_inputs(), 3U);
}

TEST_P(LinkTest, ServesSeveralFrontendsAndACoordinator) {
    ZmqContext context;
    const auto bind = [&](int type) {
        ZmqSocket socket{context, type};
        socket.Set(ZMQ_LINGER, 0);
        EXPECT_EQ(socket.Bind("tcp://127.0.0.1:*"), 0);
        return socket;
    };
    ZmqSocket greeter = bind(ZMQ_ROUTER);
    std::vector<ZmqSocket> inputs;
    std::vector<ZmqSocket> outputs;
    wire::InitMessage init;
    for (int i = 0; i < 2; ++i) {
        inputs.push_back(bind(ZMQ_ROUTER));
        outputs.push_back(bind(ZMQ_PULL));
        init.inputs.push_back(inputs.back().LastEndpoint());
        init.outputs.push_back(outputs.back().LastEndpoint());
    }
    ZmqSocket publisher = bind(ZMQ_XPUB);
    ZmqSocket collector = bind(ZMQ_PULL);
    init.coordinator_input = publisher.LastEndpoint();
    init.coordinator_output = collector.LastEndpoint();
    std::string bytes;
    wire::EncodeInit(init, bytes);

    MultipartReader reader;
    const TimePoint until = clock_.Now() + seconds(10);
    const auto receive = [&](ZmqSocket& socket) {
        while (reader.Receive(socket) == MultipartReader::Got::kNothing) {
            if (clock_.Now() >= until) {
                return false;
            }
            std::this_thread::sleep_for(milliseconds(1));
        }
        return true;
    };
    EngineLinkOptions options;
    options.native = GetParam().engine;
    options.handshake_address = greeter.LastEndpoint();
    options.engine_index = 300;
    auto engine = EngineLink::Connect(options, clock_);
    ASSERT_TRUE(engine.ok());
    ASSERT_TRUE(receive(greeter));
    EXPECT_EQ(reader.frames()[0], wire::RankIdentity(300));
    ASSERT_EQ(greeter.Send(wire::RankIdentity(300), true), 0);
    ASSERT_EQ(greeter.Send(bytes, false), 0);
    ASSERT_TRUE((*engine)->AwaitInit(until).ok());

    std::thread registering{[&] { EXPECT_TRUE((*engine)->Register(ReadyMap(), "hash", until).ok()); }};
    for (ZmqSocket& input : inputs) {
        ASSERT_TRUE(receive(input));
        EXPECT_EQ(reader.frames()[1], ReadyMap());
    }
    ASSERT_TRUE(receive(publisher));
    EXPECT_EQ(reader.frames()[0], std::string_view("\x01", 1)) << "the subscription";
    EXPECT_EQ(reader.Receive(greeter), MultipartReader::Got::kNothing) << "no READY before the coordinator's";
    ASSERT_EQ(publisher.Send("READY", false), 0);
    registering.join();
    ASSERT_TRUE(receive(greeter));
    const auto ready = wire::DecodeGreeting(reader.frames()[1]);
    ASSERT_TRUE(ready.ok());
    EXPECT_EQ(ready->kind, wire::Greeting::Kind::kReady);
    EXPECT_EQ(ready->parallel_config_hash, "hash");

    ASSERT_EQ(publisher.Send(std::string_view("\x02", 1), true), 0);
    ASSERT_EQ(publisher.Send("wave", false), 0);
    ASSERT_EQ(inputs[1].Send(wire::RankIdentity(300), true), 0);
    ASSERT_EQ(inputs[1].Send(std::string_view("\0", 1), true), 0);
    ASSERT_EQ(inputs[1].Send("add", false), 0);
    std::vector<std::string> got;
    while (got.size() < 2 && clock_.Now() < until) {
        (*engine)->Poll(milliseconds(20), [&](const InputFrames& in) {
            got.push_back(std::to_string(in.client) + ":" + std::to_string(in.type) + ":" +
                          std::string(in.payload));
        });
    }
    std::sort(got.begin(), got.end());
    EXPECT_EQ(got, (std::vector<std::string>{"-1:2:wave", "1:0:add"}));
    EXPECT_EQ((*engine)->connected_clients(), 2);

    ASSERT_TRUE((*engine)->Send(1, "to the second").ok());
    ASSERT_TRUE((*engine)->Send(-1, "to the coordinator").ok());
    ASSERT_TRUE(receive(outputs[1]));
    EXPECT_EQ(reader.frames()[0], "to the second");
    ASSERT_TRUE(receive(collector));
    EXPECT_EQ(reader.frames()[0], "to the coordinator");
    (*engine)->SendDead();
    for (ZmqSocket& output : outputs) {
        ASSERT_TRUE(receive(output));
        EXPECT_EQ(reader.frames()[0], wire::kEngineCoreDead);
    }
}

TEST_P(LinkTest, OutputsThatNobodyTakesAreBoundedAndTheAbsenceIsVisible) {
    Bind({});
    auto engine = Dial(0);
    ASSERT_TRUE(Pump([&] { return engine->AwaitInit(clock_.Now() + milliseconds(1)).ok(); }));
    ASSERT_TRUE(engine->Register(ReadyMap(), "", clock_.Now() + seconds(5)).ok());
    ASSERT_TRUE(Pump([&] { return handler_.live == 1; }));
    const TimePoint until = clock_.Now() + seconds(5);
    while (engine->connected_clients() == 0 && clock_.Now() < until) {
        engine->Poll(milliseconds(5), [](const InputFrames&) {});
    }
    EXPECT_EQ(engine->AwayFor(0), Duration::zero());
    link_.reset();
    while (engine->connected_clients() == 1 && clock_.Now() < until) {
        engine->Poll(milliseconds(5), [](const InputFrames&) {});
    }
    EXPECT_EQ(engine->connected_clients(), 0);
    std::this_thread::sleep_for(milliseconds(5));
    EXPECT_GT(engine->AwayFor(0), Duration::zero());
    const std::string big(32 << 20, 'x');
    Status sent;
    int accepted = 0;
    while ((sent = engine->Send(0, big)).ok() && accepted < 20) {
        ++accepted;
    }
    ASSERT_FALSE(sent.ok());
    EXPECT_EQ(sent.error().code, ErrorCode::kSendFailed);
    EXPECT_LE(accepted, 9);
}

TEST(MultipartReaderTest, KnowsTheConnectionOfAMessageThatWasLookedForBefore) {
    ZmqContext context;
    for (const bool look : {false, true}) {
        ZmqSocket router(context, ZMQ_ROUTER);
        ASSERT_EQ(router.Bind("tcp://127.0.0.1:*"), 0);
        ZmqSocket dealer(context, ZMQ_DEALER);
        dealer.Set(ZMQ_LINGER, 0);
        ASSERT_EQ(dealer.Connect(router.LastEndpoint()), 0);
        ASSERT_EQ(dealer.Send("hello", false), 0);
        MultipartReader reader;
        const auto until = std::chrono::steady_clock::now() + seconds(10);
        auto got = MultipartReader::Got::kNothing;
        while (got == MultipartReader::Got::kNothing && std::chrono::steady_clock::now() < until) {
            int events = 0;
            std::size_t size = sizeof events;
            if (!look || (::zmq_getsockopt(router.get(), ZMQ_EVENTS, &events, &size) == 0 &&
                          (events & ZMQ_POLLIN) != 0)) {
                got = reader.Receive(router);
            }
            std::this_thread::yield();
        }
        ASSERT_EQ(got, MultipartReader::Got::kMessage);
        EXPECT_EQ(reader.frames().back(), "hello");
        EXPECT_GE(reader.source_fd(), 0) << (look ? "after a look" : "received at once");
    }
}

}  // namespace
}  // namespace rankgate::transport
