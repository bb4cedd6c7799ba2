// SPDX-License-Identifier: Apache-2.0
// What the tests of the group actor share: a client that plays one HTTP shard, and a fixture with an actor
// and the fake ranks that dial it. For tests only, main thread only; every wait is bounded.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "group/group_actor.h"
#include "transport/fake_rank.h"

namespace rankgate::group {

using std::chrono::milliseconds;
using std::chrono::seconds;
using transport::FakeRank;
using transport::FakeRankOptions;
using transport::FakeRankProcess;
using SteadyNow = std::chrono::steady_clock;

struct Stream {
    std::vector<wire::TokenId> tokens;
    wire::FinishReason finish{wire::FinishReason::kNone};
    std::optional<Error> error;
    std::int32_t rank{-1};
    int terminals{0};
};

/// What an HTTP shard does with a group, single-threaded.
class Client {
  public:
    explicit Client(Group& group) : group_{group} {}

    StreamKey Submit(std::int64_t max_tokens, std::size_t prompt = 3, std::string id = {},
                     std::optional<std::int32_t> pinned = std::nullopt) {
        static std::atomic<std::uint64_t> serial{0};
        auto request = std::make_unique<wire::GenerateRequest>();
        const StreamKey key = ++next_;
        request->id = id.empty() ? "t-" + std::to_string(++serial) : std::move(id);
        request->prompt_token_ids.assign(prompt, 7);
        request->sampling.max_tokens = max_tokens;
        request->data_parallel_rank = pinned;
        streams_[key];
        group_.Submit(key, std::move(request), box_);
        return key;
    }
    void Cancel(StreamKey key, CancelCause cause = CancelCause::kClientGone) {
        group_.Cancel(key, box_, cause);
    }

    bool Wait(const std::function<bool()>& done, Duration limit = seconds(15)) {
        const auto until = SteadyNow::now() + limit;
        for (;;) {
            Read();
            if (done()) {
                return true;
            }
            const auto left = std::chrono::duration_cast<milliseconds>(until - SteadyNow::now()).count();
            if (left <= 0) {
                return false;
            }
            pollfd item{box_.fd(), POLLIN, 0};
            ::poll(&item, 1, static_cast<int>(std::min<std::int64_t>(left, 50)));
        }
    }
    bool WaitEnd(StreamKey key, Duration limit = seconds(15)) {
        return Wait([&] { return streams_[key].terminals > 0; }, limit);
    }
    bool WaitAll(Duration limit = seconds(30)) {
        return Wait(
            [&] {
                return std::all_of(streams_.begin(), streams_.end(),
                                   [](const auto& s) { return s.second.terminals > 0; });
            },
            limit);
    }
    Stream& operator[](StreamKey key) { return streams_[key]; }
    std::map<StreamKey, Stream>& streams() { return streams_; }
    std::size_t batches() const { return batches_; }

  private:
    void Read() {
        box_.Acknowledge();
        while (auto batch = box_.Pop()) {
            ++batches_;
            for (const Output& output : batch->outputs) {
                Stream& stream = streams_[output.stream];
                const auto tokens = batch->TokensOf(output);
                stream.tokens.insert(stream.tokens.end(), tokens.begin(), tokens.end());
                stream.rank = output.rank;
                if (output.error >= 0) {
                    stream.error = batch->errors[static_cast<std::size_t>(output.error)];
                }
                if (output.finish_reason != wire::FinishReason::kNone) {
                    stream.finish = output.finish_reason;
                    ++stream.terminals;
                }
            }
            group_.Recycle(std::move(batch));
        }
    }

    Group& group_;
    OutputMailbox box_;
    StreamKey next_{0};
    std::map<StreamKey, Stream> streams_;
    std::size_t batches_{0};
};

class GroupActorTest : public ::testing::Test {
  protected:
    void TearDown() override {
        ranks_.clear();
        processes_.clear();
        client_.reset();
        actor_.reset();
        if (!root_.empty()) {
            std::filesystem::remove_all(root_);
        }
    }

