// SPDX-License-Identifier: Apache-2.0
#include "gateway/session.h"

#include <array>
#include <chrono>
#include <utility>

#include "base/log.h"
#include "wire/tokenspeed/outputs.h"

namespace rankgate::gateway {
namespace {

double Seconds(Duration duration) {
    return std::chrono::duration<double>(duration).count();
}

}  // namespace

Session::Session(ShardHandler& handler, http::Exchange& exchange, std::shared_ptr<GroupEntry> entry,
                 std::shared_ptr<const api::ModelInfo> model, std::int64_t choices, Arrival arrival)
    : handler_{handler},
      entry_{std::move(entry)},
      model_{std::move(model)},
      id_{handler.next_id_++},
      exchange_{&exchange},
      choices_{choices},
      arrived_{arrival.at},
      arrived_wall_{arrival.wall} {
    exchange.set_listener(this);
    next_ = handler_.sessions_;
    if (next_ != nullptr) {
        next_->previous_ = this;
    }
    handler_.sessions_ = this;
    handler_.state_.requests_open.fetch_add(1, std::memory_order_relaxed);
    const double limit = handler_.state_.options.request_timeout_seconds;
    if (limit > 0) {
        timeout_ = handler_.shard_.SetTimer(
            std::chrono::duration_cast<Duration>(std::chrono::duration<double>(limit)), [this] {
                timeout_ = 0;
                Fail(Error{ErrorCode::kTimeout, "The request did not finish within the server's time limit.",
                           "", false},
                     group::CancelCause::kTimeout);
            });
    }
}

void Session::End(group::CancelCause cause) {
    for (std::uint32_t choice = 0; choice < keys_.size(); ++choice) {
        if (keys_[choice] != 0) {
            entry_->handle.group->Cancel(keys_[choice], handler_.mailbox_, cause);
            handler_.metrics_.aborts[answered_ ? kSiblingFailed : static_cast<std::size_t>(cause)].Add(1);
            FinishChoice(choice, Finish::kAbort);
        }
    }
    if (submitted_ && assembler_) {
        ModelMetrics& metrics = handler_.metrics_.models[entry_->model_slot];
        const auto tokens = static_cast<double>(assembler_->completion_tokens());
        metrics.e2e.Observe(Seconds(handler_.shard_.Now() - arrived_), E2eBounds());
        metrics.generation_length.Observe(tokens, LengthBounds());
        if (tokens > 1 && first_token_ != TimePoint{}) {
            metrics.time_per_token.Observe(Seconds(handler_.shard_.Now() - first_token_) / (tokens - 1),
                                           TimePerTokenBounds());
        }
    }
    if (job_ != nullptr) {
        job_->cancelled.store(true, std::memory_order_relaxed);
        handler_.preparing_.erase(id_);
    }
    if (timeout_ != 0) {
        handler_.shard_.CancelTimer(timeout_);
    }
    if (exchange_ != nullptr) {
        exchange_->set_listener(nullptr);
    }
    (previous_ != nullptr ? previous_->next_ : handler_.sessions_) = next_;
    if (next_ != nullptr) {
        next_->previous_ = previous_;
    }
    handler_.state_.choices_open.fetch_sub(choices_, std::memory_order_relaxed);
    handler_.state_.requests_open.fetch_sub(1, std::memory_order_relaxed);
    delete this;
}

void Session::FinishChoice(std::uint32_t choice, Finish finish) {
    handler_.CloseStream(keys_[choice]);
    keys_[choice] = 0;
    entry_->in_flight.fetch_sub(1, std::memory_order_relaxed);
    handler_.metrics_.models[entry_->model_slot].finished[static_cast<std::size_t>(finish)].Add(1);
}

void Session::OnClosed(http::CloseReason reason) noexcept {
    exchange_ = nullptr;
    group::CancelCause cause = group::CancelCause::kClientGone;
    if (reason == http::CloseReason::kSlowReader) {
        cause = group::CancelCause::kSlowReader;
    } else if (reason == http::CloseReason::kServerStop) {
        cause = group::CancelCause::kDrain;
    }
    End(cause);
}

void Session::ReplyError(const Error& error) {
    answered_ = true;
    http::Exchange& exchange = *std::exchange(exchange_, nullptr);
    handler_.ReplyError(exchange, error);
}

void Session::Run(api::ParsedRequest parsed, Result<std::vector<api::PreparedPrompt>> prompts) {
    if (!prompts) {
        ReplyError(prompts.error());
        End(group::CancelCause::kDrain);
        return;
    }
    http::Request& request = exchange_->request();
    const std::string reply_id = handler_.ids_.Next(parsed.endpoint);
    const api::BuildContext context{.id = reply_id,
                                    .arrival_time = arrived_wall_,
                                    .data_parallel_rank_header = request.Header("x-data-parallel-rank"),
                                    .traceparent = request.Header("traceparent"),
                                    .tracestate = request.Header("tracestate")};
    auto built = api::BuildGenerate(parsed, *model_, *prompts, context);
    if (!built) {
        ReplyError(built.error());
        End(group::CancelCause::kDrain);
        return;
    }
    if (handler_.state_.options.allowed_origins.empty()) {
        request.ReleaseHead();  // a silent stream keeps only what its answer needs
    }
    ModelMetrics& metrics = handler_.metrics_.models[entry_->model_slot];
    std::size_t prompt_tokens = 0;
    for (const api::PreparedPrompt& prompt : *prompts) {
        prompt_tokens += prompt.num_tokens;
    }
    metrics.prompt_tokens.Add(prompt_tokens);
    metrics.prompt_length.Observe(static_cast<double>(prompt_tokens), LengthBounds());
    assembler_.emplace(std::move(parsed), model_, std::move(*prompts), reply_id,
                       static_cast<std::int64_t>(arrived_wall_));
    submitted_ = true;
    if (!built->empty()) {
        named_stops_ = wire::tokenspeed::NamedStops(built->front()->sampling);
    }
    keys_.assign(built->size(), 0);
    for (std::uint32_t choice = 0; choice < built->size(); ++choice) {
        keys_[choice] = handler_.OpenStream(*this, choice);
    }
    entry_->in_flight.fetch_add(static_cast<std::int64_t>(built->size()), std::memory_order_relaxed);
    // Answers only come through the mailbox, so none of these calls can end this session. A tenant sends now,
    // on this stack, which spares the request a wake-up on its way to the engine.
    const LoopTenant* tenant = entry_->handle.tenant ? &*entry_->handle.tenant : nullptr;
    if (tenant != nullptr) {
        tenant->hold_commands();
    }
    for (std::uint32_t choice = 0; choice < built->size(); ++choice) {
        entry_->handle.group->Submit(keys_[choice], std::move((*built)[choice]), handler_.mailbox_);
    }
    if (tenant != nullptr) {
        tenant->run_commands();
    }
}

void Session::StartStream() {
    handler_.Count(200);
    std::string rank;
    std::array<http::HeaderView, 3> headers{http::HeaderView{"Cache-Control", "no-cache"},
                                            http::HeaderView{"X-Accel-Buffering", "no"}, http::HeaderView{}};
    std::size_t count = 2;
    if (handler_.state_.options.debug_headers) {
        rank = entry_->spec.name + "/" + std::to_string(rank_);
        headers[count++] = {"X-Rankgate-Rank", rank};
    }
    exchange_->StartStream(std::span{headers}.first(count));
}

void Session::OnOutput(const api::ChoiceOutput& output, const Error* error, std::int32_t rank,
                       bool terminal) {
    if (rank >= 0) {
        rank_ = rank;
    }
    if (!output.tokens.empty() && first_token_ == TimePoint{}) {
        first_token_ = handler_.shard_.Now();
        handler_.metrics_.models[entry_->model_slot].ttft.Observe(Seconds(first_token_ - arrived_),
                                                                  TtftBounds());
    }
    // Until the stream has begun an error can still be an HTTP status: its bytes go aside first.
    const bool aside = !exchange_->streaming();
    std::string& sink = aside ? handler_.scratch_ : exchange_->stream();
    if (aside) {
        sink.clear();
    }
    const std::uint32_t choice = output.choice;
    api::ChoiceOutput said = output;
    wire::StopReason matched;
    if (terminal && output.stop_reason == nullptr && !named_stops_.empty()) {
        matched = wire::tokenspeed::MatchedStop(output.finish_reason, output.tokens, named_stops_);
        said.stop_reason = std::holds_alternative<std::monostate>(matched) ? nullptr : &matched;
    }
    const api::Effect effect =
        error != nullptr ? assembler_->OnError(choice, *error, sink) : assembler_->OnOutput(said, sink);
    if (terminal) {
        Finish finish = Finish::kError;
        if (const std::string_view reason = assembler_->finish_reason(choice);
            error == nullptr && reason == "length") {
            finish = Finish::kLength;
        } else if (error == nullptr && output.finish_reason == wire::FinishReason::kAbort) {
            finish = Finish::kAbort;
        } else if (error == nullptr && !effect.failed) {
            finish = Finish::kStop;
        }
        FinishChoice(choice, finish);
    } else if (effect.abort_choice) {
        entry_->handle.group->Cancel(keys_[choice], handler_.mailbox_, group::CancelCause::kStopString);
        handler_.metrics_.aborts[static_cast<std::size_t>(group::CancelCause::kStopString)].Add(1);
        FinishChoice(choice, Finish::kStop);
    }
    Emit(effect, sink);
}

/// Sends what the assembler produced; ends this session when the answer is complete.
void Session::Emit(api::Effect effect, std::string& sink) {
    if (assembler_->streaming()) {
        if (effect.failed && !assembler_->streaming_started()) {
            ReplyError(assembler_->error());
            End(group::CancelCause::kDrain);
            return;
        }
        if (!exchange_->streaming()) {
            if (sink.empty() && !effect.done) {
                return;
            }
            StartStream();
            exchange_->stream().append(sink);
        }
        exchange_->Touch();
        if (effect.done || effect.failed) {
            answered_ = true;
            std::exchange(exchange_, nullptr)->EndStream();
            End(group::CancelCause::kDrain);
        }
        return;
    }
    if (effect.failed) {
        ReplyError(assembler_->error());
        End(group::CancelCause::kDrain);
    } else if (effect.done) {
        http::Exchange& exchange = *std::exchange(exchange_, nullptr);
        handler_.Count(200);
        if (handler_.state_.options.debug_headers) {
            const std::string rank = entry_->spec.name + "/" + std::to_string(rank_);
            const http::HeaderView header{"X-Rankgate-Rank", rank};
            exchange.Respond(200, "application/json", sink, {&header, 1});
        } else {
            exchange.Respond(200, "application/json", sink);
        }
        End(group::CancelCause::kDrain);
    }
}

void Session::Fail(const Error& error, group::CancelCause cause) {
    // Cancel first: the choices end for this cause, whatever the answer turns into.
    for (std::uint32_t choice = 0; choice < keys_.size(); ++choice) {
        if (keys_[choice] != 0) {
            entry_->handle.group->Cancel(keys_[choice], handler_.mailbox_, cause);
            handler_.metrics_.aborts[static_cast<std::size_t>(cause)].Add(1);
            FinishChoice(choice, Finish::kAbort);
        }
    }
    if (assembler_ && exchange_->streaming()) {
        for (std::uint32_t choice = 0; choice < assembler_->num_choices(); ++choice) {
            if (!assembler_->choice_done(choice)) {
                std::string& sink = exchange_->stream();
                Emit(assembler_->OnError(choice, error, sink), sink);
                return;
            }
        }
    }
    ReplyError(error);
    End(cause);
}

void GenerateJob::Run() noexcept {
    prompts_.emplace(api::Prepare(parsed_, *model_));
    handler_.shard_.Post([self = shared_from_this()] { self->handler_.OnPrepared(*self); });
}

PendingReply::~PendingReply() {
    if (counted) {
        handler_.state_.requests_open.fetch_sub(1, std::memory_order_relaxed);
    }
}

void PendingReply::OnClosed(http::CloseReason /*reason*/) noexcept {
    exchange_ = nullptr;
    if (job != nullptr) {
        job->cancelled.store(true, std::memory_order_relaxed);
    }
    if (timeout != 0) {
        handler_.shard_.CancelTimer(timeout);
    }
    handler_.EraseReply(id_);  // destroys this
}

http::Exchange& PendingReply::Take() {
    http::Exchange& exchange = *exchange_;
    exchange.set_listener(nullptr);
    if (timeout != 0) {
        handler_.shard_.CancelTimer(timeout);
    }
    handler_.EraseReply(id_);  // destroys this
    return exchange;
}

}  // namespace rankgate::gateway
