// SPDX-License-Identifier: Apache-2.0
// ScriptRunner: a model that says what it is told when it is told, and a rank that goes wrong on command. For
// tests of frontends. Instructions are JSON objects, one a line: from a file, read at start, and from a unix
// stream socket at any time (each line is answered with one line). docs/engine.md lists them; in short:
//   {"rule": {"id_prefix": "cmpl", "prompt": [1,2], "nth": 3, "tokens": [5,6,7], "finish": "stop",
//   "stop_reason": 7,
//             "first_after_ms": 10, "every_ms": 5, "hold": true, "times": 1, "at_token": 2,
//             "then": {"do": "die"}}}
//   {"do": "die" | "exit" | "last_words" | "deaf" | "mute" | "raw" | "identity" | "sleep" | "release", ...}
//   {"get": "state"}
// A request that no rule names gets tokens 1000, 1001, ... until its own limits. Core thread only.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/unique_fd.h"
#include "engine/runner.h"

namespace rankgate::engine {

struct ScriptConfig {
    ModelFacts model;
    std::string file;         // empty = none
    std::string socket_path;  // empty = none; a stale socket of ours is replaced
    std::int32_t max_num_seqs{256};
};

/// What to answer to the requests it matches; unset members match everything.
struct ScriptRule {
    std::string id_prefix;
    std::optional<std::vector<TokenId>> prompt;  // leading tokens
    std::int64_t nth{0};                         // n-th request of the rank's life, from 1
    std::int64_t times{-1};                      // how many requests may use it; negative = any number
    std::vector<TokenId> tokens;                 // said in turn; then `finish`, or the request's own limits
    bool repeat{false};                          // start over at the end of `tokens`
    wire::FinishReason finish{wire::FinishReason::kNone};
    wire::StopReason stop_reason;
    Duration first_after{0};
    Duration every{0};
    bool hold{false};  // silent until {"do": "release"}
    std::int64_t at_token{-1};
    std::optional<Fault> then;  // happens after token number at_token (0 = on arrival) was computed
};

class ScriptRunner final : public ModelRunner, public FaultSource {
  public:
    ScriptRunner(ScriptConfig config, const Clock& clock);
    ~ScriptRunner() override;

    /// Reads the file and opens the socket.
    Status Open();
    /// Carries out one line; the answer is one JSON line without its end.
    std::string Execute(std::string_view line);

    const ModelFacts& facts() const noexcept override { return config_.model; }
    Status Check(const wire::GenerateRequest& request) noexcept override;
    Placement Place(const Sequence& sequence, std::span<const std::int32_t> free_slots) noexcept override;
    Status Run(const StepPlan& plan, StepResult& result) noexcept override;
    void ResetPrefixCache() noexcept override {}
    FaultSource* faults() noexcept override { return this; }
    bool TakeFault(Fault& out) override;

  private:
    struct Playing {
        std::shared_ptr<const ScriptRule> rule;
        TimePoint next{};
        bool held{false};
    };
    struct Peer {
        UniqueFd fd;
        std::string pending;
    };
    ItemResult Play(Playing& playing, const Sequence& sequence, TimePoint now);
    void PollSocket(int wait_ms);
    void ServePeer(Peer& peer);

    ScriptConfig config_;
    const Clock& clock_;
    std::vector<std::pair<std::shared_ptr<ScriptRule>, std::int64_t>> rules_;  // with how many uses are left
    std::unordered_map<std::string, Playing> playing_;
    std::deque<Fault> faults_;
    std::int64_t requests_{0};
    std::vector<std::string> seen_;  // request ids, newest last, bounded
    UniqueFd listener_;
    std::vector<Peer> peers_;
    bool fatal_{false};
};

}  // namespace rankgate::engine
