// SPDX-License-Identifier: Apache-2.0
#include "group/group_actor.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "engine/mailbox.h"
#include "group/auto_actor.h"
#include "wire/msgpack_json.h"
#include "wire/tokenspeed/outputs.h"
#include "wire/tokenspeed/request.h"
#include "wire/tokenspeed/validate.h"
#include "wire/vllm/outputs.h"
#include "wire/vllm/request.h"
#include "wire/vllm/validate.h"

namespace rankgate::group {
namespace {

using transport::FrontendHandshake;
using transport::FrontendLink;
using transport::PeerLoss;

constexpr std::uint8_t kTypeAdd = 0;
constexpr std::uint8_t kTypeAbort = 1;
constexpr std::uint8_t kTypeWave = 2;
constexpr std::uint8_t kTypeUtility = 3;
/// A hand-over in the middle of a turn, so that one batch stays in cache and the first shard starts early.
constexpr std::size_t kMaxTokensPerHandOver = 8192;
/// An output connection of unknown owner that closed this long ago still counts as the other half of a lost
/// input.
constexpr Duration kAnonymousLossCounts = std::chrono::seconds(1);
constexpr Duration kSilenceBeforeHint = std::chrono::milliseconds(400);
/// A load page that was written this lately needs no look at its writer.
constexpr Duration kPageSilence = std::chrono::milliseconds(200);

/// vLLM's wire for this actor: encoders, the decoded message, and what only it has.
struct VllmWire {
    using Protocol = VllmProtocol;
    using Outputs = wire::vllm::OutputsMessage;
    using Limits = wire::vllm::RankLimits;
    static Limits LimitsOf(const wire::ReadyResponse& ready) { return {ready.max_model_len, 0}; }
    static Status Check(const wire::GenerateRequest& request, const Limits& limits) {
        return wire::vllm::CheckRequest(request, limits);
    }
    static void EncodeAdd(const wire::GenerateRequest& request, std::string& out) {
        wire::vllm::EncodeAdd(request, out);
    }
    static void EncodeAbort(std::span<const std::string_view> ids, std::string& out) {
        wire::vllm::EncodeAbort(ids, out);
    }
    static Status Decode(wire::Frames frames, Outputs& out) { return wire::vllm::DecodeOutputs(frames, out); }
    static Status Logprobs(const wire::OutputRow& row, wire::Frames frames, wire::Logprobs& out) {
        return wire::vllm::DecodeLogprobs(row.logprobs, frames, out);
    }
    static bool HasLoad(const Outputs& message) { return message.has_stats; }
    static const wire::LoadSnapshot& Load(const Outputs& message) { return message.stats.load; }
};

struct TokenSpeedWire {
    using Protocol = TokenSpeedProtocol;
    using Outputs = wire::tokenspeed::OutputsMessage;
    using Limits = wire::tokenspeed::RankLimits;
    static Limits LimitsOf(const wire::ReadyResponse& ready) {
        Limits limits;
        limits.max_prompt_tokens = wire::tokenspeed::LongestPrompt(ready);
        return limits;
    }
    static Status Check(const wire::GenerateRequest& request, const Limits& limits) {
        return wire::tokenspeed::CheckRequest(request, limits);
    }
    static void EncodeAdd(const wire::GenerateRequest& request, std::string& out) {
        wire::tokenspeed::EncodeAdd(request, out);
    }
    static void EncodeAbort(std::span<const std::string_view> ids, std::string& out) {
        wire::tokenspeed::EncodeAbort(ids, out);
    }
    static Status Decode(wire::Frames frames, Outputs& out) {
        return wire::tokenspeed::DecodeOutputs(frames, out);
    }
    static Status Logprobs(const wire::OutputRow& row, wire::Frames, wire::Logprobs& out) {
        return wire::tokenspeed::DecodeLogprobs(row, out);
    }
    static bool HasLoad(const Outputs& message) { return message.has_load(); }
    static const wire::LoadSnapshot& Load(const Outputs& message) { return message.load; }
};

struct AdminRequest {
    AdminCall call;
    std::function<void(std::vector<AdminReply>)> done;
};

struct Command : MailboxNode {
    enum class Kind : std::uint8_t { kSubmit, kCancel, kAdmin, kDrain, kStop };
    Kind kind{Kind::kSubmit};
    CancelCause cause{CancelCause::kClientGone};
    StreamKey stream{0};
    OutputMailbox* reply{nullptr};
    std::unique_ptr<wire::GenerateRequest> request;
    std::unique_ptr<AdminRequest> admin;
};

/// State letter of a process, 0 = not known.
char ProcessState(std::int32_t pid) {
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
    const UniqueFd fd{::open(path, O_RDONLY | O_CLOEXEC)};
    if (!fd.valid()) {
        return 0;
    }
    char text[512];
    const ssize_t n = ::read(fd.get(), text, sizeof text);
    if (n <= 0) {
        return 0;
    }
    const std::string_view view{text, static_cast<std::size_t>(n)};
    const std::size_t at = view.rfind(')');  // the name may hold anything, parentheses included
    return at != std::string_view::npos && at + 2 < view.size() ? view[at + 2] : '\0';
}

RankFacts ToCore(const transport::RankFacts& facts) {
    RankFacts out;
    out.engine_version = facts.ready.vllm_version;
    out.max_model_len = facts.ready.max_model_len;
    out.num_gpu_blocks = facts.ready.num_gpu_blocks;
    out.block_size = facts.ready.block_size;
    out.max_num_seqs = facts.ready.max_num_seqs;
    out.max_num_batched_tokens = facts.ready.max_num_batched_tokens;
    out.data_parallel_size = facts.ready.data_parallel_size;
    out.supports_lora = facts.ready.supports_lora;
    return out;
}

template <class Wire>
class Actor final : public GroupActor, private FrontendLink::Handler {
    using Protocol = typename Wire::Protocol;

