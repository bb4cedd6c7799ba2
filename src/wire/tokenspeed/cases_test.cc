// SPDX-License-Identifier: Apache-2.0
// The wire's list of cases, one by one: worked bytes both ways, lengths, ragged columns, signs, types, and
// every input that is fatal to a real engine. What needs sockets is tested elsewhere; the whole list:
//
// worked bytes, both ways          TokenSpeedCases.WorkedHandshake .WorkedAdd .WorkedAborts .WorkedOutputs
//                                  .ShortestLegalAddSeedsItselfFromItsId .PinnedFullPythonRequestDecodes
//                                  .SentinelIsSixteenRawBytes; TokenSpeedVectors.* (364 captured ones)
// output lengths 0-8, 9-20         .OutputsShorterThanNineAreRefusedAndLongerOnesTaken
// wrong tag, zero rows             .AWrongTagRefusesTheBatchAndZeroRowsDoNot
// ragged columns, each in turn     .ARaggedColumnRefusesTheBatchWhicheverItIs
// aux frames on an output          .AuxFramesOnAnOutputAreIgnored
// unknown keys, both spellings     HandshakeVectors.EveryTokenSpeedMessageDecodesAndEncodesToTheSameBytes
//                                  HandshakeVectors.RegistrationsThatThePublicGatewayTakesAreTaken
// signed -1, negative load tail    .NegativeNumbersAreReadAsTheyAreAndNeverWritten
// float for int, int for float     .FloatForIntIsRefusedAndIntForFloatTaken
// request lengths 6-30             .RequestsOfSixToThirtyElementsAreTaken
// rid nil, list                    .RidMustBeAString
// id 2^31, empty ids, too long,
// stream_interval 0                .WhatKillsARealEngineIsAnAbortRowHere
// .GatewayRefusesWhatTheEngineCannotTake;
//                                  through HTTP at the real loop:
//                                  test_what_kills_the_engine_is_refused_and_the_rank_lives
// duplicate rid                    BadInput.ALiveIdAgainLeavesTheFirstAlone
// Admission.ADuplicateIdIsRefusedAndTheFirstLivesOn
//                                  test_a_finished_rid_may_come_again_and_a_running_one_not
// rid reuse after an abort         test_an_id_after_its_abort; never by us:
//                                  TokenSpeedGroupTest.EveryRequestOnTheWireHasAFiniteBudgetAndAnIdOfItsOwn
// n=2, top_k 0/127/128/2^30        .SamplingLimits
// logprobs gate                    .LogprobsGate
// unknown type byte                .UnknownTypeFrames
// message of one frame             test_messages_of_one_frame_or_an_odd_type_are_passed_over
// abort of two ids                 .WorkedAborts test_an_abort_of_two_ends_both
// two ranks interleaved            FrontendHandshakeTest.EveryInterleavingOfThreeRanksEndsLive
//                                  test_two_ranks_shake_hands_interleaved_and_name_themselves
// identity 256                     Identity.IsTheRankAsTwoBytesLittleEndian and the same
// sentinel in mid-stream           TokenSpeedGroupTest.TheSentinelInMidStreamFailsThatRankAlone
// three bad outputs                TokenSpeedGroupTest.ThreeBadOutputsInARowAreCountedAndTheRankGoesOn
// send to a vanished identity      GroupActorTest.EvenRequestsSentWithinTheLossGraceAreServed
// terminal row's load              EngineCore.TheTerminalMessageAlreadyShowsTheFreedRank
//                                  test_the_terminal_row_carries_the_load_after_the_finish
//                                  test_after_a_burst_the_gateway_knows_that_the_rank_is_idle
// load-only batch after an abort   EngineCore.AnAbortThatEmptiesTheRankIsToldAtOnce
//                                  test_a_client_abort_is_followed_by_a_load_only_batch
#include <gtest/gtest.h>

#include "wire/handshake.h"
#include "wire/msgpack.h"
#include "wire/test_vectors.h"
#include "wire/tokenspeed/outputs.h"
#include "wire/tokenspeed/request.h"
#include "wire/tokenspeed/validate.h"

