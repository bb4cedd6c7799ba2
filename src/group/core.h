// SPDX-License-Identifier: Apache-2.0
// The heart of an engine group as a pure state machine: live requests, rank choice, in-flight sets, load,
// waves, liveness. Events go in as method calls with the time as an argument, actions come out of
// PopAction(). No I/O, no clock, no thread, no lock; the group actor owns one, feeds it and executes its
// actions. Confined to the actor's thread.
//
//   core.Submit(reply, stream, std::move(request), now);      // any number of events ...
//   core.Flush();                                             // ... once at the end of a turn: coalesced
//   ABORTs for (Action a; core.PopAction(a);) Execute(a);            // executing may feed events back
//   (SendFailed): they queue behind
//
// Request: Admitted -> Sent -> Streaming -> {Finished | Aborted | Failed}; a slot is one live request on
// exactly one rank's in-flight list, and is freed once by whatever comes first. Rank: Absent -> Greeted ->
// Initialised -> Registered -> Live -> {Dead, Deaf, Mute, Wedged}; Wedged -> Live when it answers again, all
// others come back by a new registration.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "group/flat_index.h"
#include "group/group.h"
#include "group/wave_clock.h"
#include "wire/generate.h"
#include "wire/protocol.h"

namespace rankgate::group {

/// Index of a shard's output mailbox; the actor keeps the table.
using ReplyId = std::uint32_t;
/// One attempt of a request on one rank. Never reused; 24 low bits are the slot.
using AttemptId = std::uint64_t;

/// What tells the dialects apart for a group. vLLM: lockstep groups exist, utility calls exist.
struct VllmProtocol {
    using Waves = WaveClock;
    static constexpr std::string_view kName = "vllm";
    static constexpr bool kHasUtility = true;
};
/// TokenSpeed: ranks run independently, there is no wave to start and no call to ask. The type offers
/// neither.
struct TokenSpeedProtocol {
    struct Waves {};
    static constexpr std::string_view kName = "tokenspeed";
    static constexpr bool kHasUtility = false;
};
template <class Protocol>
concept HasWaves = std::is_same_v<typename Protocol::Waves, WaveClock>;

/// What a rank says of itself when it registers.
struct RankFacts {
    std::string engine_version;
    std::int64_t max_model_len{0};
    std::int64_t num_gpu_blocks{0};
    std::int64_t block_size{0};
    std::int64_t max_num_seqs{0};
    std::int64_t max_num_batched_tokens{0};  // <= 0: not said
    std::int64_t data_parallel_size{1};      // > 1 on the vLLM wire: the ranks run in lockstep
    bool supports_lora{false};
};

/// How a rank was lost; every kind has its own rule (docs/groups.md).
enum class LossKind : std::uint8_t {
    kDead,      // sentinel, exit, or both sockets closed
    kDeaf,      // its input is gone: what it has decoded still finishes, nothing new reaches it
    kMute,      // its output is gone: nothing it computes reaches us
    kWedged,    // nothing closed, nothing answers; may come back by itself
    kLauncher,  // went down with its launcher: not the fault of a request
};
std::string_view LossKindName(LossKind kind) noexcept;

enum class LoadSource : std::uint8_t { kOwn, kReport, kMailbox };

/// What the operating system says of a local engine process; the actor asks it only of ranks that are silent.
enum class ProcessHint : std::uint8_t { kUnknown, kRunning, kStopped };

struct CoreConfig {
    std::int32_t group{0};
    std::int32_t size{1};
    /// Differs between two runs of the gateway, so that ids never meet those of requests that outlived the
    /// last run.
    std::uint32_t id_epoch{0};
    /// First wave number is above it. Wall-clock microseconds outrank every earlier gateway.
    std::uint64_t initial_wave{0};
    /// No other gateway feeds these ranks: then an empty in-flight list is the truth about the load, whatever
    /// was last reported.
    bool sole_feeder{true};
    std::uint32_t max_requests{65536};

