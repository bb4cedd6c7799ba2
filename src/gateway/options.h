// SPDX-License-Identifier: Apache-2.0
// Everything the gateway can be told, as one plain struct: filled from flags, a TOML file and the environment
// (flags.h), or by the launcher of `rankgate serve` directly. Validate() before use. Start-up only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/log.h"
#include "base/result.h"

namespace rankgate::gateway {

/// One engine group. Spec text: comma-separated key=value, e.g.
/// "name=a,runtime=vllm,dp_size=2,address=127.0.0.1,rpc_port=29550". There is no rank in it: a group of N
/// ranks is ONE worker with one socket set.
struct WorkerSpec {
    std::string name;                  // empty = "group<i>"
    std::string model;                 // served name this group answers for; empty = all names of the gateway
    std::string path;                  // model files of this group; empty = the gateway's MODEL
    std::string runtime{"auto"};       // auto | vllm | tokenspeed
    std::int32_t dp_size{1};           // ranks that the handshake awaits
    std::string address{"127.0.0.1"};  // handshake address
    std::uint16_t rpc_port{29550};     // handshake port; 0 = any free one
    std::string socket_dir;            // empty = a private temporary one
    std::string url;                   // set for an HTTP worker: kept in the list, not touched
};

struct GatewayOptions {
    // Model
    std::string model;                            // GGUF file, model directory or name
    std::string tokenizer;                        // path; empty = the model's
    std::vector<std::string> served_model_names;  // empty = base name of `model`
    std::string chat_template;                    // file or literal; empty = the model's
    std::int64_t max_model_len{0};                // caps what the ranks report; 0 = theirs

    // HTTP
    std::string host{"127.0.0.1"};
    std::uint16_t port{8000};
    std::string uds;
    std::string ssl_certfile;
    std::string ssl_keyfile;
    std::vector<std::string> api_keys;
    std::vector<std::string> allowed_origins;
    int http_threads{0};     // 0 = max(1, cores - 1)
    int prepare_threads{0};  // 0 = max(1, cores - 1)
    bool debug_headers{false};

    // Bounds
    std::int64_t max_body_bytes{64 * 1024 * 1024};
    std::int64_t max_held_bytes{1024 * 1024};
    std::int64_t max_in_flight{16384};     // choices that may be with the engines at once; above: 429
    std::int64_t max_prepare_queue{1024};  // requests that may wait for the prepare pool; above: 429
    double request_timeout_seconds{0.0};   // 0 = none
    double keep_alive_seconds{120.0};

    // Engines
    std::vector<WorkerSpec> workers;  // empty = one group from the fields below
    std::string runtime{"auto"};
    std::int32_t data_parallel_size{1};
    std::string data_parallel_address{"127.0.0.1"};
    std::uint16_t data_parallel_rpc_port{29550};
    std::string socket_dir;
    bool allow_remote_engines{false};

    // Process
    double shutdown_timeout_seconds{30.0};
    LogLevel log_level{LogLevel::kInfo};
    LogFormat log_format{LogFormat::kText};

    /// The groups to form: `workers`, or the one that the single-group flags describe.
    std::vector<WorkerSpec> Groups() const;
    /// Names clients may put in `model`; the first one is what replies say.
    std::vector<std::string> ServedNames() const;
};

/// Parses a --worker SPEC or one object of POST /workers. The error names the key, its value and what is
/// allowed; a rank in the spec is refused with the reason.
Result<WorkerSpec> ParseWorkerSpec(const std::string& spec);

/// Sets one field by its spec key.
Status SetWorkerField(WorkerSpec& spec, const std::string& key, const std::string& value);
Status ValidateWorker(const WorkerSpec& spec, bool allow_remote);

/// Ranges, combinations and things the flags cannot check alone.
Status Validate(const GatewayOptions& options);

}  // namespace rankgate::gateway