    GroupActorOptions Options(std::int32_t size, transport::Dialect dialect = transport::Dialect::kVllm) {
        GroupActorOptions options;
        options.link.size = size;
        options.link.dialect = dialect;
#ifdef RG_RUNTIME_AUTO
        options.link.dialect.reset();  // the whole suite once more, with nobody declaring the runtime
#endif
        return options;
    }
    GroupActorOptions AutoOptions(std::int32_t size) {
        GroupActorOptions options = Options(size);
        options.link.dialect.reset();
        return options;
    }
    /// One request after the other, none of which may fail; on `rank`, if one is named.
    void ServeInTurn(int requests, std::int64_t tokens, std::optional<std::int32_t> rank = {}) {
        for (int i = 0; i < requests; ++i) {
            const StreamKey key = client().Submit(tokens);
            ASSERT_TRUE(client().WaitEnd(key));
            EXPECT_FALSE(client()[key].error.has_value());
            if (rank) {
                EXPECT_EQ(client()[key].rank, *rank);
            }
        }
    }
    /// Why a rank is not live, as /health shows it.
    std::string Reason(std::int32_t rank) {
        return actor_->Snapshot()->ranks[static_cast<std::size_t>(rank)].reason;
    }
    GroupActor& Start(GroupActorOptions options) {
        auto actor = GroupActor::Start(std::move(options));
        EXPECT_TRUE(actor.ok()) << actor.error().message;
        client_.reset();
        actor_ = std::move(*actor);
        boxes_.push_back(std::make_unique<Client>(*actor_));
        return *actor_;
    }
    Client& client() { return *boxes_.back(); }

    FakeRankOptions RankOptions(std::uint16_t index, transport::Dialect dialect = transport::Dialect::kVllm) {
        FakeRankOptions options;
        options.handshake_address = actor_->handshake_address();
        options.engine_index = index;
        options.dialect = dialect;
        if (dialect == transport::Dialect::kTokenSpeed) {
            options.version = "tokenspeed-0.1.1";
        }
        return options;
    }
    FakeRank& AddRank(FakeRankOptions options) {
        ranks_.push_back(std::make_unique<FakeRank>(std::move(options)));
        return *ranks_.back();
    }
    FakeRankProcess& AddProcess(FakeRankOptions options) {
        processes_.push_back(std::make_unique<FakeRankProcess>(RG_FAKE_RANK, options));
        return *processes_.back();
    }

    bool WaitSnapshot(const std::function<bool(const GroupSnapshot&)>& wanted, Duration limit = seconds(15)) {
        const auto until = SteadyNow::now() + limit;
        while (SteadyNow::now() < until) {
            if (wanted(*actor_->Snapshot())) {
                return true;
            }
            std::this_thread::sleep_for(milliseconds(1));
        }
        return false;
    }
    bool WaitLive(std::int32_t count, Duration limit = seconds(15)) {
        return WaitSnapshot([&](const GroupSnapshot& s) { return s.live == count; }, limit);
    }
    bool WaitState(std::int32_t rank, RankState state, Duration limit = seconds(15)) {
        return WaitSnapshot(
            [&](const GroupSnapshot& s) { return s.ranks[static_cast<std::size_t>(rank)].state == state; },
            limit);
    }
    std::int64_t InFlight() {
        std::int64_t sum = 0;
        // Two looks: the first one only asks for a fresh snapshot.
        (void)actor_->Snapshot();
        std::this_thread::sleep_for(milliseconds(400));
        const auto snapshot = actor_->Snapshot();
        for (const RankInfo& rank : snapshot->ranks) {
            sum += rank.in_flight;
        }
        return sum;
    }
    std::vector<AdminReply> CallAdmin(AdminCall what) {
        std::mutex mutex;
        std::condition_variable ready;
        std::optional<std::vector<AdminReply>> answer;
        actor_->Admin(std::move(what), [&](std::vector<AdminReply> replies) {
            const std::lock_guard lock{mutex};
            answer = std::move(replies);
            ready.notify_all();
        });
        std::unique_lock lock{mutex};
        EXPECT_TRUE(ready.wait_for(lock, seconds(10), [&] { return answer.has_value(); }));
        return answer.value_or(std::vector<AdminReply>{});
    }
    std::string Root() {
        std::string pattern = "/tmp/rg-act-XXXXXX";
        EXPECT_NE(::mkdtemp(pattern.data()), nullptr);
        root_ = pattern;
        return root_;
    }

    std::unique_ptr<GroupActor> actor_;
    std::vector<std::unique_ptr<Client>> boxes_;  // outlive the actors
    std::unique_ptr<Client> client_;
    std::vector<std::unique_ptr<FakeRank>> ranks_;
    std::vector<std::unique_ptr<FakeRankProcess>> processes_;
    std::string root_;
};

}  // namespace rankgate::group
