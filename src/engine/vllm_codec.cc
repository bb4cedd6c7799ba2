// SPDX-License-Identifier: Apache-2.0
// The vLLM dialect of the engine end: every row of a step in one message per client, scheduler stats with
// each of them.
#include <utility>

#include "engine/codec.h"
#include "wire/vllm/outputs.h"
#include "wire/vllm/request.h"
#include "wire/vllm/validate.h"

namespace rankgate::engine {

namespace {

namespace vllm = wire::vllm;

class VllmCodec final : public Codec {
  public:
    explicit VllmCodec(const RequestLimits& limits) {
        limits_.max_model_len = limits.max_model_len;
        limits_.vocab_size = limits.vocab_size;
    }

    void Decode(std::uint8_t type, std::string_view payload, std::span<const std::string_view> /*aux*/,
                Command& out) override {
        switch (type) {
            case static_cast<std::uint8_t>(vllm::RequestType::kAdd):
                DecodeAdd(payload, out);
                return;
            case static_cast<std::uint8_t>(vllm::RequestType::kAbort):
                if (Status status = vllm::DecodeAbort(payload, out.aborts); !status.ok()) {
                    out.aborts.clear();
                    out.problem = "abort: " + status.error().message;
                }
                return;
            case static_cast<std::uint8_t>(vllm::RequestType::kStartDpWave):
                // This engine's ranks are independent; a real dense rank logs it and goes on as well.
                out.problem = "START_DP_WAVE, but this rank runs in no lockstep group";
                return;
            case static_cast<std::uint8_t>(vllm::RequestType::kUtility): {
                Result<vllm::UtilityCall> call = vllm::DecodeUtility(payload);
                if (!call.ok()) {
                    out.problem = "utility: " + call.error().message;
                    return;
                }
                UtilityCommand command;
                command.client = call->client_index;
                command.call_id = call->call_id;
                command.method = call->method;
                command.args = call->args;
                out.utility = command;
                return;
            }
            default:
                out.problem = "unknown message type " + std::to_string(type);
        }
    }

    void EncodeStep(const StepReport& report, bool /*load_due*/, Outbox& out) override {
        OutMessage& message = out.Add(report.client);
        if (outputs_.size() < report.rows.size()) {
            outputs_.resize(report.rows.size());
        }
        finished_.clear();
        for (std::size_t i = 0; i < report.rows.size(); ++i) {
            Fill(*report.rows[i].sequence, outputs_[i]);
            if (report.name_finished && outputs_[i].finish_reason != wire::FinishReason::kNone) {
                finished_.push_back(outputs_[i].request_id);
            }
        }
        finished_.insert(finished_.end(), report.also_finished.begin(), report.also_finished.end());
        vllm::SchedulerStats stats;
        stats.load = report.load;
        stats.prefix_cache.reset = report.prefix.reset;
        stats.prefix_cache.requests = report.prefix.requests;
        stats.prefix_cache.queries = report.prefix.queries;
        stats.prefix_cache.hits = report.prefix.hits;
        stats.prefix_cache.preempted_requests = report.prefix.preempted_requests;
        stats.prefix_cache.preempted_queries = report.prefix.preempted_queries;
        stats.prefix_cache.preempted_hits = report.prefix.preempted_hits;
        vllm::OutputsBatch batch;
        batch.engine_index = report.engine_index;
        batch.outputs = {outputs_.data(), report.rows.size()};
        batch.stats = &stats;
        batch.timestamp = report.monotonic_seconds;
        batch.finished_requests = finished_;
        vllm::EncodeOutputs(batch, message.payload, message.aux);
    }

    void EncodeUtility(std::int32_t engine_index, double monotonic_seconds, const UtilityAnswer& answer,
                       Outbox& out) override {
        OutMessage& message = out.Add(answer.client);
        vllm::UtilityReply reply;
        reply.call_id = answer.call_id;
        reply.failure_message = answer.failure;
        reply.result = answer.result;
        vllm::OutputsBatch batch;
        batch.engine_index = engine_index;
        batch.timestamp = monotonic_seconds;
        batch.utility = &reply;
        vllm::EncodeOutputs(batch, message.payload, message.aux);
    }

  private:
    void DecodeAdd(std::string_view payload, Command& out) {
        vllm::DecodeAdd(payload, decoded_);
        if (!decoded_.has_id) {
            out.problem = "add: " + (decoded_.status.ok() ? std::string{"no request id"}
                                                          : decoded_.status.error().message);
            return;
        }
        out.add = std::make_unique<Sequence>();
        out.add->request = std::move(decoded_.request);
        out.add_status =
            decoded_.status.ok() ? vllm::CheckRequest(out.add->request, limits_) : decoded_.status;
        out.add->want_logprobs = out.add->request.sampling.logprobs.has_value();
    }

    static void Fill(Sequence& sequence, wire::RequestOutput& output) {
        output.request_id = sequence.request.id;
        output.new_token_ids.assign(sequence.unsent().begin(), sequence.unsent().end());
        sequence.sent = sequence.output.size();
        output.finish_reason = sequence.finish;
        output.stop_reason = sequence.stop_reason;
        output.logprobs.reset();
        if (sequence.want_logprobs && sequence.logprobs.positions > 0) {
            output.logprobs = std::exchange(sequence.logprobs, wire::Logprobs{});
        }
        output.prompt_logprobs.reset();
        output.num_cached_tokens.reset();
        output.num_prompt_tokens.reset();
        if (!sequence.first_row_sent && !sequence.output.empty()) {
            sequence.first_row_sent = true;
            output.num_prompt_tokens = static_cast<std::int32_t>(sequence.prompt_len());
            output.num_cached_tokens = static_cast<std::int32_t>(sequence.cached);
            if (sequence.request.sampling.prompt_logprobs.has_value()) {
                output.prompt_logprobs = std::move(sequence.prompt_logprobs);
            }
        }
    }

    vllm::RankLimits limits_;
    vllm::DecodedAdd decoded_;
    std::vector<wire::RequestOutput> outputs_;  // reused: ids and tokens keep their buffers
    std::vector<std::string> finished_;
};

}  // namespace

std::unique_ptr<Codec> MakeVllmCodec(const RequestLimits& limits) {
    return std::make_unique<VllmCodec>(limits);
}

}  // namespace rankgate::engine
