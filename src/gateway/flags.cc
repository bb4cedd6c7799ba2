// SPDX-License-Identifier: Apache-2.0
#include "gateway/flags.h"

#include <toml++/toml.h>
#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <map>

#include "base/cli.h"
#include "gateway/gateway.h"

namespace rankgate::gateway {
namespace {

const std::map<std::string, LogLevel> kLogLevels{{"debug", LogLevel::kDebug},
                                                 {"info", LogLevel::kInfo},
                                                 {"warning", LogLevel::kWarning},
                                                 {"error", LogLevel::kError}};
const std::map<std::string, LogFormat> kLogFormats{{"text", LogFormat::kText}, {"json", LogFormat::kJson}};

/// CLI11's own transformer prints the enum's bytes in --help and in its refusal.
template <class Enum>
void AddChoice(CLI::App& app, const std::string& name, Enum& value,
               const std::map<std::string, Enum>& choices, const std::string& what) {
    std::vector<std::string> names;
    names.reserve(choices.size());
    std::string standard;
    for (const auto& [choice, means] : choices) {
        names.push_back(choice);
        if (means == value) {
            standard = choice;
        }
    }
    app.add_option_function<std::string>(
           name, [&value, &choices](const std::string& chosen) { value = choices.at(chosen); }, what)
        ->transform(CLI::IsMember(names, CLI::ignore_case))
        ->default_str(standard);
}

/// Flags of vLLM and of rankgate's plan that do not exist here, with the reason; named instead of "unknown".
const std::map<std::string, std::string>& FlagsToCome() {
    static const std::map<std::string, std::string> flags{
        {"--tool-call-parser", "tool-call parsing is not part of this version"},
        {"--enable-auto-tool-choice", "tool-call parsing is not part of this version"},
        {"--reasoning-parser", "reasoning parsing is not part of this version"},
        {"--policy",
         "routing policies are not part of this version: groups are chosen by model name and load"},
        {"--prefix-routing", "prefix-aware routing is not part of this version"},
        {"--nats", "shared state between gateways is not part of this version"},
        {"--cluster", "shared state between gateways is not part of this version"},
        {"--otlp-traces-endpoint", "trace export is not part of this version"},
        {"--data-parallel-coordinator-address",
         "a coordinator for several gateways on one group is not part of this version; every group belongs "
         "to one gateway"},
    };
    return flags;
}

/// TOML as flag values: "key = value" at the top level, keys as flags are named ('-' and '_' alike), arrays
/// for repeated flags.
class TomlConfig : public CLI::Config {
  public:
    std::string to_config(const CLI::App* /*app*/, bool /*defaults*/, bool /*description*/,
                          std::string /*prefix*/) const override {
        return {};
    }

    std::vector<CLI::ConfigItem> from_config(std::istream& input) const override {
        toml::table table;
        try {
            table = toml::parse(input);
        } catch (const toml::parse_error& error) {
            throw CLI::ConfigError("--config: line " + std::to_string(error.source().begin.line) + ": " +
                                   std::string{error.description()} +
                                   "; allowed is TOML with one key a flag");
        }
        std::vector<CLI::ConfigItem> values;
        for (const auto& [key, node] : table) {
            if (std::string_view{key.str()} == "worker" && node.is_array()) {
                values.push_back(Workers(*node.as_array()));
                continue;
            }
            CLI::ConfigItem item;
            item.name = std::string{key.str()};
            std::replace(item.name.begin(), item.name.end(), '_', '-');
            if (const toml::array* array = node.as_array()) {
                for (const toml::node& element : *array) {
                    item.inputs.push_back(Scalar(item.name, element));
                }
            } else {
                item.inputs.push_back(Scalar(item.name, node));
            }
            values.push_back(std::move(item));
        }
        return values;
    }

  private:
    static std::string Scalar(const std::string& name, const toml::node& node) {
        if (const auto text = node.value_exact<std::string>()) {
            return *text;
        }
        if (const auto flag = node.value_exact<bool>()) {
            return *flag ? "true" : "false";
        }
        if (const auto integer = node.value_exact<std::int64_t>()) {
            return std::to_string(*integer);
        }
        if (const auto real = node.value_exact<double>()) {
            return CLI::detail::to_string(*real);
        }
        throw CLI::ConfigError("--config: " + name +
                               " must be a string, a number, a boolean or an array of those");
    }

