// SPDX-License-Identifier: Apache-2.0
// The routes beside generation: models, tokenizer, probes, metrics, workers, administration.
#include <algorithm>
#include <atomic>
#include <boost/json.hpp>
#include <cstdlib>
#include <mutex>
#include <utility>

#include "base/log.h"
#include "base/utf8.h"
#include "gateway/session.h"
#include "gateway/shard_handler.h"

namespace rankgate::gateway {
namespace {

namespace json = boost::json;

constexpr std::size_t kMaxAdminBody = 64 * 1024;

/// First value of a key in a query string, percent-decoded.
std::optional<std::string> QueryValue(std::string_view query, std::string_view key) {
    while (!query.empty()) {
        const std::size_t end = std::min(query.find('&'), query.size());
        const std::string_view pair = query.substr(0, end);
        query.remove_prefix(std::min(query.size(), end + 1));
        const std::size_t equals = std::min(pair.find('='), pair.size());
        if (pair.substr(0, equals) == key) {
            auto decoded =
                api::PercentDecode(equals < pair.size() ? pair.substr(equals + 1) : std::string_view{});
            return decoded ? std::optional{std::move(*decoded)} : std::nullopt;
        }
    }
    return std::nullopt;
}

std::vector<std::string> QueryValues(std::string_view query, std::string_view key) {
    std::vector<std::string> values;
    while (!query.empty()) {
        const std::size_t end = std::min(query.find('&'), query.size());
        const std::string_view pair = query.substr(0, end);
        query.remove_prefix(std::min(query.size(), end + 1));
        if (auto value = QueryValue(pair, key)) {
            values.push_back(std::move(*value));
        }
    }
    return values;
}

Result<bool> QueryBool(std::string_view query, std::string_view key, bool fallback) {
    const auto value = QueryValue(query, key);
    if (!value) {
        return fallback;
    }
    if (*value == "true" || *value == "1" || *value == "True") {
        return true;
    }
    if (*value == "false" || *value == "0" || *value == "False") {
        return false;
    }
    return Error::Invalid(std::string{key}, std::string{key} + " must be true or false.");
}

Result<json::object> ParseObject(const std::string& body) {
    if (body.size() > kMaxAdminBody) {
        return Error{ErrorCode::kTooLarge,
                     "The body is larger than " + std::to_string(kMaxAdminBody) + " bytes.", "", false};
    }
    json::error_code ec;
    json::parse_options options;
    options.max_depth = 16;
    json::value value = json::parse(body, ec, {}, options);
    if (ec || !value.is_object()) {
        return Error::Invalid("", "The body is not a JSON object.");
    }
    return std::move(value.as_object());
}

Result<std::string> StringField(const json::object& object, const char* key, bool required) {
    const json::value* value = object.if_contains(key);
    if (value == nullptr || value->is_null()) {
        if (required) {
            return Error::Invalid(key, std::string{key} + " is missing.");
        }
        return std::string{};
    }
    if (!value->is_string() || value->as_string().empty()) {
        return Error::Invalid(key, std::string{key} + " must be a non-empty string.");
    }
    return std::string{value->as_string()};
}

/// Work away from the shard; its result goes back there.
template <class T>
class AsideJob final : public PrepareJob {
  public:
    AsideJob(std::function<T()> work, std::function<void(std::shared_ptr<T>)> done)
        : work_{std::move(work)}, done_{std::move(done)} {}

    void Run() noexcept override {
        auto result = std::make_shared<T>(work_());
        work_ = nullptr;  // what it holds may be large: freed here
        done_(std::move(result));
    }

