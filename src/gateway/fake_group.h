// SPDX-License-Identifier: Apache-2.0
// A group without engines, for tests of the HTTP side: it remembers what it was given and answers when the
// test says so. Synchronised.
#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "gateway/gateway.h"
#include "group/group.h"

namespace rankgate::gateway {

class FakeGroup final : public group::Group {
  public:
    struct Submitted {
        group::StreamKey key;
        std::unique_ptr<wire::GenerateRequest> request;
        group::OutputMailbox* reply;
    };
    struct Cancelled {
        group::StreamKey key;
        group::CancelCause cause;
    };

    explicit FakeGroup(std::int32_t index, std::int32_t size = 1) : index_{index} {
        auto snapshot = std::make_shared<group::GroupSnapshot>();
        snapshot->group = index;
        snapshot->runtime = "vllm";
        snapshot->size = size;
        snapshot->live = size;
        snapshot->serving = true;
        snapshot->max_model_len = 4096;
        for (std::int32_t rank = 0; rank < size; ++rank) {
            group::RankInfo info;
            info.rank = rank;
            info.state = group::RankState::kLive;
            info.engine_version = "fake 1";
            info.max_model_len = 4096;
            snapshot->ranks.push_back(info);
        }
        snapshot_ = snapshot;
    }

    // Group
    void Submit(group::StreamKey stream, std::unique_ptr<wire::GenerateRequest> request,
                group::OutputMailbox& reply) override {
        const std::lock_guard lock{mutex_};
        live_[{&reply, stream}] = submitted_.size();
        submitted_.push_back({stream, std::move(request), &reply});
        changed_.notify_all();
        if (auto_answer_) {
            auto_answer_(*this, submitted_.back());
        }
    }
    void Cancel(group::StreamKey stream, group::OutputMailbox& reply, group::CancelCause cause) override {
        const std::lock_guard lock{mutex_};
        if (live_.erase({&reply, stream}) != 0) {
            cancelled_.push_back({stream, cause});
            changed_.notify_all();
        }
    }
    void Admin(group::AdminCall call, std::function<void(std::vector<group::AdminReply>)> done) override {
        std::vector<group::AdminReply> replies;
        {
            const std::lock_guard lock{mutex_};
            admin_.push_back(call);
            for (const group::RankInfo& rank : snapshot_->ranks) {
                group::AdminReply reply;
                reply.rank = rank.rank;
                reply.value = admin_value_;
                if (rank.rank == failing_rank_) {
                    reply.status = Error{ErrorCode::kEngineError, "refused by the engine", "", false};
                }
                replies.push_back(reply);
            }
        }
        done(std::move(replies));
    }
    std::shared_ptr<const group::GroupSnapshot> Snapshot() const override {
        const std::lock_guard lock{mutex_};
        return snapshot_;
    }
    void Recycle(std::unique_ptr<group::OutputBatch> batch) noexcept override { batch.reset(); }

    // The test's side
    template <class F>
    bool WaitFor(F&& condition, std::chrono::milliseconds patience = std::chrono::milliseconds{5000}) {
        std::unique_lock lock{mutex_};
        return changed_.wait_for(lock, patience, std::forward<F>(condition));
    }
    bool WaitSubmitted(std::size_t count) {
        return WaitFor([&] { return submitted_.size() >= count; });
    }
    bool WaitCancelled(std::size_t count,
                       std::chrono::milliseconds patience = std::chrono::milliseconds{5000}) {
        return WaitFor([&] { return cancelled_.size() >= count; }, patience);
    }
    std::size_t num_submitted() const {
        const std::lock_guard lock{mutex_};
        return submitted_.size();
    }
    const wire::GenerateRequest& request(std::size_t i) const {
        const std::lock_guard lock{mutex_};
        return *submitted_[i].request;
    }
    Cancelled cancelled(std::size_t i) const {
        const std::lock_guard lock{mutex_};
        return cancelled_[i];
    }
    group::StreamKey key(std::size_t i) const {
        const std::lock_guard lock{mutex_};
        return submitted_[i].key;
    }
    std::size_t num_cancelled() const {
        const std::lock_guard lock{mutex_};
        return cancelled_.size();
    }
    std::size_t num_live() const {
        const std::lock_guard lock{mutex_};
        return live_.size();
    }

