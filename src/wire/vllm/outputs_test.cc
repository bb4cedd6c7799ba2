// SPDX-License-Identifier: Apache-2.0
// Outputs beyond the captured ones: worked bytes, tolerance in every direction, hostile input, and the
// promise not to allocate.
#include "wire/vllm/outputs.h"

#include <gtest/gtest.h>

#include "wire/msgpack.h"
#include "wire/test_vectors.h"

namespace rankgate::wire::vllm {
namespace {

using test::FromHex;
using test::ToHex;

Status Decode(std::string_view payload, OutputsMessage& out) {
    return DecodeOutputs({&payload, 1}, out);
}

Status DecodeHex(std::string_view hex, std::string& bytes, OutputsMessage& out) {
    bytes = FromHex(hex);
    return Decode(bytes, out);
}

TEST(VllmOutputs, WorkedBytesDecode) {
    OutputsMessage message;
    std::string bytes;
    ASSERT_TRUE(
        DecodeHex("9800919ea27231912ac0c0c0c0c0c0c0c0c0c0c000c0cb3ff0000000000000c0c0c0c0", bytes, message)
            .ok());
    ASSERT_EQ(message.rows.size(), 1U);
    EXPECT_EQ(message.rows[0].request_id, "r1");
    EXPECT_EQ(message.TokensOf(message.rows[0])[0], 42);
    EXPECT_FALSE(message.rows[0].terminal());
    ASSERT_TRUE(DecodeHex("96009196a2723190c0c0c001c0cb3ff0000000000000c091a27231", bytes, message).ok());
    EXPECT_EQ(message.rows[0].finish_reason, FinishReason::kLength);
    ASSERT_EQ(message.finished_requests.size(), 1U);
    EXPECT_EQ(message.finished_requests[0], "r1");
    ASSERT_TRUE(DecodeHex("950090c0cb3ff00000000000009307c092c0c2", bytes, message).ok());
    EXPECT_TRUE(message.has_utility);
    EXPECT_EQ(message.utility.call_id, 7U);
    EXPECT_EQ(ToHex(message.utility.result), "c2");
    ASSERT_TRUE(DecodeHex("970090c0cb3ff0000000000000c0c003", bytes, message).ok());
    EXPECT_EQ(message.wave_complete, 3);
    EXPECT_EQ(message.start_wave, -1);
}

TEST(VllmOutputs, TakesEveryLengthOfMessageAndRow) {
    for (std::size_t row_elements = 2; row_elements <= 24; ++row_elements) {
        for (std::size_t elements = 2; elements <= 12; ++elements) {
            std::string payload;
            Writer w{payload};
            w.Array(elements);
            w.Int(3);
            w.Array(1);
            w.Array(row_elements);
            w.Str("r1");
            w.Ints(std::vector<std::int32_t>{7, 8});
            for (std::size_t i = 2; i < row_elements; ++i) {
                if (i == 5) {
                    w.Int(0);
                } else if (i == 6) {
                    w.Str("stop");
                } else if (i >= 18) {
                    w.Ext(99, "future");
                } else {
                    w.Nil();
                }
            }
            for (std::size_t i = 2; i < elements; ++i) {
                i == 3 ? w.Float(1.5) : i >= 9 ? w.Map(0) : w.Nil();
            }
            OutputsMessage message;
            const Status status = Decode(payload, message);
            ASSERT_TRUE(status.ok()) << row_elements << " " << elements << status.error().message;
            EXPECT_EQ(message.engine_index, 3);
            ASSERT_EQ(message.rows.size(), 1U);
            EXPECT_EQ(message.rows[0].num_tokens, 2U);
            EXPECT_EQ(message.rows[0].terminal(), row_elements > 5);
            EXPECT_EQ(message.rows[0].stop_reason(),
                      row_elements > 6 ? StopReason{std::string{"stop"}} : StopReason{});
        }
    }
}

TEST(VllmOutputs, AnEmptyArrayIsAMessageThatSaysNothing) {
    OutputsMessage message;
    std::string bytes;
    EXPECT_TRUE(DecodeHex("90", bytes, message).ok());
    EXPECT_TRUE(message.rows.empty());
}

TEST(VllmOutputs, UnknownFinishReasonsAreTerminalErrors) {
    const auto reason = [](auto write) {
        std::string payload;
        Writer w{payload};
        w.Array(2);
        w.Int(0);
        w.Array(1);
        w.Array(6);
        w.Str("r1");
        w.Array(0);
        w.Nil();
        w.Nil();
        w.Nil();
        write(w);
        OutputsMessage message;
        EXPECT_TRUE(Decode(payload, message).ok());
        return message.rows.at(0).finish_reason;
    };
    for (int known = 0; known <= 4; ++known) {
        EXPECT_EQ(reason([&](Writer& w) { w.Int(known); }), static_cast<FinishReason>(known));
    }
    EXPECT_EQ(reason([](Writer& w) { w.Int(5); }), FinishReason::kError);
    EXPECT_EQ(reason([](Writer& w) { w.Int(255); }), FinishReason::kError);
    EXPECT_EQ(reason([](Writer& w) { w.Int(-1); }), FinishReason::kError);
    EXPECT_EQ(reason([](Writer& w) { w.Uint(~std::uint64_t{0}); }), FinishReason::kError);
    EXPECT_EQ(reason([](Writer& w) { w.Str("stop"); }), FinishReason::kError);
    EXPECT_EQ(reason([](Writer& w) { w.Nil(); }), FinishReason::kNone);
}

TEST(VllmOutputs, OneSpoiledRowEndsAsAnErrorAndSparesTheOthers) {
    std::string payload;
    Writer w{payload};
    w.Array(2);
    w.Int(0);
    w.Array(5);
    for (const char* id : {"a", "b", "c", "d"}) {
        w.Array(2);
        w.Str(id);
        w.Array(2);
        w.Int(10);
        if (*id == 'b') {
            w.Float(1.0);  // not a token
        } else if (*id == 'c') {
            w.Int(-1);  // nor this
        } else {
            w.Int(11);
        }
    }
    w.Array(2);
    w.Nil();  // no id: nobody to tell
    w.Array(0);
    OutputsMessage message;
    ASSERT_TRUE(Decode(payload, message).ok());
    ASSERT_EQ(message.rows.size(), 4U);
    EXPECT_EQ(message.dropped_rows, 1U);
    EXPECT_FALSE(message.rows[0].terminal());
    EXPECT_EQ(message.rows[1].request_id, "b");
    EXPECT_EQ(message.rows[1].finish_reason, FinishReason::kError);
    EXPECT_EQ(message.rows[1].num_tokens, 0U);
    EXPECT_EQ(message.rows[2].finish_reason, FinishReason::kError);
    EXPECT_EQ(message.rows[3].num_tokens, 2U);
    EXPECT_EQ(message.TokensOf(message.rows[3])[1], 11);
}

TEST(VllmOutputs, FieldsOfTheWrongTypeOutsideRowsAreIgnored) {
    std::string payload;
    Writer w{payload};
    w.Array(9);
    w.Int(2);
    w.Nil();
    w.Str("stats");
    w.Nil();
    w.Int(1);
    w.Bool(true);
    w.Str("wave");
    w.Float(1.0);
    w.Int(3);
    OutputsMessage message;
    ASSERT_TRUE(Decode(payload, message).ok());
    EXPECT_FALSE(message.has_stats);
    EXPECT_FALSE(message.has_utility);
    EXPECT_EQ(message.wave_complete, -1);
    EXPECT_EQ(message.engine_index, 2);
}

TEST(VllmOutputs, AnEngineIndexThatIsNoRankRefusesTheMessage) {
    OutputsMessage message;
    for (const char* hex : {"92c090", "92ff90", "92ce0001000090", "92a13090"}) {
        std::string bytes;
        EXPECT_FALSE(DecodeHex(hex, bytes, message).ok()) << hex;
    }
}

TEST(VllmOutputs, BrokenBytesRefuseTheMessageAndLeaveNothingBehind) {
    OutputsMessage message;
    for (const char* hex :
         {"", "c1", "80", "c0", "9200", "92009195", "9200ddffffffff", "920091dfffffffff", "92009000",
          "920091 92 dbffffffff", "920091 92 a161 ddffffffff", "454e47494e45"}) {
        std::string bytes;
        EXPECT_FALSE(DecodeHex(hex, bytes, message).ok()) << hex;
        EXPECT_TRUE(message.rows.empty());
        EXPECT_TRUE(message.tokens.empty());
    }
    EXPECT_FALSE(DecodeOutputs({}, message).ok());
}

TEST(VllmOutputs, DepthOfAHundredThousandIsSkipped) {
    std::string deep(100000, '\x91');
    deep.push_back('\xc0');
    std::string payload;
    Writer w{payload};
    w.Array(3);
    w.Int(0);
    w.Array(1);
    w.Array(9);
    w.Str("a");
    w.Array(0);
    for (int i = 2; i < 9; ++i) {
        w.Raw(deep);
    }
    w.Raw(deep);
    OutputsMessage message;
    ASSERT_TRUE(Decode(payload, message).ok());
    EXPECT_EQ(message.rows[0].finish_reason, FinishReason::kError);
}

TEST(VllmOutputs, UnsolicitedNoticesAreMarked) {
    OutputsMessage message;
    std::string bytes;
    ASSERT_TRUE(DecodeHex("950090c0cb3ff0000000000000 93ffc092c0c3", bytes, message).ok());
    EXPECT_TRUE(message.has_utility);
    EXPECT_TRUE(message.utility.unsolicited);
    ASSERT_TRUE(DecodeHex("950090c0cb3ff0000000000000 9307a3626164c0", bytes, message).ok());
    EXPECT_TRUE(message.utility.failed);
    EXPECT_EQ(message.utility.failure_message, "bad");
}

Logprobs Scores(std::int32_t positions, std::int32_t width) {
    Logprobs out;
    out.positions = positions;
    out.width = width;
    for (std::int32_t i = 0; i < positions * width; ++i) {
        out.token_ids.push_back(i * 3);
        out.logprobs.push_back(-0.5F * static_cast<float>(i));
    }
    for (std::int32_t i = 0; i < positions; ++i) {
        out.ranks.push_back(i + 1);
    }
    return out;
}

TEST(VllmOutputs, LogprobsTravelInlineOrBesideThePayload) {
    for (const auto& [positions, width] :
         std::vector<std::pair<int, int>>{{1, 1}, {1, 3}, {63, 1}, {64, 1}, {1, 64}, {100, 81}, {0, 2}}) {
        RequestOutput output;
        output.request_id = "r1";
        output.new_token_ids = {1};
        output.logprobs = Scores(positions, width);
        output.prompt_logprobs = Scores(positions, width);
        OutputsBatch batch;
        batch.outputs = {&output, 1};
        std::string payload;
        AuxFrames aux;
        EncodeOutputs(batch, payload, aux);
        const bool beside = positions * width * 4 >= 256;
        EXPECT_EQ(aux.size() > 0, beside || positions * 8 >= 256);
        std::vector<std::string_view> frames{payload};
        for (std::size_t i = 0; i < aux.size(); ++i) {
            frames.push_back(aux[i]);
        }
        OutputsMessage message;
        ASSERT_TRUE(DecodeOutputs(frames, message).ok());
        for (const std::string_view raw : {message.rows[0].logprobs, message.rows[0].prompt_logprobs}) {
            Logprobs back;
            const Status status = DecodeLogprobs(raw, frames, back);
            ASSERT_TRUE(status.ok()) << status.error().message;
            EXPECT_EQ(back.positions, positions);
            EXPECT_EQ(back.width, width);
            EXPECT_EQ(back.token_ids, output.logprobs->token_ids);
            EXPECT_EQ(back.logprobs, output.logprobs->logprobs);
            EXPECT_EQ(back.ranks, output.logprobs->ranks);
        }
    }
}

TEST(VllmOutputs, LogprobsThatLieAreErrors) {
    const std::string good =
        "93 93a33c6934 920101 d60305000000 93a33c6634 920101 d60300000000 93a33c6938 9101 d703 "
        "0100000000000000";
    Logprobs out;
    const std::string bytes = FromHex(good);
    const std::string_view payload = "payload";
    ASSERT_TRUE(DecodeLogprobs(bytes, {&payload, 1}, out).ok());
    EXPECT_EQ(out.token_ids, std::vector<TokenId>{5});
    EXPECT_EQ(out.ranks, std::vector<std::int64_t>{1});
    for (const char* bad :
         {"c0", "90", "92c0c0",
          // shape of two against data of one
          "93 93a33c6934 920102 d60305000000 93a33c6634 920102 d60300000000 93a33c6938 9101 "
          "d7030100000000000000",
          // 2^32 x 2^32
          "93 93a33c6934 92ceffffffffceffffffff d60305000000 93a33c6634 920101 d60300000000 93a33c6938 9101 "
          "d7030100000000000000",
          // pickles, unknown dtype, big-endian
          "93 93a33c6934 920101 d60105000000 93a33c6634 920101 d60300000000 93a33c6938 9101 "
          "d7030100000000000000",
          "93 93a33e6934 920101 d60305000000 93a33c6634 920101 d60300000000 93a33c6938 9101 "
          "d7030100000000000000",
          // frames that are not there: 0 is the payload itself, 1 does not exist, -1
          "93 93a33c6934 920101 00 93a33c6634 920101 d60300000000 93a33c6938 9101 d7030100000000000000",
          "93 93a33c6934 920101 01 93a33c6634 920101 d60300000000 93a33c6938 9101 d7030100000000000000",
          "93 93a33c6934 920101 ff 93a33c6634 920101 d60300000000 93a33c6938 9101 d7030100000000000000",
          // three dimensions, none
          "93 93a33c6934 93010101 d60305000000 93a33c6634 920101 d60300000000 93a33c6938 9101 "
          "d7030100000000000000",
          "93 93a33c6934 90 d60305000000 93a33c6634 920101 d60300000000 93a33c6938 9101 "
          "d7030100000000000000"}) {
        const std::string raw = FromHex(bad);
        EXPECT_FALSE(DecodeLogprobs(raw, {&payload, 1}, out).ok()) << bad;
        EXPECT_TRUE(out.token_ids.empty()) << bad;
        EXPECT_EQ(out.positions, 0) << bad;
    }
    for (std::size_t size = 0; size < bytes.size(); ++size) {
        EXPECT_FALSE(DecodeLogprobs(std::string_view{bytes}.substr(0, size), {&payload, 1}, out).ok())
            << size;
    }
}

TEST(VllmOutputs, MoreRowsThanAnyEngineRunsAreRefused) {
    std::string payload;
    Writer w{payload};
    w.Array(2);
    w.Int(0);
    w.Array(kMaxRowsPerMessage + 1);
    payload.append(kMaxRowsPerMessage + 1, '\xc0');
    OutputsMessage message;
    EXPECT_FALSE(Decode(payload, message).ok());
}

TEST(VllmOutputs, PrefillCountsAreMadeOfTheOutputWithoutExtras) {
    RequestOutput output;
    output.request_id = "r1";
    output.num_prompt_tokens = 40;
    output.num_cached_tokens = 32;
    output.finish_reason = FinishReason::kStop;
    output.stop_reason = std::int64_t{7};
    OutputsBatch batch;
    batch.outputs = {&output, 1};
    std::string payload;
    AuxFrames aux;
    EncodeOutputs(batch, payload, aux);
    OutputsMessage message;
    ASSERT_TRUE(Decode(payload, message).ok());
    EXPECT_EQ(message.rows[0].num_prompt_tokens, 40);
    EXPECT_EQ(message.rows[0].num_cached_tokens, 32);
    EXPECT_EQ(message.rows[0].stop_reason(), StopReason{std::int64_t{7}});
    const auto prefill = test::ToJson(payload).at(1).at(0).at(11);
    EXPECT_EQ(prefill.at("num_computed_tokens").as_int64(), 8);
    EXPECT_EQ(prefill.at("num_local_cached_tokens").as_int64(), 32);
}

// ---- allocation ----

TEST(VllmOutputs, DecodingInSteadyStateAllocatesNothing) {
    std::vector<RequestOutput> outputs(256);
    for (std::size_t i = 0; i < outputs.size(); ++i) {
        outputs[i].request_id = "chatcmpl-0123456789abcdef-" + std::to_string(i);
        outputs[i].new_token_ids = {static_cast<TokenId>(i * 100)};
    }
    SchedulerStats stats;
    OutputsBatch batch;
    batch.outputs = outputs;
    batch.stats = &stats;
    std::string payload;
    AuxFrames aux;
    EncodeOutputs(batch, payload, aux);
    OutputsMessage message;
    ASSERT_TRUE(Decode(payload, message).ok());
    const std::uint64_t before = test::AllocationCount();
    for (int i = 0; i < 10; ++i) {
        ASSERT_TRUE(Decode(payload, message).ok());
    }
    const std::uint64_t decoded = test::AllocationCount();
    EXPECT_EQ(decoded, before);
    EXPECT_EQ(message.rows.size(), 256U);
    for (int i = 0; i < 10; ++i) {
        payload.clear();
        EncodeOutputs(batch, payload, aux);
    }
    EXPECT_EQ(test::AllocationCount(), decoded);
}

}  // namespace
}  // namespace rankgate::wire::vllm
