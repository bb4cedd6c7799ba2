// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <limits>
#include <random>

#include "api/test_support.h"
#include "base/error_json.h"

namespace rankgate::api {
namespace {

using test::ByteModel;
using test::Bytes;
using test::Chat;
using test::Completion;
using test::Events;
using test::Json;
using wire::FinishReason;

constexpr std::int64_t kCreated = 1700000001;

/// A request on its way: feed it, look at what came out.
struct Reply {
    Reply(Endpoint endpoint, const std::string& body, std::shared_ptr<const ModelInfo> info = ByteModel())
        : model{std::move(info)} {
        test::Outcome outcome = test::Build(endpoint, body, *model, {.id = "id-1"});
        EXPECT_TRUE(outcome.ok) << outcome.error.param << ": " << outcome.error.message;
        assembler = std::make_unique<ResponseAssembler>(std::move(outcome.parsed), model,
                                                        std::move(outcome.prompts), "id-1", kCreated);
    }
    Effect Feed(std::vector<TokenId> tokens, FinishReason finish = FinishReason::kNone,
                std::uint32_t choice = 0, wire::StopReason reason = {},
                const wire::Logprobs* logprobs = nullptr, std::int32_t cached = -1,
                const wire::Logprobs* prompt_logprobs = nullptr) {
        ChoiceOutput output;
        output.choice = choice;
        output.tokens = tokens;
        output.finish_reason = finish;
        output.logprobs = logprobs;
        output.prompt_logprobs = prompt_logprobs;
        output.stop_reason = &reason;
        output.num_cached_tokens = cached;
        return assembler->OnOutput(output, out);
    }
    Effect Text(std::string_view text, FinishReason finish = FinishReason::kNone, std::uint32_t choice = 0) {
        return Feed(Bytes(text), finish, choice);
    }
    /// The joined text of a choice in the stream so far.
    std::string Joined(int choice = 0) const {
        std::string text;
        for (const std::string& event : Events(out)) {
            if (event == "[DONE]") {
                continue;
            }
            const Json json{event};
            if (json["/choices/0/index"] == std::to_string(choice)) {
                for (const char* path : {"/choices/0/delta/content", "/choices/0/text"}) {
                    if (json.Has(path)) {
                        text += json.Text(path);
                    }
                }
            }
        }
        return text;
    }

