// SPDX-License-Identifier: Apache-2.0
// GroupCore: see core.h for the contract. The order inside every method is: undo or release first, then
// decide, then emit, so that an action never describes a state that a later line still changes.
#include "group/core.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace rankgate::group {
namespace {

constexpr char kHex[] = "0123456789abcdef";
constexpr std::int64_t kDefaultStepTokens = 8192;
constexpr std::int64_t kMaxPlausibleLoad = 1 << 24;  // requests or pages; hostile reports are cut to it
constexpr std::size_t kMaxReason = 512;
/// A rank that dies slowly loses its two connections one after the other: one death all the same.
constexpr Duration kOneDeath = std::chrono::seconds{2};
constexpr Duration kStallGuard = std::chrono::seconds{1};
constexpr Duration kPageSlack = std::chrono::milliseconds{5};  // a report's way here
constexpr Duration kAskAgain = std::chrono::seconds{30};
constexpr Duration kMaxLearnedDeadline = std::chrono::seconds{30};
constexpr Duration kMaxNudgeWait = std::chrono::seconds{60};

void PutHex(char* out, std::uint64_t value, std::size_t digits) noexcept {
    for (std::size_t i = digits; i-- > 0; value >>= 4) {
        out[i] = kHex[value & 15];
    }
}

/// 6 lower-case hex digits, or a number above every slot.
std::uint32_t ParseHex6(const char* text) noexcept {
    std::uint32_t value = 0;
    for (std::size_t i = 0; i < 6; ++i) {
        const auto c = static_cast<std::uint32_t>(static_cast<unsigned char>(text[i]));
        const std::uint32_t digit = c - '0' < 10 ? c - '0' : c - 'a' + 10;
        if (digit > 15) {
            return 0xffffffff;
        }
        value = value << 4 | digit;
    }
    return value;
}

std::uint64_t HashText(std::string_view text) noexcept {
    std::uint64_t hash = 0x9e3779b97f4a7c15ULL ^ text.size();
    std::size_t i = 0;
    for (; i + 8 <= text.size(); i += 8) {
        std::uint64_t word = 0;
        std::memcpy(&word, text.data() + i, 8);
        hash = Mix(hash ^ word);
    }
    std::uint64_t word = 0;
    if (i < text.size()) {
        std::memcpy(&word, text.data() + i, text.size() - i);
    }
    return Mix(hash ^ word);
}

std::uint64_t HashStream(ReplyId reply, StreamKey stream) noexcept {
    return Mix(Mix(stream + 0x9e3779b97f4a7c15ULL) ^ reply);
}

RankState StateOf(LossKind kind) noexcept {
    switch (kind) {
        case LossKind::kDeaf:
            return RankState::kDeaf;
        case LossKind::kMute:
            return RankState::kMute;
        case LossKind::kWedged:
            return RankState::kWedged;
        case LossKind::kDead:
        case LossKind::kLauncher:
            return RankState::kDead;
    }
    return RankState::kDead;
}

/// How final a state is: a loss only ever moves upwards here.
int Severity(RankState state) noexcept {
    switch (state) {
        case RankState::kDeaf:
            return 1;
        case RankState::kWedged:
            return 2;
        case RankState::kMute:
            return 3;
        case RankState::kDead:
            return 4;
        default:
            return 0;
    }
}

/// The calls that need every rank of a lockstep group at once.
bool ChangesPause(AdminMethod method) noexcept {
    return method == AdminMethod::kPause || method == AdminMethod::kSleep || method == AdminMethod::kResume ||
           method == AdminMethod::kWakeUp;
}

std::uint32_t TokensOf(const wire::GenerateRequest& request) noexcept {
    return static_cast<std::uint32_t>(std::min<std::size_t>(request.prompt_token_ids.size(), 0x7fffffff));
}

}  // namespace

std::string_view RankStateName(RankState state) noexcept {
    switch (state) {
        case RankState::kAbsent:
            return "absent";
        case RankState::kGreeted:
            return "greeted";
        case RankState::kInitialised:
            return "initialised";
        case RankState::kRegistered:
            return "registered";
        case RankState::kLive:
            return "live";
        case RankState::kDead:
            return "dead";
        case RankState::kDeaf:
            return "deaf";
        case RankState::kMute:
            return "mute";
        case RankState::kWedged:
            return "wedged";
    }
    return "unknown";
}

std::string_view LossKindName(LossKind kind) noexcept {
    switch (kind) {
        case LossKind::kDead:
            return "dead";
        case LossKind::kDeaf:
            return "deaf";
        case LossKind::kMute:
            return "mute";
        case LossKind::kWedged:
            return "wedged";
        case LossKind::kLauncher:
            return "launcher";
    }
    return "unknown";
}

template <class P>
GroupCore<P>::GroupCore(const CoreConfig& config) : config_{config} {
    config_.size = std::max(config_.size, 1);
    config_.max_requests = std::clamp<std::uint32_t>(config_.max_requests, 1, (1u << kSlotBits) - 1);
    ranks_.resize(static_cast<std::size_t>(config_.size));
    if constexpr (HasWaves<P>) {
        waves_ = WaveClock{config_.initial_wave};
    }
}

template <class P>
GroupCore<P>::~GroupCore() = default;

// ---- actions ---------------------------------------------------------------------------------------------

template <class P>
Action& GroupCore<P>::Emit(ActionKind kind, std::int32_t rank) {
    Action& action = actions_.emplace_back();
    action.kind = kind;
    action.rank = rank;
    return action;
}

template <class P>
const Error* GroupCore<P>::Keep(Error error) {
    errors_.push_back(std::move(error));
    return &errors_.back();
}

template <class P>
bool GroupCore<P>::PopAction(Action& action) {
    while (next_action_ < actions_.size()) {
        action = actions_[next_action_++];
        if (action.kind == ActionKind::kSendAdd) {
            const std::uint32_t index = FindAttempt(action.number);
            if (index == kNone || slots_[index].request == nullptr) {
                continue;  // cancelled, failed or moved before it was sent
            }
            slots_[index].sent = true;
            action.request = slots_[index].request.get();
        }
        return true;
    }
    actions_.clear();
    next_action_ = 0;
    if (!errors_.empty()) {
        errors_.clear();
    }
    abort_ids_.clear();
    return false;
}

template <class P>
std::span<const std::string_view> GroupCore<P>::AbortIds(const Action& action) {
    abort_views_.clear();
    const auto first = static_cast<std::size_t>(action.number);
    for (std::size_t i = first; i < first + action.index && i < abort_ids_.size(); ++i) {
        abort_views_.push_back(abort_ids_[i].view());
    }
    return abort_views_;
}

