// SPDX-License-Identifier: Apache-2.0
// A whole rank in a thread, against raw sockets in this process: handshake, serving, several clients, last
// words, a frontend that goes and comes back, a frontend that never reads.
#include "engine/rank.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <zmq.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/script_runner.h"
#include "engine/sim_runner.h"
#include "wire/vllm/outputs.h"
#include "wire/vllm/request.h"

namespace rankgate::engine {
namespace {

namespace vllm = wire::vllm;
using Frames = std::vector<std::string>;

class Socket {
  public:
    Socket(void* context, int type) : socket_{zmq_socket(context, type)} {
        const int zero = 0;
        zmq_setsockopt(socket_, ZMQ_LINGER, &zero, sizeof zero);
    }
    Socket(const Socket&) = delete;
    Socket& operator=(const Socket&) = delete;
    ~Socket() { zmq_close(socket_); }

    std::string Bind(const std::string& address) {
        EXPECT_EQ(zmq_bind(socket_, address.c_str()), 0) << address;
        char bound[256] = "";
        std::size_t size = sizeof bound;
        zmq_getsockopt(socket_, ZMQ_LAST_ENDPOINT, bound, &size);
        return bound;
    }
    void Set(int option, int value) { zmq_setsockopt(socket_, option, &value, sizeof value); }
    bool Send(const Frames& frames) {
        for (std::size_t i = 0; i < frames.size(); ++i) {
            if (zmq_send(socket_, frames[i].data(), frames[i].size(),
                         i + 1 < frames.size() ? ZMQ_SNDMORE : 0) < 0) {
                return false;
            }
        }
        return true;
    }
    /// Waits up to ten seconds; empty = nothing came.
    Frames Receive(int timeout_ms = 10'000) {
        zmq_pollitem_t item{socket_, 0, ZMQ_POLLIN, 0};
        Frames frames;
        if (zmq_poll(&item, 1, timeout_ms) <= 0) {
            return frames;
        }
        int more = 1;
        while (more != 0) {
            zmq_msg_t message;
            zmq_msg_init(&message);
            if (zmq_msg_recv(&message, socket_, 0) < 0) {
                break;
            }
            frames.emplace_back(static_cast<const char*>(zmq_msg_data(&message)), zmq_msg_size(&message));
            more = zmq_msg_more(&message);
            zmq_msg_close(&message);
        }
        return frames;
    }

  private:
    void* socket_;
};

class RankTest : public ::testing::Test {
  protected:
    void SetUp() override {
        std::string pattern = ::testing::TempDir() + "/rgrankXXXXXX";
        ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
        root_ = pattern;
        context_ = zmq_ctx_new();
        handshake_ = std::make_unique<Socket>(context_, ZMQ_ROUTER);
        address_ = handshake_->Bind("tcp://127.0.0.1:*");
        OpenData();
    }
    void TearDown() override {
        Stop();
        handshake_.reset();
        inputs_.clear();
        outputs_.clear();
        zmq_ctx_term(context_);
        [[maybe_unused]] const int removed = std::system(("rm -rf " + root_).c_str());
    }
    void OpenData() {
        for (int i = 0; i < 2; ++i) {
            inputs_.push_back(std::make_unique<Socket>(context_, ZMQ_ROUTER));
            inputs_.back()->Set(ZMQ_ROUTER_MANDATORY, 1);
            outputs_.push_back(std::make_unique<Socket>(context_, ZMQ_PULL));
            inputs_.back()->Bind(Path("i", i));
            outputs_.back()->Bind(Path("o", i));
        }
    }
    std::string Path(const char* kind, int i) const {
        return "ipc://" + root_ + "/" + kind + std::to_string(i);
    }

