// SPDX-License-Identifier: Apache-2.0
// Cost of the api layer: a 3 KB chat body to a GenerateRequest, and one streamed token from id to SSE bytes.
// `--json` prints one JSON object; counts of instructions come from running it under callgrind.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>

#include "api/request.h"
#include "api/response.h"
#include "text/model_assets.h"

namespace {

using namespace rankgate;  // NOLINT: a program of one file

constexpr const char* kChatml =
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

std::shared_ptr<const api::ModelInfo> Model() {
    auto assets = std::make_shared<text::ModelAssets>();
    assets->tokenizer = text::MakeByteTokenizer();
    assets->eos_token_id = assets->tokenizer->eos();
    assets->eos_token_ids = {257};
    assets->vocab_size = 259;
    Result<std::shared_ptr<const text::ChatTemplate>> compiled = text::ChatTemplate::Compile(kChatml, {});
    RG_CHECK(compiled.ok());
    assets->chat_template = std::move(compiled).value();
    auto model = std::make_shared<api::ModelInfo>();
    model->served_names = {"SmolLM2-135M-Instruct"};
    model->assets = assets;
    model->vocab_size = 259;
    model->max_model_len = 1 << 20;
    return model;
}

// Best of five, in nanoseconds a call: the machine's other work only ever adds.
template <class F>
double Measure(int calls, F&& call) {
    double best = 1e18;
    for (int round = 0; round < 5; ++round) {
        const auto begin = std::chrono::steady_clock::now();
        for (int i = 0; i < calls; ++i) {
            call(i);
        }
        const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - begin;
        best = std::min(best, spent.count() / calls);
    }
    return best;
}

std::string Body(std::size_t size, const char* more) {
    std::string body =
        R"({"model":"SmolLM2-135M-Instruct","messages":[{"role":"system","content":"You are helpful."},{"role":"user","content":")";
    while (body.size() < size) {
        body += "The quick brown fox jumps over the lazy dog. ";
    }
    body += R"("}],"temperature":0.7,"max_tokens":256)";
    body += more;
    body += "}";
    body.reserve(body.size() + 64);  // as the HTTP layer leaves it
    return body;
}

double TokenCost(const std::shared_ptr<const api::ModelInfo>& model, const char* more, int calls) {
    api::Parser parser;
    api::ParsedRequest parsed = *parser.ParseChat(Body(200, more));
    std::vector<api::PreparedPrompt> prompts = *api::Prepare(parsed, *model);
    api::ResponseAssembler assembler{std::move(parsed), model, std::move(prompts),
                                     "chatcmpl-0123456789abcdef0123456789ab", 1700000000};
    std::string out;
    out.reserve(std::size_t{1} << 20);
    const char text[] = "Hello, this is a stream of \"words\" and lines\n";
    return Measure(calls, [&](int i) {
        const wire::TokenId token =
            static_cast<unsigned char>(text[static_cast<std::size_t>(i) % (sizeof text - 1)]);
        api::ChoiceOutput output;
        output.tokens = std::span{&token, 1};
        assembler.OnOutput(output, out);
        if (out.size() > (std::size_t{1} << 19)) {
            out.clear();
        }
    });
}

}  // namespace

int main(int argc, char** argv) {
    const bool json = argc > 1 && std::strcmp(argv[1], "--json") == 0;
    const std::shared_ptr<const api::ModelInfo> model = Model();
    const std::string chat = Body(3000, R"(,"stream":true)");
    api::Parser parser;
    const double parse = Measure(2000, [&](int) { RG_CHECK(parser.ParseChat(chat).ok()); });
    const api::ParsedRequest parsed = *parser.ParseChat(chat);
    const double prepare = Measure(500, [&](int) { RG_CHECK(api::Prepare(parsed, *model).ok()); });
    const std::vector<api::PreparedPrompt> prompts = *api::Prepare(parsed, *model);
    const double build = Measure(2000, [&](int) {
        std::vector<api::PreparedPrompt> mine = prompts;
        RG_CHECK(
            api::BuildGenerate(parsed, *model, mine, {.id = "chatcmpl-0123456789abcdef0123456789ab"}).ok());
    });
    const double token = TokenCost(model, R"(,"stream":true)", 200000);
    const double with_stop = TokenCost(model, R"(,"stream":true,"stop":["END","\n\n","###"])", 200000);
    if (json) {
        std::printf(
            "{\"api.parse_chat_3kb_ns\":%.0f,\"api.prepare_chat_3kb_ns\":%.0f,\"api.build_3kb_ns\":%.0f,"
            "\"api.stream_token_ns\":%.1f,"
            "\"api.stream_token_stop_ns\":%.1f}\n",
            parse, prepare, build, token, with_stop);
    } else {
        std::printf(
            "parse a 3 KB chat             %8.0f ns\nrender + tokenize (bytes)     %8.0f ns\nbuild           "
            "              %8.0f ns\n"
            "one streamed token            %8.1f ns\none streamed token, 3 stops   %8.1f ns\n",
            parse, prepare, build, token, with_stop);
    }
    return 0;
}
