// SPDX-License-Identifier: Apache-2.0
// Requests beyond the captured ones: worked bytes, every malformed shape that deafens a real engine, hostile
// lengths.
#include "wire/vllm/request.h"

#include <gtest/gtest.h>
#include <functional>

#include "wire/test_vectors.h"
#include "wire/vllm/validate.h"

namespace rankgate::wire::vllm {
namespace {

using test::FromHex;
using test::ToHex;

/// Bytes of an ADD whose elements are the default ones, except that element `index` is what `write` writes.
template <class Write>
std::string AddWith(std::size_t index, Write write, std::size_t elements = 21) {
    std::string out;
    Writer w{out};
    w.Array(elements);
    for (std::size_t i = 0; i < elements; ++i) {
        if (i == index) {
            write(w);
        } else if (i == 0) {
            w.Str("r1");
        } else if (i == 1) {
            w.Ints(std::vector<std::int32_t>{1, 2, 3});
        } else if (i == 3) {
            w.Map(1);
            w.Str("max_tokens");
            w.Int(8);
        } else if (i == 5) {
            w.Float(1.0);
        } else if (i == 11) {
            w.Int(4);
        } else if (i == 12 || i == 13) {
            w.Int(0);
        } else if (i == 15 || i == 19) {
            w.Bool(false);
        } else {
            w.Nil();
        }
    }
    return out;
}

template <class Write>
std::string AddWithSampling(std::string_view key, Write write) {
    return AddWith(3, [&](Writer& w) {
        w.Map(2);
        w.Str("max_tokens");
        w.Int(8);
        w.Str(key);
        write(w);
    });
}

DecodedAdd Decode(std::string_view payload) {
    DecodedAdd out;
    DecodeAdd(payload, out);
    return out;
}

TEST(VllmRequest, WorkedBytesOfTheMinimalAddDecode) {
    const DecodedAdd add =
        Decode(FromHex("99a2723193010203c081aa6d61785f746f6b656e7308c0cb3ff0000000000000c0c0c0"));
    ASSERT_TRUE(add.status.ok()) << add.status.error().message;
    EXPECT_EQ(add.request.id, "r1");
    EXPECT_EQ(add.request.prompt_token_ids, (std::vector<TokenId>{1, 2, 3}));
    EXPECT_EQ(add.request.sampling.max_tokens, 8);
    EXPECT_EQ(add.request.arrival_time, 1.0);
}

TEST(VllmRequest, WorkedBytesOfAbortWaveAndUtility) {
    std::string out;
    EncodeAbort(std::vector<std::string_view>{"r1", "r2"}, out);
    EXPECT_EQ(ToHex(out), "92a27231a27232");
    out.clear();
    EncodeStartDpWave({3, 1}, out);
    EXPECT_EQ(ToHex(out), "920301");
    out.clear();
    EncodeStartDpWave({4, std::nullopt}, out);
    EXPECT_EQ(ToHex(out), "9204c0");
    out.clear();
    Writer writer{out};
    BeginUtility(writer, 0, 7, "is_sleeping", 0);
    EXPECT_EQ(ToHex(out), "940007ab69735f736c656570696e6790");
    out.clear();
    BeginUtility(writer, 0, 8, "pause_scheduler", 2);
    writer.Str("abort");
    writer.Bool(true);
    EXPECT_EQ(ToHex(out), "940008af70617573655f7363686564756c657292a561626f7274c3");
}

TEST(VllmRequest, TakesEveryLengthFromNineUp) {
    for (const std::size_t elements : {9U, 10U, 19U, 20U, 21U, 22U, 23U, 30U}) {
        const DecodedAdd add = Decode(AddWith(
            999, [](Writer&) {}, elements));
        EXPECT_TRUE(add.status.ok()) << elements << add.status.error().message;
        EXPECT_EQ(add.request.client_index, elements > 11 ? 4 : 0);
    }
    for (std::size_t elements = 0; elements < 9; ++elements) {
        const DecodedAdd add = Decode(AddWith(
            999, [](Writer&) {}, elements));
        EXPECT_FALSE(add.status.ok()) << elements;
        EXPECT_EQ(add.has_id, elements > 0);
    }
}

TEST(VllmRequest, ATailOfJunkIsIgnored) {
    std::string payload = AddWith(
        999, [](Writer&) {}, 22);
    payload[2] = 25;  // array16 header: three elements more
    Writer w{payload};
    w.Ext(77, "junk");
    w.Map(1);
    w.Int(5);
    w.Nil();
    w.Bin("x");
    const DecodedAdd add = Decode(payload);
    EXPECT_TRUE(add.status.ok()) << add.status.error().message;
}

struct Bad {
    const char* param;
    std::string payload;
};

std::vector<Bad> BadRequests() {
    std::vector<Bad> bad;
    const auto element = [&](std::size_t index, const char* param, auto write) {
        bad.push_back({param, AddWith(index, write)});
    };
    const auto sampling = [&](const char* param, const char* key, auto write) {
        bad.push_back({param, AddWithSampling(key, write)});
    };
    const auto integer = [](Writer& w) { w.Int(5); };
    const auto text = [](Writer& w) { w.Str("x"); };
    const auto real = [](Writer& w) { w.Float(0.5); };
    const auto yes = [](Writer& w) { w.Bool(true); };
    const auto nil = [](Writer& w) { w.Nil(); };
    const auto empty_map = [](Writer& w) { w.Map(0); };
    element(1, "prompt_token_ids", real);
    element(1, "prompt_token_ids", nil);
    element(1, "prompt_token_ids", [](Writer& w) {
        w.Array(1);
        w.Float(1.0);
    });
    element(1, "prompt_token_ids", [](Writer& w) {
        w.Array(1);
        w.Bool(true);
    });
    element(1, "prompt_token_ids", [](Writer& w) {
        w.Array(1);
        w.Int(std::int64_t{1} << 40);
    });
    element(2, "mm_features", [](Writer& w) {
        w.Array(1);
        w.Map(0);
    });
    element(3, "sampling_params", nil);
    element(3, "sampling_params", integer);
    element(4, "pooling_params", empty_map);
    element(5, "arrival_time", text);
    element(5, "arrival_time", nil);
    element(6, "lora_request", empty_map);
    element(6, "lora_request", [](Writer& w) {
        w.Array(4);
        w.Str("a");
        w.Int(0);
        w.Str("p");
        w.Nil();
    });
    element(7, "cache_salt", integer);
    element(8, "data_parallel_rank", text);
    element(9, "prompt_embeds", yes);
    element(11, "client_index", nil);
    element(12, "current_wave", nil);
    element(13, "priority", real);
    element(14, "trace_headers", text);
    element(10, "prompt_is_token_ids", integer);
    element(16, "external_req_id", integer);
    element(17, "reasoning_ended", integer);
    element(18, "reasoning_parser_kwargs", integer);
    element(20, "session_id", integer);
    element(15, "resumable", nil);
    element(15, "resumable", yes);
    element(19, "abort_immediately", integer);
    sampling("sampling_params.temperature", "temperature", text);
    sampling("sampling_params.temperature", "temperature", nil);
    sampling("sampling_params.top_p", "top_p", yes);
    sampling("sampling_params.top_k", "top_k", real);
    sampling("sampling_params.top_k", "top_k", [](Writer& w) { w.Int(-2); });
    sampling("sampling_params.max_tokens", "max_tokens", nil);
    sampling("sampling_params.logprobs", "logprobs", yes);
    sampling("sampling_params.ignore_eos", "ignore_eos", integer);
    sampling("sampling_params.logit_bias", "logit_bias", [](Writer& w) {
        w.Map(1);
        w.Str("5");
        w.Float(1.0);
    });
    sampling("sampling_params.extra_args", "extra_args", integer);
    sampling("sampling_params.n", "n", [](Writer& w) { w.Int(0); });
    sampling("sampling_params.output_kind", "output_kind", [](Writer& w) { w.Int(7); });
    sampling("sampling_params.stream_interval", "stream_interval", [](Writer& w) { w.Int(0); });
    sampling("sampling_params.thinking_token_budget", "thinking_token_budget", [](Writer& w) { w.Int(-2); });
    sampling("sampling_params.stop", "stop", [](Writer& w) {
        w.Array(1);
        w.Str("");
    });
    sampling("sampling_params.bad_words", "bad_words", [](Writer& w) {
        w.Array(1);
        w.Str("");
    });
    sampling("sampling_params.structured_outputs", "structured_outputs", empty_map);
    sampling("sampling_params.structured_outputs", "structured_outputs", [](Writer& w) {
        w.Map(2);
        w.Str("regex");
        w.Str("a");
        w.Str("grammar");
        w.Str("b");
    });
    sampling("sampling_params.structured_outputs.choice", "structured_outputs", [](Writer& w) {
        w.Map(1);
        w.Str("choice");
        w.Array(1);
        w.Str("a");
    });
    sampling("sampling_params.repetition_detection", "repetition_detection", text);
    return bad;
}

TEST(VllmRequest, EveryMistakeIsNamedAndLeavesTheRequestAnswerable) {
    for (const Bad& bad : BadRequests()) {
        const DecodedAdd add = Decode(bad.payload);
        ASSERT_FALSE(add.status.ok()) << bad.param << " " << ToHex(bad.payload);
        EXPECT_EQ(add.status.error().param, bad.param) << add.status.error().message;
        EXPECT_EQ(add.status.error().code, ErrorCode::kInvalidArgument);
        EXPECT_TRUE(add.has_id) << bad.param;
        EXPECT_EQ(add.request.id, "r1") << bad.param;
        if (std::string_view{bad.param} != "client_index") {
            EXPECT_EQ(add.request.client_index, 4) << bad.param << ": read behind the mistake";
        }
    }
}

TEST(VllmRequest, KvHintsMustBeAMapThatSaysSomething) {
    EXPECT_FALSE(Decode(AddWith(
                            21, [](Writer& w) { w.Map(0); }, 22))
                     .status.ok());
    EXPECT_FALSE(Decode(AddWith(
                            21, [](Writer& w) { w.Int(1); }, 22))
                     .status.ok());
    EXPECT_TRUE(Decode(AddWith(
                           21,
                           [](Writer& w) {
                               w.Map(1);
                               w.Str("protocol_version");
                               w.Int(1);
                           },
                           22))
                    .status.ok());
}

TEST(VllmRequest, AnUnreadableIdLeavesNothingToAnswer) {
    for (const char* hex : {"05", "c0", "c40172", "a2c328"}) {
        const std::string raw = FromHex(hex);
        const DecodedAdd add = Decode(AddWith(0, [&](Writer& w) { w.Raw(raw); }));
        EXPECT_FALSE(add.status.ok()) << hex;
        EXPECT_FALSE(add.has_id) << hex;
        EXPECT_EQ(add.status.error().param, "request_id") << hex;
    }
    const DecodedAdd empty = Decode(AddWith(0, [](Writer& w) { w.Str(""); }));
    EXPECT_TRUE(empty.status.ok());
    EXPECT_TRUE(empty.has_id);
    const DecodedAdd longest =
        Decode(AddWith(0, [](Writer& w) { w.Str(std::string(kMaxRequestIdBytes + 1, 'x')); }));
    EXPECT_TRUE(longest.has_id);  // so that an error can be answered under it
    EXPECT_EQ(longest.request.id.size(), kMaxRequestIdBytes + 1);
    EXPECT_EQ(longest.status.error().param, "request_id");
}

TEST(VllmRequest, BrokenBytesKeepTheIdThatCameBefore) {
    std::string payload = AddWith(999, [](Writer&) {});
    for (std::size_t size = 0; size < payload.size(); ++size) {
        const DecodedAdd add = Decode(std::string_view{payload}.substr(0, size));
        EXPECT_FALSE(add.status.ok()) << size;
        // An array header counts its elements against the bytes that are left, so short cuts fail before the
        // id.
        EXPECT_EQ(add.has_id, size >= 3 + 21) << size;
    }
    payload.push_back('\x00');
    const DecodedAdd trailing = Decode(payload);
    EXPECT_FALSE(trailing.status.ok());
    EXPECT_TRUE(trailing.has_id);
    EXPECT_FALSE(Decode("").status.ok());
    EXPECT_FALSE(Decode(FromHex("c1")).status.ok());
    EXPECT_FALSE(Decode(FromHex("80")).status.ok());
}

TEST(VllmRequest, LyingLengthsNeitherCrashNorAllocate) {
    const std::string lie = FromHex("ddffffffff");
    for (std::size_t index = 0; index < 21; ++index) {
        const DecodedAdd add = Decode(AddWith(index, [&](Writer& w) { w.Raw(lie); }));
        EXPECT_FALSE(add.status.ok()) << index;
    }
    const std::string map_lie = FromHex("dfffffffff");
    for (std::size_t index = 0; index < 21; ++index) {
        EXPECT_FALSE(Decode(AddWith(index, [&](Writer& w) { w.Raw(map_lie); })).status.ok()) << index;
    }
    std::string deep(100000, '\x91');
    deep.push_back('\xc0');
    for (std::size_t index = 0; index < 22; ++index) {
        const DecodedAdd add = Decode(AddWith(
            index, [&](Writer& w) { w.Raw(deep); }, 22));
        EXPECT_EQ(add.has_id, index != 0);
    }
}

TEST(VllmRequest, HarmlessOdditiesPass) {
    const auto passes = [](std::string_view key, auto write) {
        const DecodedAdd add = Decode(AddWithSampling(key, write));
        EXPECT_TRUE(add.status.ok()) << key << ": " << add.status.error().message;
        return add.request.sampling;
    };
    EXPECT_EQ(passes("seed", [](Writer& w) { w.Uint(~std::uint64_t{0}); }).seed, -1);
    EXPECT_EQ(passes("seed", [](Writer& w) { w.Int(-7); }).seed, -7);
    EXPECT_EQ(passes("top_k", [](Writer& w) { w.Int(-1); }).top_k, 0);
    EXPECT_EQ(passes("top_k", [](Writer& w) { w.Int(std::int64_t{1} << 40); }).top_k, INT32_MAX);
    EXPECT_EQ(passes("temperature", [](Writer& w) { w.Int(1); }).temperature, 1.0);
    EXPECT_EQ(passes("n", [](Writer& w) { w.Int(2); }).max_tokens, 8);
    EXPECT_EQ(passes("max_tokens", [](Writer& w) { w.Int(1000000000000); }).max_tokens, 1000000000000);
    EXPECT_EQ(passes("stop_token_ids",
                     [](Writer& w) {
                         w.Array(3);
                         w.Int(std::int64_t{1} << 40);
                         w.Int(-5);
                         w.Int(7);
                     })
                  .stop_token_ids,
              (std::vector<TokenId>{-5, 7}));
    EXPECT_TRUE(passes("allowed_token_ids", [](Writer& w) { w.Array(0); }).allowed_token_ids->empty());
    EXPECT_FALSE(
        passes("thinking_token_budget", [](Writer& w) { w.Int(-1); }).thinking_token_budget.has_value());
    passes("a_key_of_the_future", [](Writer& w) { w.Map(0); });
    const DecodedAdd greedy_n = Decode(AddWith(3, [](Writer& w) {
        w.Map(3);
        w.Str("n");
        w.Int(2);
        w.Str("temperature");
        w.Int(0);
        w.Str("max_tokens");
        w.Int(1);
    }));
    EXPECT_EQ(greedy_n.status.error().param, "sampling_params.n");
}

TEST(VllmRequest, LoraTravelsInFourElementsAndIsReadInEveryLayout) {
    GenerateRequest request;
    request.id = "r";
    request.prompt_token_ids = {1};
    request.lora = LoraRequest{"adapter", 7, "/models/a", "base"};
    std::string payload;
    EncodeAdd(request, payload);
    const DecodedAdd add = Decode(payload);
    ASSERT_TRUE(add.status.ok());
    ASSERT_TRUE(add.request.lora.has_value());
    EXPECT_EQ(add.request.lora->name, "adapter");
    EXPECT_EQ(add.request.lora->id, 7);
    EXPECT_EQ(add.request.lora->base_model_name, "base");
    for (const char* tail : {"96a161 01 a170 c0 c2 c2", "97a161 01 a170 c0 c0 c2 c2", "93a161 01 a170"}) {
        const std::string bytes = FromHex(tail);
        Reader reader{bytes};
        const Result<LoraRequest> lora = ReadLora(reader);
        ASSERT_TRUE(lora.ok()) << tail;
        EXPECT_TRUE(reader.Done()) << tail;
        EXPECT_EQ(lora->path, "p");
    }
}

TEST(VllmRequest, RoundTripKeepsEveryField) {
    GenerateRequest request;
    request.id = "ext-1-abc";
    for (int i = 0; i < 300; ++i) {
        request.prompt_token_ids.push_back(i * 1000);
    }
    request.arrival_time = 12.5;
    request.cache_salt = "salt";
    request.data_parallel_rank = 3;
    request.priority = -9;
    request.trace_headers = {{"traceparent", "00-1"}, {"tracestate", "x"}};
    request.client_index = 1;
    request.current_wave = 1LL << 40;
    SamplingParams& params = request.sampling;
    params.temperature = 0.7;
    params.top_p = 0.9;
    params.min_p = 0.1;
    params.top_k = 40;
    params.presence_penalty = 1.0;
    params.frequency_penalty = -1.0;
    params.repetition_penalty = 1.1;
    params.seed = -5;
    params.max_tokens = 1000;
    params.min_tokens = 2;
    params.stop_token_ids = {5, 6};
    params.eos_token_id = 2;
    params.all_stop_token_ids = {2, 5, 6};
    params.logprobs = 3;
    params.prompt_logprobs = 1;
    params.logit_bias = {{1, 2.5}, {2, -100.0}};
    params.allowed_token_ids = {1, 2};
    params.bad_words = {"w"};
    params.bad_words_token_ids = {{1, 2}, {3}};
    params.skip_reading_prefix_cache = true;
    params.thinking_token_budget = 100;
    StructuredOutputs& structured = params.structured_outputs.emplace();
    structured.kind = StructuredOutputs::Kind::kStructuralTag;
    structured.value = "{}";
    structured.whitespace_pattern = " ?";
    structured.disable_any_whitespace = true;
    structured.backend = "guidance";
    std::string payload;
    EncodeAdd(request, payload);
    DecodedAdd add = Decode(payload);
    ASSERT_TRUE(add.status.ok()) << add.status.error().message;
    std::string again;
    EncodeAdd(add.request, again);
    EXPECT_EQ(ToHex(again), ToHex(payload));
    EXPECT_EQ(add.request.trace_headers, request.trace_headers);
    EXPECT_EQ(add.request.sampling.structured_outputs->whitespace_pattern, " ?");
    EXPECT_EQ(add.request.sampling.structured_outputs->backend, "guidance");
    EXPECT_EQ(add.request.sampling.bad_words_token_ids, params.bad_words_token_ids);
}

TEST(VllmRequest, WhatNoRunnerHasIsRefusedByNameAndNotDropped) {
    const auto with = [](std::string_view key, const std::function<void(Writer&)>& value) {
        return Decode(AddWith(3, [&](Writer& w) {
            w.Map(1);
            w.Str(key);
            value(w);
        }));
    };
    for (const char* key : {"logprob_token_ids", "prompt_logprob_token_ids"}) {
        EXPECT_TRUE(with(key, [](Writer& w) { w.Nil(); }).status.ok()) << key;
        EXPECT_TRUE(with(key, [](Writer& w) { w.Array(0); }).status.ok()) << key;
        const DecodedAdd add = with(key, [](Writer& w) { w.Ints(std::vector<TokenId>{1, 1'000'000}); });
        ASSERT_FALSE(add.status.ok()) << key;
        EXPECT_EQ(add.status.error().param, std::string{"sampling_params."} + key);
        EXPECT_NE(add.status.error().message.find("not supported"), std::string::npos);
        EXPECT_TRUE(add.has_id);
    }
    EXPECT_TRUE(with("repetition_detection", [](Writer& w) { w.Nil(); }).status.ok());
    const DecodedAdd add = with("repetition_detection", [](Writer& w) {
        w.Map(1);
        w.Str("max_pattern_size");
        w.Int(5);
    });
    ASSERT_FALSE(add.status.ok());
    EXPECT_EQ(add.status.error().param, "sampling_params.repetition_detection");
}

TEST(VllmRequest, GreedyDropsTheParametersThatItMakesMeaningless) {
    GenerateRequest request;
    request.id = "r";
    request.prompt_token_ids = {1};
    request.sampling.temperature = 1e-6;
    request.sampling.top_p = 0.5;
    request.sampling.top_k = 5;
    request.sampling.min_p = 0.5;
    std::string payload;
    EncodeAdd(request, payload);
    const DecodedAdd add = Decode(payload);
    EXPECT_EQ(add.request.sampling.temperature, 0.0);
    EXPECT_EQ(add.request.sampling.top_p, 1.0);
    EXPECT_EQ(add.request.sampling.top_k, 0);
    EXPECT_EQ(add.request.sampling.min_p, 0.0);
}

TEST(VllmRequest, EncodersAppend) {
    std::string out = "kept";
    EncodeAbort("r1", out);
    EXPECT_EQ(out.substr(0, 4), "kept");
    EXPECT_EQ(ToHex(out.substr(4)), "91a27231");
}

TEST(VllmRequest, TypeFramesAreComparedWhole) {
    EXPECT_EQ(ParseTypeFrame(std::string_view{"\0", 1}), RequestType::kAdd);
    EXPECT_EQ(ParseTypeFrame("\3"), RequestType::kUtility);
    for (const std::string_view frame :
         {std::string_view{}, std::string_view{"\4", 1}, std::string_view{"\7", 1},
          std::string_view{"\0\0", 2}, std::string_view{"ADD"}}) {
        EXPECT_FALSE(ParseTypeFrame(frame).has_value());
    }
}

TEST(VllmRequest, AbortPassesOverWhatIsNoIdAndRefusesWhatIsNoList) {
    std::vector<std::string_view> ids;
    const std::string mixed = FromHex("94 01 c0 a27231 90");
    EXPECT_TRUE(DecodeAbort(mixed, ids).ok());
    EXPECT_EQ(ids, std::vector<std::string_view>{"r1"});
    for (const char* hex : {"05", "c0", "80", "", "91", "90c0", "ddffffffff"}) {
        const std::string payload = FromHex(hex);
        EXPECT_FALSE(DecodeAbort(payload, ids).ok()) << hex;
        EXPECT_TRUE(ids.empty());
    }
}

TEST(VllmRequest, WavesTakeEverySpellingOfTheExcludedRank) {
    const auto decode = [](const char* hex) { return DecodeStartDpWave(FromHex(hex)); };
    EXPECT_EQ(decode("920301")->exclude, 1);
    EXPECT_FALSE(decode("9203c0")->exclude.has_value());
    EXPECT_FALSE(
        decode("9203c4020100")->exclude.has_value());  // a Python frontend's identity excludes nobody
    EXPECT_EQ(decode("93030105")->wave, 3);
    for (const char* hex : {"90", "92c0c0", "05", "9203", "9203c000"}) {
        EXPECT_FALSE(decode(hex).ok()) << hex;
    }
}

TEST(VllmRequest, AUtilityCallThatCannotBeReadIsStillAnswerable) {
    const auto decode = [](const std::string& payload) { return DecodeUtility(payload); };
    const std::string method_int = FromHex("94 00 07 05 90");
    UtilityCall call = decode(method_int);
    EXPECT_FALSE(call.status.ok());
    EXPECT_TRUE(call.answerable);
    EXPECT_EQ(call.call_id, 7U);
    const std::string args_nil = FromHex("94 01 cfffffffffffffffff a178 c0");
    call = decode(args_nil);
    EXPECT_FALSE(call.status.ok());
    EXPECT_EQ(call.status.error().param, "args");
    EXPECT_TRUE(call.answerable);
    EXPECT_EQ(call.client_index, 1);
    EXPECT_EQ(call.call_id, ~std::uint64_t{0});
    const std::string three = FromHex("93 00 07 a178");
    EXPECT_FALSE(decode(three).answerable);
    const std::string longer = FromHex("95 00 07 a178 9105 c0");
    call = decode(longer);
    EXPECT_TRUE(call.status.ok());
    EXPECT_EQ(call.num_args, 1U);
    EXPECT_EQ(ToHex(call.args), "9105");
}

// ---- what may be sent ----

GenerateRequest Sound() {
    GenerateRequest request;
    request.id = "r";
    request.prompt_token_ids = {1, 2, 3};
    return request;
}

template <class Change>
std::string ParamOf(Change change) {
    GenerateRequest request = Sound();
    change(request);
    const Status status = CheckRequest(request, {512, 1024});
    return status.ok() ? "" : status.error().param;
}

TEST(VllmCheckRequest, RefusesEverythingThatDeafensOrKillsARank) {
    using R = GenerateRequest;
    EXPECT_EQ(ParamOf([](R&) {}), "");
    EXPECT_EQ(ParamOf([](R& r) { r.prompt_token_ids.clear(); }), "prompt");
    EXPECT_EQ(ParamOf([](R& r) { r.prompt_token_ids = {-1}; }), "prompt");
    EXPECT_EQ(ParamOf([](R& r) { r.prompt_token_ids = {1024}; }), "prompt");
    EXPECT_EQ(ParamOf([](R& r) { r.prompt_token_ids = {1023}; }), "");
    EXPECT_EQ(ParamOf([](R& r) { r.prompt_token_ids.assign(511, 1); }), "");
    EXPECT_EQ(ParamOf([](R& r) { r.prompt_token_ids.assign(512, 1); }), "prompt");
    for (const double bad : {-0.1, 2.1, 3.0, std::numeric_limits<double>::quiet_NaN(),
                             std::numeric_limits<double>::infinity()}) {
        EXPECT_EQ(ParamOf([&](R& r) { r.sampling.temperature = bad; }), "temperature") << bad;
    }
    EXPECT_EQ(ParamOf([](R& r) { r.sampling.top_p = 0.0; }), "top_p");
    EXPECT_EQ(ParamOf([](R& r) { r.sampling.top_p = 1.1; }), "top_p");
    EXPECT_EQ(ParamOf([](R& r) { r.sampling.top_k = -2; }), "top_k");
    EXPECT_EQ(ParamOf([](R& r) { r.sampling.min_p = 1.1; }), "min_p");
    EXPECT_EQ(ParamOf([](R& r) { r.sampling.presence_penalty = 2.1; }), "presence_penalty");
    EXPECT_EQ(ParamOf([](R& r) { r.sampling.frequency_penalty = -2.1; }), "frequency_penalty");
    EXPECT_EQ(ParamOf([](R& r) { r.sampling.repetition_penalty = 0.0; }), "repetition_penalty");
    EXPECT_EQ(ParamOf([](R& r) { r.sampling.max_tokens = 0; }), "max_tokens");
    EXPECT_EQ(ParamOf([](R& r) { r.sampling.min_tokens = -1; }), "min_tokens");
    EXPECT_EQ(ParamOf([](R& r) { r.sampling.min_tokens = 17; }), "min_tokens");
    EXPECT_EQ(ParamOf([](R& r) { r.sampling.logprobs = -2; }), "logprobs");
    EXPECT_EQ(ParamOf([](R& r) { r.sampling.logprobs = -1; }), "");
    EXPECT_EQ(ParamOf([](R& r) { r.sampling.logprobs = 1025; }), "logprobs");
    EXPECT_EQ(ParamOf([](R& r) { r.sampling.prompt_logprobs = -5; }), "prompt_logprobs");
    EXPECT_EQ(ParamOf([](R& r) { r.sampling.thinking_token_budget = -2; }), "thinking_token_budget");
    EXPECT_EQ(ParamOf([](R& r) { r.sampling.logit_bias = {{1024, 1.0}}; }), "logit_bias");
    EXPECT_EQ(ParamOf([](R& r) { r.sampling.logit_bias = {{-1, 1.0}}; }), "logit_bias");
    EXPECT_EQ(ParamOf([](R& r) { r.sampling.allowed_token_ids = {1024}; }), "allowed_token_ids");
    EXPECT_EQ(ParamOf([](R& r) { r.sampling.allowed_token_ids.emplace(); }), "");
    EXPECT_EQ(ParamOf([](R& r) {
                  r.sampling.min_tokens = 1;
                  r.sampling.all_stop_token_ids = {1024};
              }),
              "stop_token_ids");
    EXPECT_EQ(ParamOf([](R& r) { r.sampling.all_stop_token_ids = {1024}; }), "");
    EXPECT_EQ(ParamOf([](R& r) { r.sampling.bad_words = {""}; }), "bad_words");
    EXPECT_EQ(ParamOf([](R& r) { r.sampling.bad_words_token_ids = {{}}; }), "bad_words");
    EXPECT_EQ(ParamOf([](R& r) { r.sampling.structured_outputs.emplace().backend.clear(); }),
              "structured_outputs");
    EXPECT_EQ(ParamOf([](R& r) { r.lora = LoraRequest{"a", 0, "p", {}}; }), "lora_request");
}

TEST(VllmCheckRequest, UnknownLimitsSkipTheirChecks) {
    GenerateRequest request = Sound();
    request.prompt_token_ids.assign(100000, 2000000);
    EXPECT_TRUE(CheckRequest(request, {}).ok());
}

}  // namespace
}  // namespace rankgate::wire::vllm