template <class P>
void GroupCore<P>::Flush() {
    for (std::int32_t r = 0; r < config_.size; ++r) {
        Rank& rank = At(r);
        if (rank.aborts.empty()) {
            continue;
        }
        for (std::size_t done = 0; done < rank.aborts.size();) {
            const std::size_t count = std::min(kMaxAbortIds, rank.aborts.size() - done);
            Action& action = Emit(ActionKind::kSendAbort, r);
            action.number = abort_ids_.size();
            action.index = static_cast<std::uint32_t>(count);
            const auto from = rank.aborts.begin() + static_cast<std::ptrdiff_t>(done);
            abort_ids_.insert(abort_ids_.end(), from, from + static_cast<std::ptrdiff_t>(count));
            done += count;
        }
        rank.aborts.clear();
    }
}

// ---- slots -----------------------------------------------------------------------------------------------

template <class P>
std::uint32_t GroupCore<P>::FindWireId(std::string_view id) const noexcept {
    if (id.size() < kSuffix) {
        return kNone;
    }
    const std::uint32_t index = ParseHex6(id.data() + id.size() - 6);
    if (index >= slots_.size()) {
        return kNone;
    }
    const Slot& slot = slots_[index];
    return slot.attempt != 0 && slot.id.view() == id ? index : kNone;
}

template <class P>
std::uint32_t GroupCore<P>::FindStream(ReplyId reply, StreamKey stream) const noexcept {
    return by_stream_.Find(HashStream(reply, stream), [&](std::uint32_t index) {
        return slots_[index].stream == stream && slots_[index].reply == reply;
    });
}

template <class P>
std::uint32_t GroupCore<P>::FindAttempt(AttemptId attempt) const noexcept {
    const auto index = static_cast<std::uint32_t>(attempt & ((1u << kSlotBits) - 1));
    return attempt != 0 && index < slots_.size() && slots_[index].attempt == attempt ? index : kNone;
}

template <class P>
std::uint32_t GroupCore<P>::NewSlot() {
    if (free_head_ != kNone) {
        const std::uint32_t index = free_head_;
        free_head_ = slots_[index].next;
        slots_[index].next = kNone;
        return index;
    }
    slots_.emplace_back();
    return static_cast<std::uint32_t>(slots_.size() - 1);
}

template <class P>
void GroupCore<P>::Link(std::uint32_t index, std::int32_t r) noexcept {
    Slot& slot = slots_[index];
    Rank& rank = At(r);
    slot.rank = r;
    slot.prev = rank.tail;
    slot.next = kNone;
    (rank.tail == kNone ? rank.head : slots_[rank.tail].next) = index;
    rank.tail = index;
    if (rank.in_flight++ == 0) {
        rank.busy_since = now_;
    }
    ++rank.unstarted;
    rank.prefill_tokens += slot.prompt_tokens;
}

template <class P>
void GroupCore<P>::Unlink(std::uint32_t index) noexcept {
    Slot& slot = slots_[index];
    Rank& rank = At(slot.rank);
    (slot.prev == kNone ? rank.head : slots_[slot.prev].next) = slot.next;
    (slot.next == kNone ? rank.tail : slots_[slot.next].prev) = slot.prev;
    slot.prev = slot.next = kNone;
    slot.rank = -1;
    if (!slot.started) {
        --rank.unstarted;
        rank.prefill_tokens -= slot.prompt_tokens;
    }
    if (--rank.in_flight == 0 && config_.sole_feeder) {
        rank.load_counts = false;  // whatever it last said, it is idle now; its next word counts again
    }
}

template <class P>
void GroupCore<P>::Free(std::uint32_t index) noexcept {
    Slot& slot = slots_[index];
    if (slot.rank >= 0) {
        Unlink(index);
    }
    by_stream_.Erase(HashStream(slot.reply, slot.stream), index);
    by_external_id_.Erase(HashText(slot.external_id), index);
    slot.attempt = 0;
    slot.request.reset();
    slot.external_id.clear();
    slot.next = free_head_;
    free_head_ = index;
    --live_;
    MaybeDrained();
}

template <class P>
void GroupCore<P>::MaybeDrained() {
    if (draining_ && live_ == 0 && !drained_said_) {
        drained_said_ = true;
        Emit(ActionKind::kDrained, -1);
    }
}

template <class P>
void GroupCore<P>::MarkStarted(Slot& slot, Rank& rank) noexcept {
    slot.started = true;
    --rank.unstarted;
    rank.prefill_tokens -= slot.prompt_tokens;
    slot.request.reset();  // it can no longer be retried; a long prompt is not kept for a long answer
}

/// Gives the slot a new attempt on `r`: new wire id, in-flight entry, ADD, and a wake where one is due.
template <class P>
void GroupCore<P>::Place(std::uint32_t index, std::int32_t r) {
    Slot& slot = slots_[index];
    Rank& rank = At(r);
    slot.attempt = ++attempts_ << kSlotBits | index;
    const std::size_t prefix = std::min(slot.external_id.size(), kMaxExternalId);
    std::memcpy(slot.id.text.data(), slot.external_id.data(), prefix);
    char* suffix = slot.id.text.data() + prefix;
    suffix[0] = '-';
    PutHex(suffix + 1, config_.id_epoch, 8);
    PutHex(suffix + 9, slot.attempt, 16);
    slot.id.size = static_cast<std::uint8_t>(prefix + kSuffix);
    slot.request->id.assign(slot.id.view());
    slot.sent = false;
    slot.sent_at = now_;
    slot.send_seq = ++rank.send_seq;
    Link(index, r);
    progress_at_ = now_;

    if constexpr (HasWaves<P>) {
        if (lockstep_) {
            const std::optional<std::uint64_t> wake = waves_.OnRequestSent();
            slot.request->current_wave = static_cast<std::int64_t>(waves_.now());
            Emit(ActionKind::kSendAdd, r).number = slot.attempt;
            Wake(wake);
            return;
        }
    }
    Emit(ActionKind::kSendAdd, r).number = slot.attempt;
}

template <class P>
void GroupCore<P>::Refuse(ReplyId reply, StreamKey stream, Error error) {
    ++counters_.refused;
    Action& action = Emit(ActionKind::kFail, -1);
    action.reply = reply;
    action.stream = stream;
    action.terminal = true;
    action.error = Keep(std::move(error));
}

template <class P>
void GroupCore<P>::Fail(std::uint32_t index, std::int32_t rank, Error error) {
    const Slot& slot = slots_[index];
    Action& action = Emit(ActionKind::kFail, rank);
    action.reply = slot.reply;
    action.stream = slot.stream;
    action.terminal = true;
    action.error = Keep(std::move(error));
    ++counters_.failed;
    Free(index);
}

