// SPDX-License-Identifier: Apache-2.0
#include "gateway/state.h"

#include <algorithm>
#include <utility>

namespace rankgate::gateway {

std::shared_ptr<const api::ModelInfo> MakeModelInfo(const GroupEntry& entry,
                                                    const group::GroupSnapshot& snapshot,
                                                    const GatewayOptions& options) {
    auto model = std::make_shared<api::ModelInfo>();
    model->served_names = entry.served_names;
    model->created = entry.created;
    model->assets = entry.assets;
    model->vocab_size =
        static_cast<std::int32_t>(std::min<std::int64_t>(entry.assets->vocab_size, INT32_MAX));
    model->max_model_len = snapshot.max_model_len;
    if (options.max_model_len > 0 && model->max_model_len > 0) {
        model->max_model_len = std::min(model->max_model_len, options.max_model_len);
    }
    model->data_parallel_size = snapshot.size;
    model->features = snapshot.runtime == "tokenspeed" ? api::Features::TokenSpeed() : api::Features::Vllm();
    model->features.lora = std::any_of(snapshot.ranks.begin(), snapshot.ranks.end(),
                                       [](const group::RankInfo& rank) { return rank.supports_lora; });
    const std::lock_guard lock{entry.adapters_mutex};
    model->adapters = entry.adapters;
    return model;
}

State::State(GatewayOptions gateway_options, GroupFactory factory)
    : options{std::move(gateway_options)}, group_factory{std::move(factory)} {}

int State::ModelSlot(const std::string& name) {
    const std::lock_guard lock{mutex_};
    const auto found = std::find(model_names_.begin(), model_names_.end(), name);
    if (found != model_names_.end()) {
        return static_cast<int>(found - model_names_.begin());
    }
    if (model_names_.size() >= kMaxModels) {
        return -1;
    }
    model_names_.push_back(name);
    return static_cast<int>(model_names_.size()) - 1;
}

bool State::Ready() const {
    if (draining.load(std::memory_order_relaxed)) {
        return false;
    }
    const auto current = table();
    bool any = false;
    for (const auto& entry : current->entries) {
        if (!entry->managed()) {
            continue;
        }
        any = true;
        const auto snapshot = entry->handle.group->Snapshot();
        if (snapshot == nullptr || !snapshot->serving || snapshot->forming || snapshot->max_model_len <= 0) {
            return false;
        }
    }
    return any;
}

MetricsView State::View() const {
    MetricsView view;
    view.models = model_names();
    for (const auto& shard : shard_metrics) {
        view.shards.push_back(shard.get());
    }
    view.http = http_stats;
    const auto current = table();
    for (const auto& entry : current->entries) {
        if (entry->managed()) {
            view.groups.push_back(
                {entry->spec.name, entry->served_names.front(), entry->handle.group->Snapshot()});
        }
    }
    view.prepare_queue = pool == nullptr ? 0 : pool->queued();
    view.requests_open = requests_open.load(std::memory_order_relaxed);
    view.ready = Ready();
    view.version = RANKGATE_VERSION;
    return view;
}

}  // namespace rankgate::gateway
