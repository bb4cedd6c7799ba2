// SPDX-License-Identifier: Apache-2.0
// A reader of the Prometheus text format, for the tools that look at a running gateway. Malformed lines are
// skipped.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace rankgate::apps {

struct MetricSample {
    std::string name;
    std::vector<std::pair<std::string, std::string>> labels;
    double value{0};

    /// Value of a label, empty if it has none.
    std::string Label(std::string_view key) const;
};

std::vector<MetricSample> ParseMetrics(std::string_view text);

}  // namespace rankgate::apps