template <class P>
void GroupCore<P>::QueueAbort(const Slot& slot) {
    if (!slot.sent || slot.rank < 0) {
        return;  // the engine never saw the id
    }
    Rank& rank = At(slot.rank);
    if (rank.state == RankState::kLive || rank.state == RankState::kWedged) {
        rank.aborts.push_back(slot.id);
    }
}

// ---- rank choice -----------------------------------------------------------------------------------------

template <class P>
double GroupCore<P>::ScoreOf(const Rank& rank) const noexcept {
    const auto own = static_cast<double>(rank.in_flight);
    if (config_.sole_feeder && rank.in_flight == 0) {
        return 0.0;
    }
    double score = own;
    if (rank.load_counts) {
        const auto waiting = static_cast<double>(rank.load.num_waiting);
        score = std::max(own, waiting + static_cast<double>(rank.load.num_running));
        score += waiting * 6.0 * std::max(0.0, std::min(rank.load.kv_usage, 1.0) - 0.5);
    }
    // Prompt that stands before the newcomer, in engine steps of this rank. A report counts such a request as
    // one, whatever its length. Usual prompts are a small fraction of a step: they only decide between ranks
    // that are equal otherwise.
    const std::int64_t unit =
        rank.facts.max_num_batched_tokens > 0 ? rank.facts.max_num_batched_tokens : kDefaultStepTokens;
    return score + static_cast<double>(rank.prefill_tokens) / static_cast<double>(unit);
}

template <class P>
double GroupCore<P>::Score(std::int32_t rank) const noexcept {
    return ScoreOf(At(rank));
}

/// Live, took the last frame, and not behind with an answer that nothing excuses.
template <class P>
bool GroupCore<P>::Trusted(const Rank& rank) const noexcept {
    return rank.blocked_until <= now_ && !rank.stopped_since.has_value() &&
           (rank.ping_id == 0 || rank.unstarted > 0 || admin_running_ > 0 ||
            rank.last_heard > rank.ping_sent || now_ - rank.ping_sent < config_.ping_deadline / 2);
}

template <class P>
std::int32_t GroupCore<P>::Choose(std::int32_t excluded) noexcept {
    const auto size = static_cast<std::uint32_t>(config_.size);
    const std::uint32_t start = scan_start_;
    scan_start_ = (scan_start_ + 1) % size;
    for (const bool trusted_only : {true, false}) {
        std::int32_t best = -1;
        double best_score = 0;
        for (std::uint32_t i = 0; i < size; ++i) {
            const auto r = static_cast<std::int32_t>((start + i) % size);
            const Rank& rank = At(r);
            if (r == excluded || rank.state != RankState::kLive || (trusted_only && !Trusted(rank))) {
                continue;
            }
            const double score = ScoreOf(rank);
            if (best < 0 || score < best_score) {
                best = r;
                best_score = score;
            }
        }
        if (best >= 0) {
            return best;
        }
    }
    return -1;
}

template <class P>
bool GroupCore<P>::serving() const noexcept {
    return !draining_ && (lockstep_ ? live_ranks_ == config_.size : live_ranks_ > 0);
}

// ---- requests --------------------------------------------------------------------------------------------

template <class P>
void GroupCore<P>::Submit(ReplyId reply, StreamKey stream, std::unique_ptr<wire::GenerateRequest> request,
                          TimePoint now) {
    now_ = now;
    ++counters_.submitted;
    if (request == nullptr || FindStream(reply, stream) != kNone) {
        RG_BUG("submit without a request, or with a stream key that is in use");
        return;
    }
    const std::uint64_t id_hash = HashText(request->id);
    const bool duplicate = by_external_id_.Find(id_hash, [&](std::uint32_t index) {
        return slots_[index].external_id == request->id;
    }) != kNone;
    if (duplicate) {
        Refuse(reply, stream, Error{ErrorCode::kConflict, "the request id is in use", "request_id", false});
        return;
    }
    if (draining_) {
        Refuse(reply, stream, Error{ErrorCode::kDraining, "the server is shutting down", "", true});
        return;
    }
    if (live_ >= config_.max_requests) {
        Refuse(reply, stream, Error{ErrorCode::kOverloaded, "too many requests in flight", "", true});
        return;
    }
    const std::optional<std::int32_t> pinned = request->data_parallel_rank;
    if (pinned.has_value() && !InRange(*pinned)) {
        Refuse(reply, stream,
               Error::Invalid("data_parallel_rank",
                              "data_parallel_rank must be in [0, " + std::to_string(config_.size) + ")"));
        return;
    }
    if (!serving()) {
        Refuse(reply, stream,
               Error{ErrorCode::kUnavailable,
                     "no engine rank can take requests (" + std::to_string(live_ranks_) + " of " +
                         std::to_string(config_.size) + " live" + (lockstep_ ? ", all are needed)" : ")"),
                     "", true});
        return;
    }
    if (pinned.has_value() && At(*pinned).state != RankState::kLive) {
        Refuse(
            reply, stream,
            Error{ErrorCode::kUnavailable,
                  "rank " + std::to_string(*pinned) + " is " + std::string{RankStateName(At(*pinned).state)},
                  "data_parallel_rank", true});
        return;
    }
    const std::int32_t rank = pinned.has_value() ? *pinned : Choose(-1);
    if (rank < 0) {
        RG_BUG("serving without a live rank");
        Refuse(reply, stream, Error{ErrorCode::kUnavailable, "no engine rank can take requests", "", true});
        return;
    }
    const std::uint32_t index = NewSlot();
    Slot& slot = slots_[index];
    slot.stream = stream;
    slot.reply = reply;
    slot.prompt_tokens = TokensOf(*request);
    slot.send_failures = 0;
    slot.started = false;
    slot.retried = false;
    slot.pinned = pinned.has_value();
    slot.external_id.assign(request->id);
    slot.request = std::move(request);
    by_stream_.Insert(HashStream(reply, stream), index);
    by_external_id_.Insert(id_hash, index);
    ++live_;
    Place(index, rank);
}

template <class P>
void GroupCore<P>::Cancel(ReplyId reply, StreamKey stream, CancelCause cause, TimePoint now) {
    now_ = now;
    const std::uint32_t index = FindStream(reply, stream);
    if (index == kNone) {
        return;
    }
    ++counters_.cancels[static_cast<std::size_t>(cause)];
    QueueAbort(slots_[index]);
    Free(index);
}