    Duration ping_interval{std::chrono::milliseconds{500}};  // of silence, before a rank is asked
    Duration ping_deadline{
        std::chrono::milliseconds{2250}};               // for the answer; both and a tick stay under 3 s
    Duration prefill_floor{std::chrono::seconds{120}};  // what any request without a first token excuses
    Duration prefill_cap{std::chrono::seconds{600}};    // and at most
    std::int64_t prefill_slowest_tps{100};
    Duration admin_allowance{std::chrono::seconds{300}};  // silence while an administrative call runs
    Duration silence_limit{std::chrono::seconds{15}};     // dialects without a ping: decoding, and no token
    Duration send_block{
        std::chrono::milliseconds{250}};  // a rank whose input refused a frame is not chosen meanwhile
    Duration unreachable_limit{
        std::chrono::seconds{2}};  // wakes refused for so long: the rank counts as deaf
    Duration nudge_after{
        std::chrono::seconds{1}};  // lockstep, in flight, silent; 0 = never (the proofs run without)
};

/// One request's row of a decoded engine step. The core reads id, token count and finish reason.
using StepOutput = wire::OutputRow;

/// One decoded message from a rank; views live as long as the call. Fields are handled independently of each
/// other.
struct EngineStep {
    std::int32_t rank{0};  // as the message says, unchecked
    std::span<const StepOutput> outputs;
    std::span<const std::string_view> finished_ids;
    const wire::LoadSnapshot* load{nullptr};  // null = no report in this message
    std::span<const std::int64_t> utility_call_ids;
    std::optional<std::int64_t> wave_complete;
    std::optional<std::int64_t> start_wave;
};

enum class ActionKind : std::uint8_t {
    kDeliver,        // output `index` of the step just fed -> (reply, stream); `terminal` = nothing follows
    kFail,           // terminal error -> (reply, stream)
    kSendAdd,        // encode and send *request to `rank`; answer SendFailed/EncodeFailed(attempt) or nothing
    kSendAbort,      // AbortIds(action) to `rank`
    kSendWave,       // START(number) to `rank`; answer WakeFailed(rank) or nothing
    kPing,           // the cheap utility call to `rank` under call id `number`
    kDeclareLost,    // the core gave `rank` up (wedged, or its lockstep group is lost): `loss`,
                     // `error->message` = why
    kRankRecovered,  // a wedged rank answered: it is live again
    kRankChanged,    // `rank` is in state `index` now, `error->message` = why; for logs and metrics
    kDrained,        // once after BeginDrain, when nothing is live
};

/// One order to the actor. Pointers stay valid until the next PopAction call; `index` of a kDeliver until the
/// next OnStep, so the actor pops everything between two steps.
struct Action {
    ActionKind kind{ActionKind::kDeliver};
    bool terminal{false};
    LossKind loss{LossKind::kDead};
    std::int32_t rank{-1};
    ReplyId reply{0};
    std::uint32_t index{0};
    StreamKey stream{0};
    std::uint64_t number{0};  // wave, call id, or attempt (kSendAdd)
    const wire::GenerateRequest* request{nullptr};
    const Error* error{nullptr};
};

enum class AdminGate : std::uint8_t {
    kSend,
    kBusy,       // another call of the kind is under way: refuse with a conflict
    kNotPaused,  // nothing to resume as far as is known: ask is_scheduler_paused, FoundPaused if all say so,
                 // else answer success
};

struct CoreCounters {
    std::uint64_t submitted{0};
    std::uint64_t finished{0};
    std::uint64_t refused{0};  // before a rank was chosen
    std::uint64_t failed{0};   // after
    std::uint64_t retries{0};
    std::uint64_t wakes{0};   // rounds, not frames
    std::uint64_t nudges{0};  // of those: self-healing
    std::uint64_t pings{0};
    std::uint64_t late_outputs{
        0};  // rows of requests that are gone; the actor logs the growth, at a bounded rate
    std::uint64_t orphan_aborts{0};          // rows of an earlier gateway's requests
    std::uint64_t foreign_rank{0};           // rows from another rank than the request was sent to
    std::uint64_t bad_rank_steps{0};         // messages that named a rank outside the group
    std::array<std::uint64_t, 5> cancels{};  // by CancelCause
    std::array<std::uint64_t, 5> losses{};   // by LossKind
};

/// See the file comment. All times must be monotone. Reply ids and stream keys are the caller's.
template <class Protocol>
class GroupCore {
  public:
    explicit GroupCore(const CoreConfig& config);
    ~GroupCore();
    GroupCore(const GroupCore&) = delete;
    GroupCore& operator=(const GroupCore&) = delete;

