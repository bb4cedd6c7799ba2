// SPDX-License-Identifier: Apache-2.0
#include "group/auto_actor.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "wire/msgpack.h"
#include "wire/tokenspeed/outputs.h"
#include "wire/tokenspeed/request.h"
#include "wire/vllm/outputs.h"
#include "wire/vllm/request.h"

namespace rankgate::group {
namespace {

using transport::Dialect;
using transport::FrontendHandshake;
using transport::FrontendLink;
using transport::PeerLoss;

constexpr std::uint8_t kTypeAbort = 1;
constexpr std::uint8_t kTypeUtility = 3;
/// Call ids of the questions asked before the group has a core; its own start at 1.
constexpr std::uint64_t kFirstProbeId = 1ULL << 53U;

struct WakeUp : MailboxNode {};

class AutoActor final : public GroupActor, private FrontendLink::Handler {
  public:
    AutoActor(const GroupActorOptions& options, std::unique_ptr<FrontendLink> link,
              std::shared_ptr<const Clock> clock, ActorMaker make)
        : group_{options.link.group},
          size_{options.link.size},
          base_index_{options.link.base_index},
          clock_{std::move(clock)},
          make_{std::move(make)},
          link_{std::move(link)},
          problems_(static_cast<std::size_t>(options.link.size)),
          handshake_address_{link_->handshake_address()},
          poll_fd_{link_->poll_fd()} {
        link_->Watch(wake_.fd());
        PublishSnapshot();
        if (options.own_thread) {
            thread_ = std::thread([this] {
                while (!stopping_.load(std::memory_order_acquire)) {
                    RunOnce(std::chrono::seconds(1));
                }
            });
        }
    }

    ~AutoActor() override { Close(); }

    // ---- Group: any thread ----

    void Submit(StreamKey stream, std::unique_ptr<wire::GenerateRequest> request,
                OutputMailbox& reply) override {
        if (GroupActor* actor = Real()) {
            return actor->Submit(stream, std::move(request), reply);
        }
        // Answered here and now: nothing waits for the turn of a group that has nobody to ask.
        auto batch = std::make_unique<OutputBatch>();
        batch->group = group_;
        Output& output = batch->outputs.emplace_back();
        output.stream = stream;
        output.finish_reason = wire::FinishReason::kError;
        output.error = 0;
        batch->errors.push_back(
            Error{ErrorCode::kUnavailable, "no engine of this group has registered yet", {}, true});
        reply.Push(std::move(batch));
    }

    void Cancel(StreamKey stream, OutputMailbox& reply, CancelCause cause) override {
        // Without an actor there is no stream: every Submit so far has had its answer.
        if (GroupActor* actor = Real()) {
            actor->Cancel(stream, reply, cause);
        }
    }

    void Admin(AdminCall call, std::function<void(std::vector<AdminReply>)> done) override {
        if (GroupActor* actor = Real()) {
            return actor->Admin(std::move(call), std::move(done));
        }
        std::vector<AdminReply> replies(static_cast<std::size_t>(size_));
        for (std::int32_t rank = 0; rank < size_; ++rank) {
            AdminReply& reply = replies[static_cast<std::size_t>(rank)];
            reply.rank = rank;
            reply.status = Error{ErrorCode::kUnavailable,
                                 "rank " + std::to_string(rank) + " has not registered yet",
                                 {},
                                 true};
        }
        done(std::move(replies));
    }

    std::shared_ptr<const GroupSnapshot> Snapshot() const override {
        if (const GroupActor* actor = Real()) {
            return actor->Snapshot();
        }
        const std::lock_guard lock{snapshot_mutex_};
        return snapshot_;
    }

    void Recycle(std::unique_ptr<OutputBatch> batch) noexcept override {
        if (GroupActor* actor = Real()) {
            actor->Recycle(std::move(batch));
        }
    }

    const std::string& handshake_address() const override { return handshake_address_; }

