// SPDX-License-Identifier: Apache-2.0
// ModelAssets: everything the gateway needs to know of a model without its weights: tokenizer, chat
// templates, end-of-sequence ids, sampling defaults, context length. Read from a GGUF file or from a model
// directory (tokenizer.json, tokenizer_config.json, chat_template.jinja, config.json,
// generation_config.json). Loaded at start-up by gateway/ (takes 0.1 to 3 s); an immutable snapshot
// afterwards, shared by all shards.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace rankgate::text {

/// What generation_config.json says, as `vllm serve` applies it: used where a request says nothing.
struct GenerationDefaults {
    std::optional<double> temperature;
    std::optional<double> top_p;
    std::optional<double> min_p;
    std::optional<double> repetition_penalty;
    std::optional<std::int32_t> top_k;
    std::optional<std::int64_t> max_new_tokens;  // caps max_tokens where a request gives none
};

struct ModelAssets {
    enum class Source { kGguf, kDirectory, kBytes };

    Source source{Source::kBytes};
    std::string path;
    /// general.name of a GGUF, else the last part of the path.
    std::string name;
    std::string architecture;
    std::shared_ptr<const Tokenizer> tokenizer;
    /// Null when the model has none: chat requests are then a 400, completions still work.
    std::shared_ptr<const ChatTemplate> chat_template;
    /// Some models bring a second one for requests with tools.
    std::shared_ptr<const ChatTemplate> tool_template;
    /// The id that ends a sequence, and every id that does (config, generation_config, GGUF end-of-generation
    /// set), ascending.
    std::optional<TokenId> eos_token_id;
    std::vector<TokenId> eos_token_ids;
    GenerationDefaults defaults;
    /// Trained context in tokens; 0 = unknown.
    std::int64_t context_length{0};
    /// Rows of the embedding: ids the engine can name, tokenizer or not. At least tokenizer->vocab_size().
    std::int64_t vocab_size{0};

    const ChatTemplate* TemplateFor(bool with_tools) const noexcept {
        return with_tools && tool_template ? tool_template.get() : chat_template.get();
    }
};

struct AssetOptions {
    /// A template file or the template itself (it contains "{{" or "{%"); replaces the model's own.
    std::string chat_template;
    /// Where to find the tokenizer when it is not with the model.
    std::string tokenizer_path;
    /// Read generation_config.json (`--generation-config auto`); false = OpenAI's neutral defaults
    /// (`--generation-config vllm`).
    bool use_generation_config{true};
    /// Prefer HF tokenizers to fastokens for tokenizer.json ("auto", "fastokens", "hf").
    std::string tokenizer_backend{"auto"};
    RenderLimits limits;
};

/// `path`: a .gguf file, a model directory, or ":bytes:" (byte tokenizer with a chatml template; needs no
/// file).
Result<std::shared_ptr<const ModelAssets>> LoadModelAssets(const std::string& path,
                                                           const AssetOptions& options = {});

}  // namespace rankgate::text
