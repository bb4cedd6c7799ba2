// SPDX-License-Identifier: Apache-2.0
// The gateway as an HTTP client sees it, over groups that answer from a script. Byte tokenizer, port 0, no
// engines.
#include "gateway/gateway.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <boost/json.hpp>
#include <thread>

#include "gateway/fake_group.h"
#include "http/test_client.h"

namespace rankgate::gateway {
namespace {

namespace json = boost::json;
using http::Get;
using http::Post;
using http::RawClient;
using http::RawReply;
using std::chrono::milliseconds;
using wire::FinishReason;

constexpr std::string_view kChat = R"({"model":"m","messages":[{"role":"user","content":"hi"}]})";
constexpr std::string_view kChatStream =
    R"({"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]})";

std::string WithField(std::string_view body, std::string_view field) {
    std::string text{body};
    text.insert(1, std::string{field} + ",");
    return text;
}

/// The data of every event.
std::vector<std::string> Events(const std::string& body) {
    std::vector<std::string> events;
    std::size_t at = 0;
    while (at < body.size()) {
        const std::size_t end = body.find("\n\n", at);
        if (end == std::string::npos || body.compare(at, 6, "data: ") != 0) {
            events.push_back("BROKEN: " + body.substr(at));
            break;
        }
        events.push_back(body.substr(at + 6, end - at - 6));
        at = end + 2;
    }
    return events;
}

std::string JoinedContent(const std::vector<std::string>& events) {
    std::string text;
    for (const std::string& event : events) {
        if (event.starts_with("{")) {
            const json::value value = json::parse(event);
            const auto& choices = value.at("choices").as_array();
            if (!choices.empty()) {
                if (const auto* content = choices[0].at("delta").as_object().if_contains("content");
                    content != nullptr) {
                    text += std::string{content->as_string()};
                }
            }
        }
    }
    return text;
}

class GatewayTest : public ::testing::Test {
  protected:
    void Start(GatewayOptions options = {}) {
        options.model = ":bytes:";
        options.port = 0;
        options.host = options.host.empty() ? "127.0.0.1" : options.host;
        if (options.served_model_names.empty()) {
            options.served_model_names = {"m"};
        }
        if (options.http_threads == 0) {
            options.http_threads = 1;
        }
        auto created = Gateway::Create(
            options, [this](const GatewayOptions&, const WorkerSpec& spec, std::int32_t index) {
                auto group = std::make_shared<FakeGroup>(index, spec.dp_size);
                groups_[spec.name] = group;
                if (first_ == nullptr) {
                    first_ = group;
                }
                return Result<GroupHandle>{GroupHandle{std::make_unique<FakeGroupHandle>(std::move(group)),
                                                       "tcp://fake:" + std::to_string(index)}};
            });
        ASSERT_TRUE(created.ok()) << created.error().message;
        gateway_ = std::move(*created);
        const Status started = gateway_->Start();
        ASSERT_TRUE(started.ok()) << started.error().message;
    }

    FakeGroup& group() { return *first_; }
    std::uint16_t port() { return gateway_->port(); }

    RawReply Ask(const std::string& bytes) {
        RawClient client{port()};
        EXPECT_TRUE(client.Send(bytes));
        return client.Read();
    }
    /// A metric's value, -1 if absent.
    double Metric(const std::string& name_and_labels) {
        const RawReply reply = Ask(Get("/metrics"));
        const std::size_t at = reply.body.find("\n" + name_and_labels + " ");
        return at == std::string::npos ? -1 : std::stod(reply.body.substr(at + name_and_labels.size() + 2));
    }
    bool MetricBecomes(const std::string& name_and_labels, double value) {
        for (int i = 0; i < 500; ++i) {
            if (Metric(name_and_labels) == value) {
                return true;
            }
            std::this_thread::sleep_for(milliseconds{5});
        }
        return false;
    }
    void ExpectNothingLeft() {
        EXPECT_TRUE(MetricBecomes("rankgate_streams_open", 0));
        EXPECT_TRUE(MetricBecomes("rankgate_requests_open", 0));
        EXPECT_EQ(json::parse(Ask(Get("/load")).body).at("server_load").as_int64(), 0);
        for (const auto& [name, one] : groups_) {
            EXPECT_EQ(one->num_live(), 0U) << name;
        }
    }

    std::map<std::string, std::shared_ptr<FakeGroup>> groups_;
    std::shared_ptr<FakeGroup> first_;
    std::unique_ptr<Gateway> gateway_;
};

TEST_F(GatewayTest, AnswersAChatWhole) {
    Start();
    RawClient client{port()};
    ASSERT_TRUE(client.Send(Post("/v1/chat/completions", kChat)));
    ASSERT_TRUE(group().WaitSubmitted(1));
    group().Say(0, "Hel");
    group().Say(0, "lo", FinishReason::kLength);
    const RawReply reply = client.Read();
    ASSERT_EQ(reply.status, 200) << reply.body;
    const json::value body = json::parse(reply.body);
    EXPECT_EQ(body.at("choices").as_array()[0].at("message").at("content").as_string(), "Hello");
    EXPECT_EQ(body.at("choices").as_array()[0].at("finish_reason").as_string(), "length");
    EXPECT_EQ(body.at("usage").at("completion_tokens").as_int64(), 5);
    ExpectNothingLeft();
    EXPECT_EQ(group().num_cancelled(), 0U) << "a normal end sends no abort";
}

TEST_F(GatewayTest, StreamsTokensAsTheyCome) {
    Start();
    RawClient client{port()};
    ASSERT_TRUE(client.Send(Post("/v1/chat/completions", kChatStream)));
    ASSERT_TRUE(group().WaitSubmitted(1));
    group().Say(0, "H");
    const std::string head = client.ReadUntil("\r\n\r\n");
    EXPECT_NE(head.find("text/event-stream"), std::string::npos);
    EXPECT_NE(head.find("Cache-Control: no-cache"), std::string::npos);
    EXPECT_NE(head.find("X-Accel-Buffering: no"), std::string::npos);
    EXPECT_NE(client.ReadUntil("\"content\":\"H\"").find("\"role\":\"assistant\""), std::string::npos);
    EXPECT_EQ(Metric("rankgate_streams_open"), 1);
    group().Say(0, "i");
    EXPECT_FALSE(client.ReadUntil("\"content\":\"i\"").empty());
    group().Say(0, "", FinishReason::kStop);
    const std::string rest = client.ReadUntil("0\r\n\r\n");
    EXPECT_NE(rest.find("\"finish_reason\":\"stop\""), std::string::npos);
    EXPECT_NE(rest.find("data: [DONE]\n\n"), std::string::npos);
    ExpectNothingLeft();
    ASSERT_TRUE(client.Send(Get("/liveness")));
    EXPECT_EQ(client.Read().status, 200) << "the connection goes on";
}