    /// One step for request i: the bytes of `text` as tokens of the byte tokenizer.
    void Say(std::size_t i, std::string_view text, wire::FinishReason finish = wire::FinishReason::kNone) {
        const std::lock_guard lock{mutex_};
        SayLocked(submitted_[i], text, finish);
    }
    void SayLocked(const Submitted& to, std::string_view text, wire::FinishReason finish) {
        if (closed_) {
            return;
        }
        auto batch = std::make_unique<group::OutputBatch>();
        batch->group = index_;
        group::Output output;
        output.stream = to.key;
        output.num_tokens = static_cast<std::uint32_t>(text.size());
        output.finish_reason = finish;
        output.rank = 0;
        for (const char c : text) {
            batch->tokens.push_back(static_cast<unsigned char>(c));
        }
        batch->outputs.push_back(output);
        if (finish != wire::FinishReason::kNone) {
            live_.erase({to.reply, to.key});
        }
        to.reply->Push(std::move(batch));
    }
    void SayError(std::size_t i, Error error) {
        const std::lock_guard lock{mutex_};
        if (closed_) {
            return;
        }
        auto batch = std::make_unique<group::OutputBatch>();
        batch->group = index_;
        group::Output output;
        output.stream = submitted_[i].key;
        output.error = 0;
        batch->outputs.push_back(output);
        batch->errors.push_back(std::move(error));
        live_.erase({submitted_[i].reply, submitted_[i].key});
        submitted_[i].reply->Push(std::move(batch));
    }
    void Change(const std::function<void(group::GroupSnapshot&)>& edit) {
        const std::lock_guard lock{mutex_};
        auto next = std::make_shared<group::GroupSnapshot>(*snapshot_);
        edit(*next);
        snapshot_ = next;
    }
    /// The gateway let go of the group: whoever is in the middle of a step ends it first, nothing is said any
    /// more.
    void Close() {
        const std::lock_guard lock{mutex_};
        closed_ = true;
    }
    /// Called with the lock held for each submission; may call SayLocked.
    void AnswerWith(std::function<void(FakeGroup&, const Submitted&)> fn) {
        const std::lock_guard lock{mutex_};
        auto_answer_ = std::move(fn);
    }
    std::vector<group::AdminCall> admin_calls() const {
        const std::lock_guard lock{mutex_};
        return admin_;
    }
    void SetAdmin(std::string value, std::int32_t failing_rank = -1) {
        const std::lock_guard lock{mutex_};
        admin_value_ = std::move(value);
        failing_rank_ = failing_rank;
    }

  private:
    const std::int32_t index_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<Submitted> submitted_;
    std::vector<Cancelled> cancelled_;
    std::map<std::pair<group::OutputMailbox*, group::StreamKey>, std::size_t> live_;
    std::vector<group::AdminCall> admin_;
    std::string admin_value_{"null"};
    std::int32_t failing_rank_{-1};
    bool closed_{false};
    std::shared_ptr<const group::GroupSnapshot> snapshot_;
    std::function<void(FakeGroup&, const Submitted&)> auto_answer_;
};

/// What the gateway owns. The group itself lives as long as the test, whose threads may still be in it when
/// the gateway has ended.
class FakeGroupHandle final : public group::Group {
  public:
    explicit FakeGroupHandle(std::shared_ptr<FakeGroup> group) : group_{std::move(group)} {}
    FakeGroupHandle(const FakeGroupHandle&) = delete;
    FakeGroupHandle& operator=(const FakeGroupHandle&) = delete;
    ~FakeGroupHandle() override { group_->Close(); }

    void Submit(group::StreamKey stream, std::unique_ptr<wire::GenerateRequest> request,
                group::OutputMailbox& reply) override {
        group_->Submit(stream, std::move(request), reply);
    }
    void Cancel(group::StreamKey stream, group::OutputMailbox& reply, group::CancelCause cause) override {
        group_->Cancel(stream, reply, cause);
    }
    void Admin(group::AdminCall call, std::function<void(std::vector<group::AdminReply>)> done) override {
        group_->Admin(std::move(call), std::move(done));
    }
    std::shared_ptr<const group::GroupSnapshot> Snapshot() const override { return group_->Snapshot(); }
    void Recycle(std::unique_ptr<group::OutputBatch> batch) noexcept override {
        group_->Recycle(std::move(batch));
    }

  private:
    const std::shared_ptr<FakeGroup> group_;
};

}  // namespace rankgate::gateway
