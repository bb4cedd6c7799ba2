// SPDX-License-Identifier: Apache-2.0
// How the HTTP side talks to an engine group: messages only. A group is an actor with one owner thread; a
// shard submits, cancels and calls through Group, and gets one OutputBatch per engine step in its own
// Mailbox. Nothing here blocks and nothing here locks.
//
// Life of a stream key: Submit -> any number of Outputs -> exactly one terminal Output (finish_reason set, or
// error set). After Cancel no further Output for that key is delivered once the group has seen it; a few that
// were already on their way may still arrive and must be dropped by the shard. The slot on the rank is freed
// exactly once, whatever comes first.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/mailbox.h"
#include "base/result.h"
#include "wire/generate.h"

namespace rankgate::group {

/// The submitter's own key of a stream: unique per shard for the life of the process.
using StreamKey = std::uint64_t;

/// One request's share of an engine step as a shard sees it. Token views point into the batch's arena.
struct Output {
    StreamKey stream{0};
    std::uint32_t first_token{0};  // offset into OutputBatch::tokens
    std::uint32_t num_tokens{0};
    wire::FinishReason finish_reason{wire::FinishReason::kNone};
    std::int32_t rank{-1};
    std::int32_t num_cached_tokens{-1};  // >= 0 on the first output of a prefill
    /// Index into the batch's cold tables, -1 = none.
    std::int32_t logprobs{-1};
    std::int32_t prompt_logprobs{-1};
    std::int32_t stop_reason{-1};
    std::int32_t error{-1};
};

/// Everything one engine step has for one shard. Recycled: give it back with Group::Recycle when read.
struct OutputBatch : MailboxNode {
    std::vector<Output> outputs;
    std::vector<wire::TokenId> tokens;
    std::vector<wire::Logprobs> logprobs;
    std::vector<wire::StopReason> stop_reasons;
    std::vector<Error> errors;
    std::int32_t group{0};

    std::span<const wire::TokenId> TokensOf(const Output& output) const {
        return {tokens.data() + output.first_token, output.num_tokens};
    }
    void Clear() {
        outputs.clear();
        tokens.clear();
        logprobs.clear();
        stop_reasons.clear();
        errors.clear();
    }
};

using OutputMailbox = Mailbox<OutputBatch>;

enum class RankState : std::uint8_t {
    kAbsent,
    kGreeted,
    kInitialised,
    kRegistered,
    kLive,
    kDead,
    kDeaf,
    kMute,
    kWedged
};
std::string_view RankStateName(RankState state) noexcept;

/// What is known of one rank; part of the immutable snapshot that health, metrics and admin read.
struct RankInfo {
    std::int32_t rank{0};
    RankState state{RankState::kAbsent};
    std::string reason;  // why it is not live
    std::int64_t in_flight{0};
    wire::LoadSnapshot load;
    double load_age_seconds{-1.0};  // negative = never reported
    std::string load_source;        // "report", "mailbox", "own"
    std::string engine_version;
    std::int64_t max_model_len{0};
    std::int64_t num_gpu_blocks{0};
    std::int64_t block_size{0};
    std::int64_t max_num_seqs{0};
    bool supports_lora{false};
    std::int64_t queued_bytes{0};  // waiting for the rank to read
};

/// Immutable; replaced whole on every change of a rank's state and every 100 ms, so a reader is never further
/// behind.
struct GroupSnapshot {
    std::int32_t group{0};
    std::string runtime;  // "vllm" | "tokenspeed"
    std::string handshake_address;
    std::int32_t size{0};
    std::int32_t live{0};
    bool lockstep{false};
    bool serving{false};
    /// True until every rank was live once (or the group was found running by a restarted gateway): it may
    /// serve already, but it is not what was asked for, so readiness waits.
    bool forming{false};
    std::int64_t max_model_len{0};  // the smallest of the live ranks; 0 = not known yet
    std::int64_t wakes{0};
    std::int64_t retries{0};
    std::int64_t aborts_client{0};
    std::int64_t aborts_stop{0};
    std::int64_t late_outputs{0};
    std::int64_t decode_errors{0};
    std::vector<RankInfo> ranks;
};

enum class CancelCause : std::uint8_t { kClientGone, kStopString, kSlowReader, kDrain, kTimeout };

/// Administrative calls that the gateway offers; never a user-chosen method name. Arguments are per kind (see
/// AdminCall).
enum class AdminMethod : std::uint8_t {
    kIsSleeping,
    kSleep,
    kWakeUp,
    kPause,
    kResume,
    kIsPaused,
    kResetPrefixCache,
    kAddLora,
    kRemoveLora,
    kListLoras,
    kStartProfile,
    kStopProfile
};

struct AdminCall {
    AdminMethod method{AdminMethod::kIsSleeping};
    std::int32_t level{1};          // kSleep
    std::string mode{"abort"};      // kSleep, kPause: abort | wait | keep
    bool clear_cache{true};         // kPause
    std::vector<std::string> tags;  // kWakeUp
    bool reset_running_requests{false};
    bool reset_connector{false};
    wire::LoraRequest lora;  // kAddLora; kRemoveLora uses lora.id
};

/// One rank's answer. `value` is JSON text ("true", "null", "[1,2]").
struct AdminReply {
    std::int32_t rank{0};
    Status status;
    std::string value;
};

/// Handle to a running group. All methods are thread-safe and return at once; the group outlives every caller
/// (the owner joins the shards first).
class Group {
  public:
    virtual ~Group() = default;

    /// Admits, picks and reserves a rank, encodes, sends, wakes. Every answer, refusals included, comes as
    /// Outputs in `reply`.
    virtual void Submit(StreamKey stream, std::unique_ptr<wire::GenerateRequest> request,
                        OutputMailbox& reply) = 0;
    /// The shard needs no more of this stream: frees the slot and sends ABORT. Idempotent; `reply` is the box
    /// given to Submit.
    virtual void Cancel(StreamKey stream, OutputMailbox& reply, CancelCause cause) = 0;
    /// Fanned out to all live ranks concurrently; `done` runs once, on the group's thread, with one reply a
    /// rank.
    virtual void Admin(AdminCall call, std::function<void(std::vector<AdminReply>)> done) = 0;
    virtual std::shared_ptr<const GroupSnapshot> Snapshot() const = 0;
    /// Gives a batch back for reuse.
    virtual void Recycle(std::unique_ptr<OutputBatch> batch) noexcept = 0;
};

}  // namespace rankgate::group
