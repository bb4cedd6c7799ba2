// SPDX-License-Identifier: Apache-2.0
#include "gateway/flags.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace rankgate::gateway {
namespace {

Result<GatewayOptions> Parse(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "gateway");
    std::vector<char*> argv;
    for (std::string& argument : arguments) {
        argv.push_back(argument.data());
    }
    int exit_code = -1;
    return ParseGatewayArgs(static_cast<int>(argv.size()), argv.data(), exit_code);
}

class TempFile {
  public:
    explicit TempFile(const std::string& text)
        : path_{std::filesystem::temp_directory_path() /
                ("rg-flags-" + std::to_string(::getpid()) + ".toml")} {
        std::ofstream{path_} << text;
    }
    ~TempFile() { std::filesystem::remove(path_); }
    std::string path() const { return path_; }

  private:
    std::filesystem::path path_;
};

TEST(Flags, ReadsEveryKind) {
    const auto options = Parse({"model.gguf",
                                "--port",
                                "0",
                                "--host=::1",
                                "--served-model-name",
                                "a",
                                "b",
                                "--api-key",
                                "k1",
                                "--api-key",
                                "k2",
                                "--zmq-engine-count",
                                "4",
                                "--data-parallel-rpc-port",
                                "1234",
                                "--log-level",
                                "warning",
                                "--log-format",
                                "json",
                                "--shutdown-timeout",
                                "2.5",
                                "--debug-headers"});
    ASSERT_TRUE(options.ok()) << options.error().message;
    EXPECT_EQ(options->model, "model.gguf");
    EXPECT_EQ(options->host, "::1");
    EXPECT_EQ(options->ServedNames(), (std::vector<std::string>{"a", "b"}));
    EXPECT_EQ(options->api_keys, (std::vector<std::string>{"k1", "k2"}));
    EXPECT_EQ(options->data_parallel_size, 4);
    EXPECT_EQ(options->data_parallel_rpc_port, 1234);
    EXPECT_EQ(options->log_level, LogLevel::kWarning);
    EXPECT_EQ(options->log_format, LogFormat::kJson);
    EXPECT_EQ(options->shutdown_timeout_seconds, 2.5);
    EXPECT_TRUE(options->debug_headers);
    ASSERT_EQ(options->Groups().size(), 1U);
    EXPECT_EQ(options->Groups()[0].dp_size, 4);
}

TEST(Flags, ErrorsNameTheFlagTheValueAndWhatIsAllowed) {
    const auto message = [](std::vector<std::string> arguments) {
        arguments.insert(arguments.begin(), "m");
        const auto options = Parse(std::move(arguments));
        return options.ok() ? std::string{"accepted"} : options.error().message;
    };
    std::string text = message({"--port", "70000"});
    EXPECT_NE(text.find("--port"), std::string::npos) << text;
    EXPECT_NE(text.find("70000"), std::string::npos) << text;
    EXPECT_NE(text.find("65535"), std::string::npos) << text;
    text = message({"--runtime", "sglang"});
    EXPECT_NE(text.find("--runtime"), std::string::npos) << text;
    EXPECT_NE(text.find("tokenspeed"), std::string::npos) << text;
    EXPECT_NE(message({"--frobnicate"}).find("--frobnicate"), std::string::npos);
    EXPECT_NE(message({"--tool-call-parser", "hermes"}).find("--tool-call-parser"), std::string::npos);
    EXPECT_NE(message({"--data-parallel-coordinator-address=tcp://x"}).find("coordinator"),
              std::string::npos);
    EXPECT_NE(message({"--worker", "dp_size=2,rank=0"}).find("ONE worker"), std::string::npos);
    EXPECT_NE(message({"--worker", "dp_size=x"}).find("1024"), std::string::npos);
    EXPECT_NE(message({"--worker", "name=a,rpc_port=5", "--worker", "name=a,rpc_port=6"}).find("'a'"),
              std::string::npos);
    EXPECT_NE(
        message({"--worker", "rpc_port=5", "--worker", "rpc_port=5"}).find("share the handshake address"),
        std::string::npos);
    EXPECT_NE(message({"--data-parallel-address", "10.1.2.3"}).find("--allow-remote-engines"),
              std::string::npos);
    EXPECT_EQ(message({"--data-parallel-address", "10.1.2.3", "--allow-remote-engines"}), "accepted");
    EXPECT_NE(message({"--log-level", "loud"}).find("--log-level"), std::string::npos);
    for (const std::string& said : {message({"--log-level", "loud"}), message({"--log-format", "xml"})}) {
        EXPECT_TRUE(std::all_of(said.begin(), said.end(), [](char c) { return c == '\n' || c >= ' '; }))
            << said;
        EXPECT_EQ(said.find("->"), std::string::npos) << "names only: " << said;
    }
    EXPECT_NE(message({"--ssl-certfile", "/nonexistent"}).find("/nonexistent"), std::string::npos);
    EXPECT_FALSE(Parse({}).ok());
}

