// SPDX-License-Identifier: Apache-2.0
// The rankgate program: dispatches to the sub-commands. Each of them parses its own flags and returns the
// exit code.
#include <cstring>
#include <iostream>
#include <string_view>

#include "apps/tools.h"
#include "apps/version.h"
#include "engine/main.h"
#include "gateway/gateway.h"
#include "launch/serve.h"

namespace {

struct Command {
    std::string_view name;
    int (*run)(int argc, char** argv);
    std::string_view what;
};

constexpr Command kCommands[] = {
    {"serve", rankgate::launch::ServeMain, "start engines and the gateway, and supervise both"},
    {"gateway", rankgate::gateway::Main, "the HTTP side alone; engines are started by others and dial in"},
    {"engine", rankgate::engine::Main, "one engine rank that dials a gateway"},
    {"top", rankgate::apps::TopMain, "live table of the ranks of a running gateway"},
    {"bench", rankgate::apps::BenchMain, "load a server: TTFT, ITL, tokens per second"},
    {"sim", rankgate::apps::SimMain, "simulate rank choice under stale and fresh load reports"},
    {"doctor", rankgate::apps::DoctorMain, "what is installed, what would fail"},
};

void PrintHelp(std::ostream& out) {
    out << "rankgate " << rankgate::apps::kVersion
        << ": an OpenAI-compatible gateway that talks straight to LLM engine ranks\n\nUsage: rankgate "
           "COMMAND [flags]\n\n";
    for (const Command& command : kCommands) {
        out << "  " << command.name << std::string(10 - command.name.size(), ' ') << command.what << '\n';
    }
    out << "\n  --version  version, build and wire versions\n\nrankgate COMMAND --help lists the flags of a "
           "command.\n";
}

}  // namespace

int main(int argc, char** argv) {
    const std::string_view name = argc > 1 ? argv[1] : "";
    if (name == "--version" || name == "-V" || name == "version") {
        rankgate::apps::PrintVersion(std::cout);
        return 0;
    }
    if (name == "--help" || name == "-h" || name == "help") {
        PrintHelp(std::cout);
        return 0;
    }
    for (const Command& command : kCommands) {
        if (command.name == name) {
            return command.run(argc - 1, argv + 1);
        }
    }
    if (name.empty()) {
        std::cerr << "rankgate: a command is missing\n\n";
    } else {
        std::cerr << "rankgate: unknown command '" << name << "'\n\n";
    }
    PrintHelp(std::cerr);
    return 2;
}
