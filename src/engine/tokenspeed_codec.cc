// SPDX-License-Identifier: Apache-2.0
// The TokenSpeed dialect of the engine end: rows thinned out by the request's own interval, the load in every
// batch (zero rows where only the load is news), and an abort row where the real engine dies or stays silent.
#include <algorithm>
#include <utility>

#include "engine/codec.h"
#include "wire/tokenspeed/outputs.h"
#include "wire/tokenspeed/request.h"
#include "wire/tokenspeed/validate.h"

namespace rankgate::engine {

namespace {

namespace tokenspeed = wire::tokenspeed;
using wire::FinishReason;

/// Plain (not streamed) requests report progress this often, as upstream does.
constexpr std::int64_t kPlainInterval = 50;

class TokenSpeedCodec final : public Codec {
  public:
    explicit TokenSpeedCodec(RequestLimits limits) : eos_{std::move(limits.eos_token_ids)} {
        limits_.max_prompt_tokens = limits.max_model_len - 1;
        limits_.vocab_size = limits.vocab_size;
    }

    void Decode(std::uint8_t type, std::string_view payload, std::span<const std::string_view> /*aux*/,
                Command& out) override {
        switch (type) {
            case static_cast<std::uint8_t>(tokenspeed::RequestType::kAdd):
                DecodeAdd(payload, out);
                return;
            case static_cast<std::uint8_t>(tokenspeed::RequestType::kAbort):
                if (Status status = tokenspeed::DecodeAbort(payload, out.aborts); !status.ok()) {
                    out.aborts.clear();
                    out.problem = "abort: " + status.error().message;
                }
                return;
            default:
                out.problem = "unknown message type " + std::to_string(type);
        }
    }

    void EncodeStep(const StepReport& report, bool load_due, Outbox& out) override {
        std::size_t used = 0;
        if (outputs_.size() < report.rows.size()) {
            outputs_.resize(report.rows.size());
        }
        for (const Row& row : report.rows) {
            if (Due(*row.sequence)) {
                Fill(*row.sequence, outputs_[used++]);
            }
        }
        if (used == 0 && !load_due) {
            return;
        }
        tokenspeed::OutputsBatch batch;
        batch.engine_index = report.engine_index;
        batch.outputs = {outputs_.data(), used};
        batch.load = report.load;
        tokenspeed::EncodeOutputs(batch, out.Add(report.client).payload);
    }

    void EncodeUtility(std::int32_t /*engine_index*/, double /*monotonic_seconds*/,
                       const UtilityAnswer& /*answer*/, Outbox& /*out*/) override {
        // This wire has no calls, so nobody can be waiting for an answer.
    }

  private:
    void DecodeAdd(std::string_view payload, Command& out) {
        tokenspeed::DecodeRequest(payload, decoded_);
        tokenspeed::Request& request = decoded_.request;
        if (!decoded_.has_rid) {
            out.problem =
                "add: " + (decoded_.status.ok() ? std::string{"no rid"} : decoded_.status.error().message);
            return;
        }
        out.add = std::make_unique<Sequence>();
        out.add->request.id = request.rid;
        out.add_status = decoded_.status;
        if (out.add_status.ok()) {
            tokenspeed::Normalise(request);
            out.add_status = tokenspeed::CheckDecoded(request, limits_);
        }
        if (!out.add_status.ok()) {
            // Kept for the prompt_tokens column of the abort row.
            out.add->request.prompt_token_ids.resize(request.input_ids.has_value() ? request.input_ids->size()
                                                                                   : 0);
            return;
        }
        const bool ignore_eos = request.sampling.ignore_eos;
        out.add->emit.every_step = false;
        out.add->emit.stream = request.stream;
        out.add->emit.interval = static_cast<std::int32_t>(
            std::clamp<std::int64_t>(request.sampling.stream_interval.value_or(1), 1, 1 << 20));
        out.add->want_logprobs = request.return_logprob;
        wire::GenerateRequest& generate = out.add->request;
        generate = tokenspeed::ToGenerateRequest(std::move(request));
        wire::SamplingParams& sampling = generate.sampling;
        if (out.add->want_logprobs && !sampling.logprobs.has_value()) {
            sampling.logprobs = 0;
        }
        if (ignore_eos) {
            // On this wire it switches off explicit stop ids as well.
            sampling.stop_token_ids.clear();
            sampling.all_stop_token_ids.clear();
            sampling.eos_token_id.reset();
        } else if (!eos_.empty()) {
            sampling.eos_token_id = eos_.front();
            sampling.stop_token_ids.insert(sampling.stop_token_ids.end(), eos_.begin() + 1, eos_.end());
            sampling.all_stop_token_ids = sampling.stop_token_ids;
            sampling.all_stop_token_ids.push_back(eos_.front());
        }
    }

    static bool Due(const Sequence& sequence) noexcept {
        const auto done = static_cast<std::int64_t>(sequence.output.size());
        if (sequence.finish != FinishReason::kNone) {
            return true;
        }
        if (sequence.emit.stream) {
            return sequence.emit.interval <= 1 || done % sequence.emit.interval == 1;
        }
        return done == 1 || done % kPlainInterval == 0;
    }

    static void Fill(Sequence& sequence, wire::RequestOutput& output) {
        output.request_id = sequence.request.id;
        output.new_token_ids.assign(sequence.unsent().begin(), sequence.unsent().end());
        sequence.sent = sequence.output.size();
        // The slim form knows stop, length and abort only.
        output.finish_reason = sequence.finish == FinishReason::kError        ? FinishReason::kAbort
                               : sequence.finish == FinishReason::kRepetition ? FinishReason::kStop
                                                                              : sequence.finish;
        output.stop_reason.emplace<std::monostate>();
        output.num_prompt_tokens = static_cast<std::int32_t>(sequence.prompt_len());
        output.num_cached_tokens = static_cast<std::int32_t>(sequence.cached);
        output.completion_tokens = static_cast<std::int64_t>(sequence.output.size());
        output.logprobs.reset();
        if (sequence.want_logprobs && sequence.logprobs.positions > 0) {
            output.logprobs = std::exchange(sequence.logprobs, wire::Logprobs{});
        }
    }

    tokenspeed::RankLimits limits_;
    std::vector<TokenId> eos_;
    tokenspeed::DecodedRequest decoded_;
    std::vector<wire::RequestOutput> outputs_;
};

}  // namespace

std::unique_ptr<Codec> MakeTokenSpeedCodec(const RequestLimits& limits) {
    return std::make_unique<TokenSpeedCodec>(limits);
}

}  // namespace rankgate::engine
