// SPDX-License-Identifier: Apache-2.0
#include "launch/engine_args.h"

#include <algorithm>
#include <array>
#include <boost/json.hpp>
#include <charconv>
#include <fstream>
#include <iterator>

#include "launch/port_plan.h"

namespace rankgate::launch {
namespace {

/// A model's config.json is read up to this size.
constexpr std::size_t kMaxConfigBytes = 4 << 20;

struct OwnedFlag {
    std::string_view name;
    bool takes_value;
    std::string_view why;
};

constexpr std::string_view kSetByLauncher = "set by the launcher";

constexpr OwnedFlag kVllmOwned[] = {
    {"--headless", false, kSetByLauncher},
    {"--model", true, kSetByLauncher},
    {"--data-parallel-size", true, "read as the group size and set by the launcher"},
    {"-dp", true, "read as the group size and set by the launcher"},
    {"--data-parallel-size-local", true, kSetByLauncher},
    {"-dpl", true, kSetByLauncher},
    {"--data-parallel-start-rank", true, kSetByLauncher},
    {"-dpr", true, kSetByLauncher},
    {"--data-parallel-rank", true, kSetByLauncher},
    {"-dpn", true, kSetByLauncher},
    {"--data-parallel-address", true, kSetByLauncher},
    {"-dpa", true, kSetByLauncher},
    {"--data-parallel-rpc-port", true, kSetByLauncher},
    {"-dpp", true, kSetByLauncher},
    {"--api-server-count", true, "a headless engine has no API server"},
    {"-asc", true, "a headless engine has no API server"},
};
constexpr OwnedFlag kTokenSpeedOwned[] = {
    {"--headless", false, kSetByLauncher},
    {"--model", true, kSetByLauncher},
    {"--model-path", true, kSetByLauncher},
    {"--port", true, kSetByLauncher},
    {"--dist-init-addr", true, kSetByLauncher},
    {"--data-parallel-size", true, "read as the group size and set by the launcher"},
    {"--data-parallel-address", true, kSetByLauncher},
    {"--data-parallel-rpc-port", true, kSetByLauncher},
    {"--zmq-engine-index", true, kSetByLauncher},
    {"--zmq-msgpack", false, kSetByLauncher},
};
constexpr OwnedFlag kLlamaOwned[] = {
    {"--wire", true, kSetByLauncher},
    {"--data-parallel-size", true, "read as the group size and set by the launcher"},
    {"--data-parallel-rank", true, kSetByLauncher},
    {"--data-parallel-address", true, kSetByLauncher},
    {"--data-parallel-rpc-port", true, kSetByLauncher},
};

const OwnedFlag* FindOwned(EngineKind kind, std::string_view name) {
    const auto search = [&](const auto& table) -> const OwnedFlag* {
        const auto* found = std::find_if(std::begin(table), std::end(table),
                                         [&](const OwnedFlag& f) { return f.name == name; });
        return found == std::end(table) ? nullptr : found;
    };
    switch (kind) {
        case EngineKind::kVllm:
            return search(kVllmOwned);
        case EngineKind::kTokenSpeed:
            return search(kTokenSpeedOwned);
        case EngineKind::kLlama:
            return search(kLlamaOwned);
    }
    return nullptr;
}

bool IsNegativeNumber(std::string_view text) {
    return text.size() > 1 && text[0] == '-' &&
           std::all_of(text.begin() + 1, text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

bool IsValue(std::string_view text) {
    return text.empty() || text[0] != '-' || IsNegativeNumber(text);
}

std::optional<int> ParsePositive(std::string_view text) {
    int value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{} || end != text.data() + text.size() || value < 1) {
        return std::nullopt;
    }
    return value;
}

void ReadSize(std::string_view flag, const std::optional<std::string>& value, std::optional<int>& size,
              EngineFlags& out) {
    const std::optional<int> parsed = value ? ParsePositive(*value) : std::nullopt;
    if (parsed) {
        size = parsed;
        return;
    }
    out.warnings.push_back(std::string(flag) + (value ? " '" + *value + "' is" : " without a value is") +
                           " not a positive number; ignored, the size is not guessed");
}

void AppendCommon(const EngineRequest& request, const EngineFlags& flags, std::vector<std::string>& argv) {
    const auto given = [&](std::string_view flag) {
        return std::any_of(flags.kept.begin(), flags.kept.end(), [&](const std::string& kept) {
            return kept == flag || kept.compare(0, flag.size() + 1, std::string(flag) + "=") == 0;
        });
    };
    const auto add = [&](const char* flag, const std::string& value) {
        if (!given(flag)) {
            argv.insert(argv.end(), {flag, value});
        }
    };
    if (request.max_model_len) {
        add("--max-model-len", std::to_string(*request.max_model_len));
    }
    if (request.max_num_seqs) {
        add("--max-num-seqs", std::to_string(*request.max_num_seqs));
    }
    if (request.tensor_parallel_size > 1) {
        add("--tensor-parallel-size", std::to_string(request.tensor_parallel_size));
    }
}

}  // namespace

std::string_view EngineName(EngineKind kind) noexcept {
    switch (kind) {
        case EngineKind::kLlama:
            return "llama";
        case EngineKind::kVllm:
            return "vllm";
        case EngineKind::kTokenSpeed:
            return "tokenspeed";
    }
    return "?";
}

EngineFlags SplitEngineFlags(EngineKind kind, const std::vector<std::string>& flags) {
    EngineFlags out;
    for (std::size_t i = 0; i < flags.size(); ++i) {
        const std::string& flag = flags[i];
        const std::size_t equals = flag.empty() || flag[0] != '-' ? std::string::npos : flag.find('=');
        const std::string name = flag.substr(0, equals);
        std::optional<std::string> value;
        bool separate = false;
        if (equals != std::string::npos) {
            value = flag.substr(equals + 1);
        } else if (i + 1 < flags.size() && IsValue(flags[i + 1])) {
            value = flags[i + 1];
            separate = true;
        }
        const OwnedFlag* owned = FindOwned(kind, name);
        if (name == "--tensor-parallel-size" || name == "-tp") {
            ReadSize(name, value, out.tensor_parallel_size, out);
        }
        if (owned == nullptr) {
            out.has_grammar_backend |= name == "--grammar-backend";
            out.has_output_logprobs |= name == "--enable-output-logprobs";
            out.kept.push_back(flag);
            continue;
        }
        if (name == "--data-parallel-size" || name == "-dp") {
            ReadSize(name, value, out.data_parallel_size, out);
        }
        out.warnings.push_back(name + " behind -- is dropped: " + std::string(owned->why));
        if (owned->takes_value && separate) {
            ++i;
        }
    }
    return out;
}

Lockstep LockstepOf(const std::string& model) {
    std::ifstream file(model + "/config.json", std::ios::binary);
    if (!file) {
        return Lockstep::kUnknown;
    }
    std::string text(kMaxConfigBytes, '\0');
    file.read(text.data(), static_cast<std::streamsize>(text.size()));
    text.resize(static_cast<std::size_t>(file.gcount()));
    boost::system::error_code error;
    const boost::json::value json = boost::json::parse(text, error);
    if (error || !json.is_object()) {
        return Lockstep::kUnknown;
    }
    // The names vLLM looks for when it asks a config for its number of experts.
    static constexpr std::array kNames = {"num_experts", "moe_num_experts", "n_routed_experts",
                                          "num_local_experts"};
    const auto experts_in = [](const boost::json::object& object) {
        return std::any_of(kNames.begin(), kNames.end(), [&](const char* name) {
            const boost::json::value* value = object.if_contains(name);
            return value != nullptr && value->is_number() && value->to_number<double>() > 0;
        });
    };
    const boost::json::object& config = json.as_object();
    const boost::json::value* inner = config.if_contains("text_config");
    if (experts_in(config) || (inner != nullptr && inner->is_object() && experts_in(inner->as_object()))) {
        return Lockstep::kLockstep;
    }
    return Lockstep::kDense;
}

std::vector<EngineCommand> BuildCommands(const EngineRequest& request, const EngineFlags& flags,
                                         int handshake_port, Lockstep lockstep) {
    const int size = request.data_parallel_size;
    const bool one_process = size > 1 && request.kind == EngineKind::kVllm && lockstep != Lockstep::kDense;
    const std::string dp = std::to_string(size);
    const std::string port = std::to_string(handshake_port);
    std::vector<EngineCommand> commands;
    for (int rank = 0; rank < (one_process ? 1 : size); ++rank) {
        EngineCommand command{rank, one_process ? size : 1, request.program};
        std::vector<std::string>& argv = command.argv;
        argv.push_back(request.model);
        if (request.kind == EngineKind::kVllm) {
            argv.insert(argv.end(), {"--headless", "--data-parallel-size", dp, "--data-parallel-size-local",
                                     std::to_string(command.ranks)});
            if (rank > 0) {
                argv.insert(argv.end(), {"--data-parallel-start-rank", std::to_string(rank)});
            }
        } else {
            argv.insert(argv.end(), {"--wire", "vllm", "--data-parallel-size", dp, "--data-parallel-rank",
                                     std::to_string(rank)});
        }
        argv.insert(argv.end(), {"--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", port});
        AppendCommon(request, flags, argv);
        argv.insert(argv.end(), flags.kept.begin(), flags.kept.end());
        commands.push_back(std::move(command));
    }
    return commands;
}

std::vector<EngineCommand> BuildTokenSpeedCommands(const EngineRequest& request, const EngineFlags& flags,
                                                   int handshake_port, int port) {
    EngineCommand command{0, request.data_parallel_size, request.program};
    std::vector<std::string>& argv = command.argv;
    argv.insert(argv.end(),
                {"--headless", "--model", request.model, "--port", std::to_string(port), "--dist-init-addr",
                 "127.0.0.1:" + std::to_string(TokenSpeedStorePort(port)), "--data-parallel-size",
                 std::to_string(request.data_parallel_size), "--data-parallel-address", "127.0.0.1",
                 "--data-parallel-rpc-port", std::to_string(handshake_port), "--zmq-engine-index", "0"});
    if (!flags.has_grammar_backend) {
        argv.insert(argv.end(), {"--grammar-backend", "xgrammar"});
    }
    if (!flags.has_output_logprobs) {
        argv.emplace_back("--enable-output-logprobs");
    }
    AppendCommon(request, flags, argv);
    argv.insert(argv.end(), flags.kept.begin(), flags.kept.end());
    return {std::move(command)};
}

Status CheckGroupable(const EngineRequest& request) {
    if (request.kind != EngineKind::kTokenSpeed || request.data_parallel_size <= 1) {
        return Status::Ok();
    }
    std::string lower = request.model;
    std::transform(lower.begin(), lower.end(), lower.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    // By model type where there is a config, by name otherwise.
    std::ifstream file(request.model + "/config.json", std::ios::binary);
    std::string config((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    if (lower.find("qwen3") != std::string::npos || config.find("\"qwen3") != std::string::npos) {
        return Error::Invalid(
            "--data-parallel-size",
            "TokenSpeed cannot run " + request.model +
                " in a group: its Qwen3 kernels are launched for ranks that have no tokens and fail "
                "(TokenSpeed issue 1077); use --data-parallel-size 1 and --replicas instead");
    }
    return Status::Ok();
}

Result<std::optional<std::string>> GpuSlice(const char* cuda_visible_devices, int first_device, int count) {
    if (cuda_visible_devices == nullptr || *cuda_visible_devices == '\0') {
        return std::optional<std::string>{};
    }
    std::vector<std::string> devices;
    std::string_view rest{cuda_visible_devices};
    while (!rest.empty()) {
        const std::size_t comma = rest.find(',');
        devices.emplace_back(rest.substr(0, comma));
        rest = comma == std::string_view::npos ? std::string_view{} : rest.substr(comma + 1);
    }
    if (first_device + count > static_cast<int>(devices.size())) {
        return Error::Invalid("CUDA_VISIBLE_DEVICES",
                              "the engines need " + std::to_string(first_device + count) +
                                  " devices, CUDA_VISIBLE_DEVICES names " + std::to_string(devices.size()));
    }
    std::string slice;
    for (int i = 0; i < count; ++i) {
        slice += (i == 0 ? "" : ",") +
                 devices[static_cast<std::size_t>(first_device) + static_cast<std::size_t>(i)];
    }
    return std::optional<std::string>{slice};
}

}  // namespace rankgate::launch
