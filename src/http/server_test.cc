// SPDX-License-Identifier: Apache-2.0
// The server as a client on a raw socket sees it. Every test binds to port 0; nothing sleeps except to watch
// a deadline pass.
#include "http/server.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <set>
#include <thread>

#include "base/error_json.h"
#include "http/test_client.h"

namespace rankgate::http {
namespace {

using std::chrono::milliseconds;

/// /hello, /echo, /stream (3 events and an end), /silent (a stream that waits), /hang (no answer), /async
/// (answers from a later turn).
class TestHandler final : public Handler, public ExchangeListener {
  public:
    explicit TestHandler(Shard& shard) : shard_{shard} {}

    bool OnHeaders(const Request& request, Response& refusal) noexcept override {
        if (request.path() == "/forbidden") {
            refusal.status = 403;
            refusal.body = ErrorJson(Error{ErrorCode::kForbidden, "no", "", false});
            return false;
        }
        return true;
    }

    void OnRequest(Exchange& exchange) noexcept override {
        const Request& request = exchange.request();
        ++requests;
        if (request.path() == "/hello") {
            exchange.Respond(200, "text/plain", "hello " + std::string{request.query()});
        } else if (request.path() == "/echo") {
            if (!request.body.empty() && request.body.capacity() < request.body.size() + kBodyPadding) {
                exchange.Respond(500, "text/plain", "no padding");
                return;
            }
            exchange.Respond(200, "text/plain", request.body);
        } else if (request.path() == "/stream") {
            exchange.StartStream();
            for (int i = 0; i < 3; ++i) {
                exchange.stream() += "data: " + std::to_string(i) + "\n\n";
            }
            exchange.stream() += "data: [DONE]\n\n";
            exchange.EndStream();
        } else if (request.path() == "/silent") {
            exchange.StartStream();
            exchange.set_listener(this);
            waiting.push_back(&exchange);
        } else if (request.path() == "/hang") {
            exchange.set_listener(this);
            waiting.push_back(&exchange);
        } else if (request.path() == "/async") {
            exchange.set_listener(this);
            shard_.Post([&exchange] { exchange.Respond(200, "text/plain", "later"); });
        } else {
            exchange.RespondError(Error{ErrorCode::kNotFound, "no \"route\"", "", false});
        }
    }

    void OnClosed(CloseReason reason) noexcept override {
        last_reason = static_cast<int>(reason);
        ++closed;
    }

    Shard& shard_;
    std::atomic<int> requests{0};
    std::atomic<int> closed{0};
    std::atomic<int> last_reason{-1};
    std::vector<Exchange*> waiting;
};

class ServerTest : public ::testing::Test {
  protected:
    void Start(ServerOptions options = {}) {
        options.listen.port = 0;
        server_ = std::make_unique<Server>(std::move(options), [this](Shard& shard) {
            auto handler = std::make_unique<TestHandler>(shard);
            handlers_.push_back(handler.get());
            return handler;
        });
        const Status listening = server_->Listen();
        ASSERT_TRUE(listening.ok()) << listening.error().message;
        server_->Start();
    }
    void TearDown() override {
        if (server_ != nullptr) {
            server_->Stop();
        }
    }

    TestHandler& handler() { return *handlers_[0]; }
    std::uint16_t port() { return server_->port(); }

    /// Runs `fn` on shard 0 and waits for it.
    void OnShard(std::function<void()> fn) {
        std::promise<void> done;
        server_->Post(0, [&] {
            fn();
            done.set_value();
        });
        done.get_future().wait();
    }

    template <class F>
    static bool Eventually(F&& condition, milliseconds patience = milliseconds{5000}) {
        const auto deadline = std::chrono::steady_clock::now() + patience;
        while (!condition()) {
            if (std::chrono::steady_clock::now() > deadline) {
                return false;
            }
            std::this_thread::sleep_for(milliseconds{1});
        }
        return true;
    }

