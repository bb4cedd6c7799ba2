// SPDX-License-Identifier: Apache-2.0
// Budgets of the wire: one engine step of 256 outputs in, one request of 1 000 prompt tokens out.
#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include "base/check.h"
#include "wire/tokenspeed/outputs.h"
#include "wire/tokenspeed/request.h"
#include "wire/vllm/outputs.h"
#include "wire/vllm/request.h"

namespace rankgate::wire {
namespace {

std::vector<RequestOutput> Step(std::size_t rows) {
    std::vector<RequestOutput> outputs(rows);
    for (std::size_t i = 0; i < rows; ++i) {
        outputs[i].request_id = "chatcmpl-0123456789abcdef-" + std::to_string(10000 + i);  // 31 characters
        outputs[i].new_token_ids = {static_cast<TokenId>(i * 331 % 128000)};
        outputs[i].num_prompt_tokens.reset();
        outputs[i].completion_tokens = 17;
    }
    return outputs;
}

GenerateRequest Request(std::size_t tokens) {
    GenerateRequest request;
    request.id = "chatcmpl-0123456789abcdef-10000";
    for (std::size_t i = 0; i < tokens; ++i) {
        request.prompt_token_ids.push_back(static_cast<TokenId>(i * 7919 % 128000));
    }
    request.sampling.temperature = 0.7;
    request.sampling.eos_token_id = 2;
    request.sampling.all_stop_token_ids = {2};
    request.arrival_time = 1.0;
    return request;
}

void VllmDecodeStep(benchmark::State& state) {
    const std::vector<RequestOutput> outputs = Step(static_cast<std::size_t>(state.range(0)));
    vllm::SchedulerStats stats;
    vllm::OutputsBatch batch;
    batch.outputs = outputs;
    batch.stats = &stats;
    std::string payload;
    AuxFrames aux;
    vllm::EncodeOutputs(batch, payload, aux);
    const std::string_view frame = payload;
    vllm::OutputsMessage message;
    for (auto _ : state) {
        RG_CHECK(vllm::DecodeOutputs({&frame, 1}, message).ok());
        benchmark::DoNotOptimize(message.rows.data());
    }
    state.SetItemsProcessed(state.iterations() * state.range(0));
    state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(payload.size()));
}
BENCHMARK(VllmDecodeStep)->Arg(1)->Arg(256);

void VllmEncodeStep(benchmark::State& state) {
    const std::vector<RequestOutput> outputs = Step(static_cast<std::size_t>(state.range(0)));
    vllm::SchedulerStats stats;
    vllm::OutputsBatch batch;
    batch.outputs = outputs;
    batch.stats = &stats;
    std::string payload;
    AuxFrames aux;
    for (auto _ : state) {
        payload.clear();
        vllm::EncodeOutputs(batch, payload, aux);
        benchmark::DoNotOptimize(payload.data());
    }
    state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(VllmEncodeStep)->Arg(256);

void VllmEncodeAdd(benchmark::State& state) {
    const GenerateRequest request = Request(static_cast<std::size_t>(state.range(0)));
    std::string payload;
    for (auto _ : state) {
        payload.clear();
        vllm::EncodeAdd(request, payload);
        benchmark::DoNotOptimize(payload.data());
    }
}
BENCHMARK(VllmEncodeAdd)->Arg(10)->Arg(1000);

void VllmDecodeAdd(benchmark::State& state) {
    std::string payload;
    vllm::EncodeAdd(Request(static_cast<std::size_t>(state.range(0))), payload);
    vllm::DecodedAdd add;
    for (auto _ : state) {
        vllm::DecodeAdd(payload, add);
        RG_CHECK(add.status.ok());
    }
}
BENCHMARK(VllmDecodeAdd)->Arg(1000);

void TokenSpeedDecodeStep(benchmark::State& state) {
    const std::vector<RequestOutput> outputs = Step(static_cast<std::size_t>(state.range(0)));
    tokenspeed::OutputsBatch batch;
    batch.outputs = outputs;
    std::string payload;
    tokenspeed::EncodeOutputs(batch, payload);
    const std::string_view frame = payload;
    tokenspeed::OutputsMessage message;
    for (auto _ : state) {
        RG_CHECK(tokenspeed::DecodeOutputs({&frame, 1}, message).ok());
        benchmark::DoNotOptimize(message.rows.data());
    }
    state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(TokenSpeedDecodeStep)->Arg(256);

void TokenSpeedEncodeAdd(benchmark::State& state) {
    const GenerateRequest request = Request(static_cast<std::size_t>(state.range(0)));
    std::string payload;
    for (auto _ : state) {
        payload.clear();
        tokenspeed::EncodeAdd(request, payload);
        benchmark::DoNotOptimize(payload.data());
    }
}
BENCHMARK(TokenSpeedEncodeAdd)->Arg(1000);

}  // namespace
}  // namespace rankgate::wire

BENCHMARK_MAIN();