    // ---- ranks ----
    /// A handshake stage below kRegistered, for the snapshot only.
    void RankProgress(std::int32_t rank, RankState state);
    /// The ready response. Anything still in flight on this identity died with the old process and is failed
    /// or retried. An error (facts that contradict the group) means: do not call RankUp.
    Status RankRegistered(std::int32_t rank, const RankFacts& facts, TimePoint now);
    /// Handshake complete or re-attached: may be chosen (a lockstep group: once all are up).
    void RankUp(std::int32_t rank, TimePoint now);
    /// Idempotent. A worse kind may follow a milder one (deaf, then dead).
    void RankLost(std::int32_t rank, LossKind kind, std::string_view reason, TimePoint now);
    void RankProcess(std::int32_t rank, ProcessHint hint, TimePoint now);
    /// A load value from the shared-memory mailbox: taken unless the last report is clearly newer. Read it
    /// before submits, and every tick for the rank table.
    void MailboxLoad(std::int32_t rank, const wire::LoadSnapshot& load, TimePoint sampled_at);
    /// Nobody writes the mailbox any more: what it said last is not known to be true. Reports go on.
    void MailboxGone(std::int32_t rank);

    // ---- requests ----
    void Submit(ReplyId reply, StreamKey stream, std::unique_ptr<wire::GenerateRequest> request,
                TimePoint now);
    /// Unknown or ended streams are ignored.
    void Cancel(ReplyId reply, StreamKey stream, CancelCause cause, TimePoint now);
    /// The frame never left: the request goes to another rank, or fails. Stale attempts are ignored.
    void SendFailed(AttemptId attempt, std::string_view reason, TimePoint now);
    void EncodeFailed(AttemptId attempt, Error error, TimePoint now);
    void WakeFailed(std::int32_t rank, TimePoint now)
        requires HasWaves<Protocol>;

    // ---- engine ----
    void OnStep(const EngineStep& step, TimePoint now);
    /// Every 100 ms or so.
    void Tick(TimePoint now);

    // ---- administration ----
    /// Call ids for the actor's own utility calls; never one of a ping.
    std::int64_t NextCallId()
        requires(Protocol::kHasUtility)
    {
        return static_cast<std::int64_t>(++call_id_);
    }
    /// Ask before AdminBegins. In lockstep, pause, sleep, resume and wake_up run one at a time, and a group
    /// that is not paused must not be
    /// resumed: a running rank has nothing to do then while a parked one waits for it in the barrier.
    AdminGate CheckAdmin(AdminMethod method) const noexcept
        requires(Protocol::kHasUtility);
    /// Every rank says that it is paused (is_scheduler_paused), though this gateway did not ask for it: an
    /// earlier one did.
    void FoundPaused(TimePoint now)
        requires(Protocol::kHasUtility);
    /// Around every administrative call that is fanned out to all ranks: before the first frame, and after
    /// the last answer.
    void AdminBegins(AdminMethod method, TimePoint now)
        requires(Protocol::kHasUtility);
    void AdminEnded(AdminMethod method, bool ok, TimePoint now)
        requires(Protocol::kHasUtility);
    void BeginDrain();
    /// A rank was re-attached: the group had formed before this gateway came, whatever is missing now.
    void FoundRunning() noexcept { forming_ = false; }
    /// Ends every live request with `error` and queues its ABORT: the group is being closed.
    void FailAll(const Error& error, TimePoint now);

    // ---- actions ----
    /// Turns the cancels since the last call into one ABORT a rank.
    void Flush();
    /// The oldest action, or false. FIFO.
    bool PopAction(Action& action);
    /// The ids of a kSendAbort, valid as long as the action.
    std::span<const std::string_view> AbortIds(const Action& action);