TEST_F(GatewayTest, UsageOnlyWhenAskedAndOnceAfterTheFinish) {
    Start();
    group().AnswerWith([](FakeGroup& self, const FakeGroup::Submitted& one) {
        self.SayLocked(one, "ab", FinishReason::kNone);
        self.SayLocked(one, "c", FinishReason::kLength);
    });
    for (const auto& [options, wanted] :
         std::vector<std::pair<std::string, bool>>{{R"("a":1)", false},
                                                   {R"("stream_options":{})", false},
                                                   {R"("stream_options":{"include_usage":true})", true},
                                                   {R"("stream_options":{"include_usage":false})", false},
                                                   {R"("stream_options":null)", false}}) {
        const RawReply reply = Ask(Post("/v1/chat/completions", WithField(kChatStream, options)));
        ASSERT_TRUE(reply.complete) << reply.body;
        const auto events = Events(reply.body);
        ASSERT_EQ(events.back(), "[DONE]");
        int usages = 0;
        for (std::size_t i = 0; i + 1 < events.size(); ++i) {
            const json::value event = json::parse(events[i]);
            const auto* usage = event.as_object().if_contains("usage");
            if (usage != nullptr && !usage->is_null()) {
                ++usages;
                EXPECT_EQ(i + 2, events.size()) << "last before [DONE]";
                EXPECT_TRUE(event.at("choices").as_array().empty());
                EXPECT_EQ(usage->at("completion_tokens").as_int64(), 3);
                EXPECT_EQ(usage->at("total_tokens").as_int64(), usage->at("prompt_tokens").as_int64() + 3);
            } else {
                EXPECT_FALSE(event.at("choices").as_array().empty());
            }
        }
        EXPECT_EQ(usages, wanted ? 1 : 0) << options;
        EXPECT_EQ(JoinedContent(events), "abc");
    }
}

TEST_F(GatewayTest, FirstAndLastChunkOfAChoiceHaveTheirShapeWhateverTheEngineSends) {
    Start();
    for (const char* first : {"x", "\xc3"}) {
        RawClient client{port()};
        const std::size_t i = group().num_submitted();
        ASSERT_TRUE(client.Send(Post("/v1/chat/completions", kChatStream)));
        ASSERT_TRUE(group().WaitSubmitted(i + 1));
        group().Say(i, first);
        group().Say(i, "", FinishReason::kStop);  // a terminal frame without tokens
        const RawReply reply = client.Read();
        ASSERT_TRUE(reply.complete);
        const auto events = Events(reply.body);
        int finishes = 0;
        for (std::size_t e = 0; e + 1 < events.size(); ++e) {
            const json::value choice = json::parse(events[e]).at("choices").as_array()[0];
            const json::object& delta = choice.at("delta").as_object();
            if (e == 0) {
                EXPECT_EQ(delta.at("role").as_string(), "assistant");
                EXPECT_TRUE(delta.at("content").is_string());
            }
            for (const char* key : {"role", "content"}) {
                if (const auto* value = delta.if_contains(key)) {
                    EXPECT_FALSE(value->is_null()) << events[e];
                }
            }
            finishes += choice.at("finish_reason").is_null() ? 0 : 1;
        }
        EXPECT_EQ(finishes, 1);
    }
}

TEST_F(GatewayTest, AbortsAtOnceWhenTheClientLeaves) {
    Start();
    std::size_t aborts = 0;
    for (const bool stream : {true, false}) {
        for (const int tokens : {0, 3}) {
            for (const bool reset : {false, true}) {
                RawClient client{port()};
                const std::size_t i = group().num_submitted();
                ASSERT_TRUE(client.Send(Post("/v1/chat/completions", stream ? kChatStream : kChat)));
                ASSERT_TRUE(group().WaitSubmitted(i + 1));
                for (int t = 0; t < tokens; ++t) {
                    group().Say(i, "t");
                }
                if (stream && tokens > 0) {
                    client.ReadUntil("\"content\":\"t\"");
                }
                const auto begin = std::chrono::steady_clock::now();
                reset ? client.Reset() : client.Close();
                ASSERT_TRUE(group().WaitCancelled(++aborts)) << stream << tokens << reset;
                EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds{900});
                EXPECT_EQ(group().cancelled(aborts - 1).key, group().key(i));
                EXPECT_EQ(group().cancelled(aborts - 1).cause, group::CancelCause::kClientGone);
                group().Say(i, "late");  // on its way already: nobody must care
            }
        }
    }
    ExpectNothingLeft();
    EXPECT_EQ(Metric("rankgate_aborts_total{cause=\"client_gone\"}"), static_cast<double>(aborts));
    EXPECT_EQ(Metric("vllm:request_success_total{finished_reason=\"abort\",model_name=\"m\"}"),
              static_cast<double>(aborts));
}

TEST_F(GatewayTest, AThousandSilentStreamsWhoseClientsLeaveAreAThousandAbortsWithinASecond) {
    GatewayOptions options;
    options.http_threads = 2;
    Start(options);
    std::vector<RawClient> clients;
    clients.reserve(1000);
    for (int i = 0; i < 1000; ++i) {
        clients.emplace_back(port());
        ASSERT_TRUE(clients.back().Send(Post("/v1/chat/completions", kChatStream)));
    }
    ASSERT_TRUE(group().WaitSubmitted(1000));
    const auto begin = std::chrono::steady_clock::now();
    for (RawClient& client : clients) {
        client.Close();
    }
    ASSERT_TRUE(group().WaitCancelled(1000));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds{1000});
    ExpectNothingLeft();
}