/// Moves a request that left nothing behind to another live rank. The slot must be unlinked; false = no rank.
template <class P>
bool GroupCore<P>::Retry(std::uint32_t index) {
    if (lockstep_ && live_ranks_ != config_.size) {
        return false;
    }
    const std::int32_t rank = Choose(-1);
    if (rank < 0) {
        return false;
    }
    Place(index, rank);
    return true;
}

template <class P>
void GroupCore<P>::SendFailed(AttemptId attempt, std::string_view reason, TimePoint now) {
    now_ = now;
    const std::uint32_t index = FindAttempt(attempt);
    if (index == kNone || slots_[index].started) {
        return;  // its own output says otherwise
    }
    Slot& slot = slots_[index];
    const std::int32_t from = slot.rank;
    At(from).blocked_until =
        now + config_.send_block;  // else the refused rank, emptied, would win the next choice
    slot.sent = false;
    ++slot.send_failures;
    if (!slot.pinned && slot.request != nullptr && slot.send_failures < kMaxSendAttempts) {
        const std::int32_t to = Choose(from);
        if (to >= 0) {
            Unlink(index);
            Place(index, to);
            return;
        }
    }
    Fail(index, from,
         Error{ErrorCode::kSendFailed,
               "rank " + std::to_string(from) +
                   " could not be reached: " + std::string{reason.substr(0, kMaxReason)},
               "", true});
}

template <class P>
void GroupCore<P>::EncodeFailed(AttemptId attempt, Error error, TimePoint now) {
    now_ = now;
    const std::uint32_t index = FindAttempt(attempt);
    if (index == kNone) {
        return;
    }
    slots_[index].sent = false;
    Fail(index, slots_[index].rank, std::move(error));
}

template <class P>
void GroupCore<P>::WakeFailed(std::int32_t r, TimePoint now)
    requires HasWaves<P>
{
    now_ = now;
    if (!InRange(r) || At(r).state != RankState::kLive) {
        return;
    }
    Rank& rank = At(r);
    rank.wake_due = true;
    if (!rank.wake_refused_since.has_value()) {
        rank.wake_refused_since = now;
    }
}

template <class P>
void GroupCore<P>::Wake(std::optional<std::uint64_t> number)
    requires HasWaves<P>
{
    if (!number.has_value()) {
        return;
    }
    ++counters_.wakes;
    for (std::int32_t r = 0; r < config_.size; ++r) {
        if (At(r).state == RankState::kLive) {
            At(r).wake_due = false;  // a newer number replaces one that is still owed
            Emit(ActionKind::kSendWave, r).number = *number;
        }
    }
}

// ---- ranks -----------------------------------------------------------------------------------------------

template <class P>
void GroupCore<P>::SetState(std::int32_t r, RankState state, std::string_view reason) {
    Rank& rank = At(r);
    live_ranks_ += (state == RankState::kLive ? 1 : 0) - (rank.state == RankState::kLive ? 1 : 0);
    forming_ = forming_ && live_ranks_ < config_.size;
    rank.state = state;
    if (state == RankState::kLive) {
        rank.company_until = {};
    }
    rank.reason.assign(reason.substr(0, kMaxReason));
    dirty_ = true;
    Action& action = Emit(ActionKind::kRankChanged, r);
    action.index = static_cast<std::uint32_t>(state);
    action.error = Keep(Error{ErrorCode::kRankLost, rank.reason, "", false});
}

template <class P>
void GroupCore<P>::ResetRank(Rank& rank) {
    rank.load = {};
    rank.load_counts = false;
    rank.load_source = LoadSource::kOwn;
    rank.load_at = {};
    rank.last_heard = now_;
    rank.ping_id = 0;
    rank.slowest_answer = {};
    rank.blocked_until = {};
    rank.wake_refused_since.reset();
    rank.wake_due = false;
    rank.stopped_since.reset();
    rank.acked_seq = rank.send_seq;
    rank.aborts.clear();
}

template <class P>
void GroupCore<P>::RankProgress(std::int32_t rank, RankState state) {
    if (!InRange(rank) || static_cast<int>(state) >= static_cast<int>(RankState::kRegistered)) {
        return;
    }
    const RankState old = At(rank).state;
    // A HELLO from an identity that still looks alive proves nothing yet; its registration, or its loss,
    // will.
    if (old == RankState::kLive || old == RankState::kRegistered || old == RankState::kDeaf || old == state) {
        return;
    }
    SetState(rank, state, "starting");
}

template <class P>
Status GroupCore<P>::RankRegistered(std::int32_t r, const RankFacts& facts, TimePoint now) {
    now_ = now;
    if (!InRange(r)) {
        return Error{
            ErrorCode::kInvalidArgument,
            "rank " + std::to_string(r) + " registered in a group of " + std::to_string(config_.size), "",
            false};
    }
    if constexpr (HasWaves<P>) {
        const std::int64_t said = facts.data_parallel_size;
        if (said < 1 || (said > 1 && said != config_.size)) {
            return Error{ErrorCode::kInvalidArgument,
                         "rank " + std::to_string(r) + " runs in a lockstep group of " +
                             std::to_string(said) + ", the gateway awaits " + std::to_string(config_.size),
                         "data_parallel_size", false};
        }
        for (std::int32_t other = 0; other < config_.size; ++other) {
            const RankState state = At(other).state;
            const bool known = state == RankState::kRegistered || state == RankState::kLive;
            if (other != r && known && At(other).facts.data_parallel_size != said) {
                return Error{ErrorCode::kInvalidArgument,
                             "rank " + std::to_string(r) + " says data_parallel_size " +
                                 std::to_string(said) + ", rank " + std::to_string(other) + " said " +
                                 std::to_string(At(other).facts.data_parallel_size),
                             "data_parallel_size", false};
            }
        }
    }
    const RankState old = At(r).state;
    if (old == RankState::kLive || (old == RankState::kDeaf && !lockstep_)) {
        RankLost(r, LossKind::kDead, "a new process registered under its identity", now);
    }
    if constexpr (HasWaves<P>) {
        lockstep_ = facts.data_parallel_size > 1;
    }
    At(r).facts = facts;
    ResetRank(At(r));
    SetState(r, RankState::kRegistered, "registered");
    return Status::Ok();
}

template <class P>
void GroupCore<P>::RankUp(std::int32_t r, TimePoint now) {
    now_ = now;
    if (!InRange(r) || At(r).state != RankState::kRegistered) {
        return;
    }
    At(r).last_heard = now;
    SetState(r, RankState::kLive, "");
    if constexpr (HasWaves<P>) {
        if (lockstep_ && live_ranks_ == config_.size) {
            waves_.Forget();
        }
    }
}

