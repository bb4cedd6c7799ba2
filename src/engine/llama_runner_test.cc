// SPDX-License-Identifier: Apache-2.0
// The demo model through scheduler and llama runner against a plain llama.cpp loop of one sequence. Needs the
// model that `make serve` and `make test` fetch (scripts/fetch_model.sh); without it the cases are skipped,
// and say so.
#include "engine/llama_runner.h"

#include <gtest/gtest.h>
#include <llama.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/sampler.h"
#include "engine/scheduler.h"

namespace rankgate::engine {
namespace {

constexpr std::int32_t kChunk = 32;
constexpr int kNewTokens = 10;

std::string ModelPath() {
    const char* given = std::getenv("RANKGATE_TEST_MODEL");
    return given != nullptr ? given : RANKGATE_DEMO_MODEL;
}

bool HaveModel() {
    struct stat info {};
    return ::stat(ModelPath().c_str(), &info) == 0;
}

#define NEED_MODEL()                                                                     \
    if (!HaveModel()) {                                                                  \
        GTEST_SKIP() << "no model at " << ModelPath() << ": run scripts/fetch_model.sh"; \
    }

/// 20 prompts; numbers 5, 11 and 17 are longer than a chunk. Any ids will do: what counts is that both sides
/// see the same.
std::vector<TokenId> Prompt(int n) {
    const bool is_long = n % 6 == 5;
    const int length = is_long ? kChunk + 20 + 10 * n : 3 + n;
    std::vector<TokenId> prompt;
    std::uint32_t x = 12345U + static_cast<std::uint32_t>(n) * 977U;
    for (int i = 0; i < length; ++i) {
        x = x * 1664525U + 1013904223U;
        prompt.push_back(static_cast<TokenId>(300 + (x >> 8) % 20000));
    }
    return prompt;
}

/// The reference: llama.cpp alone, one sequence, whole prompt at once, arg max.
class PlainLoop {
  public:
    PlainLoop() {
        llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
        model_ = llama_model_load_from_file(ModelPath().c_str(), llama_model_default_params());
        llama_context_params params = llama_context_default_params();
        params.n_ctx = 1024;
        params.n_batch = 1024;
        params.n_ubatch = 1024;
        params.n_seq_max = 1;
        params.n_threads = 1;
        params.n_threads_batch = 1;
        params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
        context_ = llama_init_from_model(model_, params);
        vocabulary_ = static_cast<std::size_t>(llama_vocab_n_tokens(llama_model_get_vocab(model_)));
    }
    ~PlainLoop() {
        llama_free(context_);
        llama_model_free(model_);
    }
    /// Tokens, and the log-probability of each.
    std::pair<std::vector<TokenId>, std::vector<float>> Run(std::vector<TokenId> prompt, int count) {
        llama_memory_clear(llama_get_memory(context_), true);
        std::pair<std::vector<TokenId>, std::vector<float>> result;
        std::vector<TokenId> next = std::move(prompt);
        SamplerScratch scratch;
        for (int i = 0; i < count; ++i) {
            EXPECT_EQ(llama_decode(context_,
                                   llama_batch_get_one(next.data(), static_cast<std::int32_t>(next.size()))),
                      0);
            const std::span<const float> logits{llama_get_logits_ith(context_, -1), vocabulary_};
            const TokenId token = ArgMax(logits);
            wire::Logprobs scored;
            AppendLogprobs(logits, token, 0, scratch, scored);
            result.first.push_back(token);
            result.second.push_back(scored.logprobs[0]);
            next = {token};
        }
        return result;
    }

