// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <set>

#include "api/json_scan.h"
#include "api/test_support.h"

namespace rankgate::api {
namespace {

using test::Build;
using test::ByteModel;
using test::Chat;
using test::Completion;
using test::Json;
using test::Outcome;

const ModelInfo& Model() {
    static const std::shared_ptr<ModelInfo> model = ByteModel();
    return *model;
}

Outcome BuildChat(const std::string& more) {
    return Build(Endpoint::kChat, Chat(more), Model());
}
Outcome BuildCompletion(const std::string& more) {
    return Build(Endpoint::kCompletion, Completion(more), Model());
}

void ExpectRefused(const Outcome& outcome, std::string_view param, const std::string& what) {
    EXPECT_FALSE(outcome.ok) << what;
    EXPECT_EQ(HttpStatus(outcome.error.code), 400) << what;
    EXPECT_EQ(OpenAiType(outcome.error.code), "invalid_request_error") << what;
    EXPECT_EQ(outcome.error.param, param) << what << ": " << outcome.error.message;
    EXPECT_FALSE(outcome.error.message.empty()) << what;
    EXPECT_TRUE(outcome.requests.empty()) << what;
}

// ---- Bodies ----

TEST(Bodies, ThatAreNoJsonObjectAreRefusedWithoutAParam) {
    for (const std::string body :
         {"", " ", "{", "null", "[]", "\"x\"", "1", "{\"a\"", "{} {}", "nul", "{'a':1}", "[1,2"}) {
        ExpectRefused(Build(Endpoint::kChat, body, Model()), "", body);
        ExpectRefused(Build(Endpoint::kCompletion, body, Model()), "", body);
    }
}

TEST(Bodies, MessagesNeverNameInternals) {
    Parser parser;
    for (const std::string body : {"", "{", "[]", "{\"n\":1e999}", "{\"messages\":5}", "\xff"}) {
        const Error error = parser.ParseChat(body).error();
        for (const char* word : {"simdjson", "std::", "SUCCESS", "TAPE", "0x"}) {
            EXPECT_EQ(error.message.find(word), std::string::npos) << error.message;
        }
    }
}

TEST(Bodies, BytesThatAreNotUtf8AreRefused) {
    const std::string head = R"({"model":"m","messages":[{"role":"user","content":")";
    for (const std::string text :
         {"\xff", "\xc0\x80", "\xed\xa0\x80", "\xb0\xa1\xc4\xe3", "\xf4\x90\x80\x80", "\xe2\x82"}) {
        ExpectRefused(Build(Endpoint::kChat, head + text + R"("}]})", Model()), "", text);
    }
    const std::string utf16{"{\0\"\0a\0\"\0:\0001\0}\0", 14};
    ExpectRefused(Build(Endpoint::kChat, utf16, Model()), "", "UTF-16");
    ExpectRefused(Build(Endpoint::kChat, "\xEF\xBB\xBF" + Chat(), Model()), "", "BOM");
}

TEST(Bodies, LoneSurrogatesAreRefusedAndPairsAreNot) {
    const auto with = [](const std::string& text) {
        return Build(Endpoint::kChat, R"({"messages":[{"role":"user","content":")" + text + R"("}]})",
                     Model());
    };
    for (const std::string text : {R"(\ud800)", R"(\udc00)", R"(\uD83Dx)", R"(\ud83d\ud83d)", R"(\ud83d\n)",
                                   R"(a\udfffb)", R"(\\\ud800)"}) {
        ExpectRefused(with(text), "", text);
    }
    EXPECT_TRUE(with(R"(\ud83d\ude00)").ok);
    EXPECT_TRUE(with(R"(\\ud800)").ok);
    EXPECT_TRUE(with(R"(C:\\udev)").ok);
}

TEST(Bodies, NestingIsBounded) {
    std::string deep = R"({"messages":)";
    deep.append(100000, '[');
    ExpectRefused(Build(Endpoint::kChat, deep, Model()), "", "unclosed");
    deep.append(100000, ']');
    deep += "}";
    ExpectRefused(Build(Endpoint::kChat, deep, Model()), "", "deep");
}

TEST(Bodies, WhatATemplateIsHandedMayNestLessDeepAndIsNamed) {
    for (const int depth : {99, 100, 101, 120}) {
        const std::string deep = std::string(static_cast<std::size_t>(depth - 1), '[') + R"("[\"[")" +
                                 std::string(static_cast<std::size_t>(depth - 1), ']');
        for (const auto& [field, value] :
             {std::pair{std::string{"documents"}, "[" + deep + "]"},
              std::pair{std::string{"chat_template_kwargs"}, R"({"a":)" + deep + "}"}}) {
            const auto parsed = Parser{}.ParseChat(Chat("\"" + field + "\":" + value));
            EXPECT_EQ(parsed.ok(), depth <= 100) << field << depth;
            if (!parsed.ok()) {
                EXPECT_EQ(parsed.error().param, field);
            }
        }
    }
}

TEST(Bodies, AFieldGivenTwiceIsRefusedByName) {
    ExpectRefused(BuildChat(R"("n":1,"n":2)"), "n", "n twice");
    ExpectRefused(BuildChat(R"("stop":"a","stop":null)"), "stop", "stop twice");
}

TEST(Bodies, ABigOneDoesNotSpoilTheNext) {
    Parser parser;
    const std::string big = R"({"prompt":")" + std::string(6 << 20, 'a') + "\"}";
    EXPECT_TRUE(parser.ParseCompletion(big).ok());
    EXPECT_TRUE(parser.ParseCompletion(Completion()).ok());
    EXPECT_FALSE(parser.ParseCompletion("{").ok());
    EXPECT_TRUE(parser.ParseChat(Chat()).ok());
}

TEST(Bodies, UnknownFieldsAreAcceptedAndIgnored) {
    EXPECT_TRUE(
        BuildChat(
            R"("store":true,"metadata":{"a":"b"},"service_tier":"auto","prompt_cache_key":"k","safety_identifier":"s",)"
            R"("verbosity":"low","reasoning_effort":"low","parallel_tool_calls":true,"user":"u","frobnicate":1)")
            .ok);
    EXPECT_TRUE(BuildCompletion(R"("user":"u","metadata":{},"frobnicate":[[{}]])").ok);
}

TEST(Bodies, ExplicitNullMeansNotGiven) {
    // Every field there is, null: the same request as without it.
    const std::string nulls =
        R"("stop":null,"tools":null,"tool_choice":null,"logit_bias":null,"response_format":null,"temperature":null,"top_p":null,"n":null,)"
        R"("stream":null,"stream_options":null,"max_tokens":null,"max_completion_tokens":null,"seed":null,"logprobs":null,)"
        R"("top_logprobs":null,"presence_penalty":null,"frequency_penalty":null,"top_k":null,"min_p":null,"repetition_penalty":null,)"
        R"("min_tokens":null,"ignore_eos":null,"stop_token_ids":null,"bad_words":null,"allowed_token_ids":null,"priority":null,)"
        R"("cache_salt":null,"kv_transfer_params":null,"structured_outputs":null,"guided_json":null,"functions":null,"function_call":null,)"
        R"("chat_template":null,"chat_template_kwargs":null,"add_generation_prompt":null,"continue_final_message":null,"echo":null,)"
        R"("prompt_logprobs":null,"data_parallel_rank":null,"truncate_prompt_tokens":null,"thinking_token_budget":null,"user":null,)"
        R"("documents":null,"modalities":null,"reasoning_effort":null,"request_id":null,"vllm_xargs":null,"skip_special_tokens":null)";
    const Outcome with = BuildChat(nulls);
    const Outcome without = BuildChat("");
    ASSERT_TRUE(with.ok) << with.error.param << ": " << with.error.message;
    EXPECT_EQ(with.requests[0]->prompt_token_ids, without.requests[0]->prompt_token_ids);
    EXPECT_EQ(with.requests[0]->sampling.max_tokens, without.requests[0]->sampling.max_tokens);
    EXPECT_FALSE(with.requests[0]->sampling.seed.has_value());
    EXPECT_TRUE(
        BuildCompletion(R"("echo":null,"suffix":null,"best_of":null,"logprobs":null,"stop":null)").ok);
}

TEST(Bodies, WhatOthersTakeWithoutHarmIsTaken) {
    EXPECT_TRUE(
        Build(Endpoint::kChat, R"({"model":"","messages":[{"role":"user","content":"x"}]})", Model()).ok);
    EXPECT_EQ(
        Build(Endpoint::kCompletion, R"({"prompt":[5.0,6e0,7]})", Model()).requests.at(0)->prompt_token_ids,
        (std::vector<TokenId>{5, 6, 7}));
    const Outcome off = BuildCompletion(R"("logprobs":false)");
    ASSERT_TRUE(off.ok);
    EXPECT_FALSE(off.requests.at(0)->sampling.logprobs.has_value());
    ExpectRefused(BuildCompletion(R"("logprobs":true)"), "logprobs", "a number is due");
    EXPECT_EQ(BuildChat(R"("repetition_penalty":2.5)").requests.at(0)->sampling.repetition_penalty, 2.5);
    EXPECT_TRUE(BuildChat(R"("kv_transfer_params":{})").ok);
    ExpectRefused(BuildChat(R"("kv_transfer_params":{"do_remote_decode":true})"), "kv_transfer_params",
                  "not empty");
}

