// SPDX-License-Identifier: Apache-2.0
#include "apps/http_client.h"

#include <boost/asio/connect.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <boost/beast/version.hpp>

namespace rankgate::apps {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;

namespace {
/// A reply of the tools' own server that is larger than this is not read.
constexpr std::uint64_t kMaxReplyBytes = 256u << 20;

Error Failed(const std::string& what, const beast::error_code& error) {
    return Error{ErrorCode::kUnavailable, what + ": " + error.message(), "", true};
}
}  // namespace

Result<Url> ParseUrl(std::string_view text) {
    const std::string given(text);
    if (text.substr(0, 8) == "https://") {
        return Error::Invalid(
            "--url", "--url '" + given + "': https is not spoken by this tool; give the plain address");
    }
    if (text.substr(0, 7) == "http://") {
        text.remove_prefix(7);
    }
    if (text.find("://") != std::string_view::npos) {
        return Error::Invalid("--url", "--url '" + given + "': only http:// is spoken by this tool");
    }
    text = text.substr(0, text.find('/'));
    const std::size_t colon = text.rfind(':');
    Url url;
    if (colon == std::string_view::npos ||
        (text.find(']') != std::string_view::npos && text.find(']') > colon)) {
        url.host = std::string(text);
        url.port = "8000";
    } else {
        url.host = std::string(text.substr(0, colon));
        url.port = std::string(text.substr(colon + 1));
    }
    if (url.host.size() > 2 && url.host.front() == '[') {
        url.host = url.host.substr(1, url.host.size() - 2);
    }
    if (url.host.empty() || url.port.empty()) {
        return Error::Invalid("--url", "--url '" + given + "' is not host:port");
    }
    return url;
}

struct HttpClient::Impl {
    Url url;
    std::string api_key;
    std::chrono::milliseconds timeout;
    asio::io_context context{1};
    std::unique_ptr<beast::tcp_stream> stream;
    beast::flat_buffer buffer;

    // Runs one asynchronous operation to its end, so that the stream's deadline applies (it does not to
    // blocking calls).
    template <class Start>
    beast::error_code Await(Start&& start) {
        beast::error_code result = asio::error::would_block;
        start([&result](beast::error_code error, auto&&...) { result = error; });
        context.restart();
        context.run();
        return result;
    }

    Status Connect() {
        if (stream != nullptr) {
            return Status::Ok();
        }
        beast::error_code error;
        asio::ip::tcp::resolver resolver(context);
        const auto endpoints = resolver.resolve(url.host, url.port, error);
        if (error) {
            return Failed("cannot resolve " + url.host, error);
        }
        stream = std::make_unique<beast::tcp_stream>(context);
        stream->expires_after(timeout);
        error = Await([&](auto done) { stream->async_connect(endpoints, done); });
        if (error) {
            stream.reset();
            return Failed("cannot connect to " + url.host + ":" + url.port, error);
        }
        stream->socket().set_option(asio::ip::tcp::no_delay(true), error);
        return Status::Ok();
    }

    Result<Reply> Exchange(http::verb verb, const std::string& target, const std::string& body,
                           const std::function<void(std::string_view)>& on_data) {
        if (const Status connected = Connect(); !connected.ok()) {
            return connected.error();
        }
        http::request<http::string_body> request{verb, target, 11};
        request.set(http::field::host, url.host + ":" + url.port);
        if (!api_key.empty()) {
            request.set(http::field::authorization, "Bearer " + api_key);
        }
        if (verb == http::verb::post) {
            request.set(http::field::content_type, "application/json");
            request.body() = body;
        }
        request.prepare_payload();
        stream->expires_after(timeout);
        beast::error_code error = Await([&](auto done) { http::async_write(*stream, request, done); });
        if (!error) {
            auto reply = Read(on_data, error);
            if (!error) {
                return reply;
            }
        }
        stream.reset();
        buffer.clear();
        return Failed("talking to " + url.host + ":" + url.port, error);
    }

    Reply Read(const std::function<void(std::string_view)>& on_data, beast::error_code& error) {
        http::response_parser<http::string_body> parser;
        parser.body_limit(kMaxReplyBytes);
        error = Await([&](auto done) { http::async_read_header(*stream, buffer, parser, done); });
        Reply reply;
        while (!error && !parser.is_done()) {
            stream->expires_after(timeout);
            error = Await([&](auto done) { http::async_read_some(*stream, buffer, parser, done); });
            std::string& body = parser.get().body();
            if (on_data && parser.get().result_int() == 200 && !body.empty()) {
                on_data(body);
                body.clear();
            }
        }
        if (error == http::error::end_of_stream && parser.is_done()) {
            error = {};
        }
        reply.status = static_cast<int>(parser.get().result_int());
        reply.body = std::move(parser.get().body());
        if (!error && !parser.get().keep_alive()) {
            stream.reset();
        }
        return reply;
    }
};

HttpClient::HttpClient(Url url, std::string api_key, std::chrono::milliseconds timeout)
    : impl_{std::make_unique<Impl>()} {
    impl_->url = std::move(url);
    impl_->api_key = std::move(api_key);
    impl_->timeout = timeout;
}
HttpClient::~HttpClient() = default;
HttpClient::HttpClient(HttpClient&&) noexcept = default;

Result<HttpClient::Reply> HttpClient::Get(const std::string& target) {
    return impl_->Exchange(http::verb::get, target, "", {});
}

Result<HttpClient::Reply> HttpClient::Post(const std::string& target, const std::string& json,
                                           const std::function<void(std::string_view)>& on_data) {
    return impl_->Exchange(http::verb::post, target, json, on_data);
}

}  // namespace rankgate::apps
