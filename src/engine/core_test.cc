// SPDX-License-Identifier: Apache-2.0
#include "engine/core.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/sim_runner.h"
#include "wire/msgpack.h"
#include "wire/vllm/outputs.h"
#include "wire/vllm/request.h"

namespace rankgate::engine {
namespace {

using wire::FinishReason;
using wire::Writer;
namespace vllm = wire::vllm;

class NoSleep final : public Sleeper {
  public:
    void SleepUntil(TimePoint) noexcept override {}
};

constexpr std::int32_t kVocabulary = 1024;

/// What one client got, accumulated.
struct Client {
    struct Stream {
        std::vector<TokenId> tokens;
        FinishReason finish{FinishReason::kNone};
        wire::StopReason stop_reason;
        std::string error;
        int terminals{0};
        std::int32_t cached{-1};
    };
    std::map<std::string, Stream> streams;
    std::map<std::uint64_t, std::pair<std::string, std::string>> replies;  // failure, raw result
    std::vector<wire::LoadSnapshot> loads;
    std::vector<std::string> finished;
    int messages{0};
    int load_only{0};
};

struct Fixture {
    explicit Fixture(const std::function<void(CoreConfig&)>& adjust = {}) {
        CoreConfig config;
        config.scheduler.max_model_len = 512;
        config.scheduler.max_num_seqs = 8;
        config.scheduler.max_num_batched_tokens = 512;
        config.num_clients = 2;
        config.engine_index = 3;
        if (adjust) {
            adjust(config);
        }
        EXPECT_TRUE(config.scheduler.Normalise().ok());
        SimConfig sim;
        sim.model.vocab_size = kVocabulary;
        sim.model.eos_token_ids = {2};
        sim.first_token = 300;
        sim.last_token = 900;
        sim.max_num_seqs = config.scheduler.max_num_seqs;
        sim.num_blocks = config.scheduler.num_gpu_blocks;
        runner = std::make_unique<SimRunner>(sim, clock, std::make_unique<NoSleep>());
        core = std::make_unique<EngineCore>(config, *runner, clock);
    }

    void Input(std::uint8_t type, std::string_view payload, std::int32_t socket = 0) {
        core->OnInput(type, payload, {}, socket);
        Read();
    }
    void Add(const std::string& id, const std::function<void(wire::GenerateRequest&)>& adjust = {},
             std::int32_t socket = 0) {
        wire::GenerateRequest request;
        request.id = id;
        request.prompt_token_ids = {5, 6, 7};
        request.sampling.temperature = 0;
        request.sampling.max_tokens = 4;
        request.client_index = socket;
        if (adjust) {
            adjust(request);
        }
        std::string payload;
        vllm::EncodeAdd(request, payload);
        Input(0, payload, socket);
    }
    std::pair<std::string, std::string> Call(const std::string& method,
                                             const std::function<void(Writer&)>& args = {},
                                             std::size_t count = 0, std::int32_t client = 0) {
        std::string payload;
        Writer writer{payload};
        vllm::BeginUtility(writer, client, ++calls, method, count);
        if (args) {
            args(writer);
        }
        Input(3, payload, client);
        return clients[static_cast<std::size_t>(client)].replies.contains(calls)
                   ? clients[static_cast<std::size_t>(client)].replies[calls]
                   : std::pair<std::string, std::string>{"NO REPLY", ""};
    }
    bool Step() {
        const Result<bool> stepped = core->Step();
        EXPECT_TRUE(stepped.ok());
        Read();
        return stepped.ok() && *stepped;
    }
    void Run(int limit = 10'000) {
        while (limit-- > 0 && Step()) {
        }
    }
    void Read() {
        Outbox& outbox = core->outbox();
        for (std::size_t i = 0; i < outbox.size(); ++i) {
            const OutMessage& message = outbox[i];
            std::vector<std::string_view> frames{message.payload};
            for (std::size_t k = 0; k < message.aux.size(); ++k) {
                frames.push_back(message.aux[k]);
            }
            vllm::OutputsMessage decoded;
            ASSERT_TRUE(vllm::DecodeOutputs(frames, decoded).ok());
            EXPECT_EQ(decoded.engine_index, 3);
            EXPECT_FALSE(decoded.has_utility && (!decoded.rows.empty() || decoded.has_stats))
                << "families must not mix";
            EXPECT_TRUE(decoded.has_utility || !decoded.rows.empty() || decoded.has_stats)
                << "an empty message";
            Client& client =
                message.client < 0 ? coordinator : clients[static_cast<std::size_t>(message.client)];
            client.messages += 1;
            client.load_only += decoded.rows.empty() && decoded.has_stats ? 1 : 0;
            for (const wire::OutputRow& row : decoded.rows) {
                Client::Stream& stream = client.streams[std::string{row.request_id}];
                const auto tokens = decoded.TokensOf(row);
                stream.tokens.insert(stream.tokens.end(), tokens.begin(), tokens.end());
                if (row.terminal()) {
                    stream.finish = row.finish_reason;
                    stream.stop_reason = row.stop_reason();
                    stream.error = std::string{row.stop_string};
                    stream.terminals += 1;
                }
                if (row.num_cached_tokens >= 0) {
                    stream.cached = row.num_cached_tokens;
                }
            }
            if (decoded.has_stats) {
                client.loads.push_back(decoded.stats.load);
            }
            if (decoded.has_utility) {
                client.replies[decoded.utility.call_id] = {std::string{decoded.utility.failure_message},
                                                           std::string{decoded.utility.result}};
            }
            for (const std::string_view id : decoded.finished_requests) {
                client.finished.emplace_back(id);
            }
        }
        outbox.Clear();
    }
    Client::Stream& Stream(const std::string& id, std::size_t client = 0) {
        return clients[client].streams[id];
    }

