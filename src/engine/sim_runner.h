// SPDX-License-Identifier: Apache-2.0
// SimRunner: a model made of a clock and a formula. A step takes prefill_tokens / prefill_tps + step +
// step_per_seq * batch; with all three 0 it is as fast as it can be, so that a bench measures the gateway.
// Tokens depend on the prompt, the seed and the position alone (SimToken), whatever the batch: a client can
// check a stream exactly. Core thread only.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "engine/runner.h"

namespace rankgate::engine {

struct SimConfig {
    ModelFacts model;
    double prefill_tps{0.0};      // prompt tokens a second; 0 = instantly
    double step_us{0.0};          // base of every step
    double step_us_per_seq{0.0};  // plus this for each sequence in it
    TokenId first_token{300};     // generated ids lie in [first_token, last_token]
    TokenId last_token{8000};
    std::int64_t eos_after{0};  // > 0: generate the request's EOS id as token number eos_after
    bool prefix_caching{true};
    std::int32_t block_size{16};
    std::int64_t num_blocks{0};  // of the prefix cache
    std::int32_t max_num_seqs{256};
};

/// Sleeps until a point in time (the only wait of the runner); tests replace it.
class Sleeper {
  public:
    virtual ~Sleeper() = default;
    virtual void SleepUntil(TimePoint when) noexcept = 0;
};
std::unique_ptr<Sleeper> MakeSteadySleeper();

/// Hash of the prompt (and the seed) that all tokens of a request are made of.
std::uint64_t SimHash(const wire::GenerateRequest& request) noexcept;
TokenId SimToken(std::uint64_t hash, std::uint64_t index, TokenId first, TokenId last) noexcept;

class SimRunner final : public ModelRunner {
  public:
    SimRunner(SimConfig config, const Clock& clock, std::unique_ptr<Sleeper> sleeper);

    const ModelFacts& facts() const noexcept override { return config_.model; }
    Status Check(const wire::GenerateRequest& request) noexcept override;
    Placement Place(const Sequence& sequence, std::span<const std::int32_t> free_slots) noexcept override;
    Status Run(const StepPlan& plan, StepResult& result) noexcept override;
    void ResetPrefixCache() noexcept override;

  private:
    std::int64_t CachedPrefix(const Sequence& sequence);
    void Score(Sequence& sequence, TokenId token, const PlanItem& item) const;

    SimConfig config_;
    const Clock& clock_;
    std::unique_ptr<Sleeper> sleeper_;
    TimePoint step_end_{};
    std::vector<std::uint64_t> hash_;  // per slot
    // Prefix cache: block hash -> when last used; the queue holds every use, so that the front is (lazily)
    // the oldest.
    std::unordered_map<std::uint64_t, std::uint64_t> blocks_;
    std::deque<std::pair<std::uint64_t, std::uint64_t>> uses_;
    std::uint64_t use_{0};
};

}  // namespace rankgate::engine
