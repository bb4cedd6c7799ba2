// SPDX-License-Identifier: Apache-2.0
// `rankgate top`: the rank table of a running gateway, redrawn each second from /metrics alone, so that it
// shows what any other reader of the metrics would see.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <thread>

#include "apps/http_client.h"
#include "apps/metrics_text.h"
#include "apps/tools.h"
#include "base/cli.h"

namespace rankgate::apps {
namespace {

struct RankRow {
    std::string state{"?"};
    double in_flight{0};
    double running{0};
    double waiting{0};
    double kv_usage{-1};
    double load_age{-1};
};

std::string Number(double value, const char* format, double scale = 1.0) {
    if (!(value >= 0)) {  // never reported (NaN) or not there
        return "-";
    }
    char text[32];
    std::snprintf(text, sizeof text, format, value * scale);
    return text;
}

void Draw(const std::vector<MetricSample>& samples, double tokens_per_second, bool clear) {
    std::map<std::pair<std::string, std::string>, RankRow> rows;
    double streams = 0;
    double held = 0;
    for (const MetricSample& sample : samples) {
        const auto key = std::make_pair(sample.Label("group"), sample.Label("rank"));
        if (sample.name == "rankgate_in_flight") {
            rows[key].in_flight = sample.value;
        } else if (sample.name == "rankgate_rank_state" && sample.value == 1) {
            rows[key].state = sample.Label("state");
        } else if (sample.name == "rankgate_rank_kv_usage") {
            rows[key].kv_usage = sample.value;
        } else if (sample.name == "rankgate_rank_load_age_seconds") {
            rows[key].load_age = sample.value;
        } else if (sample.name == "rankgate_rank_running") {
            rows[key].running = sample.value;
        } else if (sample.name == "rankgate_rank_waiting") {
            rows[key].waiting = sample.value;
        } else if (sample.name == "rankgate_streams_open") {
            streams = sample.value;
        } else if (sample.name == "rankgate_bytes_held") {
            held = sample.value;
        }
    }
    if (clear) {
        std::cout << "\033[H\033[2J";
    }
    std::printf("streams %.0f   held %.0f kB   tokens/s %s\n\n", streams, held / 1024,
                Number(tokens_per_second, "%.0f").c_str());
    std::printf("%-6s %-5s %-12s %9s %8s %8s %6s %9s\n", "GROUP", "RANK", "STATE", "IN-FLIGHT", "RUNNING",
                "WAITING", "KV %", "LOAD AGE");
    for (const auto& [key, row] : rows) {
        std::printf("%-6s %-5s %-12s %9.0f %8.0f %8.0f %6s %9s\n", key.first.c_str(), key.second.c_str(),
                    row.state.c_str(), row.in_flight, row.running, row.waiting,
                    Number(row.kv_usage, "%.1f", 100).c_str(), Number(row.load_age, "%.1fs").c_str());
    }
    std::fflush(stdout);
}

}  // namespace

int TopMain(int argc, char** argv) {
    std::string url = "127.0.0.1:8000";
    const char* env_key = std::getenv("RANKGATE_API_KEY");
    std::string key = env_key == nullptr ? "" : env_key;
    double interval = 1.0;
    bool once = false;
    CLI::App app{"Live table of the ranks of a running gateway.", "rankgate top"};
    app.add_option("--url,url", url, "Address of the gateway");
    app.add_option("--api-key", key, "API key, if the gateway wants one for /metrics");
    app.add_option("--interval", interval, "Seconds between two looks")->check(NumberWithin(0.1, 3600));
    app.add_flag("--once", once, "Print one table and end");
    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
        return ParseFailed(app, error, error.what());
    }
    const auto parsed = ParseUrl(url);
    if (!parsed.ok()) {
        std::cerr << "rankgate top: " << parsed.error().message << '\n';
        return 2;
    }
    HttpClient client(*parsed, key, std::chrono::seconds(5));
    double last_tokens = -1;
    auto last_time = std::chrono::steady_clock::now();
    const bool terminal = ::isatty(STDOUT_FILENO) == 1 && !once;
    for (;;) {
        const auto reply = client.Get("/metrics");
        if (!reply.ok() || reply->status != 200) {
            std::cerr << "rankgate top: "
                      << (reply.ok() ? "/metrics answered " + std::to_string(reply->status)
                                     : reply.error().message)
                      << '\n';
            return 1;
        }
        const std::vector<MetricSample> samples = ParseMetrics(reply->body);
        double tokens = 0;
        for (const MetricSample& sample : samples) {
            if (sample.name == "vllm:generation_tokens_total") {
                tokens += sample.value;
            }
        }
        const auto now = std::chrono::steady_clock::now();
        const double seconds = std::chrono::duration<double>(now - last_time).count();
        Draw(samples, last_tokens < 0 ? -1 : (tokens - last_tokens) / seconds, terminal);
        if (once) {
            return 0;
        }
        last_tokens = tokens;
        last_time = now;
        std::this_thread::sleep_for(std::chrono::duration<double>(interval));
    }
}

}  // namespace rankgate::apps
