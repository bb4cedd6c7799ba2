// SPDX-License-Identifier: Apache-2.0
#include "launch/serve.h"

#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <thread>

#include "base/cli.h"
#include "base/log.h"
#include "base/utf8.h"
#include "gateway/flags.h"
#include "gateway/gateway.h"
#include "launch/engine_args.h"
#include "launch/port_plan.h"
#include "launch/supervisor.h"

namespace rankgate::launch {
namespace {

using gateway::kExitEngineDied;
using gateway::kExitFailure;
using gateway::kExitInterrupted;
using gateway::kExitOk;
using gateway::kExitUsage;
using std::chrono::milliseconds;

/// How often the state of the ranks is looked at, and said when it changed, while they load.
constexpr milliseconds kPollInterval{50};
/// Progress is repeated at least this often, so that a long load is not mistaken for a hang.
constexpr std::chrono::seconds kProgressInterval{10};
constexpr milliseconds kSameSignal{500};
constexpr int kMaxReplicas = 256;
/// First --port of launched TokenSpeed engines.
constexpr int kTokenSpeedBasePort = 31'000;

struct ServeOptions {
    gateway::GatewayOptions gateway;
    std::string engine;          // "" = guessed from the model
    std::string engine_command;  // program and leading arguments instead of the default one
    int replicas{1};
    int data_parallel_size{0};  // 0 = not given
    int tensor_parallel_size{0};
    std::int64_t max_num_seqs{0};
    std::vector<std::string> engine_flags;  // behind --
};

struct Plan {
    EngineRequest request;
    EngineFlags flags;
    Lockstep lockstep{Lockstep::kDense};
    std::vector<TokenSpeedWorker> tokenspeed;  // one a replica
};

std::string SelfPath() {
    std::array<char, PATH_MAX> buffer{};
    const ssize_t size = ::readlink("/proc/self/exe", buffer.data(), buffer.size() - 1);
    return size > 0 ? std::string(buffer.data(), static_cast<std::size_t>(size)) : std::string("rankgate");
}

bool LooksLikeGguf(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::array<char, 4> magic{};
    return file.read(magic.data(), magic.size()) && std::string_view(magic.data(), magic.size()) == "GGUF";
}

std::vector<std::string> SplitWords(const std::string& text) {
    std::vector<std::string> words;
    std::string word;
    for (const char c : text + " ") {
        if (c != ' ') {
            word += c;
        } else if (!word.empty()) {
            words.push_back(std::move(word));
            word.clear();
        }
    }
    return words;
}

/// Everything that can be refused before a socket is bound or a process started.
Result<Plan> MakePlan(ServeOptions& options) {
    Plan plan;
    EngineRequest& request = plan.request;
    request.model = options.gateway.model;
    if (request.model.empty()) {
        return Error::Invalid("MODEL", "MODEL is missing: give a GGUF file, a model directory or a name");
    }
    if (options.engine.empty()) {
        options.engine = LooksLikeGguf(request.model) ? "llama" : "vllm";
    }
    if (options.engine == "llama") {
        request.kind = EngineKind::kLlama;
        request.program = {SelfPath(), "engine"};
    } else if (options.engine == "vllm") {
        request.kind = EngineKind::kVllm;
        request.program = {"vllm", "serve"};
    } else {
        request.kind = EngineKind::kTokenSpeed;
        request.program = {"tokenspeed", "serve"};
    }
    if (!options.engine_command.empty()) {
        request.program = SplitWords(options.engine_command);
    }
    if (request.kind == EngineKind::kLlama && !LooksLikeGguf(request.model) &&
        std::find(options.engine_flags.begin(), options.engine_flags.end(), "--runner") ==
            options.engine_flags.end()) {
        return Error::Invalid("MODEL", "MODEL '" + request.model +
                                           "' is not a GGUF file; --engine llama needs one "
                                           "(a model directory is served with --engine vllm)");
    }
    plan.flags = SplitEngineFlags(request.kind, options.engine_flags);

    // The group size: serve's own flag wins over the engine-level one behind --, and says so.
    request.data_parallel_size = plan.flags.data_parallel_size.value_or(1);
    if (options.data_parallel_size > 0) {
        if (plan.flags.data_parallel_size && *plan.flags.data_parallel_size != options.data_parallel_size) {
            plan.flags.warnings.push_back("--data-parallel-size " +
                                          std::to_string(*plan.flags.data_parallel_size) +
                                          " behind -- loses against serve's own --data-parallel-size " +
                                          std::to_string(options.data_parallel_size));
        }
        request.data_parallel_size = options.data_parallel_size;
    }
    request.tensor_parallel_size = options.tensor_parallel_size > 0 ? options.tensor_parallel_size : 1;
    if (options.gateway.max_model_len > 0) {
        request.max_model_len = options.gateway.max_model_len;
    }
    if (options.max_num_seqs > 0) {
        request.max_num_seqs = options.max_num_seqs;
    }
    if (const Status groupable = CheckGroupable(request); !groupable.ok()) {
        return groupable.error();
    }
    plan.lockstep = request.kind == EngineKind::kVllm ? LockstepOf(request.model) : Lockstep::kDense;

    std::vector<std::string> handshake_paths;
    for (int replica = 0; replica < options.replicas; ++replica) {
        gateway::WorkerSpec worker;
        worker.name = "group" + std::to_string(replica);
        worker.dp_size = request.data_parallel_size;
        worker.runtime = request.kind == EngineKind::kTokenSpeed ? "tokenspeed" : "vllm";
        worker.rpc_port = 0;  // allocated by the kernel at bind: no two servers can meet
        if (!options.gateway.socket_dir.empty()) {
            worker.socket_dir = options.gateway.socket_dir + (options.replicas > 1 ? "/" + worker.name : "");
        }
        if (request.kind == EngineKind::kTokenSpeed) {
            const std::string dir =
                worker.socket_dir.empty()
                    ? "/tmp/rankgate-" + std::to_string(::getuid()) + "-" + std::to_string(::getpid())
                    : worker.socket_dir;
            handshake_paths.push_back(dir + "/" + worker.name);
        }
        options.gateway.workers.push_back(std::move(worker));
    }
    if (request.kind == EngineKind::kTokenSpeed) {
        auto workers = PlanTokenSpeed(kTokenSpeedBasePort, options.replicas, request.data_parallel_size,
                                      handshake_paths, PortBusy);
        if (!workers.ok()) {
            return workers.error();
        }
        plan.tokenspeed = std::move(*workers);
        for (std::size_t i = 0; i < plan.tokenspeed.size(); ++i) {
            options.gateway.workers[i].rpc_port =
                static_cast<std::uint16_t>(plan.tokenspeed[i].handshake_port);
        }
    }
    return plan;
}

int PortOf(const std::string& address) {
    const std::size_t colon = address.rfind(':');
    return colon == std::string::npos ? 0 : std::atoi(address.c_str() + colon + 1);
}

Result<std::vector<ProcessSpec>> MakeProcesses(const ServeOptions& options, const Plan& plan,
                                               const std::vector<std::string>& handshake_addresses) {
    std::vector<ProcessSpec> specs;
    const int tensor =
        std::max(plan.request.tensor_parallel_size, plan.flags.tensor_parallel_size.value_or(1));
    const int per_replica = plan.request.data_parallel_size * tensor;
    for (int replica = 0; replica < options.replicas; ++replica) {
        const auto index = static_cast<std::size_t>(replica);
        const int port = PortOf(handshake_addresses[index]);
        const auto commands =
            plan.request.kind == EngineKind::kTokenSpeed
                ? BuildTokenSpeedCommands(plan.request, plan.flags, port, plan.tokenspeed[index].port)
                : BuildCommands(plan.request, plan.flags, port, plan.lockstep);
        for (const EngineCommand& command : commands) {
            ProcessSpec spec;
            const std::string group = options.replicas > 1 ? "group " + std::to_string(replica) + " " : "";
            spec.name =
                group + (command.ranks > 1 ? "ranks " + std::to_string(command.first_rank) + "-" +
                                                 std::to_string(command.first_rank + command.ranks - 1)
                                           : "rank " + std::to_string(command.first_rank));
            spec.argv = command.argv;
            if (plan.request.kind == EngineKind::kLlama) {
                // ggml's default of waiting threads burns the cores that the gateway and the other ranks
                // need.
                spec.environment.emplace_back("OMP_WAIT_POLICY", "passive");
            } else {
                const auto slice =
                    GpuSlice(::getenv("CUDA_VISIBLE_DEVICES"),
                             replica * per_replica + command.first_rank * tensor, command.ranks * tensor);
                if (!slice.ok()) {
                    return slice.error();
                }
                if (slice->has_value()) {
                    spec.environment.emplace_back("CUDA_VISIBLE_DEVICES", **slice);
                }
                // With one rank vLLM dials the host in this variable, whatever --data-parallel-address says.
                spec.environment.emplace_back("VLLM_DP_MASTER_IP", "127.0.0.1");
            }
            specs.push_back(std::move(spec));
        }
    }
    return specs;
}

/// "group 0: rank 0 live, rank 1 initialised"; changes are worth a line.
std::string DescribeRanks(const gateway::Gateway& gateway, int replicas) {
    std::string text;
    for (int replica = 0; replica < replicas; ++replica) {
        const auto snapshot = gateway.Snapshot(replica);
        if (snapshot == nullptr) {
            continue;
        }
        for (const group::RankInfo& rank : snapshot->ranks) {
            text += text.empty() ? "" : ", ";
            text += replicas > 1 ? "group " + std::to_string(replica) + " " : "";
            text += "rank " + std::to_string(rank.rank) + " " + std::string(group::RankStateName(rank.state));
        }
    }
    return text;
}

bool NothingLive(const gateway::Gateway& gateway, int replicas) {
    for (int replica = 0; replica < replicas; ++replica) {
        const auto snapshot = gateway.Snapshot(replica);
        if (snapshot != nullptr && snapshot->live > 0) {
            return false;
        }
    }
    return true;
}

std::string ShellQuoted(const std::string& text) {
    std::string out = "'";
    for (const char c : text) {
        out += c == '\'' ? std::string("'\\''") : std::string(1, c);
    }
    return out + "'";
}

void PrintReady(const gateway::Gateway& gateway, const gateway::GatewayOptions& options) {
    std::string name;
    AppendJsonEscaped(name, options.ServedNames().front());
    const bool unix_socket = !options.uds.empty();
    const std::string url = unix_socket ? "http://localhost" : gateway.url();
    std::string body =
        R"({"model": ")" + name +
        R"(", "temperature": 0, "messages": [{"role": "system", "content": "You are a helpful assistant."}, )"
        R"({"role": "user", "content": "What is the capital of France?"}]})";
    std::string curl = "curl " + std::string(unix_socket ? "--unix-socket " + options.uds + " " : "") +
                       (options.ssl_certfile.empty() ? "" : "-k ") + url +
                       "/v1/chat/completions -H 'Content-Type: application/json'";
    if (!options.api_keys.empty()) {
        curl += " -H \"Authorization: Bearer $RANKGATE_API_KEY\"";
    }
    std::cout << "\nrankgate is ready\n  address  " << (unix_socket ? "unix:" + options.uds : url)
              << "\n  model    " << options.ServedNames().front() << "\n\nTry it:\n  " << curl << " -d "
              << ShellQuoted(body) << "\n\nCtrl-C ends everything.\n"
              << std::endl;
}

enum class Outcome : std::uint8_t { kInterrupted, kTerminated, kEngineDied, kBadFlags };

class Server {
  public:
    Server(ServeOptions options, Plan plan) : options_{std::move(options)}, plan_{std::move(plan)} {}

