// SPDX-License-Identifier: Apache-2.0
#include "text/model_assets.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "text/detokenizer.h"

namespace rankgate::text {
namespace {

namespace fs = std::filesystem;

class TempDir {
  public:
    TempDir() {
        std::string pattern = (fs::temp_directory_path() / "rg_text_XXXXXX").string();
        path_ = mkdtemp(pattern.data());
    }
    ~TempDir() {
        std::error_code ignored;
        fs::remove_all(path_, ignored);
    }
    TempDir(const TempDir&) = delete;
    TempDir& operator=(const TempDir&) = delete;
    void Write(const std::string& name, std::string_view text) const {
        fs::create_directories((path_ / name).parent_path());
        std::ofstream{path_ / name, std::ios::binary} << text;
    }
    std::string path() const { return path_.string(); }
    std::string path(const std::string& name) const { return (path_ / name).string(); }

  private:
    fs::path path_;
};

TEST(ModelAssets, TheByteModelNeedsNoFile) {
    const auto assets = LoadModelAssets(":bytes:");
    ASSERT_TRUE(assets.ok()) << assets.error().message;
    const ModelAssets& model = **assets;
    EXPECT_EQ(model.eos_token_ids, std::vector<TokenId>{257});
    ASSERT_NE(model.TemplateFor(true), nullptr);
    const auto prompt = model.TemplateFor(false)->Render({.messages = R"([{"role":"user","content":"hi"}])"});
    ASSERT_TRUE(prompt.ok());
    std::vector<TokenId> ids;
    ASSERT_TRUE(EncodePrompt(*model.tokenizer, *prompt, true, ids).ok());
    EXPECT_EQ(ids.front(), 256);
}

TEST(ModelAssets, APathThatIsNoModelSaysSo) {
    const TempDir dir;
    dir.Write("x.gguf", "GGUF but not really");
    EXPECT_FALSE(LoadModelAssets(dir.path("nothing")).ok());
    EXPECT_FALSE(LoadModelAssets(dir.path("x.gguf")).ok());
    const auto empty = LoadModelAssets(dir.path());
    ASSERT_FALSE(empty.ok());
    EXPECT_NE(empty.error().message.find("tokenizer.json"), std::string::npos);
}

TEST(ModelAssets, ATemplateOfTheOperatorReplacesTheModels) {
    const TempDir dir;
    dir.Write("t.jinja", "file:{{ messages[0].content }}");
    const auto render = [](const std::string& chat_template) {
        AssetOptions options;
        options.chat_template = chat_template;
        const auto assets = LoadModelAssets(":bytes:", options);
        return assets.ok() ? (*assets)
                                 ->chat_template->Render({.messages = R"([{"role":"user","content":"hi"}])"})
                                 ->text
                           : assets.error().message;
    };
    EXPECT_EQ(render("inline:{{ messages[0].content }}"), "inline:hi");
    EXPECT_EQ(render(dir.path("t.jinja")), "file:hi");
    EXPECT_NE(render("{% nonsense %}").find("line 1"), std::string::npos);
    EXPECT_NE(render(dir.path("absent")).find("absent"), std::string::npos);
}

#ifdef RG_WITH_RUST
// A byte-level BPE of the 256 bytes and three merges, in the shape of Qwen's and Llama-3's files. Ids: byte b
// is 3 + b.
std::string TinyTokenizer() {
    std::string vocab = R"("ab":0,"\u0120ab":1,"\u00c3\u00a9":2)";
    int next = 0x100;
    for (int byte = 0; byte < 256; ++byte) {
        const bool own = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
        char entry[32];
        std::snprintf(entry, sizeof entry, ",\"\\u%04x\":%d", static_cast<unsigned>(own ? byte : next++),
                      3 + byte);
        vocab += entry;
    }
    return R"({"version":"1.0","truncation":null,"padding":null,
 "added_tokens":[{"id":259,"content":"<|im_end|>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true},
                 {"id":260,"content":"<think>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":false}],
 "normalizer":null,
 "pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true},
 "post_processor":null,
 "decoder":{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true},
 "model":{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,"end_of_word_suffix":null,"fuse_unk":false,
  "byte_fallback":false,"vocab":{)" +
           vocab + R"(},"merges":[["a","b"],["\u0120","ab"],["\u00c3","\u00a9"]]}})";
}
const std::string kTinyTokenizer = TinyTokenizer();

// Llama-2's shape: metaspace with byte fallback, BOS in front.
constexpr std::string_view kTinyMetaspace = R"({
 "version":"1.0",
 "added_tokens":[{"id":0,"content":"<unk>","special":true,"single_word":false,"lstrip":false,"rstrip":false,"normalized":false},
                 {"id":1,"content":"<s>","special":true,"single_word":false,"lstrip":false,"rstrip":false,"normalized":false}],
 "normalizer":{"type":"Sequence","normalizers":[{"type":"Prepend","prepend":"▁"},{"type":"Replace","pattern":{"String":" "},"content":"▁"}]},
 "pre_tokenizer":null,
 "post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],
  "pair":[{"Sequence":{"id":"A","type_id":0}},{"Sequence":{"id":"B","type_id":1}}],
  "special_tokens":{"<s>":{"id":"<s>","ids":[1],"tokens":["<s>"]}}},
 "decoder":{"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"▁"},"content":" "},{"type":"ByteFallback"},{"type":"Fuse"},
  {"type":"Strip","content":" ","start":1,"stop":0}]},
 "model":{"type":"BPE","dropout":null,"unk_token":"<unk>","continuing_subword_prefix":null,"end_of_word_suffix":null,"fuse_unk":true,
  "byte_fallback":true,"vocab":{"<unk>":0,"<s>":1,"<0xC3>":2,"<0xA9>":3,"▁":4,"a":5,"▁a":6},"merges":[["▁","a"]]}})";

