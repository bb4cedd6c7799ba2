// SPDX-License-Identifier: Apache-2.0
#include "engine/sim_runner.h"

#include <sys/prctl.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <ctime>
#include <functional>
#include <string>
#include <utility>

#include "base/check.h"

namespace rankgate::engine {

namespace {

constexpr std::uint64_t Mix64(std::uint64_t x) noexcept {
    x += 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

class SteadySleeper final : public Sleeper {
  public:
    // The default slack of 50 us would be half of a short simulated step.
    SteadySleeper() { ::prctl(PR_SET_TIMERSLACK, 1000UL, 0, 0, 0); }
    void SleepUntil(TimePoint when) noexcept override {
        const auto ns = when.time_since_epoch().count();
        timespec until{};
        until.tv_sec = static_cast<time_t>(ns / 1'000'000'000);
        until.tv_nsec = static_cast<long>(ns % 1'000'000'000);
        while (::clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) == EINTR) {
        }
    }
};

}  // namespace

std::unique_ptr<Sleeper> MakeSteadySleeper() {
    return std::make_unique<SteadySleeper>();
}

std::uint64_t SimHash(const wire::GenerateRequest& request) noexcept {
    std::uint64_t hash =
        request.sampling.seed.has_value() ? Mix64(static_cast<std::uint64_t>(*request.sampling.seed)) : 0;
    for (const TokenId token : request.prompt_token_ids) {
        hash = Mix64(hash ^ static_cast<std::uint32_t>(token));
    }
    return hash;
}

TokenId SimToken(std::uint64_t hash, std::uint64_t index, TokenId first, TokenId last) noexcept {
    const auto span = static_cast<std::uint64_t>(last - first) + 1;
    return first + static_cast<TokenId>(Mix64(hash + index) % span);
}

SimRunner::SimRunner(SimConfig config, const Clock& clock, std::unique_ptr<Sleeper> sleeper)
    : config_{std::move(config)}, clock_{clock}, sleeper_{std::move(sleeper)} {
    RG_CHECK(config_.first_token >= 0 && config_.first_token <= config_.last_token);
    hash_.resize(static_cast<std::size_t>(config_.max_num_seqs));
}

Status SimRunner::Check(const wire::GenerateRequest& request) noexcept {
    if (request.lora.has_value()) {
        return Error::Invalid("lora_request", "the sim runner has no LoRA support");
    }
    if (request.sampling.structured_outputs.has_value()) {
        return Error::Invalid("structured_outputs", "the sim runner cannot follow a grammar");
    }
    return Status::Ok();
}

std::int64_t SimRunner::CachedPrefix(const Sequence& sequence) {
    const auto block = static_cast<std::int64_t>(config_.block_size);
    const bool may_read = !sequence.request.sampling.skip_reading_prefix_cache &&
                          !sequence.request.sampling.prompt_logprobs.has_value();
    std::uint64_t hash =
        sequence.request.cache_salt.has_value() ? std::hash<std::string>{}(*sequence.request.cache_salt) : 1;
    std::int64_t cached = 0;
    bool hit = may_read;
    for (std::int64_t start = 0; start + block <= sequence.num_tokens(); start += block) {
        for (std::int64_t i = start; i < start + block; ++i) {
            hash = Mix64(hash ^ static_cast<std::uint32_t>(sequence.TokenAt(i)));
        }
        ++use_;
        const auto [entry, fresh] = blocks_.try_emplace(hash, use_);
        hit = hit && !fresh;
        entry->second = use_;
        uses_.emplace_back(hash, use_);
        if (hit) {
            cached = start + block;
        }
    }
    while (static_cast<std::int64_t>(blocks_.size()) > config_.num_blocks ||
           uses_.size() > 4 * blocks_.size() + 1024) {
        const auto [oldest, when] = uses_.front();
        uses_.pop_front();
        const auto entry = blocks_.find(oldest);
        if (entry == blocks_.end() || entry->second != when) {
            continue;  // used again since
        }
        if (static_cast<std::int64_t>(blocks_.size()) > config_.num_blocks) {
            blocks_.erase(entry);
        } else {
            uses_.emplace_back(oldest, when);  // only compacting: still the youngest use of this block
        }
    }
    // At least one token must be computed, and a block is reused whole or not at all.
    return cached < sequence.num_tokens() ? cached : cached - block;
}

Placement SimRunner::Place(const Sequence& sequence, std::span<const std::int32_t> free_slots) noexcept {
    Placement placement;
    placement.slot = free_slots.back();
    placement.cached = config_.prefix_caching ? CachedPrefix(sequence) : 0;
    hash_[static_cast<std::size_t>(placement.slot)] = SimHash(sequence.request);
    return placement;
}

void SimRunner::ResetPrefixCache() noexcept {
    blocks_.clear();
    uses_.clear();
}

void SimRunner::Score(Sequence& sequence, TokenId token, const PlanItem& item) const {
    // Invented, but well-formed: distinct ids, falling values, rank 1 for the chosen token.
    const auto row = [&](wire::Logprobs& into, TokenId chosen, std::int32_t top) {
        const std::int32_t width =
            1 + (top < 0 ? config_.model.vocab_size : std::min(top, config_.model.vocab_size));
        into.width = width;
        into.positions += 1;
        into.ranks.push_back(1);
        for (std::int32_t k = 0; k < width; ++k) {
            into.token_ids.push_back(k <= 1 ? chosen
                                            : (chosen + k - 1) % std::max(1, config_.model.vocab_size));
            into.logprobs.push_back(-0.125F * static_cast<float>(std::max(1, k)));
        }
    };
    const wire::SamplingParams& sampling = sequence.request.sampling;
    if (sampling.prompt_logprobs.has_value() && !sequence.prompt_logprobs_done) {
        const std::int64_t end = std::min(item.first_position + item.num_tokens, sequence.prompt_len() - 1);
        sequence.prompt_logprobs.width = 1 + std::max(0, *sampling.prompt_logprobs);
        for (std::int64_t i = std::max<std::int64_t>(item.first_position, sequence.prompt_logprobs.positions);
             i < end; ++i) {
            row(sequence.prompt_logprobs, sequence.TokenAt(i + 1), *sampling.prompt_logprobs);
        }
        sequence.prompt_logprobs_done = sequence.prompt_logprobs.positions == sequence.prompt_len() - 1;
    }
    if (sequence.want_logprobs && item.sample) {
        row(sequence.logprobs, token, sampling.logprobs.value_or(0));
    }
}

Status SimRunner::Run(const StepPlan& plan, StepResult& result) noexcept {
    const double us =
        config_.step_us + config_.step_us_per_seq * static_cast<double>(plan.items.size()) +
        (config_.prefill_tps > 0 ? 1e6 * static_cast<double>(plan.num_prefill_tokens) / config_.prefill_tps
                                 : 0.0);
    result.items.resize(plan.items.size());
    for (std::size_t i = 0; i < plan.items.size(); ++i) {
        const PlanItem& item = plan.items[i];
        ItemResult& outcome = result.items[i];
        outcome = ItemResult{};
        Sequence& sequence = *item.sequence;
        if (item.sample) {
            const wire::SamplingParams& sampling = sequence.request.sampling;
            const auto index = static_cast<std::uint64_t>(sequence.output.size());
            outcome.kind = ItemResult::Kind::kToken;
            const std::uint64_t hash = hash_[static_cast<std::size_t>(item.slot)];
            if (config_.eos_after > 0 && static_cast<std::int64_t>(index) + 1 >= config_.eos_after &&
                sampling.eos_token_id.has_value()) {
                outcome.token = *sampling.eos_token_id;
            } else if (sampling.allowed_token_ids.has_value() && !sampling.allowed_token_ids->empty()) {
                const auto& allowed = *sampling.allowed_token_ids;
                outcome.token = allowed[static_cast<std::size_t>(
                    SimToken(hash, index, 0,
                             static_cast<TokenId>(std::min<std::size_t>(allowed.size() - 1, 1 << 20))))];
            } else {
                outcome.token = SimToken(hash, index, config_.first_token, config_.last_token);
            }
        }
        if (sequence.want_logprobs || sequence.request.sampling.prompt_logprobs.has_value()) {
            Score(sequence, outcome.token, item);
        }
    }
    if (us > 0) {
        // Steps follow each other without drift while the rank is busy; after a pause the clock starts anew.
        const TimePoint now = clock_.Now();
        const auto length =
            std::chrono::duration_cast<Duration>(std::chrono::duration<double, std::micro>(us));
        const TimePoint from = step_end_ + length > now ? step_end_ : now;
        step_end_ = std::min(from, now) + length;
        sleeper_->SleepUntil(step_end_);
    }
    return Status::Ok();
}

}  // namespace rankgate::engine
