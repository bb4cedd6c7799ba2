// SPDX-License-Identifier: Apache-2.0
// The registration of an engine with nothing wrong in it, for fuzz targets that start from there.
#pragma once

#include <cstdint>
#include <string>

#include "wire/handshake.h"

namespace rankgate::transport {

inline std::string GoodReady(wire::Dialect dialect, std::int64_t data_parallel_size) {
    wire::ReadyResponse ready;
    ready.max_model_len = 64;
    ready.num_gpu_blocks = 10;
    ready.block_size = 16;
    ready.vllm_version = dialect == wire::Dialect::kVllm ? "0.32.0" : "tokenspeed-0.1.0";
    ready.data_parallel_size = data_parallel_size;
    ready.instance_id = "i";
    std::string out;
    wire::EncodeReadyResponse(ready, dialect, out);
    return out;
}

}  // namespace rankgate::transport