/// Ends or moves the requests of a rank that was just taken out of the choice.
template <class P>
void GroupCore<P>::LoseRequests(std::int32_t r, LossKind kind, std::string_view reason, bool only_undecoded) {
    Rank& rank = At(r);
    // A request that was alone on a rank may be what killed it: it must not be carried to the next one. A
    // launcher that went down is nobody's fault. What left it when its first half went was company as well.
    const bool company = rank.in_flight > 1 || now_ < rank.company_until;
    const bool suspect = !company && kind != LossKind::kLauncher;
    if (rank.in_flight > 1) {
        rank.company_until = now_ + kOneDeath;
    }
    for (std::uint32_t index = rank.head; index != kNone;) {
        Slot& slot = slots_[index];
        const std::uint32_t next = slot.next;
        const bool decoded = slot.started || slot.send_seq <= rank.acked_seq;
        if (!(only_undecoded && decoded)) {
            const bool harmless = !slot.retried && !(suspect && slot.sent);
            const bool may_retry = harmless && !slot.started;
            QueueAbort(slot);
            bool moved = false;
            if (may_retry && !slot.pinned) {
                const bool was_sent = slot.sent;
                Unlink(index);
                moved = Retry(index);
                if (moved) {
                    slots_[index].retried = was_sent;
                    ++counters_.retries;
                }
            }
            if (!moved) {
                Fail(index, r,
                     Error{ErrorCode::kRankLost,
                           "rank " + std::to_string(r) + " was lost (" + std::string{LossKindName(kind)} +
                               "): " + std::string{reason.substr(0, kMaxReason)},
                           "", harmless});
            }
        }
        index = next;
    }
}

/// The core's own verdict; the actor is told so that it can close the link and restart what it supervises.
template <class P>
void GroupCore<P>::GiveUp(std::int32_t r, LossKind kind, std::string_view reason) {
    Action& action = Emit(ActionKind::kDeclareLost, r);
    action.loss = kind;
    action.error = Keep(Error{ErrorCode::kRankLost, std::string{reason.substr(0, kMaxReason)}, "", false});
}

template <class P>
void GroupCore<P>::LoseGroup(std::int32_t culprit, LossKind kind, std::string_view reason) {
    SetState(culprit, StateOf(kind), reason);
    const std::string why = "its lockstep group lost rank " + std::to_string(culprit) + " (" +
                            std::string{LossKindName(kind)} +
                            "): " + std::string{reason.substr(0, kMaxReason)};
    // A wedge is the one loss that can pass by itself; everything else takes the survivors' collectives with
    // it.
    const LossKind theirs = kind == LossKind::kWedged ? LossKind::kWedged : LossKind::kDead;
    for (std::int32_t r = 0; r < config_.size; ++r) {
        if (r != culprit && Severity(At(r).state) < Severity(StateOf(theirs)) &&
            At(r).state >= RankState::kRegistered) {
            SetState(r, StateOf(theirs), why);
            GiveUp(r, theirs, why);
        }
    }
    for (std::int32_t r = 0; r < config_.size; ++r) {
        LoseRequests(r, kind, r == culprit ? reason : std::string_view{why}, false);
        if (theirs == LossKind::kDead) {
            At(r).aborts.clear();
        }
    }
    if constexpr (HasWaves<P>) {
        waves_.Forget();
    }
}

template <class P>
void GroupCore<P>::RankLost(std::int32_t r, LossKind kind, std::string_view reason, TimePoint now) {
    now_ = now;
    if (!InRange(r)) {
        return;
    }
    Rank& rank = At(r);
    // Its other half goes, or goes silent: a rank that cannot be reached must never count as live again.
    const bool half_gone =
        (rank.state == RankState::kDeaf && (kind == LossKind::kMute || kind == LossKind::kWedged)) ||
        (rank.state == RankState::kMute && kind == LossKind::kDeaf);
    if (half_gone) {
        kind = LossKind::kDead;
    }
    if (Severity(StateOf(kind)) <= Severity(rank.state)) {
        return;
    }
    ++counters_.losses[static_cast<std::size_t>(kind)];
    rank.ping_id = kind == LossKind::kWedged ? rank.ping_id : 0;
    if (lockstep_) {
        if (rank.state == RankState::kRegistered || rank.state == RankState::kLive ||
            rank.state == RankState::kWedged) {
            LoseGroup(r, kind, reason);
        } else {
            SetState(r, StateOf(kind), reason);  // its group is lost already, and may be forming anew
        }
        return;
    }
    SetState(r, StateOf(kind), reason);
    LoseRequests(r, kind, reason, kind == LossKind::kDeaf);
    if (kind != LossKind::kWedged) {
        rank.aborts.clear();
    }
}

template <class P>
void GroupCore<P>::RankProcess(std::int32_t r, ProcessHint hint, TimePoint now) {
    now_ = now;
    if (!InRange(r)) {
        return;
    }
    Rank& rank = At(r);
    if (hint != ProcessHint::kStopped) {
        const bool woke = rank.stopped_since.has_value() && hint == ProcessHint::kRunning;
        rank.stopped_since.reset();
        if (woke && !P::kHasUtility && rank.state == RankState::kWedged) {
            Heard(r, rank);  // it cannot be asked, so its process has to speak for it
        }
    } else if (!rank.stopped_since.has_value()) {
        rank.stopped_since = now;
    }
}

// ---- load ------------------------------------------------------------------------------------------------

template <class P>
void GroupCore<P>::TakeLoad(Rank& rank, const wire::LoadSnapshot& load, LoadSource source,
                            TimePoint at) noexcept {
    rank.load = load;
    for (std::int64_t* value : {&rank.load.num_running, &rank.load.num_waiting, &rank.load.kv_active_pages,
                                &rank.load.kv_total_pages}) {
        *value = std::clamp<std::int64_t>(*value, 0, kMaxPlausibleLoad);
    }
    if (!std::isfinite(rank.load.kv_usage) || rank.load.kv_usage < 0) {
        rank.load.kv_usage = -1.0;
        if (rank.load.kv_total_pages > 0) {
            rank.load.kv_usage = static_cast<double>(rank.load.kv_active_pages) /
                                 static_cast<double>(rank.load.kv_total_pages);
        }
    }
    rank.load_source = source;
    rank.load_at = at;
    rank.load_counts = true;
}

template <class P>
void GroupCore<P>::MailboxLoad(std::int32_t r, const wire::LoadSnapshot& load, TimePoint sampled_at) {
    if (!InRange(r)) {
        return;
    }
    Rank& rank = At(r);
    // A report is dated when it arrives, a page when it was sampled: the page wins unless it is clearly the
    // older one. A report that comes later always replaces the page, so that the last word of a rank that
    // goes idle is never lost.
    const bool newer = rank.load_source == LoadSource::kMailbox ? sampled_at > rank.load_at
                                                                : sampled_at + kPageSlack >= rank.load_at;
    if (rank.load_source == LoadSource::kOwn || newer) {
        TakeLoad(rank, load, LoadSource::kMailbox, sampled_at);
    }
}

