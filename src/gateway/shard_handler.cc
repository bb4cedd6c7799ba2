// SPDX-License-Identifier: Apache-2.0
#include "gateway/shard_handler.h"

#include <algorithm>
#include <random>
#include <utility>

#include "base/error_json.h"
#include "base/log.h"
#include "base/utf8.h"
#include "gateway/session.h"

namespace rankgate::gateway {
namespace {

constexpr group::StreamKey kPlaceMask = (group::StreamKey{1} << 24) - 1;

bool IsJsonType(std::string_view type) {
    std::string lower{type.substr(0, type.find(';'))};
    while (!lower.empty() && lower.back() == ' ') {
        lower.pop_back();
    }
    std::transform(lower.begin(), lower.end(), lower.begin(),
                   [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; });
    return lower.empty() || lower == "application/json" || lower == "text/json" ||
           (lower.starts_with("application/") && lower.ends_with("+json"));
}

/// Takes the same time wherever the two differ; only the lengths can be told apart.
bool SameKey(std::string_view given, const std::string& key) {
    unsigned char difference = given.size() == key.size() ? 0 : 1;
    for (std::size_t i = 0; i < given.size(); ++i) {
        difference =
            static_cast<unsigned char>(difference | (static_cast<unsigned char>(given[i]) ^
                                                     static_cast<unsigned char>(key[i % key.size()])));
    }
    return difference == 0;
}

/// The credentials of "Bearer x", the scheme in any case.
std::string_view BearerToken(std::string_view header) {
    constexpr std::string_view kScheme = "bearer ";
    if (header.size() <= kScheme.size()) {
        return {};
    }
    for (std::size_t i = 0; i < kScheme.size(); ++i) {
        const char c = header[i];
        if ((c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c) != kScheme[i]) {
            return {};
        }
    }
    std::string_view token = header.substr(kScheme.size());
    while (!token.empty() && token.front() == ' ') {
        token.remove_prefix(1);
    }
    return token;
}

std::size_t TextBytes(const api::ParsedRequest& request) {
    std::size_t bytes =
        request.messages_json.size() + request.tools_json.size() + request.documents_json.size();
    for (const api::Prompt& prompt : request.prompts) {
        if (const auto* text = std::get_if<std::string>(&prompt)) {
            bytes += text->size();
        }
    }
    return bytes;
}

}  // namespace

ShardHandler::ShardHandler(http::Shard& shard, State& state, ShardMetrics& metrics)
    : shard_{shard},
      state_{state},
      metrics_{metrics},
      ids_{std::random_device{}(), static_cast<std::uint16_t>(shard.index())},
      table_{state.table()} {
    streams_.reserve(1024);
    free_streams_.reserve(1024);
    shard_.Watch(mailbox_.fd(), [this] { OnOutputs(); });
    AdoptTenants();
    TickTenants();
}

ShardHandler::~ShardHandler() = default;

void ShardHandler::OnStop() noexcept {
    shard_.Unwatch(mailbox_.fd());
    for (const auto& entry : tenants_) {
        shard_.Unwatch(entry->handle.tenant->poll_fd);
    }
    tenants_.clear();
}

void ShardHandler::AdoptTenants() {
    std::erase_if(tenants_, [this](const std::shared_ptr<GroupEntry>& entry) {
        const bool gone =
            std::find(table_->entries.begin(), table_->entries.end(), entry) == table_->entries.end();
        if (gone) {
            shard_.Unwatch(entry->handle.tenant->poll_fd);
        }
        return gone;
    });
    for (const auto& entry : table_->entries) {
        if (entry->handle.tenant && std::find(tenants_.begin(), tenants_.end(), entry) == tenants_.end()) {
            tenants_.push_back(entry);
            shard_.Watch(entry->handle.tenant->poll_fd, [this, &one = *entry] { RunTenant(one); });
        }
    }
}

void ShardHandler::RunTenant(GroupEntry& entry) {
    mailbox_.Hold();
    entry.handle.tenant->run_once();
    OnOutputs();  // what the turn has handed over leaves now, not after another wake-up
    if (entry.handle.tenant->next_deadline() == TimePoint{}) {
        shard_.Post([this, index = entry.index] {
            for (const auto& tenant : tenants_) {
                if (tenant->index == index) {
                    RunTenant(*tenant);
                    return;
                }
            }
        });
    }
}

/// The loop's clock is coarse (100 ms), and so are the deadlines of a group.
void ShardHandler::TickTenants() {
    for (const auto& tenant : tenants_) {
        if (tenant->handle.tenant->next_deadline() <= shard_.Now()) {
            RunTenant(*tenant);
        }
    }
    shard_.SetTimer(std::chrono::milliseconds{50}, [this] { TickTenants(); });
}

void ShardHandler::SetTable(std::shared_ptr<const GroupTable> table) {
    table_ = std::move(table);
    std::erase_if(models_, [this](const auto& cached) {
        return std::none_of(table_->entries.begin(), table_->entries.end(),
                            [&](const auto& entry) { return entry->index == cached.first; });
    });
    AdoptTenants();
}

void ShardHandler::FailRequests(std::int32_t group, const Error& error, group::CancelCause cause) {
    for (Session* session = sessions_; session != nullptr;) {
        Session* next = session->next_;
        if (group < 0 || session->entry_->index == group) {
            session->Fail(error, cause);
        }
        session = next;
    }
}

// -------------------------------------------------------------------------------------------------------------------
// outputs

void ShardHandler::OnOutputs() {
    mailbox_.Acknowledge();
    while (std::unique_ptr<group::OutputBatch> batch = mailbox_.Pop()) {
        for (const group::Output& output : batch->outputs) {
            Deliver(*batch, output);
        }
        for (const auto& entry : table_->entries) {
            if (entry->index == batch->group && entry->managed()) {
                metrics_.models[entry->model_slot].generation_tokens.Add(batch->tokens.size());
                entry->handle.group->Recycle(std::move(batch));
                break;
            }
        }
    }
}

void ShardHandler::Deliver(const group::OutputBatch& batch, const group::Output& output) {
    const auto place = static_cast<std::size_t>(output.stream & kPlaceMask);
    if (place >= streams_.size() || streams_[place].session == nullptr ||
        streams_[place].generation != output.stream >> kSlotBits) {
        metrics_.late_outputs.Add(1);  // it was cancelled while this was on its way
        return;
    }
    const Stream stream = streams_[place];
    const auto pick = [](const auto& table, std::int32_t index) {
        return index >= 0 && static_cast<std::size_t>(index) < table.size()
                   ? &table[static_cast<std::size_t>(index)]
                   : nullptr;
    };
    const Error* error = pick(batch.errors, output.error);
    stream.session->OnOutput(
        api::ChoiceOutput{.choice = stream.choice,
                          .tokens = batch.TokensOf(output),
                          .finish_reason = output.finish_reason,
                          .logprobs = pick(batch.logprobs, output.logprobs),
                          .prompt_logprobs = pick(batch.logprobs, output.prompt_logprobs),
                          .stop_reason = pick(batch.stop_reasons, output.stop_reason),
                          .num_cached_tokens = output.num_cached_tokens},
        error, output.rank, error != nullptr || output.finish_reason != wire::FinishReason::kNone);
}

group::StreamKey ShardHandler::OpenStream(Session& session, std::uint32_t choice) {
    if (free_streams_.empty()) {
        free_streams_.push_back(static_cast<std::uint32_t>(streams_.size()));
        streams_.emplace_back();
    }
    const std::uint32_t place = free_streams_.back();
    free_streams_.pop_back();
    Stream& stream = streams_[place];
    stream.session = &session;
    stream.choice = choice;
    return stream.generation << kSlotBits | place;
}

void ShardHandler::CloseStream(group::StreamKey key) {
    const auto place = static_cast<std::uint32_t>(key & kPlaceMask);
    streams_[place].session = nullptr;
    ++streams_[place].generation;
    free_streams_.push_back(place);
}

// --------------------------------------------------------------------------------------------------------------------
// models

const std::shared_ptr<const api::ModelInfo>& ShardHandler::ModelOf(const std::shared_ptr<GroupEntry>& entry) {
    ModelCache& cached = models_[entry->index];
    std::shared_ptr<const group::GroupSnapshot> snapshot = entry->handle.group->Snapshot();
    const std::uint64_t version = entry->adapters_version.load(std::memory_order_acquire);
    if (cached.model == nullptr || cached.adapters_version != version || cached.snapshot != snapshot) {
        const auto facts = [](const group::GroupSnapshot& s) {
            bool lora = false;
            for (const group::RankInfo& rank : s.ranks) {
                lora = lora || rank.supports_lora;
            }
            return std::make_tuple(s.max_model_len, s.size, lora);
        };
        if (cached.model == nullptr || cached.adapters_version != version ||
            facts(*cached.snapshot) != facts(*snapshot) || cached.snapshot->runtime != snapshot->runtime) {
            cached.model = MakeModelInfo(*entry, *snapshot, state_.options);
        }
        cached.adapters_version = version;
        cached.snapshot = std::move(snapshot);
    }
    return cached.model;
}

std::shared_ptr<GroupEntry> ShardHandler::AnyGroup(const std::optional<std::string>& name, Error& error) {
    error = Error{ErrorCode::kUnavailable, "No engine group is configured.", "", true};
    for (const auto& entry : table_->entries) {
        if (entry->managed()) {
            if (const Status known = api::CheckModelName(name, *ModelOf(entry)); known.ok()) {
                return entry;
            } else {
                error = known.error();
            }
        }
    }
    return nullptr;
}

std::shared_ptr<GroupEntry> ShardHandler::ChooseGroup(const std::optional<std::string>& name, Error& error) {
    // Least own work per live rank among the groups that serve the model; the scan starts one further each
    // time, so that equals share.
    const auto& entries = table_->entries;
    const std::size_t count = entries.size();
    std::shared_ptr<GroupEntry> best;
    double best_load = 0;
    bool known = false;
    std::string first_model;
    ++rotate_;
    for (std::size_t i = 0; i < count; ++i) {
        if (entries[i]->managed()) {
            first_model = entries[i]->served_names.front();  // a request without a model means the first one
            break;
        }
    }
    for (std::size_t i = 0; i < count; ++i) {
        const auto& entry = entries[(i + rotate_) % count];
        if (!entry->managed()) {
            continue;
        }
        const auto& model = ModelOf(entry);
        if (!name) {
            if (entry->served_names.front() != first_model) {
                continue;
            }
        } else if (!model->Serves(*name) && model->FindAdapter(*name) == nullptr) {
            continue;
        }
        known = true;
        const group::GroupSnapshot& snapshot = *models_[entry->index].snapshot;
        if (!snapshot.serving || model->max_model_len <= 0) {
            continue;
        }
        const double load = static_cast<double>(entry->in_flight.load(std::memory_order_relaxed)) /
                            std::max(1, snapshot.live);
        if (best == nullptr || load < best_load) {
            best = entry;
            best_load = load;
        }
    }
    if (best == nullptr) {
        error = known || !name ? Error{ErrorCode::kUnavailable, "No engine of this model is ready.", "", true}
                               : api::ModelNotFound(*name);
    }
    return best;
}

// ----------------------------------------------------------------------------------------------------------------
// generation

void ShardHandler::Generate(http::Exchange& exchange, Result<api::ParsedRequest> parsed, Arrival arrival) {
    if (!parsed) {
        ReplyError(exchange, parsed.error());
        return;
    }
    Error error;
    std::shared_ptr<GroupEntry> entry = ChooseGroup(parsed->model, error);
    if (entry == nullptr) {
        ReplyError(exchange, error);
        return;
    }
    const std::shared_ptr<const api::ModelInfo> model = ModelOf(entry);
    if (const Status fits = api::CheckAgainstModel(*parsed, *model); !fits) {
        ReplyError(exchange, fits.error());
        return;
    }
    // Admission before anything is copied or computed for the request.
    const auto choices = static_cast<std::int64_t>(parsed->num_choices());
    if (choices > state_.options.max_in_flight) {
        ReplyError(exchange, Error::Invalid("n", "The request asks for " + std::to_string(choices) +
                                                     " choices; this server handles at most " +
                                                     std::to_string(state_.options.max_in_flight) +
                                                     " at once (--max-in-flight)."));
        return;
    }
    if (state_.choices_open.fetch_add(choices, std::memory_order_relaxed) + choices >
        state_.options.max_in_flight) {
        state_.choices_open.fetch_sub(choices, std::memory_order_relaxed);
        ReplyError(exchange,
                   Error{ErrorCode::kOverloaded,
                         "The server handles as many requests as it may (--max-in-flight).", "", true});
        return;
    }
    auto* session = new Session(*this, exchange, std::move(entry), model, choices, arrival);
    const std::size_t bytes = TextBytes(*parsed);
    if (bytes <= kInlineBytes) {
        metrics_.prepare_inline.Add(1);
        Result<std::vector<api::PreparedPrompt>> prompts = api::Prepare(*parsed, *model);
        session->Run(std::move(*parsed), std::move(prompts));
        return;
    }
    metrics_.prepare_pooled.Add(1);
    session->job_ = std::make_shared<GenerateJob>(*this, session->id_, std::move(*parsed), model);
    preparing_.emplace(session->id_, session);
    if (!state_.pool->Submit(session->job_, bytes)) {
        session->Fail(QueueFull(), group::CancelCause::kDrain);
    }
}

void ShardHandler::OnPrepared(GenerateJob& job) {
    const auto found = preparing_.find(job.session_);
    if (found == preparing_.end()) {
        return;  // its client left
    }
    Session* session = found->second;
    preparing_.erase(found);
    session->job_.reset();  // the caller holds another reference
    session->Run(std::move(job.parsed_), std::move(*job.prompts_));
}

// ------------------------------------------------------------------------------------------------------------
// requests, routes

const std::vector<ShardHandler::Route>& ShardHandler::Routes() {
    using http::Method;
    using H = ShardHandler;
    static const std::vector<Route> routes{
        {"/v1/chat/completions", Method::kPost, &H::Chat, false, false, true, true},
        {"/v1/completions", Method::kPost, &H::Completion, false, false, true, true},
        {"/health", Method::kGet, &H::Health, true},
        {"/metrics", Method::kGet, &H::Metrics, true},
        {"/liveness", Method::kGet, &H::Liveness, true},
        {"/readiness", Method::kGet, &H::Readiness, true},
        {"/ping", Method::kGet, &H::Health, true},
        {"/ping", Method::kPost, &H::Health, true},
        {"/v1/models", Method::kGet, &H::Models},
        {"/v1/models/", Method::kGet, &H::Model, false, false, false, false, true},
        {"/version", Method::kGet, &H::Version},
        {"/load", Method::kGet, &H::Load},
        {"/tokenize", Method::kPost, &H::Tokenize, false, false, true},
        {"/detokenize", Method::kPost, &H::Detokenize, false, false, true},
        {"/workers", Method::kGet, &H::WorkersList, false, true},
        {"/workers", Method::kPost, &H::WorkersAdd, false, true, true},
        {"/workers/", Method::kDelete, &H::WorkersRemove, false, true, false, false, true},
        {"/sleep", Method::kPost, &H::Sleep, false, true},
        {"/wake_up", Method::kPost, &H::WakeUp, false, true},
        {"/is_sleeping", Method::kGet, &H::IsSleeping, false, true},
        {"/pause", Method::kPost, &H::Pause, false, true},
        {"/resume", Method::kPost, &H::Resume, false, true},
        {"/is_paused", Method::kGet, &H::IsPaused, false, true},
        {"/reset_prefix_cache", Method::kPost, &H::ResetPrefixCache, false, true},
        {"/v1/load_lora_adapter", Method::kPost, &H::LoadLora, false, true, true},
        {"/v1/unload_lora_adapter", Method::kPost, &H::UnloadLora, false, true, true},
        {"/start_profile", Method::kPost, &H::StartProfile, false, true},
        {"/stop_profile", Method::kPost, &H::StopProfile, false, true},
    };
    return routes;
}

const ShardHandler::Route* ShardHandler::Find(std::string_view path, http::Method method, bool& path_known,
                                              std::string& allow) {
    path_known = false;
    const http::Method wanted = method == http::Method::kHead ? http::Method::kGet : method;
    for (const Route& route : Routes()) {
        const bool match = route.prefix ? path.size() > route.path.size() && path.starts_with(route.path)
                                        : path == route.path;
        if (!match) {
            continue;
        }
        path_known = true;
        if (route.method == wanted) {
            return &route;
        }
        allow += allow.empty() ? "" : ", ";
        allow += route.method == http::Method::kGet    ? "GET, HEAD"
                 : route.method == http::Method::kPost ? "POST"
                                                       : "DELETE";
    }
    return nullptr;
}

Status ShardHandler::Authorize(const http::Request& request, const Route* route) const {
    if (route != nullptr && route->open) {
        return Status::Ok();
    }
    const auto& keys = state_.options.api_keys;
    if (keys.empty()) {
        const std::string& host = state_.options.host;
        const bool local = host.empty() || host == "localhost" || host == "::1" || host == "[::1]" ||
                           host.starts_with("127.");
        if (route != nullptr && route->admin && !local) {
            return Error{ErrorCode::kForbidden,
                         "Administrative routes need --api-key when the server listens on an address that is "
                         "not loopback.",
                         "", false};
        }
        return Status::Ok();
    }
    const std::string_view token = BearerToken(request.Header("authorization"));
    bool known = false;
    for (const std::string& key : keys) {
        known = SameKey(token, key) || known;
    }
    if (!known) {
        return Error{ErrorCode::kUnauthorized,
                     "The API key is missing or wrong: send 'Authorization: Bearer <key>'.", "", false};
    }
    return Status::Ok();
}

bool ShardHandler::OnHeaders(const http::Request& request, http::Response& refusal) noexcept {
    bool path_known = false;
    std::string allow;
    const Route* route = Find(request.path(), request.method, path_known, allow);
    const auto refuse = [&](const Error& error) {
        refusal.status = HttpStatus(error.code);
        refusal.body = ErrorJson(error);
        for (const auto& [name, value] : http::ErrorHeaders(error)) {
            refusal.headers.emplace_back(name, value);
        }
        Count(refusal.status);
        return false;
    };
    if (request.method == http::Method::kOptions && request.path() == "*") {
        path_known = true;  // the server as a whole
        allow = "GET, HEAD, POST, DELETE";
    }
    if (request.method == http::Method::kOptions && path_known) {
        refusal.status = 204;
        refusal.content_type.clear();
        refusal.headers.emplace_back("Allow", allow + ", OPTIONS");
        Count(204);
        return false;
    }
    if (const Status allowed = Authorize(request, route); !allowed) {
        return refuse(allowed.error());
    }
    if (!path_known) {
        return refuse(
            Error{ErrorCode::kNotFound, "There is no route " + ToValidUtf8(request.path()) + ".", "", false});
    }
    if (route == nullptr) {
        refusal.headers.emplace_back("Allow", allow + ", OPTIONS");
        return refuse(Error{ErrorCode::kMethodNotAllowed,
                            "This route does not take " + std::string{request.method_text()} + ".", "",
                            false});
    }
    if (route->json_body && !IsJsonType(request.Header("content-type"))) {
        return refuse(
            Error{ErrorCode::kUnsupportedMediaType, "The body must be application/json.", "", false});
    }
    if (route->generation && state_.draining.load(std::memory_order_relaxed)) {
        refusal.close = true;
        return refuse(Error{ErrorCode::kDraining, "The server is shutting down.", "", true});
    }
    return true;
}

void ShardHandler::OnRequest(http::Exchange& exchange) noexcept {
    bool path_known = false;
    std::string allow;
    const http::Request& request = exchange.request();
    const Route* route = Find(request.path(), request.method, path_known, allow);
    if (route == nullptr) {  // OnHeaders let nothing else through
        ReplyError(exchange, Error{ErrorCode::kNotFound, "There is no such route.", "", false});
        return;
    }
    if (route->generation && state_.draining.load(std::memory_order_relaxed)) {
        ReplyError(exchange, Error{ErrorCode::kDraining, "The server is shutting down.", "", true});
        return;
    }
    (this->*route->run)(exchange);
}

void ShardHandler::Reply(http::Exchange& exchange, int status, std::string_view content_type,
                         std::string_view body) {
    Count(status);
    exchange.Respond(status, content_type, body);
}

void ShardHandler::ReplyError(http::Exchange& exchange, const Error& error) {
    Count(HttpStatus(error.code));
    exchange.RespondError(error);
}

PendingReply& ShardHandler::Park(http::Exchange& exchange) {
    const std::uint64_t id = next_id_++;
    auto& reply = replies_[id];
    reply = std::make_unique<PendingReply>(*this, exchange, id);
    exchange.set_listener(reply.get());
    return *reply;
}

void ShardHandler::EraseReply(std::uint64_t id) {
    replies_.erase(id);
}

Error ShardHandler::QueueFull() {
    return Error{ErrorCode::kOverloaded,
                 "Too many requests wait to be read and tokenized (--max-prepare-queue).", "", true};
}

PendingReply* ShardHandler::FindReply(std::uint64_t id) {
    const auto found = replies_.find(id);
    return found == replies_.end() ? nullptr : found->second.get();
}

}  // namespace rankgate::gateway