    /// [[worker]] tables, or an array of spec strings.
    static CLI::ConfigItem Workers(const toml::array& array) {
        CLI::ConfigItem item;
        item.name = "worker";
        for (const toml::node& element : array) {
            if (const toml::table* table = element.as_table()) {
                std::string spec;
                for (const auto& [key, value] : *table) {
                    spec +=
                        (spec.empty() ? "" : ",") + std::string{key.str()} + "=" + Scalar("worker", value);
                }
                item.inputs.push_back(spec);
            } else {
                item.inputs.push_back(Scalar("worker", element));
            }
        }
        return item;
    }
};

}  // namespace

void AddHttpFlags(CLI::App& app, GatewayOptions& options) {
    app.add_option("MODEL,--model", options.model,
                   "GGUF file, model directory, or a name the engine resolves (with --tokenizer)");
    app.add_option("--tokenizer", options.tokenizer, "Where the tokenizer is, if not with the model");
    app.add_option("--served-model-name", options.served_model_names,
                   "Names clients may use; the first one is shown in replies");
    app.add_option("--chat-template", options.chat_template,
                   "File or text that replaces the model's chat template");
    app.add_option("--max-model-len", options.max_model_len,
                   "Longest prompt plus answer, in tokens; caps what the engines say")
        ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 31));
    app.add_option("--host", options.host, "Address or name to listen on")->capture_default_str();
    app.add_option("--port", options.port, "TCP port; 0 = any free one")
        ->check(CLI::Range(0, 65535))
        ->capture_default_str();
    app.add_option("--uds", options.uds, "Path of a Unix socket to listen on; replaces TCP");
    app.add_option("--ssl-certfile", options.ssl_certfile, "PEM certificate chain: serve HTTPS")
        ->check(CLI::ExistingFile);
    app.add_option("--ssl-keyfile", options.ssl_keyfile, "PEM private key")->check(CLI::ExistingFile);
    app.add_option("--api-key", options.api_keys, "Keys of which clients must send one")
        ->envname("RANKGATE_API_KEY");
    app.add_option("--allowed-origins", options.allowed_origins,
                   "Origins that browsers may call from; * = any (default: none)");
    app.add_option("--http-threads", options.http_threads, "HTTP shards; default: cores - 1, at least 1")
        ->check(CLI::Range(1, 256));
    app.add_option("--prepare-threads", options.prepare_threads, "Threads for templates and long prompts")
        ->check(CLI::Range(1, 256));
    app.add_flag("--debug-headers", options.debug_headers, "Answer with X-Rankgate-Rank");
    app.add_option("--max-body-bytes", options.max_body_bytes, "Largest request body")
        ->check(CLI::Range(std::int64_t{1024}, std::int64_t{1} << 32))
        ->capture_default_str();
    app.add_option("--max-held-bytes", options.max_held_bytes,
                   "Bytes kept for a client that does not read its stream")
        ->check(CLI::Range(std::int64_t{4096}, std::int64_t{1} << 32))
        ->capture_default_str();
    app.add_option("--max-in-flight", options.max_in_flight,
                   "Choices that may be with the engines at once; above: 429")
        ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 24))
        ->capture_default_str();
    app.add_option("--max-prepare-queue", options.max_prepare_queue,
                   "Requests that may wait to be tokenized; above: 429")
        ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20))
        ->capture_default_str();
    app.add_option("--request-timeout", options.request_timeout_seconds,
                   "Seconds after which a request is ended with an error; 0 = never")
        ->check(NumberWithin(0, 1e6))
        ->capture_default_str();
    app.add_option("--keep-alive", options.keep_alive_seconds, "Seconds an idle connection is kept")
        ->check(NumberWithin(1, 86400))
        ->capture_default_str();
    app.add_option("--shutdown-timeout", options.shutdown_timeout_seconds,
                   "Seconds that streams may take to end after SIGTERM")
        ->check(NumberWithin(0, 86400))
        ->capture_default_str();
    AddChoice(app, "--log-level", options.log_level, kLogLevels, "Least severe lines that are written");
    AddChoice(app, "--log-format", options.log_format, kLogFormats, "Of the lines on stderr");
    app.final_callback([&app, &options] {
        if (!options.uds.empty() && app.get_option("--host")->count() == 0 &&
            app.get_option("--port")->count() == 0) {
            options.host.clear();  // a Unix socket alone, unless TCP is asked for as well
        }
    });
    app.config_formatter(std::make_shared<TomlConfig>());
    app.set_config("--config", "", "TOML file; its keys are flag names, flags win over it");
    app.allow_config_extras(CLI::config_extras_mode::error);
}