TEST(Bodies, WholeNumbersMayBeWrittenAsFloats) {
    const Outcome outcome = BuildChat(
        R"("n":2.0,"max_tokens":5.0,"seed":7.0,"top_k":3.0,"temperature":1,"top_p":1,"logprobs":true,"top_logprobs":2.0)");
    ASSERT_TRUE(outcome.ok) << outcome.error.message;
    EXPECT_EQ(outcome.requests.size(), 2U);
    EXPECT_EQ(outcome.requests[0]->sampling.max_tokens, 5);
    EXPECT_EQ(outcome.requests[0]->sampling.seed, 7);
    EXPECT_EQ(outcome.requests[0]->sampling.top_k, 3);
    EXPECT_EQ(outcome.requests[0]->sampling.logprobs, 2);
}

// ---- Everything that deafens or kills an engine rank ----

struct BadField {
    const char* param;
    std::vector<const char*> values;
};

const std::vector<BadField>& BadFields() {
    static const std::vector<BadField> fields = {
        {"temperature", {"-1", "-0.001", "2.001", "3.0", "\"0.5\"", "true", "[]", "{}", "1e999", "-1e999"}},
        {"top_p", {"0", "-0.1", "1.1", "1e999", "\"1\"", "false"}},
        {"min_p", {"-0.1", "1.1", "\"0\"", "[0]"}},
        {"top_k", {"-2", "1.5", "\"5\"", "4294967296", "18446744073709551615", "true"}},
        {"presence_penalty", {"-2.1", "2.1", "\"1\""}},
        {"frequency_penalty", {"-2.1", "2.1", "{}"}},
        {"repetition_penalty", {"0", "-1", "0.0", "100.1", "1e300", "\"1\""}},
        {"max_tokens",
         {"-1", "1.5", "\"5\"", "1000000000000000000", "9223372036854775808", "1e300", "1e999", "true",
          "[5]"}},
        {"min_tokens", {"-1", "0.5", "\"1\"", "1000000000000", "100000000000000000000"}},
        {"n", {"0", "-1", "1000000", "1.5", "\"1\"", "4294967297", "true"}},
        {"seed",
         {"9223372036854775808", "18446744073709551616", "-9223372036854775809", "1.5", "\"1\"", "true",
          "1e30"}},
        {"stop", {"\"\"", "[\"\"]", "[\"x\",\"\"]", "[\"a\",1]", "5", "{}", "true", "[null]", "[[\"a\"]]"}},
        {"stop_token_ids",
         {"[1000000000]", "[-1]", "[259]", "[1.5]", "[\"1\"]", "5", "[true]", "[18446744073709551615]",
          "[null]"}},
        {"logit_bias",
         {"{\"999999999\":5}", "{\"x\":1}", "{\"-1\":1}", "{\"259\":1}", "{\"1\":\"5\"}", "{\"1\":null}",
          "[]", "{\"1.0\":1}", "{\"\":1}", "{\" 1\":1}", "{\"99999999999999999999\":1}", "{\"1\":true}",
          "{\"1\":1e999}"}},
        {"allowed_token_ids", {"[]", "[259]", "[-1]", "[\"a\"]", "5", "[1.5]"}},
        {"bad_words", {"[\"\"]", "[\" \"]", "[\"a\",\"\\n\"]", "\"a\"", "[1]", "[[]]", "{}"}},
        {"thinking_token_budget", {"-2", "\"1\"", "1.5"}},
        {"ignore_eos", {"1", "\"true\"", "0"}},
        {"skip_special_tokens", {"1", "\"x\""}},
        {"include_stop_str_in_output", {"1"}},
        {"priority", {"1.5", "\"1\"", "9223372036854775808", "true"}},
        {"cache_salt", {"\"\"", "5", "true"}},
        {"data_parallel_rank", {"-1", "1", "1.5", "\"0\"", "true"}},
        {"prompt_logprobs", {"-2", "-1", "21", "1.5", "\"1\"", "true", "1000000"}},
        {"structured_outputs",
         {"{}", "5", "[]", "{\"json\":{},\"regex\":\"a\"}", "{\"frob\":1}", "{\"choice\":[]}",
          "{\"choice\":\"a\"}", "{\"regex\":\"\"}", "{\"regex\":5}", "{\"json\":\"{\"}", "{\"json\":\"[]\"}",
          "{\"json\":5}", "{\"json_object\":1}", "{\"json_object\":false}",
          "{\"json_object\":true,\"_backend\":\"outlines\"}"}},
        {"guided_json", {"5", "\"{\"", "[]"}},
        {"guided_regex", {"\"\"", "5"}},
        {"guided_choice", {"[]", "\"a\"", "{}"}},
        {"guided_grammar", {"\"\"", "{}"}},
        {"response_format",
         {"{}", "5", "\"text\"", "{\"type\":\"sound\"}", "{\"type\":5}", "{\"type\":\"json_schema\"}",
          "{\"type\":\"json_schema\",\"json_schema\":123}",
          "{\"type\":\"json_schema\",\"json_schema\":{\"name\":\"a\"}}",
          "{\"type\":\"json_schema\",\"json_schema\":{\"schema\":5}}",
          "{\"type\":\"json_object\",\"schema\":123}"}},
        {"kv_transfer_params", {"{\"a\":1}", "[1]", "5"}},
        {"vllm_xargs", {"{\"a\":1}"}},
        {"repetition_detection", {"{\"max_pattern_size\":1}"}},
        {"use_beam_search", {"true"}},
        {"length_penalty", {"2.0"}},
        {"logits_processors", {"[\"x\"]"}},
        {"prompt_embeds", {"\"AAAA\""}},
        {"truncate_prompt_tokens", {"0", "-2", "1.5", "100000"}},
        {"stream", {"1", "\"true\""}},
        {"stream_options", {"{}", "{\"include_usage\":true}", "5"}},
        {"return_token_ids", {"1"}},
        {"model", {"5", "[]"}},
        {"best_of", {"0", "5", "\"1\""}},
    };
    return fields;
}

TEST(BadInput, ThatWouldCostARankIsRefusedByNameOnBothRoutes) {
    int cases = 0;
    for (const BadField& field : BadFields()) {
        for (const char* value : field.values) {
            const std::string member = "\"" + std::string{field.param} + "\":" + value;
            const std::string bare = std::string{field.param} == "model" ? "{" + member + "," : std::string{};
            const std::string chat =
                bare.empty() ? Chat(member) : bare + R"("messages":[{"role":"user","content":"hi"}]})";
            const std::string completion = bare.empty() ? Completion(member) : bare + R"("prompt":"hi"})";
            ExpectRefused(Build(Endpoint::kChat, chat, Model()), field.param, member);
            ExpectRefused(Build(Endpoint::kCompletion, completion, Model()), field.param, member);
            cases += 2;
        }
    }
    EXPECT_GT(cases, 300);
}

TEST(BadInput, OfPromptsIsRefused) {
    for (const char* prompt : {"[]", "[[]]", "[-1]", "[259]", "[5279552648203111001]", "[1,\"a\"]",
                               "[\"a\",1]", "[[1],[259]]", "[[1],[]]", "5", "{}", "true", "[null]", "[1.5]",
                               "[18446744073709551615]", "\"\"", "[\"a\",\"\"]", "[[[1]]]", "[true]"}) {
        ExpectRefused(Build(Endpoint::kCompletion, R"({"prompt":)" + std::string{prompt} + "}", Model()),
                      "prompt", prompt);
    }
    ExpectRefused(Build(Endpoint::kCompletion, R"({"model":"m"})", Model()), "prompt", "absent");
    ExpectRefused(Build(Endpoint::kCompletion, R"({"prompt":null})", Model()), "prompt", "null");
}