  public:
    Actor(GroupActorOptions options, std::unique_ptr<FrontendLink> link, std::shared_ptr<const Clock> clock)
        : options_{std::move(options)},
          clock_{std::move(clock)},
          link_{std::move(link)},
          core_{options_.core},
          size_{options_.link.size},
          ranks_(static_cast<std::size_t>(size_)),
          handshake_address_{link_->handshake_address()} {
        link_->Watch(commands_.fd());
        now_ = clock_->Now();
        next_tick_ = now_ + kTick;
        PublishSnapshot();
        if (options_.own_thread) {
            thread_ = std::thread([this] {
                while (!stopping_) {
                    RunOnce(std::chrono::seconds(1));
                }
                Finish();
            });
        }
    }

    ~Actor() override { Close(); }

    FrontendLink::Handler& handler() noexcept { return *this; }

    // ---- Group: any thread ----

    void Submit(StreamKey stream, std::unique_ptr<wire::GenerateRequest> request,
                OutputMailbox& reply) override {
        auto command = std::make_unique<Command>();
        command->kind = Command::Kind::kSubmit;
        command->stream = stream;
        command->reply = &reply;
        command->request = std::move(request);
        commands_.Push(std::move(command));
    }

    void Cancel(StreamKey stream, OutputMailbox& reply, CancelCause cause) override {
        auto command = std::make_unique<Command>();
        command->kind = Command::Kind::kCancel;
        command->stream = stream;
        command->reply = &reply;
        command->cause = cause;
        commands_.Push(std::move(command));
    }

    void Admin(AdminCall call, std::function<void(std::vector<AdminReply>)> done) override {
        auto command = std::make_unique<Command>();
        command->kind = Command::Kind::kAdmin;
        command->admin = std::make_unique<AdminRequest>(AdminRequest{std::move(call), std::move(done)});
        commands_.Push(std::move(command));
    }

    std::shared_ptr<const GroupSnapshot> Snapshot() const override {
        const std::lock_guard lock{snapshot_mutex_};
        return snapshot_;
    }

    void Recycle(std::unique_ptr<OutputBatch> batch) noexcept override {
        if (batch != nullptr) {
            recycled_.Push(std::move(batch));
        }
    }

    const std::string& handshake_address() const override { return handshake_address_; }

    void BeginDrain() override {
        auto command = std::make_unique<Command>();
        command->kind = Command::Kind::kDrain;
        commands_.Push(std::move(command));
    }
    bool drained() const override { return drained_.load(std::memory_order_acquire); }

    void Close() override {
        if (closed_) {
            return;
        }
        closed_ = true;
        if (thread_.joinable()) {
            auto command = std::make_unique<Command>();
            command->kind = Command::Kind::kStop;
            commands_.Push(std::move(command));
            thread_.join();
        } else {
            Finish();
        }
    }

    // ---- the loop ----

    int poll_fd() const override { return link_->poll_fd(); }

    TimePoint next_deadline() const override {
        TimePoint next = next_tick_;
        if (const auto link = link_->next_deadline(); link && *link < next) {
            next = *link;
        }
        for (const RankState& rank : ranks_) {
            if (rank.loss_since && *rank.loss_since + kLossGrace < next) {
                next = *rank.loss_since + kLossGrace;
            }
        }
        return more_ ? TimePoint{} : next;
    }

    void RunOnce(Duration max_wait) override {
        Duration wait = Duration::zero();
        if (!more_) {
            wait = std::clamp<Duration>(next_deadline() - clock_->Now(), Duration::zero(), max_wait);
        }
        const bool commands = link_->Wait(wait);
        now_ = clock_->Now();
        more_ = false;
        if (commands || commands_left_ || commands_.held()) {
            ReadLoadPages();
            TakeCommands(commands || commands_.held());
            Execute();
        }
        if (link_->Poll(*this)) {
            more_ = true;
        }
        now_ = clock_->Now();
        CheckLosses();
        if (now_ >= next_tick_) {
            Tick();
        }
        Settle();
    }

    void HoldCommands() override { commands_.Hold(); }

    void RunCommands() override {
        if (!commands_.held()) {
            return;
        }
        now_ = clock_->Now();
        ReadLoadPages();
        TakeCommands(true);
        Execute();
        Settle();
    }

  private:
    /// The end of every turn.
    void Settle() {
        if (admins_due_) {
            FinishAdmins();
        }
        core_.Flush();
        Execute();
        HandOver();
        if (core_.TakeDirty()) {
            PublishSnapshot();
        }
    }

    struct Shard {
        OutputMailbox* box;
        std::unique_ptr<OutputBatch> open;
    };
    struct RankState {
        bool input_lost{false};
        bool output_lost{false};
        std::optional<TimePoint> loss_since;  // set = one side is gone, the verdict is due after kLossGrace
        std::uint32_t undecodable{0};
        TimePoint last_output{};
        bool waiting_hint{false};
        std::string start_problem;
        typename Wire::Limits limits;      // of the process that is live under this identity
        engine::LoadPageReader load_page;  // same host, same user: the load without a message
    };
    struct PendingAdmin {
        AdminMethod method{AdminMethod::kIsSleeping};
        std::function<void(std::vector<AdminReply>)> done;
        std::vector<AdminReply> replies;
        std::vector<std::uint64_t> calls;  // per rank: the call id still awaited, 0 = answered
        std::size_t waiting{0};
        TimePoint deadline{};
    };

