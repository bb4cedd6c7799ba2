// SPDX-License-Identifier: Apache-2.0
#include "gateway/options.h"

#include <algorithm>
#include <charconv>
#include <set>
#include <utility>

namespace rankgate::gateway {
namespace {

constexpr std::int32_t kMaxGroupSize = 1024;
constexpr std::size_t kMaxGroups = 256;

Error BadWorker(const std::string& key, const std::string& value, const std::string& allowed) {
    return Error::Invalid(key, "worker: " + key + " '" + value + "' is not valid; " + allowed);
}

bool ParseInt(const std::string& text, std::int64_t low, std::int64_t high, std::int64_t& out) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
    return error == std::errc{} && end == text.data() + text.size() && out >= low && out <= high;
}

bool Loopback(const std::string& host) {
    return host == "localhost" || host == "::1" || host == "[::1]" || host.starts_with("127.");
}

std::string BaseName(std::string path) {
    while (path.size() > 1 && path.back() == '/') {
        path.pop_back();
    }
    const std::size_t slash = path.rfind('/');
    std::string name = slash == std::string::npos ? path : path.substr(slash + 1);
    if (name.ends_with(".gguf")) {
        name.resize(name.size() - 5);
    }
    return name;
}

}  // namespace

std::vector<WorkerSpec> GatewayOptions::Groups() const {
    std::vector<WorkerSpec> groups = workers;
    if (groups.empty()) {
        WorkerSpec spec;
        spec.runtime = runtime;
        spec.dp_size = data_parallel_size;
        spec.address = data_parallel_address;
        spec.rpc_port = data_parallel_rpc_port;
        spec.socket_dir = socket_dir;
        groups.push_back(std::move(spec));
    }
    int index = 0;
    for (WorkerSpec& spec : groups) {
        if (spec.name.empty()) {
            spec.name = "group" + std::to_string(index);
        }
        ++index;
    }
    return groups;
}

std::vector<std::string> GatewayOptions::ServedNames() const {
    if (!served_model_names.empty()) {
        return served_model_names;
    }
    return {BaseName(model)};
}

Status SetWorkerField(WorkerSpec& spec, const std::string& key, const std::string& value) {
    std::int64_t number = 0;
    if (key == "name") {
        const bool fine =
            !value.empty() && value.size() <= 64 && std::all_of(value.begin(), value.end(), [](char c) {
                return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       c == '-' || c == '_' || c == '.';
            });
        if (!fine) {
            return BadWorker(key, value, "letters, digits, '-', '_' and '.', at most 64");
        }
        spec.name = value;
    } else if (key == "model") {
        spec.model = value;
    } else if (key == "path") {
        spec.path = value;
    } else if (key == "runtime") {
        if (value != "auto" && value != "vllm" && value != "tokenspeed") {
            return BadWorker(key, value, "one of auto, vllm, tokenspeed");
        }
        spec.runtime = value;
    } else if (key == "dp_size" || key == "data_parallel_size" || key == "zmq_engine_count") {
        if (!ParseInt(value, 1, kMaxGroupSize, number)) {
            return BadWorker(key, value, "an integer from 1 to " + std::to_string(kMaxGroupSize));
        }
        spec.dp_size = static_cast<std::int32_t>(number);
    } else if (key == "address") {
        if (value.empty()) {
            return BadWorker(key, value, "a host name or address");
        }
        spec.address = value;
    } else if (key == "rpc_port") {
        if (!ParseInt(value, 0, 65535, number)) {
            return BadWorker(key, value, "a port from 0 (any free one) to 65535");
        }
        spec.rpc_port = static_cast<std::uint16_t>(number);
    } else if (key == "socket_dir") {
        spec.socket_dir = value;
    } else if (key == "url") {
        if (!value.starts_with("http://") && !value.starts_with("https://")) {
            return BadWorker(key, value,
                             "an http:// or https:// address (groups are named by address and rpc_port)");
        }
        spec.url = value;
    } else if (key == "dp_rank" || key == "rank" || key == "data_parallel_rank") {
        return Error::Invalid(key, "worker: " + key + " '" + value +
                                       "' is refused: a group of N ranks is ONE worker (dp_size=N) with one "
                                       "set of sockets. Expanded into "
                                       "rank-pinned workers each would bind the same sockets and unlink the "
                                       "others' live files. A request "
                                       "names a rank with X-data-parallel-rank.");
    } else {
        return Error::Invalid(
            key,
            "worker: unknown key '" + key +
                "'; allowed are name, model, path, runtime, dp_size, address, rpc_port, socket_dir, url");
    }
    return Status::Ok();
}

