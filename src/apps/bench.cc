// SPDX-License-Identifier: Apache-2.0
// `rankgate bench`: closed-loop load on an OpenAI-compatible server, one connection and one thread a stream.
// Prints its own conditions; a number without them is worth nothing. For the gateway's own budgets there is
// `make bench`.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <boost/json.hpp>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <mutex>
#include <thread>

#include "apps/http_client.h"
#include "apps/tools.h"
#include "apps/version.h"
#include "base/cli.h"

namespace rankgate::apps {
namespace {

using SteadyTime = std::chrono::steady_clock::time_point;

struct Options {
    std::string url{"127.0.0.1:8000"};
    std::string api_key;
    std::string model;
    int concurrency{8};
    int requests{100};
    int prompt_words{32};
    int max_tokens{64};
    double timeout_seconds{120};
    bool stream{true};
    bool ignore_eos{true};
    bool json{false};
    std::string output;
};

struct Tally {
    std::vector<double> ttft_ms;
    std::vector<double> itl_ms;
    std::vector<double> total_ms;
    std::int64_t chunks{0};
    std::int64_t completion_tokens{0};
    std::int64_t failed{0};
    std::string first_error;
};

double Percentile(std::vector<double>& values, double p) {
    if (values.empty()) {
        return 0;
    }
    const auto index = static_cast<std::size_t>(p * static_cast<double>(values.size() - 1));
    std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(index), values.end());
    return values[index];
}

boost::json::object Spread(std::vector<double>& values) {
    double sum = 0;
    for (const double value : values) {
        sum += value;
    }
    return {{"mean", values.empty() ? 0 : sum / static_cast<double>(values.size())},
            {"p50", Percentile(values, 0.5)},
            {"p90", Percentile(values, 0.9)},
            {"p99", Percentile(values, 0.99)}};
}

std::string Body(const Options& options, int index) {
    // A different first word each time, so that a prefix cache does not answer for the prefill.
    std::string prompt = "Request " + std::to_string(index) + ":";
    for (int i = 0; i < options.prompt_words; ++i) {
        prompt += " word";
    }
    boost::json::object body{
        {"model", options.model}, {"prompt", prompt}, {"max_tokens", options.max_tokens}, {"temperature", 0}};
    if (options.ignore_eos) {
        body["ignore_eos"] = true;
    }
    if (options.stream) {
        body["stream"] = true;
        body["stream_options"] = boost::json::object{{"include_usage", true}};
    }
    return boost::json::serialize(body);
}

std::int64_t UsageIn(std::string_view text) {
    const std::size_t at = text.rfind("\"completion_tokens\":");
    return at == std::string_view::npos
               ? 0
               : std::strtoll(std::string(text.substr(at + 20, 20)).c_str(), nullptr, 10);
}

void OneRequest(const Options& options, HttpClient& client, int index, Tally& tally) {
    const SteadyTime start = std::chrono::steady_clock::now();
    SteadyTime last = start;
    bool first = true;
    std::string tail;  // events may be cut anywhere; the usage stands at the end
    const auto milliseconds = [](SteadyTime from, SteadyTime to) {
        return std::chrono::duration<double, std::milli>(to - from).count();
    };
    const auto on_data = [&](std::string_view data) {
        const SteadyTime now = std::chrono::steady_clock::now();
        (first ? tally.ttft_ms : tally.itl_ms).push_back(milliseconds(last, now));
        first = false;
        last = now;
        ++tally.chunks;
        tail.append(data);
        if (tail.size() > 8192) {
            tail.erase(0, tail.size() - 4096);
        }
    };
    const auto reply = options.stream ? client.Post("/v1/completions", Body(options, index), on_data)
                                      : client.Post("/v1/completions", Body(options, index));
    const bool failed = !reply.ok() || reply->status != 200 || tail.find("\"error\"") != std::string::npos;
    if (failed) {
        ++tally.failed;
        if (tally.first_error.empty()) {
            tally.first_error = !reply.ok()           ? reply.error().message
                                : reply->body.empty() ? tail
                                                      : reply->body;
        }
        return;
    }
    tally.total_ms.push_back(milliseconds(start, std::chrono::steady_clock::now()));
    tally.completion_tokens += UsageIn(options.stream ? tail : reply->body);
}

void Merge(Tally& into, const Tally& from) {
    into.ttft_ms.insert(into.ttft_ms.end(), from.ttft_ms.begin(), from.ttft_ms.end());
    into.itl_ms.insert(into.itl_ms.end(), from.itl_ms.begin(), from.itl_ms.end());
    into.total_ms.insert(into.total_ms.end(), from.total_ms.begin(), from.total_ms.end());
    into.chunks += from.chunks;
    into.completion_tokens += from.completion_tokens;
    into.failed += from.failed;
    if (into.first_error.empty()) {
        into.first_error = from.first_error;
    }
}

Result<std::string> FirstModel(HttpClient& client) {
    const auto reply = client.Get("/v1/models");
    if (!reply.ok()) {
        return reply.error();
    }
    boost::system::error_code error;
    const boost::json::value json = boost::json::parse(reply->body, error);
    const boost::json::value* id = error ? nullptr : json.find_pointer("/data/0/id", error);
    if (id == nullptr || !id->is_string()) {
        return Error{ErrorCode::kUnavailable,
                     "/v1/models names no model (status " + std::to_string(reply->status) + ")", "", false};
    }
    return std::string(id->as_string());
}

}  // namespace