TEST_F(GatewayTest, AThousandStreamsComplete) {
    GatewayOptions options;
    options.http_threads = 2;
    Start(options);
    std::vector<RawClient> clients;
    clients.reserve(1000);
    for (int i = 0; i < 1000; ++i) {
        clients.emplace_back(port());
        ASSERT_TRUE(clients.back().Send(Post("/v1/chat/completions", kChatStream)));
    }
    ASSERT_TRUE(group().WaitSubmitted(1000));
    for (int step = 0; step < 10; ++step) {
        for (std::size_t i = 0; i < 1000; ++i) {
            group().Say(i, std::string(1, static_cast<char>('a' + step)),
                        step == 9 ? FinishReason::kLength : FinishReason::kNone);
        }
    }
    for (RawClient& client : clients) {
        const RawReply reply = client.Read();
        ASSERT_TRUE(reply.complete);
        ASSERT_EQ(JoinedContent(Events(reply.body)), "abcdefghij");
    }
    ExpectNothingLeft();
    EXPECT_EQ(Metric("vllm:generation_tokens_total{model_name=\"m\"}"), 10'000);
    EXPECT_EQ(Metric("vllm:request_success_total{finished_reason=\"length\",model_name=\"m\"}"), 1000);
}

TEST_F(GatewayTest, AStopTokenThatTheEngineDoesNotNameIsNamed) {
    Start();
    RawClient client{port()};
    const auto ended = [&](std::size_t i, std::string_view text) {
        EXPECT_TRUE(
            client.Send(Post("/v1/chat/completions", WithField(kChatStream, R"("stop_token_ids":[90,88])"))));
        EXPECT_TRUE(group().WaitSubmitted(i + 1));
        group().Say(i, text, FinishReason::kStop);
        return client.Read().body;
    };
    const std::string named = ended(0, "abZ");
    EXPECT_NE(named.find("\"stop_reason\":90"), std::string::npos) << named;
    EXPECT_EQ(JoinedContent(Events(named)), "ab") << "and is not part of the text";
    const std::string eos = ended(1, "ab");
    EXPECT_NE(eos.find("\"stop_reason\":null"), std::string::npos) << eos;
    ExpectNothingLeft();
}

TEST_F(GatewayTest, ALargeBodyIsReadAwayFromTheShardAndAnsweredAlike) {
    Start();
    const std::string room(300'000, ' ');  // JSON does not mind
    RawClient client{port()};
    ASSERT_TRUE(client.Send(Post("/v1/chat/completions", room + std::string{kChat})));
    ASSERT_TRUE(group().WaitSubmitted(1));
    group().Say(0, "Hello", FinishReason::kLength);
    const RawReply reply = client.Read();
    EXPECT_EQ(reply.status, 200);
    EXPECT_NE(reply.body.find("Hello"), std::string::npos);
    EXPECT_EQ(Ask(Post("/v1/chat/completions", room + R"({"model":"m","messages":3})")).status, 400);
    EXPECT_EQ(Ask(Post("/v1/completions", room + R"({"prompt":)")).status, 400);
    EXPECT_EQ(Ask(Post("/tokenize", room + R"({"model":"m","prompt":"hi"})")).status, 200);
    EXPECT_EQ(Ask(Post("/detokenize", room + R"({"model":"m","tokens":[104,105]})")).status, 200);
    for (int i = 0; i < 20; ++i) {
        RawClient leaver{port()};
        EXPECT_TRUE(leaver.Send(Post("/v1/chat/completions", room + std::string{kChatStream})));
    }
    ExpectNothingLeft();
}

TEST_F(GatewayTest, AStopStringEndsTheChoiceAndAbortsTheEngineAtOnce) {
    Start();
    RawClient client{port()};
    ASSERT_TRUE(client.Send(Post("/v1/chat/completions", WithField(kChatStream, R"("stop":"STOP")"))));
    ASSERT_TRUE(group().WaitSubmitted(1));
    group().Say(0, "abST");
    group().Say(0, "OPxyz");
    const RawReply reply = client.Read();
    ASSERT_TRUE(reply.complete);
    EXPECT_EQ(JoinedContent(Events(reply.body)), "ab");
    EXPECT_NE(reply.body.find("\"finish_reason\":\"stop\""), std::string::npos);
    ASSERT_TRUE(group().WaitCancelled(1));
    EXPECT_EQ(group().cancelled(0).cause, group::CancelCause::kStopString);
    group().Say(0, "more");
    ExpectNothingLeft();
    EXPECT_EQ(Metric("vllm:request_success_total{finished_reason=\"stop\",model_name=\"m\"}"), 1);
}

TEST_F(GatewayTest, EngineErrorsAreAStatusBeforeTheFirstByteAndAnEventAfterIt) {
    Start();
    const Error lost{ErrorCode::kRankLost, "rank 1 was lost", "", false};
    for (const bool stream : {false, true}) {
        RawClient client{port()};
        const std::size_t i = group().num_submitted();
        ASSERT_TRUE(client.Send(Post("/v1/chat/completions", stream ? kChatStream : kChat)));
        ASSERT_TRUE(group().WaitSubmitted(i + 1));
        group().SayError(i, lost);
        const RawReply reply = client.Read();
        EXPECT_EQ(reply.status, 502);
        EXPECT_EQ(reply.Header("content-type"), "application/json");
        EXPECT_EQ(json::parse(reply.body).at("error").at("code").as_string(), "rank_lost");
    }
    for (const FinishReason bad : {FinishReason::kAbort, FinishReason::kError, FinishReason::kRepetition}) {
        RawClient client{port()};
        const std::size_t i = group().num_submitted();
        ASSERT_TRUE(client.Send(Post("/v1/chat/completions", kChatStream)));
        ASSERT_TRUE(group().WaitSubmitted(i + 1));
        group().Say(i, "", bad);
        EXPECT_GE(client.Read().status, 400) << static_cast<int>(bad);
    }
    RawClient client{port()};
    const std::size_t i = group().num_submitted();
    ASSERT_TRUE(client.Send(Post("/v1/chat/completions", kChatStream)));
    ASSERT_TRUE(group().WaitSubmitted(i + 1));
    group().Say(i, "abc");
    group().SayError(i, lost);
    const RawReply reply = client.Read();
    ASSERT_TRUE(reply.complete);
    const auto events = Events(reply.body);
    EXPECT_EQ(json::parse(events.back()).at("error").at("message").as_string(), "rank 1 was lost");
    EXPECT_EQ(reply.body.find("[DONE]"), std::string::npos);
    ExpectNothingLeft();
}

TEST_F(GatewayTest, OneFailingChoiceEndsTheRequestAndAbortsItsSiblings) {
    Start();
    RawClient client{port()};
    ASSERT_TRUE(client.Send(Post("/v1/chat/completions", WithField(kChat, R"("n":3)"))));
    ASSERT_TRUE(group().WaitSubmitted(3));
    EXPECT_NE(group().request(0).id, group().request(1).id);
    group().Say(0, "a", FinishReason::kStop);
    group().SayError(1, Error{ErrorCode::kEngineError, "broken", "", false});
    EXPECT_EQ(client.Read().status, 500);
    ASSERT_TRUE(group().WaitCancelled(1));
    EXPECT_EQ(group().cancelled(0).key, group().key(2));
    ExpectNothingLeft();
    EXPECT_EQ(Metric("rankgate_aborts_total{cause=\"sibling_failed\"}"), 1);
}

TEST_F(GatewayTest, TheSameRequestIdTwiceIsTwoRequests) {
    Start();
    RawClient first{port()};
    RawClient second{port()};
    ASSERT_TRUE(first.Send(Post("/v1/chat/completions", kChat, "X-Request-Id: same\r\n")));
    ASSERT_TRUE(group().WaitSubmitted(1));
    ASSERT_TRUE(second.Send(Post("/v1/chat/completions", kChat, "X-Request-Id: same\r\n")));
    ASSERT_TRUE(group().WaitSubmitted(2));
    EXPECT_NE(group().request(0).id, group().request(1).id);
    first.Close();
    ASSERT_TRUE(group().WaitCancelled(1));
    EXPECT_EQ(group().cancelled(0).key, group().key(0));
    RawClient third{port()};
    ASSERT_TRUE(third.Send(Post("/v1/chat/completions", kChat, "X-Request-Id: same\r\n")));
    ASSERT_TRUE(group().WaitSubmitted(3));
    group().Say(1, "two", FinishReason::kStop);
    group().Say(2, "three", FinishReason::kStop);
    const RawReply two = second.Read();
    EXPECT_NE(two.body.find("\"two\""), std::string::npos);
    EXPECT_EQ(two.Header("x-request-id"), "same");
    EXPECT_NE(third.Read().body.find("\"three\""), std::string::npos);
    EXPECT_EQ(group().num_cancelled(), 1U);
}

TEST_F(GatewayTest, EveryFailureIsAnErrorObjectWithItsStatus) {
    Start();
    struct Row {
        std::string bytes;
        int status;
    };
    const auto chat = [](std::string_view body) { return Post("/v1/chat/completions", body); };
    const std::vector<Row> rows{
        {chat(""), 400},
        {chat("{"), 400},
        {chat("null"), 400},
        {chat("[]"), 400},
        {chat("\"x\""), 400},
        {chat(R"({"model":"m"})"), 400},
        {chat(R"({"model":"m","messages":[]})"), 400},
        {chat(R"({"model":"m","messages":[{}]})"), 400},
        {chat("\xff\xfe{"), 400},
        {chat(R"({"model":"m","messages":[{"role":"user","content":"\ud800"}]})"), 400},
        {chat(R"({"model":"other","messages":[{"role":"user","content":"x"}]})"), 404},
        {chat(WithField(kChat, R"("stream_options":{"include_usage":true})")), 400},
        {chat(WithField(kChat, R"("top_logprobs":3)")), 400},
        {chat(WithField(kChat, R"("max_tokens":100000)")), 400},
        {Post("/v1/completions", R"({"model":"m","prompt":""})"), 400},
        {Post("/v1/completions", R"({"model":"m","prompt":[]})"), 400},
        {Post("/v1/completions", R"({"model":"m","prompt":[-1]})"), 400},
        {"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Type: text/plain\r\nContent-Length: "
         "2\r\n\r\n{}",
         415},
        {Get("/v1/chat/completions"), 405},
        {Post("/v1/models", "{}"), 405},
        {Get("/v1/nope"), 404},
        {Get("//v1/models"), 404},
        {Get("/v1/models/"), 404},
        {Get("/v1/models/nope"), 404},
        {Get("/v1/models/%zz"), 400},
        {Get("/%ff%00"), 404},
        {"BREW /pot HTTP/1.1\r\nHost: t\r\n\r\n", 404},
        {"PUT /v1/models HTTP/1.1\r\nHost: t\r\n\r\n", 405},
    };
    for (const Row& row : rows) {
        const RawReply reply = Ask(row.bytes);
        EXPECT_EQ(reply.status, row.status) << row.bytes << "\n" << reply.body;
        EXPECT_EQ(reply.Header("content-type"), "application/json") << row.bytes;
        EXPECT_TRUE(reply.Has("x-request-id")) << row.bytes;
        json::error_code ec;
        const json::value body = json::parse(reply.body, ec);
        ASSERT_FALSE(ec) << row.bytes << reply.body;
        const json::object& error = body.at("error").as_object();
        EXPECT_TRUE(error.at("message").is_string());
        EXPECT_TRUE(error.at("type").is_string());
        EXPECT_TRUE(error.contains("param") && error.contains("code")) << reply.body;
        if (row.status == 405) {
            EXPECT_TRUE(reply.Has("allow")) << row.bytes;
        }
    }
    EXPECT_EQ(group().num_submitted(), 0U);
    ExpectNothingLeft();
}

TEST_F(GatewayTest, ServesModelsTokenizerVersionAndLoad) {
    GatewayOptions options;
    options.served_model_names = {"org/m", "alias"};
    Start(options);
    const json::value models = json::parse(Ask(Get("/v1/models")).body);
    EXPECT_EQ(models.at("data").as_array()[0].at("id").as_string(), "org/m");
    EXPECT_EQ(Ask(Get("/v1/models/org/m")).status, 200);
    EXPECT_EQ(Ask(Get("/v1/models/org%2Fm")).status, 200);
    EXPECT_EQ(Ask(Get("/v1/models/alias")).status, 200);
    EXPECT_EQ(Ask(Get("/v1/models?x=1")).status, 200);
    const json::value tokens =
        json::parse(Ask(Post("/tokenize", R"({"model":"alias","prompt":"abc"})")).body);
    EXPECT_EQ(tokens.at("count").as_int64(), 3);
    const std::string long_text(50'000, 'a');
    const json::value many = json::parse(Ask(Post("/tokenize", R"({"prompt":")" + long_text + "\"}")).body);
    EXPECT_EQ(many.at("count").as_int64(), 50'000);
    const json::value text = json::parse(Ask(Post("/detokenize", R"({"tokens":[97,98]})")).body);
    EXPECT_EQ(text.at("prompt").as_string(), "ab");
    EXPECT_EQ(Ask(Get("/version")).status, 200);
    EXPECT_EQ(Ask(Get("/load")).status, 200);
    RawClient client{port()};
    for (const char* path : {"/health", "/readiness", "/liveness", "/v1/models", "/ping", "/metrics"}) {
        ASSERT_TRUE(client.Send("HEAD " + std::string{path} + " HTTP/1.1\r\nHost: t\r\n\r\n"));
        EXPECT_EQ(client.Read(true).status, 200) << path;
    }
}

TEST_F(GatewayTest, KeysGuardEverythingButTheProbes) {
    GatewayOptions options;
    options.api_keys = {"secret", "second"};
    Start(options);
    const std::vector<std::pair<std::string, std::string>> guarded{{"POST", "/v1/chat/completions"},
                                                                   {"POST", "/v1/completions"},
                                                                   {"GET", "/v1/models"},
                                                                   {"GET", "/v1/models/m"},
                                                                   {"GET", "/version"},
                                                                   {"GET", "/load"},
                                                                   {"POST", "/tokenize"},
                                                                   {"POST", "/detokenize"},
                                                                   {"GET", "/workers"},
                                                                   {"POST", "/workers"},
                                                                   {"DELETE", "/workers/x"},
                                                                   {"POST", "/sleep"},
                                                                   {"POST", "/wake_up"},
                                                                   {"GET", "/is_sleeping"},
                                                                   {"POST", "/pause"},
                                                                   {"POST", "/resume"},
                                                                   {"GET", "/is_paused"},
                                                                   {"POST", "/reset_prefix_cache"},
                                                                   {"POST", "/v1/load_lora_adapter"},
                                                                   {"POST", "/v1/unload_lora_adapter"},
                                                                   {"POST", "/start_profile"},
                                                                   {"POST", "/stop_profile"},
                                                                   {"GET", "//v1/models"},
                                                                   {"GET", "/v1/../v1/models"},
                                                                   {"GET", "/v1%2fmodels"},
                                                                   {"GET", "/nope"},
                                                                   {"GET", "/health/"}};
    const auto ask = [&](const std::string& method, const std::string& path, const std::string& headers) {
        return Ask(method + " " + path + " HTTP/1.1\r\nHost: t\r\n" + headers +
                   "Content-Length: 2\r\n\r\n{}");
    };
    for (const auto& [method, path] : guarded) {
        for (const char* headers : {"", "Authorization: Bearer wrong\r\n", "Authorization: Bearer secre\r\n",
                                    "Authorization: Bearer secrets\r\n", "Authorization: secret\r\n",
                                    "Authorization: Bearer\r\n", "Authorization: Basic secret\r\n"}) {
            const RawReply reply = ask(method, path, headers);
            EXPECT_EQ(reply.status, 401) << method << path << headers;
            EXPECT_EQ(reply.Header("www-authenticate"), "Bearer");
            EXPECT_NE(reply.body.find("invalid_api_key"), std::string::npos);
        }
        EXPECT_NE(ask(method, path, "Authorization: Bearer secret\r\n").status, 401) << method << path;
    }
    EXPECT_EQ(ask("GET", "/v1/models", "Authorization: bearer second  \r\n").status, 200);
    for (const char* path : {"/health", "/liveness", "/readiness", "/metrics", "/ping"}) {
        EXPECT_EQ(ask("GET", path, "").status, 200) << path;
    }
    const RawReply options_reply = ask("OPTIONS", "/v1/chat/completions", "Origin: http://x\r\n");
    EXPECT_EQ(options_reply.status, 204);
    EXPECT_FALSE(options_reply.Has("access-control-allow-origin"));
    EXPECT_EQ(ask("OPTIONS", "*", "").status, 204);
    EXPECT_EQ(group().admin_calls().size(), 7U + 2U) << "only the calls with the right key arrived";
}

TEST_F(GatewayTest, AnyCredentialsAreFineWithoutAKey) {
    Start();
    for (const char* headers :
         {"Authorization: Bearer \r\n", "Authorization: Bearer EMPTY\r\n", "x-api-key: none\r\n"}) {
        EXPECT_EQ(Ask(Get("/v1/models", headers)).status, 200) << headers;
    }
}

TEST_F(GatewayTest, HealthSaysWhichRankIsGoneAndRequestsDoNotHang) {
    GatewayOptions options;
    options.data_parallel_size = 2;
    Start(options);
    EXPECT_EQ(Ask(Get("/health")).status, 200);
    EXPECT_TRUE(gateway_->ready());
    group().Change([](group::GroupSnapshot& snapshot) {
        snapshot.live = 1;
        snapshot.ranks[1].state = group::RankState::kDead;
        snapshot.ranks[1].reason = "its process ended";
    });
    RawReply reply = Ask(Get("/health"));
    EXPECT_EQ(reply.status, 200);
    EXPECT_NE(reply.body.find(R"("rank":1,"state":"dead","reason":"its process ended")"), std::string::npos)
        << reply.body;
    EXPECT_EQ(Metric("rankgate_rank_state{group=\"group0\",rank=\"1\",state=\"dead\"}"), 1);
    EXPECT_EQ(Metric("vllm:num_requests_running{engine=\"1\",model_name=\"m\"}"), -1)
        << "a dead rank has no load";
    EXPECT_EQ(Metric("vllm:num_requests_running{engine=\"0\",model_name=\"m\"}"), 0);
    group().Change([](group::GroupSnapshot& snapshot) {
        snapshot.live = 0;
        snapshot.serving = false;
        snapshot.ranks[0].state = group::RankState::kDead;
    });
    EXPECT_EQ(Ask(Get("/health")).status, 503);
    EXPECT_EQ(Ask(Get("/readiness")).status, 503);
    EXPECT_EQ(Ask(Get("/ping")).status, 503);
    EXPECT_EQ(Ask(Get("/liveness")).status, 200);
    const auto begin = std::chrono::steady_clock::now();
    reply = Ask(Post("/v1/chat/completions", kChat));
    EXPECT_EQ(reply.status, 503);
    EXPECT_TRUE(reply.Has("retry-after"));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds{900});
    group().Change([](group::GroupSnapshot& snapshot) {
        snapshot.live = 2;
        snapshot.serving = true;
    });
    EXPECT_EQ(Ask(Get("/readiness")).status, 200);
}

TEST_F(GatewayTest, TheLimitOfTheRanksIsTheLimitOfRequests) {
    Start();
    group().Change([](group::GroupSnapshot& snapshot) { snapshot.max_model_len = 10; });
    const RawReply reply =
        Ask(Post("/v1/completions", R"({"model":"m","prompt":"0123456789a","max_tokens":1})"));
    EXPECT_EQ(reply.status, 400);
    EXPECT_NE(reply.body.find("maximum context length"), std::string::npos) << reply.body;
    EXPECT_NE(reply.body.find("context_length_exceeded"), std::string::npos);
    group().AnswerWith([](FakeGroup& self, const FakeGroup::Submitted& one) {
        self.SayLocked(one, "x", FinishReason::kLength);
    });
    EXPECT_EQ(Ask(Post("/v1/completions", R"({"model":"m","prompt":"01234567","max_tokens":2})")).status,
              200);
}

TEST_F(GatewayTest, AdmissionIsBoundedAndGivenBack) {
    GatewayOptions options;
    options.max_in_flight = 3;
    Start(options);
    RawClient first{port()};
    ASSERT_TRUE(first.Send(Post("/v1/chat/completions", WithField(kChat, R"("n":2)"))));
    ASSERT_TRUE(group().WaitSubmitted(2));
    const RawReply refused = Ask(Post("/v1/chat/completions", WithField(kChat, R"("n":2)")));
    EXPECT_EQ(refused.status, 429);
    EXPECT_TRUE(refused.Has("retry-after"));
    const RawReply never = Ask(Post("/v1/chat/completions", WithField(kChat, R"("n":4)")));
    EXPECT_EQ(never.status, 400) << "no retry could ever help";
    EXPECT_NE(never.body.find(R"("param":"n")"), std::string::npos) << never.body;
    first.Close();
    ASSERT_TRUE(group().WaitCancelled(2));
    RawClient second{port()};
    ASSERT_TRUE(second.Send(Post("/v1/chat/completions", WithField(kChat, R"("n":3)"))));
    ASSERT_TRUE(group().WaitSubmitted(5));
}

TEST_F(GatewayTest, LongPromptsAreTokenizedAsideAndForgottenWithTheirClient) {
    Start();
    group().Change([](group::GroupSnapshot& snapshot) { snapshot.max_model_len = 1 << 22; });
    const std::string text(200'000, 'x');
    RawClient client{port()};
    ASSERT_TRUE(
        client.Send(Post("/v1/completions", R"({"model":"m","max_tokens":5,"prompt":")" + text + "\"}")));
    ASSERT_TRUE(group().WaitSubmitted(1));
    EXPECT_EQ(group().request(0).prompt_token_ids.size(), text.size());
    group().Say(0, "ok", FinishReason::kStop);
    EXPECT_EQ(client.Read().status, 200);
    for (int i = 0; i < 20; ++i) {
        RawClient leaving{port()};
        ASSERT_TRUE(leaving.Send(
            Post("/v1/completions", R"({"model":"m","max_tokens":5,"prompt":")" + text + "\"}")));
        leaving.Reset();
    }
    // Whatever was submitted before its client was seen leaving is cancelled.
    for (std::size_t i = 0; i < 500 && group().num_live() != 0; ++i) {
        std::this_thread::sleep_for(milliseconds{5});
    }
    ExpectNothingLeft();
    EXPECT_TRUE(MetricBecomes("rankgate_prepare_queue", 0)) << "a forgotten job goes when its turn comes";
}

TEST_F(GatewayTest, CutsAClientThatDoesNotReadAndCancelsItsRequest) {
    GatewayOptions options;
    options.max_held_bytes = 64 * 1024;
    Start(options);
    RawClient client{port(), 4096};
    ASSERT_TRUE(client.Send(Post("/v1/chat/completions", kChatStream)));
    ASSERT_TRUE(group().WaitSubmitted(1));
    for (int i = 0; i < 5000 && group().num_cancelled() == 0; ++i) {
        group().Say(0, std::string(4000, 'x'));
        if (i % 50 == 0) {
            std::this_thread::sleep_for(milliseconds{1});
        }
    }
    // All of it may lie in the mailbox still; a shard under a sanitizer takes its time with 20 MB.
    ASSERT_TRUE(group().WaitCancelled(1, std::chrono::seconds{60}));
    EXPECT_EQ(group().cancelled(0).cause, group::CancelCause::kSlowReader);
    ExpectNothingLeft();
    EXPECT_EQ(Metric("rankgate_slow_readers_total"), 1);
    EXPECT_EQ(Metric("rankgate_bytes_held"), 0);
}

TEST_F(GatewayTest, RequestTimeoutEndsARequestWithAnError) {
    GatewayOptions options;
    options.request_timeout_seconds = 0.3;
    Start(options);
    RawClient whole{port()};
    RawClient stream{port()};
    ASSERT_TRUE(whole.Send(Post("/v1/chat/completions", kChat)));
    ASSERT_TRUE(group().WaitSubmitted(1));
    ASSERT_TRUE(stream.Send(Post("/v1/chat/completions", kChatStream)));
    ASSERT_TRUE(group().WaitSubmitted(2));
    group().Say(1, "a");
    EXPECT_EQ(whole.Read().status, 408);
    const RawReply reply = stream.Read();
    EXPECT_NE(reply.body.find("\"error\""), std::string::npos);
    ASSERT_TRUE(group().WaitCancelled(2));
    EXPECT_EQ(group().cancelled(0).cause, group::CancelCause::kTimeout);
    ExpectNothingLeft();
}

TEST_F(GatewayTest, SeveralGroupsAreChosenByModelAndLoad) {
    GatewayOptions options;
    for (const char* spec :
         {"name=a,model=m1,rpc_port=0", "name=b,model=m2,rpc_port=0", "name=c,model=m2,rpc_port=0"}) {
        options.workers.push_back(*ParseWorkerSpec(spec));
    }
    Start(options);
    std::vector<RawClient> clients;
    for (int i = 0; i < 8; ++i) {
        clients.emplace_back(port());
        ASSERT_TRUE(clients.back().Send(Post("/v1/completions", R"({"model":"m2","prompt":"x"})")));
        ASSERT_TRUE(groups_["b"]->num_submitted() + groups_["c"]->num_submitted() <= 8);
        for (int t = 0; t < 500 && groups_["b"]->num_submitted() + groups_["c"]->num_submitted() <
                                       static_cast<std::size_t>(i) + 1;
             ++t) {
            std::this_thread::sleep_for(milliseconds{2});
        }
    }
    EXPECT_EQ(groups_["b"]->num_submitted(), 4U);
    EXPECT_EQ(groups_["c"]->num_submitted(), 4U);
    EXPECT_EQ(groups_["a"]->num_submitted(), 0U);
    EXPECT_EQ(Ask(Post("/v1/completions", R"({"model":"m3","prompt":"x"})")).status, 404);
    groups_["b"]->Change([](group::GroupSnapshot& snapshot) { snapshot.serving = false; });
    groups_["c"]->AnswerWith([](FakeGroup& self, const FakeGroup::Submitted& one) {
        self.SayLocked(one, "x", FinishReason::kStop);
    });
    for (int i = 0; i < 4; ++i) {
        EXPECT_EQ(Ask(Post("/v1/completions", R"({"model":"m2","prompt":"x"})")).status, 200)
            << "the other group still serves";
    }
    EXPECT_FALSE(gateway_->ready());
    EXPECT_EQ(json::parse(Ask(Get("/v1/models")).body).at("data").as_array().size(), 2U);
}

TEST_F(GatewayTest, WorkersComeAndGoWhileServing) {
    Start();
    RawReply reply = Ask(Post("/workers", R"({"name":"extra","dp_size":3,"model":"m9"})"));
    EXPECT_EQ(reply.status, 201) << reply.body;
    EXPECT_EQ(Ask(Post("/workers", R"({"name":"extra"})")).status, 409);
    for (const char* body :
         {R"({"name":"x","dp_rank":1})", R"({"rank":0})", R"({"data_parallel_rank":0,"dp_size":2})"}) {
        reply = Ask(Post("/workers", body));
        EXPECT_EQ(reply.status, 400);
        EXPECT_NE(reply.body.find("ONE worker"), std::string::npos) << reply.body;
    }
    for (const char* body : {R"({"dp_size":0})", R"({"dp_size":"x"})", R"({"nope":1})",
                             R"({"address":"10.0.0.1"})", "[]", "", R"({"name":"a b"})"}) {
        EXPECT_EQ(Ask(Post("/workers", body)).status, 400) << body;
    }
    EXPECT_EQ(Ask(Post("/workers", R"({"name":"web","url":"http://10.0.0.9:8000"})")).status, 201);
    const json::value list = json::parse(Ask(Get("/workers")).body);
    ASSERT_EQ(list.at("workers").as_array().size(), 3U);
    EXPECT_EQ(list.at("workers").as_array()[1].at("dp_size").as_int64(), 3);
    EXPECT_EQ(list.at("workers").as_array()[2].at("runtime").as_string(), "http");
    EXPECT_TRUE(gateway_->ready()) << "a foreign HTTP worker counts for nothing";

    const std::shared_ptr<FakeGroup> extra = groups_["extra"];
    RawClient client{port()};
    ASSERT_TRUE(client.Send(Post("/v1/completions", R"({"model":"m9","prompt":"x"})")));
    ASSERT_TRUE(extra->WaitSubmitted(1));
    RawClient other{port()};
    ASSERT_TRUE(other.Send(Post("/v1/chat/completions", kChat)));
    ASSERT_TRUE(group().WaitSubmitted(1));
    groups_.erase("extra");
    EXPECT_EQ(Ask("DELETE /workers/extra HTTP/1.1\r\nHost: t\r\n\r\n").status, 200);
    EXPECT_EQ(client.Read().status, 503) << "its requests end";
    EXPECT_EQ(Ask(Post("/v1/completions", R"({"model":"m9","prompt":"x"})")).status, 404);
    EXPECT_EQ(Ask("DELETE /workers/extra HTTP/1.1\r\nHost: t\r\n\r\n").status, 404);
    group().Say(0, "fine", FinishReason::kStop);
    EXPECT_EQ(other.Read().status, 200) << "the others' do not";
    EXPECT_EQ(Ask(Post("/workers", R"({"name":"extra"})")).status, 201) << "the name is free again";
}

TEST_F(GatewayTest, AdminCallsReachAllRanksAndSayWhichFailed) {
    GatewayOptions options;
    options.data_parallel_size = 2;
    Start(options);
    group().SetAdmin("true");
    EXPECT_EQ(json::parse(Ask(Get("/is_sleeping")).body).at("is_sleeping").as_bool(), true);
    EXPECT_EQ(Ask(Post("/sleep?level=2&mode=wait", "")).status, 200);
    EXPECT_EQ(group().admin_calls().back().level, 2);
    EXPECT_EQ(group().admin_calls().back().mode, "wait");
    EXPECT_EQ(Ask(Post("/sleep?level=7", "")).status, 400);
    EXPECT_EQ(Ask(Post("/wake_up?tags=weights&tags=kv_cache", "")).status, 200);
    EXPECT_EQ(group().admin_calls().back().tags, (std::vector<std::string>{"weights", "kv_cache"}));
    EXPECT_EQ(Ask(Post("/pause?mode=keep&clear_cache=false", "")).status, 200);
    EXPECT_FALSE(group().admin_calls().back().clear_cache);
    EXPECT_EQ(Ask(Post("/pause?mode=what", "")).status, 400);
    EXPECT_EQ(Ask(Get("/is_paused")).status, 200);
    EXPECT_EQ(Ask(Post("/resume", "")).status, 200);
    EXPECT_EQ(Ask(Post("/reset_prefix_cache", "")).status, 200);
    group().SetAdmin("null", 1);
    const RawReply failed = Ask(Post("/reset_prefix_cache", ""));
    EXPECT_EQ(failed.status, 500);
    EXPECT_NE(failed.body.find("group0/1: refused by the engine"), std::string::npos) << failed.body;
    EXPECT_EQ(Ask(Post("/v1/load_lora_adapter", R"({"lora_name":"a","lora_path":"/p"})")).status, 400)
        << "no rank supports LoRA";
    group().SetAdmin("true");
    group().Change([](group::GroupSnapshot& snapshot) { snapshot.ranks[0].supports_lora = true; });
    EXPECT_EQ(Ask(Post("/v1/load_lora_adapter", R"({"lora_name":"a","lora_path":"/p"})")).status, 200);
    EXPECT_EQ(Ask(Get("/v1/models/a")).status, 200);
    EXPECT_EQ(Ask(Post("/v1/load_lora_adapter", R"({"lora_name":"a","lora_path":"/p"})")).status, 400);
    group().AnswerWith([](FakeGroup& self, const FakeGroup::Submitted& one) {
        self.SayLocked(one, "x", FinishReason::kStop);
    });
    EXPECT_EQ(Ask(Post("/v1/completions", R"({"model":"a","prompt":"x"})")).status, 200);
    EXPECT_EQ(group().request(0).lora->name, "a");
    EXPECT_EQ(Ask(Post("/v1/unload_lora_adapter", R"({"lora_name":"a"})")).status, 200);
    EXPECT_EQ(Ask(Get("/v1/models/a")).status, 404);
    EXPECT_EQ(Ask(Post("/v1/unload_lora_adapter", R"({"lora_name":"a"})")).status, 404);
}

TEST_F(GatewayTest, DrainLetsStreamsEndAndRefusesNewWork) {
    Start();
    RawClient running{port()};
    ASSERT_TRUE(running.Send(Post("/v1/chat/completions", kChatStream)));
    ASSERT_TRUE(group().WaitSubmitted(1));
    group().Say(0, "a");
    running.ReadUntil("\"content\":\"a\"");
    RawClient kept{port()};
    ASSERT_TRUE(kept.Send(Get("/v1/models")));
    EXPECT_EQ(kept.Read().status, 200);
    gateway_->BeginShutdown();
    EXPECT_FALSE(gateway_->ready());
    EXPECT_EQ(Ask(Get("/readiness")).status, 503);
    EXPECT_EQ(Ask(Get("/liveness")).status, 200);
    ASSERT_TRUE(kept.Send(Post("/v1/chat/completions", kChat)));
    RawReply refused = kept.Read();
    EXPECT_EQ(refused.status, 503);
    EXPECT_EQ(refused.Header("connection"), "close");
    refused = Ask(Post("/v1/chat/completions", kChat));
    EXPECT_EQ(refused.status, 503);
    std::thread finisher{[&] {
        std::this_thread::sleep_for(milliseconds{100});
        group().Say(0, "b", FinishReason::kStop);
    }};
    EXPECT_TRUE(gateway_->WaitForShutdown());
    finisher.join();
    EXPECT_NE(running.ReadUntil("0\r\n\r\n").find("[DONE]"), std::string::npos);
}

TEST_F(GatewayTest, DrainCutsWhatDoesNotEndInTimeWithAnErrorAndAnAbort) {
    GatewayOptions options;
    options.shutdown_timeout_seconds = 0.2;
    Start(options);
    RawClient stream{port()};
    RawClient whole{port()};
    ASSERT_TRUE(stream.Send(Post("/v1/chat/completions", kChatStream)));
    ASSERT_TRUE(group().WaitSubmitted(1));
    group().Say(0, "a");
    ASSERT_TRUE(whole.Send(Post("/v1/chat/completions", kChat)));
    ASSERT_TRUE(group().WaitSubmitted(2));
    stream.ReadUntil("\"content\":\"a\"");
    FakeGroup& fake = group();
    std::thread checker{[&] {
        EXPECT_TRUE(fake.WaitCancelled(2));
        EXPECT_EQ(fake.cancelled(0).cause, group::CancelCause::kDrain);
    }};
    EXPECT_FALSE(gateway_->WaitForShutdown());
    checker.join();
    EXPECT_NE(stream.ReadUntil("0\r\n\r\n").find("\"error\""), std::string::npos);
    EXPECT_EQ(whole.Read().status, 503);
}

TEST_F(GatewayTest, MetricsAreAnOrdinaryTextPage) {
    Start();
    group().AnswerWith([](FakeGroup& self, const FakeGroup::Submitted& one) {
        self.SayLocked(one, "xy", FinishReason::kStop);
    });
    const RawReply before = Ask(Get("/metrics"));
    EXPECT_EQ(before.Header("content-type"), "text/plain; version=0.0.4; charset=utf-8");
    for (int i = 0; i < 3; ++i) {
        EXPECT_EQ(Ask(Post("/v1/chat/completions", kChat)).status, 200);
    }
    const RawReply after = Ask(Get("/metrics", "Accept: application/openmetrics-text\r\n"));
    EXPECT_EQ(after.Header("content-type"), "text/plain; version=0.0.4; charset=utf-8");
    const auto series = [](const std::string& body) {
        std::vector<std::string> names;
        std::size_t at = 0;
        while (at < body.size()) {
            const std::size_t end = body.find('\n', at);
            const std::string line = body.substr(at, end - at);
            if (!line.starts_with("#")) {
                names.push_back(line.substr(0, line.rfind(' ')));
            }
            at = end + 1;
        }
        return names;
    };
    EXPECT_EQ(series(before.body), series(after.body)) << "every label is there before the first request";
    EXPECT_EQ(Metric("vllm:request_success_total{finished_reason=\"stop\",model_name=\"m\"}"), 3);
    EXPECT_EQ(Metric("vllm:generation_tokens_total{model_name=\"m\"}"), 6);
    EXPECT_EQ(Metric("vllm:time_to_first_token_seconds_count{model_name=\"m\"}"), 3);
    EXPECT_EQ(Metric("vllm:e2e_request_latency_seconds_bucket{model_name=\"m\",le=\"+Inf\"}"), 3);
}

TEST_F(GatewayTest, DebugHeaderNamesTheRank) {
    GatewayOptions options;
    options.debug_headers = true;
    Start(options);
    group().AnswerWith([](FakeGroup& self, const FakeGroup::Submitted& one) {
        self.SayLocked(one, "xy", FinishReason::kStop);
    });
    EXPECT_EQ(Ask(Post("/v1/chat/completions", kChat)).Header("x-rankgate-rank"), "group0/0");
    EXPECT_EQ(Ask(Post("/v1/chat/completions", kChatStream)).Header("x-rankgate-rank"), "group0/0");
}

TEST_F(GatewayTest, AdminNeedsAKeyOnAPublicAddress) {
    GatewayOptions options;
    options.host = "0.0.0.0";
    Start(options);
    EXPECT_EQ(Ask(Post("/pause", "")).status, 403);
    EXPECT_EQ(Ask(Get("/workers")).status, 403);
    EXPECT_EQ(Ask(Get("/v1/models")).status, 200);
}

}  // namespace
}  // namespace rankgate::gateway
