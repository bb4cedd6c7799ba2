// SPDX-License-Identifier: Apache-2.0
#include "engine/scheduler.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace rankgate::engine {

using wire::FinishReason;

Status SchedulerConfig::Normalise() {
    const auto refuse = [](const char* field, std::int64_t value, const std::string& allowed) {
        return Error::Invalid(
            field, std::string(field) + " " + std::to_string(value) + " is not allowed: " + allowed);
    };
    if (max_num_seqs < 1 || max_num_seqs > kMaxSeqs) {
        return refuse("max-num-seqs", max_num_seqs, "1 to " + std::to_string(kMaxSeqs));
    }
    if (max_model_len < 2 || max_model_len > (std::int64_t{1} << 31)) {
        return refuse("max-model-len", max_model_len, "2 to 2^31");
    }
    if (max_num_batched_tokens < 1) {
        return refuse("max-num-batched-tokens", max_num_batched_tokens, "at least 1");
    }
    if (block_size < 1 || block_size > kMaxBlockSize) {
        return refuse("block-size", block_size, "1 to " + std::to_string(kMaxBlockSize));
    }
    if (num_gpu_blocks < 0) {
        return refuse("num-gpu-blocks", num_gpu_blocks, "0 (computed) or more");
    }
    if (num_gpu_blocks == 0) {
        num_gpu_blocks = PagesFor(max_model_len) * max_num_seqs;
    }
    if (PagesFor(max_model_len) > num_gpu_blocks) {
        max_model_len = num_gpu_blocks * block_size;
        if (max_model_len < 2) {
            return refuse("num-gpu-blocks", num_gpu_blocks, "room for two tokens at least");
        }
    }
    return Status::Ok();
}

Scheduler::Scheduler(const SchedulerConfig& config, ModelRunner& runner) : config_{config}, runner_{runner} {
    RG_CHECK(config_.num_gpu_blocks > 0 && config_.PagesFor(config_.max_model_len) <= config_.num_gpu_blocks);
    free_slots_.reserve(static_cast<std::size_t>(config_.max_num_seqs));
    for (std::int32_t slot = 0; slot < config_.max_num_seqs; ++slot) {
        free_slots_.push_back(slot);
    }
    running_.reserve(static_cast<std::size_t>(config_.max_num_seqs));
    plan_.items.reserve(static_cast<std::size_t>(config_.max_num_seqs));
}

Scheduler::~Scheduler() = default;

void Scheduler::Mix(std::uint64_t value) noexcept {
    // splitmix64's finaliser over a running sum: cheap, and order matters.
    digest_ = (digest_ + value) * 0x9e3779b97f4a7c15ULL;
    digest_ ^= digest_ >> 29;
}

Status Scheduler::Add(std::unique_ptr<Sequence>& sequence) {
    const wire::GenerateRequest& request = sequence->request;
    if (by_id_.find(std::string_view{request.id}) != by_id_.end()) {
        return Error{ErrorCode::kConflict, "a request with this id is running", "request_id", false};
    }
    if (by_id_.size() >= kMaxQueued) {
        return Error{ErrorCode::kOverloaded, "the queue is full", {}, true};
    }
    if (sequence->prompt_len() < 1 || sequence->prompt_len() >= config_.max_model_len) {
        return Error{ErrorCode::kContextLength,
                     "the prompt has " + std::to_string(sequence->prompt_len()) + " tokens; 1 to " +
                         std::to_string(config_.max_model_len - 1) + " are allowed",
                     "prompt_token_ids", false};
    }
    sequence->arrival = next_arrival_++;
    sequence->slot = -1;
    sequence->computed = 0;
    sequence->blocks = 0;
    Mix(static_cast<std::uint64_t>(sequence->prompt_len()));
    Sequence* raw = sequence.get();
    by_id_.emplace(raw->request.id, std::move(sequence));
    waiting_.insert(raw);
    return Status::Ok();
}

const Sequence* Scheduler::Find(std::string_view id) const noexcept {
    const auto found = by_id_.find(id);
    return found == by_id_.end() ? nullptr : found->second.get();
}

std::vector<Sequence*> Scheduler::Live() const {
    std::vector<Sequence*> live{running_.begin(), running_.end()};
    live.insert(live.end(), waiting_.begin(), waiting_.end());
    return live;
}