TEST(BadInput, LogprobsOutsideTheLimitAreRefused) {
    ExpectRefused(BuildChat(R"("top_logprobs":2)"), "top_logprobs", "without logprobs");
    ExpectRefused(BuildChat(R"("logprobs":false,"top_logprobs":2)"), "top_logprobs", "logprobs false");
    ExpectRefused(BuildChat(R"("logprobs":true,"top_logprobs":21)"), "top_logprobs", "21");
    ExpectRefused(BuildChat(R"("logprobs":true,"top_logprobs":-1)"), "top_logprobs", "-1");
    ExpectRefused(BuildChat(R"("logprobs":true,"top_logprobs":-5)"), "top_logprobs", "-5");
    ExpectRefused(BuildChat(R"("logprobs":5)"), "logprobs", "a number on chat");
    EXPECT_TRUE(BuildChat(R"("top_logprobs":0)").ok);
    EXPECT_TRUE(BuildChat(R"("logprobs":true,"top_logprobs":20)").ok);
    ExpectRefused(BuildCompletion(R"("logprobs":21)"), "logprobs", "21");
    ExpectRefused(BuildCompletion(R"("logprobs":-1)"), "logprobs", "-1");
    ExpectRefused(BuildCompletion(R"("logprobs":true)"), "logprobs", "a boolean on completions");
    ExpectRefused(BuildCompletion(R"("echo":true,"logprobs":21)"), "logprobs", "echo");
    EXPECT_TRUE(BuildCompletion(R"("logprobs":20)").ok);

    auto open = ByteModel();
    open->features.max_logprobs = -1;
    EXPECT_EQ(
        Build(Endpoint::kCompletion, Completion(R"("logprobs":-1)"), *open).requests.at(0)->sampling.logprobs,
        -1);
    ExpectRefused(Build(Endpoint::kCompletion, Completion(R"("logprobs":260)"), *open), "logprobs",
                  "above the vocabulary");
    ExpectRefused(Build(Endpoint::kCompletion, Completion(R"("logprobs":-2)"), *open), "logprobs", "-2");
}

TEST(BadInput, OfMessagesIsRefusedWithThePathOfTheFault) {
    const std::vector<std::pair<const char*, const char*>> cases = {
        {"[]", "messages"},
        {"null", "messages"},
        {"12345", "messages"},
        {"\"hi\"", "messages"},
        {"[{}]", "messages[0].role"},
        {"[123]", "messages[0]"},
        {"[null]", "messages[0]"},
        {R"([{"content":"hi"}])", "messages[0].role"},
        {R"([{"role":123,"content":"hi"}])", "messages[0].role"},
        {R"([{"role":"","content":"hi"}])", "messages[0].role"},
        {R"([{"role":"user"}])", "messages[0].content"},
        {R"([{"role":"user","content":null}])", "messages[0].content"},
        {R"([{"role":"system","content":123}])", "messages[0].content"},
        {R"([{"role":"user","content":{}}])", "messages[0].content"},
        {R"([{"role":"user","content":[null]}])", "messages[0].content[0]"},
        {R"([{"role":"user","content":[7]}])", "messages[0].content[0]"},
        {R"([{"role":"user","content":[{}]}])", "messages[0].content[0].type"},
        {R"([{"role":"user","content":[{"type":"text"}]}])", "messages[0].content[0]"},
        {R"([{"role":"user","content":[{"type":"text","text":123}]}])", "messages[0].content[0].text"},
        {R"([{"role":"user","content":"a"},{"role":"user","content":[{"type":"text","text":"b"},{"type":"image_url","image_url":{}}]}])",
         "messages[1].content[1]"},
        {R"([{"role":"user","content":[{"type":"input_text","text":"b"}]}])", "messages[0].content[0]"},
        {R"([{"role":"user","content":"a","name":5}])", "messages[0].name"},
        {R"([{"role":"tool","content":null,"tool_call_id":"1"}])", "messages[0].content"},
        {R"([{"role":"function","name":"f","content":5}])", "messages[0].content"},
        {R"([{"role":"assistant","function_call":{"name":"f"}}])", "messages[0].function_call"},
        {R"([{"role":"assistant","tool_calls":5}])", "messages[0].tool_calls"},
        {R"([{"role":"assistant","tool_calls":[5]}])", "messages[0].tool_calls[0]"},
        {R"([{"role":"assistant","tool_calls":[{}]}])", "messages[0].tool_calls[0].function"},
        {R"([{"role":"assistant","tool_calls":[{"function":{}}]}])",
         "messages[0].tool_calls[0].function.name"},
        {R"([{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{broken"}}]}])",
         "messages[0].tool_calls[0].function.arguments"},
        {R"([{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":5}}]}])",
         "messages[0].tool_calls[0].function.arguments"},
        {R"([{"role":"user","content":"x","tool_calls":[{"function":{"name":"f"}}]}])",
         "messages[0].tool_calls"},
    };
    for (const auto& [messages, param] : cases) {
        ExpectRefused(Build(Endpoint::kChat, R"({"messages":)" + std::string{messages} + "}", Model()), param,
                      messages);
    }
    ExpectRefused(Build(Endpoint::kChat, R"({"model":"m"})", Model()), "messages", "absent");
}

TEST(BadInput, ImagePartsAreNamedByTheirType) {
    const Outcome outcome =
        Build(Endpoint::kChat,
              R"({"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]})",
              Model());
    EXPECT_NE(outcome.error.message.find("image_url"), std::string::npos);
}

TEST(BadInput, UnknownModelIs404AndMissingModelMeansTheOnlyOne) {
    const Outcome unknown =
        Build(Endpoint::kChat, R"({"model":"nope","messages":[{"role":"user","content":"hi"}]})", Model());
    EXPECT_EQ(HttpStatus(unknown.error.code), 404);
    EXPECT_EQ(OpenAiCode(unknown.error.code), "model_not_found");
    EXPECT_EQ(unknown.error.param, "model");
    EXPECT_NE(unknown.error.message.find("nope"), std::string::npos);
    const Outcome endless = Build(
        Endpoint::kChat,
        R"({"model":")" + std::string(100000, 'x') + R"(","messages":[{"role":"user","content":"hi"}]})",
        Model());
    EXPECT_EQ(HttpStatus(endless.error.code), 404);
    EXPECT_LT(endless.error.message.size(), 300U);
    EXPECT_TRUE(Build(Endpoint::kChat, R"({"messages":[{"role":"user","content":"hi"}]})", Model()).ok);
    EXPECT_TRUE(
        Build(Endpoint::kChat, R"({"model":"alias","messages":[{"role":"user","content":"hi"}]})", Model())
            .ok);
}

TEST(BadInput, BeforeAnyRankIsReadyItIsUnavailableNotWrong) {
    auto model = ByteModel();
    model->max_model_len = 0;
    const Outcome outcome = Build(Endpoint::kChat, Chat(), *model);
    EXPECT_EQ(HttpStatus(outcome.error.code), 503);
    EXPECT_TRUE(outcome.error.retryable);
}

// ---- Context length ----

TEST(ContextLength, RefusalsHoldThePhraseAndBothNumbers) {
    auto model = ByteModel();
    model->max_model_len = 100;
    const auto ids = [](int count) {
        std::string text = R"({"prompt":[)";
        for (int i = 0; i < count; ++i) {
            text += i > 0 ? ",1" : "1";
        }
        return text + "]";
    };
    const auto refused = [&](const std::string& body, std::string_view param, std::string_view number) {
        const Outcome outcome = Build(Endpoint::kCompletion, body, *model);
        ExpectRefused(outcome, param, body);
        EXPECT_EQ(OpenAiCode(outcome.error.code), "context_length_exceeded");
        EXPECT_NE(outcome.error.message.find("maximum context length"), std::string::npos)
            << outcome.error.message;
        EXPECT_NE(outcome.error.message.find("100"), std::string::npos);
        EXPECT_NE(outcome.error.message.find(number), std::string::npos) << outcome.error.message;
    };
    refused(ids(100) + "}", "prompt", "100");
    refused(ids(101) + "}", "prompt", "101");
    refused(ids(99) + R"(,"max_tokens":2})", "max_tokens", "101");
    refused(ids(50) + R"(,"max_tokens":51})", "max_tokens", "101");
    refused(ids(50) + R"(,"max_completion_tokens":51})", "max_completion_tokens", "101");
    refused(ids(50) + R"(,"max_tokens":9223372036854775807})", "max_tokens", "50");
    EXPECT_TRUE(Build(Endpoint::kCompletion, ids(99) + R"(,"max_tokens":1})", *model).ok);
    EXPECT_TRUE(Build(Endpoint::kCompletion, ids(50) + R"(,"max_tokens":50})", *model).ok);
    // Not asked for: what fits.
    EXPECT_EQ(Build(Endpoint::kCompletion, ids(95) + "}", *model).requests.at(0)->sampling.max_tokens, 5);
    // A text that cannot fit is not even tokenized.
    refused(R"({"prompt":")" + std::string(101 * 13, 'a') + "\"}", "prompt", "101");
}

TEST(ContextLength, ChatWithoutACapGetsTheRoomLeftAndCompletionsGet16) {
    const Outcome chat = BuildChat("");
    EXPECT_EQ(chat.requests.at(0)->sampling.max_tokens,
              4096 - static_cast<std::int64_t>(chat.prompts[0].num_tokens));
    EXPECT_EQ(BuildCompletion("").requests.at(0)->sampling.max_tokens, 16);
}

TEST(ContextLength, TheModelsOwnCapAppliesOnlyWhereNoneIsGiven) {
    auto assets = test::AssetsWithTemplate(test::kChatml);
    assets->defaults.max_new_tokens = 7;
    auto model = ByteModel();
    model->assets = assets;
    EXPECT_EQ(Build(Endpoint::kChat, Chat(), *model).requests.at(0)->sampling.max_tokens, 7);
    EXPECT_EQ(Build(Endpoint::kChat, Chat(R"("max_tokens":9)"), *model).requests.at(0)->sampling.max_tokens,
              9);
}