    FakeClock clock;
    std::unique_ptr<SimRunner> runner;
    std::unique_ptr<EngineCore> core;
    Client clients[3];
    Client coordinator;
    std::uint64_t calls{0};
};

/// The healthy request of every bad-input test: it was running before, and it must end as if nothing had
/// happened.
class BadInput : public ::testing::Test {
  protected:
    void SetUp() override {
        f.Add("healthy", [](wire::GenerateRequest& r) { r.sampling.max_tokens = 20; });
        ASSERT_TRUE(f.Step());
    }
    void ExpectHealthy() {
        f.Run();
        EXPECT_EQ(f.Stream("healthy").finish, FinishReason::kLength);
        EXPECT_EQ(f.Stream("healthy").tokens.size(), 20u);
        EXPECT_EQ(f.Stream("healthy").terminals, 1);
        f.Add("after");
        f.Run();
        EXPECT_EQ(f.Stream("after").tokens.size(), 4u);
        const wire::LoadSnapshot load = f.core->Load();
        EXPECT_EQ(load.num_running + load.num_waiting + load.kv_active_pages, 0);
    }
    void ExpectError(const std::string& id, const std::string& naming = "") {
        f.Step();
        EXPECT_EQ(f.Stream(id).finish, FinishReason::kError) << id;
        EXPECT_EQ(f.Stream(id).terminals, 1) << id;
        EXPECT_NE(f.Stream(id).error.find(naming), std::string::npos) << f.Stream(id).error;
    }
    /// ["bad", prompt, nil, sampling map, nil, 1.0, nil, nil, nil] with the parts given as raw msgpack.
    static std::string RawAdd(
        const std::function<void(Writer&)>& prompt, const std::function<void(Writer&)>& sampling,
        const std::function<void(Writer&)>& pooling = [](Writer& w) { w.Nil(); }) {
        std::string bytes;
        Writer w{bytes};
        w.Array(9);
        w.Str("bad");
        prompt(w);
        w.Nil();
        sampling(w);
        pooling(w);
        w.Float(1.0);
        w.Nil();
        w.Nil();
        w.Nil();
        return bytes;
    }
    static void GoodPrompt(Writer& w) {
        w.Array(3);
        w.Int(1);
        w.Int(2);
        w.Int(3);
    }
    static std::function<void(Writer&)> Sampling(const std::string& key,
                                                 const std::function<void(Writer&)>& value) {
        return [=](Writer& w) {
            w.Map(2);
            w.Str("max_tokens");
            w.Int(4);
            w.Str(key);
            value(w);
        };
    }
    Fixture f;
};

TEST_F(BadInput, UndecodableMessagesAreIgnoredAndCounted) {
    const std::string add = RawAdd(GoodPrompt, [](Writer& w) { w.Map(0); });
    std::string invalid_utf8;
    Writer w{invalid_utf8};
    w.Array(9);
    invalid_utf8 += "\xa2\xff\xfe";
    const std::string cases[] = {"", "\xc1", "\xdd\xff\xff\xff\xff", "\x91", "\x05", "\x80", invalid_utf8};
    const std::uint64_t before = f.core->counters().ignored;
    for (const std::string& bytes : cases) {
        f.Input(0, bytes);
        f.Input(1, bytes);
        f.Input(3, bytes);
    }
    for (const std::uint8_t type : {std::uint8_t{4}, std::uint8_t{5}, std::uint8_t{7}, std::uint8_t{255}}) {
        f.Input(type, add);
    }
    EXPECT_GE(f.core->counters().ignored, before + 4 + 14);
    ExpectHealthy();
}

TEST_F(BadInput, TruncationAtEveryByteNeverHurtsAnybody) {
    const std::string add = RawAdd(GoodPrompt, Sampling("temperature", [](Writer& w) { w.Float(0.5); }));
    for (std::size_t size = 0; size < add.size(); ++size) {
        f.Input(0, std::string_view{add}.substr(0, size));
    }
    f.Step();
    EXPECT_LE(f.clients[0].streams.size(), 2u) << "healthy, and at most the one whose id could be read";
    ExpectHealthy();
}

TEST_F(BadInput, FewerThanNineElementsIsAnErrorForThatRequest) {
    std::string bytes;
    Writer w{bytes};
    w.Array(8);
    w.Str("bad");
    GoodPrompt(w);
    w.Nil();
    w.Map(0);
    w.Nil();
    w.Float(1.0);
    w.Nil();
    w.Nil();
    f.Input(0, bytes);
    ExpectError("bad");
    ExpectHealthy();
}

TEST_F(BadInput, TrailingBytesAreAnErrorOrIgnored) {
    f.Input(0, RawAdd(GoodPrompt, [](Writer& w) { w.Map(0); }) + "\xc0");
    f.Run();
    ExpectHealthy();
}

TEST_F(BadInput, WrongTypesAreAnErrorThatNamesTheField) {
    const auto text = [](Writer& w) { w.Str("x"); };
    const auto real = [](Writer& w) { w.Float(1.5); };
    const auto flag = [](Writer& w) { w.Bool(true); };
    const auto nil = [](Writer& w) { w.Nil(); };
    const std::pair<std::string, std::function<void(Writer&)>> cases[] = {
        {"temperature", text},
        {"temperature", nil},
        {"top_k", real},
        {"logprobs", flag},
        {"ignore_eos", [](Writer& w) { w.Int(1); }},
        {"seed", real},
        {"max_tokens", real},
        {"stop_token_ids", text},
        {"logit_bias",
         [](Writer& w) {
             w.Map(1);
             w.Str("5");
             w.Float(1);
         }},
    };
    int n = 0;
    for (const auto& [key, value] : cases) {
        std::string bytes = RawAdd(GoodPrompt, Sampling(key, value));
        // Each under an id of its own.
        const std::string id = "bad" + std::to_string(n++);
        bytes.replace(1, 4, std::string(1, static_cast<char>(0xa0 + id.size())) + id);
        f.Input(0, bytes);
        ExpectError(id, key);
    }
    f.Input(0, RawAdd(
                   [](Writer& w) {
                       w.Array(1);
                       w.Float(1.0);
                   },
                   [](Writer& w) { w.Map(0); }));
    ExpectError("bad");
    ExpectHealthy();
}

TEST_F(BadInput, ANumericRequestIdIsIgnored) {
    std::string bytes = RawAdd(GoodPrompt, [](Writer& w) { w.Map(0); });
    bytes.replace(1, 4, "\x05");
    f.Input(0, bytes);
    ExpectHealthy();
}

TEST_F(BadInput, ValuesOutOfRangeAreAnError) {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    const double inf = std::numeric_limits<double>::infinity();
    const std::pair<std::string, std::function<void(wire::GenerateRequest&)>> cases[] = {
        {"temperature", [](auto& r) { r.sampling.temperature = 2.1; }},
        {"temperature", [=](auto& r) { r.sampling.temperature = nan; }},
        {"temperature", [=](auto& r) { r.sampling.temperature = inf; }},
        {"top_p", [](auto& r) { r.sampling.top_p = 0; }},
        {"top_p", [](auto& r) { r.sampling.top_p = 1.5; }},
        {"min_p", [](auto& r) { r.sampling.min_p = 1.1; }},
        {"presence_penalty", [](auto& r) { r.sampling.presence_penalty = 2.5; }},
        {"frequency_penalty", [](auto& r) { r.sampling.frequency_penalty = -2.5; }},
        {"repetition_penalty", [](auto& r) { r.sampling.repetition_penalty = 0; }},
        {"max_tokens", [](auto& r) { r.sampling.max_tokens = 0; }},
        {"min_tokens", [](auto& r) { r.sampling.min_tokens = 5; }},
        {"min_tokens", [](auto& r) { r.sampling.min_tokens = -1; }},
        {"logprobs", [](auto& r) { r.sampling.logprobs = -2; }},
        {"logprobs", [](auto& r) { r.sampling.logprobs = kVocabulary + 1; }},
        {"prompt_logprobs", [](auto& r) { r.sampling.prompt_logprobs = -5; }},
        {"bad_words", [](auto& r) { r.sampling.bad_words_token_ids = {{}}; }},
        {"logit_bias",
         [](auto& r) {
             r.sampling.logit_bias = {{kVocabulary, 1.0}};
         }},
        {"allowed_token_ids",
         [](auto& r) { r.sampling.allowed_token_ids = std::vector<TokenId>{kVocabulary}; }},
        {"stop_token_ids",
         [](auto& r) {
             r.sampling.all_stop_token_ids = {kVocabulary};
             r.sampling.min_tokens = 1;
         }},
        {"prompt", [](auto& r) { r.prompt_token_ids.clear(); }},
        {"prompt", [](auto& r) { r.prompt_token_ids = {-1}; }},
        {"prompt", [](auto& r) { r.prompt_token_ids = {kVocabulary}; }},
        {"prompt", [](auto& r) { r.prompt_token_ids.assign(512, 5); }},
        {"prompt", [](auto& r) { r.prompt_token_ids.assign(600, 5); }},
        {"lora",
         [](auto& r) {
             r.lora = wire::LoraRequest{"x", 1, "/x", {}};
         }},
        {"structured_outputs", [](auto& r) { r.sampling.structured_outputs = wire::StructuredOutputs{}; }},
    };
    int n = 0;
    for (const auto& [field, change] : cases) {
        const std::string id = "bad" + std::to_string(n++) + field;
        f.Add(id, [&](wire::GenerateRequest& r) {
            r.sampling.temperature = 1;  // the encoder writes no top_p and the like for a greedy request
            change(r);
        });
        ExpectError(id, field);
        EXPECT_TRUE(f.Stream(id).tokens.empty());
    }
    EXPECT_EQ(f.core->counters().refused, std::size(cases));
    // What no encoder of ours can be made to write.
    f.Input(0, RawAdd(GoodPrompt, Sampling("temperature", [](Writer& w) { w.Float(-0.1); })));
    ExpectError("bad", "temperature");
    f.clients[0].streams.erase("bad");
    f.Input(0, RawAdd(GoodPrompt, Sampling("top_k", [](Writer& w) { w.Int(-2); })));
    ExpectError("bad", "top_k");
    f.clients[0].streams.erase("bad");
    f.Input(0, RawAdd(GoodPrompt, Sampling("thinking_token_budget", [](Writer& w) { w.Int(-2); })));
    ExpectError("bad", "thinking_token_budget");
    ExpectHealthy();
}

TEST_F(BadInput, PromptTokenIdsFarBeyondIntAreAnError) {
    for (const std::uint64_t id : {std::uint64_t{1} << 40, std::uint64_t{1} << 63}) {
        f.Input(0, RawAdd(
                       [&](Writer& w) {
                           w.Array(1);
                           w.Uint(id);
                       },
                       [](Writer& w) { w.Map(0); }));
        ExpectError("bad");
        f.clients[0].streams.erase("bad");
    }
    ExpectHealthy();
}

TEST_F(BadInput, OddButHarmlessValuesAreServed) {
    f.Add("longest", [](auto& r) { r.prompt_token_ids.assign(511, 5); });
    f.Add("many", [](auto& r) { r.sampling.max_tokens = 1'000'000'000'000; });
    f.Add("", [](auto&) {});
    f.Add("oov stop", [](auto& r) { r.sampling.stop_token_ids = {-1, 99999}; });
    f.Add("big top_k", [](auto& r) { r.sampling.top_k = 1'000'000'000; });
    f.Add("eos -1", [](auto& r) { r.sampling.eos_token_id = -1; });
    f.Add("seed", [](auto& r) { r.sampling.seed = -7; });
    f.Add("wave", [](auto& r) { r.current_wave = 99; });
    f.Run();
    EXPECT_EQ(f.Stream("longest").tokens.size(), 1u);
    EXPECT_EQ(f.Stream("longest").finish, FinishReason::kLength);
    EXPECT_EQ(f.Stream("many").tokens.size(), 509u);
    EXPECT_EQ(f.Stream("many").finish, FinishReason::kLength);
    for (const char* id : {"", "oov stop", "big top_k", "eos -1", "seed", "wave"}) {
        EXPECT_EQ(f.Stream(id).tokens.size(), 4u) << id;
    }
    ExpectHealthy();
}

TEST_F(BadInput, ALiveIdAgainLeavesTheFirstAlone) {
    f.Add("healthy");
    f.Input(0, RawAdd(GoodPrompt, [](Writer& w) { w.Map(0); }).replace(1, 4, "\xa7healthy"));
    EXPECT_EQ(f.core->counters().duplicates, 2u);
    ExpectHealthy();
}

TEST_F(BadInput, ALiveIdFromAnotherClientIsAnErrorForThatClientOnly) {
    f.Add("healthy", {}, 1);
    f.Step();
    EXPECT_EQ(f.Stream("healthy", 1).finish, FinishReason::kError);
    EXPECT_EQ(f.Stream("healthy", 0).terminals, 0);
    ExpectHealthy();
}

TEST_F(BadInput, AnIdMayBeReusedAfterItsEnd) {
    f.Add("again");
    f.Run();
    f.Add("again");
    f.Run();
    EXPECT_EQ(f.Stream("again").terminals, 2);
    EXPECT_EQ(f.Stream("again").tokens.size(), 8u);
}

TEST_F(BadInput, AClientIndexNobodyListensOnIsAnswered) {
    f.Add(
        "bad", [](auto& r) { r.client_index = 7; }, 0);
    ExpectError("bad", "client_index");
    f.Add(
        "bad-1", [](auto& r) { r.client_index = -1; }, 0);
    ExpectError("bad-1", "client_index");
    std::string payload;
    Writer writer{payload};
    vllm::BeginUtility(writer, 9, 77, "is_sleeping", 0);
    f.Input(3, payload, 1);
    EXPECT_NE(f.clients[1].replies[77].first.find("client 9"), std::string::npos);
    ExpectHealthy();
}

TEST_F(BadInput, AbortsOfAnyShapeHurtNobody) {
    std::string ids;
    Writer w{ids};
    w.Array(3);
    w.Str("unknown");
    w.Int(1);
    w.Nil();
    f.Input(1, ids);
    for (const std::string& bytes : {std::string{"\x05"}, std::string{"\xc0"}, std::string{"\x80"},
                                     std::string{"\xa1x"}, std::string{"\x90"}}) {
        f.Input(1, bytes);
    }
    ExpectHealthy();
}

TEST_F(BadInput, UtilityCallsOfAnyShapeAreAnsweredOrIgnored) {
    EXPECT_NE(f.Call("no_such_method").first.find("no such method"), std::string::npos);
    EXPECT_NE(f.Call("__class__").first, "");
    EXPECT_NE(f.Call(
                   "is_sleeping", [](Writer& w) { w.Int(1); }, 1)
                  .first,
              "");
    EXPECT_NE(f.Call(
                   "pause_scheduler",
                   [](Writer& w) {
                       w.Str("sideways");
                       w.Bool(true);
                   },
                   2)
                  .first,
              "");
    EXPECT_NE(f.Call(
                   "sleep", [](Writer& w) { w.Str("deep"); }, 1)
                  .first,
              "");
    std::string nil_args;
    Writer w{nil_args};
    w.Array(4);
    w.Int(0);
    w.Int(900);
    w.Str("is_sleeping");
    w.Nil();
    f.Input(3, nil_args);
    std::string three;
    Writer w3{three};
    w3.Array(3);
    w3.Int(0);
    w3.Int(901);
    w3.Str("is_sleeping");
    f.Input(3, three);
    std::string number;
    Writer w4{number};
    w4.Array(4);
    w4.Int(0);
    w4.Int(902);
    w4.Int(5);
    w4.Array(0);
    f.Input(3, number);
    EXPECT_FALSE(f.core->sleeping());
    ExpectHealthy();
}

TEST_F(BadInput, AWaveStartOnAnIndependentRankIsIgnored) {
    std::string wave;
    vllm::EncodeStartDpWave(vllm::StartDpWave{3, 1}, wave);
    f.Input(2, wave);
    f.Input(2, wave, -1);
    ExpectHealthy();
}

TEST(EngineCore, UnsignedCallIdsComeBackUnchanged) {
    Fixture f;
    std::string payload;
    Writer writer{payload};
    vllm::BeginUtility(writer, 0, 0xfedcba9876543210ULL, "is_sleeping", 0);
    f.Input(3, payload);
    ASSERT_TRUE(f.clients[0].replies.contains(0xfedcba9876543210ULL));
}

TEST(EngineCore, GreedyTokensAreThoseOfTheRunnerWhateverTheBatch) {
    Fixture alone;
    alone.Add("x", [](auto& r) { r.sampling.max_tokens = 30; });
    alone.Run();
    Fixture crowd;
    for (int i = 0; i < 20; ++i) {
        crowd.Add(std::to_string(i),
                  [&](auto& r) { r.prompt_token_ids.assign(static_cast<std::size_t>(i) + 1, i); });
    }
    crowd.Add("x", [](auto& r) { r.sampling.max_tokens = 30; });
    crowd.Run();
    EXPECT_EQ(alone.Stream("x").tokens, crowd.Stream("x").tokens);
    EXPECT_EQ(alone.Stream("x").tokens.size(), 30u);
}

TEST(EngineCore, OutputsGoToTheClientThatAsked) {
    Fixture f;
    f.Add("a", {}, 0);
    f.Add("b", {}, 1);
    f.Run();
    EXPECT_EQ(f.Stream("a", 0).tokens.size(), 4u);
    EXPECT_EQ(f.Stream("b", 1).tokens.size(), 4u);
    EXPECT_FALSE(f.clients[0].streams.contains("b"));
    EXPECT_FALSE(f.clients[1].streams.contains("a"));
}

TEST(EngineCore, TheTerminalMessageAlreadyShowsTheFreedRank) {
    Fixture f;
    f.Add("a");
    f.Add("b", [](auto& r) { r.sampling.max_tokens = 2; });
    f.Run();
    const wire::LoadSnapshot last = f.clients[0].loads.back();
    EXPECT_EQ(last.num_running, 0);
    EXPECT_EQ(last.num_waiting, 0);
    EXPECT_EQ(last.kv_usage, 0.0);
    // The message that ended b showed a alone.
    EXPECT_EQ(f.clients[0].loads[1].num_running, 1);
}

TEST(EngineCore, TheUpstreamSampleOrderWouldLeaveAStaleLoad) {
    Fixture f{[](CoreConfig& c) { c.stale_load = true; }};
    f.Add("a");
    f.Run();
    f.clock.Advance(std::chrono::seconds(10));
    f.Step();
    EXPECT_EQ(f.clients[0].loads.back().num_running, 1);
    EXPECT_GT(f.clients[0].loads.back().kv_usage, 0.0);
}

TEST(EngineCore, AnAbortThatEmptiesTheRankIsToldAtOnce) {
    Fixture f;
    f.Add("a", [](auto& r) { r.sampling.max_tokens = 400; });
    f.Step();
    EXPECT_EQ(f.clients[0].loads.back().num_running, 1);
    std::string abort;
    vllm::EncodeAbort("a", abort);
    f.Input(1, abort);
    EXPECT_EQ(f.core->counters().aborts, 1u);
    EXPECT_LE(f.core->next_due(), f.clock.Now());
    EXPECT_FALSE(f.Step());
    EXPECT_EQ(f.clients[0].load_only, 1);
    EXPECT_EQ(f.clients[0].loads.back().num_running, 0);
    EXPECT_EQ(f.Stream("a").terminals, 0) << "a client's abort has no row";
    EXPECT_EQ(f.clients[1].load_only, 0) << "this client never heard of the load";
    EXPECT_FALSE(f.Step());
    EXPECT_EQ(f.clients[0].load_only, 1) << "said once";
}

TEST(EngineCore, OtherChangesWithoutTokensAreRateLimited) {
    Fixture f{[](CoreConfig& c) {
        c.scheduler.max_num_seqs = 1;
        c.num_clients = 1;
    }};
    f.clock.Advance(std::chrono::seconds(1));
    f.Add("running", [](auto& r) { r.sampling.max_tokens = 400; });
    f.Step();
    const auto pause = [](Writer& w) {
        w.Str("keep");
        w.Bool(false);
    };
    EXPECT_EQ(f.Call("pause_scheduler", pause, 2).first, "");
    for (int i = 0; i < 10; ++i) {
        f.Add("queued" + std::to_string(i));
        EXPECT_FALSE(f.Step());
    }
    EXPECT_EQ(f.clients[0].load_only, 0);
    EXPECT_GT(f.core->next_due(), f.clock.Now());
    f.clock.Advance(std::chrono::milliseconds(100));
    f.Step();
    EXPECT_EQ(f.clients[0].load_only, 1);
    EXPECT_EQ(f.clients[0].loads.back().num_waiting, 10);
}

TEST(EngineCore, ALongPrefillWithoutTokensKeepsTellingTheQueue) {
    Fixture f{[](CoreConfig& c) { c.scheduler.max_num_batched_tokens = 16; }};
    f.clock.Advance(std::chrono::seconds(1));
    f.Add("long", [](auto& r) { r.prompt_token_ids.assign(480, 5); });
    for (int i = 0; i < 25; ++i) {
        f.Step();
        f.clock.Advance(std::chrono::milliseconds(10));
        f.Add("queued" + std::to_string(i));
    }
    EXPECT_GE(f.clients[0].load_only, 2);
    EXPECT_LE(f.clients[0].load_only, 4);
}

TEST(EngineCore, PauseKeepFreezesAndResumeContinues) {
    Fixture f;
    f.Add("a", [](auto& r) { r.sampling.max_tokens = 6; });
    f.Step();
    EXPECT_EQ(f.Call(
                   "pause_scheduler",
                   [](Writer& w) {
                       w.Str("keep");
                       w.Bool(false);
                   },
                   2)
                  .first,
              "");
    EXPECT_EQ(f.Call("is_scheduler_paused").second, "\xc3");
    EXPECT_FALSE(f.Step());
    f.Add("b");
    EXPECT_FALSE(f.Step()) << "queued while paused";
    EXPECT_EQ(f.Call("resume_scheduler").first, "");
    f.Run();
    EXPECT_EQ(f.Stream("a").tokens.size(), 6u);
    EXPECT_EQ(f.Stream("b").tokens.size(), 4u);
}

TEST(EngineCore, PauseWaitAnswersWhenTheRunningOnesAreDone) {
    Fixture f;
    f.Add("a", [](auto& r) { r.sampling.max_tokens = 3; });
    f.Step();
    const auto reply = f.Call(
        "pause_scheduler",
        [](Writer& w) {
            w.Str("wait");
            w.Bool(false);
        },
        2);
    EXPECT_EQ(reply.first, "NO REPLY");
    f.Add("b");
    f.Step();
    EXPECT_FALSE(f.clients[0].replies.contains(f.calls));
    f.Step();
    EXPECT_EQ(f.Stream("a").terminals, 1);
    EXPECT_TRUE(f.clients[0].replies.contains(f.calls));
    EXPECT_FALSE(f.Step());
    f.Call("resume_scheduler");
    f.Run();
    EXPECT_EQ(f.Stream("b").tokens.size(), 4u);
}

TEST(EngineCore, PauseAbortEndsEverythingFirst) {
    Fixture f;
    f.Add("a", [](auto& r) { r.sampling.max_tokens = 50; });
    f.Step();
    f.Add("queued");
    EXPECT_EQ(f.Call(
                   "pause_scheduler",
                   [](Writer& w) {
                       w.Str("abort");
                       w.Bool(true);
                   },
                   2)
                  .first,
              "");
    EXPECT_EQ(f.Stream("a").finish, FinishReason::kAbort);
    EXPECT_EQ(f.Stream("queued").finish, FinishReason::kAbort);
    EXPECT_EQ(f.clients[0].loads.back().num_running, 0);
}

TEST(EngineCore, SleepAndWakeUp) {
    Fixture f;
    EXPECT_EQ(f.Call("is_sleeping").second, "\xc2");
    EXPECT_EQ(f.Call(
                   "sleep",
                   [](Writer& w) {
                       w.Int(1);
                       w.Str("abort");
                   },
                   2)
                  .first,
              "");
    EXPECT_EQ(f.Call("is_sleeping").second, "\xc3");
    f.Add("a");
    EXPECT_FALSE(f.Step());
    EXPECT_EQ(f.Call(
                   "wake_up", [](Writer& w) { w.Nil(); }, 1)
                  .first,
              "");
    EXPECT_EQ(f.Call("is_sleeping").second, "\xc2");
    f.Run();
    EXPECT_EQ(f.Stream("a").tokens.size(), 4u);
}

TEST(EngineCore, ResetPrefixCacheSaysWhetherItCouldAndPreemptsOnDemand) {
    Fixture f;
    f.Add("a", [](auto& r) { r.sampling.max_tokens = 6; });
    f.Step();
    EXPECT_EQ(f.Call("reset_prefix_cache").second, "\xc2");
    EXPECT_EQ(f.Call(
                   "reset_prefix_cache",
                   [](Writer& w) {
                       w.Bool(true);
                       w.Bool(false);
                   },
                   2)
                  .second,
              "\xc3");
    f.Run();
    EXPECT_EQ(f.Stream("a").tokens.size(), 6u);
    Fixture same;
    same.Add("a", [](auto& r) { r.sampling.max_tokens = 6; });
    same.Run();
    EXPECT_EQ(f.Stream("a").tokens, same.Stream("a").tokens);
}

TEST(EngineCore, TasksAndLoraAnswers) {
    Fixture f;
    std::string expected;
    Writer w{expected};
    w.Array(1);
    w.Str("generate");
    EXPECT_EQ(f.Call("get_supported_tasks").second, expected);
    EXPECT_NE(f.Call("list_loras").first, "");
    EXPECT_NE(f.Call(
                   "add_lora", [](Writer& x) { x.Nil(); }, 1)
                  .first,
              "");
    EXPECT_NE(f.Call(
                   "profile", [](Writer& x) { x.Bool(true); }, 1)
                  .first,
              "");
}

TEST(EngineCore, DrainEndsWhatRunsWithAbortAndRefusesWhatComes) {
    Fixture f;
    f.Add("a", [](auto& r) { r.sampling.max_tokens = 50; });
    f.Step();
    f.core->Drain();
    f.Read();
    EXPECT_EQ(f.Stream("a").finish, FinishReason::kAbort);
    f.Add("late");
    f.Step();
    EXPECT_EQ(f.Stream("late").finish, FinishReason::kAbort);
}

TEST(EngineCore, ACoordinatorGetsCountsAndClientsTheFinishedIds) {
    Fixture f{[](CoreConfig& c) { c.has_coordinator = true; }};
    f.Add("a");
    f.Add("b", [](auto& r) { r.sampling.max_tokens = 400; });
    f.Step();
    ASSERT_FALSE(f.coordinator.loads.empty());
    EXPECT_EQ(f.coordinator.loads.back().num_running, 2);
    std::string abort;
    vllm::EncodeAbort("b", abort);
    f.Input(1, abort);
    f.Run();
    EXPECT_EQ(f.coordinator.loads.back().num_running, 0);
    EXPECT_EQ(f.clients[0].finished, (std::vector<std::string>{"b", "a"}));
}

TEST(EngineCore, ReportsCachedPromptTokensOnTheFirstRow) {
    Fixture f;
    const auto prompt = [](auto& r) { r.prompt_token_ids.assign(40, 9); };
    f.Add("a", prompt);
    f.Run();
    f.Add("b", prompt);
    f.Run();
    EXPECT_EQ(f.Stream("a").cached, 0);
    EXPECT_EQ(f.Stream("b").cached, 32);
}

TEST(EngineCore, AFailingRunnerIsTheOnlyDeath) {
    class Broken final : public ModelRunner {
      public:
        const ModelFacts& facts() const noexcept override { return facts_; }
        Status Check(const wire::GenerateRequest&) noexcept override { return Status::Ok(); }
        Placement Place(const Sequence&, std::span<const std::int32_t> slots) noexcept override {
            return {slots.front(), 0};
        }
        Status Run(const StepPlan&, StepResult&) noexcept override {
            return Error{ErrorCode::kEngineError, "broken", {}, false};
        }
        void ResetPrefixCache() noexcept override {}

      private:
        ModelFacts facts_;
    };
    Broken runner;
    FakeClock clock;
    CoreConfig config;
    ASSERT_TRUE(config.scheduler.Normalise().ok());
    EngineCore core{config, runner, clock};
    EXPECT_TRUE(core.Step().ok());
    wire::GenerateRequest request;
    request.id = "a";
    request.prompt_token_ids = {1};
    std::string payload;
    vllm::EncodeAdd(request, payload);
    core.OnInput(0, payload, {}, 0);
    EXPECT_FALSE(core.Step().ok());
}

}  // namespace
}  // namespace rankgate::engine