Sequence* Scheduler::Abort(std::string_view id) {
    const auto found = by_id_.find(id);
    if (found == by_id_.end()) {
        return nullptr;
    }
    Sequence* sequence = found->second.get();
    sequence->finish = FinishReason::kAbort;
    Mix(sequence->arrival ^ 0xab);
    if (sequence->slot < 0) {
        waiting_.erase(sequence);
    } else {
        running_.erase(std::find(running_.begin(), running_.end(), sequence));
        Release(*sequence);
    }
    Retire(*sequence);
    return sequence;
}

void Scheduler::Retire(Sequence& sequence) {
    const auto found = by_id_.find(std::string_view{sequence.request.id});
    RG_CHECK(found != by_id_.end());
    retired_.push_back(std::move(found->second));
    by_id_.erase(found);
}

void Scheduler::Release(Sequence& sequence) noexcept {
    used_pages_ -= sequence.blocks;
    sequence.blocks = 0;
    free_slots_.push_back(sequence.slot);
    sequence.slot = -1;
}

void Scheduler::Preempt(Sequence& sequence) {
    Release(sequence);
    sequence.computed = 0;
    prefix_stats_.preempted_requests += 1;
    Mix(sequence.arrival ^ 0xdead);
    waiting_.insert(&sequence);
}

void Scheduler::PreemptAll() {
    for (Sequence* sequence : running_) {
        Preempt(*sequence);
    }
    running_.clear();
}

bool Scheduler::Reserve(Sequence& sequence, std::int64_t tokens) {
    const std::int64_t pages = config_.PagesFor(tokens);
    const std::int64_t more = pages - sequence.blocks;
    if (more <= 0) {
        return true;
    }
    if (used_pages_ + more > config_.num_gpu_blocks) {
        return false;
    }
    used_pages_ += more;
    sequence.blocks = pages;
    return true;
}

void Scheduler::Admit(Sequence& sequence) {
    const Placement placement = runner_.Place(sequence, free_slots_);
    const auto slot = std::find(free_slots_.begin(), free_slots_.end(), placement.slot);
    RG_CHECK(slot != free_slots_.end());
    RG_CHECK(placement.cached >= 0 && placement.cached < sequence.num_tokens());
    *slot = free_slots_.back();
    free_slots_.pop_back();
    sequence.slot = placement.slot;
    sequence.computed = placement.cached;
    sequence.cached = std::min(placement.cached, sequence.prompt_len());
    prefix_stats_.requests += 1;
    prefix_stats_.queries += sequence.num_tokens();
    prefix_stats_.hits += placement.cached;
    Mix((static_cast<std::uint64_t>(placement.slot) << 32) ^ static_cast<std::uint64_t>(placement.cached) ^
        sequence.arrival);
}

const StepPlan& Scheduler::Plan() {
    plan_.Clear();
    retired_.clear();
    if (pause_ == PauseState::kPausedAll) {
        return plan_;
    }
    std::int64_t budget = config_.max_num_batched_tokens;
    bool preempted = false;
    const auto schedule = [&](Sequence& sequence, std::int64_t tokens, bool fresh) {
        PlanItem item;
        item.sequence = &sequence;
        item.first_position = sequence.computed;
        item.slot = sequence.slot;
        item.num_tokens = static_cast<std::int32_t>(tokens);
        item.fresh = fresh;
        item.sample = sequence.computed + tokens == sequence.num_tokens();
        plan_.items.push_back(item);
        plan_.num_tokens += tokens;
        if (tokens > 1 || sequence.computed < sequence.prompt_len()) {
            plan_.num_prefill_tokens += tokens;
        }
        budget -= tokens;
    };

    // Running sequences, in order. `i` may run into sequences that were preempted from the end meanwhile.
    for (std::size_t i = 0; i < running_.size() && budget > 0; ++i) {
        Sequence& sequence = *running_[i];
        const std::int64_t tokens = std::min(sequence.num_tokens() - sequence.computed, budget);
        while (!Reserve(sequence, sequence.computed + tokens)) {
            Sequence* victim = running_.back();
            running_.pop_back();
            Preempt(*victim);
            preempted = true;
            if (victim == &sequence) {
                break;
            }
        }
        if (sequence.slot >= 0) {
            schedule(sequence, tokens, false);
        }
    }

    // Then the queue, strictly in order: a big request at the head is not overtaken, so it cannot starve.
    while (!preempted && pause_ == PauseState::kRunning && budget > 0 && !waiting_.empty() &&
           !free_slots_.empty()) {
        Sequence& sequence = **waiting_.begin();
        // Room for the whole prompt (and what was generated before a preemption) plus the next token, so that
        // an admission does not preempt in the step after.
        const std::int64_t pages =
            config_.PagesFor(std::min(sequence.num_tokens() + 1, config_.max_model_len));
        if (used_pages_ + pages > config_.num_gpu_blocks) {
            break;
        }
        waiting_.erase(waiting_.begin());
        Admit(sequence);
        const std::int64_t tokens = std::min(sequence.num_tokens() - sequence.computed, budget);
        const bool reserved = Reserve(sequence, sequence.num_tokens());
        RG_CHECK(reserved);
        running_.insert(std::upper_bound(running_.begin(), running_.end(), &sequence, Before{}), &sequence);
        schedule(sequence, tokens, true);
    }
    if (!plan_.empty()) {
        step_counter_ += 1;
        Mix(static_cast<std::uint64_t>(plan_.num_tokens) ^
            (static_cast<std::uint64_t>(plan_.items.size()) << 40));
    }
    return plan_;
}