    std::vector<TestHandler*> handlers_;
    std::unique_ptr<Server> server_;
};

TEST_F(ServerTest, AnswersAndKeepsTheConnection) {
    Start();
    RawClient client{port()};
    for (int i = 0; i < 3; ++i) {
        ASSERT_TRUE(client.Send(Get("/hello?x=" + std::to_string(i))));
        const RawReply reply = client.Read();
        EXPECT_EQ(reply.status, 200);
        EXPECT_EQ(reply.body, "hello x=" + std::to_string(i));
        EXPECT_TRUE(reply.Has("date"));
        EXPECT_TRUE(reply.Header("x-request-id").starts_with("req-"));
        EXPECT_FALSE(reply.Has("connection"));
    }
}

TEST_F(ServerTest, TakesTheAbsoluteFormOfATarget) {
    Start();
    RawClient client{port()};
    for (const char* target :
         {"http://x/hello?x=1", "HTTP://x:8000/hello?x=1", "https://user@[::1]:1/hello?x=1"}) {
        ASSERT_TRUE(client.Send(Get(target)));
        const RawReply reply = client.Read();
        EXPECT_EQ(reply.status, 200) << target;
        EXPECT_EQ(reply.body, "hello x=1") << target;
    }
    for (const char* target : {"http://x", "http://", "http:/hello", "http://x?x=1"}) {
        ASSERT_TRUE(client.Send(Get(target)));
        EXPECT_EQ(client.Read().status, 404) << target;
    }
}

TEST_F(ServerTest, AnswersPipelinedRequestsInOrder) {
    Start();
    RawClient client{port()};
    std::string bytes;
    for (int i = 0; i < 50; ++i) {
        bytes += i % 3 == 0   ? Post("/echo", std::to_string(i))
                 : i % 3 == 1 ? Get("/hello?" + std::to_string(i))
                              : Get("/async");
    }
    ASSERT_TRUE(client.Send(bytes));
    for (int i = 0; i < 50; ++i) {
        const RawReply reply = client.Read();
        ASSERT_TRUE(reply.complete) << i;
        EXPECT_EQ(reply.body, i % 3 == 0   ? std::to_string(i)
                              : i % 3 == 1 ? "hello " + std::to_string(i)
                                           : "later");
    }
}

TEST_F(ServerTest, StaysInStepWhateverTheSegments) {
    Start();
    RawClient client{port()};
    const std::string bytes = Post("/echo", "one") + Get("/hello") + Post("/echo", "two");
    for (const char c : bytes) {
        ASSERT_TRUE(client.Send({&c, 1}));
    }
    EXPECT_EQ(client.Read().body, "one");
    EXPECT_EQ(client.Read().body, "hello ");
    EXPECT_EQ(client.Read().body, "two");
}

TEST_F(ServerTest, ReadsChunkedBodiesWithExtensionsAndTrailers) {
    Start();
    RawClient client{port()};
    ASSERT_TRUE(
        client.Send("POST /echo HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n"
                    "5;ext=\"a b\"\r\nhello\r\n6\r\n world\r\n0\r\nTrailer: x\r\n\r\n" +
                    Get("/hello")));
    EXPECT_EQ(client.Read().body, "hello world");
    EXPECT_EQ(client.Read().body, "hello ");
}

TEST_F(ServerTest, RefusesLengthAndChunkedTogether) {
    Start();
    for (const char* headers :
         {"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
          "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n", "Content-Length: 5\r\nContent-Length: 6\r\n",
          "Content-Length: +5\r\n", "Content-Length: -1\r\n", "Content-Length: 5, 6\r\n"}) {
        RawClient client{port()};
        ASSERT_TRUE(client.Send("POST /echo HTTP/1.1\r\nHost: t\r\n" + std::string{headers} +
                                "\r\n0\r\n\r\nGET /hello HTTP/1.1\r\n\r\n"));
        const RawReply reply = client.Read();
        EXPECT_EQ(reply.status, 400) << headers;
        EXPECT_EQ(reply.Header("connection"), "close");
        EXPECT_NE(reply.body.find("\"error\""), std::string::npos);
        EXPECT_TRUE(client.ClosedWithin(milliseconds{4000})) << headers;
        EXPECT_TRUE(client.buffered().empty()) << "a second answer came";
    }
}

TEST_F(ServerTest, RefusesOtherTransferCodings) {
    Start();
    for (const char* coding : {"gzip", "gzip, chunked", "identity", "xchunked"}) {
        RawClient client{port()};
        ASSERT_TRUE(client.Send(
            "POST /echo HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: " + std::string{coding} + "\r\n\r\n"));
        EXPECT_EQ(client.Read().status, 501) << coding;
    }
}

TEST_F(ServerTest, AnswersGarbageWithAnErrorObjectAndCloses) {
    Start();
    for (const char* bytes : {"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", "GET\r\n\r\n", "GET / HTTP/2.0\r\n\r\n",
                              "GET / HTTP/1.1\r\nbad header\r\n\r\n", "GET / HTTP/1.1\r\nHost : t\r\n\r\n",
                              "GET / HTTP/1.1\r\n\r\n", "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
                              "POST /echo HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"}) {
        RawClient client{port()};
        ASSERT_TRUE(client.Send(std::string{bytes} + "\r\n\r\n"));
        const RawReply reply = client.Read();
        EXPECT_EQ(reply.status, 400) << bytes;
        EXPECT_EQ(reply.Header("content-type"), "application/json");
        EXPECT_TRUE(reply.Has("x-request-id"));
        EXPECT_TRUE(client.ClosedWithin(milliseconds{4000}));
    }
}

TEST_F(ServerTest, ServesHttp10WithoutHostAndCloses) {
    Start();
    {
        RawClient client{port()};
        ASSERT_TRUE(client.Send("GET /hello HTTP/1.0\r\n\r\n"));
        const RawReply reply = client.Read();
        EXPECT_EQ(reply.status, 200);
        EXPECT_EQ(reply.Header("connection"), "close");
        EXPECT_TRUE(client.ClosedWithin(milliseconds{2000}));
    }
    {
        RawClient client{port()};
        ASSERT_TRUE(client.Send("GET /stream HTTP/1.0\r\n\r\n"));
        const RawReply reply = client.Read();
        EXPECT_FALSE(reply.Has("transfer-encoding"));
        EXPECT_EQ(reply.body, "data: 0\n\ndata: 1\n\ndata: 2\n\ndata: [DONE]\n\n");
        EXPECT_TRUE(client.eof());
    }
    {
        RawClient client{port()};
        ASSERT_TRUE(client.Send("GET /hello HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"));
        EXPECT_EQ(client.Read().Header("connection"), "keep-alive");
        ASSERT_TRUE(client.Send("GET /hello HTTP/1.0\r\n\r\n"));
        EXPECT_EQ(client.Read().status, 200);
    }
}

TEST_F(ServerTest, HeadHasTheHeadersOfGetAndNoBody) {
    Start();
    RawClient client{port()};
    ASSERT_TRUE(client.Send("HEAD /hello HTTP/1.1\r\nHost: t\r\n\r\n" + Get("/hello")));
    const RawReply head = client.Read(true);
    EXPECT_EQ(head.status, 200);
    EXPECT_EQ(head.Header("content-length"), "6");
    EXPECT_EQ(client.Read().body, "hello ");
}

TEST_F(ServerTest, SaysContinueBeforeTheBodyOrTheFinalStatusInstead) {
    Start();
    {
        RawClient client{port()};
        ASSERT_TRUE(client.Send(
            "POST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n"));
        EXPECT_EQ(client.Read().status, 100);
        ASSERT_TRUE(client.Send("body"));
        EXPECT_EQ(client.Read().body, "body");
    }
    {
        RawClient client{port()};
        ASSERT_TRUE(client.Send(
            "POST /forbidden HTTP/1.1\r\nHost: t\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n"));
        EXPECT_EQ(client.Read().status, 403);
    }
    {
        Limits limits;
        RawClient client{port()};
        ASSERT_TRUE(client.Send(
            "POST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: " + std::to_string(limits.max_body_bytes + 1) +
            "\r\nExpect: 100-continue\r\n\r\n"));
        EXPECT_EQ(client.Read().status, 413);
    }
}

TEST_F(ServerTest, RefusesTooLargeBodiesBeforeReadingThem) {
    ServerOptions options;
    options.limits.max_body_bytes = 1000;
    Start(options);
    {
        RawClient client{port()};
        ASSERT_TRUE(client.Send("POST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 1001\r\n\r\n"));
        const RawReply reply = client.Read();  // no body byte was sent
        EXPECT_EQ(reply.status, 413);
        EXPECT_NE(reply.body.find("request_too_large"), std::string::npos);
    }
    {
        RawClient client{port()};
        ASSERT_TRUE(client.Send("POST /echo HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n"));
        const std::string chunk = "100\r\n" + std::string(256, 'x') + "\r\n";
        for (int i = 0; i < 4; ++i) {
            client.Send(chunk);
        }
        EXPECT_EQ(client.Read().status, 413);
    }
    {
        RawClient client{port()};
        ASSERT_TRUE(client.Send(Post("/echo", std::string(1000, 'x'))));
        EXPECT_EQ(client.Read().body.size(), 1000U);
    }
    {
        // A client that goes on sending still reads the answer: no reset takes it away.
        RawClient client{port()};
        ASSERT_TRUE(client.Send("POST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 2000000\r\n\r\n"));
        client.Send(std::string(2'000'000, 'y'));
        EXPECT_EQ(client.Read().status, 413);
    }
}

TEST_F(ServerTest, TakesBodiesUpToTheLimit) {
    Start();
    for (const std::size_t size :
         {std::size_t{1900 * 1024}, std::size_t{2100 * 1024}, std::size_t{30 * 1024 * 1024}}) {
        RawClient client{port()};
        std::thread sender{[&] { client.Send(Post("/echo", std::string(size, 'x'))); }};
        EXPECT_EQ(client.Read().body.size(), size);
        sender.join();
    }
}

TEST_F(ServerTest, RefusesOversizeHeads) {
    Start();
    {
        RawClient client{port()};
        client.Send("GET /hello HTTP/1.1\r\nHost: t\r\nX: " + std::string(65 * 1024, 'x') + "\r\n\r\n");
        EXPECT_EQ(client.Read().status, 431);
    }
    {
        RawClient client{port()};
        std::string bytes = "GET /hello HTTP/1.1\r\nHost: t\r\n";
        for (int i = 0; i < 2000; ++i) {
            bytes += "A" + std::to_string(i) + ": b\r\n";
        }
        client.Send(bytes + "\r\n");
        EXPECT_EQ(client.Read().status, 431);
    }
    {
        RawClient client{port()};
        client.Send("GET /" + std::string(1 << 20, 'a') + " HTTP/1.1\r\nHost: t\r\n\r\n");
        EXPECT_EQ(client.Read().status, 431);
    }
    {
        RawClient client{port()};
        ASSERT_TRUE(client.Send(Get("/hello", "Cookie: " + std::string(16 * 1024, 'c') + "\r\n")));
        EXPECT_EQ(client.Read().status, 200);
    }
}

TEST_F(ServerTest, RefusesContentCodings) {
    Start();
    RawClient client{port()};
    ASSERT_TRUE(client.Send(Post("/echo", "zip", "Content-Encoding: gzip\r\n") + Get("/hello")));
    const RawReply reply = client.Read();
    EXPECT_EQ(reply.status, 415);
    EXPECT_EQ(client.Read().body, "hello ") << "the body was read, so the connection lives";
}

TEST_F(ServerTest, RefusalsReadASmallBodyAndGoOn) {
    Start();
    RawClient client{port()};
    ASSERT_TRUE(client.Send(Post("/forbidden", "small") + Post("/echo", "next")));
    EXPECT_EQ(client.Read().status, 403);
    EXPECT_EQ(client.Read().body, "next");
    EXPECT_EQ(handler().requests, 1);
}

TEST_F(ServerTest, EchoesSafeRequestIdsOnly) {
    Start();
    RawClient client{port()};
    ASSERT_TRUE(client.Send(Get("/hello", "X-Request-Id: abc-123\r\n")));
    EXPECT_EQ(client.Read().Header("x-request-id"), "abc-123");
    for (const std::string& id : {std::string{}, std::string(129, 'a'), std::string{"caf\xc3\xa9"},
                                  std::string{"a b"}, std::string{"\xff\xfe"}}) {
        ASSERT_TRUE(client.Send(Get("/hello", "X-Request-Id: " + id + "\r\n")));
        EXPECT_TRUE(client.Read().Header("x-request-id").starts_with("req-")) << id;
    }
    ASSERT_TRUE(client.Send(Get("/none", "X-Request-Id: err-1\r\n")));
    const RawReply reply = client.Read();
    EXPECT_EQ(reply.Header("x-request-id"), "err-1");
    EXPECT_EQ(
        reply.body,
        R"({"error":{"message":"no \"route\"","type":"invalid_request_error","param":null,"code":"not_found"}})");
}