    void Start(std::unique_ptr<ModelRunner> runner, const std::function<void(RankConfig&)>& adjust = {}) {
        runner_ = std::move(runner);
        RankConfig config;
        config.handshake_address = address_;
        config.load_page_dir = root_ + "/load";
        if (adjust) {
            adjust(config);
        }
        ASSERT_TRUE(config.scheduler.Normalise().ok());
        rank_ = std::make_unique<Rank>(config, *runner_, clock_);
        thread_ = std::thread{[this] { code_ = rank_->Run(stop_); }};
        wire::InitMessage init;
        init.inputs = {Path("i", 0), Path("i", 1)};
        init.outputs = {Path("o", 0), Path("o", 1)};
        std::string bytes;
        wire::EncodeInit(init, bytes);
        const Frames hello = handshake_->Receive();
        ASSERT_EQ(hello.size(), 2u);
        EXPECT_EQ(hello[0], std::string("\0\0", 2));
        ASSERT_TRUE(handshake_->Send({hello[0], bytes}));
        for (auto& input : inputs_) {
            const Frames ready = input->Receive();
            ASSERT_EQ(ready.size(), 2u);
            auto facts = wire::DecodeReadyResponse(ready[1]);
            ASSERT_TRUE(facts.ok());
            EXPECT_TRUE(facts->rankgate_load_mailbox.has_value());
        }
        ASSERT_EQ(handshake_->Receive().size(), 2u) << "READY";
    }
    int Stop(int signal_number = SIGTERM) {
        if (thread_.joinable()) {
            stop_.store(signal_number);
            Rank::WakeFromSignal();
            thread_.join();
        }
        return code_;
    }
    void Add(const std::string& id, std::int64_t max_tokens, std::size_t client = 0) {
        wire::GenerateRequest request;
        request.id = id;
        request.prompt_token_ids = {5, 6, 7};
        request.sampling.temperature = 0;
        request.sampling.max_tokens = max_tokens;
        request.client_index = static_cast<std::int32_t>(client);
        std::string payload;
        vllm::EncodeAdd(request, payload);
        // A rank that is still reconnecting is unreachable for a moment.
        for (int i = 0; i < 500; ++i) {
            if (inputs_[client]->Send({std::string("\0\0", 2), std::string("\0", 1), payload})) {
                return;
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
        }
        FAIL() << "the rank never came back";
    }
    /// Reads until the request ends; its tokens, and how it ended.
    std::pair<std::vector<TokenId>, wire::FinishReason> Collect(const std::string& id,
                                                                std::size_t client = 0) {
        std::pair<std::vector<TokenId>, wire::FinishReason> result{{}, wire::FinishReason::kNone};
        while (result.second == wire::FinishReason::kNone) {
            const Frames frames = outputs_[client]->Receive();
            if (frames.empty()) {
                ADD_FAILURE() << id << ": nothing came for ten seconds";
                break;
            }
            const std::vector<std::string_view> views{frames.begin(), frames.end()};
            vllm::OutputsMessage message;
            EXPECT_TRUE(vllm::DecodeOutputs(views, message).ok());
            for (const wire::OutputRow& row : message.rows) {
                if (row.request_id == id) {
                    const auto tokens = message.TokensOf(row);
                    result.first.insert(result.first.end(), tokens.begin(), tokens.end());
                    result.second = row.finish_reason;
                }
            }
        }
        return result;
    }
    std::unique_ptr<SimRunner> Sim(double step_us = 0) {
        SimConfig sim;
        sim.model.vocab_size = 49152;
        sim.num_blocks = 1000;
        sim.step_us = step_us;
        return std::make_unique<SimRunner>(sim, clock_, MakeSteadySleeper());
    }

    SteadyClock clock_;
    std::string root_;
    void* context_{nullptr};
    std::unique_ptr<Socket> handshake_;
    std::string address_;
    std::vector<std::unique_ptr<Socket>> inputs_;
    std::vector<std::unique_ptr<Socket>> outputs_;
    std::atomic<int> stop_{0};
    std::unique_ptr<ModelRunner> runner_;  // outlives the thread that uses it
    std::unique_ptr<Rank> rank_;
    std::thread thread_;
    int code_{-1};
};

TEST_F(RankTest, ServesTwoClientsAndEndsInOrder) {
    Start(Sim());
    Add("a", 5, 0);
    Add("b", 7, 1);
    EXPECT_EQ(Collect("a", 0).first.size(), 5u);
    const auto [tokens, finish] = Collect("b", 1);
    EXPECT_EQ(tokens.size(), 7u);
    EXPECT_EQ(finish, wire::FinishReason::kLength);
    EXPECT_EQ(Stop(), kExitOk);
}

TEST_F(RankTest, AnInterruptEndsRunningRequestsWithAbort) {
    Start(Sim(1000));
    Add("a", 1'000'000);
    EXPECT_FALSE(outputs_[0]->Receive().empty());
    EXPECT_EQ(Stop(SIGINT), kExitInterrupted);
    EXPECT_EQ(Collect("a").second, wire::FinishReason::kAbort);
}

TEST_F(RankTest, AFailedStepIsLastWordsOnEveryOutput) {
    ScriptConfig config;
    config.model.vocab_size = 49152;
    auto runner = std::make_unique<ScriptRunner>(config, clock_);
    runner->Execute(R"({"do": "fail_step"})");
    Start(std::move(runner));
    Add("a", 5);
    for (auto& output : outputs_) {
        EXPECT_EQ(output->Receive(), Frames{std::string{wire::kEngineCoreDead}});
    }
    thread_.join();
    EXPECT_EQ(code_, kExitDied);
}

TEST_F(RankTest, AFrontendThatComesBackMissesNothing) {
    Start(Sim(5000));
    Add("a", 60);
    EXPECT_FALSE(outputs_[0]->Receive().empty());
    inputs_.clear();
    outputs_.clear();
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    OpenData();
    const auto [tokens, finish] = Collect("a");
    EXPECT_EQ(finish, wire::FinishReason::kLength);
    // What the old sockets had taken in is gone with them (one or two steps); from there on the stream is
    // whole.
    wire::GenerateRequest request;
    request.prompt_token_ids = {5, 6, 7};
    ASSERT_GE(tokens.size(), 50u);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        const std::uint64_t index = 60 - tokens.size() + i;
        ASSERT_EQ(tokens[i],
                  SimToken(SimHash(request), index, SimConfig{}.first_token, SimConfig{}.last_token))
            << index;
    }
    Add("b", 3);
    EXPECT_EQ(Collect("b").first.size(), 3u);
}

TEST_F(RankTest, AFrontendThatStaysAwayLosesItsRequests) {
    Start(Sim(2000), [](RankConfig& config) { config.away_timeout = std::chrono::milliseconds(300); });
    Add("a", 1'000'000'000);
    EXPECT_FALSE(outputs_[0]->Receive().empty());
    inputs_.clear();
    outputs_.clear();
    LoadPageReader page;
    ASSERT_TRUE(page.Open(root_ + "/load/rank0-" + std::to_string(::getpid())).ok());
    bool idle = false;
    for (int i = 0; i < 500 && !idle; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        const auto reading = page.Read();
        idle = reading.has_value() && reading->load.num_running == 0;
    }
    EXPECT_TRUE(idle);
}

TEST_F(RankTest, ARankThatOutrunsItsReaderWaitsForItAndLosesNothing) {
    Start(Sim(), [](RankConfig& config) { config.scheduler.max_num_seqs = 64; });
    constexpr int kRequests = 64;
    constexpr std::int64_t kTokens = 4000;
    for (int i = 0; i < kRequests; ++i) {
        Add("r" + std::to_string(i), kTokens);
    }
    // Nobody reads for a while: 256 000 rows would be 16 MB; the rank stops at the soft bound (or a bit above
    // it).
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    std::int64_t tokens = 0;
    int ended = 0;
    while (ended < kRequests) {
        const Frames frames = outputs_[0]->Receive();
        ASSERT_FALSE(frames.empty());
        const std::vector<std::string_view> views{frames.begin(), frames.end()};
        vllm::OutputsMessage message;
        ASSERT_TRUE(vllm::DecodeOutputs(views, message).ok());
        tokens += static_cast<std::int64_t>(message.tokens.size());
        for (const wire::OutputRow& row : message.rows) {
            ended += row.terminal() ? 1 : 0;
            EXPECT_TRUE(!row.terminal() || row.finish_reason == wire::FinishReason::kLength);
        }
    }
    EXPECT_EQ(tokens, kRequests * kTokens);
}

TEST_F(RankTest, NoGatewayIsAnErrorAfterTheTimeout) {
    const auto runner = Sim();
    RankConfig config;
    config.handshake_address = "ipc://" + root_ + "/nobody";
    config.init_timeout = std::chrono::milliseconds(100);
    ASSERT_TRUE(config.scheduler.Normalise().ok());
    Rank rank{config, *runner, clock_};
    EXPECT_EQ(rank.Run(stop_), kExitFailure);
}

}  // namespace
}  // namespace rankgate::engine