    // ---- state ----
    std::size_t live_requests() const noexcept { return live_; }
    std::size_t in_flight(std::int32_t rank) const noexcept {
        return ranks_[static_cast<std::size_t>(rank)].in_flight;
    }
    RankState rank_state(std::int32_t rank) const noexcept {
        return ranks_[static_cast<std::size_t>(rank)].state;
    }
    std::int32_t live_ranks() const noexcept { return live_ranks_; }
    bool lockstep() const noexcept { return lockstep_; }
    /// May choose a rank for a new request right now.
    bool serving() const noexcept;
    bool draining() const noexcept { return draining_; }
    const CoreCounters& counters() const noexcept { return counters_; }
    const typename Protocol::Waves& waves() const noexcept
        requires HasWaves<Protocol>
    {
        return waves_;
    }
    /// The score rank choice would use now (lower is better); for the status page and tests.
    double Score(std::int32_t rank) const noexcept;
    /// True once after something a snapshot shows has changed state (not merely a number).
    bool TakeDirty() noexcept { return std::exchange(dirty_, false); }
    GroupSnapshot MakeSnapshot(TimePoint now) const;
    /// Walks everything and returns the first broken invariant, or "". For tests and debug builds; O(slots).
    std::string Audit() const;

  private:
    static constexpr std::uint32_t kNone = 0xffffffff;
    static constexpr std::uint32_t kSlotBits = 24;
    static constexpr std::size_t kSuffix = 25;            // '-', 8 hex epoch, 16 hex attempt
    static constexpr std::size_t kMaxExternalId = 70;     // longer ids are cut on the wire
    static constexpr std::size_t kMaxAbortIds = 1024;     // a frame
    static constexpr std::uint32_t kMaxSendAttempts = 3;  // frames that never left, per request

    struct WireId {
        std::array<char, kMaxExternalId + kSuffix> text{};
        std::uint8_t size{0};
        std::string_view view() const noexcept { return {text.data(), size}; }
    };

    struct Slot {
        AttemptId attempt{0};  // 0 = free
        StreamKey stream{0};
        ReplyId reply{0};
        std::int32_t rank{-1};
        std::uint32_t prev{kNone};  // the rank's list, oldest first; `next` also links the free list
        std::uint32_t next{kNone};
        std::uint32_t prompt_tokens{0};
        std::uint32_t send_failures{0};
        bool started{false};  // something was delivered
        bool retried{false};  // its rank was lost once
        bool pinned{false};
        bool sent{false};           // the ADD was popped: the engine may know the id
        std::uint64_t send_seq{0};  // order on the rank's input
        TimePoint sent_at{};
        WireId id;
        std::string external_id;
        std::unique_ptr<wire::GenerateRequest> request;  // until something was delivered
    };

    struct Rank {
        RankState state{RankState::kAbsent};
        std::string reason;
        RankFacts facts;
        std::uint32_t head{kNone};
        std::uint32_t tail{kNone};
        std::size_t in_flight{0};
        std::size_t unstarted{0};
        std::int64_t prefill_tokens{0};  // of the unstarted
        std::uint64_t send_seq{0};
        std::uint64_t acked_seq{0};  // the engine has decoded every ADD up to here
        wire::LoadSnapshot load;
        LoadSource load_source{LoadSource::kOwn};
        TimePoint load_at{};
        bool load_counts{false};  // false: never reported, or our list ran empty after the report
        TimePoint last_heard{};
        TimePoint ping_sent{};
        std::uint64_t ping_id{0};  // 0 = none out
        std::uint64_t ping_seq{0};
        Duration slowest_answer{0};  // to a ping that nothing excused: a slow machine gets more time
        TimePoint busy_since{};
        TimePoint blocked_until{};
        TimePoint company_until{};  // of a loss in two halves: until then nobody was alone on it
        std::optional<TimePoint> wake_refused_since;
        bool wake_due{false};
        std::optional<TimePoint> stopped_since;
        std::vector<WireId> aborts;  // pending until Flush
    };