void Scheduler::ApplyStopRules(Sequence& sequence) const {
    const wire::SamplingParams& sampling = sequence.request.sampling;
    const auto generated = static_cast<std::int64_t>(sequence.output.size());
    const TokenId token = sequence.output.back();
    const bool full = generated >= sampling.max_tokens || sequence.num_tokens() >= config_.max_model_len;
    if (full && config_.length_before_stop) {
        sequence.finish = FinishReason::kLength;
        return;
    }
    if (generated >= sampling.min_tokens) {
        if (sampling.eos_token_id == token) {
            sequence.finish = FinishReason::kStop;
            return;
        }
        const auto& stops = sampling.stop_token_ids;
        if (std::find(stops.begin(), stops.end(), token) != stops.end()) {
            sequence.finish = FinishReason::kStop;
            sequence.stop_reason = std::int64_t{token};
            return;
        }
    }
    if (full) {
        sequence.finish = FinishReason::kLength;
    }
}

void Scheduler::Advance(const StepResult& result, std::vector<Row>& rows) {
    RG_CHECK(result.items.size() == plan_.items.size());
    bool ended = false;
    for (std::size_t i = 0; i < plan_.items.size(); ++i) {
        const PlanItem& item = plan_.items[i];
        const ItemResult& outcome = result.items[i];
        Sequence& sequence = *item.sequence;
        if (sequence.slot < 0 || sequence.finish != FinishReason::kNone) {
            continue;  // aborted while the step ran
        }
        if (outcome.kind == ItemResult::Kind::kFailed) {
            sequence.finish = outcome.finish == FinishReason::kNone ? FinishReason::kError : outcome.finish;
        } else {
            if (outcome.kind != ItemResult::Kind::kNothing) {
                sequence.computed += item.num_tokens;
            }
            if (outcome.kind == ItemResult::Kind::kToken && item.sample) {
                sequence.output.push_back(outcome.token);
                Mix(static_cast<std::uint64_t>(static_cast<std::uint32_t>(outcome.token)));
                ApplyStopRules(sequence);
            }
            if (outcome.finish != FinishReason::kNone) {
                sequence.finish = outcome.finish;
            }
        }
        const bool token = outcome.kind == ItemResult::Kind::kToken && item.sample;
        if (sequence.finish != FinishReason::kNone) {
            ended = true;
            Release(sequence);
            Retire(sequence);
        }
        if (token || sequence.finish != FinishReason::kNone) {
            rows.push_back(Row{&sequence});
        }
    }
    if (ended) {
        std::erase_if(running_,
                      [](const Sequence* sequence) { return sequence->finish != FinishReason::kNone; });
    }
    plan_.Clear();
}

wire::LoadSnapshot Scheduler::Load() const noexcept {
    wire::LoadSnapshot load;
    load.num_running = static_cast<std::int64_t>(running_.size());
    load.num_waiting = static_cast<std::int64_t>(waiting_.size());
    load.kv_active_pages = used_pages_;
    load.kv_total_pages = config_.num_gpu_blocks;
    load.kv_usage = static_cast<double>(used_pages_) / static_cast<double>(config_.num_gpu_blocks);
    load.step_counter = step_counter_;
    return load;
}

PrefixStats Scheduler::TakePrefixStats() noexcept {
    return std::exchange(prefix_stats_, PrefixStats{});
}

}  // namespace rankgate::engine
