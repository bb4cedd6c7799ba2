// SPDX-License-Identifier: Apache-2.0
#include "apps/metrics_text.h"

#include <cstdlib>

namespace rankgate::apps {
namespace {

// Parses {a="b",...} behind the name; false if it is malformed.
bool ParseLabels(std::string_view& rest, MetricSample& sample) {
    rest.remove_prefix(1);
    while (!rest.empty() && rest.front() != '}') {
        const std::size_t equals = rest.find("=\"");
        if (equals == std::string_view::npos) {
            return false;
        }
        std::string key{rest.substr(0, equals)};
        rest.remove_prefix(equals + 2);
        std::string value;
        while (!rest.empty() && rest.front() != '"') {
            if (rest.front() == '\\' && rest.size() > 1) {
                rest.remove_prefix(1);
                value += rest.front() == 'n' ? '\n' : rest.front();
            } else {
                value += rest.front();
            }
            rest.remove_prefix(1);
        }
        if (rest.empty()) {
            return false;
        }
        rest.remove_prefix(1);
        if (!rest.empty() && rest.front() == ',') {
            rest.remove_prefix(1);
        }
        sample.labels.emplace_back(std::move(key), std::move(value));
    }
    if (rest.empty()) {
        return false;
    }
    rest.remove_prefix(1);
    return true;
}

}  // namespace

std::string MetricSample::Label(std::string_view key) const {
    for (const auto& [name_of, value_of] : labels) {
        if (name_of == key) {
            return value_of;
        }
    }
    return {};
}

std::vector<MetricSample> ParseMetrics(std::string_view text) {
    std::vector<MetricSample> samples;
    while (!text.empty()) {
        const std::size_t end = text.find('\n');
        std::string_view line = text.substr(0, end);
        text = end == std::string_view::npos ? std::string_view{} : text.substr(end + 1);
        if (line.empty() || line.front() == '#') {
            continue;
        }
        MetricSample sample;
        const std::size_t stop = line.find_first_of("{ ");
        if (stop == std::string_view::npos) {
            continue;
        }
        sample.name = std::string(line.substr(0, stop));
        line.remove_prefix(stop);
        if (line.front() == '{' && !ParseLabels(line, sample)) {
            continue;
        }
        const std::string number{line};
        char* parsed = nullptr;
        sample.value = std::strtod(number.c_str(), &parsed);
        if (parsed != number.c_str()) {
            samples.push_back(std::move(sample));
        }
    }
    return samples;
}

}  // namespace rankgate::apps
