// SPDX-License-Identifier: Apache-2.0
// The start-up messages of both dialects, both directions: HELLO and READY (engine -> frontend), INIT
// (frontend -> engine), and the ready response that registers a rank on the input socket. All are msgpack
// maps: unknown keys are ignored, known ones may be missing unless stated. Used by the handshake state
// machines of transport/. Pure functions over values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/result.h"
#include "wire/protocol.h"

namespace rankgate::wire {

inline constexpr std::size_t kMaxAddresses = 1024;
inline constexpr std::size_t kMaxAddressBytes = 4096;
inline constexpr std::size_t kMaxParallelConfigEntries = 256;

/// HELLO or READY.
struct Greeting {
    enum class Kind : std::uint8_t { kHello, kReady };
    Kind kind{Kind::kHello};
    bool local{false};
    bool headless{true};
    /// Lockstep vLLM ranks name the hash of their configuration in READY; it must be the same on all ranks of
    /// a deployment.
    std::optional<std::string> parallel_config_hash;
    /// Decoding only: TokenSpeed sends the hash key in every greeting, vLLM only where there is a hash. A
    /// first hint of the dialect; the ready response decides.
    bool names_hash{false};
};
void EncodeGreeting(const Greeting& greeting, Dialect dialect, std::string& out);
Result<Greeting> DecodeGreeting(std::string_view payload);

struct InitMessage {
    std::vector<std::string> inputs;   // one per frontend process
    std::vector<std::string> outputs;  // one per frontend process
    std::optional<std::string> coordinator_input;
    std::optional<std::string> coordinator_output;
    std::optional<std::string> frontend_stats_publish_address;
    using ConfigValue = std::variant<std::int64_t, std::string, std::vector<std::int64_t>>;
    std::vector<std::pair<std::string, ConfigValue>> parallel_config;
};
/// Both dialects take the same bytes.
void EncodeInit(const InitMessage& init, std::string& out);
/// Requires `addresses` with non-empty `inputs` and `outputs`.
Result<InitMessage> DecodeInit(std::string_view payload);

struct KvEventsConfig {
    bool enable_kv_cache_events{false};
    std::string publisher;
    std::string endpoint;
    std::optional<std::string> replay_endpoint;
    std::int64_t buffer_steps{10000};
    std::int64_t hwm{100000};
    std::int64_t max_queue_size{100000};
    std::string topic;
};

/// Facts of a rank that is up. Field order is vLLM's; the three marked ones exist in one dialect only.
struct ReadyResponse {
    std::int64_t max_model_len{0};
    std::int64_t num_gpu_blocks{0};
    std::int64_t block_size{0};  // TokenSpeed's newer spelling: prefix_granularity
    std::optional<std::string> dp_stats_address;
    std::string dtype{"bfloat16"};                        // "bfloat16" | "float16" | "float32"
    std::optional<std::string> multimodal_encoder_dtype;  // TokenSpeed
    std::string vllm_version;                             // TokenSpeed: "tokenspeed-<version>"
    std::int64_t world_size{1};
    /// > 1 on vLLM means lockstep: waves apply (a dense model says 1 whatever its launch size).
    std::int64_t data_parallel_size{1};
    std::int64_t tensor_parallel_size{1};
    std::int64_t pipeline_parallel_size{1};
    std::int64_t decode_context_parallel_size{1};
    std::int64_t data_parallel_rank{0};
    std::int64_t max_num_seqs{0};
    std::int64_t max_num_batched_tokens{0};  // signed: older TokenSpeed says -1
    std::string instance_id;
    bool supports_lora{false};  // vLLM from here ...
    std::int64_t max_loras{0};
    std::optional<std::int64_t> mamba_block_size;  // ... to here
    std::optional<std::int64_t> kv_cache_size_tokens;
    std::optional<double> kv_cache_max_concurrency;
    std::optional<KvEventsConfig> kv_events_config;
    std::optional<std::string> weight_transfer_backend;
    bool enable_sleep_mode{false};
    bool supports_draft_weight_updates{false};
    std::optional<std::int64_t> effective_attention_block_size;
    /// Our own addition, sent only when set: path of the rank's shared-memory load mailbox. Foreign frontends
    /// ignore it.
    std::optional<std::string> rankgate_load_mailbox;

    /// Decoding only: which engine this is, from its version string and keys.
    Dialect dialect{Dialect::kVllm};
    /// Decoding only: TokenSpeed spelled the block size prefix_granularity.
    bool prefix_granularity_spelling{false};
};
/// Encodes the full set of the dialect's keys. TokenSpeed is written with `block_size`, which every frontend
/// takes.
void EncodeReadyResponse(const ReadyResponse& ready, Dialect dialect, std::string& out);
/// Requires max_model_len, num_gpu_blocks, a block size (either spelling), dtype, vllm_version and
/// data_parallel_size.
Result<ReadyResponse> DecodeReadyResponse(std::string_view payload);

}  // namespace rankgate::wire