TEST(ContextLength, TheNewerSpellingOfTheCapWins) {
    EXPECT_EQ(BuildChat(R"("max_tokens":5,"max_completion_tokens":9)").requests.at(0)->sampling.max_tokens,
              9);
    EXPECT_EQ(BuildChat(R"("max_completion_tokens":9,"max_tokens":5)").requests.at(0)->sampling.max_tokens,
              9);
    EXPECT_EQ(BuildChat(R"("max_completion_tokens":null,"max_tokens":5)").requests.at(0)->sampling.max_tokens,
              5);
    ExpectRefused(BuildChat(R"("max_tokens":0)"), "max_tokens", "0 on chat");
    ExpectRefused(BuildChat(R"("max_completion_tokens":0)"), "max_completion_tokens", "0 on chat");
    ExpectRefused(BuildCompletion(R"("max_tokens":0)"), "max_tokens", "0 without echo");
}

TEST(ContextLength, TruncateKeepsTheEndOfThePrompt) {
    const Outcome outcome =
        Build(Endpoint::kCompletion, R"({"prompt":[1,2,3,4,5],"truncate_prompt_tokens":2})", Model());
    EXPECT_EQ(outcome.requests.at(0)->prompt_token_ids, (std::vector<TokenId>{4, 5}));
    auto model = ByteModel();
    model->max_model_len = 10;
    const Outcome fitted =
        Build(Endpoint::kCompletion,
              R"({"prompt":"0123456789abcdef","truncate_prompt_tokens":-1,"max_tokens":4})", *model);
    EXPECT_EQ(fitted.requests.at(0)->prompt_token_ids, test::Bytes("abcdef"));
    const Outcome echoed = Build(
        Endpoint::kCompletion, R"({"prompt":["hello","ab"],"truncate_prompt_tokens":2,"echo":true})", *model);
    EXPECT_EQ(echoed.prompts.at(0).text, "lo");
    EXPECT_EQ(echoed.prompts.at(1).text, "ab");
}

// ---- Honoured fields ----

TEST(Sampling, EveryFieldReachesTheWireExactly) {
    const Outcome outcome = BuildChat(
        R"("temperature":0.7,"top_p":0.9,"min_p":0.1,"top_k":40,"presence_penalty":-1.5,"frequency_penalty":1.25,"repetition_penalty":1.1,)"
        R"("seed":1099511627781,"max_tokens":50,"min_tokens":3,"stop_token_ids":[77,78,77],"logit_bias":{"5":200,"6":-3.5},)"
        R"("allowed_token_ids":[1,2,3],"bad_words":["foo"],"priority":-4,"cache_salt":"salt","thinking_token_budget":9,)"
        R"("stop":["a","b"],"include_stop_str_in_output":true,"skip_special_tokens":false,"data_parallel_rank":0)");
    ASSERT_TRUE(outcome.ok) << outcome.error.param << outcome.error.message;
    const wire::GenerateRequest& request = *outcome.requests.at(0);
    const wire::SamplingParams& sampling = request.sampling;
    EXPECT_EQ(sampling.temperature, 0.7);
    EXPECT_EQ(sampling.top_p, 0.9);
    EXPECT_EQ(sampling.min_p, 0.1);
    EXPECT_EQ(sampling.top_k, 40);
    EXPECT_EQ(sampling.presence_penalty, -1.5);
    EXPECT_EQ(sampling.frequency_penalty, 1.25);
    EXPECT_EQ(sampling.repetition_penalty, 1.1);
    EXPECT_EQ(sampling.seed, (std::int64_t{1} << 40) + 5);
    EXPECT_EQ(sampling.max_tokens, 50);
    EXPECT_EQ(sampling.min_tokens, 3);
    EXPECT_EQ(sampling.logit_bias, (std::vector<std::pair<TokenId, double>>{{5, 100.0}, {6, -3.5}}));
    EXPECT_EQ(sampling.allowed_token_ids, (std::vector<TokenId>{1, 2, 3}));
    EXPECT_EQ(sampling.bad_words, std::vector<std::string>{"foo"});
    EXPECT_EQ(sampling.bad_words_token_ids, std::vector<std::vector<TokenId>>{test::Bytes("foo")});
    EXPECT_EQ(sampling.thinking_token_budget, 9);
    EXPECT_EQ(sampling.stop, (std::vector<std::string>{"a", "b"}));
    EXPECT_TRUE(sampling.include_stop_str_in_output);
    EXPECT_FALSE(sampling.skip_special_tokens);
    EXPECT_EQ(request.priority, -4);
    EXPECT_EQ(request.cache_salt, "salt");
    EXPECT_EQ(request.data_parallel_rank, 0);
    EXPECT_FALSE(sampling.logprobs.has_value());
}

TEST(Sampling, EosFollowsTheRecipeOfTheEngine) {
    const wire::SamplingParams plain = BuildChat(R"("stop_token_ids":[77])").requests.at(0)->sampling;
    EXPECT_EQ(plain.eos_token_id, 257);
    EXPECT_EQ(plain.stop_token_ids, (std::vector<TokenId>{77, 258}));
    EXPECT_EQ(plain.all_stop_token_ids, (std::vector<TokenId>{77, 257, 258}));
    const wire::SamplingParams ignoring =
        BuildChat(R"("stop_token_ids":[77],"ignore_eos":true)").requests.at(0)->sampling;
    EXPECT_TRUE(ignoring.ignore_eos);
    EXPECT_FALSE(ignoring.eos_token_id.has_value());
    EXPECT_EQ(ignoring.stop_token_ids, (std::vector<TokenId>{77}));
    EXPECT_EQ(ignoring.all_stop_token_ids, (std::vector<TokenId>{77, 257, 258}));
}

TEST(Sampling, GreedyIsNormalisedAndTinyTemperaturesAreRaised) {
    const wire::SamplingParams greedy =
        BuildChat(R"("temperature":0,"top_p":0.5,"top_k":7,"min_p":0.3)").requests.at(0)->sampling;
    EXPECT_EQ(greedy.temperature, 0);
    EXPECT_EQ(greedy.top_p, 1);
    EXPECT_EQ(greedy.top_k, 0);
    EXPECT_EQ(greedy.min_p, 0);
    EXPECT_EQ(BuildChat(R"("temperature":0.0001)").requests.at(0)->sampling.temperature, 0.01);
    EXPECT_EQ(BuildChat(R"("top_k":-1)").requests.at(0)->sampling.top_k, 0);
}

TEST(Sampling, DefaultsComeFromTheModelAndOnlyIfTheyAreLegal) {
    auto assets = test::AssetsWithTemplate(test::kChatml);
    assets->defaults.temperature = 0.2;
    assets->defaults.top_k = 20;
    assets->defaults.top_p = 7.0;
    assets->defaults.repetition_penalty = 0.0;
    auto model = ByteModel();
    model->assets = assets;
    const wire::SamplingParams unset = Build(Endpoint::kChat, Chat(), *model).requests.at(0)->sampling;
    EXPECT_EQ(unset.temperature, 0.2);
    EXPECT_EQ(unset.top_k, 20);
    EXPECT_EQ(unset.top_p, 1.0);
    EXPECT_EQ(unset.repetition_penalty, 1.0);
    const wire::SamplingParams set =
        Build(Endpoint::kChat, Chat(R"("temperature":1.0,"top_k":-1)"), *model).requests.at(0)->sampling;
    EXPECT_EQ(set.temperature, 1.0);
    EXPECT_EQ(set.top_k, 0);
}

TEST(Sampling, SeedsTakeAll64BitsAndAreDistinctPerChoice) {
    EXPECT_EQ(BuildChat(R"("seed":9223372036854775807)").requests.at(0)->sampling.seed,
              std::numeric_limits<std::int64_t>::max());
    EXPECT_EQ(BuildChat(R"("seed":-9223372036854775808)").requests.at(0)->sampling.seed,
              std::numeric_limits<std::int64_t>::min());
    EXPECT_EQ(BuildChat(R"("seed":-1)").requests.at(0)->sampling.seed, -1);
    const Outcome three = BuildChat(R"("seed":9223372036854775806,"n":3)");
    EXPECT_EQ(three.requests.at(1)->sampling.seed, std::numeric_limits<std::int64_t>::max());
    EXPECT_EQ(three.requests.at(2)->sampling.seed, std::numeric_limits<std::int64_t>::min());
    EXPECT_FALSE(BuildChat(R"("n":2)").requests.at(1)->sampling.seed.has_value());
}

TEST(Sampling, SeveralGreedyChoicesAreServed) {
    const Outcome outcome = BuildChat(R"("temperature":0,"n":2)");
    EXPECT_EQ(outcome.requests.size(), 2U);
}

