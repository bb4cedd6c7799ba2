// SPDX-License-Identifier: Apache-2.0
// A test double of one engine rank on the real wire: dials, registers, records what it is sent, answers by
// itself or as told, and misbehaves on request (deaf, mute, dead, silent, garbage, late, twice). In-process
// with a thread of its own (FakeRank), or as a process that can be killed and stopped (FakeRankProcess). For
// tests and benches only; every wait is bounded.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "transport/engine_link.h"
#include "wire/generate.h"

namespace rankgate::transport {

struct FakeRankOptions {
    Dialect dialect{Dialect::kVllm};
    std::string handshake_address;
    std::uint16_t engine_index{0};
    std::int64_t data_parallel_size{
        1};  // > 1 claims lockstep (no waves are played, see group's lockstep double)
    std::int64_t max_model_len{32768};
    std::string version{"0.32.0"};
    std::string instance_id{"fake"};
    std::string parallel_config_hash;
    std::string load_page;  // path of a shared-memory load page to name in the registration
    /// Between INIT and the registration (a model load).
    Duration load_time{0};
    /// Between READY and the registration: READY goes first (a race that real engines can produce).
    Duration register_late{0};
    bool register_twice{false};
    /// Answers an ADD with max_tokens tokens (id = prompt length + position), one a step, LENGTH at the last.
    bool auto_answer{true};
    Duration step_time{0};  // between two steps; 0 = as fast as it can
    bool record{true};      // keeps what it received; off for benches
    bool with_stats{true};
};

class FakeRank {
  public:
    struct Received {
        std::uint8_t type{0};
        std::string payload;
        std::size_t aux_frames{0};
        std::string id;  // of an ADD, where it could be read
    };

    explicit FakeRank(FakeRankOptions options);
    /// Leaves without last words, as a killed process does.
    ~FakeRank();
    FakeRank(const FakeRank&) = delete;
    FakeRank& operator=(const FakeRank&) = delete;

    /// True once READY and the registration are out.
    bool WaitServing(Duration limit = std::chrono::seconds(20));
    /// Waits until a recorded message satisfies `wanted`; it is taken out.
    bool WaitFor(const std::function<bool(const Received&)>& wanted, Received* found = nullptr,
                 Duration limit = std::chrono::seconds(10));
    /// The id of the next ADD, "" if none came.
    std::string NextAdd(Duration limit = std::chrono::seconds(10));
    std::size_t CountReceived(std::uint8_t type) const;
    std::vector<Received> TakeReceived();
    std::size_t running() const;

    // What it says; queued to its thread.
    void SayRaw(std::vector<std::string> frames);
    void SayTokens(std::string id, std::vector<wire::TokenId> tokens,
                   wire::FinishReason finish = wire::FinishReason::kNone);
    void SayFinished(std::vector<std::string> ids);

    // How it misbehaves.
    void Deaf();                // closes its input
    void Mute();                // closes its output
    void Die(bool last_words);  // ENGINE_CORE_DEAD or nothing, then both sockets
    void Freeze(
        bool frozen);  // reads, answers and sends nothing (wedged), sockets stay open; in force on return

  private:
    void Run();
    void Post(std::function<void()> what);
    void Step();
    void OnInput(const InputFrames& input);
    void Answer(std::string_view payload);
    std::string ReadyMap() const;
    bool Pause(Duration duration);

    struct Running {
        std::string id;
        std::int64_t prompt{0};
        std::int64_t done{0};
        std::int64_t want{0};
    };

    const FakeRankOptions options_;
    SteadyClock clock_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Received> received_;
    std::vector<std::size_t> counts_ = std::vector<std::size_t>(256);
    std::vector<std::function<void()>> posted_;
    bool serving_{false};
    bool stop_{false};
    std::size_t running_count_{0};
    std::uint64_t freezes_asked_{0};
    std::uint64_t freezes_done_{0};

    // The thread's own.
    std::unique_ptr<EngineLink> link_;
    std::vector<Running> running_;
    bool frozen_{false};
    bool gone_{false};
    std::int64_t steps_{0};
    std::string buffer_;
    EngineLink* shared_link_{nullptr};  // for Wake, under mutex_
    std::thread thread_;
};

/// The same rank in a process of its own (the helper program rg_fake_rank, built beside the tests).
class FakeRankProcess {
  public:
    /// `program`: path of rg_fake_rank. Only handshake_address, engine_index, dialect, load_time and
    /// step_time are passed on.
    FakeRankProcess(const std::string& program, const FakeRankOptions& options);
    ~FakeRankProcess();
    FakeRankProcess(const FakeRankProcess&) = delete;
    FakeRankProcess& operator=(const FakeRankProcess&) = delete;

    pid_t pid() const noexcept { return pid_; }
    void Signal(int signal) const;
    /// SIGKILL and reaped.
    void Kill();

  private:
    pid_t pid_{-1};
};

}  // namespace rankgate::transport
