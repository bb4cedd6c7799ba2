// SPDX-License-Identifier: Apache-2.0
// Compares fastokens with Hugging Face tokenizers on real tokenizer.json files, and our streaming decoder
// with the library's own. Not part of the unit tests: it needs about 100 MB of fetched data. Run by
// tests/text/run_tokenizers.sh, which passes the directories.
#include <rg_tokenizer.h>

#include <cstdio>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <random>

#include "text/corpus_for_tests.h"
#include "text/detokenizer.h"
#include "text/model_assets.h"

namespace {

using namespace rankgate;
using namespace rankgate::text;

int failures = 0;

void Check(bool ok, const std::string& what) {
    if (!ok) {
        ++failures;
        std::printf("  FAILED %s\n", what.c_str());
    }
}

double CpuSeconds() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

std::shared_ptr<const ModelAssets> Load(const std::string& dir, const char* backend) {
    AssetOptions options;
    options.tokenizer_backend = backend;
    options.chat_template = "{{ messages | tojson }}";
    const double start = CpuSeconds();
    auto loaded = LoadModelAssets(dir, options);
    if (!loaded.ok()) {
        Check(false, loaded.error().message);
        return nullptr;
    }
    std::printf("  %-9s loaded in %.2f s, %zu tokens\n", backend, CpuSeconds() - start,
                (*loaded)->tokenizer->vocab_size());
    return loaded.value();
}

std::vector<TokenId> Ids(const ModelAssets& model, std::string_view text, bool add_special,
                         bool parse_special) {
    std::vector<TokenId> ids;
    const Status done =
        model.tokenizer->Encode(text, {.add_special = add_special, .parse_special = parse_special}, ids);
    Check(done.ok(), "encode");
    return ids;
}

void Lane(const std::string& dir) {
    std::printf("%s\n", dir.c_str());
    const auto fast = Load(dir, "fastokens");
    const auto hf = Load(dir, "hf");
    if (!fast || !hf) {
        return;
    }
    const std::string json = corpus::ReadAll(dir + "/tokenizer.json");
    RgTokenizer* oracle = nullptr;
    RgText error{};
    Check(rg_tok_load(json.data(), json.size(), nullptr, 0, "hf", &oracle, &error) == 0, "oracle");
    const auto decode = [&](const std::vector<TokenId>& ids, bool skip) {
        const std::vector<std::uint32_t> raw(ids.begin(), ids.end());
        RgText out{};
        Check(
            rg_tok_decode(oracle, raw.data(), raw.size(), static_cast<std::uint8_t>(skip), &out, &error) == 0,
            "decode");
        std::string text{out.data, out.size};
        rg_text_free(out);
        return text;
    };
    int equal = 0;
    int compared = 0;
    for (const auto& [name, text] : corpus::Texts(RG_SOURCE_DIR)) {
        for (const bool add : {true, false}) {
            for (const bool special : {true, false}) {
                ++compared;
                const auto a = Ids(*fast, text, add, special);
                const auto b = Ids(*hf, text, add, special);
                equal += a == b ? 1 : 0;
                Check(a == b, name + (add ? " add" : "") + (special ? " special" : ""));
                for (const bool skip : {true, false}) {
                    Check(Detokenize(fast->tokenizer->table(), b, {.skip_special_tokens = skip}) ==
                              decode(b, skip),
                          "decoding of " + name);
                }
            }
        }
    }
    std::printf("  ids equal on %d of %d\n", equal, compared);

    // Random ids: complete characters must agree; where bytes are broken the number of U+FFFD may differ
    // (byte fallback), so those are only required to be valid text. Here: the share that agrees exactly.
    std::mt19937 random{3};
    int same = 0;
    for (int round = 0; round < 300; ++round) {
        std::vector<TokenId> ids(12);
        for (TokenId& id : ids) {
            id = static_cast<TokenId>(random() % fast->tokenizer->vocab_size());
        }
        same += Detokenize(fast->tokenizer->table(), ids, {}) == decode(ids, true) ? 1 : 0;
    }
    std::printf("  random ids decode alike: %d of 300\n", same);
    Check(same > 280, "random ids");

    for (const auto& model : {fast, hf}) {
        std::printf("  %-9s 500 kB runs, CPU s:", std::string{model->tokenizer->kind()}.c_str());
        for (const auto& [name, unit] : corpus::Runs()) {
            std::string text;
            while (text.size() < 500'000) {
                text += unit;
            }
            const std::string_view tenth =
                std::string_view{text}.substr(0, text.size() / 10 / unit.size() * unit.size());
            const double start = CpuSeconds();
            Ids(*model, tenth, false, true);
            const double middle = CpuSeconds();
            Ids(*model, text, false, true);
            const double seconds = CpuSeconds() - middle;
            std::printf(" %s %.2f", name.c_str(), seconds);
            Check(seconds < 25 * (middle - start) + 0.5, "near-linear: " + name);
        }
        std::printf("\n");
    }
    rg_tok_free(oracle);
}

}  // namespace

int main(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
        Lane(argv[i]);
    }
    std::printf(failures == 0 && argc > 1 ? "tokenizers: all agree\n" : "tokenizers: %d failures\n",
                failures);
    return failures == 0 && argc > 1 ? 0 : 1;
}
