// SPDX-License-Identifier: Apache-2.0
#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace rankgate::engine {

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr double kGreedyBelow = 1e-5;
constexpr double kMinTemperature = 0.01;  // vLLM raises smaller ones to this

std::uint64_t Mix64(std::uint64_t x) noexcept {
    x += 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

bool InRange(TokenId token, std::size_t vocabulary) noexcept {
    return token >= 0 && static_cast<std::size_t>(token) < vocabulary;
}

void Mask(std::vector<float>& logits, TokenId token) noexcept {
    if (InRange(token, logits.size())) {
        logits[static_cast<std::size_t>(token)] = kNever;
    }
}

/// Forbids the last token of every bad word whose beginning has just been said.
void MaskBadWords(const Sequence& sequence, std::vector<float>& logits) {
    const std::vector<TokenId>& output = sequence.output;
    for (const std::vector<TokenId>& word : sequence.request.sampling.bad_words_token_ids) {
        if (word.empty() || word.size() - 1 > output.size()) {
            continue;
        }
        if (std::equal(word.begin(), word.end() - 1,
                       output.end() - static_cast<std::ptrdiff_t>(word.size() - 1))) {
            Mask(logits, word.back());
        }
    }
}

void Penalise(const Sequence& sequence, SamplerScratch& scratch) {
    const wire::SamplingParams& sampling = sequence.request.sampling;
    if (sampling.repetition_penalty == 1.0 && sampling.presence_penalty == 0.0 &&
        sampling.frequency_penalty == 0.0) {
        return;
    }
    std::vector<float>& logits = scratch.logits;
    scratch.counts.resize(logits.size());
    scratch.seen.resize(logits.size());
    const auto repetition = static_cast<float>(sampling.repetition_penalty);
    const auto repeat = [&](TokenId token) {
        const auto i = static_cast<std::size_t>(token);
        if (!InRange(token, logits.size()) || scratch.seen[i] != 0) {
            return;
        }
        scratch.seen[i] = 1;
        logits[i] = logits[i] > 0 ? logits[i] / repetition : logits[i] * repetition;
    };
    for (const TokenId token : sequence.request.prompt_token_ids) {
        repeat(token);
    }
    for (const TokenId token : sequence.output) {
        repeat(token);
        if (InRange(token, logits.size())) {
            scratch.counts[static_cast<std::size_t>(token)] += 1;
        }
    }
    for (const TokenId token : sequence.output) {
        if (!InRange(token, logits.size())) {
            continue;
        }
        std::int32_t& count = scratch.counts[static_cast<std::size_t>(token)];
        if (count > 0) {
            logits[static_cast<std::size_t>(token)] -=
                static_cast<float>(sampling.frequency_penalty * count + sampling.presence_penalty);
            count = 0;  // once per distinct token, and clean for the next call
        }
    }
    for (const TokenId token : sequence.request.prompt_token_ids) {
        if (InRange(token, logits.size())) {
            scratch.seen[static_cast<std::size_t>(token)] = 0;
        }
    }
    for (const TokenId token : sequence.output) {
        if (InRange(token, logits.size())) {
            scratch.seen[static_cast<std::size_t>(token)] = 0;
        }
    }
}

double Uniform(const Sequence& sequence) noexcept {
    const std::uint64_t bits =
        Mix64(SeedOf(sequence.request) ^ Mix64(static_cast<std::uint64_t>(sequence.output.size()) + 1));
    return static_cast<double>(bits >> 11) * 0x1.0p-53;
}

/// Draws from the tempered logits after min_p, top_k and top_p.
TokenId Draw(const Sequence& sequence, SamplerScratch& scratch) {
    const wire::SamplingParams& sampling = sequence.request.sampling;
    std::vector<float>& logits = scratch.logits;
    const auto temperature = static_cast<float>(std::max(sampling.temperature, kMinTemperature));
    float top = kNever;
    for (float& logit : logits) {
        logit /= temperature;
        top = std::max(top, logit);
    }
    if (!std::isfinite(top)) {
        return ArgMax(logits);
    }
    const float floor = sampling.min_p > 0 ? top + std::log(static_cast<float>(sampling.min_p)) : kNever;
    std::vector<std::int32_t>& order = scratch.order;
    order.clear();
    for (std::size_t i = 0; i < logits.size(); ++i) {
        if (logits[i] > kNever && logits[i] >= floor) {
            order.push_back(static_cast<std::int32_t>(i));
        }
    }
    const auto at = [&](std::int32_t i) { return logits[static_cast<std::size_t>(i)]; };
    const auto better = [&](std::int32_t a, std::int32_t b) {
        return at(a) > at(b) || (at(a) == at(b) && a < b);
    };
    if (sampling.top_k > 0 && static_cast<std::size_t>(sampling.top_k) < order.size()) {
        std::nth_element(order.begin(), order.begin() + sampling.top_k - 1, order.end(), better);
        order.resize(static_cast<std::size_t>(sampling.top_k));
        std::sort(order.begin(), order.end());
    }
    double total = 0;
    for (const std::int32_t i : order) {
        total += std::exp(static_cast<double>(at(i) - top));
    }
    if (sampling.top_p < 1.0) {
        // The smallest set of best tokens that holds top_p of the mass. Only as many are sorted as it takes.
        const double wanted = sampling.top_p * total;
        double mass = 0;
        std::size_t sorted = 0;
        std::size_t kept = 0;
        for (std::size_t step = 64; kept < order.size() && mass < wanted; ++kept) {
            if (kept == sorted) {
                sorted = std::min(order.size(), sorted + step);
                step *= 8;
                std::partial_sort(order.begin() + static_cast<std::ptrdiff_t>(kept),
                                  order.begin() + static_cast<std::ptrdiff_t>(sorted), order.end(), better);
            }
            mass += std::exp(static_cast<double>(at(order[kept]) - top));
        }
        order.resize(std::max<std::size_t>(kept, 1));
        std::sort(order.begin(), order.end());
        total = 0;
        for (const std::int32_t i : order) {
            total += std::exp(static_cast<double>(at(i) - top));
        }
    }
    const double target = Uniform(sequence) * total;
    double sum = 0;
    for (const std::int32_t i : order) {
        sum += std::exp(static_cast<double>(at(i) - top));
        if (target < sum) {
            return i;
        }
    }
    return order.back();  // rounding: the target was the very end
}

}  // namespace

