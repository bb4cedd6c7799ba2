// SPDX-License-Identifier: Apache-2.0
// Private to text/: the tokenizer back ends behind LoadModelAssets. Each exists in every build; a build
// without the library it needs gives the reason as an error (backend_missing.cc).
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"
#include "text/tokenizer.h"

namespace rankgate::text {

/// What a GGUF file says beside its vocabulary.
struct GgufFacts {
    std::shared_ptr<const Tokenizer> tokenizer;
    std::string name;
    std::string architecture;
    std::string chat_template;
    std::string tool_template;
    std::vector<std::pair<std::string, std::string>> template_tokens;
    std::vector<TokenId> end_ids;
    std::int64_t context_length{0};
};

/// Reads the vocabulary and the metadata, no weights.
Result<GgufFacts> LoadGguf(const std::string& path);

/// `config` is the text of tokenizer_config.json or empty. `backend`: "auto", "fastokens", "hf".
Result<std::shared_ptr<const Tokenizer>> LoadTokenizerJson(std::string_view json, std::string_view config,
                                                           const std::string& backend,
                                                           std::string_view bos_literal,
                                                           std::string_view eos_literal);

}  // namespace rankgate::text
