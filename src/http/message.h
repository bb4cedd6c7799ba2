// SPDX-License-Identifier: Apache-2.0
// The HTTP request as the application sees it, and what it may answer. Plain values; a Request lives inside
// its connection and is valid until the exchange ends (its body can be moved out). No I/O here.
// Shard-confined.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace rankgate::http {

enum class Method : std::uint8_t { kGet, kHead, kPost, kPut, kPatch, kDelete, kOptions, kOther };

/// Spare capacity behind every body, so that a SIMD JSON parser can read past the end without a copy.
inline constexpr std::size_t kBodyPadding = 64;

/// Every view points into the request itself.
class Request {
  public:
    Method method{Method::kGet};
    bool http10{false};
    bool chunked{false};
    /// The whole body, decoded. If not empty, `body.capacity() >= body.size() + kBodyPadding`. May be moved
    /// out.
    std::string body;
    /// The client's X-Request-Id when it is safe to echo (1..128 visible ASCII characters), else one of our
    /// own.
    std::string id;
    /// From Content-Length, known in Handler::OnHeaders already; -1 = chunked or none.
    std::int64_t content_length{-1};

    std::string_view method_text() const noexcept { return View(method_text_); }
    /// As sent: "/v1/models?x=1"; of the absolute form ("http://host/v1/models?x=1") the part after the host.
    std::string_view target() const noexcept { return View(target_); }
    /// The part before '?', not decoded.
    std::string_view path() const noexcept { return target().substr(0, path_size_); }
    std::string_view query() const noexcept {
        return path_size_ < target_.size ? target().substr(path_size_ + 1) : std::string_view{};
    }
    /// First value of a header by its lower-case name; empty if absent (see Has).
    std::string_view Header(std::string_view lower_name) const noexcept;
    bool Has(std::string_view lower_name) const noexcept;
    /// Gives back the memory of the head; views taken before dangle. `id` stays.
    void ReleaseHead() noexcept {
        std::string{}.swap(head_);
        std::vector<std::pair<Slice, Slice>>{}.swap(fields_);
        method_text_ = target_ = Slice{};
        path_size_ = 0;
    }
    std::size_t num_headers() const noexcept { return fields_.size(); }
    std::pair<std::string_view, std::string_view> header(std::size_t i) const noexcept {
        return {View(fields_[i].first), View(fields_[i].second)};
    }

  private:
    friend class RequestParser;
    struct Slice {
        std::uint32_t offset{0};
        std::uint32_t size{0};
    };
    std::string_view View(Slice slice) const noexcept {
        return std::string_view{head_}.substr(slice.offset, slice.size);
    }

    std::string head_;  // names (lower-cased), values, method and target, one after the other
    std::vector<std::pair<Slice, Slice>> fields_;
    Slice method_text_;
    Slice target_;
    std::uint32_t path_size_{0};
};

/// A header to send. Values must be free of control characters; ours are constants or checked ids.
using HeaderView = std::pair<std::string_view, std::string_view>;

struct Response {
    int status{200};
    std::string content_type{"application/json"};
    std::string body;
    std::vector<std::pair<std::string, std::string>> headers;
    /// Ends the connection after this answer.
    bool close{false};
};

}  // namespace rankgate::http