int BenchMain(int argc, char** argv) {
    Options options;
    if (const char* key = std::getenv("RANKGATE_API_KEY")) {
        options.api_key = key;
    }
    CLI::App app{"Loads an OpenAI-compatible server: TTFT, ITL, tokens per second.", "rankgate bench"};
    app.add_option("--url,url", options.url, "Address of the server");
    app.add_option("--api-key", options.api_key, "API key");
    app.add_option("--model", options.model, "Model name; the server's first one by default");
    app.add_option("--concurrency", options.concurrency, "Requests in flight")->check(CLI::Range(1, 4096));
    app.add_option("--num-requests", options.requests, "Requests in all")->check(CLI::Range(1, 100'000'000));
    app.add_option("--prompt-words", options.prompt_words, "Words of each prompt")
        ->check(CLI::Range(1, 1'000'000));
    app.add_option("--max-tokens", options.max_tokens, "Tokens asked of each request")
        ->check(CLI::Range(1, 1'000'000));
    app.add_option("--timeout", options.timeout_seconds, "Seconds without a byte until a request has failed")
        ->check(NumberWithin(0.1, 86'400));
    app.add_flag("--stream,!--no-stream", options.stream, "Stream the answers (default)");
    app.add_flag("--ignore-eos,!--no-ignore-eos", options.ignore_eos,
                 "Ask for exactly --max-tokens tokens (default)");
    app.add_flag("--json", options.json, "Print JSON instead of a table");
    app.add_option("--output", options.output, "Write the JSON to this file as well");
    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
        return ParseFailed(app, error, error.what());
    }
    const auto url = ParseUrl(options.url);
    if (!url.ok()) {
        std::cerr << "rankgate bench: " << url.error().message << '\n';
        return 2;
    }
    // Known before an hour of load, not after it. Appending keeps what is there.
    if (!options.output.empty() && !std::ofstream(options.output, std::ios::app)) {
        std::cerr << "rankgate bench: --output " << options.output << " cannot be written\n";
        return 2;
    }
    const auto timeout = std::chrono::milliseconds(static_cast<std::int64_t>(options.timeout_seconds * 1000));
    if (options.model.empty()) {
        HttpClient client(*url, options.api_key, timeout);
        auto model = FirstModel(client);
        if (!model.ok()) {
            std::cerr << "rankgate bench: " << model.error().message << '\n';
            return 1;
        }
        options.model = *model;
    }

    std::atomic<int> next{0};
    std::mutex mutex;
    Tally all;
    const SteadyTime start = std::chrono::steady_clock::now();
    const int workers = std::min(options.concurrency, options.requests);
    std::vector<std::thread> threads;
    threads.reserve(static_cast<std::size_t>(std::max(workers, 0)));
    for (int i = 0; i < workers; ++i) {
        threads.emplace_back([&] {
            HttpClient client(*url, options.api_key, timeout);
            Tally mine;
            for (int index = next++; index < options.requests; index = next++) {
                OneRequest(options, client, index, mine);
            }
            const std::lock_guard lock(mutex);
            Merge(all, mine);
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

    const auto done = static_cast<std::int64_t>(all.total_ms.size());
    const boost::json::object result{
        {"conditions",
         {{"rankgate", kVersion},
          {"url", options.url},
          {"model", options.model},
          {"concurrency", options.concurrency},
          {"requests", options.requests},
          {"prompt_words", options.prompt_words},
          {"max_tokens", options.max_tokens},
          {"stream", options.stream},
          {"ignore_eos", options.ignore_eos},
          {"cores", std::thread::hardware_concurrency()}}},
        {"seconds", seconds},
        {"completed", done},
        {"failed", all.failed},
        {"completion_tokens", all.completion_tokens},
        {"requests_per_second", static_cast<double>(done) / seconds},
        {"tokens_per_second", static_cast<double>(all.completion_tokens) / seconds},
        {"ttft_ms", Spread(all.ttft_ms)},
        {"itl_ms", Spread(all.itl_ms)},
        {"e2e_ms", Spread(all.total_ms)}};
    const std::string json = boost::json::serialize(result);
    if (!options.output.empty() && !(std::ofstream(options.output) << json << '\n')) {
        std::cerr << "rankgate bench: --output " << options.output << ": cannot be written\n";
        return 1;
    }
    if (options.json) {
        std::cout << json << '\n';
    } else {
        const auto row = [](const char* name, std::vector<double>& values) {
            std::printf("%-8s p50 %9.2f ms   p90 %9.2f ms   p99 %9.2f ms\n", name, Percentile(values, 0.5),
                        Percentile(values, 0.9), Percentile(values, 0.99));
        };
        std::printf("%s, model %s: %d requests, %d at once, %d words in, %d tokens out, %s\n\n",
                    options.url.c_str(), options.model.c_str(), options.requests, options.concurrency,
                    options.prompt_words, options.max_tokens, options.stream ? "streaming" : "whole");
        std::printf("done     %lld in %.2f s, %lld failed\n", static_cast<long long>(done), seconds,
                    static_cast<long long>(all.failed));
        std::printf("rate     %.1f requests/s   %.1f tokens/s\n", static_cast<double>(done) / seconds,
                    static_cast<double>(all.completion_tokens) / seconds);
        if (options.stream) {
            row("TTFT", all.ttft_ms);
            row("ITL", all.itl_ms);
        }
        row("E2E", all.total_ms);
    }
    if (all.failed > 0) {
        std::cerr << "rankgate bench: first failure: " << all.first_error.substr(0, 500) << '\n';
    }
    return all.failed == 0 ? 0 : 1;
}

}  // namespace rankgate::apps