    void BeginDrain() override {
        draining_.store(true);
        if (GroupActor* actor = real_.load()) {
            actor->BeginDrain();
        }
    }
    bool drained() const override {
        const GroupActor* actor = Real();
        return actor != nullptr ? actor->drained() : draining_.load();
    }

    void Close() override {
        if (std::exchange(closed_, true)) {
            return;
        }
        stopping_.store(true, std::memory_order_release);
        if (thread_.joinable()) {
            wake_.Push(std::make_unique<WakeUp>());
            thread_.join();
        }
        if (GroupActor* actor = Real()) {
            actor->Close();
        } else {
            link_.reset();
        }
    }

    // ---- the loop ----

    int poll_fd() const override { return poll_fd_; }

    TimePoint next_deadline() const override {
        if (const GroupActor* actor = Real()) {
            return actor->next_deadline();
        }
        const TimePoint tick = clock_->Now() + std::chrono::seconds(1);
        return more_ ? TimePoint{} : std::min(link_->next_deadline().value_or(tick), tick);
    }

    void RunOnce(Duration max_wait) override {
        if (GroupActor* actor = Real()) {
            return actor->RunOnce(max_wait);
        }
        const Duration wait =
            std::clamp<Duration>(next_deadline() - clock_->Now(), Duration::zero(), max_wait);
        if (link_->Wait(wait)) {
            wake_.Acknowledge();
        }
        more_ = link_->Poll(*this);
        if (dirty_ && actor_ == nullptr) {
            PublishSnapshot();
        }
        dirty_ = false;
    }

    void HoldCommands() override {
        if (GroupActor* actor = Real()) {
            actor->HoldCommands();
        }
    }
    void RunCommands() override {
        if (GroupActor* actor = Real()) {
            actor->RunCommands();
        }
    }

  private:
    GroupActor* Real() const noexcept { return real_.load(std::memory_order_acquire); }

    // ---- FrontendLink::Handler, the owner's thread. The link keeps calling this one until its Poll returns.

    void OnProgress(std::int32_t rank, FrontendHandshake::Step step, std::string_view reason) override {
        if (handler_ != nullptr) {
            return handler_->OnProgress(rank, step, reason);
        }
        problems_[static_cast<std::size_t>(rank)] = reason;
        dirty_ = true;
    }

    void OnRestarted(std::int32_t rank) override {
        if (handler_ != nullptr) {
            return handler_->OnRestarted(rank);
        }
        dirty_ = true;
    }

    void OnLive(std::int32_t rank, const transport::RankFacts& facts, bool reattached) override {
        if (handler_ == nullptr) {
            Become(facts.ready.dialect);
        }
        handler_->OnLive(rank, facts, reattached);
    }

    std::int32_t OnOutput(std::span<const std::string_view> frames, std::int32_t connection_rank) override {
        if (handler_ != nullptr) {
            return handler_->OnOutput(frames, connection_rank);
        }
        // From an engine that outlived an earlier gateway: what it computes is nobody's here, but it says who
        // speaks on this connection.
        const auto dialect = link_->dialect();
        if (!dialect || wire::IsEngineCoreDead(frames)) {
            return -1;
        }
        std::int32_t index = -1;
        if (*dialect == Dialect::kVllm) {
            wire::vllm::OutputsMessage message;
            index = wire::vllm::DecodeOutputs(frames, message).ok() ? message.engine_index : -1;
        } else {
            wire::tokenspeed::OutputsMessage message;
            const bool known = wire::tokenspeed::DecodeOutputs(frames, message).ok() && message.names_rank;
            index = known ? message.engine_index : -1;
        }
        const std::int64_t rank = std::int64_t{index} - base_index_;
        return rank >= 0 && rank < size_ ? static_cast<std::int32_t>(rank) : -1;
    }

    void OnPeerLost(std::int32_t rank, PeerLoss loss) override {
        if (handler_ != nullptr) {
            handler_->OnPeerLost(rank, loss);
        }
    }

