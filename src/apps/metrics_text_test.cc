// SPDX-License-Identifier: Apache-2.0
#include "apps/metrics_text.h"

#include <gtest/gtest.h>

namespace rankgate::apps {
namespace {

TEST(MetricsTextTest, ReadsNamesLabelsAndValues) {
    const auto samples = ParseMetrics(
        "# HELP x y\n# TYPE x gauge\nx 1\nvllm:num{engine=\"0\",model_name=\"a \\\"b\\\\\"} 2.5\ny{} "
        "3e2\nbad{ 1\nbad\nz{a=\"1\",} 4 1700\n");
    ASSERT_EQ(samples.size(), 4u);
    EXPECT_EQ(samples[0].name, "x");
    EXPECT_EQ(samples[1].Label("model_name"), "a \"b\\");
    EXPECT_EQ(samples[1].value, 2.5);
    EXPECT_EQ(samples[2].value, 300);
    EXPECT_EQ(samples[3].Label("a"), "1");
    EXPECT_EQ(samples[3].value, 4);
}

}  // namespace
}  // namespace rankgate::apps