    int Run() {
        auto created = gateway::Gateway::Create(options_.gateway);
        if (!created.ok()) {
            std::cerr << "rankgate serve: " << created.error().message << '\n';
            return gateway::ExitOf(created.error());
        }
        gateway_ = std::move(*created);
        if (const Status started = gateway_->Start(); !started.ok()) {
            std::cerr << "rankgate serve: " << started.error().message << '\n';
            return gateway::ExitOf(started.error());
        }
        auto specs = MakeProcesses(options_, plan_, gateway_->handshake_addresses());
        if (!specs.ok()) {
            std::cerr << "rankgate serve: " << specs.error().message << '\n';
            return kExitUsage;
        }
        if (plan_.request.kind == EngineKind::kVllm && plan_.lockstep != Lockstep::kDense) {
            for (ProcessSpec& spec : *specs) {
                spec.restart_group = 0;
            }
        }
        Supervisor supervisor(std::move(*specs), {}, [this](const Supervisor::Exit& exit) { OnExit(exit); });
        if (const Status started = supervisor.Start(); !started.ok()) {
            std::cerr << "rankgate serve: " << started.error().message << '\n';
            if (!options_.engine_command.empty()) {
                std::cerr << "  --engine-command '" << options_.engine_command << "' is to name a program\n";
                return gateway::ExitOf(started.error());
            }
            if (plan_.request.kind != EngineKind::kLlama) {
                std::cerr << "  put '" << plan_.request.program.front()
                          << "' on the PATH, or name it with --engine-command\n";
            }
            return kExitFailure;
        }
        const Outcome outcome = Loop(supervisor);
        LogInfo("shutting_down", {{"timeout_seconds", options_.gateway.shutdown_timeout_seconds}});
        gateway_->BeginShutdown();
        WatchForSecondSignal();
        const bool clean = gateway_->WaitForShutdown();
        finished_ = true;
        supervisor.Stop();
        if (outcome == Outcome::kEngineDied) {
            return kExitEngineDied;
        }
        if (outcome == Outcome::kBadFlags) {
            return kExitUsage;
        }
        if (outcome == Outcome::kInterrupted) {
            return kExitInterrupted;
        }
        return clean ? kExitOk : kExitFailure;
    }

