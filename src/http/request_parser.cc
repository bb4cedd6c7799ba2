// SPDX-License-Identifier: Apache-2.0
#include "http/request_parser.h"

#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <boost/beast/http/basic_parser.hpp>
#include <boost/beast/http/error.hpp>

namespace rankgate::http {
namespace {

namespace beast = boost::beast;

/// The first reserve for a body whose Content-Length is only a claim so far.
constexpr std::size_t kFirstBodyReserve = 64 * 1024;

constexpr char Lower(char c) noexcept {
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c + ('a' - 'A')) : c;
}

bool EqualsIgnoringCase(std::string_view a, std::string_view lower) noexcept {
    return a.size() == lower.size() &&
           std::equal(a.begin(), a.end(), lower.begin(), [](char x, char y) { return Lower(x) == y; });
}

std::string_view View(beast::string_view text) noexcept {
    return {text.data(), text.size()};
}

Method MethodOf(beast::http::verb verb) noexcept {
    switch (verb) {
        case beast::http::verb::get:
            return Method::kGet;
        case beast::http::verb::head:
            return Method::kHead;
        case beast::http::verb::post:
            return Method::kPost;
        case beast::http::verb::put:
            return Method::kPut;
        case beast::http::verb::patch:
            return Method::kPatch;
        case beast::http::verb::delete_:
            return Method::kDelete;
        case beast::http::verb::options:
            return Method::kOptions;
        default:
            return Method::kOther;
    }
}

}  // namespace

std::string_view Request::Header(std::string_view lower_name) const noexcept {
    for (const auto& [name, value] : fields_) {
        if (View(name) == lower_name) {
            return View(value);
        }
    }
    return {};
}

bool Request::Has(std::string_view lower_name) const noexcept {
    return std::any_of(fields_.begin(), fields_.end(),
                       [&](const auto& field) { return View(field.first) == lower_name; });
}

class RequestParser::Impl final : public beast::http::basic_parser<true> {
  public:
    Impl(const Limits& limits, Request& request) : limits_{limits}, request_{request} {
        header_limit(static_cast<std::uint32_t>(limits.max_header_bytes));
        body_limit(limits.max_body_bytes);
        eager(false);
    }

    std::size_t Feed(std::string_view bytes) noexcept {
        std::size_t used = 0;
        while (used < bytes.size() && state_ != State::kDone && state_ != State::kError) {
            beast::error_code ec;
            used += put(boost::asio::const_buffer{bytes.data() + used, bytes.size() - used}, ec);
            if (ec == beast::http::error::need_more) {
                // Only heads, chunk heads and trailers may be incomplete, and all of them are short.
                if (bytes.size() - used > limits_.max_header_bytes) {
                    Fail(ErrorCode::kHeadersTooLarge,
                         "A chunk header or trailer is larger than the header limit.");
                }
                return used;
            }
            if (ec) {
                Translate(ec);
                return used;
            }
            if (is_done()) {
                const bool head_only = state_ == State::kHead;
                state_ = head_only ? State::kHeadDone : State::kDone;
                whole_ = true;
                return used;
            }
            if (state_ == State::kHead && is_header_done()) {
                state_ = State::kHeadDone;
                eager(true);
                return used;
            }
        }
        return used;
    }

    /// Leaves kHeadDone; true when there is no body at all.
    void EnterBody() noexcept { state_ = whole_ ? State::kDone : State::kBody; }

    State state_{State::kHead};
    Error error_;
    bool expects_continue_{false};
    bool discard_{false};

  private:
    void Fail(ErrorCode code, std::string message) {
        state_ = State::kError;
        error_ = Error{code, std::move(message), "", false};
    }

    void Translate(const beast::error_code& ec) {
        if (!error_.message.empty()) {  // one of our own checks
            state_ = State::kError;
        } else if (ec == beast::http::error::header_limit) {
            Fail(ErrorCode::kHeadersTooLarge,
                 "The request head is larger than " + std::to_string(limits_.max_header_bytes) + " bytes.");
        } else if (ec == beast::http::error::body_limit) {
            Fail(ErrorCode::kTooLarge,
                 "The request body is larger than " + std::to_string(limits_.max_body_bytes) + " bytes.");
        } else if (ec == beast::http::error::bad_version) {
            Fail(ErrorCode::kInvalidArgument, "Only HTTP/1.0 and HTTP/1.1 are spoken here.");
        } else if (ec == beast::http::error::bad_content_length ||
                   ec == beast::http::error::multiple_content_length) {
            Fail(ErrorCode::kInvalidArgument,
                 "The Content-Length is malformed, repeated, or stands beside Transfer-Encoding.");
        } else if (ec == beast::http::error::bad_transfer_encoding) {
            Fail(ErrorCode::kInvalidArgument,
                 "The Transfer-Encoding is malformed, repeated, or stands beside Content-Length.");
        } else if (ec == beast::http::error::bad_chunk || ec == beast::http::error::bad_chunk_extension) {
            Fail(ErrorCode::kInvalidArgument, "The chunked coding of the request body is malformed.");
        } else {
            Fail(ErrorCode::kInvalidArgument, "The request is not valid HTTP.");
        }
    }

    Request::Slice Store(std::string_view text, bool lower) {
        const Request::Slice slice{static_cast<std::uint32_t>(request_.head_.size()),
                                   static_cast<std::uint32_t>(text.size())};
        request_.head_.append(text);
        if (lower) {
            std::transform(request_.head_.begin() + slice.offset, request_.head_.end(),
                           request_.head_.begin() + slice.offset, Lower);
        }
        return slice;
    }