TEST_F(ServerTest, StreamsChunkedAndKeepsTheConnection) {
    Start();
    RawClient client{port()};
    for (int i = 0; i < 3; ++i) {
        ASSERT_TRUE(client.Send(Get("/stream")));
        const RawReply reply = client.Read();
        ASSERT_TRUE(reply.complete);
        EXPECT_EQ(reply.body, "data: 0\n\ndata: 1\n\ndata: 2\n\ndata: [DONE]\n\n");
        EXPECT_EQ(reply.Header("content-type"), "text/event-stream; charset=utf-8");
        EXPECT_FALSE(reply.Has("content-length"));
    }
}

TEST_F(ServerTest, EachFlushOfAStreamIsOneChunk) {
    Start();
    RawClient client{port()};
    ASSERT_TRUE(client.Send(Get("/silent")));
    client.ReadUntil("\r\n\r\n");
    ASSERT_TRUE(Eventually([&] { return server_->stats(0).streams_open == 1; }));
    OnShard([&] {
        Exchange& exchange = *handler().waiting[0];
        exchange.stream() += "data: a\n\n";
        exchange.Touch();
        exchange.stream() += "data: b\n\n";
        exchange.Touch();
    });
    EXPECT_EQ(client.ReadUntil("b\n\n\r\n"), "12\r\ndata: a\n\ndata: b\n\n\r\n");
    OnShard([&] {
        handler().waiting[0]->stream() += "data: [DONE]\n\n";
        handler().waiting[0]->EndStream();
    });
    EXPECT_EQ(client.ReadUntil("0\r\n\r\n"), "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
    EXPECT_EQ(server_->stats(0).streams_open, 0);
    EXPECT_EQ(handler().closed, 0);
}

TEST_F(ServerTest, TellsAtOnceWhenAClientOfASilentStreamLeaves) {
    Start();
    for (const bool reset : {false, true}) {
        const int before = handler().closed;
        RawClient client{port()};
        ASSERT_TRUE(client.Send(Get("/silent")));
        client.ReadUntil("\r\n\r\n");
        const auto begin = std::chrono::steady_clock::now();
        reset ? client.Reset() : client.Close();
        ASSERT_TRUE(Eventually([&] { return handler().closed == before + 1; }));
        EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds{900});
        EXPECT_EQ(handler().last_reason, static_cast<int>(CloseReason::kClientGone));
        EXPECT_EQ(server_->stats(0).streams_open, 0);
    }
    EXPECT_TRUE(Eventually([&] { return server_->stats(0).connections_open == 0; }));
}

