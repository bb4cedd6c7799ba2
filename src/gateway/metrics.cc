// SPDX-License-Identifier: Apache-2.0
#include "gateway/metrics.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

namespace rankgate::gateway {
namespace {

// vLLM's own bounds, so that its boards and alerts keep their meaning.
constexpr std::array kTtft{0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1,  0.25,  0.5,   0.75,
                           1.0,   2.5,   5.0,  7.5,  10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0};
constexpr std::array kE2e{0.3,  0.5,  0.8,  1.0,  1.5,   2.0,   2.5,   5.0,   10.0,   15.0,  20.0,
                          30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0};
constexpr std::array kTimePerToken{0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2,  0.3,  0.4, 0.5,
                                   0.75, 1.0,   2.5,  5.0,   7.5, 10.0, 20.0, 40.0, 80.0};
constexpr std::array kLength{1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3,
                             2e3, 5e3, 1e4, 2e4,  5e4,  1e5,  2e5,   5e5,   1e6};
static_assert(kTtft.size() <= kMaxBuckets && kE2e.size() <= kMaxBuckets &&
              kTimePerToken.size() <= kMaxBuckets && kLength.size() <= kMaxBuckets);

using Labels = std::initializer_list<std::pair<std::string_view, std::string_view>>;

class Writer {
  public:
    void Family(std::string_view name, std::string_view type, std::string_view help) {
        out_ += "# HELP ";
        out_ += name;
        out_ += ' ';
        out_ += help;
        out_ += "\n# TYPE ";
        out_ += name;
        out_ += ' ';
        out_ += type;
        out_ += '\n';
    }

    template <class Number>
    void Sample(std::string_view name, Labels labels, Number value, std::string_view extra_key = {},
                std::string_view extra_value = {}) {
        out_ += name;
        if (labels.size() != 0 || !extra_key.empty()) {
            char separator = '{';
            for (const auto& [key, text] : labels) {
                Label(separator, key, text);
                separator = ',';
            }
            if (!extra_key.empty()) {
                Label(separator, extra_key, extra_value);
            }
            out_ += '}';
        }
        out_ += ' ';
        AppendNumber(value);
        out_ += '\n';
    }

    static std::string Text(double value) {
        std::array<char, 40> digits{};
        const auto [end, error] = std::to_chars(digits.data(), digits.data() + digits.size(), value);
        return {digits.data(), end};
    }

    std::string Take() { return std::move(out_); }

  private:
    void Label(char separator, std::string_view key, std::string_view text) {
        out_ += separator;
        out_ += key;
        out_ += "=\"";
        for (const char c : text) {
            if (c == '"' || c == '\\') {
                out_ += '\\';
                out_ += c;
            } else if (c == '\n') {
                out_ += "\\n";
            } else {
                out_ += c;
            }
        }
        out_ += '"';
    }

    template <class Number>
    void AppendNumber(Number value) {
        if constexpr (std::is_floating_point_v<Number>) {
            if (std::isnan(value)) {
                out_ += "NaN";
                return;
            }
            out_ += Text(value);
        } else {
            out_ += std::to_string(value);
        }
    }

