// SPDX-License-Identifier: Apache-2.0
// Numbers of the gateway. Each shard writes its own copy (one writer, plain stores), /metrics sums them: the
// token path never meets another thread's cache line. Token counters move once per engine step and shard,
// request histograms once per request.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "group/group.h"
#include "http/server.h"

namespace rankgate::gateway {

/// One writer; any number of readers.
class Counter {
  public:
    void Add(std::uint64_t by) noexcept {
        value_.store(value_.load(std::memory_order_relaxed) + by, std::memory_order_relaxed);
    }
    std::uint64_t value() const noexcept { return value_.load(std::memory_order_relaxed); }

  private:
    std::atomic<std::uint64_t> value_{0};
};

inline constexpr std::size_t kMaxBuckets = 32;

/// Upper bounds are given at reading and writing, so that the object holds numbers only.
class Histogram {
  public:
    void Observe(double value, std::span<const double> bounds) noexcept;
    std::uint64_t bucket(std::size_t i) const noexcept { return buckets_[i].value(); }
    double sum() const noexcept { return sum_.load(std::memory_order_relaxed); }

  private:
    std::array<Counter, kMaxBuckets + 1> buckets_;
    std::atomic<double> sum_{0.0};
};

enum class Finish : std::uint8_t { kStop, kLength, kAbort, kError };
inline constexpr std::array<std::string_view, 4> kFinishNames{"stop", "length", "abort", "error"};
/// By group::CancelCause, and one that only the gateway knows: another choice of the same request failed.
inline constexpr std::array<std::string_view, 6> kCauseNames{"client_gone", "stop_string", "slow_reader",
                                                             "drain",       "timeout",     "sibling_failed"};
inline constexpr std::size_t kSiblingFailed = 5;

/// Of one model on one shard.
struct ModelMetrics {
    Counter prompt_tokens;
    Counter generation_tokens;
    std::array<Counter, 4> finished;  // by Finish; per choice that was submitted
    Histogram ttft;
    Histogram e2e;
    Histogram time_per_token;
    Histogram prompt_length;
    Histogram generation_length;
};

/// Distinct models of one gateway; the tables are sized once.
inline constexpr std::size_t kMaxModels = 16;

struct alignas(64) ShardMetrics {
    std::array<ModelMetrics, kMaxModels> models;
    std::array<Counter, 6> aborts;       // by kCauseNames
    std::array<Counter, 600> responses;  // by HTTP status; below 100 unused
    Counter late_outputs;
    Counter prepare_pooled;
    Counter prepare_inline;
};

std::span<const double> TtftBounds() noexcept;
std::span<const double> E2eBounds() noexcept;
std::span<const double> TimePerTokenBounds() noexcept;
std::span<const double> LengthBounds() noexcept;

/// What one scrape reads.
struct MetricsView {
    std::vector<std::string> models;  // by index in ShardMetrics::models
    std::vector<const ShardMetrics*> shards;
    std::vector<const http::ShardStats*> http;
    struct Group {
        std::string name;
        std::string model;
        std::shared_ptr<const group::GroupSnapshot> snapshot;
    };
    std::vector<Group> groups;
    std::int64_t prepare_queue{0};
    std::int64_t requests_open{0};
    bool ready{false};
    std::string version;
};

/// Prometheus text format 0.0.4.
std::string RenderMetrics(const MetricsView& view);

}  // namespace rankgate::gateway
