// SPDX-License-Identifier: Apache-2.0
#include "api/model.h"

#include <algorithm>

#include "base/utf8.h"

namespace rankgate::api {
namespace {

constexpr std::size_t kMaxShownName = 128;

}  // namespace

Features Features::TokenSpeed() {
    Features features;
    // The engine aborts a request with any of these at ingest, without a reason on the wire.
    features.max_logprobs = 0;
    features.prompt_logprobs = false;
    features.top_k_limit = 128;
    features.max_repetition_penalty = 2;
    features.negative_seed = false;
    // No such fields in its request.
    features.allowed_token_ids = false;
    features.bad_words = false;
    features.priority = false;
    features.cache_salt = false;
    features.lora = false;
    return features;
}

bool ModelInfo::Serves(std::string_view name) const noexcept {
    return std::find(served_names.begin(), served_names.end(), name) != served_names.end();
}

const wire::LoraRequest* ModelInfo::FindAdapter(std::string_view name) const noexcept {
    const auto found = std::find_if(adapters.begin(), adapters.end(),
                                    [&](const auto& adapter) { return adapter.name == name; });
    return found == adapters.end() ? nullptr : &*found;
}

Error ModelNotFound(std::string_view name) {
    std::string shown = ToValidUtf8(name.substr(0, kMaxShownName));
    if (name.size() > kMaxShownName) {
        shown += "...";
    }
    return Error{ErrorCode::kModelNotFound, "The model `" + shown + "` does not exist.", "model", false};
}

Status CheckModelName(const std::optional<std::string>& name, const ModelInfo& model) {
    if (!name || model.Serves(*name) || model.FindAdapter(*name) != nullptr) {
        return Status::Ok();
    }
    return ModelNotFound(*name);
}

}  // namespace rankgate::api