    RankState& At(std::int32_t rank) { return ranks_[static_cast<std::size_t>(rank)]; }

    void TakeCommands(bool signalled) {
        if (signalled) {
            commands_.Acknowledge();
        }
        std::size_t taken = 0;
        while (taken < kMaxCommandsPerTurn) {
            const std::unique_ptr<Command> command = commands_.Pop();
            if (command == nullptr) {
                commands_left_ = false;
                return;
            }
            ++taken;
            switch (command->kind) {
                case Command::Kind::kSubmit:
                    core_.Submit(ReplyOf(*command->reply), command->stream, std::move(command->request),
                                 now_);
                    break;
                case Command::Kind::kCancel:
                    core_.Cancel(ReplyOf(*command->reply), command->stream, command->cause, now_);
                    break;
                case Command::Kind::kAdmin:
                    BeginAdmin(*command->admin);
                    break;
                case Command::Kind::kDrain:
                    core_.BeginDrain();
                    break;
                case Command::Kind::kStop:
                    stopping_ = true;
                    break;
            }
        }
        commands_left_ = true;
        more_ = true;
    }

    ReplyId ReplyOf(OutputMailbox& box) {
        for (std::size_t i = 0; i < shards_.size(); ++i) {
            if (shards_[i].box == &box) {
                return static_cast<ReplyId>(i);
            }
        }
        shards_.push_back({&box, nullptr});
        return static_cast<ReplyId>(shards_.size() - 1);
    }

    OutputBatch& Open(ReplyId reply) {
        Shard& shard = shards_[reply];
        if (shard.open == nullptr) {
            shard.open = recycled_.Pop();
            if (shard.open == nullptr) {
                shard.open = std::make_unique<OutputBatch>();
            } else {
                shard.open->Clear();
            }
            shard.open->group = options_.link.group;
        }
        return *shard.open;
    }

    void HandOver() {
        for (Shard& shard : shards_) {
            if (shard.open != nullptr) {
                shard.box->Push(std::move(shard.open));
            }
        }
        open_tokens_ = 0;
    }

    // ---- actions of the core ----

    void Execute() {
        Action action;
        while (core_.PopAction(action)) {
            switch (action.kind) {
                case ActionKind::kDeliver:
                    Deliver(action);
                    break;
                case ActionKind::kFail:
                    DeliverError(action);
                    break;
                case ActionKind::kSendAdd:
                    SendAdd(action);
                    break;
                case ActionKind::kSendAbort:
                    SendAbort(action);
                    break;
                case ActionKind::kSendWave:
                    SendWave(action);
                    break;
                case ActionKind::kPing:
                    SendPing(action);
                    break;
                case ActionKind::kDeclareLost:
                    OnDeclaredLost(action);
                    break;
                case ActionKind::kRankRecovered:
                    link_->SetWedged(action.rank, false);
                    break;
                case ActionKind::kRankChanged:
                    OnRankChanged(action);
                    break;
                case ActionKind::kDrained:
                    drained_.store(true, std::memory_order_release);
                    break;
            }
        }
    }

    void Deliver(const Action& action) {
        const wire::OutputRow& row = message_.rows[action.index];
        OutputBatch& batch = Open(action.reply);
        Output& output = batch.outputs.emplace_back();
        output.stream = action.stream;
        output.first_token = static_cast<std::uint32_t>(batch.tokens.size());
        output.num_tokens = row.num_tokens;
        output.finish_reason = row.finish_reason;
        output.rank = action.rank;
        output.num_cached_tokens = row.num_cached_tokens;
        const auto tokens = message_.TokensOf(row);
        batch.tokens.insert(batch.tokens.end(), tokens.begin(), tokens.end());
        open_tokens_ += tokens.size();
        if (row.has_stop_token || !row.stop_string.empty()) {
            output.stop_reason = static_cast<std::int32_t>(batch.stop_reasons.size());
            batch.stop_reasons.push_back(row.stop_reason());
        }
        if (!row.logprobs.empty()) {
            wire::Logprobs& logprobs = batch.logprobs.emplace_back();
            if (Wire::Logprobs(row, frames_, logprobs).ok()) {
                output.logprobs = static_cast<std::int32_t>(batch.logprobs.size() - 1);
            } else {
                batch.logprobs.pop_back();
                CountDecodeError("logprobs", action.rank);
            }
        }
        if constexpr (Protocol::kHasUtility) {
            if (!row.prompt_logprobs.empty()) {
                wire::Logprobs& logprobs = batch.logprobs.emplace_back();
                if (wire::vllm::DecodeLogprobs(row.prompt_logprobs, frames_, logprobs).ok()) {
                    output.prompt_logprobs = static_cast<std::int32_t>(batch.logprobs.size() - 1);
                } else {
                    batch.logprobs.pop_back();
                    CountDecodeError("prompt_logprobs", action.rank);
                }
            }
        }
    }

    void DeliverError(const Action& action) {
        OutputBatch& batch = Open(action.reply);
        Output& output = batch.outputs.emplace_back();
        output.stream = action.stream;
        output.first_token = static_cast<std::uint32_t>(batch.tokens.size());
        output.finish_reason = wire::FinishReason::kError;
        output.rank = action.rank;
        output.error = static_cast<std::int32_t>(batch.errors.size());
        batch.errors.push_back(*action.error);
    }

