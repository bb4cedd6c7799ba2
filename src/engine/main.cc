// SPDX-License-Identifier: Apache-2.0
#include "engine/main.h"

#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/cli.h"
#include "base/clock.h"
#include "base/hangup.h"
#include "base/log.h"
#include "engine/rank.h"
#include "engine/script_runner.h"
#include "engine/sim_runner.h"
#include "engine/tensor_parallel.h"
#ifdef RANKGATE_HAVE_LLAMA
#include "engine/llama_runner.h"
#endif

namespace rankgate::engine {

namespace {

std::atomic<int> g_stop{0};

extern "C" void OnStopSignal(int number) {
    g_stop.store(number);
    Rank::WakeFromSignal();
}

struct Options {
    std::string model;
    std::string wire{"vllm"};
    std::string runner{"auto"};
    std::int32_t data_parallel_size{1};
    std::int32_t data_parallel_rank{0};
    std::int32_t tensor_parallel_size{1};
    std::int32_t tensor_parallel_rank{0};
    std::string relay_where;
    std::uint64_t relay_epoch{0};
    double tensor_parallel_join_s{120};
    double tensor_parallel_stall_s{30};
    std::vector<std::string> arguments;  // as given, for the followers
    std::string address{"127.0.0.1"};
    std::int32_t port{29550};
    std::int32_t base_index{0};
    std::string served_model_name;
    std::int64_t max_model_len{0};
    std::int32_t max_num_seqs{0};
    std::int32_t max_num_batched_tokens{0};
    std::int32_t block_size{16};
    std::int64_t num_gpu_blocks{0};
    std::int32_t threads{0};
    bool no_prefix_caching{false};
    double sim_prefill_tps{0};
    double sim_step_us{0};
    double sim_step_us_per_seq{0};
    std::int64_t sim_eos_after{0};
    std::int32_t vocab_size{0};
    TokenId first_token{300};
    TokenId last_token{8000};
    TokenId eos_token{2};
    std::string script;
    std::string script_socket;
    std::string load_page_dir;
    bool no_load_page{false};
    bool stale_load{false};
    double handshake_timeout_s{0};
    double away_timeout_s{60};
    std::string log_level{"info"};
    std::string log_format{"text"};
};

void Describe(CLI::App& app, Options& o) {
    app.option_defaults()->take_last();  // a launcher's flag, then the user's
    app.description("One engine rank that dials a gateway (or any vLLM / TokenSpeed frontend).");
    app.add_option("model", o.model, "GGUF file (runner llama); for sim and script only a name")->required();
    app.add_option("--wire", o.wire, "Dialect of the frontend")
        ->check(CLI::IsMember({"vllm", "tokenspeed"}))
        ->capture_default_str();
    app.add_option("--runner", o.runner, "llama, sim or script; auto = llama")
        ->check(CLI::IsMember({"auto", "llama", "sim", "script"}))
        ->capture_default_str();
    app.add_option("--data-parallel-size", o.data_parallel_size, "Ranks in the group")
        ->check(CLI::Range(1, 65536))
        ->capture_default_str();
    app.add_option("--data-parallel-rank", o.data_parallel_rank, "This rank")
        ->check(CLI::Range(0, 65535))
        ->capture_default_str();
    app.add_option("--data-parallel-address", o.address, "The gateway's handshake host")
        ->capture_default_str();
    app.add_option("--data-parallel-rpc-port", o.port, "The gateway's handshake port")
        ->check(CLI::Range(1, 65535))
        ->capture_default_str();
    app.add_option("--zmq-engine-index", o.base_index, "Identity of rank 0 of this group")
        ->check(CLI::Range(0, 65535))
        ->capture_default_str();
    app.add_option("--tensor-parallel-size", o.tensor_parallel_size,
                   "Processes that mirror one rank through the relay")
        ->check(CLI::Range(1, 64))
        ->capture_default_str();
    app.add_option("--tensor-parallel-rank", o.tensor_parallel_rank, "Set by rank 0 for its followers")
        ->check(CLI::Range(0, 63))
        ->group("");
    app.add_option("--relay-where", o.relay_where, "Set by rank 0 for its followers")->group("");
    app.add_option("--relay-epoch", o.relay_epoch, "Set by rank 0 for its followers")->group("");
    app.add_option("--tensor-parallel-join-timeout", o.tensor_parallel_join_s,
                   "Seconds for all tensor-parallel ranks to load and join")
        ->check(NumberWithin(0.001, 86400))
        ->capture_default_str();
    app.add_option("--tensor-parallel-stall-timeout", o.tensor_parallel_stall_s,
                   "Seconds without life after which a tensor-parallel rank ends the engine")
        ->check(NumberWithin(0.05, 86400))
        ->capture_default_str();
    app.add_option("--served-model-name", o.served_model_name, "Name in the log and in the ready response");
    app.add_option("--max-model-len", o.max_model_len,
                   "Context length (0 = the model's, for llama at most 2048)")
        ->check(NumberWithin(0, kMostNumber));
    app.add_option("--max-num-seqs", o.max_num_seqs, "Sequences in a batch (0 = 8 for llama, 256 else)")
        ->check(CLI::Range(0, kMaxSeqs));
    app.add_option("--max-num-batched-tokens", o.max_num_batched_tokens,
                   "Tokens of a step (0 = 128 for llama, 8192 else)")
        ->check(NumberWithin(0, kMostNumber));
    app.add_option("--block-size", o.block_size, "Tokens of a KV page")
        ->check(CLI::Range(1, kMaxBlockSize))
        ->capture_default_str();
    app.add_option("--num-gpu-blocks", o.num_gpu_blocks, "KV pages (0 = max-num-seqs full sequences)")
        ->check(NumberWithin(0, kMostNumber));
    app.add_option("--threads", o.threads, "Threads of the llama runner (0 = max(1, (cores - 1) / ranks))")
        ->check(CLI::Range(0, 1024));
    app.add_flag("--no-enable-prefix-caching", o.no_prefix_caching,
                 "Compute every prompt from its first token");
    app.add_option("--sim-prefill-tps", o.sim_prefill_tps, "sim: prompt tokens a second (0 = instantly)")
        ->check(NumberWithin(0, kMostNumber));
    app.add_option("--sim-step-us", o.sim_step_us, "sim: length of a step in us")
        ->check(NumberWithin(0, kMostNumber));
    app.add_option("--sim-step-us-per-seq", o.sim_step_us_per_seq, "sim: plus this for each sequence in it")
        ->check(NumberWithin(0, kMostNumber));
    app.add_option("--sim-eos-after", o.sim_eos_after, "sim: end with EOS after this many tokens (0 = never)")
        ->check(NumberWithin(0, kMostNumber));
    app.add_option("--sim-vocab-size", o.vocab_size, "sim, script: ids from here on are refused (0 = 49152)")
        ->check(NumberWithin(0, kMostNumber));
    app.add_option("--sim-first-token", o.first_token, "sim: smallest generated id")
        ->check(NumberWithin(0, kMostNumber))
        ->capture_default_str();
    app.add_option("--sim-last-token", o.last_token, "sim: largest generated id")
        ->check(NumberWithin(0, kMostNumber))
        ->capture_default_str();
    app.add_option("--sim-eos-token", o.eos_token, "sim, script: the model's EOS id")
        ->check(NumberWithin(0, kMostNumber))
        ->capture_default_str();
    app.add_option("--script", o.script, "script: file of instructions, one JSON object a line");
    app.add_option("--script-socket", o.script_socket,
                   "script: unix socket that takes instructions at any time");
    app.add_option("--load-page-dir", o.load_page_dir,
                   "Folder (0700) of the shared load page (default: under XDG_RUNTIME_DIR or /tmp)");
    app.add_flag("--no-load-page", o.no_load_page, "Publish no shared load page");
    app.add_flag("--stale-load", o.stale_load,
                 "Test: sample the load before a step's ends are applied, as upstream does")
        ->group("");
    app.add_option("--handshake-timeout", o.handshake_timeout_s,
                   "Seconds to wait for the gateway (0 = 300 vllm, 600 tokenspeed)")
        ->check(NumberWithin(0, kMostNumber));
    app.add_option("--frontend-away-timeout", o.away_timeout_s,
                   "Seconds after which the requests of a vanished frontend are dropped")
        ->check(NumberWithin(kLeastPositive, kMostNumber))
        ->capture_default_str();
    app.add_option("--log-level", o.log_level, "")
        ->check(CLI::IsMember({"debug", "info", "warning", "error"}))
        ->capture_default_str();
    app.add_option("--log-format", o.log_format, "")
        ->check(CLI::IsMember({"text", "json"}))
        ->capture_default_str();
}

int Refuse(const std::string& text) {
    std::cerr << "rankgate engine: " << text << '\n';
    return kExitFlags;
}

std::string DefaultPageDir() {
    const char* runtime = std::getenv("XDG_RUNTIME_DIR");
    const std::string base = runtime != nullptr && runtime[0] == '/' ? std::string{runtime} : "/tmp";
    return base + "/rankgate-" + std::to_string(::geteuid()) + "-load";
}

Result<std::unique_ptr<ModelRunner>> MakeRunner(Options& o, const Clock& clock) {
    ModelFacts facts;
    facts.model_name = o.served_model_name.empty() ? o.model : o.served_model_name;
    facts.dtype = "bfloat16";
    facts.max_model_len = o.max_model_len;
    facts.vocab_size = o.vocab_size > 0 ? o.vocab_size : 49152;
    facts.eos_token_ids = {o.eos_token};
    if (o.runner == "sim") {
        if (o.first_token > o.last_token || o.last_token >= facts.vocab_size) {
            return Error::Invalid(
                "--sim-last-token",
                "--sim-last-token " + std::to_string(o.last_token) +
                    " is not allowed: from --sim-first-token to below the vocabulary size " +
                    std::to_string(facts.vocab_size));
        }
        SimConfig sim;
        sim.model = facts;
        sim.prefill_tps = o.sim_prefill_tps;
        sim.step_us = o.sim_step_us;
        sim.step_us_per_seq = o.sim_step_us_per_seq;
        sim.first_token = o.first_token;
        sim.last_token = o.last_token;
        sim.eos_after = o.sim_eos_after;
        sim.prefix_caching = !o.no_prefix_caching;
        sim.block_size = o.block_size;
        sim.num_blocks = o.num_gpu_blocks;
        sim.max_num_seqs = o.max_num_seqs;
        return std::unique_ptr<ModelRunner>{std::make_unique<SimRunner>(sim, clock, MakeSteadySleeper())};
    }
    if (o.runner == "script") {
        ScriptConfig script;
        script.model = facts;
        script.file = o.script;
        script.socket_path = o.script_socket;
        script.max_num_seqs = o.max_num_seqs;
        auto runner = std::make_unique<ScriptRunner>(script, clock);
        if (Status opened = runner->Open(); !opened.ok()) {
            return opened.error();
        }
        return std::unique_ptr<ModelRunner>{std::move(runner)};
    }
#ifdef RANKGATE_HAVE_LLAMA
    LlamaConfig llama;
    llama.path = o.model;
    llama.max_model_len = o.max_model_len;
    llama.max_num_seqs = o.max_num_seqs;
    llama.max_num_batched_tokens = o.max_num_batched_tokens;
    const auto cores = static_cast<std::int32_t>(std::max(1U, std::thread::hardware_concurrency()));
    llama.threads = o.threads > 0
                        ? o.threads
                        : std::max(1, (cores - 1) / (o.data_parallel_size * o.tensor_parallel_size));
    llama.prefix_caching = !o.no_prefix_caching;
    return MakeLlamaRunner(llama);
#else
    return Error::Invalid("--runner",
                          "--runner llama is not in this build (RANKGATE_WITH_LLAMA=OFF): sim or script");
#endif
}

int Run(Options& o) {
    if (o.data_parallel_rank >= o.data_parallel_size) {
        return Refuse("--data-parallel-rank " + std::to_string(o.data_parallel_rank) +
                      " is not allowed: 0 to " + std::to_string(o.data_parallel_size - 1) +
                      " with --data-parallel-size " + std::to_string(o.data_parallel_size));
    }
    if (o.base_index + o.data_parallel_rank > 65535) {
        return Refuse("--zmq-engine-index " + std::to_string(o.base_index) +
                      " plus the rank is not allowed to exceed 65535");
    }
    if (o.tensor_parallel_rank >= o.tensor_parallel_size) {
        return Refuse("--tensor-parallel-rank must be below --tensor-parallel-size");
    }
    if (o.tensor_parallel_rank > 0 && (o.relay_where.empty() || o.relay_epoch == 0)) {
        return Refuse("--tensor-parallel-rank is not for users: rank 0 starts the others, with it");
    }
    if (o.tensor_parallel_size > 1 && o.runner == "script") {
        return Refuse("--tensor-parallel-size " + std::to_string(o.tensor_parallel_size) +
                      " is not allowed with --runner script: its ranks would not say the same");
    }
    o.runner = o.runner == "auto" ? "llama" : o.runner;
    const bool llama = o.runner == "llama";
    if (llama) {
        std::error_code ignored;
        if (!std::filesystem::is_regular_file(o.model, ignored)) {
            return Refuse("MODEL " + o.model + " is not a readable file: runner llama wants a GGUF file");
        }
        std::array<char, 4> magic{};
        std::ifstream{o.model, std::ios::binary}.read(magic.data(), magic.size());
        if (std::string_view{magic.data(), magic.size()} != "GGUF") {
            return Refuse("MODEL " + o.model + " is no GGUF file, or cannot be read");
        }
    }
    if (!o.script.empty() && o.runner != "script") {
        return Refuse("--script is for --runner script only");
    }
    o.max_num_seqs = o.max_num_seqs > 0 ? o.max_num_seqs : (llama ? 8 : 256);
    o.max_num_batched_tokens = o.max_num_batched_tokens > 0 ? o.max_num_batched_tokens : (llama ? 128 : 8192);
    SchedulerConfig scheduler;
    scheduler.max_num_seqs = o.max_num_seqs;
    scheduler.max_num_batched_tokens = o.max_num_batched_tokens;
    scheduler.block_size = o.block_size;
    scheduler.num_gpu_blocks = o.num_gpu_blocks;
    scheduler.length_before_stop = o.wire == "tokenspeed";
    scheduler.max_model_len = o.max_model_len > 0 ? o.max_model_len : 8192;
    if (Status valid = scheduler.Normalise(); !valid.ok()) {
        return Refuse("--" + valid.error().message);
    }
    const std::int64_t given_blocks = o.num_gpu_blocks;
    o.num_gpu_blocks = scheduler.num_gpu_blocks;
    const SteadyClock clock;
    Result<std::unique_ptr<ModelRunner>> made = MakeRunner(o, clock);
    if (!made.ok()) {
        if (made.error().code == ErrorCode::kInvalidArgument) {
            return Refuse(made.error().message);
        }
        LogError("engine_model_failed", {{"model", o.model}, {"why", made.error().message}});
        return kExitFailure;
    }
    std::unique_ptr<ModelRunner> runner = std::move(made).value();
    if (llama) {
        // Only now the model's own context is known.
        scheduler.max_model_len = runner->facts().max_model_len;
        scheduler.num_gpu_blocks = given_blocks;
        if (Status valid = scheduler.Normalise(); !valid.ok()) {
            return Refuse("--" + valid.error().message);
        }
    }
    struct sigaction action {};
    action.sa_handler = OnStopSignal;
    ::sigemptyset(&action.sa_mask);
    ::sigaction(SIGTERM, &action, nullptr);
    ::sigaction(SIGINT, &action, nullptr);
    if (!HangupIgnored()) {
        ::sigaction(SIGHUP, &action, nullptr);
    }
    ::signal(SIGPIPE, SIG_IGN);

    RankConfig rank;
    rank.dialect = o.wire == "vllm" ? wire::Dialect::kVllm : wire::Dialect::kTokenSpeed;
    const bool v6 = o.address.find(':') != std::string::npos && o.address.front() != '[';
    rank.handshake_address =
        o.address.find("://") != std::string::npos
            ? o.address
            : "tcp://" + (v6 ? "[" + o.address + "]" : o.address) + ":" + std::to_string(o.port);
    rank.base_index = static_cast<std::uint16_t>(o.base_index);
    rank.data_parallel_rank = o.data_parallel_rank;
    rank.data_parallel_size = o.data_parallel_size;
    rank.tensor_parallel_size = o.tensor_parallel_size;
    rank.scheduler = scheduler;
    rank.stale_load = o.stale_load;
    if (!o.no_load_page) {
        rank.load_page_dir = o.load_page_dir.empty() ? DefaultPageDir() : o.load_page_dir;
    }
    const double init_s =
        o.handshake_timeout_s > 0 ? o.handshake_timeout_s : (o.wire == "vllm" ? 300.0 : 600.0);
    rank.init_timeout = std::chrono::duration_cast<Duration>(std::chrono::duration<double>(init_s));
    rank.away_timeout = std::chrono::duration_cast<Duration>(std::chrono::duration<double>(o.away_timeout_s));
    if (o.tensor_parallel_size > 1) {
        TensorParallelConfig tensor;
        tensor.rank = o.tensor_parallel_rank;
        tensor.size = o.tensor_parallel_size;
        tensor.where = o.relay_where;
        tensor.epoch = o.relay_epoch;
        tensor.join_s = o.tensor_parallel_join_s;
        tensor.stall_s = o.tensor_parallel_stall_s;
        tensor.arguments = o.arguments;
        return RunTensorParallel(rank, tensor, *runner, clock, g_stop);
    }
    Rank engine{rank, *runner, clock};
    return engine.Run(g_stop);
}

}  // namespace

int Main(int argc, char** argv) {
    Options options;
    options.arguments.assign(argv + 1, argv + argc);
    CLI::App app{"", "rankgate engine"};
    Describe(app, options);
    try {
        app.parse(argc, argv);
    } catch (const CLI::CallForHelp&) {
        std::cout << app.help();
        return kExitOk;
    } catch (const CLI::ParseError& error) {
        return Refuse(error.what());
    }
    const LogLevel level = options.log_level == "debug"     ? LogLevel::kDebug
                           : options.log_level == "warning" ? LogLevel::kWarning
                           : options.log_level == "error"   ? LogLevel::kError
                                                            : LogLevel::kInfo;
    InitLog(level, options.log_format == "json" ? LogFormat::kJson : LogFormat::kText);
    return Run(options);
}

}  // namespace rankgate::engine
