// SPDX-License-Identifier: Apache-2.0
// The runtime-neutral request and output structs. Both ends of the wire and both dialects (wire/vllm,
// wire/tokenspeed) translate to and from these; group/ and engine/ know nothing else of a request. Plain
// values, no I/O, no thread rule of their own.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace rankgate::wire {

using TokenId = std::int32_t;

/// Guided decoding. Exactly one kind; `value` is the schema, pattern, grammar or tag (empty for kJsonObject).
struct StructuredOutputs {
    enum class Kind : std::uint8_t { kJson, kRegex, kGrammar, kJsonObject, kStructuralTag };
    Kind kind{Kind::kJson};
    std::string value;
    std::optional<std::string> whitespace_pattern;
    bool disable_any_whitespace{false};
    bool disable_additional_properties{false};
    /// vLLM fails a request without it: "xgrammar", "guidance", ... pinned per process.
    std::string backend{"xgrammar"};
};

/// How to sample, already resolved and validated: `max_tokens` concrete, EOS sets filled, stop strings kept
/// at the gateway. Ranges are those of vLLM's SamplingParams; the api layer refuses everything else before it
/// gets here.
struct SamplingParams {
    double temperature{1.0};         // 0 = greedy; [0, 2]
    double top_p{1.0};               // (0, 1]
    double min_p{0.0};               // [0, 1]
    std::int32_t top_k{0};           // 0 = all
    double presence_penalty{0.0};    // [-2, 2]
    double frequency_penalty{0.0};   // [-2, 2]
    double repetition_penalty{1.0};  // (0, 2]
    std::optional<std::int64_t> seed;
    std::int64_t max_tokens{16};  // >= 1
    std::int64_t min_tokens{0};   // <= max_tokens
    bool ignore_eos{false};
    std::vector<TokenId> stop_token_ids;
    std::optional<TokenId> eos_token_id;      // unset with ignore_eos
    std::vector<TokenId> all_stop_token_ids;  // stop_token_ids + every EOS id: masked until min_tokens
    std::optional<std::int32_t> logprobs;     // top-k beside the sampled token; -1 = whole vocabulary
    std::optional<std::int32_t> prompt_logprobs;
    std::vector<std::pair<TokenId, double>> logit_bias;
    std::optional<std::vector<TokenId>> allowed_token_ids;
    std::vector<std::vector<TokenId>> bad_words_token_ids;
    std::vector<std::string> bad_words;
    std::optional<StructuredOutputs> structured_outputs;
    bool skip_reading_prefix_cache{false};
    std::optional<std::int32_t> thinking_token_budget;
    /// Stop strings. The gateway matches them itself; an engine without a detokenizer never sees them.
    std::vector<std::string> stop;
    bool include_stop_str_in_output{false};
    bool skip_special_tokens{true};
    bool spaces_between_special_tokens{true};
};

struct LoraRequest {
    std::string name;
    std::int64_t id{0};  // > 0, stable per adapter
    std::string path;
    std::optional<std::string> base_model_name;
};

/// One sequence to generate (n > 1 is fanned out before).
struct GenerateRequest {
    /// Unique on the wire for the life of the process: an external id plus a suffix, never reused.
    std::string id;
    std::vector<TokenId> prompt_token_ids;  // never empty; every id in [0, vocab)
    SamplingParams sampling;
    double arrival_time{0.0};  // wall clock, seconds
    std::optional<LoraRequest> lora;
    std::optional<std::string> cache_salt;
    std::optional<std::int32_t> data_parallel_rank;  // pinned by the client
    std::int64_t priority{0};                        // lower is earlier
    std::vector<std::pair<std::string, std::string>> trace_headers;
    /// Read by the engine end only: which output socket answers, and the wave the frontend believed in.
    std::int32_t client_index{0};
    std::int64_t current_wave{0};
};

/// vLLM's numbering; kNone = still running. Unknown numbers and names decode to kError.
enum class FinishReason : std::uint8_t {
    kStop = 0,
    kLength = 1,
    kAbort = 2,
    kError = 3,
    kRepetition = 4,
    kNone = 255
};

/// The stop token id or the matched stop string; monostate = none (EOS, length).
using StopReason = std::variant<std::monostate, std::int64_t, std::string>;

/// Scored positions of one output. Row r holds `width` entries: column 0 the sampled (or prompt) token with
/// its vocabulary rank ranks[r] (1-based), columns 1.. the top-k in order.
struct Logprobs {
    std::int32_t positions{0};
    std::int32_t width{0};
    std::vector<TokenId> token_ids;   // positions * width
    std::vector<float> logprobs;      // positions * width
    std::vector<std::int64_t> ranks;  // positions
};

/// One request's share of an engine step, as owned values (engine end, tests). Decoders on the gateway side
/// use views instead.
struct RequestOutput {
    std::string request_id;
    std::vector<TokenId> new_token_ids;
    FinishReason finish_reason{FinishReason::kNone};
    StopReason stop_reason;
    std::optional<Logprobs> logprobs;
    std::optional<Logprobs> prompt_logprobs;
    std::optional<std::int32_t> num_cached_tokens;  // first output of a prefill only
    std::optional<std::int32_t> num_prompt_tokens;  // likewise
    /// Totals where the dialect carries them in every row (TokenSpeed); negative = not given.
    std::int64_t completion_tokens{-1};
};

/// A rank's load as it reports it. kv_total_pages 0 = unknown, never "empty".
struct LoadSnapshot {
    std::int64_t num_running{0};
    std::int64_t num_waiting{0};
    std::int64_t kv_active_pages{0};
    std::int64_t kv_total_pages{0};
    /// 0..1; what vLLM reports directly. Negative = unknown.
    double kv_usage{-1.0};
    std::int64_t step_counter{0};
    std::int64_t current_wave{0};
};

}  // namespace rankgate::wire
