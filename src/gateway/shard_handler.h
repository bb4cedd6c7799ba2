// SPDX-License-Identifier: Apache-2.0
// One shard's application side: routes, keys, and the generation requests that live on it. Outputs of all
// groups arrive in its own mailbox, once per engine step, and leave as bytes before the loop goes on.
// Shard-confined; others reach it through Shard::Post.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "api/request.h"
#include "api/response.h"
#include "gateway/metrics.h"
#include "gateway/state.h"
#include "group/group.h"
#include "http/server.h"

namespace rankgate::gateway {

class Session;
class PendingReply;
class GenerateJob;

/// When a request's body was complete.
struct Arrival {
    TimePoint at{};
    double wall{0.0};  // seconds of the wall clock
};

class ShardHandler final : public http::Handler {
  public:
    ShardHandler(http::Shard& shard, State& state, ShardMetrics& metrics);
    ~ShardHandler() override;

    bool OnHeaders(const http::Request& request, http::Response& refusal) noexcept override;
    void OnRequest(http::Exchange& exchange) noexcept override;
    void OnStop() noexcept override;

    void SetTable(std::shared_ptr<const GroupTable> table);
    /// Ends every request of a group (or, with a negative index, of all) with this error.
    void FailRequests(std::int32_t group, const Error& error, group::CancelCause cause);

  private:
    friend class Session;
    friend class PendingReply;
    friend class GenerateJob;

    /// Texts up to this size are prepared on the shard: cheaper than two hand-overs, too short to be felt by
    /// others.
    static constexpr std::size_t kInlineBytes = 4096;
    /// Bodies from this size on are parsed on the pool too: 30 MB of JSON take tens of milliseconds, in which
    /// no stream of this shard would get a token. Below, a parse takes some hundred microseconds at most.
    static constexpr std::size_t kPooledBody = 256 * 1024;
    static constexpr int kSlotBits = 24;
    /// The longest an administrative call may take before its client gets an answer.
    static constexpr std::chrono::seconds kAdminTimeout{310};

    using RouteFn = void (ShardHandler::*)(http::Exchange&);
    struct Route {
        std::string_view path;
        http::Method method;
        RouteFn run;
        bool open{false};   // served without a key
        bool admin{false};  // never without a key on a public address
        bool json_body{false};
        bool generation{false};  // refused while draining
        bool prefix{false};      // the path continues
    };
    static const std::vector<Route>& Routes();
    static const Route* Find(std::string_view path, http::Method method, bool& path_known,
                             std::string& allow);

    /// A choice's place in the shard's table; the stream key is generation and place.
    struct Stream {
        Session* session{nullptr};
        std::uint32_t choice{0};
        std::uint64_t generation{1};
    };
    /// What this shard last learned of a group's model.
    struct ModelCache {
        std::shared_ptr<const api::ModelInfo> model;
        std::shared_ptr<const group::GroupSnapshot> snapshot;
        std::uint64_t adapters_version{0};
    };

    void Count(int status) noexcept { metrics_.responses[static_cast<std::size_t>(status) % 600].Add(1); }
    void Reply(http::Exchange& exchange, int status, std::string_view content_type, std::string_view body);
    void ReplyError(http::Exchange& exchange, const Error& error);
    void ReplyJson(http::Exchange& exchange, std::string_view body) {
        Reply(exchange, 200, "application/json", body);
    }
    Status Authorize(const http::Request& request, const Route* route) const;

    void OnOutputs();
    /// Groups without a thread that this shard's loop runs: watched as long as they are in the table.
    void AdoptTenants();
    void RunTenant(GroupEntry& entry);
    void TickTenants();
    void Deliver(const group::OutputBatch& batch, const group::Output& output);
    group::StreamKey OpenStream(Session& session, std::uint32_t choice);
    void CloseStream(group::StreamKey key);
    const std::shared_ptr<const api::ModelInfo>& ModelOf(const std::shared_ptr<GroupEntry>& entry);
    /// The group for a request by its model name; nullptr with `error` set otherwise.
    std::shared_ptr<GroupEntry> ChooseGroup(const std::optional<std::string>& name, Error& error);
    /// Any group that knows the name, serving or not (tokenizer routes).
    std::shared_ptr<GroupEntry> AnyGroup(const std::optional<std::string>& name, Error& error);
    void EraseReply(std::uint64_t id);

