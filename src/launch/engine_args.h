// SPDX-License-Identifier: Apache-2.0
// The command line of a launched engine: the flags behind `--`, minus those that the launcher owns, plus
// those it sets. Pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace rankgate::launch {

enum class EngineKind : std::uint8_t { kLlama, kVllm, kTokenSpeed };
std::string_view EngineName(EngineKind kind) noexcept;

/// What serve asks of an engine, after defaults; common to all kinds.
struct EngineRequest {
    EngineKind kind{EngineKind::kLlama};
    std::string model;
    int data_parallel_size{1};
    int tensor_parallel_size{1};
    std::optional<std::int64_t> max_model_len;
    std::optional<std::int64_t> max_num_seqs;
    std::vector<std::string> user_flags;  // behind `--`
    std::vector<std::string> program;     // e.g. {"/usr/bin/rankgate", "engine"} or {"vllm"}
};

/// What the flags behind `--` say about things the launcher must know. Warnings are for the log.
struct EngineFlags {
    std::vector<std::string> kept;            // without the owned ones
    std::optional<int> data_parallel_size;    // engine-level size, if given and parsable
    std::optional<int> tensor_parallel_size;  // likewise
    bool has_grammar_backend{false};          // TokenSpeed default already set by the user
    bool has_output_logprobs{false};
    std::vector<std::string> warnings;
};

/// Takes out the flags that the launcher owns for this kind (both `--flag value` and `--flag=value`), says so
/// in `warnings`, and reads the sizes. An unparsable value is a warning and is not guessed. A value that
/// starts with '-' after an owned flag is only taken as that flag's value when it is a negative number.
EngineFlags SplitEngineFlags(EngineKind kind, const std::vector<std::string>& flags);

/// One process to start: which ranks of the group it holds, and its command.
struct EngineCommand {
    int first_rank{0};
    int ranks{1};
    std::vector<std::string> argv;
};

/// How a group is started. Dense vLLM groups get one launcher per rank, so that one death does not take its
/// siblings down; lockstep groups, and models of unknown kind, get one launcher for all, because lockstep
/// ranks must share one port list.
enum class Lockstep : std::uint8_t { kDense, kLockstep, kUnknown };

/// Reads MODEL/config.json: a count of experts above zero means lockstep with data_parallel_size > 1.
Lockstep LockstepOf(const std::string& model);

/// vLLM headless, or our own engine, dialling tcp://127.0.0.1:handshake_port.
std::vector<EngineCommand> BuildCommands(const EngineRequest& request, const EngineFlags& flags,
                                         int handshake_port, Lockstep lockstep);
/// TokenSpeed: one process a group; `port` and the derived store port come from the port plan.
std::vector<EngineCommand> BuildTokenSpeedCommands(const EngineRequest& request, const EngineFlags& flags,
                                                   int handshake_port, int port);

/// An error naming model and reason where an engine cannot run this model in a group; Ok otherwise.
Status CheckGroupable(const EngineRequest& request);

/// The devices of process `index` (of `per_process` devices each) out of CUDA_VISIBLE_DEVICES; nullopt if the
/// variable is unset. An error names how many devices are needed and how many are visible.
Result<std::optional<std::string>> GpuSlice(const char* cuda_visible_devices, int first_device, int count);

}  // namespace rankgate::launch