    void SendAdd(const Action& action) {
        // The last gate before the wire: what the API layer let through by mistake, or could not know (the
        // bounds of this very rank), would cost every tenant the rank.
        if (const Status valid = Wire::Check(*action.request, At(action.rank).limits); !valid.ok()) {
            core_.EncodeFailed(action.number, valid.error(), now_);
            return;
        }
        buffer_.clear();
        Wire::EncodeAdd(*action.request, buffer_);
        const Status sent = link_->Send(action.rank, kTypeAdd, buffer_);
        if (!sent.ok()) {
            core_.SendFailed(action.number, sent.error().message, now_);
        }
        if (buffer_.capacity() > kKeepBuffer) {
            std::string().swap(buffer_);
        }
    }

    void SendAbort(const Action& action) {
        buffer_.clear();
        Wire::EncodeAbort(core_.AbortIds(action), buffer_);
        const Status sent = link_->Send(action.rank, kTypeAbort, buffer_, FrontendLink::Urgency::kControl);
        if (!sent.ok()) {
            std::uint64_t suppressed = 0;
            if (abort_log_.Allow(suppressed)) {
                LogWarning("abort_not_sent", {{"group", options_.link.group},
                                              {"rank", action.rank},
                                              {"reason", std::string_view{sent.error().message}},
                                              {"suppressed", suppressed}});
            }
        }
    }

    void SendWave(const Action& action) {
        if constexpr (HasWaves<Protocol>) {
            buffer_.clear();
            wire::vllm::StartDpWave start;
            start.wave = static_cast<std::int64_t>(action.number);
            wire::vllm::EncodeStartDpWave(start, buffer_);
            if (!link_->Send(action.rank, kTypeWave, buffer_, FrontendLink::Urgency::kControl).ok()) {
                core_.WakeFailed(action.rank, now_);
            }
        }
    }

    void SendPing(const Action& action) {
        if constexpr (Protocol::kHasUtility) {
            buffer_.clear();
            wire::Writer writer{buffer_};
            wire::vllm::BeginUtility(writer, 0, action.number, "is_sleeping", 0);
            // A ping that cannot be sent stays unanswered: that is the verdict.
            (void)link_->Send(action.rank, kTypeUtility, buffer_, FrontendLink::Urgency::kControl);
        }
    }

    void OnDeclaredLost(const Action& action) {
        if (action.loss == LossKind::kWedged) {
            link_->SetWedged(action.rank, true);
        } else {
            link_->Forget(action.rank, false);
        }
        FailAdminOf(action.rank, action.error->message);
    }

    void OnRankChanged(const Action& action) {
        const auto state = static_cast<group::RankState>(action.index);
        const bool bad = state >= group::RankState::kDead;
        Log(bad ? LogLevel::kWarning : LogLevel::kInfo, "rank_state",
            {{"group", options_.link.group},
             {"rank", action.rank},
             {"state", RankStateName(state)},
             {"reason", std::string_view{action.error->message}}});
    }

    // ---- FrontendLink::Handler ----

    void OnProgress(std::int32_t rank, FrontendHandshake::Step step, std::string_view reason) override {
        using Step = FrontendHandshake::Step;
        At(rank).start_problem = reason;
        const group::RankState state = step == Step::kGreeted       ? group::RankState::kGreeted
                                       : step == Step::kInitialised ? group::RankState::kInitialised
                                                                    : group::RankState::kAbsent;
        if (step != Step::kRegistered) {
            core_.RankProgress(rank, state);
        }
        Execute();
    }

    void OnRestarted(std::int32_t rank) override {
        ClearLoss(rank);
        core_.RankLost(rank, LossKind::kDead, "restarted: a new engine greeted as this rank", now_);
        FailAdminOf(rank, "the rank was restarted");
        Execute();
    }

    void OnLive(std::int32_t rank, const transport::RankFacts& facts, bool reattached) override {
        ClearLoss(rank);
        if (reattached) {
            core_.FoundRunning();
        }
        At(rank).undecodable = 0;
        At(rank).start_problem.clear();
        At(rank).last_output = now_;
        At(rank).limits = Wire::LimitsOf(facts.ready);
        const Status registered = core_.RankRegistered(rank, ToCore(facts), now_);
        At(rank).load_page.Close();
        if (registered.ok()) {
            core_.RankUp(rank, now_);
            OpenLoadPage(rank, facts.ready.rankgate_load_mailbox);
        } else {
            At(rank).start_problem = registered.error().message;
            LogError("rank_refused", {{"group", options_.link.group},
                                      {"rank", rank},
                                      {"reason", std::string_view{registered.error().message}}});
        }
        Execute();
    }

    void OpenLoadPage(std::int32_t rank, const std::optional<std::string>& path) {
        if (!path || path->empty()) {
            return;
        }
        if (const Status opened = At(rank).load_page.Open(*path); !opened.ok()) {
            LogWarning("load_page_ignored", {{"group", options_.link.group},
                                             {"rank", rank},
                                             {"reason", std::string_view{opened.error().message}}});
        }
    }

    /// Fresh loads for the choices of this turn; no system call.
    void ReadLoadPages() {
        for (std::int32_t rank = 0; rank < size_; ++rank) {
            const engine::LoadPageReader& page = At(rank).load_page;
            if (!page.is_open() || core_.rank_state(rank) != group::RankState::kLive) {
                continue;
            }
            if (const auto reading = page.Read()) {
                core_.MailboxLoad(rank, reading->load, now_ - Duration{reading->age_ns});
            }
        }
    }

    /// The writer may be another process than the rank: the rank goes on, and its reports are what is known.
    void DropDeadLoadPages() {
        for (std::int32_t rank = 0; rank < size_; ++rank) {
            engine::LoadPageReader& page = At(rank).load_page;
            if (!page.is_open()) {
                continue;
            }
            const auto reading = page.Read();
            if ((reading && Duration{reading->age_ns} < kPageSilence) || !page.WriterGone()) {
                continue;
            }
            LogWarning("load_page_writer_gone", {{"group", options_.link.group}, {"rank", rank}});
            page.Close();
            core_.MailboxGone(rank);
        }
    }

