// SPDX-License-Identifier: Apache-2.0
// Any bytes as a scraped /metrics page: each sample comes from a line of it.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "apps/metrics_text.h"
#include "base/check.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string_view text{reinterpret_cast<const char*>(data), size};
    const auto samples = rankgate::apps::ParseMetrics(text);
    RG_CHECK(samples.size() <= 1U + static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n')));
    for (const auto& sample : samples) {
        RG_CHECK(sample.name.size() <= size);
        for (const auto& [key, value] : sample.labels) {
            RG_CHECK(key.size() <= size && sample.Label(key).size() <= size && value.size() <= size);
        }
    }
    return 0;
}