    Rank& At(std::int32_t rank) noexcept { return ranks_[static_cast<std::size_t>(rank)]; }
    const Rank& At(std::int32_t rank) const noexcept { return ranks_[static_cast<std::size_t>(rank)]; }
    bool InRange(std::int32_t rank) const noexcept { return rank >= 0 && rank < config_.size; }
    bool Trusted(const Rank& rank) const noexcept;
    std::int32_t Choose(std::int32_t excluded) noexcept;
    double ScoreOf(const Rank& rank) const noexcept;

    std::uint32_t FindWireId(std::string_view id) const noexcept;
    std::uint32_t FindStream(ReplyId reply, StreamKey stream) const noexcept;
    std::uint32_t FindAttempt(AttemptId attempt) const noexcept;
    std::uint32_t NewSlot();
    void Place(std::uint32_t index, std::int32_t rank);
    void Link(std::uint32_t index, std::int32_t rank) noexcept;
    void Unlink(std::uint32_t index) noexcept;
    void Free(std::uint32_t index) noexcept;
    void MarkStarted(Slot& slot, Rank& rank) noexcept;
    void QueueAbort(const Slot& slot);
    void Fail(std::uint32_t index, std::int32_t rank, Error error);
    void Refuse(ReplyId reply, StreamKey stream, Error error);
    bool Retry(std::uint32_t index);
    void LoseRequests(std::int32_t rank, LossKind kind, std::string_view reason, bool only_undecoded);
    void LoseGroup(std::int32_t culprit, LossKind kind, std::string_view reason);
    void GiveUp(std::int32_t rank, LossKind kind, std::string_view reason);
    void SetState(std::int32_t rank, RankState state, std::string_view reason);
    void ResetRank(Rank& rank);
    void TakeLoad(Rank& rank, const wire::LoadSnapshot& load, LoadSource source, TimePoint at) noexcept;
    void Heard(std::int32_t index, Rank& rank);
    void Row(const StepOutput& output, std::uint32_t index, std::int32_t rank);
    void LateRow(std::string_view id, bool running, std::int32_t rank);
    void Wake(std::optional<std::uint64_t> number)
        requires HasWaves<Protocol>;
    void TickPing(std::int32_t index, Rank& rank)
        requires(Protocol::kHasUtility);
    void TickSilence(std::int32_t index, Rank& rank);
    Duration Excuse(const Rank& rank, TimePoint sent_before) const noexcept;
    void MaybeDrained();
    Action& Emit(ActionKind kind, std::int32_t rank);
    const Error* Keep(Error error);

    CoreConfig config_;
    std::vector<Rank> ranks_;
    std::vector<Slot> slots_;
    std::uint32_t free_head_{kNone};
    std::uint64_t attempts_{0};
    FlatIndex by_stream_;
    FlatIndex by_external_id_;
    std::size_t live_{0};
    std::int32_t live_ranks_{0};
    std::uint32_t scan_start_{0};
    bool lockstep_{false};
    bool draining_{false};
    bool forming_{true};
    bool drained_said_{false};
    bool dirty_{true};
    [[no_unique_address]] typename Protocol::Waves waves_;
    std::uint64_t call_id_{0};
    std::int32_t admin_running_{0};
    bool gate_taken_{false};  // lockstep: a pause, sleep, resume or wake_up is under way
    TimePoint now_{};
    TimePoint ticked_at_{};
    TimePoint progress_at_{};  // lockstep: tokens, loads or waves came, or a request was handed over
    TimePoint nudge_at_{};
    Duration nudge_wait_{0};
    CoreCounters counters_;

    std::vector<Action> actions_;
    std::size_t next_action_{0};
    std::deque<Error> errors_;
    std::vector<WireId> abort_ids_;
    std::vector<std::string_view> abort_views_;
    std::array<std::uint64_t, 256>
        orphans_{};  // hashes of ids aborted lately, so that one orphan costs one ABORT
};

extern template class GroupCore<VllmProtocol>;
extern template class GroupCore<TokenSpeedProtocol>;

}  // namespace rankgate::group