    std::int32_t OnOutput(std::span<const std::string_view> frames, std::int32_t connection_rank) override {
        if (wire::IsEngineCoreDead(frames)) {
            OnLastWords(connection_rank);
            return -1;
        }
        const Status decoded = Wire::Decode(frames, message_);
        if (!decoded.ok()) {
            OnUndecodable(connection_rank, decoded.error().message);
            return -1;
        }
        // Any 32-bit number on the TokenSpeed wire.
        const std::int64_t named = std::int64_t{message_.engine_index} - options_.link.base_index;
        std::int32_t rank = named >= 0 && named < size_ ? static_cast<std::int32_t>(named) : -1;
        if constexpr (!Protocol::kHasUtility) {
            if (!message_.names_rank && size_ == 1) {
                rank = 0;  // older engines do not say; there is only one it can be
            }
        }
        EngineStep step;
        step.rank = rank;
        step.outputs = message_.rows;
        if (Wire::HasLoad(message_)) {
            step.load = &Wire::Load(message_);
        }
        std::int64_t call_id = 0;
        if constexpr (Protocol::kHasUtility) {
            step.finished_ids = message_.finished_requests;
            if (message_.has_utility && !message_.utility.unsolicited) {
                call_id = static_cast<std::int64_t>(message_.utility.call_id);
                step.utility_call_ids = {&call_id, 1};
            }
            if (message_.wave_complete >= 0) {
                step.wave_complete = message_.wave_complete;
            }
            if (message_.start_wave >= 0) {
                step.start_wave = message_.start_wave;
            }
            if (message_.dropped_rows > 0) {
                CountDecodeError("rows without a readable id", rank);
            }
        }
        frames_ = frames;
        now_ = clock_->Now();
        core_.OnStep(step, now_);
        Execute();
        frames_ = {};
        if constexpr (Protocol::kHasUtility) {
            if (call_id != 0 && !admins_.empty()) {
                OnAdminReply(rank, static_cast<std::uint64_t>(call_id));
            }
        }
        if (open_tokens_ >= kMaxTokensPerHandOver) {
            HandOver();
        }
        if (rank < 0 || rank >= size_) {
            CountDecodeError("engine index outside the group", connection_rank);
            return -1;
        }
        RankState& state = At(rank);
        state.undecodable = 0;
        state.last_output = now_;
        if (state.waiting_hint) {
            state.waiting_hint = false;
            core_.RankProcess(rank, ProcessHint::kRunning, now_);
        }
        return rank;
    }

    void OnLastWords(std::int32_t rank) {
        if (rank < 0 && size_ == 1) {
            rank = 0;
        }
        if (rank < 0) {
            // Not said by whom and not known from its connection: that closes next, and then we know.
            LogWarning("last_words", {{"group", options_.link.group}, {"rank", "unknown"}});
            return;
        }
        Lose(rank, LossKind::kDead, "the engine said ENGINE_CORE_DEAD", false);
    }

    void OnUndecodable(std::int32_t rank, std::string_view reason) {
        CountDecodeError(reason, rank);
        if (rank >= 0 && ++At(rank).undecodable >= kMaxUndecodable) {
            At(rank).undecodable = 0;
            Lose(rank, LossKind::kMute, "its outputs do not decode: " + std::string(reason), false);
        }
    }

    void OnPeerLost(std::int32_t rank, PeerLoss loss) override {
        if (rank < 0) {
            anonymous_loss_ = now_;
            return;
        }
        RankState& state = At(rank);
        switch (loss) {
            case PeerLoss::kProcessGone:
                Lose(rank, LossKind::kDead, "its process ended", false);
                return;
            case PeerLoss::kInputClosed:
            case PeerLoss::kUnreachable:
                state.input_lost = true;
                break;
            case PeerLoss::kOutputClosed:
                state.output_lost = true;
                break;
        }
        if (link_->ProcessGone(rank)) {
            Lose(rank, LossKind::kDead, "its process ended", false);
        } else if (state.input_lost && state.output_lost) {
            Lose(rank, LossKind::kDead, "both its connections closed", true);
        } else if (!state.loss_since) {
            state.loss_since = now_;
        }
    }

    void CheckLosses() {
        for (std::int32_t rank = 0; rank < size_; ++rank) {
            RankState& state = At(rank);
            if (!state.loss_since || now_ < *state.loss_since + kLossGrace) {
                continue;
            }
            state.loss_since.reset();
            if (link_->ProcessGone(rank)) {
                Lose(rank, LossKind::kDead, "its process ended", false);
            } else if (state.input_lost && anonymous_loss_ &&
                       now_ - *anonymous_loss_ < kAnonymousLossCounts && !link_->output_connected(rank)) {
                anonymous_loss_.reset();
                Lose(rank, LossKind::kDead, "both its connections closed", true);
            } else if (state.input_lost) {
                Lose(rank, LossKind::kDeaf, "its input connection closed", true);
            } else {
                Lose(rank, LossKind::kMute, "its output connection closed", false);
            }
        }
    }

    void ClearLoss(std::int32_t rank) {
        RankState& state = At(rank);
        state.input_lost = state.output_lost = false;
        state.loss_since.reset();
    }

    void Lose(std::int32_t rank, LossKind kind, std::string_view reason, bool may_return) {
        if (kind == LossKind::kDead) {
            ClearLoss(rank);
        }
        // A lockstep group is lost as one and starts as one: nobody comes back alone.
        link_->Forget(rank, may_return && !core_.lockstep());
        core_.RankLost(rank, kind, reason, now_);
        FailAdminOf(rank, reason);
        Execute();
    }

