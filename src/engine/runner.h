// SPDX-License-Identifier: Apache-2.0
// ModelRunner: what turns a step plan into tokens. Three implementations: llama (llama.cpp), sim (a clock and
// a formula), script (tests). Called by the rank's core thread only, never re-entered. A runner is
// deterministic: equal plans give equal tokens, whatever else is in the batch, so that tensor-parallel
// followers can mirror it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "engine/sequence.h"
#include "wire/generate.h"

namespace rankgate::engine {

/// `num_tokens` positions of one sequence to compute, from `first_position` on.
struct PlanItem {
    Sequence* sequence{nullptr};  // lent by the scheduler until the step is advanced
    std::int64_t first_position{0};
    std::int32_t slot{0};
    std::int32_t num_tokens{0};
    bool fresh{false};  // first item of this sequence in this slot: only the first `first_position` cells may
                        // be kept
    bool sample{false};  // the last position's logits give a token
};

struct StepPlan {
    std::vector<PlanItem> items;
    std::int64_t num_tokens{0};
    std::int64_t num_prefill_tokens{0};

    bool empty() const noexcept { return items.empty(); }
    void Clear() noexcept {
        items.clear();
        num_tokens = 0;
        num_prefill_tokens = 0;
    }
};

/// One item's outcome. kNothing: the runner has no token yet, the sequence stays as it was (only `script`
/// does that).
struct ItemResult {
    enum class Kind : std::uint8_t { kComputed, kToken, kNothing, kFailed };
    Kind kind{Kind::kComputed};
    TokenId token{0};
    /// Ends the sequence with this reason after the token (if any); kNone = the scheduler's own rules decide.
    wire::FinishReason finish{wire::FinishReason::kNone};
};

/// Parallel to StepPlan::items. Logprobs go straight into the sequences.
struct StepResult {
    std::vector<ItemResult> items;
};

/// What the model brings along; read once after the runner is made.
struct ModelFacts {
    std::string model_name;
    std::string dtype{"float32"};
    std::int64_t max_model_len{0};  // 0 = any
    std::int32_t vocab_size{0};
    std::vector<TokenId> eos_token_ids;
    bool supports_logprobs{true};
};

/// Where a sequence will live and how many of its leading tokens are there already (always < its tokens).
struct Placement {
    std::int32_t slot{-1};
    std::int64_t cached{0};
};

/// What a test wants a rank to do wrong, now. Only the script runner has any.
struct Fault {
    enum class Kind : std::uint8_t {
        kDie,         // SIGKILL to itself (or `number` as the signal)
        kExit,        // leaves with exit code `number`, no last words
        kLastWords,   // ENGINE_CORE_DEAD, then exit 3
        kDeaf,        // closes the inputs
        kMute,        // closes the outputs
        kRawMessage,  // sends `frames` as they are to client `number`
        kIdentity,    // names `number` as its engine index from now on
        kSleep,       // does nothing at all for `number` ms (sockets stay open: wedged)
    };
    Kind kind{Kind::kDie};
    std::int64_t number{0};
    std::vector<std::string> frames;
};

class FaultSource {
  public:
    virtual ~FaultSource() = default;
    /// The next fault that is due; false when there is none. Called between steps and at least every few ms
    /// while idle.
    virtual bool TakeFault(Fault& out) = 0;
};

class ModelRunner {
  public:
    virtual ~ModelRunner() = default;

    virtual const ModelFacts& facts() const noexcept = 0;
    /// Refuses what this runner cannot do; the request then ends with an error, alone.
    virtual Status Check(const wire::GenerateRequest& request) noexcept = 0;
    /// Picks one of `free_slots` (never empty). Once per admission, in admission order.
    virtual Placement Place(const Sequence& sequence, std::span<const std::int32_t> free_slots) noexcept = 0;
    /// Computes the plan. A failed Status is fatal for the rank (last words, exit); a failed item ends one
    /// request.
    virtual Status Run(const StepPlan& plan, StepResult& result) noexcept = 0;
    /// Forgets every prefix that no running sequence holds.
    virtual void ResetPrefixCache() noexcept = 0;
    virtual FaultSource* faults() noexcept { return nullptr; }
};

}  // namespace rankgate::engine
