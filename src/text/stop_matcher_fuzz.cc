// SPDX-License-Identifier: Apache-2.0
// Any stop strings against any text, cut anywhere: the outcome is the one of the plain search, and nothing is
// lost or shown twice.
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/check.h"
#include "text/stop_matcher.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    using namespace rankgate::text;
    if (size < 2 || size > 4096) {
        return 0;
    }
    const bool include = (data[0] & 1) != 0;
    const std::size_t piece = 1 + (data[0] >> 4);
    std::vector<std::string> stops;
    std::size_t at = 1;
    for (std::size_t n = 1 + (data[0] >> 1 & 3); n > 0 && at < size; --n) {
        const std::size_t length = std::min<std::size_t>(1 + data[at] % 6, size - at - 1);
        if (length == 0) {
            break;
        }
        stops.emplace_back(reinterpret_cast<const char*>(data + at + 1), length);
        at += 1 + length;
    }
    const std::string text{reinterpret_cast<const char*>(data + std::min(at, size)),
                           size - std::min(at, size)};
    const auto set = StopSet::Compile(stops);
    RG_CHECK(set.ok());

    std::size_t end = std::string::npos;
    std::size_t hit = 0;
    for (std::size_t e = 1; e <= text.size() && end == std::string::npos; ++e) {
        for (std::size_t i = 0; i < stops.size(); ++i) {
            if (std::string_view{text}.substr(0, e).ends_with(stops[i]) &&
                (end == std::string::npos || stops[i].size() > stops[hit].size())) {
                end = e;
                hit = i;
            }
        }
    }
    const std::string want =
        end == std::string::npos ? text : text.substr(0, include ? end : end - stops[hit].size());

    StopMatcher matcher{set->get(), include};
    std::string got;
    std::optional<StopMatcher::Match> match;
    for (std::size_t from = 0; from < text.size() && !match; from += piece) {
        match = matcher.Append(std::string_view{text}.substr(from, piece), got);
    }
    if (!match) {
        matcher.Flush(got);
    }
    RG_CHECK(match.has_value() == (end != std::string::npos));
    RG_CHECK(!match || match->index == hit);
    RG_CHECK(got == want);
    return 0;
}