TEST(Sampling, StopMayBeNullOneStringOrManyUpToTheLimit) {
    EXPECT_TRUE(BuildChat(R"("stop":[])").requests.at(0)->sampling.stop.empty());
    EXPECT_EQ(BuildChat(R"("stop":"x")").requests.at(0)->sampling.stop, std::vector<std::string>{"x"});
    const auto many = [](std::size_t count) {
        std::string text = "\"stop\":[";
        for (std::size_t i = 0; i < count; ++i) {
            text += (i > 0 ? ",\"s" : "\"s") + std::to_string(i) + "\"";
        }
        return text + "]";
    };
    EXPECT_EQ(BuildChat(many(20)).requests.at(0)->sampling.stop.size(), 20U);
    EXPECT_TRUE(BuildChat(many(kMaxStop)).ok);
    const Outcome over = BuildChat(many(1000));
    ExpectRefused(over, "stop", "1000 strings");
    EXPECT_NE(over.error.message.find(std::to_string(kMaxStop)), std::string::npos);
    ExpectRefused(BuildChat("\"stop\":\"" + std::string(100000, 'x') + "\""), "stop", "100 KB");
    EXPECT_TRUE(BuildChat("\"stop\":\"" + std::string(200, 'x') + "\"").ok);
}

TEST(Sampling, BadWordsAreTokenizedAsTheyAreAndInTheMiddleOfAText) {
    // As with real vocabularies, "foo" and " foo" are tokens of their own; "bar" has no spaced twin.
    auto model = test::WordModel({"foo", " foo", "bar", " ", "hi"});
    const Outcome outcome = Build(Endpoint::kCompletion, Completion(R"("bad_words":[" foo","bar"])"), *model);
    ASSERT_TRUE(outcome.ok) << outcome.error.message;
    EXPECT_EQ(outcome.requests[0]->sampling.bad_words_token_ids,
              (std::vector<std::vector<TokenId>>{{0}, {1}, {2}}));
    // A word without any token would give the engine an empty list, which kills it.
    ExpectRefused(Build(Endpoint::kCompletion, Completion(R"("bad_words":["zzz"])"), *model), "bad_words",
                  "no tokens");
}

TEST(Sampling, PromptLogprobsSwitchThePrefixCacheOff) {
    EXPECT_FALSE(BuildCompletion("").requests.at(0)->sampling.skip_reading_prefix_cache);
    const wire::SamplingParams echo = BuildCompletion(R"("echo":true,"logprobs":2)").requests.at(0)->sampling;
    EXPECT_EQ(echo.prompt_logprobs, 2);
    EXPECT_EQ(echo.logprobs, 2);
    EXPECT_TRUE(echo.skip_reading_prefix_cache);
    EXPECT_EQ(BuildChat(R"("prompt_logprobs":3)").requests.at(0)->sampling.prompt_logprobs, 3);
    EXPECT_FALSE(BuildCompletion(R"("echo":true)").requests.at(0)->sampling.prompt_logprobs.has_value());
    ExpectRefused(BuildChat(R"("prompt_logprobs":1,"stream":true)"), "prompt_logprobs", "with stream");
}

TEST(Sampling, EchoWithoutTokensStillAsksForOne) {
    const Outcome outcome = BuildCompletion(R"("echo":true,"logprobs":1,"max_tokens":0)");
    ASSERT_TRUE(outcome.ok) << outcome.error.message;
    EXPECT_EQ(outcome.requests[0]->sampling.max_tokens, 1);
}

// ---- Fan-out ----

TEST(FanOut, EveryPromptGetsEveryChoiceInOrderWithIdsOfTheirOwn) {
    const Outcome outcome =
        Build(Endpoint::kCompletion, R"({"model":"m","prompt":["aa","b"],"n":2,"max_tokens":3,"seed":5})",
              Model(), {.id = "cmpl-x"});
    ASSERT_EQ(outcome.requests.size(), 4U);
    std::set<std::string> ids;
    for (std::size_t i = 0; i < 4; ++i) {
        const wire::GenerateRequest& request = *outcome.requests[i];
        ids.insert(request.id);
        EXPECT_EQ(request.id, "cmpl-x-" + std::to_string(i));
        EXPECT_EQ(request.prompt_token_ids, test::Bytes(i < 2 ? "aa" : "b"));
        EXPECT_EQ(request.sampling.max_tokens, 3);
        EXPECT_EQ(request.sampling.seed, 5 + static_cast<std::int64_t>(i % 2));
    }
    EXPECT_EQ(ids.size(), 4U);
    EXPECT_EQ(outcome.prompts[0].num_tokens, 2U);
    EXPECT_EQ(outcome.prompts[1].num_tokens, 1U);
}

TEST(FanOut, PromptsMayBeTokenIdsAlone) {
    const auto ids = [](const char* prompt) {
        std::vector<std::vector<TokenId>> out;
        for (const auto& request :
             Build(Endpoint::kCompletion, R"({"prompt":)" + std::string{prompt} + "}", Model()).requests) {
            out.push_back(request->prompt_token_ids);
        }
        return out;
    };
    EXPECT_EQ(ids("[5,6]"), (std::vector<std::vector<TokenId>>{{5, 6}}));
    EXPECT_EQ(ids("[[5,6],[7]]"), (std::vector<std::vector<TokenId>>{{5, 6}, {7}}));
    EXPECT_EQ(ids("[\"a\",[7]]"), (std::vector<std::vector<TokenId>>{{'a'}, {7}}));
}

TEST(FanOut, IsBounded) {
    std::string prompts = R"({"prompt":["a")";
    for (int i = 0; i < 3000; ++i) {
        prompts += ",\"a\"";
    }
    ExpectRefused(Build(Endpoint::kCompletion, prompts + "]}", Model()), "prompt", "3000 prompts");
    std::string hundred = R"({"prompt":["a")";
    for (int i = 0; i < 99; ++i) {
        hundred += ",\"a\"";
    }
    ExpectRefused(Build(Endpoint::kCompletion, hundred + R"(],"n":128})", Model()), "n", "12800 sequences");
}

TEST(Bodies, ListsAreBoundedWhileTheyAreRead) {
    const auto many = [](const std::string& unit, std::size_t count) {
        std::string text = unit;
        text.reserve(count * (unit.size() + 1));
        for (std::size_t i = 1; i < count; ++i) {
            text += ',';
            text += unit;
        }
        return text;
    };
    const auto refused = [&](Endpoint endpoint, const std::string& body, const char* param) {
        Parser parser;
        const auto parsed =
            endpoint == Endpoint::kChat ? parser.ParseChat(body) : parser.ParseCompletion(body);
        ASSERT_FALSE(parsed.ok()) << param;
        EXPECT_EQ(parsed.error().param, param);
        EXPECT_EQ(HttpStatus(parsed.error().code), 400);
        EXPECT_LT(parsed.error().message.size(), 300U);
    };
    refused(Endpoint::kCompletion, R"({"prompt":[)" + many("[1]", kMaxPrompts + 1) + "]}", "prompt");
    refused(Endpoint::kCompletion, R"({"prompt":[)" + many("\"\"", kMaxPrompts + 1) + "]}", "prompt");
    refused(Endpoint::kCompletion, R"({"prompt":[)" + many("1", kMaxPromptIds + 1) + "]}", "prompt");
    refused(Endpoint::kCompletion,
            R"({"prompt":"x","allowed_token_ids":[)" + many("1", kMaxTokenList + 1) + "]}",
            "allowed_token_ids");
    refused(Endpoint::kCompletion,
            R"({"prompt":"x","logit_bias":{)" + many(R"("1":1)", kMaxTokenList + 1) + "}}", "logit_bias");
    refused(Endpoint::kChat,
            R"({"messages":[{"role":"user","content":[)" +
                many(R"({"type":"text","text":""})", kMaxParts + 1) + "]}]}",
            "messages[0].content");
    refused(Endpoint::kChat, R"({"messages":[{"role":"user","content":"x","name":"a","name":"a"}]})",
            "messages[0].name");
    refused(Endpoint::kChat, R"({"messages":[{"role":"user","content":"x","content":"y"}]})",
            "messages[0].content");
    refused(Endpoint::kChat,
            R"({"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"a":")" +
                std::string(kMaxTemplateBytes, 'a') + "\"}}",
            "chat_template_kwargs");
}

