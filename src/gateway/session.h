// SPDX-License-Identifier: Apache-2.0
// One generation request on its shard, from admission to the last byte of its answer: Preparing -> Running ->
// gone. It owns what the engines still do for it: whatever ends it first (last output, stop string, client,
// reader too slow, drain, timeout, lost group) cancels the rest and gives the admission back, once.
// Shard-confined; deletes itself through End.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "api/request.h"
#include "api/response.h"
#include "gateway/prepare_pool.h"
#include "gateway/shard_handler.h"
#include "http/server.h"

namespace rankgate::gateway {

class Session final : public http::ExchangeListener {
  public:
    Session(ShardHandler& handler, http::Exchange& exchange, std::shared_ptr<GroupEntry> entry,
            std::shared_ptr<const api::ModelInfo> model, std::int64_t choices, Arrival arrival);

    void OnClosed(http::CloseReason reason) noexcept override;
    /// The prompts are ready: builds and submits. Consumes `parsed`.
    void Run(api::ParsedRequest parsed, Result<std::vector<api::PreparedPrompt>> prompts);
    /// One choice's share of a step. `error` replaces the output. `terminal`: the engine is done with the
    /// choice.
    void OnOutput(const api::ChoiceOutput& output, const Error* error, std::int32_t rank, bool terminal);
    /// Ends the request with an error that is not one choice's.
    void Fail(const Error& error, group::CancelCause cause);

    ShardHandler& handler_;
    std::shared_ptr<GroupEntry> entry_;
    std::shared_ptr<const api::ModelInfo> model_;
    std::shared_ptr<GenerateJob> job_;  // while preparing
    std::uint64_t id_{0};
    Session* next_{nullptr};
    Session* previous_{nullptr};

  private:
    ~Session() = default;
    /// Gives everything back and deletes this. Live choices are cancelled for `cause`.
    void End(group::CancelCause cause);
    void FinishChoice(std::uint32_t choice, Finish finish);
    void ReplyError(const Error& error);
    void Emit(api::Effect effect, std::string& sink);
    void StartStream();

    http::Exchange* exchange_;
    std::optional<api::ResponseAssembler> assembler_;
    std::vector<group::StreamKey> keys_;      // by choice; 0 = ended
    std::vector<wire::TokenId> named_stops_;  // stop tokens that the answer names, where an engine does not
    std::int64_t choices_;
    TimePoint arrived_;
    TimePoint first_token_{};
    double arrived_wall_;
    http::Shard::TimerId timeout_{0};
    std::int32_t rank_{-1};
    bool submitted_{false};
    bool answered_{false};  // the answer is complete; choices that still run are of no use
};

/// The slow step of a session on the prepare pool.
class GenerateJob final : public PrepareJob, public std::enable_shared_from_this<GenerateJob> {
  public:
    GenerateJob(ShardHandler& handler, std::uint64_t session, api::ParsedRequest parsed,
                std::shared_ptr<const api::ModelInfo> model)
        : handler_{handler}, session_{session}, parsed_{std::move(parsed)}, model_{std::move(model)} {}
    void Run() noexcept override;

    ShardHandler& handler_;
    const std::uint64_t session_;
    api::ParsedRequest parsed_;
    std::shared_ptr<const api::ModelInfo> model_;
    std::optional<Result<std::vector<api::PreparedPrompt>>> prompts_;
};

/// An exchange that waits for something else than a generation (pool, control thread, group). Found by id,
/// because its client may leave first.
class PendingReply final : public http::ExchangeListener {
  public:
    PendingReply(ShardHandler& handler, http::Exchange& exchange, std::uint64_t id)
        : handler_{handler}, exchange_{&exchange}, id_{id} {}
    ~PendingReply();
    PendingReply(const PendingReply&) = delete;
    PendingReply& operator=(const PendingReply&) = delete;
    void OnClosed(http::CloseReason reason) noexcept override;
    /// The exchange to answer on; this is gone afterwards.
    http::Exchange& Take();
    std::uint64_t id() const noexcept { return id_; }

    std::shared_ptr<PrepareJob> job;
    http::Shard::TimerId timeout{0};
    bool counted{false};  // in State::requests_open

  private:
    ShardHandler& handler_;
    http::Exchange* exchange_;
    const std::uint64_t id_;
};

}  // namespace rankgate::gateway
