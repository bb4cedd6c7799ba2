// SPDX-License-Identifier: Apache-2.0
// One engine rank as several processes: tensor-parallel rank 0 owns the wire and publishes the inputs of every step through the relay,
// the others run the same scheduler and runner on the same list and cross-check a digest. Losing one of them ends the engine with
// ENGINE_CORE_DEAD within the relay's budgets, never with a hang.
#pragma once

#include <atomic>
#include <string>

#include "base/clock.h"
#include "engine/rank.h"
#include "engine/runner.h"

namespace rankgate::engine {

/// Rank 0 starts its followers (this program again, same flags), joins them and serves; a follower joins and mirrors.
/// `relay_where` is empty on rank 0. Returns the exit code.
int RunTensorParallel(const RankConfig& config, ModelRunner& runner, const Clock& clock, int tensor_parallel_rank,
                      const std::string& relay_where, const std::atomic<int>& stop);

}  // namespace rankgate::engine