void AddEngineFlags(CLI::App& app, GatewayOptions& options) {
    app.add_option("--socket-dir", options.socket_dir,
                   "Directory of the engine sockets (0700); stable = engines survive a restart");
    app.add_option("--runtime", options.runtime,
                   "What the engines speak: auto (the first that registers says), vllm or tokenspeed")
        ->check(CLI::IsMember({"auto", "vllm", "tokenspeed"}))
        ->capture_default_str();
    app.add_option("--data-parallel-size,--zmq-engine-count", options.data_parallel_size,
                   "Engine ranks in the group")
        ->check(CLI::Range(1, 1024))
        ->capture_default_str();
    app.add_option("--data-parallel-address", options.data_parallel_address,
                   "Handshake address that engines dial")
        ->capture_default_str();
    app.add_option("--data-parallel-rpc-port", options.data_parallel_rpc_port,
                   "Handshake port; 0 = any free one")
        ->check(CLI::Range(0, 65535))
        ->capture_default_str();
    app.add_flag("--allow-remote-engines", options.allow_remote_engines,
                 "Accept a handshake address that is not loopback: whoever reaches it can act as an engine");
    app.add_option_function<std::vector<std::string>>(
           "--worker",
           [&options](const std::vector<std::string>& specs) {
               for (const std::string& spec : specs) {
                   auto worker = ParseWorkerSpec(spec);
                   if (!worker) {
                       throw CLI::ValidationError(worker.error().message);
                   }
                   options.workers.push_back(std::move(*worker));
               }
           },
           "One engine group: name=..,model=..,runtime=..,dp_size=..,address=..,rpc_port=..,socket_dir=.. "
           "(repeatable)")
        ->take_all();
}

std::string FlagMessage(const CLI::ParseError& error) {
    // CLI11 names neither the flag nor what is allowed in these two; the only file it opens is the
    // configuration.
    const std::string text = error.what();
    constexpr std::string_view kUnknownKey = "INI was not able to parse ";
    if (text.starts_with(kUnknownKey)) {
        return "--config: unknown key '" + text.substr(kUnknownKey.size()) +
               "'; keys are the names of flags (see --help) or [[worker]]";
    }
    if (dynamic_cast<const CLI::FileError*>(&error) != nullptr) {
        return "--config: " + text.substr(0, text.find(" was not readable")) +
               " cannot be read; it must be a TOML file";
    }
    return text;
}

Result<GatewayOptions> ParseGatewayArgs(int argc, char** argv, int& exit_code) {
    exit_code = -1;
    GatewayOptions options;
    for (int i = 1; i < argc; ++i) {
        const std::string argument{argv[i]};
        const std::string flag = argument.substr(0, argument.find('='));
        if (const auto found = FlagsToCome().find(flag); found != FlagsToCome().end()) {
            return Error::Invalid(flag, flag + ": " + found->second);
        }
    }
    CLI::App app{"The HTTP side alone; engines are started by others and dial in.", "rankgate gateway"};
    AddHttpFlags(app, options);
    AddEngineFlags(app, options);
    try {
        app.parse(argc, argv);
    } catch (const CLI::CallForHelp& help) {
        exit_code = app.exit(help);
        return options;
    } catch (const CLI::ParseError& error) {
        return Error::Invalid("", FlagMessage(error));
    }
    if (options.model.empty()) {
        return Error::Invalid(
            "MODEL", "MODEL is missing: give a GGUF file or a model directory (or ':bytes:' for tests)");
    }
    if (const Status status = Validate(options); !status) {
        return status.error();
    }
    return options;
}

}  // namespace rankgate::gateway
