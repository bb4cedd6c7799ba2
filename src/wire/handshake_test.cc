// SPDX-License-Identifier: Apache-2.0
#include "wire/handshake.h"

#include <gtest/gtest.h>

#include <boost/json.hpp>

#include "wire/msgpack.h"
#include "wire/test_vectors.h"

namespace rankgate::wire {
namespace {

using test::FromHex;
using test::LoadVectors;
using test::ToHex;
using test::Vector;

std::string Greet(const Greeting& greeting, Dialect dialect) {
    std::string out;
    EncodeGreeting(greeting, dialect, out);
    return out;
}

TEST(Identity, IsTheRankAsTwoBytesLittleEndian) {
    for (const Vector& vector : LoadVectors("tokenspeed/handshake")) {
        if (vector.name != "routing_identities") {
            continue;
        }
        for (const auto& [rank, identity] : vector.fields.as_object()) {
            const int index = std::stoi(std::string{rank});
            EXPECT_EQ(ToHex(RankIdentity(index)), identity.as_string());
            EXPECT_EQ(RankOfIdentity(FromHex(identity.as_string())), index);
        }
        EXPECT_FALSE(RankOfIdentity("").has_value());
        EXPECT_FALSE(RankOfIdentity("a").has_value());
        EXPECT_FALSE(RankOfIdentity("abcde").has_value());
        return;
    }
    FAIL() << "no routing_identities vector";
}

/// Every captured handshake message: decodes, says what the bytes say, and encodes back to the same bytes.
void CheckGreeting(const std::string& payload, Dialect dialect, const std::string& name) {
    const Result<Greeting> greeting = DecodeGreeting(payload);
    ASSERT_TRUE(greeting.ok()) << name << ": " << greeting.error().message;
    EXPECT_EQ(greeting->names_hash,
              dialect == Dialect::kTokenSpeed || greeting->parallel_config_hash.has_value());
    EXPECT_EQ(ToHex(Greet(*greeting, dialect)), ToHex(payload)) << name;
}

void CheckReady(const std::string& payload, Dialect dialect, const std::string& name) {
    const Result<ReadyResponse> ready = DecodeReadyResponse(payload);
    ASSERT_TRUE(ready.ok()) << name << ": " << ready.error().message;
    const boost::json::object fields = test::ToJson(payload).as_object();
    const auto number = [&fields](const char* key) { return fields.at(key).to_number<std::int64_t>(); };
    EXPECT_EQ(ready->max_model_len, number("max_model_len")) << name;
    EXPECT_EQ(ready->num_gpu_blocks, number("num_gpu_blocks")) << name;
    EXPECT_EQ(ready->data_parallel_size, number("data_parallel_size")) << name;
    EXPECT_EQ(ready->vllm_version, fields.at("vllm_version").as_string()) << name;
    std::string again;
    EncodeReadyResponse(*ready, dialect, again);
    std::string expected = payload;
    if (ready->prefix_granularity_spelling) {
        // Read in both spellings, written in the one that every frontend takes.
        const std::string newer = std::string{"\xb2"} + "prefix_granularity";
        const std::size_t at = expected.find(newer);
        ASSERT_NE(at, std::string::npos);
        expected.replace(at, newer.size(), std::string{"\xaa"} + "block_size");
    }
    // One vector abridges kv_events_config, which is written in full here.
    if (fields.size() == (dialect == Dialect::kVllm ? 25U : 19U) && name != "registration_optional_values") {
        EXPECT_EQ(ToHex(again), ToHex(expected)) << name;
    }
}

TEST(HandshakeVectors, EveryVllmMessageDecodesAndEncodesToTheSameBytes) {
    int greetings = 0;
    int inits = 0;
    int readies = 0;
    for (const char* file :
         {"handshake.dp1", "handshake.dense_dp2", "handshake.moe_dp2", "handshake.moe_dp2_coord",
          "handshake.asyncllm_dp1", "handshake.asyncllm_moe_dp2"}) {
        for (const Vector& vector : LoadVectors(std::string{"vllm/"} + file)) {
            const std::string name = std::string{file} + " " + vector.name;
            if (vector.frames.size() < 2) {
                continue;  // subscriptions and the coordinator's READY
            }
            const std::string& payload = vector.frames[1];
            EXPECT_TRUE(RankOfIdentity(vector.frames[0]).has_value());
            const boost::json::value fields = test::ToJson(payload);
            if (vector.direction == "frontend->engine") {
                const Result<InitMessage> init = DecodeInit(payload);
                ASSERT_TRUE(init.ok()) << name << ": " << init.error().message;
                std::string again;
                EncodeInit(*init, again);
                EXPECT_EQ(ToHex(again), ToHex(payload)) << name;
                EXPECT_FALSE(init->inputs.empty());
                ++inits;
            } else if (fields.as_object().contains("status")) {
                CheckGreeting(payload, Dialect::kVllm, name);
                ++greetings;
            } else {
                CheckReady(payload, Dialect::kVllm, name);
                EXPECT_EQ(DecodeReadyResponse(payload)->dialect, Dialect::kVllm) << name;
                ++readies;
            }
        }
    }
    EXPECT_EQ(greetings, 20);
    EXPECT_EQ(inits, 10);
    EXPECT_EQ(readies, 10);
}

TEST(HandshakeVectors, LockstepRanksAreToldByDataParallelSize) {
    const auto size_of = [](const char* file) {
        for (const Vector& vector : LoadVectors(file)) {
            if (vector.frames.size() == 2) {
                if (const Result<ReadyResponse> ready = DecodeReadyResponse(vector.frames[1]); ready.ok()) {
                    return ready->data_parallel_size;
                }
            }
        }
        return std::int64_t{-1};
    };
    EXPECT_EQ(size_of("vllm/handshake.dense_dp2"), 1);
    EXPECT_EQ(size_of("vllm/handshake.moe_dp2"), 2);
}

TEST(HandshakeVectors, EveryTokenSpeedMessageDecodesAndEncodesToTheSameBytes) {
    int seen = 0;
    for (const Vector& vector : LoadVectors("tokenspeed/handshake")) {
        if (vector.frames.empty()) {
            continue;
        }
        ++seen;
        const std::string& payload = vector.frames[0];
        if (vector.name == "hello" || vector.name == "ready") {
            CheckGreeting(payload, Dialect::kTokenSpeed, vector.name);
        } else if (vector.name.rfind("registration", 0) == 0) {
            CheckReady(payload, Dialect::kTokenSpeed, vector.name);
            EXPECT_EQ(DecodeReadyResponse(payload)->dialect, Dialect::kTokenSpeed) << vector.name;
        } else {
            const Result<InitMessage> init = DecodeInit(payload);
            EXPECT_EQ(init.ok(), vector.outcome == "accept") << vector.name;
            if (init.ok() && (vector.name == "init" || vector.name == "init_tcp")) {
                std::string again;
                EncodeInit(*init, again);
                EXPECT_EQ(ToHex(again), ToHex(payload)) << vector.name;
            }
            if (init.ok()) {
                const boost::json::object& addresses = vector.fields.at("addresses").as_object();
                EXPECT_EQ(init->inputs.front(), addresses.at("inputs").at(0).as_string()) << vector.name;
                EXPECT_EQ(init->outputs.size(), addresses.at("outputs").as_array().size()) << vector.name;
            }
        }
    }
    EXPECT_EQ(seen, 14);
}

TEST(HandshakeVectors, RegistrationsThatThePublicGatewayTakesAreTaken) {
    int seen = 0;
    for (const Vector& vector : LoadVectors("tokenspeed/smg_accepts")) {
        if (vector.name.rfind("registration", 0) != 0) {
            continue;
        }
        ++seen;
        const Result<ReadyResponse> ready = DecodeReadyResponse(vector.frames[0]);
        // Both spellings at once: the first one counts here, where the public gateway gives up the engine.
        const bool expected = vector.outcome == "accept" || vector.name == "registration_both_spellings";
        EXPECT_EQ(ready.ok(), expected) << vector.name << (ready.ok() ? "" : ready.error().message);
        if (ready.ok()) {
            EXPECT_EQ(ready->block_size, 16) << vector.name;
            EXPECT_EQ(ready->dialect, Dialect::kTokenSpeed) << vector.name;
        } else {
            EXPECT_FALSE(ready.error().param.empty()) << vector.name;
        }
        if (vector.name == "registration_batched_tokens_minus_1") {
            EXPECT_EQ(ready->max_num_batched_tokens, -1);
        }
    }
    EXPECT_EQ(seen, 9);
}

TEST(HandshakeVectors, GreetingsOfThePublicGatewaysEngineDecode) {
    int seen = 0;
    for (const Vector& vector : LoadVectors("tokenspeed/smg_frontend")) {
        if (vector.socket == "handshake" && vector.direction == "engine->frontend") {
            CheckGreeting(vector.frames.back(), Dialect::kTokenSpeed, vector.name);
            ++seen;
        } else if (vector.socket == "handshake") {
            const Result<InitMessage> init = DecodeInit(vector.frames.back());
            ASSERT_TRUE(init.ok()) << vector.name;
            std::string again;
            EncodeInit(*init, again);
            EXPECT_EQ(ToHex(again), ToHex(vector.frames.back())) << vector.name;
            ++seen;
        }
    }
    EXPECT_GE(seen, 3);
}

TEST(Handshake, DialectIsSniffedFromVersionOrKeys) {
    ReadyResponse ready;
    ready.vllm_version = "0.32.0";
    std::string out;
    EncodeReadyResponse(ready, Dialect::kVllm, out);
    EXPECT_EQ(DecodeReadyResponse(out)->dialect, Dialect::kVllm);
    ready.vllm_version = "tokenspeed-9.9";
    out.clear();
    EncodeReadyResponse(ready, Dialect::kTokenSpeed, out);
    EXPECT_EQ(DecodeReadyResponse(out)->dialect, Dialect::kTokenSpeed);
    EXPECT_FALSE(DecodeGreeting(Greet({}, Dialect::kVllm))->names_hash);
    EXPECT_TRUE(DecodeGreeting(Greet({}, Dialect::kTokenSpeed))->names_hash);
}

TEST(Handshake, ReadyResponseKeepsEveryFieldThroughBothDialects) {
    ReadyResponse ready;
    ready.max_model_len = 4096;
    ready.num_gpu_blocks = 1000;
    ready.block_size = 16;
    ready.dtype = "float16";
    ready.vllm_version = "0.32.0";
    ready.data_parallel_size = 3;
    ready.data_parallel_rank = 2;
    ready.supports_lora = true;
    ready.max_loras = 4;
    ready.mamba_block_size = 8;
    ready.kv_cache_size_tokens = 16000;
    ready.kv_cache_max_concurrency = 3.5;
    ready.kv_events_config = KvEventsConfig{true, "zmq", "tcp://*:5557", "tcp://*:5657", 10, 20, 30, "kv"};
    ready.weight_transfer_backend = "nccl";
    ready.enable_sleep_mode = true;
    ready.supports_draft_weight_updates = true;
    ready.effective_attention_block_size = 32;
    ready.rankgate_load_mailbox = "/run/rg/load.0";
    std::string out;
    EncodeReadyResponse(ready, Dialect::kVllm, out);
    const Result<ReadyResponse> back = DecodeReadyResponse(out);
    ASSERT_TRUE(back.ok()) << back.error().message;
    EXPECT_EQ(back->supports_lora, true);
    EXPECT_EQ(back->max_loras, 4);
    EXPECT_EQ(back->mamba_block_size, 8);
    EXPECT_EQ(back->kv_cache_size_tokens, 16000);
    EXPECT_EQ(back->kv_cache_max_concurrency, 3.5);
    ASSERT_TRUE(back->kv_events_config.has_value());
    EXPECT_EQ(back->kv_events_config->replay_endpoint, "tcp://*:5657");
    EXPECT_EQ(back->kv_events_config->max_queue_size, 30);
    EXPECT_EQ(back->weight_transfer_backend, "nccl");
    EXPECT_TRUE(back->enable_sleep_mode);
    EXPECT_EQ(back->effective_attention_block_size, 32);
    EXPECT_EQ(back->rankgate_load_mailbox, "/run/rg/load.0");
    std::string again;
    EncodeReadyResponse(*back, Dialect::kVllm, again);
    EXPECT_EQ(ToHex(again), ToHex(out));
}

TEST(Handshake, InitCarriesParallelConfigOfEveryKind) {
    InitMessage init;
    init.inputs = {"tcp://127.0.0.1:1"};
    init.outputs = {"tcp://127.0.0.1:2"};
    init.coordinator_input = "tcp://127.0.0.1:3";
    init.parallel_config = {{"data_parallel_size", std::int64_t{2}},
                            {"data_parallel_master_ip", std::string{"10.0.0.1"}},
                            {"_data_parallel_master_port_list", std::vector<std::int64_t>{1, 65535}}};
    std::string out;
    EncodeInit(init, out);
    const Result<InitMessage> back = DecodeInit(out);
    ASSERT_TRUE(back.ok());
    EXPECT_EQ(back->parallel_config, init.parallel_config);
    EXPECT_EQ(back->coordinator_input, init.coordinator_input);
    EXPECT_FALSE(back->coordinator_output.has_value());
}

TEST(Handshake, RefusesGreetingsOfUnknownStatus) {
    std::string out;
    Writer writer{out};
    writer.Map(1);
    writer.Str("status");
    writer.Str("BYE");
    EXPECT_EQ(DecodeGreeting(out).error().param, "status");
    EXPECT_FALSE(DecodeGreeting("").ok());
    EXPECT_FALSE(DecodeGreeting(FromHex("80")).ok());
    EXPECT_FALSE(DecodeGreeting(FromHex("90")).ok());
}

TEST(Handshake, MissingRequiredFactIsNamed) {
    ReadyResponse ready;
    ready.vllm_version = "0.32.0";
    std::string full;
    EncodeReadyResponse(ready, Dialect::kVllm, full);
    for (const std::string key :
         {"max_model_len", "num_gpu_blocks", "block_size", "dtype", "vllm_version", "data_parallel_size"}) {
        std::string renamed = full;
        const std::size_t at = renamed.find(static_cast<char>(0xa0 | key.size()) + key);
        ASSERT_NE(at, std::string::npos) << key;
        renamed[at + 1] = 'X';
        const Result<ReadyResponse> result = DecodeReadyResponse(renamed);
        ASSERT_FALSE(result.ok()) << key;
        EXPECT_EQ(result.error().param, key);
    }
}

TEST(Handshake, TruncatedMessagesAreErrorsNeverCrashes) {
    ReadyResponse ready;
    ready.vllm_version = "0.32.0";
    ready.kv_events_config.emplace();
    std::string bytes;
    EncodeReadyResponse(ready, Dialect::kVllm, bytes);
    for (std::size_t size = 0; size < bytes.size(); ++size) {
        EXPECT_FALSE(DecodeReadyResponse(std::string_view{bytes}.substr(0, size)).ok()) << size;
    }
    InitMessage init;
    init.inputs = {"a"};
    init.outputs = {"b"};
    std::string init_bytes;
    EncodeInit(init, init_bytes);
    for (std::size_t size = 0; size < init_bytes.size(); ++size) {
        EXPECT_FALSE(DecodeInit(std::string_view{init_bytes}.substr(0, size)).ok()) << size;
    }
}

}  // namespace
}  // namespace rankgate::wire