class TinyModel : public testing::TestWithParam<const char*> {
  protected:
    std::shared_ptr<const ModelAssets> Load(const TempDir& dir) {
        AssetOptions options;
        options.tokenizer_backend = GetParam();
        auto assets = LoadModelAssets(dir.path(), options);
        EXPECT_TRUE(assets.ok()) << (assets.ok() ? "" : assets.error().message);
        return assets.ok() ? assets.value() : nullptr;
    }
    static std::vector<TokenId> Ids(const ModelAssets& model, std::string_view text,
                                    Tokenizer::EncodeOptions options) {
        std::vector<TokenId> ids;
        EXPECT_TRUE(model.tokenizer->Encode(text, options, ids).ok());
        return ids;
    }
};

TEST_P(TinyModel, ByteLevelEncodesAndDecodes) {
    const TempDir dir;
    dir.Write("tokenizer.json", kTinyTokenizer);
    dir.Write("tokenizer_config.json", R"({"eos_token":"<|im_end|>"})");
    const auto model = Load(dir);
    ASSERT_NE(model, nullptr);
    EXPECT_EQ(model->tokenizer->kind(), GetParam());
    EXPECT_EQ(Ids(*model, "ab ab\xC3\xA9<|im_end|>", {}), (std::vector<TokenId>{0, 1, 2, 259}));
    EXPECT_EQ(
        Detokenize(model->tokenizer->table(), std::vector<TokenId>{1, 3 + 0xC3, 3 + 0xA9, 259, 260}, {}),
        " ab\xC3\xA9<think>");
    EXPECT_EQ(model->eos_token_id, 259);
    EXPECT_EQ(model->chat_template, nullptr);
}

