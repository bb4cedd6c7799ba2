// SPDX-License-Identifier: Apache-2.0
// `rankgate doctor`: what is installed, what would fail, and what to do about it. Starts nothing and changes
// nothing.
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <string>
#include <thread>

#include "apps/tools.h"
#include "apps/version.h"
#include "base/cli.h"
#include "launch/port_plan.h"

namespace rankgate::apps {
namespace {

/// Each stream needs one descriptor; below this a busy gateway refuses connections.
constexpr rlim_t kWantedDescriptors = 65'536;
/// sun_path without its terminating zero, minus the longest name that is put into a socket folder.
constexpr std::size_t kLongestSocketDir = 107 - 24;

class Report {
  public:
    void Ok(const std::string& what, const std::string& detail) { Line("ok  ", what, detail); }
    void Note(const std::string& what, const std::string& detail) { Line("note", what, detail); }
    void Bad(const std::string& what, const std::string& detail, const std::string& fix) {
        Line("FAIL", what, detail + "\n                         fix: " + fix);
        ++bad_;
    }
    int bad() const { return bad_; }

  private:
    static void Line(const char* mark, const std::string& what, const std::string& detail) {
        std::printf("%s  %-18s %s\n", mark, what.c_str(), detail.c_str());
    }
    int bad_{0};
};

std::string FindOnPath(const std::string& program) {
    const char* path = std::getenv("PATH");
    std::string_view rest{path == nullptr ? "" : path};
    while (!rest.empty()) {
        const std::size_t colon = rest.find(':');
        std::string candidate = std::string(rest.substr(0, colon)) + "/" + program;
        if (::access(candidate.c_str(), X_OK) == 0) {
            return candidate;
        }
        rest = colon == std::string_view::npos ? std::string_view{} : rest.substr(colon + 1);
    }
    return {};
}

void CheckDescriptors(Report& report) {
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    const std::string detail =
        "soft " + std::to_string(limit.rlim_cur) + ", hard " + std::to_string(limit.rlim_max);
    if (limit.rlim_max < kWantedDescriptors) {
        report.Note("open files",
                    detail + "; one stream needs one, so at most about that many clients (ulimit -n)");
    } else {
        report.Ok("open files", detail);
    }
}

void CheckPort(Report& report, const std::string& what, int port) {
    if (launch::PortBusy(port)) {
        report.Bad(what, "port " + std::to_string(port) + " is taken on 127.0.0.1",
                   "stop its owner (ss -ltnp) or choose another port");
    } else {
        report.Ok(what, "port " + std::to_string(port) + " is free");
    }
}

void CheckSocketDir(Report& report, const std::string& dir) {
    if (dir.size() > kLongestSocketDir) {
        report.Bad("socket folder", dir + " is too long for a unix socket",
                   "choose a path of at most " + std::to_string(kLongestSocketDir) + " bytes");
        return;
    }
    struct stat info {};
    if (::stat(dir.c_str(), &info) != 0) {
        report.Bad("socket folder", dir + ": " + std::strerror(errno),
                   "create it, mode 0700, owned by the user that runs rankgate");
    } else if (!S_ISDIR(info.st_mode) || ::access(dir.c_str(), W_OK | X_OK) != 0) {
        report.Bad("socket folder", dir + " is not a folder that can be written to", "mkdir -m 0700 " + dir);
    } else {
        report.Ok("socket folder", dir);
    }
}

void CheckModel(Report& report, const std::string& model) {
    std::error_code error;
    if (std::filesystem::is_directory(model, error)) {
        for (const char* file : {"config.json", "tokenizer.json"}) {
            if (std::filesystem::exists(model + "/" + file, error)) {
                report.Ok("model", model + "/" + file);
            } else {
                report.Bad("model", model + " has no " + file,
                           "give a complete model directory, or --tokenizer PATH");
            }
        }
#ifndef RANKGATE_HAS_RUST
        report.Bad("tokenizer", "this build cannot read tokenizer.json",
                   "build with RANKGATE_WITH_RUST=ON (needs cargo 1.85)");
#endif
    } else if (::access(model.c_str(), R_OK) == 0) {
        report.Ok("model", model);
    } else {
        report.Bad("model", model + ": " + std::strerror(errno), "give a GGUF file or a model directory");
    }
}

}  // namespace

int DoctorMain(int argc, char** argv) {
    std::string model;
    std::string socket_dir = "/tmp";
    int port = 8000;
    int rpc_port = 29550;
    CLI::App app{"What is installed, what would fail.", "rankgate doctor"};
    app.add_option("MODEL", model, "A model to look at as well");
    app.add_option("--port", port, "HTTP port to check")->check(CLI::Range(1, 65535));
    app.add_option("--data-parallel-rpc-port", rpc_port, "Handshake port to check")
        ->check(CLI::Range(1, 65535));
    app.add_option("--socket-dir", socket_dir, "Socket folder to check");
    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
        return ParseFailed(app, error, error.what());
    }
    PrintVersion(std::cout);
    std::cout << '\n';
    Report report;
    report.Ok("cores", std::to_string(std::thread::hardware_concurrency()));
    CheckDescriptors(report);
    CheckPort(report, "HTTP", port);
    CheckPort(report, "handshake", rpc_port);
    CheckSocketDir(report, socket_dir);
#ifdef RANKGATE_HAS_LLAMA
    report.Ok("engine llama", "built in");
#else
    report.Note("engine llama", "not in this build (RANKGATE_WITH_LLAMA=OFF)");
#endif
    for (const char* engine : {"vllm", "tokenspeed"}) {
        const std::string path = FindOnPath(engine);
        if (path.empty()) {
            report.Note(std::string("engine ") + engine,
                        "not on the PATH; serve finds it with --engine-command");
        } else {
            report.Ok(std::string("engine ") + engine, path);
        }
    }
    if (!model.empty()) {
        CheckModel(report, model);
    }
    std::cout << (report.bad() == 0 ? "\nnothing would fail\n"
                                    : "\n" + std::to_string(report.bad()) + " thing(s) would fail\n");
    return report.bad() == 0 ? 0 : 1;
}

}  // namespace rankgate::apps
