// SPDX-License-Identifier: Apache-2.0
// Bytes of a connection in arbitrary segments: the parser must never consume more than it was given, keep
// more body than the limit, or depend on where the segments end. The first two bytes choose the segment size
// and whether the body is thrown away.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/check.h"
#include "http/request_parser.h"

namespace {

using rankgate::http::Limits;
using rankgate::http::Request;
using rankgate::http::RequestParser;

/// Everything observable of up to 8 requests.
std::string Run(std::string_view bytes, std::size_t segment, bool discard) {
    Limits limits;
    limits.max_header_bytes = 512;
    limits.max_headers = 8;
    limits.max_body_bytes = 1024;
    std::string seen;
    std::string pending;
    auto request = std::make_unique<Request>();
    auto parser = std::make_unique<RequestParser>(limits, *request);
    int requests = 0;
    while (!bytes.empty()) {
        const std::size_t n = std::min(segment, bytes.size());
        pending.append(bytes.substr(0, n));
        bytes.remove_prefix(n);
        for (;;) {
            const std::size_t used = parser->Feed(pending);
            RG_CHECK(used <= pending.size());
            pending.erase(0, used);
            if (parser->state() == RequestParser::State::kHeadDone) {
                if (discard) {
                    parser->DiscardBody();
                }
                continue;
            }
            RG_CHECK(request->body.size() <= limits.max_body_bytes);
            if (parser->state() == RequestParser::State::kError) {
                return seen + "error";
            }
            if (parser->state() != RequestParser::State::kDone) {
                break;
            }
            RG_CHECK(!discard || request->body.empty());
            RG_CHECK(request->num_headers() <= limits.max_headers);
            seen += std::string{request->method_text()} + " " + std::string{request->path()} + "?" +
                    std::string{request->query()} + "\n";
            for (std::size_t i = 0; i < request->num_headers(); ++i) {
                seen += std::string{request->header(i).first} + ":" + std::string{request->header(i).second} +
                        "\n";
            }
            seen += request->body + (parser->keep_alive() ? "+\n" : "-\n");
            if (++requests == 8) {
                return seen;
            }
            request = std::make_unique<Request>();
            parser = std::make_unique<RequestParser>(limits, *request);
            if (pending.empty()) {
                break;
            }
        }
    }
    return seen;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size < 2) {
        return 0;
    }
    const std::string_view bytes{reinterpret_cast<const char*>(data + 2), size - 2};
    const bool discard = (data[1] & 1) != 0;
    const std::string whole = Run(bytes, bytes.size() + 1, discard);
    const std::string parts = Run(bytes, 1U + data[0] % 37U, discard);
    // Where a head is too large, the two may notice in different places; everything else must agree.
    if (!whole.ends_with("error") && !parts.ends_with("error")) {
        RG_CHECK(whole == parts);
    }
    return 0;
}