    /// Blocks the signals that Loop waits for; call before any thread is started.
    static void BlockSignals() {
        const sigset_t set = gateway::StopSignals();
        ::pthread_sigmask(SIG_BLOCK, &set, nullptr);
        ::signal(SIGPIPE, SIG_IGN);
    }

  private:
    void OnExit(const Supervisor::Exit& exit) {
        if (!exit.restarting) {
            LogError("engine_given_up",
                     {{"name", exit.name}, {"how", exit.how}, {"serving", was_ready_.load()}});
            // Our own engine names the flag that it refuses, and its flags came from our command line.
            refused_flags_ = refused_flags_ || (plan_.request.kind == EngineKind::kLlama && !was_ready_ &&
                                                exit.how == "exit status " + std::to_string(kExitUsage));
            gave_up_ = true;
        }
    }

    Outcome Loop(Supervisor& supervisor) {
        const sigset_t set = gateway::StopSignals();
        std::string said;
        auto said_at = std::chrono::steady_clock::now();
        for (;;) {
            const timespec wait{0,
                                std::chrono::duration_cast<std::chrono::nanoseconds>(kPollInterval).count()};
            const int signal = ::sigtimedwait(&set, nullptr, &wait);
            if (signal > 0) {
                return signal == SIGINT ? Outcome::kInterrupted : Outcome::kTerminated;
            }
            // A rank that is given up while others serve is loud in the log and in /health; the service goes
            // on.
            if (gave_up_ && (!was_ready_ || NothingLive(*gateway_, options_.replicas))) {
                std::cerr << (refused_flags_
                                  ? "rankgate serve: the engine refused a flag; its line above says which\n"
                                  : "rankgate serve: the engine died; its last lines are above\n");
                return refused_flags_ ? Outcome::kBadFlags : Outcome::kEngineDied;
            }
            if (was_ready_) {
                continue;
            }
            if (gateway_->ready()) {
                was_ready_ = true;
                supervisor.SetServing();
                PrintReady(*gateway_, options_.gateway);
                continue;
            }
            const auto now = std::chrono::steady_clock::now();
            std::string state = DescribeRanks(*gateway_, options_.replicas);
            if (state != said || now - said_at >= kProgressInterval) {
                LogInfo("waiting_for_engines", {{"ranks", state}});
                said = std::move(state);
                said_at = now;
            }
        }
    }

