// SPDX-License-Identifier: Apache-2.0
#include "engine/tensor_parallel.h"

#include <iostream>

namespace rankgate::engine {

int RunTensorParallel(const RankConfig& config, ModelRunner& /*runner*/, const Clock& /*clock*/, int /*tensor_parallel_rank*/,
                      const std::string& /*relay_where*/, const std::atomic<int>& /*stop*/) {
    std::cerr << "rankgate engine: --tensor-parallel-size " << config.tensor_parallel_size << " is not allowed: 1 in this build\n";
    return kExitFlags;
}

}  // namespace rankgate::engine
