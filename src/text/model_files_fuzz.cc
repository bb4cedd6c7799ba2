// SPDX-License-Identifier: Apache-2.0
// Any bytes as the JSON files of a model directory: an error that names a file, or assets that keep their
// ranges. The tokenizer itself is a stub, so that this target sees the files of ours; GGUF and tokenizer.json
// are read by llama.cpp and the Rust library. Input: the files, one after the other, each ended by 0xFF.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "base/check.h"
#include "base/fuzz_directory.h"
#include "text/backends.h"
#include "text/model_assets.h"

namespace rankgate::text {

Result<GgufFacts> LoadGguf(const std::string& path) {
    return Error::Invalid("model", path + " is a GGUF file");
}

Result<std::shared_ptr<const Tokenizer>> LoadTokenizerJson(std::string_view, std::string_view,
                                                           const std::string&, std::string_view,
                                                           std::string_view) {
    return MakeByteTokenizer();
}

}  // namespace rankgate::text

namespace {

const std::string& ModelDirectory() {
    static const std::string directory = [] {
        const std::string& made = rankgate::FuzzDirectory("model-files");
        std::ofstream{made + "/tokenizer.json"} << "{}";
        return made;
    }();
    return directory;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    using namespace rankgate::text;
    static const std::array<std::string, 5> names{"config.json", "generation_config.json",
                                                  "tokenizer_config.json", "special_tokens_map.json",
                                                  "chat_template.jinja"};
    std::string_view rest{reinterpret_cast<const char*>(data), size};
    for (const std::string& name : names) {
        const std::string path = ModelDirectory() + "/" + name;
        const std::size_t cut = rest.find('\xFF');
        const std::string_view text = rest.substr(0, cut);
        rest.remove_prefix(cut == rest.npos ? rest.size() : cut + 1);
        if (text.empty()) {
            std::error_code ignored;
            std::filesystem::remove(path, ignored);
        } else {
            std::ofstream{path, std::ios::binary | std::ios::trunc} << text;
        }
    }
    AssetOptions options;
    options.limits = {.cpu_ms = 500,
                      .output_bytes = std::size_t{1} << 20,
                      .steps = 100'000,
                      .values = 20'000,
                      .depth = 200};
    const auto loaded = LoadModelAssets(ModelDirectory(), options);
    if (!loaded.ok()) {
        RG_CHECK(loaded.error().message.find(ModelDirectory()) != std::string::npos);
        return 0;
    }
    const ModelAssets& assets = **loaded;
    RG_CHECK(assets.context_length >= 0);
    RG_CHECK(assets.vocab_size >= static_cast<std::int64_t>(assets.tokenizer->vocab_size()));
    for (std::size_t i = 0; i < assets.eos_token_ids.size(); ++i) {
        RG_CHECK(assets.eos_token_ids[i] >= 0);
        RG_CHECK(i == 0 || assets.eos_token_ids[i] > assets.eos_token_ids[i - 1]);
    }
    RG_CHECK(!assets.defaults.top_k || *assets.defaults.top_k >= 0);
    RG_CHECK(!assets.defaults.max_new_tokens || *assets.defaults.max_new_tokens > 0);
    return 0;
}