  private:
    std::function<T()> work_;
    std::function<void(std::shared_ptr<T>)> done_;
};

Result<std::string> TokenizeAnswer(const api::TokenizeRequest& request, const api::ModelInfo& model) {
    auto tokens = api::PrepareTokenize(request, model);
    if (!tokens) {
        return tokens.error();
    }
    return api::TokenizeJson(request, model, *tokens);
}

void AppendGroup(std::string& out, const GroupEntry& entry, const group::GroupSnapshot& snapshot) {
    out += "{\"name\":";
    AppendJsonString(out, entry.spec.name);
    out += ",\"model\":";
    AppendJsonString(out, entry.served_names.front());
    out += ",\"runtime\":";
    AppendJsonString(out, snapshot.runtime);
    out += ",\"serving\":";
    out += snapshot.serving ? "true" : "false";
    out += ",\"lockstep\":";
    out += snapshot.lockstep ? "true" : "false";
    out += ",\"dp_size\":" + std::to_string(snapshot.size) + ",\"live\":" + std::to_string(snapshot.live);
    out += ",\"max_model_len\":" + std::to_string(snapshot.max_model_len);
    out += ",\"address\":";
    AppendJsonString(out, entry.handle.handshake_address);
    out += ",\"ranks\":[";
    bool first = true;
    for (const group::RankInfo& rank : snapshot.ranks) {
        out += first ? "{" : ",{";
        first = false;
        out += "\"rank\":" + std::to_string(rank.rank) + ",\"state\":";
        AppendJsonString(out, group::RankStateName(rank.state));
        if (!rank.reason.empty()) {
            out += ",\"reason\":";
            AppendJsonString(out, rank.reason);
        }
        out += ",\"in_flight\":" + std::to_string(rank.in_flight);
        if (!rank.load_source.empty()) {
            out += ",\"load_source\":";
            AppendJsonString(out, rank.load_source);
        }
        if (!rank.engine_version.empty()) {
            out += ",\"engine\":";
            AppendJsonString(out, rank.engine_version);
        }
        out += '}';
    }
    out += "]}";
}

std::size_t ChatBytes(const api::TokenizeRequest& request) {
    return request.prompt.size() + request.chat.messages_json.size() + request.chat.tools_json.size();
}

}  // namespace

// --------------------------------------------------------------------------------------------------------
// models and tokenizer

void ShardHandler::Models(http::Exchange& exchange) {
    std::vector<std::shared_ptr<const api::ModelInfo>> models;
    for (const auto& entry : table_->entries) {
        // Groups of one model are one model to clients.
        if (entry->managed() && std::none_of(models.begin(), models.end(), [&](const auto& model) {
                return model->served_names.front() == entry->served_names.front();
            })) {
            models.push_back(ModelOf(entry));
        }
    }
    ReplyJson(exchange, api::ModelsJson(models));
}

void ShardHandler::Model(http::Exchange& exchange) {
    auto id = api::PercentDecode(exchange.request().path().substr(std::string_view{"/v1/models/"}.size()));
    if (!id) {
        ReplyError(exchange, id.error());
        return;
    }
    std::vector<std::shared_ptr<const api::ModelInfo>> models;
    for (const auto& entry : table_->entries) {
        if (entry->managed()) {
            models.push_back(ModelOf(entry));
        }
    }
    auto body = api::ModelJson(models, *id);
    if (!body) {
        ReplyError(exchange, body.error());
        return;
    }
    ReplyJson(exchange, *body);
}

template <class T>
void ShardHandler::RunAside(PendingReply& reply, std::size_t bytes, std::function<T()> work,
                            std::function<void(PendingReply&, T)> then) {
    auto job = std::make_shared<AsideJob<T>>(
        std::move(work), [this, id = reply.id(), then = std::move(then)](std::shared_ptr<T> result) {
            shard_.Post([this, id, then, result = std::move(result)] {
                if (PendingReply* waiting = FindReply(id)) {
                    then(*waiting, std::move(*result));
                }
            });
        });
    reply.job = job;
    if (!state_.pool->Submit(std::move(job), bytes)) {
        ReplyError(reply.Take(), QueueFull());
    }
}

template <class T>
void ShardHandler::Parse(http::Exchange& exchange,
                         Result<T> (api::Parser::*parse)(const std::string&) noexcept,
                         void (ShardHandler::*then)(http::Exchange&, Result<T>, Arrival)) {
    const Arrival arrival{
        shard_.Now(),
        std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count()};
    std::string body = std::move(exchange.request().body);
    const std::size_t bytes = body.size();
    if (bytes < kPooledBody) {
        (this->*then)(exchange, (parser_.*parse)(body), arrival);
        return;
    }
    metrics_.prepare_pooled.Add(1);
    auto held = std::make_shared<const std::string>(std::move(body));
    PendingReply& reply = Park(exchange);
    state_.requests_open.fetch_add(1, std::memory_order_relaxed);  // a drain waits for it
    reply.counted = true;
    RunAside<Result<T>>(
        reply, bytes,
        [held = std::move(held), parse] {
            api::Parser parser;  // its tables are as large as the body: not kept
            return (parser.*parse)(*held);
        },
        [this, then, arrival](PendingReply& waiting, Result<T> parsed) {
            // Open throughout: what comes next counts itself.
            state_.requests_open.fetch_add(1, std::memory_order_relaxed);
            (this->*then)(waiting.Take(), std::move(parsed), arrival);
            state_.requests_open.fetch_sub(1, std::memory_order_relaxed);
        });
}

void ShardHandler::Chat(http::Exchange& exchange) {
    Parse(exchange, &api::Parser::ParseChat, &ShardHandler::Generate);
}

void ShardHandler::Completion(http::Exchange& exchange) {
    Parse(exchange, &api::Parser::ParseCompletion, &ShardHandler::Generate);
}

/// The model that a tokenizer request is about; null if the exchange has got its error instead.
template <class T>
std::shared_ptr<const api::ModelInfo> ShardHandler::ModelFor(http::Exchange& exchange,
                                                             const Result<T>& parsed) {
    if (!parsed) {
        ReplyError(exchange, parsed.error());
        return nullptr;
    }
    Error error;
    const auto entry = AnyGroup(parsed->model, error);
    if (entry == nullptr) {
        ReplyError(exchange, error);
        return nullptr;
    }
    return ModelOf(entry);
}

void ShardHandler::Tokenize(http::Exchange& exchange) {
    Parse(exchange, &api::Parser::ParseTokenize, &ShardHandler::Tokenized);
}

void ShardHandler::Tokenized(http::Exchange& exchange, Result<api::TokenizeRequest> parsed,
                             Arrival /*arrival*/) {
    const auto model = ModelFor(exchange, parsed);
    if (model == nullptr) {
        return;
    }
    const auto answer = [this](http::Exchange& to, const Result<std::string>& body) {
        if (body) {
            ReplyJson(to, *body);
        } else {
            ReplyError(to, body.error());
        }
    };
    const std::size_t bytes = ChatBytes(*parsed);
    if (bytes <= kInlineBytes) {
        answer(exchange, TokenizeAnswer(*parsed, *model));
        return;
    }
    auto request = std::make_shared<const api::TokenizeRequest>(std::move(*parsed));
    RunAside<Result<std::string>>(
        Park(exchange), bytes,
        [request = std::move(request), model] { return TokenizeAnswer(*request, *model); },
        [answer](PendingReply& waiting, const Result<std::string>& body) { answer(waiting.Take(), body); });
}

void ShardHandler::Detokenize(http::Exchange& exchange) {
    Parse(exchange, &api::Parser::ParseDetokenize, &ShardHandler::Detokenized);
}

void ShardHandler::Detokenized(http::Exchange& exchange, Result<api::DetokenizeRequest> parsed,
                               Arrival /*arrival*/) {
    const auto model = ModelFor(exchange, parsed);
    if (model == nullptr) {
        return;
    }
    const auto body = api::DetokenizeJson(*parsed, *model);
    if (!body) {
        ReplyError(exchange, body.error());
        return;
    }
    ReplyJson(exchange, *body);
}

// --------------------------------------------------------------------------------------------------------------------
// probes

std::string ShardHandler::HealthBody(bool& healthy) {
    healthy = false;
    bool all = true;
    std::string groups;
    for (const auto& entry : table_->entries) {
        if (!entry->managed()) {
            continue;
        }
        const auto snapshot = entry->handle.group->Snapshot();
        healthy = true;
        all = all && snapshot->live > 0 && snapshot->serving;
        groups += groups.empty() ? "" : ",";
        AppendGroup(groups, *entry, *snapshot);
    }
    healthy = healthy && all;
    std::string body = "{\"status\":\"";
    body += healthy ? "ok" : "unavailable";
    body += "\",\"draining\":";
    body += state_.draining.load(std::memory_order_relaxed) ? "true" : "false";
    body += ",\"groups\":[" + groups + "]}";
    return body;
}

void ShardHandler::Health(http::Exchange& exchange) {
    bool healthy = false;
    const std::string body = HealthBody(healthy);
    Reply(exchange, healthy ? 200 : 503, "application/json", body);
}

void ShardHandler::Liveness(http::Exchange& exchange) {
    ReplyJson(exchange, R"({"status":"ok"})");
}

void ShardHandler::Readiness(http::Exchange& exchange) {
    bool healthy = false;
    const std::string body = HealthBody(healthy);
    Reply(exchange, state_.Ready() ? 200 : 503, "application/json", body);
}

void ShardHandler::Metrics(http::Exchange& exchange) {
    Reply(exchange, 200, "text/plain; version=0.0.4; charset=utf-8", RenderMetrics(state_.View()));
}

void ShardHandler::Version(http::Exchange& exchange) {
    ReplyJson(exchange, api::VersionJson(RANKGATE_VERSION));
}

void ShardHandler::Load(http::Exchange& exchange) {
    std::string body =
        "{\"server_load\":" + std::to_string(state_.choices_open.load(std::memory_order_relaxed)) +
        ",\"groups\":[";
    bool first = true;
    for (const auto& entry : table_->entries) {
        if (!entry->managed()) {
            continue;
        }
        body += first ? "{\"name\":" : ",{\"name\":";
        first = false;
        AppendJsonString(body, entry->spec.name);
        body += ",\"in_flight\":" + std::to_string(entry->in_flight.load(std::memory_order_relaxed)) +
                ",\"ranks\":[";
        bool first_rank = true;
        // Held: the group replaces its snapshot ten times a second.
        const std::shared_ptr<const group::GroupSnapshot> snapshot = entry->handle.group->Snapshot();
        for (const group::RankInfo& rank : snapshot->ranks) {
            body += first_rank ? "{" : ",{";
            first_rank = false;
            body += "\"rank\":" + std::to_string(rank.rank) +
                    ",\"in_flight\":" + std::to_string(rank.in_flight) +
                    ",\"running\":" + std::to_string(rank.load.num_running) +
                    ",\"waiting\":" + std::to_string(rank.load.num_waiting) + "}";
        }
        body += "]}";
    }
    body += "]}";
    ReplyJson(exchange, body);
}

// -------------------------------------------------------------------------------------------------------------------
// workers

void ShardHandler::WorkersList(http::Exchange& exchange) {
    std::string body = "{\"workers\":[";
    bool first = true;
    for (const auto& entry : table_->entries) {
        body += first ? "" : ",";
        first = false;
        if (entry->managed()) {
            AppendGroup(body, *entry, *entry->handle.group->Snapshot());
        } else {
            body += "{\"name\":";
            AppendJsonString(body, entry->spec.name);
            body += ",\"runtime\":\"http\",\"url\":";
            AppendJsonString(body, entry->spec.url);
            body += ",\"state\":\"left alone\"}";
        }
    }
    body += "]}";
    ReplyJson(exchange, body);
}

void ShardHandler::WorkersAdd(http::Exchange& exchange) {
    auto object = ParseObject(exchange.request().body);
    if (!object) {
        ReplyError(exchange, object.error());
        return;
    }
    WorkerSpec spec;
    spec.rpc_port = 0;
    for (const auto& [key, value] : *object) {
        std::string text;
        if (value.is_string()) {
            text = std::string{value.as_string()};
        } else if (value.is_int64()) {
            text = std::to_string(value.as_int64());
        } else if (!value.is_null()) {
            ReplyError(exchange, Error::Invalid(std::string{key},
                                                std::string{key} + " must be a string or an integer."));
            return;
        }
        if (value.is_null()) {
            continue;
        }
        if (const Status set = SetWorkerField(spec, std::string{key}, text); !set) {
            ReplyError(exchange, set.error());
            return;
        }
    }
    if (const Status valid = ValidateWorker(spec, state_.options.allow_remote_engines); !valid) {
        ReplyError(exchange, valid.error());
        return;
    }
    const std::uint64_t id = Park(exchange).id();
    state_.AddWorker(std::move(spec), [this, id](Result<std::string> added) {
        shard_.Post([this, id, added = std::move(added)] {
            if (PendingReply* reply = FindReply(id)) {
                http::Exchange& to = reply->Take();
                if (added) {
                    Reply(to, 201, "application/json", *added);
                } else {
                    ReplyError(to, added.error());
                }
            }
        });
    });
}

void ShardHandler::WorkersRemove(http::Exchange& exchange) {
    auto name = api::PercentDecode(exchange.request().path().substr(std::string_view{"/workers/"}.size()));
    if (!name) {
        ReplyError(exchange, name.error());
        return;
    }
    const std::uint64_t id = Park(exchange).id();
    state_.RemoveWorker(std::move(*name), [this, id](Status removed) {
        shard_.Post([this, id, removed = std::move(removed)] {
            if (PendingReply* reply = FindReply(id)) {
                http::Exchange& to = reply->Take();
                if (removed) {
                    ReplyJson(to, R"({"status":"removed"})");
                } else {
                    ReplyError(to, removed.error());
                }
            }
        });
    });
}

// ------------------------------------------------------------------------------------------------------------
// administration

void ShardHandler::Admin(http::Exchange& exchange, const group::AdminCall& call,
                         const std::vector<std::shared_ptr<GroupEntry>>& groups, const AdminDone& done) {
    if (groups.empty()) {
        ReplyError(exchange, Error{ErrorCode::kUnavailable, "No engine group is configured.", "", true});
        return;
    }
    struct Gather {
        std::mutex mutex;
        std::vector<AdminAnswer> answers;
        std::size_t missing{0};
    };
    auto gather = std::make_shared<Gather>();
    gather->missing = groups.size();
    PendingReply& parked = Park(exchange);
    const std::uint64_t id = parked.id();
    parked.timeout = shard_.SetTimer(kAdminTimeout, [this, id] {
        if (PendingReply* reply = FindReply(id)) {
            reply->timeout = 0;
            ReplyError(reply->Take(),
                       Error{ErrorCode::kTimeout, "The engines did not answer in time.", "", false});
        }
    });
    for (const auto& entry : groups) {
        entry->handle.group->Admin(call, [this, id, gather, done, index = entry->index,
                                          name = entry->spec.name](std::vector<group::AdminReply> replies) {
            {
                const std::lock_guard lock{gather->mutex};
                gather->answers.push_back(AdminAnswer{index, name, std::move(replies)});
                if (--gather->missing != 0) {
                    return;
                }
            }
            shard_.Post([this, id, gather, done] {
                if (PendingReply* reply = FindReply(id)) {
                    done(reply->Take(), gather->answers);
                }
            });
        });
    }
}

void ShardHandler::AdminAll(http::Exchange& exchange, const group::AdminCall& call, const AdminDone& done) {
    std::vector<std::shared_ptr<GroupEntry>> groups;
    for (const auto& entry : table_->entries) {
        if (entry->managed()) {
            groups.push_back(entry);
        }
    }
    Admin(exchange, call, groups, done);
}

/// Answers with the failures, if there are any: a call that only some ranks obeyed has failed.
bool ShardHandler::AdminFailed(http::Exchange& exchange, const std::vector<AdminAnswer>& answers) {
    std::string failures;
    std::size_t ranks = 0;
    ErrorCode code = ErrorCode::kEngineError;
    for (const AdminAnswer& answer : answers) {
        for (const group::AdminReply& reply : answer.replies) {
            ++ranks;
            if (!reply.status) {
                failures += (failures.empty() ? "" : "; ") + answer.group_name + "/" +
                            std::to_string(reply.rank) + ": " + reply.status.error().message;
                code = reply.status.error().code;
            }
        }
    }
    if (failures.empty() && ranks != 0) {
        return false;
    }
    if (ranks == 0) {
        ReplyError(exchange, Error{ErrorCode::kUnavailable, "No engine rank is live.", "", true});
    } else {
        ReplyError(exchange, Error{code, "Not every rank did it: " + failures, "", false});
    }
    return true;
}

void ShardHandler::AdminSimple(http::Exchange& exchange, const group::AdminCall& call) {
    AdminAll(exchange, call, [this](http::Exchange& to, const std::vector<AdminAnswer>& answers) {
        if (!AdminFailed(to, answers)) {
            ReplyJson(to, R"({"status":"ok"})");
        }
    });
}

void ShardHandler::Sleep(http::Exchange& exchange) {
    group::AdminCall call;
    call.method = group::AdminMethod::kSleep;
    const std::string_view query = exchange.request().query();
    if (const auto level = QueryValue(query, "level")) {
        if (*level != "0" && *level != "1" && *level != "2") {
            ReplyError(exchange, Error::Invalid("level", "level must be 0, 1 or 2."));
            return;
        }
        call.level = level->front() - '0';
    }
    if (const auto mode = QueryValue(query, "mode")) {
        if (*mode != "abort" && *mode != "wait" && *mode != "keep") {
            ReplyError(exchange, Error::Invalid("mode", "mode must be abort, wait or keep."));
            return;
        }
        call.mode = *mode;
    }
    AdminSimple(exchange, call);
}

void ShardHandler::WakeUp(http::Exchange& exchange) {
    group::AdminCall call;
    call.method = group::AdminMethod::kWakeUp;
    call.tags = QueryValues(exchange.request().query(), "tags");
    AdminSimple(exchange, call);
}

void ShardHandler::AdminAny(http::Exchange& exchange, group::AdminMethod method, std::string_view key) {
    group::AdminCall call;
    call.method = method;
    AdminAll(exchange, call, [this, key](http::Exchange& to, const std::vector<AdminAnswer>& answers) {
        if (AdminFailed(to, answers)) {
            return;
        }
        bool any = false;
        for (const AdminAnswer& answer : answers) {
            for (const group::AdminReply& reply : answer.replies) {
                any = any || reply.value == "true";
            }
        }
        ReplyJson(to, "{\"" + std::string(key) + (any ? "\":true}" : "\":false}"));
    });
}

void ShardHandler::IsSleeping(http::Exchange& exchange) {
    AdminAny(exchange, group::AdminMethod::kIsSleeping, "is_sleeping");
}

void ShardHandler::Pause(http::Exchange& exchange) {
    group::AdminCall call;
    call.method = group::AdminMethod::kPause;
    const std::string_view query = exchange.request().query();
    if (const auto mode = QueryValue(query, "mode")) {
        if (*mode != "abort" && *mode != "wait" && *mode != "keep") {
            ReplyError(exchange, Error::Invalid("mode", "mode must be abort, wait or keep."));
            return;
        }
        call.mode = *mode;
    }
    const auto clear = QueryBool(query, "clear_cache", true);
    if (!clear) {
        ReplyError(exchange, clear.error());
        return;
    }
    call.clear_cache = *clear;
    AdminSimple(exchange, call);
}

void ShardHandler::Resume(http::Exchange& exchange) {
    group::AdminCall call;
    call.method = group::AdminMethod::kResume;
    AdminSimple(exchange, call);
}

void ShardHandler::IsPaused(http::Exchange& exchange) {
    AdminAny(exchange, group::AdminMethod::kIsPaused, "is_paused");
}

void ShardHandler::ResetPrefixCache(http::Exchange& exchange) {
    group::AdminCall call;
    call.method = group::AdminMethod::kResetPrefixCache;
    const std::string_view query = exchange.request().query();
    const auto running = QueryBool(query, "reset_running_requests", false);
    const auto connector = QueryBool(query, "reset_external", false);
    if (!running || !connector) {
        ReplyError(exchange, running ? connector.error() : running.error());
        return;
    }
    call.reset_running_requests = *running;
    call.reset_connector = *connector;
    AdminSimple(exchange, call);
}

void ShardHandler::StartProfile(http::Exchange& exchange) {
    group::AdminCall call;
    call.method = group::AdminMethod::kStartProfile;
    AdminSimple(exchange, call);
}

void ShardHandler::StopProfile(http::Exchange& exchange) {
    group::AdminCall call;
    call.method = group::AdminMethod::kStopProfile;
    AdminSimple(exchange, call);
}

void ShardHandler::LoadLora(http::Exchange& exchange) {
    auto object = ParseObject(exchange.request().body);
    if (!object) {
        ReplyError(exchange, object.error());
        return;
    }
    auto name = StringField(*object, "lora_name", true);
    auto path = StringField(*object, "lora_path", true);
    auto base = StringField(*object, "base_model_name", false);
    if (!name || !path || !base) {
        ReplyError(exchange, !name ? name.error() : !path ? path.error() : base.error());
        return;
    }
    group::AdminCall call;
    call.method = group::AdminMethod::kAddLora;
    call.lora.name = *name;
    call.lora.path = *path;
    if (!base->empty()) {
        call.lora.base_model_name = *base;
    }
    std::vector<std::shared_ptr<GroupEntry>> groups;
    for (const auto& entry : table_->entries) {
        if (!entry->managed()) {
            continue;
        }
        const auto& model = ModelOf(entry);
        if (model->Serves(*name) || model->FindAdapter(*name) != nullptr) {
            ReplyError(exchange, Error::Invalid("lora_name", "The name '" + *name + "' is taken."));
            return;
        }
        if (!model->features.lora) {
            ReplyError(exchange, Error::Invalid("lora_name", "The engines of group " + entry->spec.name +
                                                                 " do not support LoRA adapters."));
            return;
        }
        groups.push_back(entry);
    }
    call.lora.id = state_.next_lora_id.fetch_add(1, std::memory_order_relaxed);
    const wire::LoraRequest lora = call.lora;
    Admin(exchange, call, groups,
          [this, groups, lora](http::Exchange& to, const std::vector<AdminAnswer>& answers) {
              if (AdminFailed(to, answers)) {
                  return;
              }
              for (const auto& entry : groups) {
                  const std::lock_guard lock{entry->adapters_mutex};
                  entry->adapters.push_back(lora);
                  entry->adapters_version.fetch_add(1, std::memory_order_release);
              }
              Reply(to, 200, "text/plain; charset=utf-8",
                    "Success: LoRA adapter '" + lora.name + "' added successfully.");
          });
}

void ShardHandler::UnloadLora(http::Exchange& exchange) {
    auto object = ParseObject(exchange.request().body);
    if (!object) {
        ReplyError(exchange, object.error());
        return;
    }
    auto name = StringField(*object, "lora_name", true);
    if (!name) {
        ReplyError(exchange, name.error());
        return;
    }
    std::vector<std::shared_ptr<GroupEntry>> groups;
    group::AdminCall call;
    call.method = group::AdminMethod::kRemoveLora;
    for (const auto& entry : table_->entries) {
        if (!entry->managed()) {
            continue;
        }
        if (const wire::LoraRequest* lora = ModelOf(entry)->FindAdapter(*name)) {
            call.lora = *lora;
            groups.push_back(entry);
        }
    }
    if (groups.empty()) {
        ReplyError(exchange, Error{ErrorCode::kNotFound, "There is no LoRA adapter '" + *name + "'.",
                                   "lora_name", false});
        return;
    }
    Admin(exchange, call, groups,
          [this, groups, name = *name](http::Exchange& to, const std::vector<AdminAnswer>& answers) {
              if (AdminFailed(to, answers)) {
                  return;
              }
              for (const auto& entry : groups) {
                  const std::lock_guard lock{entry->adapters_mutex};
                  std::erase_if(entry->adapters,
                                [&](const wire::LoraRequest& lora) { return lora.name == name; });
                  entry->adapters_version.fetch_add(1, std::memory_order_release);
              }
              Reply(to, 200, "text/plain; charset=utf-8",
                    "Success: LoRA adapter '" + name + "' removed successfully.");
          });
}

}  // namespace rankgate::gateway