    /// A second Ctrl-C does not wait for the drain. Wrappers forward the signal that their group got as well:
    /// what comes within kSameSignal of the first is that one again.
    static void WatchForSecondSignal() {
        std::thread([begun = std::chrono::steady_clock::now()] {
            const sigset_t set = gateway::StopSignals();
            int signal = 0;
            while (::sigwait(&set, &signal) == 0 && !finished_) {
                if (std::chrono::steady_clock::now() - begun < kSameSignal) {
                    continue;
                }
                LogWarning("second_signal", {{"signal", signal}});
                // The children follow by their death signal.
                ::_exit(kExitInterrupted);
            }
        }).detach();
    }

    ServeOptions options_;
    Plan plan_;
    std::unique_ptr<gateway::Gateway> gateway_;
    std::atomic<bool> gave_up_{false};
    std::atomic<bool> refused_flags_{false};  // written before gave_up_
    std::atomic<bool> was_ready_{false};
    // Static: the detached watcher may outlive this object by a moment.
    static inline std::atomic<bool> finished_{false};
};

}  // namespace

int ServeMain(int argc, char** argv) {
    ServeOptions options;
    // Everything behind the first "--" is the engine's; CLI11 never sees it.
    int own = argc;
    for (int i = 1; i < argc; ++i) {
        if (std::string_view(argv[i]) == "--") {
            own = i;
            options.engine_flags.assign(argv + i + 1, argv + argc);
            break;
        }
    }
    CLI::App app{"Starts engines and the gateway, and supervises both.", "rankgate serve"};
    gateway::AddHttpFlags(app, options.gateway);
    app.add_option("--engine", options.engine, "Engine to start; guessed from MODEL: a GGUF file means llama")
        ->check(CLI::IsMember({"llama", "vllm", "tokenspeed"}));
    app.add_option("--engine-command", options.engine_command,
                   "Program and leading arguments of the engine, e.g. '/opt/venv/bin/vllm serve'");
    app.add_option("--data-parallel-size", options.data_parallel_size, "Ranks in ONE group")
        ->check(CLI::Range(1, 1024))
        ->default_str("1");
    app.add_option("--replicas", options.replicas, "Groups to start")
        ->check(CLI::Range(1, kMaxReplicas))
        ->capture_default_str();
    app.add_option("--tensor-parallel-size", options.tensor_parallel_size,
                   "Tensor-parallel ranks of each engine rank")
        ->check(CLI::Range(1, 1024))
        ->default_str("1");
    app.add_option("--max-num-seqs", options.max_num_seqs,
                   "Sequences a rank runs at once (passed to the engine)")
        ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20));
    app.add_option(
        "--socket-dir", options.gateway.socket_dir,
        "Folder of the engine sockets; with a fixed one a restarted gateway finds its engines again");
    app.footer("Flags behind -- go to the engine: rankgate serve MODEL --engine vllm -- --dtype bfloat16");
    try {
        app.parse(own, argv);
    } catch (const CLI::ParseError& error) {
        return ParseFailed(app, error, gateway::FlagMessage(error));
    }
    InitLog(options.gateway.log_level, options.gateway.log_format);
    Server::BlockSignals();
    ::unsetenv(
        "VLLM_DP_SIZE");  // they would turn the engines into something else (vLLM reads them with one rank)
    ::unsetenv("VLLM_DP_RANK");
    auto plan = MakePlan(options);
    if (!plan.ok()) {
        std::cerr << "rankgate serve: " << plan.error().message << '\n';
        return kExitUsage;
    }
    for (const std::string& warning : plan->flags.warnings) {
        LogWarning("engine_flag", {{"what", warning}});
    }
    if (const Status valid = gateway::Validate(options.gateway); !valid.ok()) {
        std::cerr << "rankgate serve: " << valid.error().message << '\n';
        return kExitUsage;
    }
    return Server(std::move(options), std::move(*plan)).Run();
}

}  // namespace rankgate::launch