TEST_F(ServerTest, TellsWhenAClientLeavesBeforeItsAnswer) {
    Start();
    RawClient client{port()};
    ASSERT_TRUE(client.Send(Get("/hang")));
    ASSERT_TRUE(Eventually([&] { return handler().requests == 1; }));
    client.Close();
    EXPECT_TRUE(Eventually([&] { return handler().closed == 1; }));
}

TEST_F(ServerTest, AHalfClosedClientIsGoneUnlessItsAnswerIsComplete) {
    Start();
    {
        RawClient client{port()};
        ASSERT_TRUE(client.Send(Get("/hello") + Get("/stream")));
        client.HalfClose();
        EXPECT_EQ(client.Read().body, "hello ");
        EXPECT_TRUE(client.Read().complete);
    }
    RawClient client{port()};
    ASSERT_TRUE(client.Send(Get("/silent")));
    client.ReadUntil("\r\n\r\n");
    client.HalfClose();
    EXPECT_TRUE(Eventually([&] { return handler().closed == 1; }));
    EXPECT_TRUE(client.ClosedWithin(milliseconds{2000}));
}

TEST_F(ServerTest, HoldsPipelinedBytesBehindAStreamAndStillSeesTheClientLeave) {
    Start();
    RawClient client{port()};
    ASSERT_TRUE(client.Send(Get("/silent") + Get("/hello")));
    client.ReadUntil("\r\n\r\n");
    ASSERT_TRUE(Eventually([&] { return server_->stats(0).streams_open == 1; }));
    OnShard([&] { handler().waiting[0]->EndStream(); });
    EXPECT_EQ(client.ReadUntil("\r\n\r\n"), "0\r\n\r\n");
    EXPECT_EQ(client.Read().body, "hello ");
    ASSERT_TRUE(client.Send(Get("/silent") + Get("/hello")));
    client.ReadUntil("\r\n\r\n");
    client.Close();
    EXPECT_TRUE(Eventually([&] { return handler().closed == 1; }));
}