TEST_P(TinyModel, UntrustedTextNeverBecomesASpecialToken) {
    const TempDir dir;
    dir.Write("tokenizer.json", kTinyTokenizer);
    const auto model = Load(dir);
    ASSERT_NE(model, nullptr);
    EXPECT_EQ(Ids(*model, "a<|im_end|>", {.add_special = false, .parse_special = true}).back(), 259);
    for (const TokenId id : Ids(*model, "a<|im_end|>", {.add_special = false, .parse_special = false})) {
        EXPECT_NE(id, 259);
    }
    const TextSpan spans[] = {{"ab", false}, {"<|im_end|>", true}, {"<|im_end|>", false}};
    std::vector<TokenId> ids;
    ASSERT_TRUE(model->tokenizer->EncodeSegments(spans, false, ids).ok());
    EXPECT_EQ(std::count(ids.begin(), ids.end(), 259), 1);
}

TEST_P(TinyModel, MetaspaceWithByteFallback) {
    const TempDir dir;
    dir.Write("tokenizer.json", kTinyMetaspace);
    // 10^30 stands in many a real file.
    dir.Write(
        "tokenizer_config.json",
        R"({"bos_token":{"content":"<s>"},"model_max_length": 1000000000000000019884624838656, "x":[-1e-7,"\"12345678901234567890123"]})");
    const auto model = Load(dir);
    ASSERT_NE(model, nullptr);
    EXPECT_EQ(Ids(*model, "a a", {}), (std::vector<TokenId>{1, 6, 6}));
    EXPECT_EQ(Ids(*model, "a\xC3\xA9", {.add_special = false}), (std::vector<TokenId>{6, 2, 3}));
    EXPECT_EQ(Detokenize(model->tokenizer->table(), std::vector<TokenId>{1, 6, 2, 3, 6}, {}), "a\xC3\xA9 a");
    EXPECT_EQ(model->tokenizer->bos(), 1);
}

TEST_P(TinyModel, AddedTokensThatOnlyTheConfigNamesAreKnown) {
    const TempDir dir;
    dir.Write("tokenizer.json", kTinyTokenizer);
    dir.Write(
        "tokenizer_config.json",
        R"({"added_tokens_decoder":{"259":{"content":"<|im_end|>","special":true},"261":{"content":"<|image|>","special":true}}})");
    const auto model = Load(dir);
    ASSERT_NE(model, nullptr);
    EXPECT_EQ(Ids(*model, "a<|image|>b", {}), (std::vector<TokenId>{3 + 'a', 261, 3 + 'b'}));
    EXPECT_TRUE(model->tokenizer->table().special(261));
}

TEST_P(TinyModel, AnAddedTokenThatTheLibraryNumbersOtherwiseIsRefused) {
    const TempDir dir;
    dir.Write("tokenizer.json", kTinyTokenizer);
    dir.Write("tokenizer_config.json",
              R"({"added_tokens_decoder":{"900":{"content":"<|far|>","special":true}}})");
    AssetOptions options;
    options.tokenizer_backend = GetParam();
    const auto loaded = LoadModelAssets(dir.path(), options);
    if (loaded.ok()) {
        std::vector<TokenId> ids;
        ASSERT_TRUE((*loaded)->tokenizer->Encode("<|far|>", {}, ids).ok());
        EXPECT_EQ(ids, std::vector<TokenId>{900});
    } else {
        EXPECT_NE(loaded.error().message.find("<|far|>"), std::string::npos);
    }
}