    // Routes
    void Chat(http::Exchange& exchange);
    void Completion(http::Exchange& exchange);
    void Generate(http::Exchange& exchange, Result<api::ParsedRequest> parsed, Arrival arrival);
    void OnPrepared(GenerateJob& job);
    void Models(http::Exchange& exchange);
    void Model(http::Exchange& exchange);
    void Tokenize(http::Exchange& exchange);
    template <class T>
    std::shared_ptr<const api::ModelInfo> ModelFor(http::Exchange& exchange, const Result<T>& parsed);
    void Tokenized(http::Exchange& exchange, Result<api::TokenizeRequest> parsed, Arrival arrival);
    void Detokenize(http::Exchange& exchange);
    void Detokenized(http::Exchange& exchange, Result<api::DetokenizeRequest> parsed, Arrival arrival);
    /// Runs `work` on the pool (a job of that many bytes of text), then `then` on this shard if the parked
    /// client is still there.
    template <class T>
    void RunAside(PendingReply& reply, std::size_t bytes, std::function<T()> work,
                  std::function<void(PendingReply&, T)> then);
    /// Parses the body here or, when it is large, on the pool, and goes on with `then` on this shard.
    template <class T>
    void Parse(http::Exchange& exchange, Result<T> (api::Parser::*parse)(const std::string&) noexcept,
               void (ShardHandler::*then)(http::Exchange&, Result<T>, Arrival));
    void Health(http::Exchange& exchange);
    void Liveness(http::Exchange& exchange);
    void Readiness(http::Exchange& exchange);
    void Metrics(http::Exchange& exchange);
    void Version(http::Exchange& exchange);
    void Load(http::Exchange& exchange);
    void WorkersList(http::Exchange& exchange);
    void WorkersAdd(http::Exchange& exchange);
    void WorkersRemove(http::Exchange& exchange);
    void Sleep(http::Exchange& exchange);
    void WakeUp(http::Exchange& exchange);
    void IsSleeping(http::Exchange& exchange);
    void Pause(http::Exchange& exchange);
    void Resume(http::Exchange& exchange);
    void IsPaused(http::Exchange& exchange);
    void ResetPrefixCache(http::Exchange& exchange);
    void LoadLora(http::Exchange& exchange);
    void UnloadLora(http::Exchange& exchange);
    void StartProfile(http::Exchange& exchange);
    void StopProfile(http::Exchange& exchange);

    using AdminDone = std::function<void(http::Exchange&, const std::vector<AdminAnswer>&)>;
    void Admin(http::Exchange& exchange, const group::AdminCall& call,
               const std::vector<std::shared_ptr<GroupEntry>>& groups, const AdminDone& done);
    void AdminAll(http::Exchange& exchange, const group::AdminCall& call, const AdminDone& done);
    void AdminSimple(http::Exchange& exchange, const group::AdminCall& call);
    /// Asks every rank a yes-or-no question; {key: true} if any says yes. `key` is a literal.
    void AdminAny(http::Exchange& exchange, group::AdminMethod method, std::string_view key);
    bool AdminFailed(http::Exchange& exchange, const std::vector<AdminAnswer>& answers);
    PendingReply& Park(http::Exchange& exchange);
    PendingReply* FindReply(std::uint64_t id);
    static Error QueueFull();
    std::string HealthBody(bool& healthy);

    http::Shard& shard_;
    State& state_;
    ShardMetrics& metrics_;
    group::OutputMailbox mailbox_;
    api::Parser parser_;
    api::IdSource ids_;
    std::shared_ptr<const GroupTable> table_;
    std::vector<std::shared_ptr<GroupEntry>> tenants_;
    std::unordered_map<std::int32_t, ModelCache> models_;
    std::vector<Stream> streams_;
    std::vector<std::uint32_t> free_streams_;
    Session* sessions_{nullptr};
    std::unordered_map<std::uint64_t, Session*> preparing_;
    std::unordered_map<std::uint64_t, std::unique_ptr<PendingReply>> replies_;
    std::uint64_t next_id_{1};
    std::uint32_t rotate_{0};
    std::string scratch_;
};

}  // namespace rankgate::gateway