    void Refuse(ErrorCode code, std::string message, beast::error_code& ec) {
        error_ = Error{code, std::move(message), "", false};
        ec = beast::http::error::bad_value;
    }

    void on_request_impl(beast::http::verb method, beast::string_view method_text, beast::string_view target,
                         int version, beast::error_code& /*ec*/) override {
        request_.head_.reserve(1024);
        request_.fields_.reserve(16);
        request_.method = MethodOf(method);
        request_.http10 = version == 10;
        request_.method_text_ = Store(View(method_text), false);
        std::string_view rest = View(target);
        // A client that believes it talks to a proxy sends "http://host/path"; a server has to take that.
        for (const std::string_view scheme : {std::string_view{"http://"}, std::string_view{"https://"}}) {
            if (EqualsIgnoringCase(rest.substr(0, scheme.size()), scheme)) {
                rest.remove_prefix(std::min(rest.find_first_of("/?", scheme.size()), rest.size()));
                rest = rest.empty() ? std::string_view{"/"} : rest;
                break;
            }
        }
        request_.target_ = Store(rest, false);
        const std::size_t mark = rest.find('?');
        request_.path_size_ = static_cast<std::uint32_t>(mark == std::string_view::npos ? rest.size() : mark);
    }

    void on_response_impl(int /*code*/, beast::string_view /*reason*/, int /*version*/,
                          beast::error_code& /*ec*/) override {}

    void on_field_impl(beast::http::field name, beast::string_view name_text, beast::string_view value,
                       beast::error_code& ec) override {
        if (state_ != State::kHead) {
            return;  // a trailer
        }
        if (request_.fields_.size() >= limits_.max_headers) {
            Refuse(ErrorCode::kHeadersTooLarge,
                   "The request has more than " + std::to_string(limits_.max_headers) + " headers.", ec);
            return;
        }
        if (name == beast::http::field::host) {
            if (has_host_) {
                Refuse(ErrorCode::kInvalidArgument, "The request has more than one Host header.", ec);
                return;
            }
            has_host_ = true;
        } else if (name == beast::http::field::transfer_encoding) {
            if (!EqualsIgnoringCase(View(value), "chunked")) {
                Refuse(ErrorCode::kNotImplemented, "The only transfer coding accepted is \"chunked\".", ec);
                return;
            }
            if (request_.http10) {
                Refuse(ErrorCode::kInvalidArgument, "HTTP/1.0 has no transfer codings.", ec);
                return;
            }
        } else if (name == beast::http::field::expect) {
            expects_continue_ = EqualsIgnoringCase(View(value), "100-continue");
        }
        const Request::Slice stored_name = Store(View(name_text), true);
        request_.fields_.emplace_back(stored_name, Store(View(value), false));
    }

    void on_header_impl(beast::error_code& ec) override {
        if (!has_host_ && !request_.http10) {
            Refuse(ErrorCode::kInvalidArgument, "An HTTP/1.1 request needs a Host header.", ec);
            return;
        }
        if (request_.http10) {
            expects_continue_ = false;
        }
        request_.chunked = chunked();
        if (const auto length = content_length()) {
            request_.content_length = static_cast<std::int64_t>(*length);
        }
    }

    void on_body_init_impl(const boost::optional<std::uint64_t>& length, beast::error_code& /*ec*/) override {
        if (!discard_ && length) {
            request_.body.reserve(std::min<std::size_t>(*length, kFirstBodyReserve) + kBodyPadding);
        }
    }

    std::size_t Keep(std::string_view bytes) {
        if (!discard_) {
            const std::size_t needed = request_.body.size() + bytes.size() + kBodyPadding;
            if (needed > request_.body.capacity()) {
                // A kept promise so far: grow by doubling, up to what Content-Length announced.
                std::size_t target = std::max(needed, 2 * request_.body.capacity());
                if (request_.content_length >= 0) {
                    target = std::min(
                        target,
                        std::max(needed, static_cast<std::size_t>(request_.content_length) + kBodyPadding));
                }
                request_.body.reserve(target);
            }
            request_.body.append(bytes);
        }
        return bytes.size();
    }

    std::size_t on_body_impl(beast::string_view bytes, beast::error_code& /*ec*/) override {
        return Keep(View(bytes));
    }
    void on_chunk_header_impl(std::uint64_t /*size*/, beast::string_view /*ext*/,
                              beast::error_code& /*ec*/) override {}
    std::size_t on_chunk_body_impl(std::uint64_t /*remain*/, beast::string_view bytes,
                                   beast::error_code& /*ec*/) override {
        return Keep(View(bytes));
    }
    void on_finish_impl(beast::error_code& /*ec*/) override {}

    const Limits& limits_;
    Request& request_;
    bool has_host_{false};
    bool whole_{false};
};

RequestParser::RequestParser(const Limits& limits, Request& request)
    : impl_{std::make_unique<Impl>(limits, request)} {}
RequestParser::~RequestParser() = default;

std::size_t RequestParser::Feed(std::string_view bytes) noexcept {
    if (impl_->state_ == State::kHeadDone) {
        impl_->EnterBody();
    }
    return impl_->Feed(bytes);
}

RequestParser::State RequestParser::state() const noexcept {
    return impl_->state_;
}
const Error& RequestParser::error() const noexcept {
    return impl_->error_;
}
bool RequestParser::keep_alive() const noexcept {
    return impl_->keep_alive();
}
bool RequestParser::expects_continue() const noexcept {
    return impl_->expects_continue_;
}
void RequestParser::DiscardBody() noexcept {
    impl_->discard_ = true;
}

}  // namespace rankgate::http