TEST(Flags, SecondsAreNumbersWithinBounds) {
    for (const char* flag : {"--shutdown-timeout", "--request-timeout", "--keep-alive"}) {
        EXPECT_TRUE(Parse({"m", flag, "1.5"}).ok()) << flag;
        for (const char* bad : {"nan", "-nan", "inf", "-1", "1e9", "x", ""}) {
            const auto options = Parse({"m", flag, bad});
            ASSERT_FALSE(options.ok()) << flag << ' ' << bad;
            EXPECT_NE(options.error().message.find(flag), std::string::npos) << options.error().message;
        }
    }
}

TEST(Flags, TomlFileWithFlagsOnTop) {
    const TempFile file{
        "model = \"x.gguf\"\nport = 9000\nserved-model-name = [\"a\", \"b\"]\napi_key = "
        "\"k\"\nshutdown-timeout = 1.5\n"
        "debug-headers = true\nlog_level = \"debug\"\n[[worker]]\nname = \"w\"\ndp_size = 3\nrpc_port = "
        "7000\n"};
    const auto options = Parse({"--config", file.path(), "--port", "9001"});
    ASSERT_TRUE(options.ok()) << options.error().message;
    EXPECT_EQ(options->model, "x.gguf");
    EXPECT_EQ(options->port, 9001);
    EXPECT_EQ(options->served_model_names, (std::vector<std::string>{"a", "b"}));
    EXPECT_EQ(options->api_keys, (std::vector<std::string>{"k"}));
    EXPECT_EQ(options->shutdown_timeout_seconds, 1.5);
    EXPECT_TRUE(options->debug_headers);
    EXPECT_EQ(options->log_level, LogLevel::kDebug);
    ASSERT_EQ(options->workers.size(), 1U);
    EXPECT_EQ(options->workers[0].dp_size, 3);
}

TEST(Flags, BadTomlNamesTheLineAndUnknownKeys) {
    {
        const TempFile file{"port = 1\nport = = 2\n"};
        const auto options = Parse({"m", "--config", file.path()});
        ASSERT_FALSE(options.ok());
        EXPECT_NE(options.error().message.find("line 2"), std::string::npos) << options.error().message;
    }
    const TempFile file{"prot = 1\n"};
    const auto options = Parse({"m", "--config", file.path()});
    ASSERT_FALSE(options.ok());
    EXPECT_NE(options.error().message.find("prot"), std::string::npos) << options.error().message;
    EXPECT_NE(options.error().message.find("--config"), std::string::npos) << options.error().message;
    EXPECT_EQ(options.error().message.find("INI"), std::string::npos) << options.error().message;
    const auto missing = Parse({"m", "--config", "/nonexistent.toml"});
    ASSERT_FALSE(missing.ok());
    EXPECT_NE(missing.error().message.find("--config: /nonexistent.toml"), std::string::npos)
        << missing.error().message;
}

TEST(Flags, ApiKeyFromTheEnvironment) {
    ::setenv("RANKGATE_API_KEY", "from-env", 1);
    const auto options = Parse({"m"});
    const auto flag_wins = Parse({"m", "--api-key", "from-flag"});
    ::unsetenv("RANKGATE_API_KEY");
    ASSERT_TRUE(options.ok() && flag_wins.ok());
    EXPECT_EQ(options->api_keys, (std::vector<std::string>{"from-env"}));
    EXPECT_EQ(flag_wins->api_keys, (std::vector<std::string>{"from-flag"}));
}

TEST(Flags, AUnixSocketReplacesTcpUnlessBothAreAskedFor) {
    const auto alone = Parse({"m", "--uds", "/tmp/x.sock"});
    const auto both = Parse({"m", "--uds", "/tmp/x.sock", "--port", "8001"});
    ASSERT_TRUE(alone.ok() && both.ok());
    EXPECT_TRUE(alone->host.empty());
    EXPECT_FALSE(both->host.empty());
}

}  // namespace
}  // namespace rankgate::gateway
