// SPDX-License-Identifier: Apache-2.0
// Costs of the text path: per streamed token (detokenize, stop match; allocations counted), per prompt
// (template, tokenizer). The demo model's figures appear when RG_BENCH_MODEL names its GGUF
// (scripts/fetch_model.sh) or a model directory.
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <new>
#include <random>

#include "text/detokenizer.h"
#include "text/model_assets.h"
#include "text/stop_matcher.h"

namespace {
std::size_t allocations = 0;
}  // namespace

// Not inlined: the compiler would pair malloc with a delete it sees elsewhere and warn.
[[gnu::noinline]] void* operator new(std::size_t size) {
    ++allocations;
    if (void* memory = std::malloc(size)) {
        return memory;
    }
    std::abort();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
    std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
    std::free(memory);
}

namespace {

using namespace rankgate;
using namespace rankgate::text;

// 50 000 tokens of one to nine bytes, some of them parts of characters.
const TokenTable& Table() {
    static const TokenTable table = [] {
        std::mt19937 random{1};
        TokenTable::Builder builder;
        for (int id = 0; id < 50'000; ++id) {
            std::string piece = random() % 3 == 0 ? " " : "";
            for (std::size_t n = 1 + random() % 8; n > 0; --n) {
                piece += static_cast<char>('a' + random() % 26);
            }
            if (id % 50 == 0) {
                piece = "\xE4\xBD";
            } else if (id % 50 == 1) {
                piece = "\xA0";
            }
            builder.Add(piece, id % 1000 == 7 ? TokenTable::kSpecial | TokenTable::kAdded : 0);
        }
        return std::move(builder).Build(false);
    }();
    return table;
}

std::vector<TokenId> Ids(std::size_t count) {
    std::mt19937 random{2};
    std::vector<TokenId> ids(count);
    for (TokenId& id : ids) {
        id = static_cast<TokenId>(random() % 50'000);
    }
    return ids;
}

void BM_DetokenizeOneToken(benchmark::State& state) {
    const std::vector<TokenId> ids = Ids(4096);
    Detokenizer detokenizer{Table(), {}};
    std::string out;
    out.reserve(4096);
    std::size_t at = 0;
    const std::size_t before = allocations;
    for (auto _ : state) {
        out.clear();
        detokenizer.Append(ids[at++ & 4095], out);
        benchmark::DoNotOptimize(out.data());
    }
    state.counters["allocations"] = static_cast<double>(allocations - before);
}
BENCHMARK(BM_DetokenizeOneToken);

void BM_DetokenizeAndStopMatchOneToken(benchmark::State& state) {
    const std::vector<TokenId> ids = Ids(4096);
    const auto set = StopSet::Compile({"\n\nUser:", "<|im_end|>", "</answer>", "###"});
    Detokenizer detokenizer{Table(), {}};
    StopMatcher matcher{set->get(), false};
    std::string piece;
    std::string out;
    piece.reserve(4096);
    out.reserve(4096);
    std::size_t at = 0;
    const std::size_t before = allocations;
    for (auto _ : state) {
        piece.clear();
        out.clear();
        detokenizer.Append(ids[at++ & 4095], piece);
        benchmark::DoNotOptimize(matcher.Append(piece, out));
        benchmark::DoNotOptimize(out.data());
    }
    state.counters["allocations"] = static_cast<double>(allocations - before);
}
BENCHMARK(BM_DetokenizeAndStopMatchOneToken);

void BM_StopMatchBytes(benchmark::State& state) {
    std::vector<std::string> stops;
    for (int i = 0; i < state.range(0); ++i) {
        stops.push_back("stop string number " + std::to_string(i));
    }
    const auto set = StopSet::Compile(stops);
    std::string text = Detokenize(Table(), Ids(20'000), {});
    StopMatcher matcher{set->get(), false};
    std::string out;
    out.reserve(text.size() + 64);
    for (auto _ : state) {
        out.clear();
        benchmark::DoNotOptimize(matcher.Append(text, out));
    }
    state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations()) *
                            static_cast<std::int64_t>(text.size()));
}
BENCHMARK(BM_StopMatchBytes)->Arg(1)->Arg(4)->Arg(1000);

const ModelAssets& Model() {
    static const std::shared_ptr<const ModelAssets> model = [] {
        const char* path = std::getenv("RG_BENCH_MODEL");
        auto loaded = LoadModelAssets(path == nullptr ? ":bytes:" : path);
        if (!loaded.ok()) {
            std::fprintf(stderr, "%s\n", loaded.error().message.c_str());
            std::exit(1);
        }
        return loaded.value();
    }();
    return *model;
}

void BM_RenderChat(benchmark::State& state) {
    for (auto _ : state) {
        auto out = Model().TemplateFor(false)->Render(
            {.messages =
                 R"([{"role":"system","content":"You are a helpful assistant."},{"role":"user","content":"What is the capital of France?"}])"});
        benchmark::DoNotOptimize(out);
    }
}
BENCHMARK(BM_RenderChat);

void BM_Encode(benchmark::State& state) {
    const std::string text = Detokenize(Table(), Ids(static_cast<std::size_t>(state.range(0))), {});
    std::vector<TokenId> ids;
    for (auto _ : state) {
        ids.clear();
        benchmark::DoNotOptimize(Model().tokenizer->Encode(text, {}, ids).ok());
    }
    state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations()) *
                            static_cast<std::int64_t>(text.size()));
}
BENCHMARK(BM_Encode)->Arg(100)->Arg(4000);

}  // namespace

BENCHMARK_MAIN();
