// SPDX-License-Identifier: Apache-2.0
// Rank: an EngineCore on the wire. Dials the gateway, registers, then loops: inputs -> one step -> outputs ->
// load page. One thread runs all of it (EngineLink has threads below that dial, and libzmq's for the
// handshake and TCP); nothing in the loop waits without a bound, and no input ends it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "engine/core.h"
#include "engine/mailbox.h"
#include "engine/runner.h"
#include "transport/engine_link.h"
#include "wire/handshake.h"

namespace rankgate::engine {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailure = 1;
inline constexpr int kExitFlags = 2;
inline constexpr int kExitDied = 3;
inline constexpr int kExitInterrupted = 130;

struct RankConfig {
    wire::Dialect dialect{wire::Dialect::kVllm};
    std::string handshake_address;
    std::uint16_t base_index{0};  // TokenSpeed's --zmq-engine-index
    std::int32_t data_parallel_rank{0};
    std::int32_t data_parallel_size{1};
    std::int32_t tensor_parallel_size{1};
    SchedulerConfig scheduler;  // normalised
    bool stale_load{false};
    std::string load_page_dir;  // empty = no shared-memory mailbox
    Duration init_timeout{std::chrono::minutes(5)};
    /// A frontend that is away this long loses its requests (it may come back; until then outputs are kept
    /// for it).
    Duration away_timeout{std::chrono::seconds(60)};
};

/// What a tensor-parallel leader shares with its followers. Null without tensor parallelism. Called by the
/// rank's core thread.
class StepMirror {
  public:
    virtual ~StepMirror() = default;
    /// Once, before the first step: everything of the core's configuration that only the leader learns.
    virtual Status Begin(const CoreConfig& config) = 0;
    /// Before a step: the inputs that came since the last one (PackInput). Waits, bounded, until the
    /// followers have room; a failure ends the rank. Also called when idle, at least every second: it is the
    /// followers' sign of life.
    virtual Status Publish(std::span<const std::string_view> inputs) = 0;
    /// After the step: what the followers must agree with.
    virtual Status SetDigest(std::uint64_t digest) = 0;
    /// Are all ranks well? For the time before the first step.
    virtual Status Check() = 0;
};

class Rank {
  public:
    Rank(RankConfig config, ModelRunner& runner, const Clock& clock);
    ~Rank();

    /// Runs until `stop` holds a signal number, the engine dies, or the handshake fails. Returns the exit
    /// code.
    int Run(const std::atomic<int>& stop, StepMirror* mirror = nullptr);
    /// Makes a waiting Run look at `stop`. Any thread, also a signal handler (one eventfd write).
    static void WakeFromSignal() noexcept;

  private:
    Status Connect(const std::atomic<int>& stop);
    /// Sleeps until there is input, a wake-up, or `wait` has passed.
    void WaitForWork(Duration wait) noexcept;
    std::string ReadyResponse() const;
    Status Loop(const std::atomic<int>& stop);
    /// Applies the inputs of this round and runs one step; with a mirror, on all ranks.
    Status Round();
    /// Keeps one input for the next round of all ranks.
    void Mirror(std::uint8_t type, std::int32_t client, std::string_view payload);
    /// Drops a client's requests, as an ABORT that the followers see too.
    std::size_t DropClient(std::int32_t client);
    void SendOutbox();
    void CheckClients();
    /// A connected frontend is behind by more than kSoftQueueBytes and still reading: the step can wait for
    /// it.
    bool FrontendsAreBehind();
    void LetOutputsLeave();
    /// True when the rank shall leave now with `exit_code_`.
    bool ApplyFaults();

    const RankConfig config_;
    ModelRunner& runner_;
    const Clock& clock_;
    StepMirror* mirror_{nullptr};
    std::vector<std::string> inputs_;  // of the next rounds, for the followers; unused without a mirror
    std::size_t input_bytes_{0};
    std::unique_ptr<transport::EngineLink> link_;
    std::unique_ptr<EngineCore> core_;
    LoadPageWriter page_;
    std::string page_name_;
    TimePoint next_client_check_{};
    struct Backlog {
        std::uint64_t bytes{0};
        TimePoint progress{};  // when it last shrank, or began
    };
    std::vector<Backlog> backlogs_;  // per client
    int exit_code_{kExitOk};
    LogLimiter send_log_{1};
};

}  // namespace rankgate::engine
