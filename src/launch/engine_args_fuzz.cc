// SPDX-License-Identifier: Apache-2.0
// Any flags behind `--` for each kind of engine, any CUDA_VISIBLE_DEVICES, any config.json of a model: what
// the launcher owns never reaches an engine, every rank is started exactly once, and a size is a number above
// zero. Input: kind byte, devices, then one flag a line; the whole of it again as a config.json.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/fuzz_directory.h"
#include "launch/engine_args.h"

namespace {

using namespace rankgate::launch;  // NOLINT: a program of one file

void CheckCommands(const EngineRequest& request, const std::vector<EngineCommand>& commands) {
    int ranks = 0;
    for (const EngineCommand& command : commands) {
        RG_CHECK(command.first_rank == ranks && command.ranks > 0);
        RG_CHECK(command.argv.size() > request.program.size());
        ranks += command.ranks;
    }
    RG_CHECK(ranks == request.data_parallel_size);
}

const std::string& ModelDirectory() {
    return rankgate::FuzzDirectory("engine-args");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size < 2) {
        return 0;
    }
    const auto kind = static_cast<EngineKind>(data[0] % 3);
    const int first_device = data[1] & 7;
    std::vector<std::string> lines;
    std::string line;
    for (std::size_t i = 2; i < size && lines.size() < 64; ++i) {
        if (data[i] == '\n') {
            lines.push_back(std::move(line));
            line.clear();
        } else {
            line += static_cast<char>(data[i]);
        }
    }
    lines.push_back(std::move(line));

    const auto slice = GpuSlice(lines.front().c_str(), first_device, 1 + (data[1] >> 6));
    RG_CHECK(slice.ok() || !slice.error().message.empty());

    const EngineFlags flags = SplitEngineFlags(kind, lines);
    RG_CHECK(flags.kept.size() <= lines.size());
    RG_CHECK(!flags.data_parallel_size || *flags.data_parallel_size > 0);
    RG_CHECK(!flags.tensor_parallel_size || *flags.tensor_parallel_size > 0);
    // What was taken out once has nothing left to take out, unless a flag's value now stands where its flag
    // was.
    const EngineFlags again = SplitEngineFlags(kind, flags.kept);
    RG_CHECK(again.kept == flags.kept);

    EngineRequest request;
    request.kind = kind;
    request.model = "m";
    request.program = {"engine"};
    request.user_flags = lines;
    request.data_parallel_size = 1 + (data[1] >> 4 & 3);
    (void)CheckGroupable(request);
    for (const Lockstep lockstep : {Lockstep::kDense, Lockstep::kLockstep, Lockstep::kUnknown}) {
        if (kind == EngineKind::kTokenSpeed) {
            CheckCommands(request, BuildTokenSpeedCommands(request, flags, 29550, 30000));
        } else {
            CheckCommands(request, BuildCommands(request, flags, 29550, lockstep));
        }
    }

    std::ofstream{ModelDirectory() + "/config.json", std::ios::binary | std::ios::trunc}.write(
        reinterpret_cast<const char*>(data) + 1, static_cast<std::streamsize>(size - 1));
    (void)LockstepOf(ModelDirectory());
    return 0;
}
