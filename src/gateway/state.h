// SPDX-License-Identifier: Apache-2.0
// What the gateway's parts share: the group table, admission, and the flags of the process. Groups are added
// and removed by the control thread, which swaps the whole table; shards keep the one they were told of and
// never lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "api/model.h"
#include "base/clock.h"
#include "gateway/gateway.h"
#include "gateway/metrics.h"
#include "gateway/options.h"
#include "gateway/prepare_pool.h"
#include "text/model_assets.h"

namespace rankgate::gateway {

/// One group (or a foreign HTTP worker, which has no `handle.group` and is only listed). Immutable but for
/// the marked members.
struct GroupEntry {
    std::int32_t index{0};  // never reused; OutputBatch::group
    WorkerSpec spec;
    GroupHandle handle;
    std::vector<std::string> served_names;
    std::shared_ptr<const text::ModelAssets> assets;
    std::int64_t created{0};
    std::size_t model_slot{0};  // in ShardMetrics::models

    /// Choices submitted and not ended, over all shards. Relaxed; for choosing between groups.
    std::atomic<std::int64_t> in_flight{0};
    /// Adapters that were loaded through us; shards rebuild their ModelInfo when the version moves.
    std::atomic<std::uint64_t> adapters_version{0};
    mutable std::mutex adapters_mutex;
    std::vector<wire::LoraRequest> adapters;

    bool managed() const noexcept { return handle.group != nullptr; }
};

struct GroupTable {
    std::vector<std::shared_ptr<GroupEntry>> entries;
};

/// Builds what the api layer knows of a group's model from the files, the flags and what its live ranks say.
std::shared_ptr<const api::ModelInfo> MakeModelInfo(const GroupEntry& entry,
                                                    const group::GroupSnapshot& snapshot,
                                                    const GatewayOptions& options);

struct AdminAnswer {
    std::int32_t group{0};
    std::string group_name;
    std::vector<group::AdminReply> replies;
};

/// Synchronised unless a member says otherwise.
class State {
  public:
    State(GatewayOptions gateway_options, GroupFactory factory);
    virtual ~State() = default;

    const GatewayOptions options;
    const GroupFactory group_factory;
    std::unique_ptr<PreparePool> pool;  // set before the shards start

    std::atomic<bool> draining{false};
    /// Generation requests from arrival to the end of their answer, and their choices.
    std::atomic<std::int64_t> requests_open{0};
    std::atomic<std::int64_t> choices_open{0};
    std::atomic<std::int64_t> next_lora_id{1};

    std::shared_ptr<const GroupTable> table() const {
        const std::lock_guard lock{mutex_};
        return table_;
    }
    void SetTable(std::shared_ptr<const GroupTable> table) {
        const std::lock_guard lock{mutex_};
        table_ = std::move(table);
    }
    std::vector<std::string> model_names() const {
        const std::lock_guard lock{mutex_};
        return model_names_;
    }
    /// Slot of a model name in the metrics; -1 = the tables are full.
    int ModelSlot(const std::string& name);

    /// Every managed group serves, there is at least one, and no shutdown has begun.
    bool Ready() const;
    MetricsView View() const;

    /// Runs on the control thread; `done` runs there too (it posts back to its shard).
    virtual void AddWorker(WorkerSpec spec, std::function<void(Result<std::string>)> done) = 0;
    virtual void RemoveWorker(std::string name, std::function<void(Status)> done) = 0;

    /// One per shard; filled while the gateway starts, fixed afterwards.
    std::vector<std::unique_ptr<ShardMetrics>> shard_metrics;
    std::vector<const http::ShardStats*> http_stats;

  private:
    mutable std::mutex mutex_;
    std::shared_ptr<const GroupTable> table_{std::make_shared<GroupTable>()};
    std::vector<std::string> model_names_;
};

}  // namespace rankgate::gateway