    std::string out_;
};

void WriteHistogram(Writer& writer, std::string_view name, std::string_view help, const MetricsView& view,
                    Histogram ModelMetrics::*member, std::span<const double> bounds) {
    writer.Family(name, "histogram", help);
    const std::string bucket_name = std::string{name} + "_bucket";
    for (std::size_t model = 0; model < view.models.size(); ++model) {
        std::uint64_t cumulative = 0;
        double sum = 0;
        for (std::size_t i = 0; i <= bounds.size(); ++i) {
            for (const ShardMetrics* shard : view.shards) {
                cumulative += (shard->models[model].*member).bucket(i);
            }
            writer.Sample(bucket_name, {{"model_name", view.models[model]}}, cumulative, "le",
                          i < bounds.size() ? Writer::Text(bounds[i]) : std::string{"+Inf"});
        }
        for (const ShardMetrics* shard : view.shards) {
            sum += (shard->models[model].*member).sum();
        }
        writer.Sample(std::string{name} + "_sum", {{"model_name", view.models[model]}}, sum);
        writer.Sample(std::string{name} + "_count", {{"model_name", view.models[model]}}, cumulative);
    }
}

template <class F>
std::uint64_t Sum(const MetricsView& view, F&& pick) {
    std::uint64_t sum = 0;
    for (const ShardMetrics* shard : view.shards) {
        sum += pick(*shard).value();
    }
    return sum;
}

template <class F>
std::int64_t SumHttp(const MetricsView& view, F&& pick) {
    std::int64_t sum = 0;
    for (const http::ShardStats* shard : view.http) {
        sum += static_cast<std::int64_t>(pick(*shard).load(std::memory_order_relaxed));
    }
    return sum;
}

constexpr std::array kRankStates{
    group::RankState::kAbsent,     group::RankState::kGreeted, group::RankState::kInitialised,
    group::RankState::kRegistered, group::RankState::kLive,    group::RankState::kDead,
    group::RankState::kDeaf,       group::RankState::kMute,    group::RankState::kWedged};

/// Calls `f(group, rank, group name, rank number as text, vLLM's engine label)` for every rank.
template <class F>
void EachRank(const MetricsView& view, F&& f) {
    for (const MetricsView::Group& one : view.groups) {
        if (one.snapshot == nullptr) {
            continue;
        }
        for (const group::RankInfo& rank : one.snapshot->ranks) {
            const std::string number = std::to_string(rank.rank);
            // One group: the engine label is the rank, as in vLLM. Several: it must stay unique.
            f(one, rank, number, view.groups.size() == 1 ? number : one.name + "/" + number);
        }
    }
}

void WriteRanks(Writer& writer, const MetricsView& view) {
    const auto vllm_gauge = [&](std::string_view name, std::string_view help, auto&& value) {
        writer.Family(name, "gauge", help);
        EachRank(view, [&](const MetricsView::Group& one, const group::RankInfo& rank, const std::string&,
                           const std::string& engine) {
            // A rank that is gone has no load; its last report would look like work.
            if (rank.state == group::RankState::kLive) {
                writer.Sample(name, {{"engine", engine}, {"model_name", one.model}}, value(rank));
            }
        });
    };
    vllm_gauge("vllm:num_requests_running", "Requests in the engine's current batches.",
               [](const group::RankInfo& rank) { return std::max<std::int64_t>(0, rank.load.num_running); });
    vllm_gauge("vllm:num_requests_waiting", "Requests waiting in the engine.",
               [](const group::RankInfo& rank) { return std::max<std::int64_t>(0, rank.load.num_waiting); });
    vllm_gauge("vllm:kv_cache_usage_perc", "Used part of the engine's KV cache; 1 means full.",
               [](const group::RankInfo& rank) { return std::max(0.0, rank.load.kv_usage); });

    const auto own_gauge = [&](std::string_view name, std::string_view help, auto&& value) {
        writer.Family(name, "gauge", help);
        EachRank(view, [&](const MetricsView::Group& one, const group::RankInfo& rank,
                           const std::string& number, const std::string&) {
            writer.Sample(name, {{"group", one.name}, {"rank", number}}, value(rank));
        });
    };
    own_gauge("rankgate_in_flight", "Requests of this gateway that occupy the rank.",
              [](const group::RankInfo& rank) { return rank.in_flight; });
    own_gauge("rankgate_rank_kv_usage", "Used part of the rank's KV cache as last reported; NaN = never.",
              [](const group::RankInfo& rank) {
                  return rank.load.kv_usage < 0 ? std::nan("") : rank.load.kv_usage;
              });
    own_gauge("rankgate_rank_load_age_seconds", "Age of the rank's last load report; NaN = never.",
              [](const group::RankInfo& rank) {
                  return rank.load_age_seconds < 0 ? std::nan("") : rank.load_age_seconds;
              });

    writer.Family("rankgate_rank_state", "gauge", "1 for the state the rank is in.");
    EachRank(view, [&](const MetricsView::Group& one, const group::RankInfo& rank, const std::string& number,
                       const std::string&) {
        for (const group::RankState state : kRankStates) {
            writer.Sample("rankgate_rank_state",
                          {{"group", one.name}, {"rank", number}, {"state", group::RankStateName(state)}},
                          rank.state == state ? 1 : 0);
        }
    });

    const auto group_counter = [&](std::string_view name, std::string_view help,
                                   std::int64_t group::GroupSnapshot::*member) {
        writer.Family(name, "counter", help);
        for (const MetricsView::Group& one : view.groups) {
            writer.Sample(name, {{"group", one.name}},
                          one.snapshot == nullptr ? std::int64_t{0} : (*one.snapshot).*member);
        }
    };
    group_counter("rankgate_wakes_total", "Waves started in a lockstep group.", &group::GroupSnapshot::wakes);
    group_counter("rankgate_retries_total", "Requests sent to another rank after theirs was lost.",
                  &group::GroupSnapshot::retries);
    group_counter("rankgate_late_outputs_total", "Engine outputs for requests that had ended.",
                  &group::GroupSnapshot::late_outputs);
    group_counter("rankgate_decode_errors_total", "Engine messages that could not be read.",
                  &group::GroupSnapshot::decode_errors);
    writer.Family("rankgate_group_serving", "gauge", "1 if the group can take requests.");
    for (const MetricsView::Group& one : view.groups) {
        writer.Sample("rankgate_group_serving", {{"group", one.name}},
                      one.snapshot != nullptr && one.snapshot->serving ? 1 : 0);
    }
}

}  // namespace

void Histogram::Observe(double value, std::span<const double> bounds) noexcept {
    const auto at = std::lower_bound(bounds.begin(), bounds.end(), value) - bounds.begin();
    buckets_[static_cast<std::size_t>(at)].Add(1);
    sum_.store(sum_.load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
}

std::span<const double> TtftBounds() noexcept {
    return kTtft;
}
std::span<const double> E2eBounds() noexcept {
    return kE2e;
}
std::span<const double> TimePerTokenBounds() noexcept {
    return kTimePerToken;
}
std::span<const double> LengthBounds() noexcept {
    return kLength;
}

std::string RenderMetrics(const MetricsView& view) {
    Writer writer;
    WriteRanks(writer, view);

    const auto model_counter = [&](std::string_view name, std::string_view help,
                                   Counter ModelMetrics::*member) {
        writer.Family(name, "counter", help);
        for (std::size_t model = 0; model < view.models.size(); ++model) {
            writer.Sample(name, {{"model_name", view.models[model]}},
                          Sum(view, [&](const ShardMetrics& shard) -> const Counter& {
                              return shard.models[model].*member;
                          }));
        }
    };
    model_counter("vllm:prompt_tokens_total", "Prompt tokens of submitted requests.",
                  &ModelMetrics::prompt_tokens);
    model_counter("vllm:generation_tokens_total", "Tokens that engines generated.",
                  &ModelMetrics::generation_tokens);
    writer.Family("vllm:request_success_total", "counter", "Sequences that ended, by how.");
    for (std::size_t model = 0; model < view.models.size(); ++model) {
        for (std::size_t i = 0; i < kFinishNames.size(); ++i) {
            writer.Sample("vllm:request_success_total",
                          {{"finished_reason", kFinishNames[i]}, {"model_name", view.models[model]}},
                          Sum(view, [&](const ShardMetrics& shard) -> const Counter& {
                              return shard.models[model].finished[i];
                          }));
        }
    }
    WriteHistogram(writer, "vllm:time_to_first_token_seconds", "Request received to first token.", view,
                   &ModelMetrics::ttft, kTtft);
    WriteHistogram(writer, "vllm:e2e_request_latency_seconds", "Request received to its last token.", view,
                   &ModelMetrics::e2e, kE2e);
    WriteHistogram(writer, "vllm:request_time_per_output_token_seconds",
                   "Mean time between a request's tokens.", view, &ModelMetrics::time_per_token,
                   kTimePerToken);
    WriteHistogram(writer, "vllm:request_prompt_tokens", "Prompt tokens of a request.", view,
                   &ModelMetrics::prompt_length, kLength);
    WriteHistogram(writer, "vllm:request_generation_tokens", "Generated tokens of a request.", view,
                   &ModelMetrics::generation_length, kLength);

    writer.Family("rankgate_aborts_total", "counter",
                  "Sequences cancelled before their engine finished them, by cause.");
    for (std::size_t i = 0; i < kCauseNames.size(); ++i) {
        writer.Sample(
            "rankgate_aborts_total", {{"cause", kCauseNames[i]}},
            Sum(view, [&](const ShardMetrics& shard) -> const Counter& { return shard.aborts[i]; }));
    }
    writer.Family("rankgate_http_responses_total", "counter", "Answers begun, by HTTP status.");
    for (std::size_t status = 100; status < 600; ++status) {
        const std::uint64_t count =
            Sum(view, [&](const ShardMetrics& shard) -> const Counter& { return shard.responses[status]; });
        // 200 always stands there, so that the family is never empty.
        if (count != 0 || status == 200) {
            writer.Sample("rankgate_http_responses_total", {{"status", std::to_string(status)}}, count);
        }
    }
    const auto http_value = [&](std::string_view name, std::string_view type, std::string_view help,
                                auto&& pick) {
        writer.Family(name, type, help);
        writer.Sample(name, {}, SumHttp(view, pick));
    };
    http_value("rankgate_streams_open", "gauge", "Event streams being answered.",
               [](const http::ShardStats& s) -> const auto& { return s.streams_open; });
    http_value("rankgate_connections_open", "gauge", "Open client connections.",
               [](const http::ShardStats& s) -> const auto& { return s.connections_open; });
    http_value("rankgate_bytes_held", "gauge", "Answer bytes that clients have not taken yet.",
               [](const http::ShardStats& s) -> const auto& { return s.bytes_held; });
    http_value("rankgate_connections_total", "counter", "Accepted client connections.",
               [](const http::ShardStats& s) -> const auto& { return s.connections_total; });
    http_value("rankgate_slow_readers_total", "counter", "Connections cut because the client did not read.",
               [](const http::ShardStats& s) -> const auto& { return s.slow_readers_total; });
    http_value("rankgate_http_timeouts_total", "counter", "Connections ended by a read deadline.",
               [](const http::ShardStats& s) -> const auto& { return s.timeouts_total; });
    http_value("rankgate_http_bad_requests_total", "counter", "Requests that were not valid HTTP.",
               [](const http::ShardStats& s) -> const auto& { return s.bad_requests_total; });
    http_value("rankgate_clients_gone_total", "counter",
               "Clients that left before their answer was complete.",
               [](const http::ShardStats& s) -> const auto& { return s.clients_gone_total; });
    writer.Family("rankgate_requests_open", "gauge",
                  "Generation requests between arrival and the end of their answer.");
    writer.Sample("rankgate_requests_open", {}, view.requests_open);
    writer.Family("rankgate_prepare_queue", "gauge", "Requests waiting for a prepare thread.");
    writer.Sample("rankgate_prepare_queue", {}, view.prepare_queue);
    writer.Family("rankgate_ready", "gauge", "1 if every group serves and no shutdown has begun.");
    writer.Sample("rankgate_ready", {}, view.ready ? 1 : 0);
    writer.Family("rankgate_build_info", "gauge", "Version of the gateway.");
    writer.Sample("rankgate_build_info", {{"version", view.version}}, 1);
    return writer.Take();
}

}  // namespace rankgate::gateway
