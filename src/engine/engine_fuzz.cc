// SPDX-License-Identifier: Apache-2.0
// The whole input path of a rank: bytes as they come off a socket -> decode -> validate -> schedule -> run ->
// encode, in both dialects. The input is a list of messages [type][length, 2 bytes][payload]; after each, a
// step. Whatever came, the core must go on: a healthy request put in at the end is served in full, and
// nothing is left behind.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/log.h"
#include "engine/core.h"
#include "engine/sim_runner.h"
#include "wire/tokenspeed/request.h"
#include "wire/vllm/outputs.h"
#include "wire/vllm/request.h"

namespace rankgate::engine {
namespace {

class NoSleep final : public Sleeper {
  public:
    void SleepUntil(TimePoint) noexcept override {}
};

void Drive(wire::Dialect dialect, std::string_view input) {
    FakeClock clock;
    CoreConfig config;
    config.dialect = dialect;
    config.scheduler.max_model_len = 64;
    config.scheduler.max_num_seqs = 3;
    config.scheduler.max_num_batched_tokens = 16;
    config.scheduler.block_size = 4;
    config.scheduler.num_gpu_blocks = 20;
    config.num_clients = 2;
    RG_CHECK(config.scheduler.Normalise().ok());
    SimConfig sim;
    sim.model.vocab_size = 1000;
    sim.model.eos_token_ids = {2};
    sim.last_token = 900;
    sim.max_num_seqs = 3;
    sim.num_blocks = 20;
    sim.block_size = 4;
    SimRunner runner{sim, clock, std::make_unique<NoSleep>()};
    EngineCore core{config, runner, clock};
    while (input.size() >= 3) {
        const auto type = static_cast<std::uint8_t>(input[0] & 7);
        const std::size_t size = static_cast<std::size_t>(static_cast<unsigned char>(input[1])) |
                                 (static_cast<std::size_t>(static_cast<unsigned char>(input[2])) << 8);
        input.remove_prefix(3);
        const std::string_view payload = input.substr(0, size);
        input.remove_prefix(payload.size());
        core.OnInput(type, payload, {}, static_cast<std::int32_t>(size % 3) - 1);
        RG_CHECK(core.Step().ok());
        core.outbox().Clear();
        clock.Advance(std::chrono::milliseconds(30));
    }
    // Whatever the fuzzer paused or put to sleep is woken; then everything must come to its end.
    std::string wake;
    wire::Writer writer{wake};
    if (dialect == wire::Dialect::kVllm) {
        wire::vllm::BeginUtility(writer, 0, 1, "wake_up", 0);
        core.OnInput(3, wake, {}, 0);
    }
    wire::GenerateRequest request;
    request.id = "a request that no fuzzer writes";
    request.prompt_token_ids = {5, 6, 7};
    request.sampling.temperature = 0;
    request.sampling.max_tokens = 3;
    std::string add;
    if (dialect == wire::Dialect::kVllm) {
        wire::vllm::EncodeAdd(request, add);
    } else {
        wire::tokenspeed::EncodeAdd(request, add);
    }
    const std::uint64_t finished = core.counters().finished;
    core.OnInput(0, add, {}, 0);
    RG_CHECK(core.scheduler().Find(request.id) != nullptr);
    for (int i = 0; i < 100'000 && core.runnable(); ++i) {
        RG_CHECK(core.Step().ok());
        core.outbox().Clear();
    }
    RG_CHECK(core.counters().finished > finished);
    const wire::LoadSnapshot load = core.Load();
    RG_CHECK(load.num_running == 0 && load.num_waiting == 0 && load.kv_active_pages == 0);
}

}  // namespace
}  // namespace rankgate::engine

extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
    rankgate::InitLog(rankgate::LogLevel::kError, rankgate::LogFormat::kText);
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size == 0) {
        return 0;
    }
    const std::string_view input{reinterpret_cast<const char*>(data) + 1, size - 1};
    rankgate::engine::Drive(
        (data[0] & 1) != 0 ? rankgate::wire::Dialect::kTokenSpeed : rankgate::wire::Dialect::kVllm, input);
    return 0;
}