TEST(FanOut, WhatIsCopiedForEveryChoiceIsBoundedTogether) {
    auto model = ByteModel();
    model->limits.max_sequence_bytes = 64 * 1024;
    const std::string prompt = "\"prompt\":\"" + std::string(400, 'a') + "\"";
    const std::string grammar = R"("guided_grammar":"root ::= \")" + std::string(8000, 'b') + "\\\"\"";
    const auto build = [&](const std::string& more) {
        return Build(Endpoint::kCompletion, "{" + prompt + more + "}", *model);
    };
    EXPECT_TRUE(build(R"(,"n":30)").ok);
    ExpectRefused(build(R"(,"n":64)"), "n", "64 times 1600 bytes");
    EXPECT_TRUE(build("," + grammar).ok);
    ExpectRefused(build("," + grammar + R"(,"n":10)"), "n", "ten grammars");
    std::string ids = R"(,"allowed_token_ids":[97)";
    for (int i = 0; i < 5000; ++i) {
        ids += ",97";
    }
    EXPECT_TRUE(build(ids + "]").ok);
    ExpectRefused(build(ids + R"(],"n":4)"), "n", "20 000 ids");
    std::string prompts = R"({"prompt":["a")";
    for (int i = 0; i < 200; ++i) {
        prompts += ",\"" + std::string(400, 'a') + "\"";
    }
    ExpectRefused(Build(Endpoint::kCompletion, prompts + "]}", *model), "prompt", "80 000 tokens");
}

TEST(FanOut, OneBadPromptMeansNothingIsProduced) {
    ExpectRefused(Build(Endpoint::kCompletion, R"({"prompt":[[1,2],[3,400]]})", Model()), "prompt",
                  "second is bad");
}

// ---- Structured outputs ----

TEST(StructuredOutputs, EveryFormReachesTheWireAsOneKind) {
    using Kind = wire::StructuredOutputs::Kind;
    const auto sent = [](const std::string& member) {
        const Outcome outcome = BuildChat(member);
        EXPECT_TRUE(outcome.ok) << member << outcome.error.message;
        EXPECT_EQ(outcome.requests.at(0)->sampling.structured_outputs->backend, "xgrammar");
        return std::pair{outcome.requests.at(0)->sampling.structured_outputs->kind,
                         outcome.requests.at(0)->sampling.structured_outputs->value};
    };
    using P = std::pair<Kind, std::string>;
    EXPECT_EQ(sent(R"("response_format":{"type":"json_object"})"), (P{Kind::kJsonObject, ""}));
    EXPECT_EQ(
        sent(
            R"("response_format":{"type":"json_schema","json_schema":{"name":"n","strict":true,"schema":{"type": "object"}}})"),
        (P{Kind::kJson, R"({"type":"object"})"}));
    EXPECT_EQ(sent(R"("response_format":{"type":"json_object","schema":{"const":"42"}})"),
              (P{Kind::kJson, R"({"const":"42"})"}));
    EXPECT_EQ(sent(R"("response_format":{"type":"structural_tag","format":{"a":1}})"),
              (P{Kind::kStructuralTag, R"({"type":"structural_tag","format":{"a":1}})"}));
    EXPECT_EQ(sent(R"("structured_outputs":{"json":{"a":1}})"), (P{Kind::kJson, R"({"a":1})"}));
    EXPECT_EQ(sent(R"("structured_outputs":{"json":"{\"a\":1}"})"), (P{Kind::kJson, R"({"a":1})"}));
    EXPECT_EQ(sent(R"("structured_outputs":{"regex":"a+","json":null})"), (P{Kind::kRegex, "a+"}));
    EXPECT_EQ(sent(R"("structured_outputs":{"grammar":"root ::= \"a\""})"),
              (P{Kind::kGrammar, "root ::= \"a\""}));
    EXPECT_EQ(sent(R"("structured_outputs":{"json_object":true})"), (P{Kind::kJsonObject, ""}));
    EXPECT_EQ(sent(R"("structured_outputs":{"structural_tag":"{}"})"), (P{Kind::kStructuralTag, "{}"}));
    EXPECT_EQ(sent(R"("structured_outputs":{"choice":["yes","n\"o\\","a\nb"]})"),
              (P{Kind::kGrammar, R"(root ::= "yes" | "n\"o\\" | "a\nb")"}));
    EXPECT_EQ(sent(R"("guided_json":{"a":1})"), (P{Kind::kJson, R"({"a":1})"}));
    EXPECT_EQ(sent(R"("guided_regex":"a+")"), (P{Kind::kRegex, "a+"}));
    EXPECT_EQ(sent(R"("guided_choice":["a"],"guided_decoding_backend":"auto")"),
              (P{Kind::kGrammar, R"(root ::= "a")"}));
    EXPECT_EQ(sent(R"("guided_grammar":"g")"), (P{Kind::kGrammar, "g"}));
    EXPECT_FALSE(BuildChat(R"("response_format":{"type":"text"})")
                     .requests.at(0)
                     ->sampling.structured_outputs.has_value());
}

TEST(StructuredOutputs, OptionsAreKept) {
    const Outcome outcome = BuildChat(
        R"("structured_outputs":{"json":{},"disable_any_whitespace":true,"disable_additional_properties":true,"whitespace_pattern":"[ ]?"})");
    const wire::StructuredOutputs& sent = *outcome.requests.at(0)->sampling.structured_outputs;
    EXPECT_TRUE(sent.disable_any_whitespace);
    EXPECT_TRUE(sent.disable_additional_properties);
    EXPECT_EQ(sent.whitespace_pattern, "[ ]?");
}

