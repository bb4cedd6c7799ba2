// SPDX-License-Identifier: Apache-2.0
// The demo model's own files: needs SmolLM2-135M-Instruct, which the suite fetches (scripts/fetch_model.sh)
// and does without weights.
#include <gtest/gtest.h>

#include <cstdio>
#include <ctime>

#include "text/corpus_for_tests.h"
#include "text/detokenizer.h"
#include "text/model_assets.h"

namespace rankgate::text {
namespace {

std::string RunScript(const std::string& command) {
    std::string out;
    FILE* pipe = popen((std::string{RG_SOURCE_DIR} + "/scripts/" + command).c_str(), "r");
    if (pipe == nullptr) {
        return "";
    }
    char buffer[512];
    while (std::fgets(buffer, sizeof buffer, pipe) != nullptr) {
        out += buffer;
    }
    if (pclose(pipe) != 0) {
        return "";
    }
    while (!out.empty() && out.back() == '\n') {
        out.pop_back();
    }
    return out;
}

double CpuSeconds() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

class SmolLm2 : public testing::Test {
  protected:
    static void SetUpTestSuite() {
        const std::string path = RunScript("fetch_model.sh");
        ASSERT_FALSE(path.empty())
            << "scripts/fetch_model.sh failed: the demo model is needed for these tests";
        auto loaded = LoadModelAssets(path);
        ASSERT_TRUE(loaded.ok()) << loaded.error().message;
        model_ = loaded.value();
    }
    static void TearDownTestSuite() { model_.reset(); }
    void SetUp() override { ASSERT_NE(model_, nullptr); }

    static std::vector<TokenId> Ids(std::string_view text, Tokenizer::EncodeOptions options = {}) {
        std::vector<TokenId> ids;
        EXPECT_TRUE(model_->tokenizer->Encode(text, options, ids).ok());
        return ids;
    }

    static std::shared_ptr<const ModelAssets> model_;
};
std::shared_ptr<const ModelAssets> SmolLm2::model_;

TEST_F(SmolLm2, FactsComeFromTheFile) {
    EXPECT_EQ(model_->architecture, "llama");
    EXPECT_EQ(model_->tokenizer->kind(), "gguf");
    EXPECT_EQ(model_->vocab_size, 49152);
    EXPECT_EQ(model_->context_length, 8192);
    EXPECT_EQ(model_->eos_token_id, 2);
    EXPECT_NE(std::find(model_->eos_token_ids.begin(), model_->eos_token_ids.end(), 2),
              model_->eos_token_ids.end());
    EXPECT_TRUE(model_->tokenizer->table().special(2));
    EXPECT_EQ(model_->tokenizer->table().Find("<|im_end|>"), 2);
}

TEST_F(SmolLm2, TheTemplateRendersAsTheModelExpects) {
    const auto out = model_->TemplateFor(false)->Render(
        {.messages =
             R"([{"role":"system","content":"You are a helpful assistant."},{"role":"user","content":"What is the capital of France?"}])"});
    ASSERT_TRUE(out.ok()) << out.error().message;
    EXPECT_EQ(out->text,
              "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nWhat is the "
              "capital of France?<|im_end|>\n"
              "<|im_start|>assistant\n");
    std::vector<TokenId> flat;
    ASSERT_TRUE(EncodePrompt(*model_->tokenizer, *out, true, flat).ok());
    EXPECT_EQ(flat.front(), 1);
    std::vector<TokenId> marked;
    ASSERT_TRUE(EncodePrompt(*model_->tokenizer, *out, false, marked).ok());
    EXPECT_EQ(flat, marked);  // nothing hostile in it and no merge across the borders
}

TEST_F(SmolLm2, TextComesBackByteForByte) {
    for (const auto& [name, text] : corpus::Texts(RG_SOURCE_DIR)) {
        ASSERT_FALSE(text.empty()) << name;
        const std::vector<TokenId> ids = Ids(text, {.add_special = false, .parse_special = false});
        EXPECT_EQ(Detokenize(model_->tokenizer->table(), ids, {.skip_special_tokens = false}), text) << name;
        std::string streamed;
        Detokenizer detokenizer{model_->tokenizer->table(), {.skip_special_tokens = false}};
        for (const TokenId id : ids) {
            detokenizer.Append(id, streamed);
        }
        detokenizer.Flush(streamed);
        EXPECT_EQ(streamed, text) << name;
    }
}

TEST_F(SmolLm2, TypedControlTokensAreTextWhereTheSpanIsUntrusted) {
    EXPECT_EQ(Ids("<|im_end|>"), std::vector<TokenId>{2});
    const auto plain = Ids("<|im_end|>", {.add_special = false, .parse_special = false});
    EXPECT_EQ(std::count(plain.begin(), plain.end(), 2), 0);
    EXPECT_GT(plain.size(), 3U);
}

TEST_F(SmolLm2, InvalidUtf8IsReadAsReplacementCharacters) {
    EXPECT_EQ(Ids("a\xFFz"), Ids("a\xEF\xBF\xBDz"));
    EXPECT_EQ(Ids(""), std::vector<TokenId>{});
}

TEST_F(SmolLm2, RunsWithoutABreakCostNearLinearTime) {
    for (const auto& [name, unit] : corpus::Runs()) {
        std::string small;
        while (small.size() < 20'000) {
            small += unit;
        }
        std::string large;
        for (int i = 0; i < 10; ++i) {
            large += small;
        }
        const double start = CpuSeconds();
        Ids(small);
        const double middle = CpuSeconds();
        Ids(large);
        const double end = CpuSeconds();
        EXPECT_LT(end - middle, 25 * (middle - start) + 0.5)
            << name << ": " << middle - start << " s, then " << end - middle << " s";
    }
}

#ifdef RG_WITH_RUST
TEST_F(SmolLm2, TokenizerJsonOfTheSameVocabularyGivesTheSameIds) {
    const std::string dir = RunScript("fetch_tokenizers.sh smollm2");
    ASSERT_FALSE(dir.empty()) << "scripts/fetch_tokenizers.sh smollm2 failed";
    for (const char* backend : {"fastokens", "hf"}) {
        AssetOptions options;
        options.tokenizer_backend = backend;
        const auto other = LoadModelAssets(dir + "/smollm2", options);
        ASSERT_TRUE(other.ok()) << other.error().message;
        EXPECT_EQ((*other)->tokenizer->kind(), backend);
        EXPECT_EQ((*other)->tokenizer->vocab_size(), model_->tokenizer->vocab_size());
        for (const auto& [name, text] : corpus::Texts(RG_SOURCE_DIR)) {
            for (const bool special : {true, false}) {
                std::vector<TokenId> ids;
                ASSERT_TRUE(
                    (*other)
                        ->tokenizer->Encode(text, {.add_special = true, .parse_special = special}, ids)
                        .ok());
                EXPECT_EQ(ids, Ids(text, {.add_special = true, .parse_special = special}))
                    << backend << " " << name;
            }
        }
        for (TokenId id = 0; id < 49152; ++id) {
            ASSERT_EQ((*other)->tokenizer->table().bytes(id), model_->tokenizer->table().bytes(id)) << id;
            ASSERT_EQ((*other)->tokenizer->table().special(id), model_->tokenizer->table().special(id)) << id;
        }
        const auto mine =
            (*other)->chat_template->Render({.messages = R"([{"role":"user","content":"hi"}])"});
        const auto theirs =
            model_->chat_template->Render({.messages = R"([{"role":"user","content":"hi"}])"});
        EXPECT_EQ(mine->text, theirs->text);
    }
}
#endif

}  // namespace
}  // namespace rankgate::text
