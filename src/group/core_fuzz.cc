// SPDX-License-Identifier: Apache-2.0
// What an engine says reaches the group's state machine: any outputs message of either dialect, decoded as
// the actor decodes it, between submits, cancels, losses and ticks. The books stay right (Audit), a stream
// ends once, and nothing is left when all ranks are gone. Input: a list of events [what][argument][length, 2
// bytes][payload]; a request id
// '#' + digit in a message stands for a request that was really sent.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/log.h"
#include "group/core.h"
#include "wire/tokenspeed/outputs.h"
#include "wire/vllm/outputs.h"

namespace {

using namespace rankgate;         // NOLINT: a program of one file
using namespace rankgate::group;  // NOLINT

constexpr std::int32_t kSize = 2;

enum class End : std::uint8_t { kOpen, kCancelled, kTerminal };

template <class Protocol>
class Run {
  public:
    explicit Run(bool lockstep) : lockstep_{lockstep && Protocol::kHasUtility}, core_{Config()} {
        Up(0);
        Up(1);
        Pump();
    }

    void Event(std::uint8_t what, std::uint8_t argument, std::string_view payload) {
        const std::int32_t rank = argument % kSize;
        switch (what & 7) {
            case 0: {
                auto request = std::make_unique<wire::GenerateRequest>();
                request->id =
                    (argument & 0x80) != 0 ? std::string{payload} : "r" + std::to_string(ended_.size());
                request->prompt_token_ids = {1, 2, 3};
                if ((argument & 0x40) != 0) {
                    request->data_parallel_rank = argument % 4 - 1;
                }
                ended_.push_back(End::kOpen);
                core_.Submit(0, ended_.size() - 1, std::move(request), now_);
                break;
            }
            case 1:
                if (!ended_.empty()) {
                    const std::size_t stream = argument % ended_.size();
                    core_.Cancel(0, stream, CancelCause::kClientGone, now_);
                    ended_[stream] = ended_[stream] == End::kOpen ? End::kCancelled : ended_[stream];
                }
                break;
            case 2:
                now_ += std::chrono::milliseconds{10} * argument;
                core_.Tick(now_);
                break;
            case 3:
                core_.RankLost(rank, static_cast<LossKind>(argument / 2 % 5), "fuzz", now_);
                break;
            case 4:
                Up(rank);
                break;
            default:
                Step(argument, payload);
        }
        if ((what & 8) == 0) {
            Pump();
        }
        RG_CHECK(core_.Audit().empty());
        for (std::int32_t r = 0; r < kSize; ++r) {
            RG_CHECK(!std::isnan(core_.Score(r)));
        }
        (void)core_.MakeSnapshot(now_);
    }

    void Finish() {
        for (std::int32_t r = 0; r < kSize; ++r) {
            core_.RankLost(r, LossKind::kDead, "end", now_);
        }
        Pump();
        RG_CHECK(core_.live_requests() == 0 && core_.Audit().empty());
        for (const End end : ended_) {
            RG_CHECK(end != End::kOpen);
        }
    }

  private:
    static CoreConfig Config() {
        CoreConfig config;
        config.size = kSize;
        config.max_requests = 16;
        return config;
    }
    void Up(std::int32_t rank) {
        RankFacts facts;
        facts.data_parallel_size = lockstep_ ? kSize : 1;
        if (core_.RankRegistered(rank, facts, now_).ok()) {
            core_.RankUp(rank, now_);
        }
    }
    std::string_view RealId(std::string_view id) const {
        if (id.size() == 2 && id[0] == '#' && id[1] >= '0' && id[1] <= '9' && !sent_.empty()) {
            return sent_[static_cast<std::size_t>(id[1] - '0') % sent_.size()];
        }
        return id;
    }

