// SPDX-License-Identifier: Apache-2.0
// The gateway as an object: `rankgate gateway` runs it from Main, the launcher of `rankgate serve` runs it in
// its own process. Create builds everything that can be refused (model files, certificate, addresses) before
// a socket is bound; Start binds and serves; BeginShutdown drains as SIGTERM does. Owner's thread unless a
// method says otherwise.
#pragma once

#include <csignal>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "gateway/options.h"
#include "group/group.h"

namespace rankgate::gateway {

/// A group that has no thread of its own: the one shard's loop runs it, so that an engine's frame becomes
/// bytes on a socket in one wake-up. Every call on that shard's thread.
struct LoopTenant {
    int poll_fd{-1};                           // readable when run_once has work
    std::function<void()> run_once;            // one turn, without waiting
    std::function<TimePoint()> next_deadline;  // when to call it anyway; in the past = at once again
    std::function<void()> hold_commands;       // what is submitted from here on wakes nobody ...
    std::function<void()> run_commands;        // ... and is sent here, on the same stack
};

/// A running group and where its engines must dial.
struct GroupHandle {
    std::unique_ptr<group::Group> group;
    std::string handshake_address;  // "tcp://127.0.0.1:29550"
    std::optional<LoopTenant> tenant{};
};

/// Starts group `index`; may make it a tenant of the loop if options.http_threads is 1 (it is resolved by
/// then, never 0). The default one forms a real group (transport/); tests give a scripted one.
using GroupFactory =
    std::function<Result<GroupHandle>(const GatewayOptions&, const WorkerSpec&, std::int32_t index)>;

/// Exit codes of the program (interface of all rankgate commands).
inline constexpr int kExitOk = 0;
inline constexpr int kExitFailure = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitEngineDied = 3;
inline constexpr int kExitInterrupted = 130;

/// How a start that failed ends: a setting that no start could use is the caller's mistake.
inline int ExitOf(const Error& error) {
    return error.code == ErrorCode::kInvalidArgument ? kExitUsage : kExitFailure;
}

/// The signals that end `gateway` and `serve`. A hangup that was ignored from the start (nohup) stays
/// ignored: blocked, it would be delivered to sigwait all the same.
sigset_t StopSignals();

class Gateway {
  public:
    static Result<std::unique_ptr<Gateway>> Create(GatewayOptions options, GroupFactory factory = {});
    virtual ~Gateway() = default;

    /// Binds, starts groups and threads. Returns as soon as HTTP answers; /readiness tells when engines do.
    virtual Status Start() = 0;
    virtual std::uint16_t port() const = 0;
    virtual std::string url() const = 0;
    /// One address a group, in the order of GatewayOptions::Groups().
    virtual std::vector<std::string> handshake_addresses() const = 0;
    virtual std::shared_ptr<const group::GroupSnapshot> Snapshot(std::int32_t group) const = 0;
    /// All groups serving. Thread-safe.
    virtual bool ready() const = 0;
    /// Readiness turns false, new work gets 503, streams may finish for shutdown_timeout; then they are cut.
    /// Thread-safe, idempotent.
    virtual void BeginShutdown() = 0;
    /// Ends the drain now: what still runs is cut with an error event. Thread-safe.
    virtual void HurryShutdown() = 0;
    /// Blocks until the drain is over, then stops everything. True = every stream ended by itself.
    virtual bool WaitForShutdown() = 0;
};

/// `rankgate gateway ...`: parses, runs until a signal, returns the exit code.
int Main(int argc, char** argv);

}  // namespace rankgate::gateway
