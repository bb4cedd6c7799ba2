// SPDX-License-Identifier: Apache-2.0
// How fast a sim rank is without its sockets: tokens a second through decode, scheduler, runner and encoder.
// The budget is 300 k a second, so that a gateway bench measures the gateway.
#include <benchmark/benchmark.h>

#include <memory>
#include <string>

#include "engine/core.h"
#include "engine/sim_runner.h"
#include "wire/tokenspeed/request.h"
#include "wire/vllm/request.h"

namespace rankgate::engine {
namespace {

void Steps(benchmark::State& state, wire::Dialect dialect) {
    const auto batch = static_cast<std::int32_t>(state.range(0));
    SteadyClock clock;
    CoreConfig config;
    config.dialect = dialect;
    config.scheduler.max_num_seqs = batch;
    if (!config.scheduler.Normalise().ok()) {
        state.SkipWithError("config");
        return;
    }
    SimConfig sim;
    sim.model.vocab_size = 49152;
    sim.max_num_seqs = batch;
    sim.num_blocks = config.scheduler.num_gpu_blocks;
    SimRunner runner{sim, clock, MakeSteadySleeper()};
    EngineCore core{config, runner, clock};
    std::int64_t tokens = 0;
    std::int64_t next = 0;
    std::string payload;
    for (auto _ : state) {
        while (core.scheduler().num_running() + core.scheduler().num_waiting() <
               static_cast<std::size_t>(batch)) {
            wire::GenerateRequest request;
            request.id = "chatcmpl-0123456789abcdef0123456789abcdef-" + std::to_string(next++);
            request.prompt_token_ids.assign(32, 77);
            request.sampling.max_tokens = 4000;
            request.sampling.temperature = 0;
            payload.clear();
            if (dialect == wire::Dialect::kVllm) {
                wire::vllm::EncodeAdd(request, payload);
            } else {
                wire::tokenspeed::EncodeAdd(request, payload);
            }
            core.OnInput(0, payload, {}, 0);
        }
        if (!core.Step().ok()) {
            state.SkipWithError("step");
            return;
        }
        tokens += batch;
        core.outbox().Clear();
    }
    state.counters["tokens/s"] = benchmark::Counter(static_cast<double>(tokens), benchmark::Counter::kIsRate);
}

void VllmSteps(benchmark::State& state) {
    Steps(state, wire::Dialect::kVllm);
}
void TokenSpeedSteps(benchmark::State& state) {
    Steps(state, wire::Dialect::kTokenSpeed);
}
BENCHMARK(VllmSteps)->Arg(1)->Arg(64)->Arg(256)->Arg(1024);
BENCHMARK(TokenSpeedSteps)->Arg(1)->Arg(64)->Arg(256)->Arg(1024);

void OneTokenRequests(benchmark::State& state) {
    SteadyClock clock;
    CoreConfig config;
    if (!config.scheduler.Normalise().ok()) {
        state.SkipWithError("config");
        return;
    }
    SimConfig sim;
    sim.model.vocab_size = 49152;
    sim.num_blocks = config.scheduler.num_gpu_blocks;
    SimRunner runner{sim, clock, MakeSteadySleeper()};
    EngineCore core{config, runner, clock};
    std::int64_t requests = 0;
    std::string payload;
    for (auto _ : state) {
        for (int i = 0; i < 64; ++i) {
            wire::GenerateRequest request;
            request.id = "cmpl-0123456789abcdef0123456789abcdef-" + std::to_string(requests++);
            request.prompt_token_ids.assign(32, 77);
            request.sampling.max_tokens = 1;
            payload.clear();
            wire::vllm::EncodeAdd(request, payload);
            core.OnInput(0, payload, {}, 0);
        }
        if (!core.Step().ok()) {
            state.SkipWithError("step");
            return;
        }
        core.outbox().Clear();
    }
    state.counters["requests/s"] =
        benchmark::Counter(static_cast<double>(requests), benchmark::Counter::kIsRate);
}
BENCHMARK(OneTokenRequests);

}  // namespace
}  // namespace rankgate::engine

BENCHMARK_MAIN();
