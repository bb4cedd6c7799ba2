// SPDX-License-Identifier: Apache-2.0
// Any bytes as what an operator gives: a --worker SPEC, the TOML file of --config, or an argument list. An
// error that says something, or options that passed Validate(). The first byte chooses.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/fuzz_directory.h"
#include "gateway/flags.h"
#include "gateway/options.h"

namespace {

using namespace rankgate;           // NOLINT: a program of one file
using namespace rankgate::gateway;  // NOLINT

const std::string& ConfigPath() {
    static const std::string path = FuzzDirectory("config") + "/g.toml";
    return path;
}

void CheckOptions(std::vector<std::string> arguments) {
    std::vector<char*> argv;
    for (std::string& argument : arguments) {
        argv.push_back(argument.data());
    }
    argv.push_back(nullptr);
    int exit_code = -1;
    const Result<GatewayOptions> options =
        ParseGatewayArgs(static_cast<int>(argv.size()) - 1, argv.data(), exit_code);
    if (!options.ok()) {
        RG_CHECK(!options.error().message.empty());
    } else if (exit_code < 0) {
        RG_CHECK(Validate(*options).ok());
        RG_CHECK(!options->model.empty() && !options->Groups().empty() && !options->ServedNames().empty());
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size < 1) {
        return 0;
    }
    const std::string text{reinterpret_cast<const char*>(data) + 1, size - 1};
    switch (data[0] % 3) {
        case 0: {
            const Result<WorkerSpec> spec = ParseWorkerSpec(text);
            if (!spec.ok()) {
                RG_CHECK(!spec.error().message.empty());
            } else if (ValidateWorker(*spec, false).ok() && spec->url.empty()) {
                RG_CHECK(spec->dp_size >= 1);
            }
            break;
        }
        case 1:
            std::ofstream{ConfigPath(), std::ios::binary | std::ios::trunc} << text;
            CheckOptions({"gateway", ":bytes:", "--config", ConfigPath()});
            break;
        default: {
            // One argument a line; --config and --help would read files and write to the screen.
            std::vector<std::string> arguments{"gateway"};
            std::string line;
            for (const char c : text + "\n") {
                if (c != '\n') {
                    line += c == '\0' ? ' ' : c;
                    continue;
                }
                if (line.find("config") != line.npos || line.starts_with("--h") || line.starts_with("-h") ||
                    arguments.size() > 32) {
                    return 0;
                }
                arguments.push_back(std::move(line));
                line.clear();
            }
            CheckOptions(std::move(arguments));
        }
    }
    return 0;
}
