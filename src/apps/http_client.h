// SPDX-License-Identifier: Apache-2.0
// A blocking HTTP/1.1 client for the command-line tools: one connection, plain TCP, deadlines on everything.
// Not for the gateway itself.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/result.h"

namespace rankgate::apps {

struct Url {
    std::string host;
    std::string port;
};
/// "http://host:port", "host:port", with or without brackets and a trailing slash or /v1.
Result<Url> ParseUrl(std::string_view text);

class HttpClient {
  public:
    HttpClient(Url url, std::string api_key, std::chrono::milliseconds timeout);
    ~HttpClient();
    HttpClient(HttpClient&&) noexcept;

    struct Reply {
        int status{0};
        std::string body;
    };
    Result<Reply> Get(const std::string& target);
    /// Posts JSON; `on_data` gets the body piece by piece as it arrives. The returned body is empty when
    /// on_data is given.
    Result<Reply> Post(const std::string& target, const std::string& json,
                       const std::function<void(std::string_view)>& on_data = {});

  private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace rankgate::apps