TEST(StructuredOutputs, WhatNoBackEndTakesIsRefusedBeforeItIsSent) {
    for (const auto& [field, param] : {
             std::pair{R"("structural_tag":"x")", "structural_tag"},
             std::pair{R"("structural_tag":"[1]")", "structural_tag"},
             std::pair{R"("guided_regex":"a\u0000b")", "guided_regex"},
             std::pair{R"("guided_grammar":"\u0000")", "guided_grammar"},
             std::pair{R"("guided_choice":["a","\u0000"])", "guided_choice"},
             std::pair{R"("structured_outputs":{"structural_tag":"{"})", "structured_outputs"},
         }) {
        ExpectRefused(BuildChat(field), param, field);
    }
}

TEST(StructuredOutputs, TwoKindsAreRefused) {
    ExpectRefused(BuildChat(R"("guided_regex":"a","response_format":{"type":"json_object"})"),
                  "response_format", "two fields");
    ExpectRefused(BuildChat(R"("structured_outputs":{"json":{},"choice":["a"]})"), "structured_outputs",
                  "two kinds");
}

TEST(StructuredOutputs, AnEngineWithoutABackEndIsToldOfByName) {
    auto model = ByteModel();
    model->features.structured_outputs_backend.clear();
    ExpectRefused(Build(Endpoint::kChat, Chat(R"("response_format":{"type":"json_object"})"), *model),
                  "response_format", "none");
    ExpectRefused(Build(Endpoint::kChat, Chat(R"("structured_outputs":{"regex":"a"})"), *model),
                  "structured_outputs", "none");
    EXPECT_TRUE(Build(Endpoint::kChat, Chat(R"("response_format":{"type":"text"})"), *model).ok);
}

// ---- Engines that can do less ----

TEST(Features, TokenSpeedRefusesByNameWhatItCannotHonour) {
    auto model = ByteModel();
    model->features = Features::TokenSpeed();
    const std::vector<std::pair<const char*, const char*>> chat = {
        {R"("logprobs":true,"top_logprobs":1)", "top_logprobs"},
        {R"("prompt_logprobs":0)", "prompt_logprobs"},
        {R"("top_k":128)", "top_k"},
        {R"("seed":-1)", "seed"},
        {R"("repetition_penalty":2.1)", "repetition_penalty"},
        {R"("allowed_token_ids":[1])", "allowed_token_ids"},
        {R"("bad_words":["a"])", "bad_words"},
        {R"("priority":1)", "priority"},
        {R"("cache_salt":"a")", "cache_salt"},
    };
    for (const auto& [member, param] : chat) {
        ExpectRefused(Build(Endpoint::kChat, Chat(member), *model), param, member);
    }
    ExpectRefused(Build(Endpoint::kCompletion, Completion(R"("logprobs":1)"), *model), "logprobs", "top-k");
    ExpectRefused(Build(Endpoint::kCompletion, Completion(R"("logprobs":0,"echo":true)"), *model), "echo",
                  "prompt logprobs");
    EXPECT_TRUE(Build(Endpoint::kChat,
                      Chat(R"("logprobs":true,"top_k":127,"seed":1,"logit_bias":{"1":2},"priority":0)"),
                      *model)
                    .ok);
    model->features.logprobs = false;
    ExpectRefused(Build(Endpoint::kChat, Chat(R"("logprobs":true)"), *model), "logprobs", "started without");
    // Seeds of later choices stay where the engine can take them.
    const Outcome wrap = Build(Endpoint::kChat, Chat(R"("seed":9223372036854775807,"n":2)"), *model);
    EXPECT_GE(wrap.requests.at(1)->sampling.seed, 0);
}

TEST(Features, AdaptersAreRoutedByModelName) {
    auto model = ByteModel();
    model->adapters.push_back({.name = "sql", .id = 3, .path = "/a", .base_model_name = "m"});
    const std::string body = R"({"model":"sql","messages":[{"role":"user","content":"hi"}]})";
    ExpectRefused(Build(Endpoint::kChat, body, *model), "model", "engine without LoRA");
    model->features.lora = true;
    const Outcome outcome = Build(Endpoint::kChat, body, *model);
    ASSERT_TRUE(outcome.ok) << outcome.error.message;
    EXPECT_EQ(outcome.requests[0]->lora->id, 3);
    EXPECT_FALSE(Build(Endpoint::kChat, Chat(), *model).requests.at(0)->lora.has_value());
}

TEST(Features, TheRankIsPinnedByFieldOrHeaderOrRefused) {
    auto model = ByteModel();
    model->data_parallel_size = 4;
    const auto rank = [&](const std::string& more, std::string_view header) {
        return Build(Endpoint::kChat, Chat(more), *model, {.id = "i", .data_parallel_rank_header = header});
    };
    EXPECT_EQ(rank(R"("data_parallel_rank":3)", "").requests.at(0)->data_parallel_rank, 3);
    EXPECT_EQ(rank("", "2").requests.at(0)->data_parallel_rank, 2);
    EXPECT_EQ(rank(R"("data_parallel_rank":2)", "2").requests.at(0)->data_parallel_rank, 2);
    EXPECT_FALSE(rank("", "").requests.at(0)->data_parallel_rank.has_value());
    for (const char* header : {"4", "-1", "x", "1x", " 1", "99999999999999", "1.0"}) {
        ExpectRefused(rank("", header), "data_parallel_rank", header);
    }
    ExpectRefused(rank(R"("data_parallel_rank":1)", "2"), "data_parallel_rank", "different");
    ExpectRefused(rank(R"("data_parallel_rank":4)", ""), "data_parallel_rank", "4 of 4");
}

TEST(Features, TraceHeadersAreForwardedOnlyWhenWellFormedAndWanted) {
    auto model = ByteModel();
    const std::string parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    const auto headers = [&](std::string_view traceparent, std::string_view tracestate) {
        return Build(Endpoint::kChat, Chat(), *model,
                     {.id = "i", .traceparent = traceparent, .tracestate = tracestate})
            .requests.at(0)
            ->trace_headers;
    };
    EXPECT_TRUE(headers(parent, "").empty());
    model->features.trace_headers = true;
    EXPECT_EQ(headers(parent, "a=b").size(), 2U);
    EXPECT_EQ(headers(parent, "a=\xff").size(), 1U);
    EXPECT_TRUE(headers("00-x", "a=b").empty());
    EXPECT_TRUE(headers(std::string(55, 'Z'), "").empty());
}

// ---- Chat: messages, tools, templates ----

std::string Rendered(const std::string& body, const ModelInfo& model) {
    const Outcome outcome = Build(Endpoint::kChat, body, model);
    EXPECT_TRUE(outcome.ok) << outcome.error.param << ": " << outcome.error.message;
    if (!outcome.ok) {
        return {};
    }
    return text::Detokenize(model.assets->tokenizer->table(), outcome.requests[0]->prompt_token_ids,
                            {.skip_special_tokens = false});
}

TEST(Messages, PartsOfEveryRoleAreJoinedInOrder) {
    EXPECT_EQ(Rendered(R"({"messages":[{"role":"system","content":[{"type":"text","text":"a"}]},)"
                       R"({"role":"user","content":[{"type":"text","text":"b"},{"type":"text","text":"c"}]},)"
                       R"({"role":"assistant","content":[{"type":"text","text":"d"}]},)"
                       R"({"role":"tool","tool_call_id":"1","content":[{"type":"text","text":"e"}]}]})",
                       Model()),
              "<|im_start|>system\na<|im_end|>\n<|im_start|>user\nb\nc<|im_end|>\n<|im_start|>assistant\nd<|"
              "im_end|>\n"
              "<|im_start|>tool\ne<|im_end|>\n<|im_start|>assistant\n");
}

TEST(Messages, DeveloperIsSystem) {
    EXPECT_EQ(Rendered(R"({"messages":[{"role":"developer","content":"a"}]})", Model()),
              "<|im_start|>system\na<|im_end|>\n<|im_start|>assistant\n");
}

TEST(Messages, AnAssistantTurnWithoutTextIsKept) {
    EXPECT_EQ(
        Rendered(
            R"({"messages":[{"role":"user","content":"a"},{"role":"assistant","content":""},{"role":"assistant","content":null},{"role":"assistant"}]})",
            Model()),
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n<|im_end|>"
        "\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n");
}

TEST(Messages, ToolHistoriesReachTheTemplateAsValues) {
    auto model = ByteModel();
    model->assets = test::AssetsWithTemplate(
        "{% for m in messages %}[{{ m.role }}|{{ m.content }}"
        "{% for t in m.tool_calls or [] %}|{{ t.id }}:{{ t.function.name }}({% for k, v in "
        "t.function.arguments.items() %}{{ k }}={{ v }};"
        "{% endfor %}){% endfor %}{% if m.tool_call_id %}|{{ m.tool_call_id }}{% endif %}]{% endfor %}");
    const auto with = [&](const std::string& arguments) {
        return Rendered(
            R"({"messages":[{"role":"user","content":"q"},{"role":"assistant","content":null,"tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":)" +
                arguments + R"(}}]},{"role":"tool","tool_call_id":"c1","content":"r"}]})",
            *model);
    };
    EXPECT_EQ(with(R"("{\"a\": 1, \"b\": \"x\"}")"), "[user|q][assistant||c1:f(a=1;b=x;)][tool|r|c1]");
    EXPECT_EQ(with(R"({"a":1})"), "[user|q][assistant||c1:f(a=1;)][tool|r|c1]");
    for (const char* empty : {R"("")", R"("null")", "null", R"("{}")"}) {
        EXPECT_EQ(with(empty), "[user|q][assistant||c1:f()][tool|r|c1]") << empty;
    }
}

TEST(Tools, AreRefusedByNameUnlessNothingMayBeCalled) {
    const std::string tools = R"("tools":[{"type":"function","function":{"name":"f","parameters":{}}}])";
    ExpectRefused(BuildChat(tools), "tools", "auto by default");
    ExpectRefused(BuildChat(tools + R"(,"tool_choice":"auto")"), "tools", "auto");
    ExpectRefused(BuildChat(tools + R"(,"tool_choice":"required")"), "tools", "required");
    ExpectRefused(BuildChat(tools + R"(,"tool_choice":{"type":"function","function":{"name":"f"}})"), "tools",
                  "named");
    EXPECT_TRUE(BuildChat(tools + R"(,"tool_choice":"none")").ok);
    EXPECT_TRUE(BuildChat(R"("tools":[])").ok);
    EXPECT_TRUE(BuildChat(R"("tools":[],"tool_choice":"auto")").ok);
    EXPECT_TRUE(BuildChat(R"("tool_choice":"none")").ok);
    ExpectRefused(BuildChat(R"("tool_choice":"required")"), "tool_choice", "without tools");
    ExpectRefused(BuildChat(R"("tool_choice":"sometimes")"), "tool_choice", "unknown word");
    ExpectRefused(BuildChat(R"("tools":{})"), "tools", "not an array");
    ExpectRefused(BuildChat(R"("tools":[{}])"), "tools", "no function");
    ExpectRefused(BuildChat(R"("tools":[5],"tool_choice":"none")"), "tools", "not an object");
    ExpectRefused(BuildChat(R"("functions":[{"name":"f"}])"), "functions", "legacy");
    ExpectRefused(BuildChat(R"("function_call":{"name":"f"})"), "function_call", "legacy");
    auto model = ByteModel();
    model->features.tool_parser = true;
    EXPECT_TRUE(Build(Endpoint::kChat, Chat(tools), *model).ok);
}

TEST(Templates, TheTemplatesOwnRefusalIsA400) {
    auto model = ByteModel();
    model->assets = test::AssetsWithTemplate(
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif "
        "%}x");
    const Outcome outcome =
        Build(Endpoint::kChat, R"({"messages":[{"role":"system","content":"a"}]})", *model);
    ExpectRefused(outcome, "messages", "raise_exception");
    EXPECT_NE(outcome.error.message.find("System role not supported"), std::string::npos);
}

TEST(Templates, AModelWithoutOneStillCompletes) {
    auto model = ByteModel();
    model->assets = test::AssetsWithTemplate("");
    const Outcome outcome = Build(Endpoint::kChat, Chat(), *model);
    ExpectRefused(outcome, "messages", "no template");
    EXPECT_NE(outcome.error.message.find("no chat template"), std::string::npos);
    EXPECT_TRUE(Build(Endpoint::kCompletion, Completion(), *model).ok);
}

TEST(Templates, AnEmptyRenderingIsA400) {
    auto model = ByteModel();
    model->assets = test::AssetsWithTemplate("{# nothing #}");
    ExpectRefused(Build(Endpoint::kChat, Chat(), *model), "messages", "empty");
}

TEST(Templates, PrefillFlagsFollowTheRules) {
    const std::string user = R"({"messages":[{"role":"user","content":"a"}])";
    const std::string prefill =
        R"({"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"Sure, "}])";
    EXPECT_EQ(Rendered(user + "}", Model()), "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n");
    EXPECT_EQ(Rendered(user + R"(,"add_generation_prompt":true})", Model()),
              "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n");
    EXPECT_EQ(Rendered(user + R"(,"add_generation_prompt":false})", Model()),
              "<|im_start|>user\na<|im_end|>\n");
    EXPECT_EQ(Rendered(prefill + R"(,"continue_final_message":true})", Model()),
              "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nSure, ");
    ExpectRefused(Build(Endpoint::kChat, user + R"(,"continue_final_message":true})", Model()),
                  "continue_final_message", "last is user");
    const Outcome both =
        Build(Endpoint::kChat, prefill + R"(,"continue_final_message":true,"add_generation_prompt":true})",
              Model());
    ExpectRefused(both, "continue_final_message", "both");
    EXPECT_NE(
        both.error.message.find("Cannot set both add_generation_prompt and continue_final_message to true"),
        std::string::npos);
}

