// SPDX-License-Identifier: Apache-2.0
// Starts engine processes and keeps them running: own process group each, output forwarded line by line with
// a prefix, exits seen through a pidfd, restarts with back-off, a bounded stop. One thread owns everything;
// the public methods are thread-safe. Children get SIGTERM by PR_SET_PDEATHSIG when this process dies,
// however it dies; that signal is tied to the thread that forked, which is why all forks happen on the
// supervisor's own thread.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"

namespace rankgate::launch {

struct ProcessSpec {
    std::string name;  // log prefix, e.g. "rank 0"
    std::vector<std::string> argv;
    std::vector<std::pair<std::string, std::string>> environment;  // on top of ours
    /// Processes with the same number are restarted together when one of them dies (a lockstep group);
    /// negative = alone.
    int restart_group{-1};
};

struct SupervisorOptions {
    std::chrono::milliseconds first_backoff{500};
    std::chrono::milliseconds max_backoff{30'000};
    /// A process that lived this long starts its back-off anew.
    std::chrono::milliseconds healthy_after{60'000};
    /// Deaths in a row, each before healthy_after, after which the supervisor gives up.
    int max_failures{6};
    /// SIGTERM, then this long, then SIGKILL to the process group.
    std::chrono::milliseconds stop_timeout{15'000};
};

class Supervisor {
  public:
    struct Exit {
        std::string name;
        std::string how;  // "exit status 1", "signal 9 (Killed)"
        bool restarting{false};
    };

    /// `on_exit` runs on the supervisor's thread after each unexpected exit; with restarting == false the
    /// supervisor has given up.
    Supervisor(std::vector<ProcessSpec> specs, SupervisorOptions options,
               std::function<void(const Exit&)> on_exit);
    /// Stops (bounded) and joins.
    ~Supervisor();
    Supervisor(const Supervisor&) = delete;
    Supervisor& operator=(const Supervisor&) = delete;

    /// Starts all processes. An error names the program that could not be executed.
    Status Start();
    /// From now on an exit is final: once the group serves, it is restarted instead. Until SetServing an exit
    /// ends the start-up.
    void SetServing() noexcept;
    /// Terminates all processes and waits for them; at most stop_timeout plus a second. Idempotent.
    void Stop() noexcept;
    /// Pid of a process, 0 while it is not running.
    int PidOf(const std::string& name) const;

  private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace rankgate::launch
