// SPDX-License-Identifier: Apache-2.0
#include "wire/kv_events.h"

#include <gtest/gtest.h>

#include "wire/msgpack.h"
#include "wire/test_vectors.h"

namespace rankgate::wire {
namespace {

using test::FromHex;
using test::LoadVectors;
using test::ToJson;
using test::Vector;

TEST(KvEvents, EveryCapturedMessageSaysWhatTheBytesSay) {
    KvEventBatch batch;
    int live = 0;
    int replayed = 0;
    int ends = 0;
    for (const Vector& vector : LoadVectors("vllm/kv_events.dp1")) {
        const std::vector<std::string_view> frames = vector.From(0);
        const Result<KvEventFrames> parsed = ParseKvEventFrames(frames);
        ASSERT_TRUE(parsed.ok()) << vector.name << parsed.error().message;
        if (parsed->end_of_replay) {
            ++ends;
            continue;
        }
        ASSERT_TRUE(DecodeKvEvents(parsed->payload, batch).ok()) << vector.name;
        const boost::json::value fields = ToJson(parsed->payload);
        EXPECT_EQ(batch.timestamp, fields.at(0).as_double());
        EXPECT_EQ(batch.data_parallel_rank, 0);
        ASSERT_EQ(batch.events.size(), fields.at(1).as_array().size());
        const KvEvent& event = batch.events[0];
        const boost::json::value& first = fields.at(1).at(0);
        EXPECT_EQ(event.kind, KvEvent::Kind::kBlockStored);
        ASSERT_EQ(event.num_hashes, first.at("block_hashes").as_array().size());
        for (std::size_t i = 0; i < event.num_hashes; ++i) {
            EXPECT_EQ(batch.HashesOf(event)[i], first.at("block_hashes").at(i).to_number<std::uint64_t>());
        }
        EXPECT_EQ(event.has_parent, !first.at("parent_block_hash").is_null());
        if (event.has_parent) {
            EXPECT_EQ(event.parent_hash, first.at("parent_block_hash").to_number<std::uint64_t>());
        }
        EXPECT_EQ(event.num_tokens, first.at("token_ids").as_array().size());
        EXPECT_EQ(batch.TokensOf(event)[0], first.at("token_ids").at(0).as_int64());
        EXPECT_EQ(event.block_size, 32);
        EXPECT_EQ(event.medium, "GPU");
        EXPECT_TRUE(event.lora_name.empty());
        EXPECT_EQ(event.kv_cache_spec_kind, "full_attention");
        EXPECT_EQ(ToJson(event.extra_keys), first.at("extra_keys"));
        vector.name.rfind("live", 0) == 0 ? ++live : ++replayed;
        EXPECT_EQ(parsed->sequence,
                  static_cast<std::uint64_t>(live > 0 && replayed == 0 ? live - 1 : replayed - 1));
    }
    EXPECT_EQ(live, 3);
    EXPECT_EQ(replayed, 3);
    EXPECT_EQ(ends, 1);
}

TEST(KvEvents, PositionalEventsOfOlderEnginesDecode) {
    std::string payload;
    Writer w{payload};
    w.Array(3);
    w.Float(1.0);
    w.Array(3);
    w.Array(8);
    w.Str("BlockStored");
    w.Array(1);
    w.Bin(FromHex("00112233445566778899aabbccddeeff0000000000000011"));
    w.Bin(FromHex("0000000000000007"));
    w.Ints(std::vector<std::int32_t>{1, 2});
    w.Int(2);
    w.Nil();
    w.Str("CPU");
    w.Str("adapter");
    w.Array(2);
    w.Str("BlockRemoved");
    w.Array(1);
    w.Uint(~std::uint64_t{0});
    w.Array(1);
    w.Str("AllBlocksCleared");
    w.Nil();
    KvEventBatch batch;
    ASSERT_TRUE(DecodeKvEvents(payload, batch).ok());
    ASSERT_EQ(batch.events.size(), 3U);
    EXPECT_EQ(batch.HashesOf(batch.events[0])[0], 17U);  // the digest's last eight bytes
    EXPECT_EQ(batch.events[0].parent_hash, 7U);
    EXPECT_EQ(batch.events[0].medium, "CPU");
    EXPECT_EQ(batch.events[0].lora_name, "adapter");
    EXPECT_EQ(batch.events[1].kind, KvEvent::Kind::kBlockRemoved);
    EXPECT_EQ(batch.HashesOf(batch.events[1])[0], ~std::uint64_t{0});
    EXPECT_EQ(batch.events[2].kind, KvEvent::Kind::kAllBlocksCleared);
    EXPECT_EQ(batch.data_parallel_rank, -1);
}

TEST(KvEvents, BatchesMayBeMaps) {
    std::string payload;
    Writer w{payload};
    w.Map(3);
    w.Str("data_parallel_rank");
    w.Int(2);
    w.Str("events");
    w.Array(1);
    w.Map(1);
    w.Str("type");
    w.Str("AllBlocksCleared");
    w.Str("ts");
    w.Float(5.0);
    KvEventBatch batch;
    ASSERT_TRUE(DecodeKvEvents(payload, batch).ok());
    EXPECT_EQ(batch.data_parallel_rank, 2);
    EXPECT_EQ(batch.timestamp, 5.0);
    ASSERT_EQ(batch.events.size(), 1U);
}

TEST(KvEvents, AnEventThatCannotBeUnderstoodIsKeptAsUnknown) {
    const std::string payload = FromHex(
        "92 cb3ff0000000000000 94 05 91a3666f6f "
        "82a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657305 "
        "81a474797065b0416c6c426c6f636b73436c6561726564");
    KvEventBatch batch;
    ASSERT_TRUE(DecodeKvEvents(payload, batch).ok());
    ASSERT_EQ(batch.events.size(), 4U);
    EXPECT_EQ(batch.events[0].kind, KvEvent::Kind::kUnknown);
    EXPECT_EQ(batch.events[1].kind, KvEvent::Kind::kUnknown);
    EXPECT_EQ(batch.events[2].kind, KvEvent::Kind::kUnknown);
    EXPECT_EQ(batch.events[3].kind, KvEvent::Kind::kAllBlocksCleared);
}

TEST(KvEvents, BrokenBytesAndFramesAreErrors) {
    KvEventBatch batch;
    for (const char* hex :
         {"", "90", "91cb3ff0000000000000", "c0", "92cb3ff0000000000000ddffffffff", "9201", "92019000"}) {
        const std::string payload = FromHex(hex);
        EXPECT_FALSE(DecodeKvEvents(payload, batch).ok()) << hex;
        EXPECT_TRUE(batch.events.empty());
    }
    const std::string_view short_sequence[] = {"kv", "1234567", "payload"};
    EXPECT_FALSE(ParseKvEventFrames(short_sequence).ok());
    const std::string_view lone[] = {"payload"};
    EXPECT_FALSE(ParseKvEventFrames(lone).ok());
    EXPECT_FALSE(ParseKvEventFrames({}).ok());
}

}  // namespace
}  // namespace rankgate::wire