    std::string_view ProbePayload(std::int32_t /*rank*/, std::uint8_t& type) override {
        probe_.clear();
        if constexpr (Protocol::kHasUtility) {
            type = kTypeUtility;
            wire::Writer writer{probe_};
            wire::vllm::BeginUtility(writer, 0, static_cast<std::uint64_t>(core_.NextCallId()), "is_sleeping",
                                     0);
        } else {
            type = kTypeAbort;
            Wire::EncodeAbort({}, probe_);
        }
        return probe_;
    }

    void CountDecodeError(std::string_view what, std::int32_t rank) {
        ++decode_errors_;
        std::uint64_t suppressed = 0;
        if (decode_log_.Allow(suppressed)) {
            LogWarning("output_undecodable", {{"group", options_.link.group},
                                              {"rank", rank},
                                              {"reason", what},
                                              {"suppressed", suppressed}});
        }
    }

    // ---- time ----

    void Tick() {
        next_tick_ = now_ + kTick;
        for (std::int32_t rank = 0; rank < size_; ++rank) {
            RankState& state = At(rank);
            const std::int32_t pid = link_->pid(rank);
            if (pid == 0 || now_ - state.last_output < kSilenceBeforeHint ||
                (++hint_turn_ % 2 != 0 && size_ > 8)) {
                continue;
            }
            const char letter = ProcessState(pid);
            const ProcessHint hint = letter == 'T' || letter == 't' ? ProcessHint::kStopped
                                     : letter == 0                  ? ProcessHint::kUnknown
                                                                    : ProcessHint::kRunning;
            state.waiting_hint = hint == ProcessHint::kStopped;
            core_.RankProcess(rank, hint, now_);
        }
        ReadLoadPages();
        DropDeadLoadPages();
        core_.Tick(now_);
        Execute();
        if constexpr (Protocol::kHasUtility) {
            TickAdmin();
        }
        const std::uint64_t late = core_.counters().late_outputs;
        std::uint64_t suppressed = 0;
        if (late != late_logged_ && late_log_.Allow(suppressed)) {
            LogInfo("late_outputs", {{"group", options_.link.group}, {"since_last", late - late_logged_}});
            late_logged_ = late;
        }
        // Every tick, asked for or not: a reader that comes once, after the load, must see that nothing is in
        // flight any more.
        PublishSnapshot();
    }

    void PublishSnapshot() {
        auto snapshot = std::make_shared<GroupSnapshot>(core_.MakeSnapshot(now_));
        snapshot->decode_errors = static_cast<std::int64_t>(decode_errors_);
        snapshot->handshake_address = handshake_address_;
        for (RankInfo& info : snapshot->ranks) {
            info.queued_bytes =
                link_ == nullptr ? 0 : static_cast<std::int64_t>(link_->queued_bytes(info.rank));
            const std::string& problem = At(info.rank).start_problem;
            if (!problem.empty() && info.state != group::RankState::kLive) {
                info.reason = problem;
            }
        }
        std::shared_ptr<const GroupSnapshot> old;
        {
            const std::lock_guard lock{snapshot_mutex_};
            old = std::exchange(snapshot_, std::move(snapshot));
        }
    }

    // ---- administration ----

    void BeginAdmin(AdminRequest& request) {
        std::vector<AdminReply> replies(static_cast<std::size_t>(size_));
        for (std::int32_t rank = 0; rank < size_; ++rank) {
            replies[static_cast<std::size_t>(rank)].rank = rank;
        }
        if constexpr (!Protocol::kHasUtility) {
            for (AdminReply& reply : replies) {
                reply.status = Error{
                    ErrorCode::kNotImplemented, "this engine's wire has no administrative calls", {}, false};
            }
            request.done(std::move(replies));
        } else {
            switch (core_.CheckAdmin(request.call.method)) {
                case AdminGate::kSend:
                    FanOut(request.call, std::move(request.done));
                    return;
                case AdminGate::kBusy:
                    for (AdminReply& reply : replies) {
                        reply.status = Error{ErrorCode::kConflict,
                                             "another pause, resume, sleep or wake-up is under way",
                                             {},
                                             true};
                    }
                    request.done(std::move(replies));
                    return;
                case AdminGate::kNotPaused:
                    AskWhetherPaused(std::move(request));
                    return;
            }
        }
    }

    /// A lockstep group that is not paused must not be told to resume. If an earlier gateway paused it, all
    /// ranks say so.
    void AskWhetherPaused(AdminRequest&& request) {
        auto shared = std::make_shared<AdminRequest>(std::move(request));
        AdminCall question;
        question.method = AdminMethod::kIsPaused;
        FanOut(question, [this, shared](std::vector<AdminReply> answers) {
            const bool known = std::all_of(answers.begin(), answers.end(),
                                           [](const AdminReply& a) { return a.status.ok(); });
            const bool paused = known && std::all_of(answers.begin(), answers.end(),
                                                     [](const AdminReply& a) { return a.value == "true"; });
            if (paused) {
                core_.FoundPaused(now_);
                FanOut(shared->call, std::move(shared->done));
                return;
            }
            if (known) {
                for (AdminReply& answer : answers) {
                    answer.value = "null";  // what an engine says that had nothing to resume
                }
            }
            shared->done(std::move(answers));
        });
    }

