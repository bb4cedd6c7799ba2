// SPDX-License-Identifier: Apache-2.0
// Bytes of a connection -> Request. Wraps Beast's parser (grammar, chunked coding, Content-Length rules) and
// adds what it leaves open: header count, one Host, no transfer coding but "chunked", request ids. Stops
// after the headers so that a request can be refused before its body is read. One parser per request;
// shard-confined.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

#include "base/result.h"
#include "http/message.h"
#include "http/server.h"

namespace rankgate::http {

class RequestParser {
  public:
    enum class State : std::uint8_t { kHead, kHeadDone, kBody, kDone, kError };

    RequestParser(const Limits& limits, Request& request);
    ~RequestParser();
    RequestParser(const RequestParser&) = delete;
    RequestParser& operator=(const RequestParser&) = delete;

    /// Consumes what it can; the caller presents the rest again, in front of newer bytes. Returns at
    /// kHeadDone (call again for the body), kDone and kError, or when more bytes are needed.
    std::size_t Feed(std::string_view bytes) noexcept;
    State state() const noexcept;
    /// Meaningful in kError; such a connection cannot go on.
    const Error& error() const noexcept;
    /// After the headers: whether HTTP lets the connection live on.
    bool keep_alive() const noexcept;
    /// After the headers: the client waits for "100 Continue".
    bool expects_continue() const noexcept;
    /// After kHeadDone: body bytes are thrown away instead of kept.
    void DiscardBody() noexcept;

  private:
    class Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace rankgate::http