template <class P>
void GroupCore<P>::MailboxGone(std::int32_t r) {
    if (InRange(r) && At(r).load_source == LoadSource::kMailbox) {
        At(r).load_source = LoadSource::kOwn;
        At(r).load_counts = false;
    }
}

// ---- output ----------------------------------------------------------------------------------------------

template <class P>
void GroupCore<P>::Heard(std::int32_t r, Rank& rank) {
    rank.last_heard = now_;
    if (rank.state == RankState::kWedged) {
        SetState(r, RankState::kLive, "answered again");
        Emit(ActionKind::kRankRecovered, r);
    }
}

template <class P>
void GroupCore<P>::LateRow(std::string_view id, bool running, std::int32_t r) {
    ++counters_.late_outputs;
    if (!running || !config_.sole_feeder || id.size() > kMaxExternalId + kSuffix ||
        At(r).state != RankState::kLive) {
        return;
    }
    std::array<char, 9> ours;
    ours[0] = '-';
    PutHex(ours.data() + 1, config_.id_epoch, 8);
    if (id.size() >= kSuffix && std::memcmp(id.data() + id.size() - kSuffix, ours.data(), ours.size()) == 0) {
        return;  // ours and already aborted: a step or two may still name it
    }
    // A request that outlived an earlier gateway: nobody reads it any more, so the rank should stop computing
    // it.
    const std::uint64_t hash = HashText(id);
    std::uint64_t& seen = orphans_[hash % orphans_.size()];
    if (seen != hash) {
        seen = hash;
        ++counters_.orphan_aborts;
        WireId& orphan = At(r).aborts.emplace_back();
        std::memcpy(orphan.text.data(), id.data(), id.size());
        orphan.size = static_cast<std::uint8_t>(id.size());
    }
}

template <class P>
inline void GroupCore<P>::Row(const StepOutput& output, std::uint32_t row, std::int32_t r) {
    const bool terminal = output.finish_reason != wire::FinishReason::kNone;
    const std::uint32_t index = FindWireId(output.request_id);
    if (index == kNone) [[unlikely]] {
        LateRow(output.request_id, !terminal, r);
        return;
    }
    Slot& slot = slots_[index];
    Rank& rank = At(slot.rank);  // release goes by id, whatever rank the message claims
    if (slot.rank != r) [[unlikely]] {
        ++counters_.foreign_rank;
    } else if (slot.send_seq > rank.acked_seq) {
        rank.acked_seq = slot.send_seq;
    }
    if (!slot.started) {
        MarkStarted(slot, rank);
    }
    Action& action = actions_.emplace_back();
    action.kind = ActionKind::kDeliver;
    action.rank = slot.rank;
    action.reply = slot.reply;
    action.stream = slot.stream;
    action.index = row;
    action.terminal = terminal;
    if (terminal) {
        ++counters_.finished;
        Free(index);
    }
}

template <class P>
void GroupCore<P>::OnStep(const EngineStep& step, TimePoint now) {
    now_ = now;
    const std::int32_t r = step.rank;
    if (!InRange(r)) {
        ++counters_.bad_rank_steps;
        return;
    }
    Rank& rank = At(r);
    Heard(r, rank);
    // Before the rows: if these rows empty the in-flight list, a sample taken before they were applied must
    // not outlive it.
    if (step.load != nullptr) {
        TakeLoad(rank, *step.load, LoadSource::kReport, now);
    }
    for (std::size_t i = 0; i < step.outputs.size(); ++i) {
        Row(step.outputs[i], static_cast<std::uint32_t>(i), r);
    }
    for (const std::string_view id : step.finished_ids) {
        const std::uint32_t index = FindWireId(id);
        if (index != kNone) {
            Fail(index, slots_[index].rank,
                 Error{ErrorCode::kEngineError, "the engine ended the request without a result", "", false});
        }
    }
    if constexpr (P::kHasUtility) {
        for (const std::int64_t id : step.utility_call_ids) {
            if (rank.ping_id == 0 || id != static_cast<std::int64_t>(rank.ping_id)) {
                continue;
            }
            rank.ping_id = 0;
            rank.acked_seq = std::max(rank.acked_seq, rank.ping_seq);
            if (rank.unstarted == 0 && rank.state == RankState::kLive && admin_running_ == 0) {
                const Duration took = now - rank.ping_sent;
                rank.slowest_answer = std::max(took, rank.slowest_answer * 9 / 10);
            }
        }
    }
    if constexpr (HasWaves<P>) {
        if (lockstep_) {
            // Answers to pings prove nothing here: a parked rank gives them while its peer waits for it.
            if (!step.outputs.empty() || step.load != nullptr || step.wave_complete.has_value()) {
                waves_.NudgeHelped();
                nudge_wait_ = config_.nudge_after;
                progress_at_ = now;
            }
            const bool busy = live_ > 0 && live_ranks_ == config_.size;
            if (step.load != nullptr && step.load->current_wave >= 0) {
                Wake(waves_.OnReported(static_cast<std::uint64_t>(step.load->current_wave), busy));
            }
            if (step.start_wave.has_value() && *step.start_wave >= 0) {
                Wake(waves_.OnStartWave(static_cast<std::uint64_t>(*step.start_wave)));
            }
            if (step.wave_complete.has_value() && *step.wave_complete >= 0) {
                Wake(waves_.OnWaveComplete(static_cast<std::uint64_t>(*step.wave_complete), busy));
            }
        }
    }
}

// ---- liveness --------------------------------------------------------------------------------------------

/// How much silence the requests without a first token excuse, counting only those that left before
/// `sent_before`: what reached the engine after an unanswered question cannot be what keeps it from
/// answering. In lockstep one rank's prompt holds up all.
template <class P>
Duration GroupCore<P>::Excuse(const Rank& rank, TimePoint sent_before) const noexcept {
    std::int64_t tokens = 0;
    bool any = false;
    for (const Rank& other : ranks_) {
        if (&other != &rank && !lockstep_) {
            continue;
        }
        for (std::uint32_t i = other.head; i != kNone && other.unstarted > 0; i = slots_[i].next) {
            if (!slots_[i].started && slots_[i].sent_at <= sent_before) {
                any = true;
                tokens += slots_[i].prompt_tokens;
            }
        }
    }
    if (!any) {
        return Duration{0};
    }
    const Duration work =
        std::chrono::seconds{tokens / std::max<std::int64_t>(config_.prefill_slowest_tps, 1)};
    return std::clamp(work, config_.prefill_floor, std::max(config_.prefill_floor, config_.prefill_cap));
}