    // `done` is moved from, which clang-tidy does not see in a template.
    // NOLINTNEXTLINE(performance-unnecessary-value-param)
    void FanOut(const AdminCall& call, std::function<void(std::vector<AdminReply>)> done) {
        PendingAdmin pending;
        pending.method = call.method;
        pending.done = std::move(done);
        pending.replies.resize(static_cast<std::size_t>(size_));
        pending.calls.resize(static_cast<std::size_t>(size_));
        pending.deadline = now_ + options_.admin_timeout;
        for (std::int32_t rank = 0; rank < size_; ++rank) {
            pending.replies[static_cast<std::size_t>(rank)].rank = rank;
        }
        if (admins_.size() >= kMaxAdminCalls) {
            for (AdminReply& reply : pending.replies) {
                reply.status =
                    Error{ErrorCode::kOverloaded, "too many administrative calls are waiting", {}, true};
            }
            pending.done(std::move(pending.replies));
            return;
        }
        if (admins_closed_) {
            for (AdminReply& reply : pending.replies) {
                reply.status = Error{ErrorCode::kDraining, "the gateway is shutting down", {}, true};
            }
            pending.done(std::move(pending.replies));
            return;
        }
        core_.AdminBegins(pending.method, now_);
        for (std::int32_t rank = 0; rank < size_; ++rank) {
            AdminReply& reply = pending.replies[static_cast<std::size_t>(rank)];
            if (core_.rank_state(rank) != group::RankState::kLive) {
                reply.status = Error{ErrorCode::kUnavailable,
                                     "rank " + std::to_string(rank) + " is " +
                                         std::string(RankStateName(core_.rank_state(rank))),
                                     {},
                                     true};
                continue;
            }
            const auto call_id = static_cast<std::uint64_t>(core_.NextCallId());
            EncodeAdmin(call, call_id);
            reply.status = link_->Send(rank, kTypeUtility, buffer_, FrontendLink::Urgency::kControl);
            if (reply.status.ok()) {
                pending.calls[static_cast<std::size_t>(rank)] = call_id;
                ++pending.waiting;
            }
        }
        admins_due_ = admins_due_ || pending.waiting == 0;
        admins_.push_back(std::move(pending));
    }

    void EncodeAdmin(const AdminCall& call, std::uint64_t call_id) {
        buffer_.clear();
        wire::Writer writer{buffer_};
        const auto begin = [&](std::string_view method, std::size_t args) {
            wire::vllm::BeginUtility(writer, 0, call_id, method, args);
        };
        switch (call.method) {
            case AdminMethod::kIsSleeping:
                begin("is_sleeping", 0);
                break;
            case AdminMethod::kSleep:
                // Older engines take the level alone.
                begin("sleep", call.mode == "abort" ? 1 : 2);
                writer.Int(call.level);
                if (call.mode != "abort") {
                    writer.Str(call.mode);
                }
                break;
            case AdminMethod::kWakeUp:
                begin("wake_up", 1);
                if (call.tags.empty()) {
                    writer.Nil();
                } else {
                    writer.Array(call.tags.size());
                    for (const std::string& tag : call.tags) {
                        writer.Str(tag);
                    }
                }
                break;
            case AdminMethod::kPause:
                begin("pause_scheduler", 2);
                writer.Str(call.mode);
                writer.Bool(call.clear_cache);
                break;
            case AdminMethod::kResume:
                begin("resume_scheduler", 0);
                break;
            case AdminMethod::kIsPaused:
                begin("is_scheduler_paused", 0);
                break;
            case AdminMethod::kResetPrefixCache:
                begin("reset_prefix_cache", 2);
                writer.Bool(call.reset_running_requests);
                writer.Bool(call.reset_connector);
                break;
            case AdminMethod::kAddLora:
                begin("add_lora", 1);
                wire::vllm::WriteLora(writer, call.lora);
                break;
            case AdminMethod::kRemoveLora:
                begin("remove_lora", 1);
                writer.Int(call.lora.id);
                break;
            case AdminMethod::kListLoras:
                begin("list_loras", 0);
                break;
            case AdminMethod::kStartProfile:
            case AdminMethod::kStopProfile:
                begin("profile", 1);
                writer.Bool(call.method == AdminMethod::kStartProfile);
                break;
        }
    }

    void OnAdminReply(std::int32_t rank, std::uint64_t call_id) {
        if constexpr (Protocol::kHasUtility) {
            if (rank < 0 || rank >= size_) {
                return;
            }
            const auto index = static_cast<std::size_t>(rank);
            for (PendingAdmin& pending : admins_) {
                if (pending.calls[index] != call_id) {
                    continue;
                }
                pending.calls[index] = 0;
                --pending.waiting;
                AdminReply& reply = pending.replies[index];
                const auto& answer = message_.utility;
                if (answer.failed) {
                    reply.status =
                        Error{ErrorCode::kEngineError, std::string(answer.failure_message), {}, false};
                } else {
                    // [type info, value]: the decoder has taken the value out already.
                    wire::Reader reader{answer.result};
                    if (answer.result.empty() || !wire::AppendJson(reader, reply.value)) {
                        reply.value = "null";
                    }
                }
                admins_due_ = admins_due_ || pending.waiting == 0;
                break;
            }
        }
    }

    void FailAdminOf(std::int32_t rank, std::string_view reason) {
        if constexpr (Protocol::kHasUtility) {
            if (admins_.empty()) {
                return;
            }
            const auto index = static_cast<std::size_t>(rank);
            for (PendingAdmin& pending : admins_) {
                if (pending.calls[index] != 0) {
                    pending.calls[index] = 0;
                    --pending.waiting;
                    pending.replies[index].status =
                        Error{ErrorCode::kRankLost,
                              "rank " + std::to_string(rank) + " was lost: " + std::string(reason),
                              {},
                              true};
                }
            }
            admins_due_ = true;
        }
    }

