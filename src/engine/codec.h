// SPDX-License-Identifier: Apache-2.0
// Codec: one dialect of the wire as the engine end sees it: bytes to commands, finished steps to messages.
// Two implementations, vllm_codec and tokenspeed_codec; EngineCore knows neither's bytes. Confined to the
// core thread; no I/O.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "engine/scheduler.h"
#include "engine/sequence.h"
#include "wire/handshake.h"
#include "wire/protocol.h"

namespace rankgate::engine {

/// What requests are measured against.
struct RequestLimits {
    std::int64_t max_model_len{0};
    std::int64_t vocab_size{0};
    std::vector<TokenId> eos_token_ids;  // for the dialect whose frontends do not send them
};

/// A call between steps. `args` is raw msgpack, a view into the frame.
struct UtilityCommand {
    std::int32_t client{0};
    std::uint64_t call_id{0};
    std::string_view method;
    std::string_view args;
    std::string refusal;  // set: answer with this failure
};

/// What a message asked for. Exactly one family is filled; nothing at all = ignored, and `problem` says why.
struct Command {
    std::unique_ptr<Sequence> add;
    Status add_status;  // not ok: `add` ends at once with an error, alone
    std::vector<std::string_view> aborts;
    std::optional<UtilityCommand> utility;
    std::string problem;

    void Clear() {
        add.reset();
        add_status = Status::Ok();
        aborts.clear();
        utility.reset();
        problem.clear();
    }
};

struct UtilityAnswer {
    std::int32_t client{0};
    std::uint64_t call_id{0};
    std::optional<std::string> failure;
    std::string result;  // raw msgpack; empty = nil
};

/// A message on its way out. Recycled by the outbox.
struct OutMessage {
    std::int32_t client{0};
    std::string payload;
    wire::AuxFrames aux;
};

/// Messages of one flush; keeps its buffers from flush to flush.
class Outbox {
  public:
    OutMessage& Add(std::int32_t client) {
        if (used_ == messages_.size()) {
            messages_.push_back(std::make_unique<OutMessage>());
        }
        OutMessage& message = *messages_[used_++];
        message.client = client;
        message.payload.clear();
        message.aux.Clear();
        return message;
    }
    std::size_t size() const noexcept { return used_; }
    bool empty() const noexcept { return used_ == 0; }
    const OutMessage& operator[](std::size_t i) const { return *messages_[i]; }
    OutMessage& operator[](std::size_t i) { return *messages_[i]; }
    void Clear() noexcept { used_ = 0; }

  private:
    std::vector<std::unique_ptr<OutMessage>> messages_;
    std::size_t used_{0};
};

/// What a flush has to say to one client.
struct StepReport {
    std::int32_t engine_index{0};
    std::int32_t client{0};
    std::span<const Row> rows;
    wire::LoadSnapshot load;
    PrefixStats prefix;
    /// Ids that ended without a row (aborts), for name_finished.
    std::vector<std::string> also_finished;
    double monotonic_seconds{0.0};
    bool name_finished{false};  // list ended ids (frontends that balance through a coordinator read it)
};

class Codec {
  public:
    virtual ~Codec() = default;
    /// Never fails: what cannot be used becomes a refused request or a problem.
    virtual void Decode(std::uint8_t type, std::string_view payload, std::span<const std::string_view> aux,
                        Command& out) = 0;
    /// Appends one message with the load and the rows that are due; none when no row is due and `load_due` is
    /// false. Marks what it sent in the sequences.
    virtual void EncodeStep(const StepReport& report, bool load_due, Outbox& out) = 0;
    virtual void EncodeUtility(std::int32_t engine_index, double monotonic_seconds,
                               const UtilityAnswer& answer, Outbox& out) = 0;
};

std::unique_ptr<Codec> MakeVllmCodec(const RequestLimits& limits);
std::unique_ptr<Codec> MakeTokenSpeedCodec(const RequestLimits& limits);

}  // namespace rankgate::engine
