// SPDX-License-Identifier: Apache-2.0
// Budgets of the core: a submit costs at most 2 µs with everything it entails, a row of an engine step at
// most 60 ns.
#include <benchmark/benchmark.h>

#include <memory>
#include <string>
#include <vector>

#include "group/core.h"

namespace rankgate::group {
namespace {

struct Fixture {
    explicit Fixture(std::int32_t size, bool lockstep = false) : core{Config(size)} {
        for (std::int32_t r = 0; r < size; ++r) {
            RankFacts facts;
            facts.data_parallel_size = lockstep ? size : 1;
            (void)core.RankRegistered(r, facts, now);
            core.RankUp(r, now);
        }
        Drain();
    }
    static CoreConfig Config(std::int32_t size) {
        CoreConfig config;
        config.size = size;
        return config;
    }
    void Submit(StreamKey stream) {
        auto request = std::make_unique<wire::GenerateRequest>();
        request->id = "chatcmpl-0123456789abcdef" + std::to_string(stream);
        request->prompt_token_ids.assign(28, 5);
        core.Submit(0, stream, std::move(request), now);
    }
    void Drain() {
        core.Flush();
        for (Action a; core.PopAction(a);) {
            if (a.kind == ActionKind::kSendAdd) {
                ids.emplace_back(a.request->id);
                ranks.push_back(a.rank);
            }
        }
    }
    TimePoint now{std::chrono::seconds{10}};
    GroupCore<VllmProtocol> core;
    std::vector<std::string> ids;
    std::vector<std::int32_t> ranks;
};

/// One decoding step of `range(0)` streams; time is per row.
void RowsOfAStep(benchmark::State& state) {
    Fixture f{1};
    const auto streams = static_cast<std::uint64_t>(state.range(0));
    for (std::uint64_t i = 0; i < streams; ++i) {
        f.Submit(i);
    }
    f.Drain();
    std::vector<StepOutput> rows(streams);
    for (std::size_t i = 0; i < rows.size(); ++i) {
        rows[i].request_id = f.ids[i];
        rows[i].num_tokens = 1;
    }
    wire::LoadSnapshot load;
    EngineStep step;
    step.outputs = rows;
    step.load = &load;
    std::uint64_t delivered = 0;
    for (auto _ : state) {
        f.core.OnStep(step, f.now);
        for (Action a; f.core.PopAction(a);) {
            delivered += a.stream;
        }
    }
    benchmark::DoNotOptimize(delivered);
    state.counters["ns_per_row"] =
        benchmark::Counter(static_cast<double>(state.iterations()) * static_cast<double>(streams),
                           benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}
BENCHMARK(RowsOfAStep)->Arg(1)->Arg(64)->Arg(1024)->Arg(8192);

/// Submit, ADD popped, terminal row, with `range(0)` streams beside it on 8 ranks.
void SubmitToEnd(benchmark::State& state) {
    Fixture f{8, state.range(1) != 0};
    StreamKey next = 0;
    for (std::int64_t i = 0; i < state.range(0); ++i) {
        f.Submit(next++);
    }
    f.Drain();
    StepOutput row;
    row.finish_reason = wire::FinishReason::kStop;
    EngineStep step;
    step.outputs = std::span{&row, 1};
    for (auto _ : state) {
        f.ids.clear();
        f.ranks.clear();
        f.Submit(next++);
        f.Drain();
        row.request_id = f.ids[0];
        step.rank = f.ranks[0];
        f.core.OnStep(step, f.now);
        f.Drain();
    }
}
BENCHMARK(SubmitToEnd)->Args({0, 0})->Args({1024, 0})->Args({1024, 1});

}  // namespace
}  // namespace rankgate::group

BENCHMARK_MAIN();