    void TickAdmin() {
        for (PendingAdmin& pending : admins_) {
            if (now_ < pending.deadline) {
                continue;
            }
            for (std::size_t rank = 0; rank < pending.calls.size(); ++rank) {
                if (pending.calls[rank] != 0) {
                    pending.calls[rank] = 0;
                    pending.replies[rank].status =
                        Error{ErrorCode::kTimeout, "the rank did not answer in time", {}, true};
                }
            }
            pending.waiting = 0;
            admins_due_ = true;
        }
    }

    void FinishAdmins() {
        if constexpr (Protocol::kHasUtility) {
            admins_due_ = false;
            for (std::size_t i = 0; i < admins_.size();) {
                if (admins_[i].waiting != 0) {
                    ++i;
                    continue;
                }
                PendingAdmin pending = std::move(admins_[i]);
                admins_.erase(admins_.begin() + static_cast<std::ptrdiff_t>(i));
                const bool ok = std::all_of(pending.replies.begin(), pending.replies.end(),
                                            [](const AdminReply& reply) { return reply.status.ok(); });
                core_.AdminEnded(pending.method, ok, now_);
                pending.done(std::move(pending.replies));
            }
        }
    }

    // ---- the end ----

    void Finish() {
        // Whatever shards still wait for gets its one terminal output, whatever ranks still compute gets its
        // ABORT.
        now_ = clock_->Now();
        bool signalled = true;
        do {
            TakeCommands(std::exchange(signalled, false));
        } while (commands_left_);
        core_.FailAll(Error{ErrorCode::kDraining, "the gateway is shutting down", {}, true}, now_);
        for (std::int32_t rank = 0; rank < size_; ++rank) {
            FailAdminOf(rank, "the gateway is shutting down");
        }
        admins_closed_ = true;
        FinishAdmins();
        core_.Flush();
        Execute();
        HandOver();
        PublishSnapshot();
        link_.reset();
    }

    static constexpr std::size_t kKeepBuffer = 4 << 20;

    const GroupActorOptions options_;
    const std::shared_ptr<const Clock> clock_;
    std::unique_ptr<FrontendLink> link_;
    GroupCore<Protocol> core_;
    const std::int32_t size_;
    TimePoint now_{};
    TimePoint next_tick_{};
    bool more_{false};
    bool commands_left_{false};
    bool stopping_{false};
    bool closed_{false};

    Mailbox<Command> commands_;
    Mailbox<OutputBatch>
        recycled_;  // never acknowledged: its descriptor is written once and watched by nobody
    std::vector<Shard> shards_;
    std::size_t open_tokens_{0};

    typename Wire::Outputs message_;
    std::span<const std::string_view> frames_;
    std::string buffer_;
    std::string probe_;
    std::vector<RankState> ranks_;
    std::uint32_t hint_turn_{0};

    std::vector<PendingAdmin> admins_;
    bool admins_due_{false};
    bool admins_closed_{false};
    std::optional<TimePoint> anonymous_loss_;

    std::uint64_t decode_errors_{0};
    std::uint64_t late_logged_{0};
    LogLimiter decode_log_{5};
    LogLimiter abort_log_{5};
    LogLimiter late_log_{1};

    const std::string handshake_address_;
    std::atomic<bool> drained_{false};
    mutable std::mutex snapshot_mutex_;  // readers are health, metrics and admin; never the token path
    std::shared_ptr<const GroupSnapshot> snapshot_;
    std::thread thread_;
};

template <class Wire>
MadeActor MakeOf(GroupActorOptions options, std::unique_ptr<FrontendLink> link,
                 std::shared_ptr<const Clock> clock) {
    auto actor = std::make_unique<Actor<Wire>>(std::move(options), std::move(link), std::move(clock));
    FrontendLink::Handler& handler = actor->handler();
    return {std::move(actor), &handler};
}

MadeActor Make(transport::Dialect dialect, GroupActorOptions options, std::unique_ptr<FrontendLink> link,
               std::shared_ptr<const Clock> clock) {
    return dialect == transport::Dialect::kTokenSpeed
               ? MakeOf<TokenSpeedWire>(std::move(options), std::move(link), std::move(clock))
               : MakeOf<VllmWire>(std::move(options), std::move(link), std::move(clock));
}

}  // namespace

Result<std::unique_ptr<GroupActor>> GroupActor::Start(GroupActorOptions options) {
    auto clock = std::make_shared<const SteadyClock>();
    std::random_device random;
    if (options.core.id_epoch == 0) {
        options.core.id_epoch = random() | 1U;
    }
    if (options.core.initial_wave == 0) {
        options.core.initial_wave =
            static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(
                                           std::chrono::system_clock::now().time_since_epoch())
                                           .count());
    }
    auto link = FrontendLink::Bind(options.link, *clock);
    if (!link.ok()) {
        return link.error();
    }
    return StartOn(std::move(options), std::move(*link), clock);
}

std::unique_ptr<GroupActor> GroupActor::StartOn(GroupActorOptions options, std::unique_ptr<FrontendLink> link,
                                                const std::shared_ptr<const Clock>& clock) {
    options.core.group = options.link.group;
    options.core.size = options.link.size;
    if (const auto dialect = options.link.dialect) {
        return Make(*dialect, std::move(options), std::move(link), clock).actor;
    }
    GroupActorOptions tenant = options;
    tenant.own_thread = false;
    return StartAutoActor(options, std::move(link), clock,
                          [tenant, clock](transport::Dialect found, std::unique_ptr<FrontendLink> bound) {
                              GroupActorOptions concrete = tenant;
                              concrete.link.dialect = found;
                              return Make(found, std::move(concrete), std::move(bound), clock);
                          });
}

}  // namespace rankgate::group