  private:
    llama_model* model_{nullptr};
    llama_context* context_{nullptr};
    std::size_t vocabulary_{0};
};

/// Scheduler and runner; everything a rank does except bytes.
struct Engine {
    explicit Engine(std::int32_t seqs, std::int32_t chunk = kChunk) {
        LlamaConfig config;
        config.path = ModelPath();
        config.max_model_len = 1024;
        config.max_num_seqs = seqs;
        config.max_num_batched_tokens = chunk;
        auto made = MakeLlamaRunner(config);
        EXPECT_TRUE(made.ok()) << (made.ok() ? "" : made.error().message);
        runner = std::move(made).value();
        SchedulerConfig scheduler_config;
        scheduler_config.max_model_len = runner->facts().max_model_len;
        scheduler_config.max_num_seqs = seqs;
        scheduler_config.max_num_batched_tokens = chunk;
        EXPECT_TRUE(scheduler_config.Normalise().ok());
        scheduler = std::make_unique<Scheduler>(scheduler_config, *runner);
    }
    Status Add(const std::string& id, std::vector<TokenId> prompt,
               const std::function<void(Sequence&)>& adjust = {}) {
        auto sequence = std::make_unique<Sequence>();
        sequence->request.id = id;
        sequence->request.prompt_token_ids = std::move(prompt);
        sequence->request.sampling.temperature = 0;
        sequence->request.sampling.max_tokens = kNewTokens;
        if (adjust) {
            adjust(*sequence);
        }
        sequence->want_logprobs = sequence->request.sampling.logprobs.has_value();
        if (Status fit = runner->Check(sequence->request); !fit.ok()) {
            return fit;
        }
        return scheduler->Add(sequence);
    }
    void Run() {
        StepResult result;
        std::vector<Row> rows;
        for (const StepPlan* plan = &scheduler->Plan(); !plan->empty(); plan = &scheduler->Plan()) {
            result.items.clear();
            rows.clear();
            const Status ran = runner->Run(*plan, result);
            ASSERT_TRUE(ran.ok()) << ran.error().message;
            scheduler->Advance(result, rows);
            for (const Row& row : rows) {
                const Sequence& sequence = *row.sequence;
                outputs[sequence.request.id] = sequence.output;
                logprobs[sequence.request.id] = sequence.logprobs;
                prompt_logprobs[sequence.request.id] = sequence.prompt_logprobs;
                cached[sequence.request.id] = sequence.cached;
                finish[sequence.request.id] = sequence.finish;
            }
        }
    }

