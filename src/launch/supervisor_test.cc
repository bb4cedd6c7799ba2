// SPDX-License-Identifier: Apache-2.0
// Real processes: the shell plays the engine.
#include "launch/supervisor.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <condition_variable>
#include <fstream>
#include <mutex>
#include <thread>

namespace rankgate::launch {
namespace {

using std::chrono::milliseconds;

struct Exits {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<Supervisor::Exit> all;

    void Add(const Supervisor::Exit& exit) {
        const std::lock_guard lock(mutex);
        all.push_back(exit);
        changed.notify_all();
    }
    bool WaitFor(std::size_t count) {
        std::unique_lock lock(mutex);
        return changed.wait_for(lock, std::chrono::seconds(20), [&] { return all.size() >= count; });
    }
};

ProcessSpec Shell(std::string name, std::string script) {
    ProcessSpec spec;
    spec.name = std::move(name);
    spec.argv = {"/bin/sh", "-c", std::move(script)};
    return spec;
}

SupervisorOptions Quick() {
    SupervisorOptions options;
    options.first_backoff = milliseconds(10);
    options.max_backoff = milliseconds(40);
    options.max_failures = 3;
    options.stop_timeout = milliseconds(3000);
    return options;
}

bool WaitUntil(const std::function<bool()>& condition) {
    for (int i = 0; i < 2000; ++i) {
        if (condition()) {
            return true;
        }
        std::this_thread::sleep_for(milliseconds(5));
    }
    return false;
}

TEST(SupervisorTest, AProgramThatDoesNotExistIsAnErrorThatNamesIt) {
    ProcessSpec spec;
    spec.name = "rank 0";
    spec.argv = {"/nonexistent/engine"};
    Supervisor supervisor({spec}, Quick(), [](const Supervisor::Exit&) {});
    const Status status = supervisor.Start();
    ASSERT_FALSE(status.ok());
    EXPECT_NE(status.error().message.find("/nonexistent/engine"), std::string::npos)
        << status.error().message;
}

TEST(SupervisorTest, BeforeServingAnExitIsFinal) {
    Exits exits;
    Supervisor supervisor({Shell("rank 0", "echo cannot load; exit 7")}, Quick(),
                          [&](const auto& exit) { exits.Add(exit); });
    ASSERT_TRUE(supervisor.Start().ok());
    ASSERT_TRUE(exits.WaitFor(1));
    EXPECT_EQ(exits.all[0].how, "exit status 7");
    EXPECT_FALSE(exits.all[0].restarting);
}

TEST(SupervisorTest, AServingEngineIsRestartedAndItsSiblingIsLeftAlone) {
    Exits exits;
    Supervisor supervisor({Shell("rank 0", "exec sleep 60"), Shell("rank 1", "exec sleep 60")}, Quick(),
                          [&](const auto& exit) { exits.Add(exit); });
    ASSERT_TRUE(supervisor.Start().ok());
    supervisor.SetServing();
    const int first = supervisor.PidOf("rank 0");
    const int sibling = supervisor.PidOf("rank 1");
    ASSERT_GT(first, 0);
    ASSERT_EQ(::kill(first, SIGKILL), 0);
    ASSERT_TRUE(exits.WaitFor(1));
    EXPECT_TRUE(exits.all[0].restarting);
    EXPECT_EQ(exits.all[0].how.substr(0, 8), "signal 9");
    ASSERT_TRUE(
        WaitUntil([&] { return supervisor.PidOf("rank 0") > 0 && supervisor.PidOf("rank 0") != first; }));
    EXPECT_EQ(supervisor.PidOf("rank 1"), sibling);
}

TEST(SupervisorTest, ALockstepGroupIsRestartedAsOne) {
    Exits exits;
    ProcessSpec a = Shell("rank 0", "exec sleep 60");
    ProcessSpec b = Shell("rank 1", "exec sleep 60");
    a.restart_group = b.restart_group = 0;
    Supervisor supervisor({a, b}, Quick(), [&](const auto& exit) { exits.Add(exit); });
    ASSERT_TRUE(supervisor.Start().ok());
    supervisor.SetServing();
    const int first = supervisor.PidOf("rank 0");
    const int sibling = supervisor.PidOf("rank 1");
    ASSERT_EQ(::kill(first, SIGKILL), 0);
    ASSERT_TRUE(WaitUntil([&] {
        return supervisor.PidOf("rank 1") > 0 && supervisor.PidOf("rank 1") != sibling &&
               supervisor.PidOf("rank 0") > 0 && supervisor.PidOf("rank 0") != first;
    }));
}

TEST(SupervisorTest, GivesUpAfterTooManyDeathsInARow) {
    Exits exits;
    Supervisor supervisor({Shell("rank 0", "exit 1")}, Quick(), [&](const auto& exit) { exits.Add(exit); });
    supervisor.SetServing();
    ASSERT_TRUE(supervisor.Start().ok());
    ASSERT_TRUE(exits.WaitFor(4));
    EXPECT_TRUE(exits.all[2].restarting);
    EXPECT_FALSE(exits.all[3].restarting);
}

TEST(SupervisorTest, StopReachesGrandchildrenAndTheStubborn) {
    const std::string file = testing::TempDir() + "supervisor_grandchild." + std::to_string(::getpid());
    SupervisorOptions options = Quick();
    options.stop_timeout = milliseconds(200);
    Supervisor supervisor(
        {Shell("stubborn", "trap '' TERM; sleep 60 & echo $! > " + file + "; while :; do sleep 1; done")},
        options, [](const auto&) {});
    ASSERT_TRUE(supervisor.Start().ok());
    int grandchild = 0;
    ASSERT_TRUE(WaitUntil([&] { return static_cast<bool>(std::ifstream(file) >> grandchild); }));
    supervisor.Stop();
    EXPECT_EQ(supervisor.PidOf("stubborn"), 0);
    EXPECT_TRUE(WaitUntil([&] { return ::kill(grandchild, 0) != 0; }));
    ::unlink(file.c_str());
}

}  // namespace
}  // namespace rankgate::launch