template <class P>
void GroupCore<P>::TickPing(std::int32_t r, Rank& rank)
    requires(P::kHasUtility)
{
    if (rank.state != RankState::kLive && rank.state != RankState::kWedged) {
        return;
    }
    // A sign of life after the question voids it: then the next silence gets a question of its own. A wedged
    // rank is asked again now and then, in case the frame was lost with a connection.
    const bool out = rank.ping_id != 0 && rank.last_heard <= rank.ping_sent &&
                     !(rank.state == RankState::kWedged && now_ - rank.ping_sent >= kAskAgain);
    if (!out) {
        if (now_ - rank.last_heard >= config_.ping_interval) {
            rank.ping_id = ++call_id_;
            rank.ping_sent = now_;
            rank.ping_seq = rank.send_seq;
            ++counters_.pings;
            Emit(ActionKind::kPing, r).number = rank.ping_id;
        }
        return;
    }
    if (rank.state != RankState::kLive) {
        return;  // the one question stays out; its answer brings the rank back
    }
    const Duration overdue = now_ - rank.ping_sent;
    Duration limit = std::max(config_.ping_deadline, std::min(rank.slowest_answer * 4, kMaxLearnedDeadline));
    if (overdue < limit) {
        return;
    }
    if (!rank.stopped_since.has_value()) {
        limit += Excuse(rank, rank.ping_sent);
        if (admin_running_ > 0) {
            limit += config_.admin_allowance;
        }
    }
    if (overdue >= limit) {
        const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(overdue).count();
        const std::string why =
            std::string{rank.stopped_since.has_value() ? "its process is stopped, " : ""} + "no answer for " +
            std::to_string(ms) + " ms";
        GiveUp(r, LossKind::kWedged, why);
        RankLost(r, LossKind::kWedged, why, now_);
    }
}

/// For what cannot be asked: a rank that decodes is never silent for long, a stopped process never speaks.
template <class P>
void GroupCore<P>::TickSilence(std::int32_t r, Rank& rank) {
    if (rank.state != RankState::kLive && rank.state != RankState::kDeaf) {
        return;
    }
    // A deaf rank that falls silent has lost its other half as well.
    const LossKind kind = rank.state == RankState::kDeaf ? LossKind::kDead : LossKind::kWedged;
    if (rank.stopped_since.has_value() && now_ - *rank.stopped_since >= config_.ping_deadline) {
        GiveUp(r, kind, "its process is stopped");
        RankLost(r, kind, "its process is stopped", now_);
        return;
    }
    if (rank.in_flight == 0) {
        return;
    }
    const Duration silent = now_ - std::max(rank.last_heard, rank.busy_since);
    if (silent >= config_.silence_limit && silent >= config_.silence_limit + Excuse(rank, now_)) {
        const auto s = std::chrono::duration_cast<std::chrono::seconds>(silent).count();
        const std::string why = "no output for " + std::to_string(s) + " s with " +
                                std::to_string(rank.in_flight) + " requests in flight";
        GiveUp(r, kind, why);
        RankLost(r, kind, why, now_);
    }
}

template <class P>
void GroupCore<P>::Tick(TimePoint now) {
    now_ = now;
    if (ticked_at_ != TimePoint{} && now - ticked_at_ > kStallGuard) {
        // We were stopped, not they: nothing that was silent meanwhile can be blamed for it.
        for (Rank& rank : ranks_) {
            rank.last_heard = now;
            rank.busy_since = now;
            if (rank.stopped_since.has_value()) {
                rank.stopped_since = now;
            }
            if (rank.wake_refused_since.has_value()) {
                rank.wake_refused_since = now;
            }
        }
    }
    ticked_at_ = now;
    for (std::int32_t r = 0; r < config_.size; ++r) {
        Rank& rank = At(r);
        if constexpr (P::kHasUtility) {
            TickPing(r, rank);
            if (rank.state == RankState::kDeaf) {
                TickSilence(r, rank);
            }
        } else {
            TickSilence(r, rank);
        }
        if constexpr (HasWaves<P>) {
            if (rank.state != RankState::kLive) {
                rank.wake_due = false;
            }
            if (!rank.wake_due) {
                rank.wake_refused_since.reset();
            } else if (now - *rank.wake_refused_since >= config_.unreachable_limit) {
                GiveUp(r, LossKind::kDeaf, "its input refuses wakes");
                RankLost(r, LossKind::kDeaf, "its input refuses wakes", now);
            } else {
                rank.wake_due = false;
                Emit(ActionKind::kSendWave, r).number = waves_.last_wake();
            }
        }
    }
    if constexpr (HasWaves<P>) {
        if (lockstep_ && live_ > 0 && live_ranks_ == config_.size && admin_running_ == 0 &&
            config_.nudge_after > Duration{0}) {
            nudge_wait_ = std::max(nudge_wait_, config_.nudge_after);
            if (now - std::max(progress_at_, nudge_at_) >= nudge_wait_) {
                nudge_at_ = now;
                nudge_wait_ = std::min(nudge_wait_ * 2, kMaxNudgeWait);
                const std::optional<std::uint64_t> number = waves_.Nudge();
                counters_.nudges += number.has_value() ? 1 : 0;
                Wake(number);
            }
        }
    }
}

// ---- administration --------------------------------------------------------------------------------------

template <class P>
AdminGate GroupCore<P>::CheckAdmin(AdminMethod method) const noexcept
    requires(P::kHasUtility)
{
    if constexpr (HasWaves<P>) {
        if (lockstep_ && ChangesPause(method)) {
            if (gate_taken_) {
                return AdminGate::kBusy;
            }
            const bool starts = method == AdminMethod::kResume || method == AdminMethod::kWakeUp;
            return starts && !waves_.paused() ? AdminGate::kNotPaused : AdminGate::kSend;
        }
    }
    return AdminGate::kSend;
}

template <class P>
void GroupCore<P>::FoundPaused(TimePoint now)
    requires(P::kHasUtility)
{
    now_ = now;
    if constexpr (HasWaves<P>) {
        waves_.Pause();
    }
}

template <class P>
void GroupCore<P>::AdminBegins(AdminMethod method, TimePoint now)
    requires(P::kHasUtility)
{
    now_ = now;
    ++admin_running_;
    gate_taken_ = gate_taken_ || ChangesPause(method);
    if constexpr (HasWaves<P>) {
        if (method == AdminMethod::kPause || method == AdminMethod::kSleep) {
            waves_.Pause();
        }
    }
}