TEST_P(TinyModel, EndIdsDefaultsAndContextComeFromTheModelsFiles) {
    const TempDir dir;
    dir.Write("tokenizer.json", kTinyTokenizer);
    dir.Write("tokenizer_config.json",
              R"({"eos_token":"<|im_end|>","chat_template":[{"name":"default","template":"D{{ eos_token }}"},
              {"name":"tool_use","template":"T"}]})");
    dir.Write(
        "config.json",
        R"({"architectures":["X"],"text_config":{"max_position_embeddings":77,"vocab_size":640},"eos_token_id":3})");
    dir.Write(
        "generation_config.json",
        R"({"eos_token_id":[259,7],"temperature":0.6,"top_p":0.95,"top_k":20,"min_p":0.1,"repetition_penalty":1.05,"max_new_tokens":99})");
    const auto model = Load(dir);
    ASSERT_NE(model, nullptr);
    EXPECT_EQ(model->eos_token_id, 259);
    EXPECT_EQ(model->eos_token_ids, (std::vector<TokenId>{7, 259}));
    EXPECT_EQ(model->context_length, 77);
    EXPECT_EQ(model->vocab_size, 640);
    EXPECT_EQ(model->architecture, "X");
    EXPECT_EQ(model->defaults.temperature, 0.6);
    EXPECT_EQ(model->defaults.top_p, 0.95);
    EXPECT_EQ(model->defaults.top_k, 20);
    EXPECT_EQ(model->defaults.min_p, 0.1);
    EXPECT_EQ(model->defaults.repetition_penalty, 1.05);
    EXPECT_EQ(model->defaults.max_new_tokens, 99);
    EXPECT_EQ(model->TemplateFor(false)->Render({.messages = "[]"})->text, "D<|im_end|>");
    EXPECT_EQ(model->TemplateFor(true)->Render({.messages = "[]"})->text, "T");
    dir.Write("chat_template.jinja", "J");
    EXPECT_EQ(Load(dir)->TemplateFor(false)->Render({.messages = "[]"})->text, "J");
}

TEST_P(TinyModel, WithoutGenerationConfigTheModelConfigNamesTheEnds) {
    const TempDir dir;
    dir.Write("tokenizer.json", kTinyTokenizer);
    dir.Write("config.json", R"({"eos_token_id":[3,259]})");
    const auto model = Load(dir);
    ASSERT_NE(model, nullptr);
    EXPECT_EQ(model->eos_token_id, 3);
    EXPECT_EQ(model->eos_token_ids, (std::vector<TokenId>{3, 259}));
    EXPECT_FALSE(model->defaults.temperature.has_value());
}

TEST_P(TinyModel, ADamagedFileIsNamed) {
    const TempDir dir;
    dir.Write("tokenizer.json", kTinyTokenizer);
    AssetOptions options;
    options.tokenizer_backend = GetParam();
    const auto message = [&] {
        const auto out = LoadModelAssets(dir.path(), options);
        return out.ok() ? std::string{"loaded"} : out.error().message;
    };
    for (const char* name : {"config.json", "generation_config.json", "tokenizer_config.json"}) {
        dir.Write(name, "{\"a\":");
        EXPECT_NE(message().find(name), std::string::npos);
        dir.Write(name, "{}");
    }
    EXPECT_EQ(message(), "loaded");
    for (const char* broken :
         {"", "{}", "[]", "{\"model\":{\"type\":\"BPE\"}}",
          "{\"decoder\":{\"type\":\"WordPiece\"},\"model\":{\"type\":\"WordPiece\",\"vocab\":{\"a\":0}}}",
          R"({"decoder":{"type":"ByteLevel"},"model":{"type":"BPE","vocab":{"a":4294967296},"merges":[]}})",
          R"({"decoder":{"type":"ByteLevel"},"model":{"type":"BPE","vocab":{"a":99999999},"merges":[]}})"}) {
        dir.Write("tokenizer.json", broken);
        EXPECT_NE(message().find("tokenizer.json"), std::string::npos) << broken;
    }
}

INSTANTIATE_TEST_SUITE_P(Backends, TinyModel, testing::Values("fastokens", "hf"),
                         [](const auto& backend) { return std::string{backend.param}; });
#else
TEST(ModelAssets, WithoutTheTokenizerLibraryTokenizerJsonIsRefusedByName) {
    const TempDir dir;
    dir.Write("tokenizer.json", "{}");
    const auto assets = LoadModelAssets(dir.path());
    ASSERT_FALSE(assets.ok());
    EXPECT_NE(assets.error().message.find("RANKGATE_WITH_RUST"), std::string::npos);
}
#endif

}  // namespace
}  // namespace rankgate::text
