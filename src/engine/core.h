// SPDX-License-Identifier: Apache-2.0
// EngineCore: a rank without its sockets. Messages in (any bytes), messages out, one step at a time:
// plan -> run -> advance (finishes and aborts applied) -> sample the load -> encode. Rank (rank.h) feeds it
// from the wire; tests, the fuzzer and tensor-parallel followers feed it directly. Single-threaded; time only
// decides when a load-only message is due.
//
// No input can end the core: a request that a real engine would die of ends with an error, alone; everything
// else is ignored and counted. Only a runner's failure is fatal.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/log.h"
#include "base/result.h"
#include "engine/codec.h"
#include "engine/runner.h"
#include "engine/scheduler.h"

namespace rankgate::engine {

struct CoreConfig {
    wire::Dialect dialect{wire::Dialect::kVllm};
    SchedulerConfig scheduler;
    std::int32_t engine_index{0};
    std::int32_t num_clients{1};
    bool has_coordinator{false};
    /// A changed load without tokens is told at most this often; the transition to idle at once.
    Duration load_interval{std::chrono::milliseconds(100)};
    /// Test flag: sample before the step's ends are applied and never send a load-only message, as upstream
    /// does.
    bool stale_load{false};
};

struct CoreCounters {
    std::uint64_t requests{0};
    std::uint64_t refused{0};     // ended with an error at the door
    std::uint64_t duplicates{0};  // id of a live request; ignored
    std::uint64_t aborts{0};      // that met a live request
    std::uint64_t finished{0};
    std::uint64_t failed{0};   // ended by the runner
    std::uint64_t ignored{0};  // unreadable or unknown messages
    std::uint64_t tokens{0};
    std::uint64_t steps{0};
};

class EngineCore {
  public:
    EngineCore(const CoreConfig& config, ModelRunner& runner, const Clock& clock);
    EngineCore(const EngineCore&) = delete;
    EngineCore& operator=(const EngineCore&) = delete;
    ~EngineCore();

    /// One message of input socket `input_client` (-1 = the coordinator).
    void OnInput(std::uint8_t type, std::string_view payload, std::span<const std::string_view> aux,
                 std::int32_t input_client);
    /// One scheduler step with its output, or, without work, whatever is due (load, answers). True if a step
    /// ran. A failed Status is the end of this rank.
    Result<bool> Step();
    /// Is there a step to run right now?
    bool runnable() const noexcept;
    /// When Step has something to say although nothing runs; far away otherwise.
    TimePoint next_due() const noexcept;

    /// Ends everything with finish_reason abort (shutdown); later requests are refused the same way.
    void Drain();
    /// Ids of a client's live requests.
    std::vector<std::string> IdsOf(std::int32_t client) const;

    Outbox& outbox() noexcept { return outbox_; }
    const Scheduler& scheduler() const noexcept { return scheduler_; }
    const CoreCounters& counters() const noexcept { return counters_; }
    wire::LoadSnapshot Load() const noexcept;
    /// Plans, tokens and inputs so far, mixed; the tensor-parallel cross-check.
    std::uint64_t Digest() const noexcept { return scheduler_.Digest(); }
    bool sleeping() const noexcept { return sleeping_; }
    void set_engine_index(std::int32_t index) noexcept { config_.engine_index = index; }

  private:
    void OnAdd(std::unique_ptr<Sequence> sequence, const Status& decoded, std::int32_t input_client);
    void Refuse(std::unique_ptr<Sequence> sequence, const Error& error, std::int32_t client);
    void OnUtility(const UtilityCommand& call, std::int32_t input_client);
    void Pause(std::string_view mode, UtilityAnswer answer);
    void Answer(const UtilityAnswer& answer);
    void AnswerWhenDrained();
    void AbortAll();
    void Flush(const wire::LoadSnapshot& load);
    void Ignore(std::string_view what, std::string_view why);
    bool ValidClient(std::int32_t client) const noexcept {
        return client >= 0 && client < config_.num_clients;
    }

    CoreConfig config_;
    ModelRunner& runner_;
    const Clock& clock_;
    std::unique_ptr<Codec> codec_;
    Scheduler scheduler_;
    Outbox outbox_;
    Command command_;
    StepResult result_;
    std::vector<Row> rows_;                           // due at the next flush
    std::vector<Row> client_rows_;                    // scratch
    std::vector<std::unique_ptr<Sequence>> refused_;  // behind rows_ until flushed
    std::vector<UtilityAnswer> waiting_for_drain_;    // pause(wait): answered when nothing runs
    CoreCounters counters_;
    struct Told {
        wire::LoadSnapshot load;  // what this frontend knows
        TimePoint when{};
    };
    std::vector<Told> told_;  // per client
    std::vector<std::pair<std::int32_t, std::string>>
        ended_;  // aborted ids to list (with a coordinator only)
    bool prefix_reset_{false};
    std::int64_t told_running_{0};  // to the coordinator
    std::int64_t told_waiting_{0};
    bool sleeping_{false};
    bool draining_{false};
    LogLimiter log_limit_{5};
};

/// One input message as one frame, for the tensor-parallel relay; ApplyPackedInput ignores what PackInput did
/// not make.
std::string PackInput(std::uint8_t type, std::int32_t client, std::string_view payload);
void ApplyPackedInput(EngineCore& core, std::string_view packed);

}  // namespace rankgate::engine