    void Step(std::uint8_t argument, std::string_view payload) {
        const std::vector<std::string_view> frames{payload};
        EngineStep step;
        std::int64_t call_id = 0;
        const auto take = [&](auto& message) {
            for (wire::OutputRow& row : message.rows) {
                row.request_id = RealId(row.request_id);
            }
            step.rank = (argument & 0x80) != 0 ? message.engine_index : argument % kSize;
            step.outputs = message.rows;
        };
        if constexpr (Protocol::kHasUtility) {
            if (!wire::vllm::DecodeOutputs(frames, vllm_).ok()) {
                return;
            }
            take(vllm_);
            for (std::string_view& id : vllm_.finished_requests) {
                id = RealId(id);
            }
            step.finished_ids = vllm_.finished_requests;
            step.load = vllm_.has_stats ? &vllm_.stats.load : nullptr;
            if (vllm_.has_utility && !vllm_.utility.unsolicited) {
                call_id = static_cast<std::int64_t>(vllm_.utility.call_id);
                step.utility_call_ids = {&call_id, 1};
            }
            if (vllm_.wave_complete >= 0) {
                step.wave_complete = vllm_.wave_complete;
            }
            if (vllm_.start_wave >= 0) {
                step.start_wave = vllm_.start_wave;
            }
        } else {
            if (!wire::tokenspeed::DecodeOutputs(frames, tokenspeed_).ok()) {
                return;
            }
            take(tokenspeed_);
            step.load = tokenspeed_.has_load() ? &tokenspeed_.load : nullptr;
        }
        Pump();  // the last step's outputs are gone with this one
        core_.OnStep(step, now_);
        Pump();
    }

    void Pump() {
        core_.Flush();
        // Executing an action may queue more, but never without end.
        int budget = 100'000;
        for (Action a; core_.PopAction(a);) {
            RG_CHECK(--budget > 0);
            switch (a.kind) {
                case ActionKind::kDeliver:
                case ActionKind::kFail: {
                    RG_CHECK(a.reply == 0 && a.stream < ended_.size());
                    // What was queued before a cancel may still come out; after a terminal nothing may.
                    RG_CHECK(ended_[a.stream] != End::kTerminal);
                    if (a.terminal || a.kind == ActionKind::kFail) {
                        ended_[a.stream] = End::kTerminal;
                    }
                    break;
                }
                case ActionKind::kSendAdd:
                    RG_CHECK(a.rank >= 0 && a.rank < kSize && core_.rank_state(a.rank) == RankState::kLive);
                    sent_.push_back(a.request->id);
                    break;
                case ActionKind::kSendAbort:
                    RG_CHECK(!core_.AbortIds(a).empty());
                    break;
                default:
                    break;
            }
        }
    }

    const bool lockstep_;
    GroupCore<Protocol> core_;
    TimePoint now_{std::chrono::hours{1}};
    std::vector<End> ended_;
    std::vector<std::string> sent_;
    wire::vllm::OutputsMessage vllm_;
    wire::tokenspeed::OutputsMessage tokenspeed_;
};

template <class Protocol>
void Drive(bool lockstep, std::string_view input) {
    Run<Protocol> run{lockstep};
    for (int events = 0; input.size() >= 4 && events < 200; ++events) {
        const auto byte = [&](std::size_t at) { return static_cast<std::uint8_t>(input[at]); };
        const std::uint8_t what = byte(0);
        const std::uint8_t argument = byte(1);
        const std::size_t size = std::size_t{byte(2)} | std::size_t{byte(3)} << 8;
        input.remove_prefix(4);
        const std::string_view payload = input.substr(0, size);
        input.remove_prefix(payload.size());
        run.Event(what, argument, payload);
    }
    run.Finish();
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
    InitLog(LogLevel::kError, LogFormat::kText);
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size == 0) {
        return 0;
    }
    const std::string_view input{reinterpret_cast<const char*>(data) + 1, size - 1};
    if ((data[0] & 1) != 0) {
        Drive<TokenSpeedProtocol>(false, input);
    } else {
        Drive<VllmProtocol>((data[0] & 2) != 0, input);
    }
    return 0;
}
