// SPDX-License-Identifier: Apache-2.0
// One engine rank as several processes: tensor-parallel rank 0 owns the wire and publishes the inputs of
// every step through the relay, the others run the same scheduler and runner on the same list and cross-check
// a digest of plans and tokens. Losing one of them ends the engine with ENGINE_CORE_DEAD within the relay's
// budgets, never with a hang.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "engine/rank.h"
#include "engine/runner.h"

namespace rankgate::engine {

struct TensorParallelConfig {
    int rank{0};
    int size{2};
    std::string where;       // the relay's address; empty on rank 0, which makes one
    std::uint64_t epoch{0};  // likewise
    double join_s{120};
    double stall_s{30};
    std::vector<std::string> arguments;  // of this command line: what followers are started with
};

/// Rank 0 starts its followers (this program again, same flags), joins them and serves; a follower joins and
/// mirrors. Returns the exit code. The runner is loaded already on every rank.
int RunTensorParallel(const RankConfig& config, const TensorParallelConfig& tensor, ModelRunner& runner,
                      const Clock& clock, const std::atomic<int>& stop);

}  // namespace rankgate::engine
