// SPDX-License-Identifier: Apache-2.0
#include "relay/types.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <csignal>
#include <cstring>

#include "relay/rendezvous.h"

namespace rankgate::relay {
namespace {

constexpr std::array<std::string_view, kCodeCount> kCodeNames{"ok",
                                                              "join_timeout",
                                                              "peer_died",
                                                              "leader_died",
                                                              "peer_stalled",
                                                              "publish_stalled",
                                                              "sequence_gap",
                                                              "bad_epoch",
                                                              "foreign_frame",
                                                              "corrupt",
                                                              "too_large",
                                                              "version_mismatch",
                                                              "duplicate_rank",
                                                              "diverged",
                                                              "remote_failure",
                                                              "closed"};
constexpr std::array<std::string_view, 13> kPhaseNames{"none",   "dial",   "hello",   "welcome", "ready",
                                                       "go",     "ack",    "publish", "read",    "run",
                                                       "digest", "finish", "close"};

bool Finite(Seconds value, double low, double high) {
    return std::isfinite(value.count()) && value.count() >= low && value.count() <= high;
}

}  // namespace

std::string_view CodeName(Code code) noexcept {
    const auto i = static_cast<std::size_t>(code);
    return i < kCodeNames.size() ? kCodeNames[i] : "unknown";
}

std::optional<Code> CodeFromName(std::string_view name) noexcept {
    const auto it = std::find(kCodeNames.begin(), kCodeNames.end(), name);
    if (it == kCodeNames.end()) {
        return std::nullopt;
    }
    return static_cast<Code>(it - kCodeNames.begin());
}

std::string_view PhaseName(Phase phase) noexcept {
    const auto i = static_cast<std::size_t>(phase);
    return i < kPhaseNames.size() ? kPhaseNames[i] : "unknown";
}

std::string_view BackendName(Backend backend) noexcept {
    switch (backend) {
        case Backend::kRing:
            return "ring";
        case Backend::kStream:
            return "stream";
        case Backend::kTcp:
            return "tcp";
    }
    return "unknown";
}

void Failure::SetText(std::string_view what) noexcept {
    std::size_t n = std::min(what.size(), text.size() - 1);
    // Never cut a UTF-8 sequence in half: the text becomes a Python string.
    while (n < what.size() && n > 0 && (static_cast<unsigned char>(what[n]) & 0xC0U) == 0x80U) {
        --n;
    }
    std::memcpy(text.data(), what.data(), n);
    std::fill(text.begin() + static_cast<std::ptrdiff_t>(n), text.end(), '\0');
}

std::string_view Failure::text_view() const noexcept {
    return {text.data(), ::strnlen(text.data(), text.size())};
}

std::vector<int> Failure::MissingRanks() const {
    std::vector<int> ranks;
    for (int r = 0; r < kMaxRanks; ++r) {
        if ((missing >> r) & 1U) {
            ranks.push_back(r);
        }
    }
    return ranks;
}

std::string Failure::Describe() const {
    std::string out{CodeName(code)};
    if (origin_rank >= 0) {
        out += ": rank " + std::to_string(origin_rank);
    }
    out += " (phase " + std::string{PhaseName(phase)};
    if (step != 0) {
        out += ", step " + std::to_string(step);
    }
    if (deadline_s >= 0) {
        std::string number = std::to_string(deadline_s);
        number.erase(number.find_last_not_of('0') + 1);
        if (number.back() == '.') {
            number.pop_back();
        }
        out += ", deadline " + number + " s";
    }
    out += ")";
    if (!text_view().empty()) {
        out += ": " + std::string{text_view()};
    }
    return out;
}

std::string Config::Validate() const {
    if (size < 1 || size > kMaxRanks) {
        return "size: " + std::to_string(size) + " is not in 1.." + std::to_string(kMaxRanks);
    }
    if (rank < 0 || rank >= size) {
        return "rank: " + std::to_string(rank) + " is not in 0.." + std::to_string(size - 1);
    }
    if (size > 1) {
        if (std::string why = CheckAddress(where); !why.empty()) {
            return "where: " + why;
        }
        const bool tcp = where.starts_with("tcp://");
        if (tcp != (backend == Backend::kTcp)) {
            return std::string{"backend: "} + std::string{BackendName(backend)} +
                   (tcp ? " cannot use a tcp:// address" : " needs where = tcp://host:port");
        }
    }
    if (!Finite(join, 1e-3, 86400)) {
        return "join_s: must be in 0.001..86400 seconds";
    }
    if (!Finite(publish_stall, 1e-3, 86400)) {
        return "publish_stall_s: must be in 0.001..86400 seconds";
    }
    if (!Finite(stall_after, 0, 86400) || (stall_after.count() > 0 && stall_after.count() < 0.05)) {
        return "stall_after_s: must be 0 (report only) or in 0.05..86400 seconds";
    }
    if (!Finite(beat, 1e-2, 3600)) {
        return "beat_s: must be in 0.01..3600 seconds";
    }
    if (max_lag_steps < 1 || max_lag_steps > kMaxLagSteps) {
        return "max_lag_steps: " + std::to_string(max_lag_steps) + " is not in 1.." +
               std::to_string(kMaxLagSteps);
    }
    if (max_frame < 1 || max_frame > kMaxFrameLimit) {
        return "max_frame: must be in 1.." + std::to_string(kMaxFrameLimit) + " bytes";
    }
    if (!Finite(exit_after, 0, 86400)) {
        return "exit_after_s: must be in 0..86400 seconds";
    }
    if (guard_fd < -1) {
        return "guard_fd: must be a descriptor or -1";
    }
    if (parent_death_signal < 0 || parent_death_signal > SIGRTMAX) {
        return "parent_death_signal: must be a signal number or 0";
    }
    if (spin_us < -1 || spin_us > 1000) {
        return "spin_us: must be in 0..1000, or -1 for the default";
    }
    if (!std::has_single_bit(ring_slots) || ring_slots < 8 || ring_slots > 65536) {
        return "ring_slots: must be a power of two in 8..65536";
    }
    return {};
}

}  // namespace rankgate::relay