    std::string_view ProbePayload(std::int32_t rank, std::uint8_t& type) override {
        if (handler_ != nullptr) {
            return handler_->ProbePayload(rank, type);
        }
        probe_.clear();
        if (link_->dialect() == Dialect::kTokenSpeed) {
            type = kTypeAbort;
            wire::tokenspeed::EncodeAbort(std::span<const std::string_view>{}, probe_);
        } else {
            type = kTypeUtility;
            wire::Writer writer{probe_};
            wire::vllm::BeginUtility(writer, 0, kFirstProbeId + ++probes_, "is_sleeping", 0);
        }
        return probe_;
    }

    /// The group has its runtime, for good.
    void Become(Dialect dialect) {
        LogInfo("runtime_found", {{"group", group_}, {"runtime", wire::DialectName(dialect)}});
        FrontendLink& link = *link_;
        MadeActor made = make_(dialect, std::move(link_));
        actor_ = std::move(made.actor);
        handler_ = made.handler;
        for (std::int32_t rank = 0; rank < size_; ++rank) {
            if (link.step(rank) < FrontendHandshake::Step::kRegistered) {
                handler_->OnProgress(rank, link.step(rank), problems_[static_cast<std::size_t>(rank)]);
            }
        }
        real_.store(actor_.get());
        // Either this sees the wish, or BeginDrain sees the actor.
        if (draining_.load()) {
            actor_->BeginDrain();
        }
    }

    void PublishSnapshot() {
        auto snapshot = std::make_shared<GroupSnapshot>();
        snapshot->group = group_;
        snapshot->runtime = "auto";
        snapshot->handshake_address = handshake_address_;
        snapshot->size = size_;
        snapshot->forming = true;
        for (std::int32_t rank = 0; rank < size_; ++rank) {
            using Step = FrontendHandshake::Step;
            RankInfo& info = snapshot->ranks.emplace_back();
            info.rank = rank;
            const Step step = link_->step(rank);
            info.state = step == Step::kGreeted       ? RankState::kGreeted
                         : step == Step::kInitialised ? RankState::kInitialised
                         : step == Step::kRegistered  ? RankState::kRegistered
                                                      : RankState::kAbsent;
            info.reason = problems_[static_cast<std::size_t>(rank)];
            info.load_source = "own";
        }
        const std::lock_guard lock{snapshot_mutex_};
        snapshot_ = std::move(snapshot);
    }

    const std::int32_t group_;
    const std::int32_t size_;
    const std::int32_t base_index_;
    const std::shared_ptr<const Clock> clock_;
    const ActorMaker make_;
    std::unique_ptr<FrontendLink> link_;  // until the actor has it
    std::vector<std::string> problems_;   // by rank: why it is not on its way
    const std::string handshake_address_;
    const int poll_fd_;
    std::string probe_;
    std::uint64_t probes_{0};
    bool more_{false};
    bool dirty_{false};
    bool closed_{false};

    Mailbox<WakeUp> wake_;
    std::unique_ptr<GroupActor> actor_;
    FrontendLink::Handler* handler_{nullptr};
    std::atomic<GroupActor*> real_{nullptr};  // actor_, for the other threads
    std::atomic<bool> draining_{false};
    std::atomic<bool> stopping_{false};
    mutable std::mutex snapshot_mutex_;  // readers are health, metrics and admin; never the token path
    std::shared_ptr<const GroupSnapshot> snapshot_;
    std::thread thread_;
};

}  // namespace

std::unique_ptr<GroupActor> StartAutoActor(const GroupActorOptions& options,
                                           std::unique_ptr<FrontendLink> link,
                                           std::shared_ptr<const Clock> clock, ActorMaker make) {
    return std::make_unique<AutoActor>(options, std::move(link), std::move(clock), std::move(make));
}

}  // namespace rankgate::group