namespace rankgate::wire::tokenspeed {
namespace {

using test::FromHex;
using test::ToHex;

constexpr const char* kAddTagHex = "b9546f6b656e697a656447656e6572617465526571496e707574";
constexpr const char* kOutTagHex = "b34261746368546f6b656e49444f7574536c696d";
/// Rows a (running) and b (stop).
constexpr const char* kColumnsHex =
    "92a161a162 92 910a 921415 92 a0 a473746f70 920304 920102 920002 929090 929090";
/// Rid, ids [1, 2, 300], max 8, stop id 2, T 0.5, top_p 0.9, top_k off, seed 42, stream.
constexpr const char* kTextAddHex =
    "9b b9546f6b656e697a656447656e6572617465526571496e707574 a57265712d31 c0 c0 93 01 02 cd012c"
    "dc001d 08 c0 91 02 cb3fe0000000000000 cb3feccccccccccccd ce40000000 cb0000000000000000"
    "cb0000000000000000 cb0000000000000000 cb3ff0000000000000 00 c0 c0 c0 c0"
    "c2 c3 c3 c2 c0 c0 c0 c0 2a c0 01 90 00 c3 c2 ff 00 c0 c3";

std::string Hex(std::string_view spaced) {
    return ToHex(FromHex(spaced));
}

DecodedRequest Decode(std::string_view payload) {
    DecodedRequest out;
    DecodeRequest(payload, out);
    return out;
}

/// Sampling as [max_new_tokens, ..] with the given raw elements in front.
std::string Add(std::string_view rid_hex, std::string_view ids_hex, std::string_view sampling_hex,
                std::string_view tail_hex = "", int tail = 0) {
    std::string head;
    Writer w{head};
    w.Array(static_cast<std::size_t>(6 + tail));
    return head + FromHex(std::string{kAddTagHex} + std::string{rid_hex} + "c0c0" + std::string{ids_hex} +
                          std::string{sampling_hex} + std::string{tail_hex});
}

std::string ParamOf(const std::string& payload, const RankLimits& limits = {}) {
    DecodedRequest decoded = Decode(payload);
    if (!decoded.status.ok()) {
        return "decode " + decoded.status.error().param;
    }
    Normalise(decoded.request);
    const Status status = CheckDecoded(decoded.request, limits);
    return status.ok() ? "" : status.error().param;
}

// ---- worked bytes, both ways ----

TEST(TokenSpeedCases, WorkedHandshake) {
    Greeting hello;
    hello.local = true;
    std::string out;
    EncodeGreeting(hello, Dialect::kTokenSpeed, out);
    EXPECT_EQ(ToHex(out), Hex("84 a6737461747573a548454c4c4fa56c6f63616cc3a8686561646c657373c3"
                              "b4706172616c6c656c5f636f6e6669675f68617368c0"));
    EXPECT_EQ(out.size(), 53U);
    InitMessage init;
    init.inputs = {"ipc:///t/e-in.sock"};
    init.outputs = {"ipc:///t/e-out.sock"};
    out.clear();
    EncodeInit(init, out);
    EXPECT_EQ(out.size(), 156U);
    ReadyResponse ready;
    ready.max_model_len = 4096;
    ready.num_gpu_blocks = 1000;
    ready.block_size = 64;
    ready.vllm_version = "tokenspeed-0.1.0";
    ready.world_size = 2;
    ready.data_parallel_size = 2;
    ready.data_parallel_rank = 1;
    ready.max_num_seqs = 256;
    ready.max_num_batched_tokens = 8192;
    ready.instance_id = "m";
    ready.kv_cache_size_tokens = 63936;
    out.clear();
    EncodeReadyResponse(ready, Dialect::kTokenSpeed, out);
    EXPECT_EQ(out.size(), 399U - 8U);  // block_size instead of prefix_granularity
    EXPECT_EQ(ToHex(out).substr(0, 6), "de0013");
}

TEST(TokenSpeedCases, WorkedAdd) {
    GenerateRequest request;
    request.id = "req-1";
    request.prompt_token_ids = {1, 2, 300};
    request.sampling.max_tokens = 8;
    request.sampling.stop_token_ids = {2};
    request.sampling.temperature = 0.5;
    request.sampling.top_p = 0.9;
    request.sampling.seed = 42;
    std::string out;
    EncodeAdd(request, out);
    EXPECT_EQ(ToHex(out), Hex(kTextAddHex));
    EXPECT_EQ(out.size(), 131U);
}

TEST(TokenSpeedCases, ShortestLegalAddSeedsItselfFromItsId) {
    DecodedRequest add = Decode(Add("a57265712d31", "930102cd012c", "9408c09102cb3fe0000000000000"));
    ASSERT_TRUE(add.status.ok()) << add.status.error().message;
    Normalise(add.request);
    EXPECT_EQ(add.request.sampling.seed, 1829706545U);
    EXPECT_EQ(SeedOf("r1"), 219023793U);
    EXPECT_EQ(SeedOf(""), 0U);
    EXPECT_EQ(add.request.sampling.top_k, kTopKAll);
    EXPECT_EQ(add.request.sampling.temperature, 0.5);
    const GenerateRequest neutral = ToGenerateRequest(std::move(add.request));
    EXPECT_EQ(neutral.sampling.top_k, 0);
    EXPECT_EQ(neutral.sampling.max_tokens, 8);
    EXPECT_EQ(neutral.sampling.stop_token_ids, std::vector<TokenId>{2});
    EXPECT_EQ(neutral.prompt_token_ids, (std::vector<TokenId>{1, 2, 300}));
}

TEST(TokenSpeedCases, PinnedFullPythonRequestDecodes) {
    const std::string bytes = FromHex(
        "dc0018b9546f6b656e697a656447656e6572617465526571496e707574a57665632d31c0c093010203dc001d08c09102cb3f"
        "e00000000000"
        "00cb3feccccccccccccdce40000000cb0000000000000000cb0000000000000000cb0000000000000000cb3ff00000000000"
        "0000c0c0c0c0"
        "c2c3c3c2c0c0c0c02ac0019000c3c3ff00c0c3c0c0c0c2cb0000000000000000c0c0c0c0c0c0c0c0");
    const DecodedRequest add = Decode(bytes);
    ASSERT_TRUE(add.status.ok()) << add.status.error().message;
    EXPECT_EQ(add.request.rid, "vec-1");
    EXPECT_TRUE(add.request.return_logprob);
    EXPECT_TRUE(add.request.stream);
    EXPECT_EQ(add.request.sampling.seed, 42U);
}

TEST(TokenSpeedCases, WorkedAborts) {
    std::string out;
    EncodeAbort("req-1", out);
    EXPECT_EQ(ToHex(out), Hex("91 a57265712d31"));
    out.clear();
    EncodeAbort(std::vector<std::string_view>{"req-1", "req-2"}, out);
    EXPECT_EQ(ToHex(out), Hex("92 a57265712d31 a57265712d32"));
    std::vector<std::string_view> ids;
    ASSERT_TRUE(DecodeAbort(out, ids).ok());
    EXPECT_EQ(ids, (std::vector<std::string_view>{"req-1", "req-2"}));
}

RequestOutput Row(std::string id, std::vector<TokenId> tokens, FinishReason reason, int prompt,
                  int completion, int cached) {
    RequestOutput row;
    row.request_id = std::move(id);
    row.new_token_ids = std::move(tokens);
    row.finish_reason = reason;
    row.num_prompt_tokens = prompt;
    row.completion_tokens = completion;
    row.num_cached_tokens = cached;
    return row;
}

TEST(TokenSpeedCases, WorkedOutputs) {
    const std::vector<RequestOutput> rows{Row("a", {10}, FinishReason::kNone, 3, 1, 0),
                                          Row("b", {20, 21}, FinishReason::kStop, 4, 2, 2)};
    OutputsBatch batch;
    batch.engine_index = 3;
    batch.outputs = rows;
    batch.load = {2, 5, 100, 400, -1.0, 0, 0};
    std::string out;
    EncodeOutputs(batch, out);
    EXPECT_EQ(ToHex(out), Hex(std::string{"9e"} + kOutTagHex + kColumnsHex + "03 02 05 64 cd0190"));
    EXPECT_EQ(out.size(), 61U);
    const RequestOutput abort = Row("bad", {}, FinishReason::kAbort, 3, 0, 0);
    OutputsBatch refusal;
    refusal.outputs = {&abort, 1};
    out.clear();
    EncodeOutputs(refusal, out);
    EXPECT_EQ(ToHex(out), Hex(std::string{"9e"} + kOutTagHex +
                              "91a3626164 9190 91a561626f7274 9103 9100 9100 9190 9190 00 00 00 00 00"));
    OutputsBatch idle;
    idle.engine_index = 1;
    idle.load.kv_total_pages = 400;
    out.clear();
    EncodeOutputs(idle, out);
    EXPECT_EQ(ToHex(out), "9eb34261746368546f6b656e49444f7574536c696d909090909090909001000000cd0190");
    RequestOutput pinned = Row("vec-1", {10, 11}, FinishReason::kLength, 3, 2, 1);
    Logprobs& scores = pinned.logprobs.emplace();
    scores.positions = 2;
    scores.width = 1;
    scores.token_ids = {10, 11};
    scores.logprobs = {-0.5F, -0.25F};
    scores.ranks = {1, 1};
    OutputsBatch vec;
    vec.engine_index = 1;
    vec.outputs = {&pinned, 1};
    vec.load = {2, 5, 100, 400, -1.0, 0, 0};
    out.clear();
    EncodeOutputs(vec, out);
    EXPECT_EQ(ToHex(out),
              Hex(std::string{"9e"} + kOutTagHex +
                  "91a57665632d3191920a0b91a66c656e6774689103910291019192cbbfe0000000000000cbbfd000000000"
                  "000091920a0b 01 02 05 64 cd0190"));
}

TEST(TokenSpeedCases, SentinelIsSixteenRawBytes) {
    EXPECT_EQ(ToHex(kEngineCoreDead), "454e47494e455f434f52455f44454144");
    const std::string_view frame = kEngineCoreDead;
    EXPECT_TRUE(IsEngineCoreDead({&frame, 1}));
    EXPECT_FALSE(IsEngineCoreDead({}));
}

// ---- outputs ----

TEST(TokenSpeedCases, OutputsShorterThanNineAreRefusedAndLongerOnesTaken) {
    for (int elements = 0; elements <= 20; ++elements) {
        std::string payload;
        Writer w{payload};
        w.Array(static_cast<std::size_t>(elements));
        if (elements > 0) {
            w.Raw(FromHex(kOutTagHex));
        }
        const std::string_view columns[] = {"91a161", "91910a", "91a0", "9103",
                                            "9101",   "9100",   "9190", "9190"};
        for (int i = 1; i < elements; ++i) {
            i <= 8 ? w.Raw(FromHex(columns[i - 1])) : w.Int(i);
        }
        const std::string_view frame = payload;
        OutputsMessage message;
        EXPECT_EQ(DecodeOutputs({&frame, 1}, message).ok(), elements >= 9) << elements;
        if (elements >= 9) {
            EXPECT_EQ(message.names_rank, elements > 9);
            EXPECT_EQ(message.engine_index, elements > 9 ? 9 : 0);
            EXPECT_EQ(message.load.num_running, elements > 10 ? 10 : 0);
            EXPECT_EQ(message.has_load(), elements > 13);
        }
    }
}

TEST(TokenSpeedCases, ARaggedColumnRefusesTheBatchWhicheverItIs) {
    const std::string_view two[] = {"92a161a162", "92910a910b", "92a0a0", "920304",
                                    "920101",     "920000",     "929090", "929090"};
    const std::string_view one[] = {"91a161", "91910a", "91a0", "9103", "9101", "9100", "9190", "9190"};
    for (int ragged = -1; ragged < 8; ++ragged) {
        std::string payload = FromHex(std::string{"99"} + kOutTagHex);
        for (int i = 0; i < 8; ++i) {
            payload += FromHex(i == ragged ? one[i] : two[i]);
        }
        const std::string_view frame = payload;
        OutputsMessage message;
        EXPECT_EQ(DecodeOutputs({&frame, 1}, message).ok(), ragged < 0) << ragged;
        EXPECT_EQ(message.rows.size(), ragged < 0 ? 2U : 0U);
    }
}

TEST(TokenSpeedCases, AWrongTagRefusesTheBatchAndZeroRowsDoNot) {
    OutputsMessage message;
    const auto decodes = [&message](std::string_view tag, std::string_view columns) {
        std::string payload;
        Writer w{payload};
        w.Array(14);
        w.Str(tag);
        payload += FromHex(columns);
        payload += FromHex("01 00 00 00 cd0190");
        const std::string_view frame = payload;
        return DecodeOutputs({&frame, 1}, message).ok();
    };
    constexpr std::string_view kNoRows = "9090909090909090";
    for (const std::string_view tag :
         {"BatchTokenIDOut", "batchTokenIDOutSlim", "", "TokenizedGenerateReqInput"}) {
        EXPECT_FALSE(decodes(tag, kNoRows)) << tag;
        EXPECT_FALSE(decodes(tag, "91a161 91910a 91a0 9103 9101 9100 9190 9190")) << tag;
    }
    ASSERT_TRUE(decodes("BatchTokenIDOutSlim", kNoRows));
    EXPECT_TRUE(message.rows.empty());
    EXPECT_EQ(message.engine_index, 1);
    EXPECT_TRUE(message.has_load());
    EXPECT_EQ(message.load.kv_total_pages, 400);
    EXPECT_FALSE(decodes("BatchTokenIDOutSlim", "c090909090909090")) << "no rids are no rows";
    std::string request = FromHex(kTextAddHex);
    request[2] = 'X';  // in the tag
    EXPECT_FALSE(Decode(request).status.ok());
}

TEST(TokenSpeedCases, AuxFramesOnAnOutputAreIgnored) {
    const std::string payload = FromHex(std::string{"99"} + kOutTagHex + kColumnsHex);
    const std::string_view frames[] = {payload, "junk"};
    OutputsMessage message;
    EXPECT_TRUE(DecodeOutputs(frames, message).ok());
}

TEST(TokenSpeedCases, NegativeNumbersAreReadAsTheyAreAndNeverWritten) {
    const std::string payload = FromHex(std::string{"9e"} + kOutTagHex +
                                        "91a161 91910a 91a0 91ff 91ff 91ff 9190 9190 ff ff ff ff ff");
    const std::string_view frame = payload;
    OutputsMessage message;
    ASSERT_TRUE(DecodeOutputs({&frame, 1}, message).ok());
    EXPECT_EQ(message.engine_index, -1);
    EXPECT_EQ(message.load.num_running, -1);
    EXPECT_EQ(message.load.kv_total_pages, -1);
    EXPECT_FALSE(message.has_load());
    EXPECT_EQ(message.rows[0].completion_tokens, -1);
    OutputsBatch batch;
    const RequestOutput row = Row("a", {1}, FinishReason::kNone, -1, -1, -1);
    batch.outputs = {&row, 1};
    batch.load = {-1, -1, -1, -1, -1.0, 0, 0};
    std::string out;
    EncodeOutputs(batch, out);
    EXPECT_EQ(ToHex(out), Hex(std::string{"9e"} + kOutTagHex +
                              "91a161 919101 91a0 9100 9100 9100 9190 9190 00 00 00 00 00"));
}

TEST(TokenSpeedCases, FloatForIntIsRefusedAndIntForFloatTaken) {
    OutputsMessage message;
    const std::string float_token = FromHex(std::string{"99"} + kOutTagHex +
                                            "91a161 9191cb4024000000000000 91a0 9103 9101 9100 9190 9190");
    std::string_view frame = float_token;
    EXPECT_FALSE(DecodeOutputs({&frame, 1}, message).ok());
    const std::string int_logprob =
        FromHex(std::string{"99"} + kOutTagHex + "91a161 91910a 91a0 9103 9101 9100 9191ff 91910a");
    frame = int_logprob;
    ASSERT_TRUE(DecodeOutputs({&frame, 1}, message).ok());
    Logprobs logprobs;
    ASSERT_TRUE(DecodeLogprobs(message.rows[0], logprobs).ok());
    EXPECT_EQ(logprobs.logprobs, std::vector<float>{-1.0F});
}

TEST(TokenSpeedCases, LogprobColumnsOfDifferentLengthsCostThatRowItsLogprobsOnly) {
    const std::string payload =
        FromHex(std::string{"99"} + kOutTagHex +
                "92a161a162 92910a910b 92a0a0 920303 920101 920000"
                "92 92cbbfe0000000000000cbbfe0000000000000 91cbbfe0000000000000 92 910a 910b");
    const std::string_view frame = payload;
    OutputsMessage message;
    ASSERT_TRUE(DecodeOutputs({&frame, 1}, message).ok());
    Logprobs logprobs;
    EXPECT_FALSE(DecodeLogprobs(message.rows[0], logprobs).ok());
    EXPECT_TRUE(DecodeLogprobs(message.rows[1], logprobs).ok());
    EXPECT_EQ(logprobs.token_ids, std::vector<TokenId>{11});
}

TEST(TokenSpeedCases, MatchedStopIsNamedAsVllmWouldNameIt) {
    SamplingParams params;
    params.stop_token_ids = {6, 2};
    params.eos_token_id = 2;
    const auto stop = [&](FinishReason reason, std::vector<TokenId> delta) {
        return MatchedStop(reason, delta, NamedStops(params));
    };
    EXPECT_EQ(stop(FinishReason::kStop, {4, 6}), StopReason{std::int64_t{6}});
    EXPECT_EQ(stop(FinishReason::kStop, {4, 2}), StopReason{});
    EXPECT_EQ(stop(FinishReason::kStop, {4}), StopReason{});
    EXPECT_EQ(stop(FinishReason::kStop, {}), StopReason{});
    EXPECT_EQ(stop(FinishReason::kLength, {6}), StopReason{});
    EXPECT_EQ(stop(FinishReason::kNone, {6}), StopReason{});
    params.ignore_eos = true;
    EXPECT_EQ(stop(FinishReason::kStop, {4, 2}), StopReason{std::int64_t{2}}) << "asked for by id";
}

TEST(TokenSpeedCases, HostileOutputsAreRefusedAtEveryByte) {
    OutputsMessage message;
    const std::string payload = FromHex(std::string{"9e"} + kOutTagHex + kColumnsHex + "03 02 05 64 cd0190");
    for (std::size_t size = 0; size < payload.size(); ++size) {
        const std::string_view cut = std::string_view{payload}.substr(0, size);
        EXPECT_FALSE(DecodeOutputs({&cut, 1}, message).ok()) << size;
    }
    std::string deep(100000, '\x91');
    deep.push_back('\xc0');
    for (int element = 1; element < 9; ++element) {
        std::string hostile = FromHex(std::string{"99"} + kOutTagHex);
        const std::string_view columns[] = {"91a161", "91910a", "91a0", "9103",
                                            "9101",   "9100",   "9190", "9190"};
        for (int i = 1; i < 9; ++i) {
            hostile += i == element ? deep : FromHex(columns[i - 1]);
        }
        const std::string_view frame = hostile;
        EXPECT_FALSE(DecodeOutputs({&frame, 1}, message).ok()) << element;
        hostile = FromHex(std::string{"99"} + kOutTagHex);
        for (int i = 1; i < 9; ++i) {
            hostile += FromHex(i == element ? "ddffffffff" : columns[i - 1]);
        }
        const std::string_view lying = hostile;
        EXPECT_FALSE(DecodeOutputs({&lying, 1}, message).ok()) << element;
    }
    std::string many = FromHex(std::string{"99"} + kOutTagHex);
    Writer w{many};
    w.Array(kMaxRowsPerMessage + 1);
    many.append(kMaxRowsPerMessage + 1, '\xa0');
    const std::string_view frame = many;
    EXPECT_FALSE(DecodeOutputs({&frame, 1}, message).ok());
}

TEST(TokenSpeedCases, DecodingInSteadyStateAllocatesNothing) {
    std::vector<RequestOutput> rows;
    for (int i = 0; i < 256; ++i) {
        rows.push_back(
            Row("chatcmpl-0123456789abcdef-" + std::to_string(i), {i}, FinishReason::kNone, 10, 1, 0));
    }
    OutputsBatch batch;
    batch.outputs = rows;
    std::string payload;
    EncodeOutputs(batch, payload);
    const std::string_view frame = payload;
    OutputsMessage message;
    ASSERT_TRUE(DecodeOutputs({&frame, 1}, message).ok());
    const std::uint64_t before = test::AllocationCount();
    ASSERT_TRUE(DecodeOutputs({&frame, 1}, message).ok());
    EXPECT_EQ(test::AllocationCount(), before);
    EXPECT_EQ(message.rows.size(), 256U);
}

// ---- requests ----

TEST(TokenSpeedCases, RequestsOfSixToThirtyElementsAreTaken) {
    const std::string_view elements[] = {"a172", "c0", "c0", "9101", "90",
                                         "c2",   "ff", "00", "c0",   "c3",
                                         "c0",   "c0", "c0", "c2",   "cb0000000000000000",
                                         "c0",   "c0", "c0", "c0",   "c0",
                                         "c0",   "c0", "c0", "c0"};
    for (int count = 0; count <= 30; ++count) {
        std::string payload;
        Writer w{payload};
        w.Array(static_cast<std::size_t>(count));
        for (int i = 0; i < count; ++i) {
            if (i == 0) {
                w.Raw(FromHex(kAddTagHex));
            } else if (i <= 24) {
                w.Raw(FromHex(elements[i - 1]));
            } else {
                w.Ext(42, "later");
            }
        }
        const DecodedRequest add = Decode(payload);
        EXPECT_EQ(add.status.ok(), count >= 6)
            << count << (add.status.ok() ? "" : add.status.error().message);
        EXPECT_EQ(add.has_rid, count >= 2) << count;
        EXPECT_EQ(add.request.stream, count > 10) << count;
    }
}

TEST(TokenSpeedCases, RidMustBeAString) {
    for (const char* rid : {"c0", "91a161", "05", "c40172", "a2c328"}) {
        const DecodedRequest add = Decode(Add(rid, "9101", "90"));
        EXPECT_FALSE(add.status.ok()) << rid;
        EXPECT_FALSE(add.has_rid) << rid;
        EXPECT_EQ(add.status.error().param, "rid");
    }
}

TEST(TokenSpeedCases, ALongRidIsRefusedUnderItself) {
    std::string rid;
    Writer{rid}.Str(std::string(kMaxRequestIdBytes + 1, 'x'));
    const DecodedRequest add = Decode(Add(ToHex(rid), "9101", "90"));
    EXPECT_FALSE(add.status.ok());
    EXPECT_TRUE(add.has_rid);
    EXPECT_EQ(add.request.rid.size(), kMaxRequestIdBytes + 1);
}

TEST(TokenSpeedCases, WhatKillsARealEngineIsAnAbortRowHere) {
    EXPECT_EQ(ParamOf(Add("a172", "9101", "90")), "");
    EXPECT_EQ(ParamOf(Add("a172", "90", "90")), "input_ids");
    EXPECT_EQ(ParamOf(Add("a172", "c0", "90")), "input_ids");
    EXPECT_EQ(ParamOf(Add("a172", "91ce80000000", "90")), "input_ids");
    EXPECT_EQ(ParamOf(Add("a172", "91ce7fffffff", "90")), "");
    EXPECT_EQ(ParamOf(Add("a172", "91cfffffffffffffffff", "90")), "input_ids");
    RankLimits limits;
    limits.max_prompt_tokens = 2;
    EXPECT_EQ(ParamOf(Add("a172", "920101", "90"), limits), "");
    EXPECT_EQ(ParamOf(Add("a172", "93010101", "90"), limits), "prompt");
    // stream_interval, element 21 of the parameters
    const std::string to_21 =
        "c0c0c0cb3ff0000000000000cb3ff0000000000000ffcb0000000000000000cb0000000000000000"
        "cb0000000000000000cb3ff000000000000000c0c0c0c0c2c3c3c2c0c0";
    EXPECT_EQ(ParamOf(Add("a172", "9101", "dc0016" + to_21 + "00")), "stream_interval");
    EXPECT_EQ(ParamOf(Add("a172", "9101", "dc0016" + to_21 + "01")), "");
}

/// One sampling element set by hand, the rest default.
std::string WithSampling(int index, std::string_view hex) {
    const std::string_view defaults[] = {"c0",
                                         "c0",
                                         "c0",
                                         "cb3ff0000000000000",
                                         "cb3ff0000000000000",
                                         "ff",
                                         "cb0000000000000000",
                                         "cb0000000000000000",
                                         "cb0000000000000000",
                                         "cb3ff0000000000000",
                                         "00",
                                         "c0",
                                         "c0",
                                         "c0",
                                         "c0",
                                         "c2",
                                         "c3",
                                         "c3",
                                         "c2",
                                         "c0",
                                         "c0",
                                         "c0",
                                         "c0",
                                         "c0",
                                         "c0",
                                         "01",
                                         "c0",
                                         "00",
                                         "c2"};
    std::string sampling = "dc001d";
    for (int i = 0; i < 29; ++i) {
        sampling += i == index ? hex : defaults[i];
    }
    return Add("a172", "9101", sampling);
}

TEST(TokenSpeedCases, SamplingLimits) {
    EXPECT_EQ(ParamOf(WithSampling(-1, "")), "");
    EXPECT_EQ(ParamOf(WithSampling(5, "00")), "top_k");
    EXPECT_EQ(ParamOf(WithSampling(5, "7f")), "");
    EXPECT_EQ(ParamOf(WithSampling(5, "cc80")), "top_k");
    EXPECT_EQ(ParamOf(WithSampling(5, "ce40000000")), "");
    EXPECT_EQ(ParamOf(WithSampling(5, "ce40000001")), "top_k");
    EXPECT_EQ(ParamOf(WithSampling(25, "02")), "n");
    EXPECT_EQ(ParamOf(WithSampling(24, "01")), "logprobs");
    EXPECT_EQ(ParamOf(WithSampling(24, "00")), "");
    EXPECT_EQ(ParamOf(WithSampling(0, "ff")), "max_new_tokens");
    EXPECT_EQ(ParamOf(WithSampling(10, "ff")), "min_new_tokens");
    EXPECT_EQ(ParamOf(WithSampling(4, "cb0000000000000000")), "top_p");
    EXPECT_EQ(ParamOf(WithSampling(9, "cb4004000000000000")), "repetition_penalty");
    EXPECT_EQ(ParamOf(WithSampling(9, "cb0000000000000000")), "");
    EXPECT_EQ(ParamOf(WithSampling(22, "81a178cb3ff0000000000000")), "logit_bias");
    EXPECT_EQ(ParamOf(WithSampling(22, "81a135cb3ff0000000000000")), "");
    RankLimits no_grammar;
    no_grammar.grammar = false;
    EXPECT_EQ(ParamOf(WithSampling(12, "a161"), no_grammar), "grammar");
    EXPECT_EQ(ParamOf(WithSampling(12, "a161")), "");
}

TEST(TokenSpeedCases, LogprobsGate) {
    RankLimits off;
    off.output_logprobs = false;
    const auto add = [](const char* tail, int count) { return Add("a172", "93010203", "90", tail, count); };
    EXPECT_EQ(ParamOf(add("c3", 1)), "");
    EXPECT_EQ(ParamOf(add("c3", 1), off), "return_logprob");
    EXPECT_EQ(ParamOf(add("c3ff02", 3)), "top_logprobs_num");
    EXPECT_EQ(ParamOf(add("c300", 2)), "logprob_start_len");
    EXPECT_EQ(ParamOf(add("c302", 2)), "");
    EXPECT_EQ(ParamOf(add("c303", 2)), "logprob_start_len");
    EXPECT_EQ(ParamOf(add("c3fe", 2)), "logprob_start_len");
    EXPECT_EQ(ParamOf(add("c3ff009105", 4)), "token_ids_logprob");
    EXPECT_EQ(ParamOf(add("c20004", 3)), "");  // nothing was asked: the rest is ignored
}

TEST(TokenSpeedCases, UnknownTypeFrames) {
    EXPECT_EQ(ParseTypeFrame(std::string_view{"\0", 1}), RequestType::kAdd);
    EXPECT_EQ(ParseTypeFrame("\1"), RequestType::kAbort);
    for (const std::string_view frame :
         {std::string_view{}, std::string_view{"\2"}, std::string_view{"\3"}, std::string_view{"\0\0", 2}}) {
        EXPECT_FALSE(ParseTypeFrame(frame).has_value());
    }
}

TEST(TokenSpeedCases, HostileRequestsAreRefusedAtEveryByte) {
    const std::string payload = FromHex(kTextAddHex);
    for (std::size_t size = 0; size < payload.size(); ++size) {
        EXPECT_FALSE(Decode(std::string_view{payload}.substr(0, size)).status.ok()) << size;
    }
    const DecodedRequest trailing = Decode(payload + '\x00');
    EXPECT_FALSE(trailing.status.ok());
    EXPECT_TRUE(trailing.has_rid);
    std::string deep(100000, '\x91');
    deep.push_back('\xc0');
    for (const char* element : {"ddffffffff", "dfffffffff", "dbffffffff"}) {
        EXPECT_FALSE(Decode(Add("a172", element, "90")).status.ok());
        EXPECT_FALSE(Decode(Add("a172", "9101", element)).status.ok());
    }
    for (int index = 0; index < 29; ++index) {
        EXPECT_FALSE(Decode(WithSampling(index, "ddffffffff")).status.ok()) << index;
        EXPECT_FALSE(Decode(WithSampling(index, ToHex(deep))).status.ok()) << index;
    }
}

// ---- the gateway's side of the same rules ----

TEST(TokenSpeedCases, GatewayRefusesWhatTheEngineCannotTake) {
    ReadyResponse ready;
    ready.max_model_len = 1024;
    ready.block_size = 16;
    ready.kv_cache_size_tokens = 1024;
    EXPECT_EQ(LongestPrompt(ready), 1006);
    EXPECT_EQ(LongestPrompt(ready, 4), 1003);
    ready.kv_cache_size_tokens = 0;
    EXPECT_EQ(LongestPrompt(ready), 0);
    ready.kv_cache_size_tokens.reset();
    EXPECT_EQ(LongestPrompt(ready), 1022);
    RankLimits limits;
    limits.max_prompt_tokens = 10;
    limits.vocab_size = 100;
    const auto param = [&limits](auto change) {
        GenerateRequest request;
        request.id = "r";
        request.prompt_token_ids = {1};
        change(request);
        const Status status = CheckRequest(request, limits);
        return status.ok() ? std::string{} : status.error().param;
    };
    using R = GenerateRequest;
    EXPECT_EQ(param([](R&) {}), "");
    EXPECT_EQ(param([](R& r) { r.prompt_token_ids.clear(); }), "prompt");
    EXPECT_EQ(param([](R& r) { r.prompt_token_ids.assign(11, 1); }), "prompt");
    EXPECT_EQ(param([](R& r) { r.prompt_token_ids.assign(10, 1); }), "");
    EXPECT_EQ(param([](R& r) { r.prompt_token_ids = {100}; }), "prompt");
    EXPECT_EQ(param([](R& r) { r.sampling.top_k = 127; }), "");
    EXPECT_EQ(param([](R& r) { r.sampling.top_k = 128; }), "top_k");
    EXPECT_EQ(param([](R& r) { r.sampling.logprobs = 0; }), "");
    EXPECT_EQ(param([](R& r) { r.sampling.logprobs = 2; }), "top_logprobs");
    EXPECT_EQ(param([](R& r) { r.sampling.prompt_logprobs = 0; }), "prompt_logprobs");
    EXPECT_EQ(param([](R& r) { r.sampling.max_tokens = 0; }), "max_tokens");
    EXPECT_EQ(param([](R& r) { r.sampling.allowed_token_ids = {1}; }), "allowed_token_ids");
    EXPECT_EQ(param([](R& r) { r.sampling.bad_words = {"x"}; }), "bad_words");
    EXPECT_EQ(param([](R& r) { r.cache_salt = "s"; }), "cache_salt");
    EXPECT_EQ(param([](R& r) { r.lora = LoraRequest{"a", 1, "p", {}}; }), "model");
    limits.grammar = false;
    EXPECT_EQ(param([](R& r) { r.sampling.structured_outputs.emplace(); }), "response_format");
    limits.output_logprobs = false;
    EXPECT_EQ(param([](R& r) { r.sampling.logprobs = 0; }), "logprobs");
}

TEST(TokenSpeedCases, GreedyTravelsAsTopKOneWithSeedZero) {
    GenerateRequest request;
    request.id = "r";
    request.prompt_token_ids = {1};
    request.sampling.temperature = 0.0;
    request.sampling.seed = 99;
    std::string payload;
    EncodeAdd(request, payload);
    DecodedRequest decoded = Decode(payload);
    ASSERT_TRUE(decoded.status.ok());
    EXPECT_EQ(decoded.request.sampling.temperature, 1.0);
    EXPECT_EQ(decoded.request.sampling.top_k, 1);
    EXPECT_EQ(decoded.request.sampling.seed, 0U);
    Normalise(decoded.request);
    const GenerateRequest neutral = ToGenerateRequest(std::move(decoded.request));
    EXPECT_EQ(neutral.sampling.temperature, 0.0);
}

}  // namespace
}  // namespace rankgate::wire::tokenspeed