TEST(Templates, InTheRequestAreRefusedUnlessAllowed) {
    ExpectRefused(BuildChat(R"("chat_template":"x{{ messages[0].content }}")"), "chat_template", "off");
    auto model = ByteModel();
    model->features.chat_template_in_request = true;
    EXPECT_EQ(Rendered(Chat(R"("chat_template":"x{{ messages[0].content }}")"), *model), "xhi");
    ExpectRefused(Build(Endpoint::kChat, Chat(R"("chat_template":"{% for %}")"), *model), "chat_template",
                  "bad template");
}

TEST(Templates, KwargsAndReasoningEffortReachTheTemplate) {
    auto model = ByteModel();
    model->assets = test::AssetsWithTemplate("{{ reasoning_effort }}|{{ a }}");
    EXPECT_EQ(Rendered(Chat(R"("reasoning_effort":"low","chat_template_kwargs":{"a":1})"), *model), "low|1");
    EXPECT_EQ(Rendered(Chat(R"("chat_template_kwargs":{"a":2,"reasoning_effort":"high"})"), *model),
              "high|2");
    EXPECT_EQ(Rendered(Chat(R"("reasoning_effort":"low")"), *model), "low|");
    ExpectRefused(BuildChat(R"("chat_template_kwargs":5)"), "chat_template_kwargs", "not an object");
}

TEST(Templates, SpecialTokensTypedByAClientAreTextWhereConfigured) {
    const std::string body = R"({"messages":[{"role":"user","content":"<|im_end|>"}]})";
    auto strict = ByteModel();
    strict->features.special_tokens_in_content = false;
    const auto count = [&](const ModelInfo& model) {
        const std::vector<TokenId> ids = Build(Endpoint::kChat, body, model).requests.at(0)->prompt_token_ids;
        return std::count(ids.begin(), ids.end(), 257);
    };
    EXPECT_EQ(count(Model()), 2);
    EXPECT_EQ(count(*strict), 1);
}

// ---- Other routes ----

TEST(Tokenize, TakesAPromptOrMessages) {
    Parser parser;
    Result<TokenizeRequest> prompt =
        parser.ParseTokenize(R"({"model":"m","prompt":"ab","return_token_strs":true})");
    ASSERT_TRUE(prompt.ok());
    Result<std::vector<TokenId>> ids = PrepareTokenize(*prompt, Model());
    ASSERT_TRUE(ids.ok());
    const Json json{TokenizeJson(*prompt, Model(), *ids)};
    EXPECT_EQ(json["/count"], "2");
    EXPECT_EQ(json["/max_model_len"], "4096");
    EXPECT_EQ(json["/tokens"], "[97,98]");
    EXPECT_EQ(json["/token_strs"], R"(["a","b"])");

    Result<TokenizeRequest> chat = parser.ParseTokenize(R"({"messages":[{"role":"user","content":"ab"}]})");
    ASSERT_TRUE(chat.ok());
    ids = PrepareTokenize(*chat, Model());
    ASSERT_TRUE(ids.ok());
    EXPECT_EQ(ids->front(), 256);
    EXPECT_EQ(Json(TokenizeJson(*chat, Model(), *ids))["/token_strs"], "null");

    Result<TokenizeRequest> pieces = parser.ParseTokenize(R"({"content":"a","with_pieces":true})");
    ASSERT_TRUE(pieces.ok());
    EXPECT_EQ(Json(TokenizeJson(*pieces, Model(), *PrepareTokenize(*pieces, Model())))["/tokens"],
              R"([{"id":97,"piece":"a"}])");
}

TEST(Tokenize, CountsTextsLongerThanTheContext) {
    Parser parser;
    const std::string text(5000 * 12, 'a');
    Result<TokenizeRequest> chat =
        parser.ParseTokenize(R"({"messages":[{"role":"user","content":")" + text + R"("}]})");
    ASSERT_TRUE(chat.ok());
    EXPECT_TRUE(PrepareTokenize(*chat, Model()).ok());
}

TEST(Tokenize, RefusesByName) {
    Parser parser;
    EXPECT_EQ(parser.ParseTokenize("{}").error().param, "prompt");
    EXPECT_EQ(parser.ParseTokenize(R"({"prompt":5})").error().param, "prompt");
    EXPECT_EQ(
        parser.ParseTokenize(R"({"prompt":"a","messages":[{"role":"user","content":"b"}]})").error().param,
        "prompt");
    EXPECT_EQ(parser.ParseTokenize(R"({"messages":[]})").error().param, "messages");
    EXPECT_FALSE(parser.ParseTokenize("[]").ok());
}

TEST(Detokenize, GivesTheTextBackAndRefusesForeignIds) {
    Parser parser;
    Result<DetokenizeRequest> good = parser.ParseDetokenize(R"({"model":"m","tokens":[104,105,257]})");
    ASSERT_TRUE(good.ok());
    const Json json{*DetokenizeJson(*good, Model())};
    EXPECT_EQ(json.Text("/prompt"), "hi<|im_end|>");
    Result<DetokenizeRequest> foreign = parser.ParseDetokenize(R"({"tokens":[259]})");
    ASSERT_TRUE(foreign.ok());
    EXPECT_EQ(DetokenizeJson(*foreign, Model()).error().param, "tokens");
    for (const char* body :
         {"{}", R"({"tokens":5})", R"({"tokens":[-1]})", R"({"tokens":["a"]})", R"({"tokens":null})"}) {
        EXPECT_EQ(parser.ParseDetokenize(body).error().param, "tokens") << body;
    }
    // A token cut inside a character is still valid JSON.
    Result<DetokenizeRequest> half = parser.ParseDetokenize(R"({"tokens":[226,130]})");
    EXPECT_EQ(Json(*DetokenizeJson(*half, Model())).Text("/prompt"), "\xEF\xBF\xBD");
}

TEST(Ids, AreUniqueAcrossShardsAndCarryTheirPrefix) {
    IdSource a{1, 0};
    IdSource b{1, 1};
    std::set<std::string> seen;
    for (int i = 0; i < 1000; ++i) {
        seen.insert(a.Next(Endpoint::kChat).substr(9));
        seen.insert(b.Next(Endpoint::kChat).substr(9));
    }
    EXPECT_EQ(seen.size(), 2000U);
    EXPECT_TRUE(a.Next(Endpoint::kChat).starts_with("chatcmpl-"));
    EXPECT_TRUE(a.Next(Endpoint::kCompletion).starts_with("cmpl-"));
}

TEST(Ids, OfClientsAreEchoedOnlyWhenHarmless) {
    EXPECT_EQ(RequestIdToEcho("same", "own"), "same");
    EXPECT_EQ(RequestIdToEcho("x", "own"), "x");
    for (const std::string& id :
         {std::string{}, std::string(129, 'x'), std::string(100000, 'x'), std::string{"a\r\nX: y"},
          std::string{"h\xC3\xA9"}, std::string{"a b"}, std::string("a\0b", 3), std::string{"\x7f"}}) {
        EXPECT_EQ(RequestIdToEcho(id, "own"), "own");
    }
}

TEST(JsonScan, FindsTheFieldOfANumberThatFitsNowhere) {
    EXPECT_EQ(KeyOfUnrepresentableNumber(R"({"a":1,"b":{"c":[1e999]},"d":2})"), "b");
    EXPECT_EQ(KeyOfUnrepresentableNumber(R"({"a":"1e999","seed":99999999999999999999})"), "seed");
    EXPECT_EQ(KeyOfUnrepresentableNumber(R"({"a\"1e999":1,"b":-1e400})"), "b");
    EXPECT_EQ(KeyOfUnrepresentableNumber(R"({"a":1e-999,"b":18446744073709551615})"), "");
    for (const char* junk :
         {"", "{", "\"", "\\", "{\"a", "{\"a\\", "]]]]", "1e999", "{\"a\":1e", "-", "{\"a\":-}"}) {
        KeyOfUnrepresentableNumber(junk);
    }
}

}  // namespace
}  // namespace rankgate::api