    std::unique_ptr<ModelRunner> runner;
    std::unique_ptr<Scheduler> scheduler;
    std::map<std::string, std::vector<TokenId>> outputs;
    std::map<std::string, wire::Logprobs> logprobs;
    std::map<std::string, wire::Logprobs> prompt_logprobs;
    std::map<std::string, std::int64_t> cached;
    std::map<std::string, wire::FinishReason> finish;
};

TEST(LlamaRunner, GreedyIdsAndLogprobsEqualAPlainLoopAloneAndFourTogether) {
    NEED_MODEL();
    std::vector<std::pair<std::vector<TokenId>, std::vector<float>>> expected;
    {
        PlainLoop plain;
        for (int n = 0; n < 20; ++n) {
            expected.push_back(plain.Run(Prompt(n), kNewTokens));
        }
    }
    const auto score = [](Sequence& sequence) { sequence.request.sampling.logprobs = 0; };
    Engine alone{1};
    for (int n = 0; n < 20; ++n) {
        ASSERT_TRUE(alone.Add(std::to_string(n), Prompt(n), score).ok());
        alone.Run();
    }
    Engine together{4};
    for (int n = 0; n < 20; ++n) {
        ASSERT_TRUE(together.Add(std::to_string(n), Prompt(n), score).ok());
    }
    together.Run();
    for (int n = 0; n < 20; ++n) {
        const std::string id = std::to_string(n);
        const auto& [tokens, scores] = expected[static_cast<std::size_t>(n)];
        EXPECT_EQ(alone.outputs[id], tokens) << "alone, prompt " << n;
        EXPECT_EQ(together.outputs[id], tokens) << "together, prompt " << n;
        EXPECT_EQ(alone.logprobs[id].logprobs, scores) << "alone, prompt " << n;
        EXPECT_EQ(together.logprobs[id].logprobs, scores) << "together, prompt " << n;
    }
}

TEST(LlamaRunner, AReusedPrefixGivesTheSameTokens) {
    NEED_MODEL();
    Engine engine{2};
    const std::vector<TokenId> prompt = Prompt(5);
    ASSERT_TRUE(engine.Add("first", prompt).ok());
    engine.Run();
    ASSERT_TRUE(engine.Add("again", prompt).ok());
    engine.Run();
    EXPECT_EQ(engine.cached["first"], 0);
    EXPECT_EQ(engine.cached["again"], static_cast<std::int64_t>(prompt.size()) - 1);
    EXPECT_EQ(engine.outputs["again"], engine.outputs["first"]);
    // A conversation: the prompt, what was answered, and more. KV from decode steps is as good as KV from a
    // prefill.
    std::vector<TokenId> longer = prompt;
    longer.insert(longer.end(), engine.outputs["first"].begin(), engine.outputs["first"].end());
    longer.insert(longer.end(), {700, 701, 702});
    ASSERT_TRUE(engine.Add("turn 2", longer).ok());
    engine.Run();
    EXPECT_GE(engine.cached["turn 2"], static_cast<std::int64_t>(prompt.size()));
    ASSERT_TRUE(engine
                    .Add("turn 2 cold", longer,
                         [](Sequence& s) { s.request.sampling.skip_reading_prefix_cache = true; })
                    .ok());
    engine.Run();
    EXPECT_EQ(engine.cached["turn 2 cold"], 0);
    EXPECT_EQ(engine.outputs["turn 2"], engine.outputs["turn 2 cold"]);
    ASSERT_TRUE(engine.Add("other tenant", longer, [](Sequence& s) { s.request.cache_salt = "x"; }).ok());
    engine.Run();
    EXPECT_EQ(engine.cached["other tenant"], 0);
    engine.runner->ResetPrefixCache();
    ASSERT_TRUE(engine.Add("after reset", longer).ok());
    engine.Run();
    EXPECT_EQ(engine.cached["after reset"], 0);
    EXPECT_EQ(engine.outputs["after reset"], engine.outputs["turn 2"]);
}

TEST(LlamaRunner, APreemptedSequenceContinuesExactly) {
    NEED_MODEL();
    Engine engine{2};
    ASSERT_TRUE(engine.Add("plain", Prompt(3)).ok());
    engine.Run();
    const auto expected = engine.outputs["plain"];
    ASSERT_TRUE(engine.Add("stopped", Prompt(3)).ok());
    StepResult result;
    std::vector<Row> rows;
    for (int i = 0; i < 4; ++i) {
        const StepPlan& plan = engine.scheduler->Plan();
        result.items.clear();
        rows.clear();
        ASSERT_TRUE(engine.runner->Run(plan, result).ok());
        engine.scheduler->Advance(result, rows);
    }
    engine.scheduler->PreemptAll();
    engine.Run();
    EXPECT_EQ(engine.outputs["stopped"], expected);
}

TEST(LlamaRunner, PromptLogprobsCoverThePromptWhateverTheChunking) {
    NEED_MODEL();
    const auto score = [](Sequence& sequence) { sequence.request.sampling.prompt_logprobs = 2; };
    Engine small{1, 16};
    Engine big{1, 512};
    const std::vector<TokenId> prompt = Prompt(5);
    for (Engine* engine : {&small, &big}) {
        ASSERT_TRUE(engine->Add("r", prompt, score).ok());
        ASSERT_TRUE(engine->Add("one", {500}, score).ok());
        engine->Run();
        const wire::Logprobs& scored = engine->prompt_logprobs["r"];
        EXPECT_EQ(scored.positions, static_cast<std::int32_t>(prompt.size()) - 1);
        EXPECT_EQ(scored.width, 3);
        for (std::int32_t i = 0; i < scored.positions; ++i) {
            EXPECT_EQ(scored.token_ids[static_cast<std::size_t>(i * 3)],
                      prompt[static_cast<std::size_t>(i) + 1]);
            EXPECT_GE(scored.logprobs[static_cast<std::size_t>(i * 3 + 1)],
                      scored.logprobs[static_cast<std::size_t>(i * 3 + 2)]);
        }
        EXPECT_EQ(engine->prompt_logprobs["one"].positions, 0);
    }
    EXPECT_EQ(small.prompt_logprobs["r"].logprobs, big.prompt_logprobs["r"].logprobs);
}

TEST(LlamaRunner, SeededSamplingRepeatsAndSeedsDiffer) {
    NEED_MODEL();
    Engine engine{4};
    const auto sampled = [](std::int64_t seed) {
        return [seed](Sequence& sequence) {
            sequence.request.sampling.temperature = 1.5;
            sequence.request.sampling.seed = seed;
        };
    };
    ASSERT_TRUE(engine.Add("a", Prompt(3), sampled(1)).ok());
    ASSERT_TRUE(engine.Add("b", Prompt(3), sampled(2)).ok());
    engine.Run();
    ASSERT_TRUE(engine.Add("a again", Prompt(3), sampled(1)).ok());
    engine.Run();
    EXPECT_EQ(engine.outputs["a"], engine.outputs["a again"]);
    EXPECT_NE(engine.outputs["a"], engine.outputs["b"]);
}

TEST(LlamaRunner, AGrammarIsFollowedAndABadOneRefusedAlone) {
    NEED_MODEL();
    Engine engine{2};
    const auto grammar = [](const std::string& text) {
        return [text](Sequence& sequence) {
            wire::StructuredOutputs structured;
            structured.kind = wire::StructuredOutputs::Kind::kGrammar;
            structured.value = text;
            sequence.request.sampling.structured_outputs = structured;
        };
    };
    ASSERT_TRUE(engine.Add("choice", Prompt(3), grammar("root ::= \"yes\" | \"no\"")).ok());
    EXPECT_FALSE(engine.Add("bad", Prompt(3), grammar("root ::= \"yes")).ok());
    EXPECT_FALSE(engine.Add("no root", Prompt(3), grammar("start ::= \"yes\"")).ok());
    ASSERT_TRUE(engine.Add("no sentence", Prompt(4), grammar("root ::= root \"a\"")).ok());
    EXPECT_FALSE(engine
                     .Add("schema", Prompt(3),
                          [](Sequence& sequence) {
                              sequence.request.sampling.structured_outputs = wire::StructuredOutputs{};
                          })
                     .ok());
    engine.Run();
    EXPECT_EQ(engine.finish["choice"], wire::FinishReason::kStop)
        << "the end of the grammar is the end of the answer";
    EXPECT_LE(engine.outputs["choice"].size(), 4u);
    EXPECT_EQ(engine.finish["no sentence"], wire::FinishReason::kError);
    // Nothing of a JSON object fits but its beginning, so the first token is known however odd the prompt.
    ASSERT_TRUE(engine
                    .Add("object", Prompt(3),
                         [](Sequence& sequence) {
                             wire::StructuredOutputs structured;
                             structured.kind = wire::StructuredOutputs::Kind::kJsonObject;
                             sequence.request.sampling.structured_outputs = structured;
                         })
                    .ok());
    engine.Run();
    EXPECT_EQ(engine.outputs["object"].size(), static_cast<std::size_t>(kNewTokens));
    EXPECT_EQ(engine.finish["object"], wire::FinishReason::kLength);
}

TEST(LlamaRunner, RefusesAMissingFileAndTooMuchContext) {
    LlamaConfig config;
    config.path = "/nonexistent/model.gguf";
    EXPECT_FALSE(MakeLlamaRunner(config).ok());
    NEED_MODEL();
    config.path = ModelPath();
    config.max_model_len = 1 << 20;
    const auto made = MakeLlamaRunner(config);
    ASSERT_FALSE(made.ok());
    EXPECT_EQ(made.error().param, "--max-model-len");
}

}  // namespace
}  // namespace rankgate::engine
