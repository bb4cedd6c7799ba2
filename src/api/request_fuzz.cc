// SPDX-License-Identifier: Apache-2.0
// Any bytes as a body of every route: an error with a message, or a request that keeps every rule an engine
// relies on.
#include <cmath>
#include <cstdint>
#include <string>

#include "api/json_scan.h"
#include "api/request.h"
#include "api/response.h"
#include "base/error_json.h"
#include "base/utf8.h"
#include "text/model_assets.h"

namespace {

using namespace rankgate;  // NOLINT: a program of one file

const api::ModelInfo& Model() {
    static const std::shared_ptr<const api::ModelInfo> model = [] {
        auto assets = std::make_shared<text::ModelAssets>();
        assets->tokenizer = text::MakeByteTokenizer();
        assets->eos_token_id = 257;
        assets->eos_token_ids = {257, 258};
        assets->vocab_size = 259;
        Result<std::shared_ptr<const text::ChatTemplate>> compiled = text::ChatTemplate::Compile(
            "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}", {});
        RG_CHECK(compiled.ok());
        assets->chat_template = std::move(compiled).value();
        auto made = std::make_shared<api::ModelInfo>();
        made->served_names = {"m"};
        made->assets = assets;
        made->vocab_size = 259;
        made->max_model_len = 512;
        return made;
    }();
    return *model;
}

void CheckError(const Error& error) {
    RG_CHECK(!error.message.empty());
    RG_CHECK(error.code != ErrorCode::kInternal);
    RG_CHECK(IsValidUtf8(ErrorJson(error)));
}

void CheckId(wire::TokenId id) {
    RG_CHECK(id >= 0 && id < 259);
}

void CheckRequest(const wire::GenerateRequest& request) {
    const wire::SamplingParams& sampling = request.sampling;
    RG_CHECK(!request.prompt_token_ids.empty() && request.prompt_token_ids.size() < 512);
    for (const wire::TokenId id : request.prompt_token_ids) {
        CheckId(id);
    }
    RG_CHECK(sampling.temperature >= 0 && sampling.temperature <= 2);
    RG_CHECK(sampling.top_p > 0 && sampling.top_p <= 1);
    RG_CHECK(sampling.min_p >= 0 && sampling.min_p <= 1);
    RG_CHECK(sampling.top_k >= 0);
    RG_CHECK(std::fabs(sampling.presence_penalty) <= 2 && std::fabs(sampling.frequency_penalty) <= 2);
    RG_CHECK(sampling.repetition_penalty > 0 && sampling.repetition_penalty <= 100);
    RG_CHECK(sampling.max_tokens >= 1 && sampling.min_tokens >= 0 &&
             sampling.min_tokens <= sampling.max_tokens);
    RG_CHECK(sampling.max_tokens + static_cast<std::int64_t>(request.prompt_token_ids.size()) <= 512);
    RG_CHECK(!sampling.logprobs || (*sampling.logprobs >= 0 && *sampling.logprobs <= 20));
    RG_CHECK(!sampling.prompt_logprobs ||
             (*sampling.prompt_logprobs >= 0 && *sampling.prompt_logprobs <= 20));
    RG_CHECK(!sampling.thinking_token_budget || *sampling.thinking_token_budget >= 0);
    for (const auto& [id, bias] : sampling.logit_bias) {
        CheckId(id);
        RG_CHECK(std::fabs(bias) <= 100);
    }
    for (const wire::TokenId id : sampling.stop_token_ids) {
        CheckId(id);
    }
    for (const wire::TokenId id : sampling.all_stop_token_ids) {
        CheckId(id);
    }
    if (sampling.allowed_token_ids) {
        RG_CHECK(!sampling.allowed_token_ids->empty());
        for (const wire::TokenId id : *sampling.allowed_token_ids) {
            CheckId(id);
        }
    }
    for (const auto& word : sampling.bad_words_token_ids) {
        RG_CHECK(!word.empty());
        for (const wire::TokenId id : word) {
            CheckId(id);
        }
    }
    for (const std::string& stop : sampling.stop) {
        RG_CHECK(!stop.empty() && IsValidUtf8(stop));
    }
    if (sampling.structured_outputs) {
        RG_CHECK(sampling.structured_outputs->backend == "xgrammar" &&
                 IsValidUtf8(sampling.structured_outputs->value));
    }
    RG_CHECK(!request.cache_salt || (!request.cache_salt->empty() && IsValidUtf8(*request.cache_salt)));
    RG_CHECK(!request.data_parallel_rank || *request.data_parallel_rank == 0);
}

void Through(Result<api::ParsedRequest> parsed) {
    if (!parsed.ok()) {
        return CheckError(parsed.error());
    }
    if (Status status = api::CheckAgainstModel(*parsed, Model()); !status.ok()) {
        return CheckError(status.error());
    }
    Result<std::vector<api::PreparedPrompt>> prompts = api::Prepare(*parsed, Model());
    if (!prompts.ok()) {
        return CheckError(prompts.error());
    }
    auto built = api::BuildGenerate(*parsed, Model(), *prompts, {.id = "x"});
    if (!built.ok()) {
        return CheckError(built.error());
    }
    RG_CHECK(built->size() == parsed->num_choices());
    for (const auto& request : *built) {
        CheckRequest(*request);
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static api::Parser parser;
    if (size < 1) {
        return 0;
    }
    // The first byte chooses the route; padding as the HTTP layer gives it, or none.
    const std::uint8_t route = data[0];
    std::string body{reinterpret_cast<const char*>(data) + 1, size - 1};
    if ((route & 8) != 0) {
        body.reserve(body.size() + 64);
    } else {
        body.shrink_to_fit();
    }
    switch (route & 3) {
        case 0:
            Through(parser.ParseChat(body));
            break;
        case 1:
            Through(parser.ParseCompletion(body));
            break;
        case 2:
            if (Result<api::TokenizeRequest> parsed = parser.ParseTokenize(body); !parsed.ok()) {
                CheckError(parsed.error());
            } else if (Result<std::vector<wire::TokenId>> ids = api::PrepareTokenize(*parsed, Model());
                       ids.ok()) {
                RG_CHECK(IsValidUtf8(api::TokenizeJson(*parsed, Model(), *ids)));
            }
            break;
        default:
            if (Result<api::DetokenizeRequest> parsed = parser.ParseDetokenize(body); !parsed.ok()) {
                CheckError(parsed.error());
            } else if (Result<std::string> json = api::DetokenizeJson(*parsed, Model()); json.ok()) {
                RG_CHECK(IsValidUtf8(*json));
            }
            api::HasLoneSurrogate(body);
            api::KeyOfUnrepresentableNumber(body);
            (void)api::PercentDecode(body);
    }
    return 0;
}