    std::shared_ptr<const ModelInfo> model;
    std::unique_ptr<ResponseAssembler> assembler;
    std::string out;
};

std::vector<std::string> EventsAfter(const std::string& out, std::size_t from) {
    return Events(std::string_view{out}.substr(from));
}

// ---- Shape of a chat stream ----

TEST(ChatStream, HasARoleChunkTextChunksOneFinishChunkAndDone) {
    Reply run{Endpoint::kChat, Chat(R"("stream":true)")};
    run.Text("He");
    run.Text("y");
    const Effect end = run.Feed({257}, FinishReason::kStop);
    EXPECT_TRUE(end.done);
    EXPECT_FALSE(end.abort_choice);
    const std::vector<std::string> events = Events(run.out);
    ASSERT_EQ(events.size(), 5U);
    EXPECT_EQ(events[4], "[DONE]");
    for (std::size_t i = 0; i < 4; ++i) {
        const Json json{events[i]};
        EXPECT_EQ(json.Text("/id"), "id-1");
        EXPECT_EQ(json.Text("/object"), "chat.completion.chunk");
        EXPECT_EQ(json["/created"], std::to_string(kCreated));
        EXPECT_EQ(json.Text("/model"), "m");
        EXPECT_EQ(json.Size("/choices"), 1U);
        EXPECT_EQ(json["/choices/0/index"], "0");
        EXPECT_EQ(json["/choices/0/finish_reason"], i == 3 ? "\"stop\"" : "null");
        EXPECT_EQ(json["/choices/0/logprobs"], "null");
        EXPECT_FALSE(json.Has("/usage"));
    }
    EXPECT_EQ(Json(events[0])["/choices/0/delta"], R"({"role":"assistant","content":""})");
    EXPECT_EQ(Json(events[1])["/choices/0/delta"], R"({"content":"He"})");
    EXPECT_EQ(Json(events[2])["/choices/0/delta"], R"({"content":"y"})");
    EXPECT_EQ(Json(events[3])["/choices/0/delta"], "{}");
}

TEST(ChatStream, AFinishWithoutTokensStillHasItsReason) {
    Reply run{Endpoint::kChat, Chat(R"("stream":true)")};
    run.Text("a");
    run.Feed({}, FinishReason::kStop);
    const std::vector<std::string> events = Events(run.out);
    ASSERT_EQ(events.size(), 4U);
    EXPECT_EQ(Json(events[2])["/choices/0/finish_reason"], "\"stop\"");

    // Half a character, then the end: it cannot be completed any more.
    Reply half{Endpoint::kChat, Chat(R"("stream":true)")};
    half.Feed({0xE2});
    EXPECT_EQ(Events(half.out).size(), 1U);
    half.Feed({}, FinishReason::kStop);
    EXPECT_EQ(half.Joined(), "\xEF\xBF\xBD");

    // Nothing at all but a good end.
    Reply empty{Endpoint::kChat, Chat(R"("stream":true)")};
    EXPECT_TRUE(empty.Feed({}, FinishReason::kStop).done);
    EXPECT_EQ(Json(Events(empty.out)[0])["/choices/0/delta"], R"({"role":"assistant","content":""})");
}

TEST(ChatStream, UsageComesOnlyWhenAskedAndOnce) {
    const std::vector<std::pair<const char*, bool>> cases = {
        {R"("stream":true)", false},
        {R"("stream":true,"stream_options":{})", false},
        {R"("stream":true,"stream_options":{"include_usage":true})", true},
        {R"("stream":true,"stream_options":{"include_usage":false})", false},
        {R"("stream":true,"stream_options":null)", false},
        {R"("stream":true,"stream_options":{"continuous_usage_stats":true})", false}};
    for (const auto& [more, wanted] : cases) {
        Reply run{Endpoint::kChat, Chat(more)};
        run.Text("abc");
        run.Feed({257}, FinishReason::kStop);
        const std::vector<std::string> events = Events(run.out);
        int with_usage = 0;
        for (std::size_t i = 0; i + 1 < events.size(); ++i) {
            const Json json{events[i]};
            with_usage += json.Has("/usage") ? 1 : 0;
            if (json["/choices"] == "[]") {
                EXPECT_EQ(i + 2, events.size());
                const std::int64_t prompt = run.assembler->prompt_tokens();
                EXPECT_EQ(json["/usage/prompt_tokens"], std::to_string(prompt));
                EXPECT_EQ(json["/usage/completion_tokens"], "4");
                EXPECT_EQ(json["/usage/total_tokens"], std::to_string(prompt + 4));
                EXPECT_EQ(json.Text("/id"), "id-1");
                EXPECT_EQ(json["/created"], std::to_string(kCreated));
                EXPECT_EQ(json.Text("/object"), "chat.completion.chunk");
                EXPECT_FALSE(json.Has("/usage/prompt_tokens_details"));
            }
        }
        EXPECT_EQ(with_usage, wanted ? 1 : 0) << more;
    }
}

TEST(ChatStream, ContinuousUsageCountsUp) {
    Reply run{Endpoint::kChat,
              Chat(R"("stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true})")};
    run.Text("ab");
    run.Text("c");
    run.Feed({257}, FinishReason::kStop);
    const std::vector<std::string> events = Events(run.out);
    ASSERT_EQ(events.size(), 6U);
    const std::vector<std::string> counts = {"0", "2", "3", "4", "4"};
    for (std::size_t i = 0; i < counts.size(); ++i) {
        if (i > 0) {  // the role chunk comes with the first tokens, before they are counted
            EXPECT_EQ(Json(events[i])["/usage/completion_tokens"], counts[i]) << i;
        }
        EXPECT_TRUE(Json(events[i]).Has("/usage/prompt_tokens"));
    }
}

TEST(ChatStream, CachedTokensAreShownWhenTheEngineTellsThem) {
    Reply run{Endpoint::kChat, Chat(R"("stream":true,"stream_options":{"include_usage":true})")};
    run.Feed(Bytes("a"), FinishReason::kNone, 0, {}, nullptr, 8);
    run.Feed({257}, FinishReason::kStop);
    const std::vector<std::string> events = Events(run.out);
    EXPECT_EQ(Json(events[events.size() - 2])["/usage/prompt_tokens_details"], R"({"cached_tokens":8})");
}

TEST(ChatStream, ChoicesInterleaveEachWithItsOwnRoleAndFinish) {
    Reply run{Endpoint::kChat, Chat(R"("stream":true,"n":3,"stream_options":{"include_usage":true})")};
    run.Text("c", FinishReason::kNone, 2);
    run.Text("a", FinishReason::kNone, 0);
    EXPECT_FALSE(run.Text("C", FinishReason::kLength, 2).done);
    run.Text("b", FinishReason::kNone, 1);
    EXPECT_FALSE(run.Feed({257}, FinishReason::kStop, 0).done);
    EXPECT_TRUE(run.Feed({257}, FinishReason::kStop, 1).done);
    EXPECT_EQ(run.Joined(0), "a");
    EXPECT_EQ(run.Joined(1), "b");
    EXPECT_EQ(run.Joined(2), "cC");
    int done = 0;
    int usage = 0;
    std::vector<int> roles(3);
    std::vector<std::string> finish(3);
    for (const std::string& event : Events(run.out)) {
        if (event == "[DONE]") {
            ++done;
            continue;
        }
        const Json json{event};
        if (json["/choices"] == "[]") {
            ++usage;
            EXPECT_EQ(json["/usage/completion_tokens"], "6");
            EXPECT_EQ(json["/usage/prompt_tokens"], std::to_string(run.assembler->prompt_tokens()));
            continue;
        }
        const auto index = static_cast<std::size_t>(std::stoi(json["/choices/0/index"]));
        roles[index] += json.Has("/choices/0/delta/role") ? 1 : 0;
        if (json["/choices/0/finish_reason"] != "null") {
            EXPECT_TRUE(finish[index].empty());
            finish[index] = json["/choices/0/finish_reason"];
        }
    }
    EXPECT_EQ(done, 1);
    EXPECT_EQ(usage, 1);
    EXPECT_EQ(roles, (std::vector<int>{1, 1, 1}));
    EXPECT_EQ(finish, (std::vector<std::string>{"\"stop\"", "\"stop\"", "\"length\""}));
}

TEST(ChatStream, OutputsAfterTheEndOfAChoiceAreDropped) {
    Reply run{Endpoint::kChat, Chat(R"("stream":true,"n":2)")};
    run.Text("a", FinishReason::kLength, 0);
    const std::string before = run.out;
    EXPECT_FALSE(run.Text("late", FinishReason::kStop, 0).done);
    EXPECT_FALSE(run.Text("x", FinishReason::kAbort, 0).failed);
    EXPECT_EQ(run.out, before);
    EXPECT_EQ(run.assembler->completion_tokens(), 1);
    EXPECT_TRUE(run.assembler->choice_done(0));
    EXPECT_FALSE(run.assembler->choice_done(1));
    EXPECT_EQ(run.assembler->finish_reason(0), "length");
    EXPECT_EQ(run.assembler->finish_reason(1), "");
}

TEST(ChatStream, NoLineEndHidesInsideTheData) {
    Reply run{Endpoint::kChat, Chat(R"("stream":true)")};
    const std::string text = "a\n\r\t\"\\\xE2\x80\xA8\xE2\x80\xA9\xC2\x85\x01 b";
    run.Text(text, FinishReason::kLength);
    for (const char* cut : {"\xE2\x80\xA8", "\xE2\x80\xA9", "\xC2\x85", "\r"}) {
        EXPECT_EQ(run.out.find(cut), std::string::npos);
    }
    EXPECT_EQ(run.Joined(), text);
}

// ---- Text ----

TEST(Text, StreamEqualsWholeHoweverTheTokensArrive) {
    const std::string text =
        "n\xC3\xA9 \xEC\x82\xBC\xEA\xB2\xB9\xEC\x82\xB4 "
        "\xF0\x9F\x91\xA9\xE2\x80\x8D\xF0\x9F\x91\xA9\xE2\x80\x8D\xF0\x9F\x91\xA7 ok";
    std::mt19937 random{7};
    for (int round = 0; round < 50; ++round) {
        Reply stream{Endpoint::kChat, Chat(R"("stream":true)")};
        Reply whole{Endpoint::kChat, Chat()};
        std::size_t at = 0;
        while (at < text.size()) {
            const std::size_t size = round == 0 ? 1 : std::min<std::size_t>(random() % 5, text.size() - at);
            stream.Text(std::string_view{text}.substr(at, size));
            whole.Text(std::string_view{text}.substr(at, size));
            at += size;
        }
        stream.Feed({257}, FinishReason::kStop);
        whole.Feed({257}, FinishReason::kStop);
        EXPECT_EQ(stream.Joined(), text);
        EXPECT_EQ(Json(whole.out).Text("/choices/0/message/content"), text);
        EXPECT_EQ(stream.out.find("\xEF\xBF\xBD"), std::string::npos);
    }
}

TEST(Text, RandomIdsNeverStallAndStayValid) {
    std::mt19937 random{11};
    Reply stream{Endpoint::kChat, Chat(R"("stream":true,"skip_special_tokens":false)")};
    Reply whole{Endpoint::kChat, Chat(R"("skip_special_tokens":false)")};
    for (int i = 0; i < 5000; ++i) {
        const auto id = static_cast<TokenId>(random() % 300);  // ids beyond the tokenizer too
        stream.Feed({id});
        whole.Feed({id});
    }
    stream.Feed({}, FinishReason::kLength);
    whole.Feed({}, FinishReason::kLength);
    EXPECT_TRUE(IsValidUtf8(stream.out));
    EXPECT_EQ(stream.Joined(), Json(whole.out).Text("/choices/0/message/content"));
    EXPECT_EQ(stream.assembler->completion_tokens(), 5000);
}

TEST(Text, SpecialTokensAreHiddenByDefaultAndTheStoppingOneIsNeverShown) {
    const auto text = [](const std::string& more, std::vector<TokenId> tokens, FinishReason finish,
                         wire::StopReason reason = {}) {
        Reply run{Endpoint::kChat, Chat(more)};
        run.Feed(std::move(tokens), finish, 0, std::move(reason));
        const Json json{run.out};
        EXPECT_EQ(json["/usage/completion_tokens"], "4");
        return json.Text("/choices/0/message/content");
    };
    const std::vector<TokenId> eos_last = {'H', 'i', 258, 257};
    EXPECT_EQ(text("", eos_last, FinishReason::kStop), "Hi");
    EXPECT_EQ(text(R"("skip_special_tokens":true)", eos_last, FinishReason::kStop), "Hi");
    EXPECT_EQ(text(R"("skip_special_tokens":false)", eos_last, FinishReason::kStop), "Hi<|endoftext|>");
    EXPECT_EQ(text(R"("skip_special_tokens":false)", eos_last, FinishReason::kLength),
              "Hi<|endoftext|><|im_end|>");
    EXPECT_EQ(text(R"("skip_special_tokens":false,"include_stop_str_in_output":true)", eos_last,
                   FinishReason::kStop),
              "Hi<|endoftext|><|im_end|>");
    const std::vector<TokenId> stop_id = {'H', 'i', '!', 'k'};
    EXPECT_EQ(text(R"("stop_token_ids":[107])", stop_id, FinishReason::kStop, std::int64_t{107}), "Hi!");
    EXPECT_EQ(text(R"("stop_token_ids":[107],"include_stop_str_in_output":true)", stop_id,
                   FinishReason::kStop, std::int64_t{107}),
              "Hi!k");
    // A grammar that is complete ends with a token that is text.
    EXPECT_EQ(text("", stop_id, FinishReason::kStop), "Hi!k");
}

TEST(Text, StopReasonTellsTheIdOrTheString) {
    Reply id{Endpoint::kChat, Chat(R"("stop_token_ids":[107])")};
    id.Feed({'a', 107}, FinishReason::kStop, 0, std::int64_t{107});
    EXPECT_EQ(Json(id.out)["/choices/0/stop_reason"], "107");
    Reply eos{Endpoint::kChat, Chat()};
    eos.Feed({'a', 257}, FinishReason::kStop);
    EXPECT_EQ(Json(eos.out)["/choices/0/stop_reason"], "null");
    Reply text{Endpoint::kChat, Chat(R"("stop":"\n\"")")};
    text.Text("a\n\"b");
    EXPECT_EQ(Json(text.out).Text("/choices/0/stop_reason"), "\n\"");
}

// ---- Stop strings ----

TEST(Stop, LeftmostMatchCutsTheTextAndAsksForAnAbortAtOnce) {
    auto model = test::WordModel({"hi", "Answer\n\n", "more", "\n"});
    const std::string body = R"({"prompt":"hi","stop":"\n","stream":true})";
    Reply run{Endpoint::kCompletion, body, model};
    const Effect effect = run.Feed({1});
    EXPECT_TRUE(effect.abort_choice);
    EXPECT_TRUE(effect.done);
    EXPECT_EQ(run.Joined(), "Answer");
    const std::vector<std::string> events = Events(run.out);
    EXPECT_EQ(Json(events[events.size() - 2])["/choices/0/finish_reason"], "\"stop\"");
    EXPECT_EQ(Json(events[events.size() - 2]).Text("/choices/0/stop_reason"), "\n");
}

TEST(Stop, MatchAcrossTokensIsNeverShownEvenInPart) {
    Reply run{Endpoint::kChat, Chat(R"("stop":["XYZ","QQ"],"stream":true)")};
    EXPECT_FALSE(run.Text("abX").abort_choice);
    EXPECT_EQ(run.Joined(), "ab");
    const std::size_t before = run.out.size();
    EXPECT_FALSE(run.Text("Y").abort_choice);
    EXPECT_EQ(run.out.size(), before) << "an empty delta while holding back";
    EXPECT_TRUE(run.Text("Z").abort_choice);
    EXPECT_EQ(run.Joined(), "ab");
    EXPECT_EQ(run.assembler->completion_tokens(), 5);
}

TEST(Stop, NoAbortWhenTheEngineHasEndedAnyway) {
    Reply run{Endpoint::kChat, Chat(R"("stop":"Z")")};
    const Effect effect = run.Text("aZ", FinishReason::kLength);
    EXPECT_FALSE(effect.abort_choice);
    EXPECT_TRUE(effect.done);
    EXPECT_EQ(Json(run.out)["/choices/0/finish_reason"], "\"stop\"");
}

TEST(Stop, HeldTextIsGivenOutAtTheEnd) {
    const std::string longest(200, 's');
    const std::vector<std::tuple<std::string, std::string, FinishReason>> cases = {
        {"XYZ", "abX", FinishReason::kLength},
        {"XYZ", "abXY", FinishReason::kStop},
        {"XYZ", "X", FinishReason::kStop},
        {longest, std::string(50, 's'), FinishReason::kStop},
    };
    for (const auto& [stop, text, finish] : cases) {
        for (const bool stream : {true, false}) {
            Reply run{Endpoint::kChat,
                      Chat("\"stop\":\"" + stop + "\"" + (stream ? ",\"stream\":true" : ""))};
            run.Text(text);
            run.Feed(finish == FinishReason::kStop ? std::vector<TokenId>{257} : std::vector<TokenId>{},
                     finish);
            EXPECT_EQ(stream ? run.Joined() : Json(run.out).Text("/choices/0/message/content"), text);
        }
    }
}

TEST(Stop, ResultDoesNotDependOnTheCut) {
    const std::string text = "aaabaaab<stop>tail";
    for (std::size_t cut = 1; cut < text.size(); ++cut) {
        Reply run{Endpoint::kChat, Chat(R"("stop":["<stop>","aab<"],"stream":true)")};
        bool aborted = run.Text(text.substr(0, cut)).abort_choice;
        aborted = run.Text(text.substr(cut)).abort_choice || aborted;
        EXPECT_TRUE(aborted);
        EXPECT_EQ(run.Joined(), "aaaba") << cut;
    }
}

TEST(Stop, StringMayBeKept) {
    Reply run{Endpoint::kChat, Chat(R"("stop":"Z","include_stop_str_in_output":true)")};
    run.Text("abZcd");
    EXPECT_EQ(Json(run.out).Text("/choices/0/message/content"), "abZ");
}

TEST(Stop, OtherChoicesGoOn) {
    Reply run{Endpoint::kChat, Chat(R"("stop":"Z","n":2)")};
    const Effect first = run.Text("aZ", FinishReason::kNone, 0);
    EXPECT_TRUE(first.abort_choice);
    EXPECT_FALSE(first.done);
    EXPECT_TRUE(run.out.empty());
    EXPECT_TRUE(run.Text("b", FinishReason::kLength, 1).done);
    const Json json{run.out};
    EXPECT_EQ(json.Text("/choices/0/message/content"), "a");
    EXPECT_EQ(json.Text("/choices/1/message/content"), "b");
}

// ---- Whole bodies ----

TEST(ChatBody, HasExactlyTheKeysThatStrictClientsRead) {
    Reply run{Endpoint::kChat, Chat()};
    EXPECT_TRUE(run.Feed({'H', 'i', 257}, FinishReason::kStop).done);
    EXPECT_EQ(
        run.out,
        R"({"id":"id-1","object":"chat.completion","created":1700000001,"model":"m","choices":[{"index":0,"message":)"
        R"({"role":"assistant","content":"Hi","refusal":null},"logprobs":null,"finish_reason":"stop","stop_reason":null}],)"
        R"("usage":{"prompt_tokens":)" +
            std::to_string(run.assembler->prompt_tokens()) + R"(,"total_tokens":)" +
            std::to_string(run.assembler->prompt_tokens() + 3) + R"(,"completion_tokens":3}})");
    for (const char* absent : {"/service_tier", "/system_fingerprint", "/choices/0/message/tool_calls",
                               "/choices/0/message/annotations", "/choices/0/message/function_call",
                               "/choices/0/message/audio", "/usage/prompt_tokens_details"}) {
        EXPECT_FALSE(Json(run.out).Has(absent)) << absent;
    }
}

TEST(ChatBody, ChoicesAreInIndexOrderWhateverEndsFirst) {
    Reply run{Endpoint::kChat, Chat(R"("n":3)")};
    run.Text("c", FinishReason::kLength, 2);
    run.Text("a", FinishReason::kLength, 0);
    EXPECT_TRUE(run.out.empty());
    EXPECT_TRUE(run.Feed({'b', 257}, FinishReason::kStop, 1).done);
    const Json json{run.out};
    EXPECT_EQ(json.Text("/choices/0/message/content"), "a");
    EXPECT_EQ(json.Text("/choices/1/message/content"), "b");
    EXPECT_EQ(json.Text("/choices/2/message/content"), "c");
    EXPECT_EQ(json["/choices/2/index"], "2");
    EXPECT_EQ(json["/choices/1/finish_reason"], "\"stop\"");
    EXPECT_EQ(json["/choices/2/finish_reason"], "\"length\"");
    EXPECT_EQ(json["/usage/completion_tokens"], "4");
}

TEST(ChatBody, TheModelsFirstNameAnswersAndAdaptersTheirOwn) {
    Reply alias{Endpoint::kChat, R"({"model":"alias","messages":[{"role":"user","content":"hi"}]})"};
    alias.Text("a", FinishReason::kLength);
    EXPECT_EQ(Json(alias.out).Text("/model"), "m");
    auto model = ByteModel();
    model->features.lora = true;
    model->adapters.push_back({.name = "sql", .id = 3, .path = "/a", .base_model_name = "m"});
    Reply adapter{Endpoint::kChat, R"({"model":"sql","messages":[{"role":"user","content":"hi"}]})", model};
    adapter.Text("a", FinishReason::kLength);
    EXPECT_EQ(Json(adapter.out).Text("/model"), "sql");
}

TEST(CompletionBody, SeveralPromptsAndChoicesKeepTheirPlaces) {
    Reply run{Endpoint::kCompletion, R"({"model":"m","prompt":["aa","b"],"n":2,"max_tokens":3})"};
    for (const std::uint32_t choice : {3U, 1U, 2U, 0U}) {
        run.Text(std::string(1, static_cast<char>('0' + choice)) + "xy", FinishReason::kLength, choice);
    }
    const Json json{run.out};
    EXPECT_EQ(json.Text("/object"), "text_completion");
    EXPECT_EQ(json.Size("/choices"), 4U);
    for (int i = 0; i < 4; ++i) {
        const std::string at = "/choices/" + std::to_string(i);
        EXPECT_EQ(json[at + "/index"], std::to_string(i));
        EXPECT_EQ(json.Text(at + "/text"), std::to_string(i) + "xy");
        EXPECT_EQ(json[at + "/finish_reason"], "\"length\"");
        EXPECT_EQ(json[at + "/logprobs"], "null");
    }
    // Prompt tokens count once a prompt, not once a choice.
    EXPECT_EQ(json["/usage/prompt_tokens"], "3");
    EXPECT_EQ(json["/usage/completion_tokens"], "12");
    EXPECT_EQ(json["/usage/total_tokens"], "15");
}

TEST(CompletionStream, HasTheLegacyShape) {
    Reply run{Endpoint::kCompletion, Completion(R"("stream":true,"stream_options":{"include_usage":true})")};
    run.Text("a");
    run.Feed({257}, FinishReason::kStop);
    const std::vector<std::string> events = Events(run.out);
    ASSERT_EQ(events.size(), 4U);
    EXPECT_EQ(
        events[0],
        R"({"id":"id-1","object":"text_completion","created":1700000001,"model":"m","choices":[{"index":0,"text":"a",)"
        R"("logprobs":null,"finish_reason":null}]})");
    EXPECT_EQ(Json(events[1])["/choices/0/finish_reason"], "\"stop\"");
    EXPECT_EQ(Json(events[1]).Text("/choices/0/text"), "");
    EXPECT_EQ(Json(events[2])["/choices"], "[]");
    EXPECT_EQ(events[3], "[DONE]");
}

// ---- Logprobs ----

wire::Logprobs Rows(std::int32_t width, std::vector<TokenId> ids, std::vector<float> values) {
    wire::Logprobs rows;
    rows.width = width;
    rows.positions = static_cast<std::int32_t>(ids.size()) / width;
    rows.token_ids = std::move(ids);
    rows.logprobs = std::move(values);
    rows.ranks.assign(static_cast<std::size_t>(rows.positions), 1);
    return rows;
}

TEST(ChatLogprobs, HaveExactBytesAndAnEmptyTopListWhenNoneIsAsked) {
    Reply run{Endpoint::kChat, Chat(R"("logprobs":true)")};
    const wire::Logprobs rows = Rows(1, {0xE2, 0x82, 0xAC, '"'},
                                     {-0.5F, -1.0F, -std::numeric_limits<float>::infinity(), std::nanf("")});
    run.Feed({0xE2, 0x82, 0xAC, '"'}, FinishReason::kLength, 0, {}, &rows);
    const Json json{run.out};
    EXPECT_EQ(json.Text("/choices/0/message/content"), "\xE2\x82\xAC\"");
    EXPECT_EQ(json.Size("/choices/0/logprobs/content"), 4U);
    EXPECT_EQ(json["/choices/0/logprobs/refusal"], "null");
    EXPECT_EQ(json["/choices/0/logprobs/content/0"],
              "{\"token\":\"\xEF\xBF\xBD\",\"logprob\":-0.5,\"bytes\":[226],\"top_logprobs\":[]}");
    EXPECT_EQ(json["/choices/0/logprobs/content/2/bytes"], "[172]");
    for (const char* row : {"2", "3"}) {
        EXPECT_EQ(std::stod(json["/choices/0/logprobs/content/" + std::string{row} + "/logprob"]), -9999);
    }
    EXPECT_EQ(json.Text("/choices/0/logprobs/content/3/token"), "\"");
}

TEST(ChatLogprobs, TopListIsTheMostLikelyInOrder) {
    Reply run{Endpoint::kChat, Chat(R"("logprobs":true,"top_logprobs":2)")};
    const wire::Logprobs rows = Rows(3, {'c', 'a', 'b'}, {-3.0F, -0.25F, -1.5F});
    run.Feed({'c'}, FinishReason::kLength, 0, {}, &rows);
    const Json json{run.out};
    EXPECT_EQ(
        json["/choices/0/logprobs/content/0"],
        R"({"token":"c","logprob":-3.0,"bytes":[99],"top_logprobs":[{"token":"a","logprob":-0.25,"bytes":[97]},)"
        R"({"token":"b","logprob":-1.5,"bytes":[98]}]})");
}

TEST(ChatLogprobs, StreamCarriesEveryTokenOnceEvenWhileTextIsHeld) {
    Reply run{Endpoint::kChat, Chat(R"("logprobs":true,"stream":true,"stop":"XYZ")")};
    int tokens = 0;
    const auto feed = [&](TokenId id, FinishReason finish = FinishReason::kNone) {
        const wire::Logprobs rows = Rows(1, {id}, {-1.0F});
        run.Feed({id}, finish, 0, {}, &rows);
        ++tokens;
    };
    feed(0xE2);
    feed(0x82);
    feed(0xAC);
    feed('X');
    feed('Y');
    feed('a');
    feed(257, FinishReason::kStop);
    std::size_t seen = 0;
    for (const std::string& event : Events(run.out)) {
        if (event != "[DONE]") {
            seen += Json(event).Size("/choices/0/logprobs/content");
        }
    }
    EXPECT_EQ(seen, static_cast<std::size_t>(tokens));
    EXPECT_EQ(run.Joined(), "\xE2\x82\xACXYa");
}

TEST(CompletionLogprobs, AreParallelArraysWithCharacterOffsets) {
    Reply run{Endpoint::kCompletion, Completion(R"("logprobs":1)")};
    const wire::Logprobs rows =
        Rows(2, {0xC3, 'x', 0xA9, 0xA9, 'b', 'b'}, {-1.0F, -0.5F, -2.0F, -2.0F, -0.125F, -0.125F});
    run.Feed({0xC3, 0xA9, 'b'}, FinishReason::kLength, 0, {}, &rows);
    const Json json{run.out};
    EXPECT_EQ(json.Text("/choices/0/text"),
              "\xC3\xA9"
              "b");
    EXPECT_EQ(json["/choices/0/logprobs/tokens"], R"(["bytes:\\xc3","bytes:\\xa9","b"])");
    EXPECT_EQ(json["/choices/0/logprobs/token_logprobs"], "[-1.0,-2.0,-0.125]");
    // The sampled token is always there; a second id with the same text is not.
    EXPECT_EQ(json["/choices/0/logprobs/top_logprobs"],
              R"([{"bytes:\\xc3":-1.0,"x":-0.5},{"bytes:\\xa9":-2.0},{"b":-0.125}])");
    EXPECT_EQ(json["/choices/0/logprobs/text_offset"], "[0,0,1]");
}

TEST(CompletionLogprobs, EchoScoresThePromptTooAndStartsWithNull) {
    for (const bool stream : {false, true}) {
        Reply run{Endpoint::kCompletion, R"({"prompt":"a\u00e9","echo":true,"logprobs":1,"max_tokens":1)" +
                                             std::string{stream ? R"(,"stream":true})" : "}"}};
        const wire::Logprobs prompt = Rows(2, {0xC3, 0xC3, 0xA9, 'z'}, {-1.0F, -1.0F, -2.0F, -0.5F});
        const wire::Logprobs rows = Rows(2, {'b', 'b'}, {-0.25F, -0.25F});
        run.Feed({'b'}, FinishReason::kLength, 0, {}, &rows, -1, &prompt);
        if (stream) {
            EXPECT_EQ(run.Joined(),
                      "a\xC3\xA9"
                      "b");
            const std::vector<std::string> events = Events(run.out);
            EXPECT_EQ(Json(events[0])["/choices/0/logprobs/text_offset"], "[0,1,1]");
            EXPECT_EQ(Json(events[1])["/choices/0/logprobs/text_offset"], "[2]");
            continue;
        }
        const Json json{run.out};
        EXPECT_EQ(json.Text("/choices/0/text"),
                  "a\xC3\xA9"
                  "b");
        EXPECT_EQ(json["/choices/0/logprobs/tokens"], R"(["a","bytes:\\xc3","bytes:\\xa9","b"])");
        EXPECT_EQ(json["/choices/0/logprobs/token_logprobs"], "[null,-1.0,-2.0,-0.25]");
        EXPECT_EQ(json["/choices/0/logprobs/top_logprobs"],
                  R"([null,{"bytes:\\xc3":-1.0},{"bytes:\\xa9":-2.0,"z":-0.5},{"b":-0.25}])");
        EXPECT_EQ(json["/choices/0/logprobs/text_offset"], "[0,1,1,2]");
        EXPECT_EQ(json["/usage/completion_tokens"], "1");
    }
}

TEST(CompletionLogprobs, EchoAloneShowsNothingGenerated) {
    Reply run{Endpoint::kCompletion, R"({"prompt":"ab","echo":true,"logprobs":0,"max_tokens":0})"};
    const wire::Logprobs prompt = Rows(1, {'b'}, {-1.0F});
    const wire::Logprobs rows = Rows(1, {'c'}, {-1.0F});
    EXPECT_TRUE(run.Feed({'c'}, FinishReason::kLength, 0, {}, &rows, -1, &prompt).done);
    const Json json{run.out};
    EXPECT_EQ(json.Text("/choices/0/text"), "ab");
    EXPECT_EQ(json["/choices/0/logprobs/tokens"], R"(["a","b"])");
    EXPECT_EQ(json["/usage/completion_tokens"], "0");
    EXPECT_EQ(json["/usage/total_tokens"], "2");
}

TEST(CompletionLogprobs, ASingleTokenPromptHasOneNull) {
    // The engine sends an empty array, or none at all.
    for (const bool given : {true, false}) {
        Reply run{Endpoint::kCompletion, R"({"prompt":[97],"echo":true,"logprobs":0,"max_tokens":1})"};
        wire::Logprobs prompt;
        prompt.width = 1;
        const wire::Logprobs rows = Rows(1, {'c'}, {-1.0F});
        run.Feed({'c'}, FinishReason::kLength, 0, {}, &rows, -1, given ? &prompt : nullptr);
        EXPECT_EQ(Json(run.out)["/choices/0/logprobs/token_logprobs"], "[null,-1.0]");
        EXPECT_EQ(Json(run.out).Text("/choices/0/text"), "ac");
    }
}

TEST(CompletionLogprobs, PromptScoresMayComeInPieces) {
    Reply run{Endpoint::kCompletion, R"({"prompt":"abcd","echo":true,"logprobs":0,"max_tokens":1})"};
    const wire::Logprobs first = Rows(1, {'b', 'c'}, {-1.0F, -2.0F});
    const wire::Logprobs second = Rows(1, {'d'}, {-3.0F});
    run.Feed({}, FinishReason::kNone, 0, {}, nullptr, -1, &first);
    EXPECT_FALSE(run.assembler->streaming_started());
    const wire::Logprobs rows = Rows(1, {'e'}, {-4.0F});
    run.Feed({'e'}, FinishReason::kLength, 0, {}, &rows, -1, &second);
    EXPECT_EQ(Json(run.out)["/choices/0/logprobs/token_logprobs"], "[null,-1.0,-2.0,-3.0,-4.0]");
}

TEST(PromptLogprobs, OfVllmAreObjectsByTokenId) {
    Reply chat{Endpoint::kChat, Chat(R"("prompt_logprobs":1)")};
    const wire::Logprobs rows = Rows(2, {'u', 'v'}, {-1.0F, -0.5F});
    chat.Feed({'a'}, FinishReason::kLength, 0, {}, nullptr, -1, &rows);
    const Json json{chat.out};
    EXPECT_EQ(json["/prompt_logprobs/0"], "null");
    EXPECT_EQ(
        json["/prompt_logprobs/1"],
        R"({"117":{"logprob":-1.0,"rank":1,"decoded_token":"u"},"118":{"logprob":-0.5,"rank":1,"decoded_token":"v"}})");
    EXPECT_EQ(json.Size("/prompt_logprobs"), static_cast<std::size_t>(chat.assembler->prompt_tokens()));
    Reply completion{Endpoint::kCompletion, R"({"prompt":"ab","prompt_logprobs":0})"};
    const wire::Logprobs one = Rows(1, {'b'}, {-1.0F});
    completion.Feed({'a'}, FinishReason::kLength, 0, {}, nullptr, -1, &one);
    EXPECT_EQ(Json(completion.out)["/choices/0/prompt_logprobs"],
              R"([null,{"98":{"logprob":-1.0,"rank":1,"decoded_token":"b"}}])");
}

TEST(Logprobs, RaggedTablesAreLeftOutNotReadBeyond) {
    Reply run{Endpoint::kChat, Chat(R"("logprobs":true)")};
    wire::Logprobs ragged = Rows(2, {'a', 'b'}, {-1.0F, -2.0F});
    ragged.positions = 5;
    run.Feed({'a'}, FinishReason::kNone, 0, {}, &ragged);
    wire::Logprobs negative = Rows(1, {'a'}, {-1.0F});
    negative.positions = -1;
    run.Feed({'a'}, FinishReason::kLength, 0, {}, &negative);
    const Json json{run.out};
    EXPECT_EQ(json["/choices/0/logprobs/content"], "[]");
    EXPECT_EQ(json.Text("/choices/0/message/content"), "aa");
}

TEST(TokenIds, AreReturnedWhereAsked) {
    Reply whole{Endpoint::kCompletion, R"({"prompt":[5,6],"return_token_ids":true})"};
    whole.Feed({'a', 'b'}, FinishReason::kNone);
    whole.Feed({257}, FinishReason::kStop);
    EXPECT_EQ(Json(whole.out)["/choices/0/token_ids"], "[97,98,257]");
    EXPECT_EQ(Json(whole.out)["/choices/0/prompt_token_ids"], "[5,6]");
    Reply stream{Endpoint::kCompletion, R"({"prompt":[5,6],"return_token_ids":true,"stream":true})"};
    stream.Feed({'a', 'b'});
    stream.Feed({'c'});
    stream.Feed({257}, FinishReason::kStop);
    const std::vector<std::string> events = Events(stream.out);
    EXPECT_EQ(Json(events[0])["/choices/0/prompt_token_ids"], "[5,6]");
    EXPECT_EQ(Json(events[0])["/choices/0/token_ids"], "[97,98]");
    EXPECT_EQ(Json(events[1])["/choices/0/token_ids"], "[99]");
    EXPECT_FALSE(Json(events[1]).Has("/choices/0/prompt_token_ids"));
    EXPECT_EQ(Json(events[2])["/choices/0/token_ids"], "[257]");
    Reply named{Endpoint::kCompletion, R"({"prompt":"a","logprobs":0,"return_tokens_as_token_ids":true})"};
    const wire::Logprobs rows = Rows(1, {'b'}, {-1.0F});
    named.Feed({'b'}, FinishReason::kLength, 0, {}, &rows);
    EXPECT_EQ(Json(named.out)["/choices/0/logprobs/tokens"], R"(["token_id:98"])");
}

// ---- Bad endings ----

TEST(BadEnding, BeforeTheFirstByteItIsAnHttpError) {
    for (const FinishReason finish : {FinishReason::kAbort, FinishReason::kError, FinishReason::kRepetition,
                                      static_cast<FinishReason>(77)}) {
        for (const bool stream : {true, false}) {
            Reply run{Endpoint::kChat, Chat(stream ? R"("stream":true)" : "")};
            const Effect effect = run.Feed({}, finish);
            EXPECT_TRUE(effect.failed);
            EXPECT_FALSE(effect.done);
            EXPECT_TRUE(run.out.empty());
            EXPECT_FALSE(run.assembler->streaming_started());
            EXPECT_GE(HttpStatus(run.assembler->error().code), 500);
            EXPECT_EQ(run.assembler->finish_reason(0), "error");
        }
    }
}

TEST(BadEnding, WhatTheEngineRefusesByNameIsTheClientsMistake) {
    Reply run{Endpoint::kChat, Chat()};
    EXPECT_TRUE(run.Feed({}, FinishReason::kError, 0,
                         std::string{"structured_outputs: runner llama follows grammars only"})
                    .failed);
    EXPECT_EQ(HttpStatus(run.assembler->error().code), 400);
    EXPECT_EQ(run.assembler->error().param, "structured_outputs");
    EXPECT_EQ(run.assembler->error().message,
              "The engine refused the request: runner llama follows grammars only");
}

TEST(BadEnding, WhatNoClientCanHaveWrittenIsNotTheClientsMistake) {
    const auto status = [](const char* why) {
        Reply run{Endpoint::kChat, Chat()};
        run.Feed({}, FinishReason::kError, 0, std::string{why});
        return HttpStatus(run.assembler->error().code);
    };
    EXPECT_EQ(status("sampling_params.top_k: wrong type"), 400);
    for (const char* why : {"the device is gone", "CUDA error: out of memory", "", ": x",
                            "request_id: a request with this id is running",
                            "client_index: no output was given for this client"}) {
        EXPECT_EQ(status(why), 500) << why;
    }
}

TEST(BadEnding, WhatTheEngineRefusesIsNamedAsTheClientNamedIt) {
    for (const auto& [field, param] :
         {std::pair{R"("response_format":{"type":"json_object"})", "response_format"},
          std::pair{R"("guided_regex":"a+")", "guided_regex"},
          std::pair{R"("structured_outputs":{"grammar":"root ::= \"a\""})", "structured_outputs"}}) {
        Reply run{Endpoint::kChat, Chat(field)};
        EXPECT_TRUE(
            run.Feed({}, FinishReason::kError, 0, std::string{"structured_outputs: cannot be followed"})
                .failed);
        EXPECT_EQ(HttpStatus(run.assembler->error().code), 400);
        EXPECT_EQ(run.assembler->error().param, param);
    }
}

TEST(BadEnding, AnErrorBeforeTheFirstTokenOfAConstrainedRequestIsItsConstraint) {
    const std::string grammar = R"("structured_outputs":{"grammar":"root ::= ("})";
    {
        Reply run{Endpoint::kChat, Chat(grammar)};
        EXPECT_TRUE(run.Feed({}, FinishReason::kError).failed);
        EXPECT_EQ(HttpStatus(run.assembler->error().code), 400);
        EXPECT_EQ(run.assembler->error().param, "structured_outputs");
    }
    {
        // Later, or without a constraint, or by an abort, it is the engine's.
        Reply run{Endpoint::kChat, Chat(grammar)};
        run.Text("a");
        EXPECT_TRUE(run.Feed({}, FinishReason::kError).failed);
        EXPECT_EQ(HttpStatus(run.assembler->error().code), 500);
    }
    Reply plain{Endpoint::kChat, Chat()};
    EXPECT_TRUE(plain.Feed({}, FinishReason::kError).failed);
    EXPECT_EQ(HttpStatus(plain.assembler->error().code), 500);
    Reply aborted{Endpoint::kChat, Chat(grammar)};
    EXPECT_TRUE(aborted.Feed({}, FinishReason::kAbort).failed);
    EXPECT_EQ(HttpStatus(aborted.assembler->error().code), 500);
}

TEST(BadEnding, TextThatIsStillHeldBackIsNoFirstByte) {
    Reply run{Endpoint::kCompletion, Completion(R"("stream":true,"stop":"XYZ")")};
    run.Text("XY");
    EXPECT_FALSE(run.assembler->streaming_started());
    EXPECT_TRUE(run.Feed({}, FinishReason::kError).failed);
    EXPECT_TRUE(run.out.empty());
}

TEST(BadEnding, AfterThatItIsAnErrorEventAndNothingElse) {
    for (const FinishReason finish :
         {FinishReason::kAbort, FinishReason::kError, FinishReason::kRepetition}) {
        Reply run{Endpoint::kChat, Chat(R"("stream":true,"stream_options":{"include_usage":true})")};
        run.Text("abc");
        const std::size_t before = run.out.size();
        EXPECT_TRUE(run.Text("d", finish).failed);
        const std::vector<std::string> events = EventsAfter(run.out, before);
        ASSERT_EQ(events.size(), 1U);
        const Json json{events[0]};
        EXPECT_FALSE(json.Text("/error/message").empty());
        EXPECT_EQ(json.Text("/error/type"), "internal_error");
        EXPECT_EQ(json["/error/param"], "null");
        EXPECT_TRUE(json.Has("/error/code"));
        EXPECT_EQ(run.out.find("[DONE]"), std::string::npos);
        EXPECT_EQ(run.out.find("\"finish_reason\":\""), std::string::npos);
        // What still comes in is not shown.
        run.Text("late", FinishReason::kStop);
        EXPECT_EQ(EventsAfter(run.out, before).size(), 1U);
    }
}

TEST(BadEnding, ANonStreamingReplyIsNeverHalfGood) {
    Reply run{Endpoint::kChat, Chat(R"("n":2)")};
    run.Text("fine", FinishReason::kLength, 0);
    EXPECT_TRUE(run.Text("x", FinishReason::kError, 1).failed);
    EXPECT_TRUE(run.out.empty());
    EXPECT_EQ(HttpStatus(run.assembler->error().code), 500);
}

TEST(BadEnding, ErrorsOfTheGroupTakeTheSameWay) {
    const Error lost{ErrorCode::kRankLost, "Rank 1 was lost.", {}, true};
    Reply early{Endpoint::kChat, Chat(R"("stream":true,"n":2)")};
    EXPECT_TRUE(early.assembler->OnError(1, lost, early.out).failed);
    EXPECT_TRUE(early.out.empty());
    EXPECT_EQ(early.assembler->error().code, ErrorCode::kRankLost);
    EXPECT_FALSE(early.assembler->OnError(0, lost, early.out).failed) << "reported once";

    Reply late{Endpoint::kChat, Chat(R"("stream":true)")};
    late.Text("a");
    EXPECT_TRUE(late.assembler->OnError(0, lost, late.out).failed);
    EXPECT_NE(
        late.out.find(
            R"(data: {"error":{"message":"Rank 1 was lost.","type":"internal_error","param":null,"code":"rank_lost"}})"),
        std::string::npos);

    Reply done{Endpoint::kChat, Chat()};
    done.Text("a", FinishReason::kLength);
    const std::string body = done.out;
    EXPECT_FALSE(done.assembler->OnError(0, lost, done.out).failed);
    EXPECT_EQ(done.out, body);
}

// ---- Cost ----

TEST(Cost, AStreamedTokenAllocatesNothing) {
    for (const std::string more :
         {R"("stream":true)", R"("stream":true,"stop":["END","\n\n"])",
          R"("stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true})",
          R"("stream":true,"n":4)"}) {
        for (const Endpoint endpoint : {Endpoint::kChat, Endpoint::kCompletion}) {
            Reply run{endpoint, endpoint == Endpoint::kChat ? Chat(more) : Completion(more)};
            run.out.reserve(std::size_t{1} << 20);
            const TokenId tokens[] = {'a', 0xC3, 0xA9, '"', '\n', 'E', 'N', 'x', 0xFF};
            const auto feed = [&](TokenId token) {
                ChoiceOutput output;
                output.tokens = std::span{&token, 1};
                run.assembler->OnOutput(output, run.out);
            };
            for (const TokenId token : tokens) {
                feed(token);  // warms the thread's scratch buffers
            }
            const std::size_t before = test::Allocations();
            for (int i = 0; i < 1000; ++i) {
                feed(tokens[static_cast<std::size_t>(i) % std::size(tokens)]);
            }
            EXPECT_EQ(test::Allocations() - before, 0U) << more;
            run.out.clear();
        }
    }
}

TEST(Cost, ASilentStreamIsSmall) {
    Reply run{Endpoint::kChat, Chat(R"("stream":true)")};
    EXPECT_LT(run.assembler->held_bytes(), 1024U);
}

// ---- Small bodies ----

TEST(Errors, HaveAllFourKeysAlways) {
    EXPECT_EQ(ErrorJson(Error::Invalid("stop", "No.")),
              R"({"error":{"message":"No.","type":"invalid_request_error","param":"stop","code":null}})");
    EXPECT_EQ(ErrorJson(ModelNotFound("x\xff\n")),
              "{\"error\":{\"message\":\"The model `x\xEF\xBF\xBD\\n` does not "
              "exist.\",\"type\":\"invalid_request_error\","
              "\"param\":\"model\",\"code\":\"model_not_found\"}}");
    for (int i = 0; i <= static_cast<int>(ErrorCode::kSendFailed); ++i) {
        const Json json{ErrorJson(Error{static_cast<ErrorCode>(i), "bad \xC0\x80 bytes", {}, false})};
        EXPECT_FALSE(json.Text("/error/message").empty());
        EXPECT_FALSE(json.Text("/error/type").empty());
        EXPECT_EQ(json["/error/param"], "null");
        EXPECT_TRUE(json.Has("/error/code"));
    }
    EXPECT_LT(ErrorJson(Error::Invalid("", std::string(1 << 20, 'x'))).size(), 9000U);
}

TEST(Models, ListNamesAndAdaptersInTheOfficialShape) {
    auto model = ByteModel();
    model->served_names = {"org/m", "alias"};
    model->adapters.push_back({.name = "sql", .id = 3, .path = "/a", .base_model_name = "org/m"});
    const std::vector<std::shared_ptr<const ModelInfo>> models = {model};
    const Json json{ModelsJson(models)};
    EXPECT_EQ(json.Text("/object"), "list");
    EXPECT_EQ(json.Size("/data"), 3U);
    for (const char* i : {"0", "1", "2"}) {
        const std::string at = "/data/" + std::string{i};
        EXPECT_EQ(json.Text(at + "/object"), "model");
        EXPECT_EQ(json[at + "/created"], "1700000000");
        EXPECT_EQ(json.Text(at + "/owned_by"), "rankgate");
    }
    EXPECT_EQ(json.Text("/data/0/id"), "org/m");
    EXPECT_EQ(json.Text("/data/2/parent"), "org/m");
    EXPECT_EQ(Json(ModelsJson({}))["/data"], "[]");

    EXPECT_EQ(Json(*ModelJson(models, *PercentDecode("org%2Fm"))).Text("/id"), "org/m");
    EXPECT_EQ(Json(*ModelJson(models, "org/m")).Text("/id"), "org/m");
    EXPECT_EQ(Json(*ModelJson(models, "sql")).Text("/id"), "sql");
    EXPECT_EQ(HttpStatus(ModelJson(models, "nope").error().code), 404);
    EXPECT_EQ(OpenAiCode(ModelJson(models, "").error().code), "model_not_found");
}

TEST(Models, BadPercentEncodingIsA400) {
    for (const char* text : {"%", "%2", "a%zz", "%00", "%ff", "%c0%80"}) {
        EXPECT_FALSE(PercentDecode(text).ok()) << text;
    }
    EXPECT_EQ(*PercentDecode("a%20b%2fc"), "a b/c");
}

TEST(Version, IsAnObject) {
    EXPECT_EQ(VersionJson("0.1.0"), R"({"version":"0.1.0"})");
}

}  // namespace
}  // namespace rankgate::api