template <class P>
void GroupCore<P>::AdminEnded(AdminMethod method, bool ok, TimePoint now)
    requires(P::kHasUtility)
{
    now_ = now;
    if (admin_running_ == 0) {
        RG_BUG("administrative call ended twice");
        return;
    }
    if (ChangesPause(method)) {
        gate_taken_ = false;
    }
    if (--admin_running_ == 0) {
        for (Rank& rank : ranks_) {
            rank.last_heard =
                std::max(rank.last_heard, rank.state == RankState::kLive ? now : rank.last_heard);
        }
    }
    if constexpr (HasWaves<P>) {
        const bool stops = method == AdminMethod::kPause || method == AdminMethod::kSleep;
        const bool starts = method == AdminMethod::kResume || method == AdminMethod::kWakeUp;
        // After a half-done call nobody knows who is paused: a wake too many is dropped, a wake too few is a
        // hang.
        if (lockstep_ && (starts || (stops && !ok))) {
            Wake(waves_.Resume(live_ > 0 && live_ranks_ == config_.size));
        }
    }
}

template <class P>
void GroupCore<P>::BeginDrain() {
    draining_ = true;
    dirty_ = true;
    MaybeDrained();
}

template <class P>
void GroupCore<P>::FailAll(const Error& error, TimePoint now) {
    now_ = now;
    for (std::int32_t r = 0; r < config_.size; ++r) {
        while (At(r).head != kNone) {
            const std::uint32_t index = At(r).head;
            QueueAbort(slots_[index]);
            Fail(index, r, error);
        }
    }
}

// ---- state -----------------------------------------------------------------------------------------------

template <class P>
GroupSnapshot GroupCore<P>::MakeSnapshot(TimePoint now) const {
    GroupSnapshot snapshot;
    snapshot.group = config_.group;
    snapshot.runtime = std::string{P::kName};
    snapshot.size = config_.size;
    snapshot.live = live_ranks_;
    snapshot.lockstep = lockstep_;
    snapshot.serving = serving();
    snapshot.forming = forming_;
    snapshot.wakes = static_cast<std::int64_t>(counters_.wakes);
    snapshot.retries = static_cast<std::int64_t>(counters_.retries);
    const auto cancels = [&](CancelCause cause) {
        return static_cast<std::int64_t>(counters_.cancels[static_cast<std::size_t>(cause)]);
    };
    snapshot.aborts_stop = cancels(CancelCause::kStopString);
    snapshot.aborts_client = cancels(CancelCause::kClientGone);
    snapshot.late_outputs = static_cast<std::int64_t>(counters_.late_outputs);
    for (std::int32_t r = 0; r < config_.size; ++r) {
        const Rank& rank = At(r);
        RankInfo& info = snapshot.ranks.emplace_back();
        info.rank = r;
        info.state = rank.state;
        info.reason = rank.reason;
        info.in_flight = static_cast<std::int64_t>(rank.in_flight);
        info.load = rank.load;
        if (rank.load_source != LoadSource::kOwn) {
            info.load_age_seconds = std::chrono::duration<double>(now - rank.load_at).count();
        }
        const bool own = !rank.load_counts || rank.load_source == LoadSource::kOwn;
        info.load_source = own ? "own" : rank.load_source == LoadSource::kMailbox ? "mailbox" : "report";
        info.engine_version = rank.facts.engine_version;
        info.max_model_len = rank.facts.max_model_len;
        info.num_gpu_blocks = rank.facts.num_gpu_blocks;
        info.block_size = rank.facts.block_size;
        info.max_num_seqs = rank.facts.max_num_seqs;
        info.supports_lora = rank.facts.supports_lora;
        if (rank.state == RankState::kLive && rank.facts.max_model_len > 0) {
            snapshot.max_model_len = snapshot.max_model_len == 0
                                         ? rank.facts.max_model_len
                                         : std::min(snapshot.max_model_len, rank.facts.max_model_len);
        }
    }
    return snapshot;
}

template <class P>
std::string GroupCore<P>::Audit() const {
    std::size_t live = 0;
    std::vector<bool> listed(slots_.size(), false);
    std::int32_t live_ranks = 0;
    for (std::int32_t r = 0; r < config_.size; ++r) {
        const Rank& rank = At(r);
        live_ranks += rank.state == RankState::kLive ? 1 : 0;
        std::size_t count = 0;
        std::size_t unstarted = 0;
        std::int64_t prefill = 0;
        std::uint32_t previous = kNone;
        for (std::uint32_t i = rank.head; i != kNone; i = slots_[i].next) {
            if (listed[i]) {
                return "slot " + std::to_string(i) + " is in two in-flight lists";
            }
            listed[i] = true;
            const Slot& slot = slots_[i];
            if (slot.attempt == 0 || slot.rank != r || slot.prev != previous) {
                return "slot " + std::to_string(i) + " is linked wrongly";
            }
            if (FindWireId(slot.id.view()) != i || FindStream(slot.reply, slot.stream) != i ||
                FindAttempt(slot.attempt) != i) {
                return "slot " + std::to_string(i) + " cannot be found by its keys";
            }
            if (!slot.started && slot.request == nullptr) {
                return "slot " + std::to_string(i) + " lost its request";
            }
            ++count;
            unstarted += slot.started ? 0 : 1;
            prefill += slot.started ? 0 : slot.prompt_tokens;
            previous = i;
        }
        if (rank.tail != previous || count != rank.in_flight || unstarted != rank.unstarted ||
            prefill != rank.prefill_tokens) {
            return "the counts of rank " + std::to_string(r) + " are off";
        }
        const bool may_hold = rank.state == RankState::kLive || rank.state == RankState::kDeaf;
        if (count > 0 && !may_hold) {
            return "rank " + std::to_string(r) + " holds requests in state " +
                   std::string{RankStateName(rank.state)};
        }
        live += count;
    }
    std::size_t free_slots = 0;
    for (std::uint32_t i = free_head_; i != kNone; i = slots_[i].next) {
        if (slots_[i].attempt != 0 || listed[i] || slots_[i].request != nullptr) {
            return "slot " + std::to_string(i) + " is free and in use";
        }
        ++free_slots;
    }
    if (live != live_ || by_stream_.size() != live_ || by_external_id_.size() != live_ ||
        live + free_slots != slots_.size() || live_ranks != live_ranks_) {
        return "slots leak: " + std::to_string(live) + " listed, " + std::to_string(live_) + " live, " +
               std::to_string(free_slots) + " free of " + std::to_string(slots_.size());
    }
    return "";
}

template class GroupCore<VllmProtocol>;
template class GroupCore<TokenSpeedProtocol>;

}  // namespace rankgate::group