std::uint64_t SeedOf(const wire::GenerateRequest& request) noexcept {
    if (request.sampling.seed.has_value()) {
        return Mix64(static_cast<std::uint64_t>(*request.sampling.seed));
    }
    std::uint64_t hash = 0xcbf29ce484222325ULL;
    for (const char c : request.id) {
        hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
    }
    return Mix64(hash);
}

TokenId ArgMax(std::span<const float> logits) noexcept {
    TokenId best = 0;
    float top = kNever;
    for (std::size_t i = 0; i < logits.size(); ++i) {
        if (logits[i] > top) {
            top = logits[i];
            best = static_cast<TokenId>(i);
        }
    }
    return best;
}

TokenId SampleToken(const Sequence& sequence, std::span<const float> raw,
                    std::span<const std::uint8_t> allowed, SamplerScratch& scratch) {
    const wire::SamplingParams& sampling = sequence.request.sampling;
    const bool greedy = sampling.temperature < kGreedyBelow;
    const bool plain = allowed.empty() && !sampling.allowed_token_ids.has_value() &&
                       sampling.bad_words_token_ids.empty() &&
                       static_cast<std::int64_t>(sequence.output.size()) >= sampling.min_tokens &&
                       sampling.logit_bias.empty() && sampling.repetition_penalty == 1.0 &&
                       sampling.presence_penalty == 0.0 && sampling.frequency_penalty == 0.0;
    if (greedy && plain) {
        return ArgMax(raw);
    }
    std::vector<float>& logits = scratch.logits;
    logits.assign(raw.begin(), raw.end());
    for (std::size_t i = 0; i < allowed.size() && i < logits.size(); ++i) {
        if (allowed[i] == 0) {
            logits[i] = kNever;
        }
    }
    if (sampling.allowed_token_ids.has_value() && !sampling.allowed_token_ids->empty()) {
        scratch.seen.resize(logits.size());
        for (const TokenId token : *sampling.allowed_token_ids) {
            if (InRange(token, logits.size())) {
                scratch.seen[static_cast<std::size_t>(token)] = 1;
            }
        }
        for (std::size_t i = 0; i < logits.size(); ++i) {
            logits[i] = scratch.seen[i] != 0 ? logits[i] : kNever;
            scratch.seen[i] = 0;
        }
    }
    MaskBadWords(sequence, logits);
    if (static_cast<std::int64_t>(sequence.output.size()) < sampling.min_tokens) {
        for (const TokenId token : sampling.all_stop_token_ids) {
            Mask(logits, token);
        }
        for (const TokenId token : sampling.stop_token_ids) {
            Mask(logits, token);
        }
        if (sampling.eos_token_id.has_value()) {
            Mask(logits, *sampling.eos_token_id);
        }
    }
    for (const auto& [token, bias] : sampling.logit_bias) {
        if (InRange(token, logits.size())) {
            logits[static_cast<std::size_t>(token)] += static_cast<float>(bias);
        }
    }
    Penalise(sequence, scratch);
    return greedy ? ArgMax(logits) : Draw(sequence, scratch);
}

void AppendLogprobs(std::span<const float> raw, TokenId chosen, std::int32_t top, SamplerScratch& scratch,
                    wire::Logprobs& out) {
    const std::size_t vocabulary = raw.size();
    float highest = kNever;
    for (const float logit : raw) {
        highest = std::max(highest, logit);
    }
    double sum = 0;
    for (const float logit : raw) {
        sum += std::exp(static_cast<double>(logit - highest));
    }
    const double base = static_cast<double>(highest) + std::log(sum);
    const auto logprob = [&](TokenId token) {
        return static_cast<float>(static_cast<double>(raw[static_cast<std::size_t>(token)]) - base);
    };
    const auto wanted = top < 0 ? vocabulary : std::min(static_cast<std::size_t>(top), vocabulary);
    out.width = static_cast<std::int32_t>(wanted) + 1;
    out.positions += 1;
    std::int64_t rank = 0;
    for (const float logit : raw) {
        rank += logit >= raw[static_cast<std::size_t>(chosen)] ? 1 : 0;
    }
    out.ranks.push_back(rank);
    out.token_ids.push_back(chosen);
    out.logprobs.push_back(logprob(chosen));
    if (wanted == 0) {
        return;
    }
    std::vector<std::int32_t>& order = scratch.order;
    order.resize(vocabulary);
    std::iota(order.begin(), order.end(), 0);
    const auto better = [&](std::int32_t a, std::int32_t b) {
        const float left = raw[static_cast<std::size_t>(a)];
        const float right = raw[static_cast<std::size_t>(b)];
        return left > right || (left == right && a < b);
    };
    std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(wanted), order.end(),
                      better);
    for (std::size_t i = 0; i < wanted; ++i) {
        out.token_ids.push_back(order[i]);
        out.logprobs.push_back(logprob(order[i]));
    }
}

}  // namespace rankgate::engine