TEST_F(ServerTest, CutsAReaderThatDoesNotRead) {
    ServerOptions options;
    options.limits.max_held_bytes = 256 * 1024;
    Start(options);
    RawClient client{port(), 4096};
    ASSERT_TRUE(client.Send(Get("/silent")));
    client.ReadUntil("\r\n\r\n");
    ASSERT_TRUE(Eventually([&] { return server_->stats(0).streams_open == 1; }));
    const std::string event = "data: " + std::string(10'000, 'x') + "\n\n";
    std::size_t most_held = 0;
    for (int i = 0; i < 5000 && handler().closed == 0; ++i) {
        OnShard([&] {
            if (handler().closed == 0) {
                handler().waiting[0]->stream() += event;
                handler().waiting[0]->Touch();
            }
        });
        most_held = std::max(most_held, static_cast<std::size_t>(server_->stats(0).bytes_held.load()));
    }
    EXPECT_EQ(handler().closed, 1);
    EXPECT_EQ(handler().last_reason, static_cast<int>(CloseReason::kSlowReader));
    EXPECT_EQ(server_->stats(0).slow_readers_total, 1U);
    EXPECT_EQ(server_->stats(0).bytes_held, 0);
    EXPECT_LT(most_held, 300'000U);
    EXPECT_GT(most_held, 100'000U);
}

TEST_F(ServerTest, ASlowReaderWithinTheBudgetGetsEveryByte) {
    Start();
    RawClient client{port(), 4096};
    ASSERT_TRUE(client.Send(Get("/silent")));
    client.ReadUntil("\r\n\r\n");
    ASSERT_TRUE(Eventually([&] { return server_->stats(0).streams_open == 1; }));
    std::string expected;
    // Far more than a socket takes: part of it waits in the stream's buffer, in open and closed chunks.
    for (int i = 0; i < 400; ++i) {
        const std::string event = "data: " + std::to_string(i) + std::string(10'000, 'y') + "\n\n";
        expected += event;
        ASSERT_TRUE(Eventually(
            [&] { return server_->stats(0).bytes_held < 900'000 || client.Fill(milliseconds{0}); }));
        while (server_->stats(0).bytes_held > 500'000 && client.Fill(milliseconds{100})) {
        }
        OnShard([&] {
            handler().waiting[0]->stream() += event;
            handler().waiting[0]->Touch();
        });
    }
    OnShard([&] { handler().waiting[0]->EndStream(); });
    std::string body;
    for (;;) {
        const std::string line = client.ReadUntil("\r\n");
        ASSERT_FALSE(line.empty());
        const auto size = static_cast<std::size_t>(std::strtoul(line.c_str(), nullptr, 16));
        const std::string chunk = client.ReadExactly(size + 2);
        if (size == 0) {
            break;
        }
        body += chunk.substr(0, size);
    }
    EXPECT_EQ(body, expected);
    EXPECT_TRUE(Eventually([&] { return server_->stats(0).bytes_held == 0; }));
}

TEST_F(ServerTest, EndsSlowHeadsAndBodiesWith408AndIdleConnectionsQuietly) {
    ServerOptions options;
    options.limits.header_timeout = milliseconds{300};
    options.limits.body_timeout = milliseconds{300};
    options.limits.keep_alive_timeout = milliseconds{500};
    Start(options);
    RawClient silent{port()};
    RawClient head{port()};
    RawClient body{port()};
    RawClient idle{port()};
    RawClient stream{port()};
    ASSERT_TRUE(head.Send("GET /hello HT"));
    ASSERT_TRUE(body.Send("POST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 10\r\n\r\nab"));
    ASSERT_TRUE(idle.Send(Get("/hello")));
    EXPECT_EQ(idle.Read().status, 200);
    ASSERT_TRUE(stream.Send(Get("/silent")));
    stream.ReadUntil("\r\n\r\n");
    EXPECT_EQ(head.Read().status, 408);
    EXPECT_EQ(body.Read().status, 408);
    EXPECT_TRUE(silent.ClosedWithin(milliseconds{3000}));
    EXPECT_TRUE(silent.buffered().empty());
    EXPECT_TRUE(idle.ClosedWithin(milliseconds{3000}));
    EXPECT_TRUE(head.ClosedWithin(milliseconds{4000}));
    EXPECT_FALSE(stream.ClosedWithin(milliseconds{1000})) << "the deadlines of reading must not cut a stream";
    EXPECT_EQ(handler().closed, 0);
}

TEST_F(ServerTest, PreflightAndCorsOnlyWhenConfigured) {
    const std::string preflight =
        "OPTIONS /echo HTTP/1.1\r\nHost: t\r\nOrigin: https://a.example\r\nAccess-Control-Request-Method: "
        "POST\r\n"
        "Access-Control-Request-Headers: authorization, content-type, x-stainless-os\r\n\r\n";
    {
        Start();
        RawClient client{port()};
        ASSERT_TRUE(client.Send(preflight));
        EXPECT_FALSE(client.Read().Has("access-control-allow-origin"));
        server_->Stop();
    }
    handlers_.clear();
    ServerOptions options;
    options.allowed_origins = {"https://a.example"};
    Start(options);
    RawClient client{port()};
    ASSERT_TRUE(client.Send(preflight));
    const RawReply reply = client.Read();
    EXPECT_EQ(reply.status, 204);
    EXPECT_EQ(reply.Header("access-control-allow-origin"), "https://a.example");
    EXPECT_EQ(reply.Header("access-control-allow-headers"), "authorization, content-type, x-stainless-os");
    ASSERT_TRUE(client.Send(Get("/stream", "Origin: https://a.example\r\n")));
    EXPECT_EQ(client.Read().Header("access-control-allow-origin"), "https://a.example");
    ASSERT_TRUE(client.Send(Get("/hello", "Origin: https://evil.example\r\n")));
    EXPECT_FALSE(client.Read().Has("access-control-allow-origin"));
}

TEST_F(ServerTest, SharesAPortAmongShardsAndRefusesATakenOne) {
    ServerOptions options;
    options.shards = 3;
    Start(options);
    std::set<int> seen;
    for (int i = 0; i < 60; ++i) {
        RawClient client{port()};
        ASSERT_TRUE(client.Send(Get("/hello")));
        EXPECT_EQ(client.Read().status, 200);
    }
    int busy = 0;
    for (TestHandler* one : handlers_) {
        busy += one->requests > 0 ? 1 : 0;
    }
    EXPECT_GT(busy, 1);
    ServerOptions same;
    same.listen.port = port();
    same.shards = 2;
    Server other{same, [](Shard& shard) { return std::make_unique<TestHandler>(shard); }};
    const Status taken = other.Listen();
    ASSERT_FALSE(taken.ok());
    EXPECT_NE(taken.error().message.find(std::to_string(port())), std::string::npos);
}

TEST_F(ServerTest, ListensOnEveryFormOfHost) {
    for (const char* host : {"127.0.0.1", "localhost", "::1", "[::1]", "::", "0.0.0.0"}) {
        ServerOptions options;
        options.listen.host = host;
        options.listen.port = 0;
        Server server{options, [](Shard& shard) { return std::make_unique<TestHandler>(shard); }};
        const Status listening = server.Listen();
        if (!listening.ok() && std::string_view{host}.find(':') != std::string_view::npos &&
            listening.error().message.find("Cannot assign") != std::string::npos) {
            GTEST_SKIP() << "no IPv6 on this machine";
        }
        ASSERT_TRUE(listening.ok()) << host << ": " << listening.error().message;
        server.Start();
        const bool six = std::string_view{host}.find(':') != std::string_view::npos;
        EXPECT_EQ(server.url().find('[') != std::string::npos, six) << server.url();
        const UniqueFd fd{::socket(six ? AF_INET6 : AF_INET, SOCK_STREAM, 0)};
        sockaddr_in6 address6{};
        address6.sin6_family = AF_INET6;
        address6.sin6_addr = in6addr_loopback;
        address6.sin6_port = htons(server.port());
        sockaddr_in address4{};
        address4.sin_family = AF_INET;
        address4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        address4.sin_port = htons(server.port());
        EXPECT_EQ(six ? ::connect(fd.get(), reinterpret_cast<sockaddr*>(&address6), sizeof address6)
                      : ::connect(fd.get(), reinterpret_cast<sockaddr*>(&address4), sizeof address4),
                  0)
            << host;
        if (std::string_view{host} == "::") {
            RawClient client{server.port()};  // both families
            EXPECT_TRUE(client.connected());
        }
        server.Stop();
    }
}

TEST_F(ServerTest, ListensOnAUnixSocket) {
    const std::string folder =
        std::filesystem::temp_directory_path() / ("rg-http-" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder);
    const std::string path = folder + "/s.sock";
    ServerOptions options;
    options.listen.host.clear();
    options.listen.uds = path;
    options.shards = 2;
    {
        Server server{options, [](Shard& shard) { return std::make_unique<TestHandler>(shard); }};
        ASSERT_TRUE(server.Listen().ok());
        server.Start();
        struct stat info {};
        ASSERT_EQ(::stat(path.c_str(), &info), 0);
        EXPECT_EQ(info.st_mode & 0777U, 0600U);
        RawClient client{path};
        ASSERT_TRUE(client.Send(Get("/hello")));
        EXPECT_EQ(client.Read().body, "hello ");
        Server second{options, [](Shard& shard) { return std::make_unique<TestHandler>(shard); }};
        EXPECT_FALSE(second.Listen().ok()) << "a live socket must not be stolen";
        server.Stop();
        EXPECT_NE(::stat(path.c_str(), &info), 0) << "the file is removed";
    }
    {
        // A stale file of a killed process is replaced; something that is not a socket never is.
        const UniqueFd stale{::socket(AF_UNIX, SOCK_STREAM, 0)};
        sockaddr_un address{};
        address.sun_family = AF_UNIX;
        std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
        ASSERT_EQ(::bind(stale.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    }
    Server again{options, [](Shard& shard) { return std::make_unique<TestHandler>(shard); }};
    EXPECT_TRUE(again.Listen().ok());
    options.listen.uds = folder;
    Server over_folder{options, [](Shard& shard) { return std::make_unique<TestHandler>(shard); }};
    EXPECT_FALSE(over_folder.Listen().ok());
    options.listen.uds = folder + "/" + std::string(200, 'x');
    Server too_long{options, [](Shard& shard) { return std::make_unique<TestHandler>(shard); }};
    EXPECT_FALSE(too_long.Listen().ok());
    again.Stop();
    std::filesystem::remove_all(folder);
}

TEST_F(ServerTest, DrainingAnswersSayClose) {
    Start();
    RawClient kept{port()};
    ASSERT_TRUE(kept.Send(Get("/hello")));
    EXPECT_EQ(kept.Read().status, 200);
    server_->BeginDrain();
    ASSERT_TRUE(kept.Send(Get("/hello")));
    EXPECT_EQ(kept.Read().Header("connection"), "close");
    EXPECT_TRUE(kept.ClosedWithin(milliseconds{2000}));
    RawClient fresh{port()};
    ASSERT_TRUE(fresh.Send(Get("/hello")));
    EXPECT_EQ(fresh.Read().Header("connection"), "close");
}

TEST_F(ServerTest, StopTellsOpenExchanges) {
    Start();
    RawClient client{port()};
    ASSERT_TRUE(client.Send(Get("/silent")));
    client.ReadUntil("\r\n\r\n");
    ASSERT_TRUE(Eventually([&] { return server_->stats(0).streams_open == 1; }));
    TestHandler& one = handler();
    // The handler lives until the server is destroyed, so that it can be asked.
    server_->Stop();
    EXPECT_EQ(one.closed, 1);
    EXPECT_EQ(one.last_reason, static_cast<int>(CloseReason::kServerStop));
    EXPECT_TRUE(client.ClosedWithin(milliseconds{1000}));
}

TEST_F(ServerTest, AThousandSilentClientsThatLeaveAreAllSeenWithinASecond) {
    Start();
    std::vector<RawClient> clients;
    clients.reserve(1000);
    for (int i = 0; i < 1000; ++i) {
        clients.emplace_back(port());
        ASSERT_TRUE(clients.back().connected());
        ASSERT_TRUE(clients.back().Send(Get("/silent")));
    }
    ASSERT_TRUE(Eventually([&] { return server_->stats(0).streams_open == 1000; }));
    const auto begin = std::chrono::steady_clock::now();
    for (RawClient& client : clients) {
        client.Close();
    }
    ASSERT_TRUE(Eventually([&] { return handler().closed == 1000; }));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds{1000});
    EXPECT_EQ(server_->stats(0).streams_open, 0);
    EXPECT_TRUE(Eventually([&] { return server_->stats(0).connections_open == 0; }));
}

TEST_F(ServerTest, TheConnectionLimitHoldsNewOnesBackUntilOneEnds) {
    ServerOptions options;
    options.limits.max_connections = 4;
    Start(options);
    std::vector<RawClient> clients;
    for (int i = 0; i < 4; ++i) {
        clients.emplace_back(port());
        ASSERT_TRUE(clients.back().Send(Get("/hello")));
        EXPECT_EQ(clients.back().Read().status, 200);
    }
    RawClient waiting{port()};
    ASSERT_TRUE(waiting.Send(Get("/hello")));
    EXPECT_FALSE(waiting.Fill(milliseconds{300}));
    clients[0].Close();
    EXPECT_EQ(waiting.Read().status, 200);
}

TEST(ErrorHeadersTest, SayWhenToTryAgainAndWhenNot) {
    const auto of = [](ErrorCode code, bool retryable = false) -> std::string {
        std::string all;
        for (const auto& [name, value] : ErrorHeaders(Error{code, "", "", retryable})) {
            all += std::string{name} + ": " + std::string{value} + ";";
        }
        return all;
    };
    EXPECT_EQ(of(ErrorCode::kOverloaded), "Retry-After: 1;");
    EXPECT_EQ(of(ErrorCode::kUnavailable), "Retry-After: 1;");
    EXPECT_EQ(of(ErrorCode::kDraining), "Retry-After: 1;");
    EXPECT_EQ(of(ErrorCode::kUnauthorized), "WWW-Authenticate: Bearer;");
    EXPECT_EQ(of(ErrorCode::kNotImplemented), "x-should-retry: false;");
    EXPECT_EQ(of(ErrorCode::kRankLost, false), "x-should-retry: false;");
    EXPECT_EQ(of(ErrorCode::kRankLost, true), "");
    EXPECT_EQ(of(ErrorCode::kTimeout, false), "x-should-retry: false;");
    EXPECT_EQ(of(ErrorCode::kTimeout, true), "");    // its body came too slowly: the next may not
    EXPECT_EQ(of(ErrorCode::kInvalidArgument), "");  // no SDK tries a 400 again
}

TEST(Limits, ClientsNeverTakeTheDescriptorsOfEngines) {
    EXPECT_EQ(ConnectionsFor(1'000'000, 64), 900'000U);
    EXPECT_EQ(ConnectionsFor(1024, 64), 922U);
    EXPECT_EQ(ConnectionsFor(1024, 500), 524U);
    EXPECT_EQ(ConnectionsFor(100, 64), 36U);
    EXPECT_EQ(ConnectionsFor(64, 64), 16U);
    EXPECT_EQ(ConnectionsFor(0, 64), 16U);
}

}  // namespace
}  // namespace rankgate::http