Result<WorkerSpec> ParseWorkerSpec(const std::string& spec) {
    WorkerSpec worker;
    std::set<std::string> seen;
    std::size_t at = 0;
    while (at <= spec.size()) {
        std::size_t comma = spec.find(',', at);
        if (comma == std::string::npos) {
            comma = spec.size();
        }
        const std::string field = spec.substr(at, comma - at);
        at = comma + 1;
        const std::size_t equals = field.find('=');
        if (equals == std::string::npos) {
            return Error::Invalid("--worker",
                                  "--worker '" + spec + "': '" + field +
                                      "' is not key=value (for example name=a,dp_size=2,rpc_port=29550)");
        }
        const std::string key = field.substr(0, equals);
        if (!seen.insert(key).second) {
            return Error::Invalid("--worker", "--worker '" + spec + "': " + key + " is given twice");
        }
        if (const Status status = SetWorkerField(worker, key, field.substr(equals + 1)); !status) {
            return Error::Invalid("--worker", "--worker '" + spec + "': " + status.error().message);
        }
    }
    return worker;
}

Status ValidateWorker(const WorkerSpec& spec, bool allow_remote) {
    if (!spec.url.empty()) {
        return Status::Ok();
    }
    if (!allow_remote && !Loopback(spec.address)) {
        return Error::Invalid(
            "--data-parallel-address",
            "handshake address '" + spec.address +
                "' is not loopback: anybody who reaches it can act as an engine of this gateway, read "
                "prompts and answer "
                "for the model (the wire has no authentication). Allow it with --allow-remote-engines.");
    }
    return Status::Ok();
}

Status Validate(const GatewayOptions& options) {
    if (options.host.empty() && options.uds.empty()) {
        return Error::Invalid("--host",
                              "--host is empty and no --uds is given: there is nothing to listen on");
    }
    if (options.ssl_certfile.empty() && !options.ssl_keyfile.empty()) {
        return Error::Invalid("--ssl-keyfile",
                              "--ssl-keyfile '" + options.ssl_keyfile + "' needs --ssl-certfile");
    }
    const std::vector<WorkerSpec> groups = options.Groups();
    if (groups.size() > kMaxGroups) {
        return Error::Invalid("--worker", "--worker is given " + std::to_string(groups.size()) +
                                              " times; at most " + std::to_string(kMaxGroups) + " groups");
    }
    std::set<std::string> names;
    std::set<std::pair<std::string, std::uint16_t>> addresses;
    for (const WorkerSpec& spec : groups) {
        if (!names.insert(spec.name).second) {
            return Error::Invalid("--worker", "--worker: two groups are named '" + spec.name + "'");
        }
        if (const Status status = ValidateWorker(spec, options.allow_remote_engines); !status) {
            return status;
        }
        if (spec.url.empty() && spec.rpc_port != 0 &&
            !addresses.emplace(spec.address, spec.rpc_port).second) {
            return Error::Invalid("--worker", "--worker: two groups share the handshake address " +
                                                  spec.address + ":" + std::to_string(spec.rpc_port));
        }
    }
    for (const std::string& name : options.served_model_names) {
        if (name.empty()) {
            return Error::Invalid("--served-model-name", "--served-model-name is empty");
        }
    }
    for (const std::string& key : options.api_keys) {
        if (key.empty()) {
            return Error::Invalid("--api-key", "--api-key is empty: leave it out to serve without a key");
        }
    }
    if (options.max_held_bytes < 4096) {
        return Error::Invalid("--max-held-bytes", "--max-held-bytes must be at least 4096");
    }
    return Status::Ok();
}

}  // namespace rankgate::gateway
