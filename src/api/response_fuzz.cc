// SPDX-License-Identifier: Apache-2.0
// Any sequence of engine outputs, good or absurd, on any kind of request: the bytes stay valid UTF-8 and
// whole events, each choice ends once, nothing follows the end, and a stream's text equals the whole body's.
#include <simdjson.h>

#include <cstdint>
#include <string>

#include "api/request.h"
#include "api/response.h"
#include "base/utf8.h"
#include "text/model_assets.h"

namespace {

using namespace rankgate;  // NOLINT: a program of one file

std::shared_ptr<const api::ModelInfo> Model() {
    static const std::shared_ptr<const api::ModelInfo> model = [] {
        auto assets = std::make_shared<text::ModelAssets>();
        assets->tokenizer = text::MakeByteTokenizer();
        assets->eos_token_id = 257;
        assets->eos_token_ids = {257, 258};
        assets->vocab_size = 259;
        auto made = std::make_shared<api::ModelInfo>();
        made->served_names = {"m"};
        made->assets = assets;
        made->vocab_size = 259;
        made->max_model_len = 4096;
        return made;
    }();
    return model;
}

struct Input {
    const std::uint8_t* data;
    std::size_t size;
    std::uint8_t Byte() {
        if (size == 0) {
            return 0;
        }
        --size;
        return *data++;
    }
};

// One request, served with and without a stream.
struct Side {
    std::unique_ptr<api::ResponseAssembler> assembler;
    std::string out;
    std::vector<std::string> text;
    bool ended{false};

    Side(const std::string& body, const char* id) {
        api::Parser parser;
        api::ParsedRequest parsed = *parser.ParseCompletion(body);
        RG_CHECK(api::CheckAgainstModel(parsed, *Model()).ok());
        std::vector<api::PreparedPrompt> prompts = *api::Prepare(parsed, *Model());
        RG_CHECK(api::BuildGenerate(parsed, *Model(), prompts, {.id = id}).ok());
        text.resize(parsed.num_choices());
        assembler =
            std::make_unique<api::ResponseAssembler>(std::move(parsed), Model(), std::move(prompts), id, 1);
    }
    void Feed(const api::ChoiceOutput& output) {
        const std::size_t before = out.size();
        const bool was_done = assembler->choice_done(output.choice);
        const api::Effect effect = assembler->OnOutput(output, out);
        if (ended || was_done) {
            RG_CHECK(out.size() == before && !effect.done && !effect.failed && !effect.abort_choice);
        }
        ended = ended || effect.done || effect.failed;
    }
};

std::string Text(const simdjson::dom::element& root, std::size_t choice) {
    for (const simdjson::dom::element item : root["choices"].get_array().value_unsafe()) {
        if (item["index"].get_uint64().value_unsafe() == choice) {
            return std::string{item["text"].get_string().value_unsafe()};
        }
    }
    return {};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Input in{data, size};
    const std::uint8_t flags = in.Byte();
    std::string members = R"("n":2)";
    members += (flags & 1) != 0 ? R"(,"stop":["ab","aab\n","\u20ac"])" : "";
    members += (flags & 2) != 0 ? R"(,"logprobs":2)" : "";
    members += (flags & 4) != 0 ? R"(,"echo":true)" : "";
    members += (flags & 8) != 0 ? R"(,"return_token_ids":true)" : "";
    members += (flags & 16) != 0 ? R"(,"skip_special_tokens":false)" : "";
    members += (flags & 32) != 0 ? R"(,"include_stop_str_in_output":true)" : "";
    const std::string usage =
        (flags & 64) != 0 ? R"(,"stream_options":{"include_usage":true,"continuous_usage_stats":true})" : "";
    const std::string body = R"({"prompt":["p\u00e9",[112]],)" + members;
    Side whole{body + "}", "w"};
    Side stream{body + R"(,"stream":true)" + usage + "}", "s"};

    std::vector<wire::TokenId> tokens;
    while (in.size > 0) {
        const std::uint8_t what = in.Byte();
        api::ChoiceOutput output;
        output.choice = what & 7;
        if (output.choice > 4) {
            output.choice = 3;
        }
        if (output.choice == 4) {
            continue;  // an index that does not exist is a bug of the caller, reported as such
        }
        tokens.clear();
        for (int count = (what >> 3) & 3; count > 0; --count) {
            const std::uint8_t byte = in.Byte();
            tokens.push_back(byte == 255 ? in.Byte() + 200 : byte == 254 ? -1 : byte);
        }
        output.tokens = tokens;
        if ((what & 32) != 0) {
            const std::uint8_t reason = in.Byte();
            output.finish_reason = (reason & 3) == 0   ? wire::FinishReason::kLength
                                   : (reason & 3) == 1 ? wire::FinishReason::kStop
                                                       : static_cast<wire::FinishReason>(reason);
        }
        wire::Logprobs rows;
        if ((what & 64) != 0) {
            rows.positions = static_cast<std::int8_t>(in.Byte());
            rows.width = static_cast<std::int8_t>(in.Byte());
            for (int cells = in.Byte(); cells > 0; --cells) {
                rows.token_ids.push_back(cells * 3);
                rows.logprobs.push_back(static_cast<float>(-cells));
            }
            rows.ranks.push_back(1);
            output.logprobs = &rows;
            output.prompt_logprobs = &rows;
        }
        whole.Feed(output);
        stream.Feed(output);
        RG_CHECK(whole.ended == stream.ended);
    }

    RG_CHECK(IsValidUtf8(whole.out) && IsValidUtf8(stream.out));
    static simdjson::dom::parser json;
    std::string_view rest = stream.out;
    bool done = false;
    bool failed = false;
    while (!rest.empty()) {
        const std::size_t end = rest.find("\n\n");
        RG_CHECK(rest.starts_with("data: ") && end != std::string_view::npos && !done && !failed);
        const std::string event{rest.substr(6, end - 6)};
        rest.remove_prefix(end + 2);
        if (event == "[DONE]") {
            done = true;
            continue;
        }
        simdjson::dom::element root;
        RG_CHECK(json.parse(event).get(root) == simdjson::SUCCESS);
        simdjson::dom::element error;
        failed = root["error"].get(error) == simdjson::SUCCESS;
        for (std::size_t i = 0; i < stream.text.size() && !failed; ++i) {
            stream.text[i] += Text(root, i);
        }
    }
    if (!whole.out.empty()) {
        RG_CHECK(done && !failed);
        simdjson::dom::element root;
        RG_CHECK(json.parse(whole.out).get(root) == simdjson::SUCCESS);
        for (std::size_t i = 0; i < stream.text.size(); ++i) {
            RG_CHECK(stream.text[i] == Text(root, i));
        }
    }
    return 0;
}
