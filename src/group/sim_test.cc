// SPDX-License-Identifier: Apache-2.0
// The simulator's command line: what it takes, what it refuses, and that a short run ends.
#include "group/sim.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace rankgate::group {
namespace {

int RunSim(std::vector<std::string> args) {
    args.insert(args.begin(), "sim");
    std::vector<char*> argv;
    for (std::string& arg : args) {
        argv.push_back(arg.data());
    }
    return SimMain(static_cast<int>(argv.size()), argv.data());
}

TEST(Sim, RunsEveryTrace) {
    EXPECT_EQ(RunSim({"--seconds", "2", "--seeds", "1", "--ranks", "2"}), 0);
}

TEST(Sim, IsDeterministic) {
    testing::internal::CaptureStdout();
    RunSim({"--seconds", "3", "--seeds", "1", "--trace", "shared"});
    const std::string first = testing::internal::GetCapturedStdout();
    testing::internal::CaptureStdout();
    RunSim({"--seconds", "3", "--seeds", "1", "--trace", "shared"});
    EXPECT_EQ(testing::internal::GetCapturedStdout(), first);
    EXPECT_NE(first.find("| shared | oracle |"), std::string::npos);
}

TEST(Sim, RefusesWhatItDoesNotKnowByName) {
    for (const std::vector<std::string>& bad : std::vector<std::vector<std::string>>{{"--ranks", "0"},
                                                                                     {"--ranks", "x"},
                                                                                     {"--ranks"},
                                                                                     {"--load", "-1"},
                                                                                     {"--trace", "none"},
                                                                                     {"--what", "1"},
                                                                                     {"--seconds", "1x"}}) {
        testing::internal::CaptureStderr();
        EXPECT_EQ(RunSim(bad), 2);
        EXPECT_NE(testing::internal::GetCapturedStderr().find(bad[0]), std::string::npos);
    }
}

}  // namespace
}  // namespace rankgate::group
