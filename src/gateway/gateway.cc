// SPDX-License-Identifier: Apache-2.0
#include "gateway/gateway.h"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <deque>
#include <filesystem>
#include <iostream>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "base/hangup.h"
#include "base/log.h"
#include "gateway/flags.h"
#include "gateway/groups.h"
#include "gateway/shard_handler.h"
#include "gateway/state.h"
#include "http/socket.h"

namespace rankgate::gateway {
namespace {

constexpr std::chrono::milliseconds kPoll{10};
/// After the cut: for error events to leave and aborts to be sent.
constexpr std::chrono::seconds kCutTime{2};
/// For the shards to let go of a removed group.
constexpr std::chrono::seconds kRemoveTime{5};
constexpr std::size_t kMaxWorkers = 256;

int DefaultThreads() {
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()) - 1);
}

/// One slow thing after the other, away from the shards: workers that come and go.
class ControlThread {
  public:
    ControlThread() : thread_{[this] { Run(); }} {}
    ~ControlThread() { Stop(); }
    ControlThread(const ControlThread&) = delete;
    ControlThread& operator=(const ControlThread&) = delete;

    void Push(std::function<void()> task) {
        {
            const std::lock_guard lock{mutex_};
            tasks_.push_back(std::move(task));
        }
        wake_.notify_one();
    }

    void Stop() {
        {
            const std::lock_guard lock{mutex_};
            stopping_ = true;
        }
        wake_.notify_one();
        if (thread_.joinable()) {
            thread_.join();
        }
    }

  private:
    void Run() {
        std::unique_lock lock{mutex_};
        for (;;) {
            wake_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
            if (stopping_) {
                return;
            }
            const std::function<void()> task = std::move(tasks_.front());
            tasks_.pop_front();
            lock.unlock();
            task();
            lock.lock();
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<std::function<void()>> tasks_;
    bool stopping_{false};
    std::thread thread_;
};

class GatewayImpl final : public Gateway, public State {
  public:
    GatewayImpl(GatewayOptions gateway_options, GroupFactory factory)
        : State{std::move(gateway_options), std::move(factory)} {}
    ~GatewayImpl() override { StopAll(); }

    /// Reads the model files: everything slow or refusable that needs no socket.
    Status Load() {
        for (const WorkerSpec& spec : options.Groups()) {
            if (spec.url.empty()) {
                if (auto assets = AssetsFor(spec); !assets) {
                    return assets.error();
                }
            }
        }
        return Status::Ok();
    }

    Status Start() override {
        const int threads = options.http_threads;
        const int prepare =
            options.prepare_threads > 0 ? options.prepare_threads : std::max(2, DefaultThreads());
        pool = std::make_unique<PreparePool>(prepare, static_cast<std::size_t>(options.max_prepare_queue));
        http::ServerOptions server_options;
        server_options.listen = {options.host, options.port, options.uds, options.ssl_certfile,
                                 options.ssl_keyfile};
        server_options.limits.max_body_bytes = static_cast<std::size_t>(options.max_body_bytes);
        server_options.limits.max_held_bytes = static_cast<std::size_t>(options.max_held_bytes);
        server_options.limits.keep_alive_timeout =
            std::chrono::duration_cast<Duration>(std::chrono::duration<double>(options.keep_alive_seconds));
        // A rank holds a handshake, an input and an output connection and a handle on its process for a time;
        // a shard its epoll and its listeners.
        constexpr std::size_t kBaseFiles = 48;
        constexpr std::size_t kFilesPerRank = 6;
        constexpr std::size_t kFilesPerShard = 8;
        std::size_t ranks = 0;
        for (const WorkerSpec& worker : options.Groups()) {
            ranks += static_cast<std::size_t>(worker.dp_size);
        }
        server_options.limits.reserved_descriptors =
            kBaseFiles + kFilesPerRank * ranks + kFilesPerShard * static_cast<std::size_t>(threads);
        server_options.shards = threads;
        server_options.allowed_origins = options.allowed_origins;
        for (int i = 0; i < threads; ++i) {
            shard_metrics.push_back(std::make_unique<ShardMetrics>());
        }
        handlers_.resize(static_cast<std::size_t>(threads), nullptr);
        server_ = std::make_unique<http::Server>(std::move(server_options), [this](http::Shard& shard) {
            const auto index = static_cast<std::size_t>(shard.index());
            auto handler = std::make_unique<ShardHandler>(shard, *this, *shard_metrics[index]);
            handlers_[index] = handler.get();
            return handler;
        });
        if (const Status listening = server_->Listen(); !listening) {
            return listening;
        }
        for (int i = 0; i < threads; ++i) {
            http_stats.push_back(&server_->stats(i));
        }
        auto first = std::make_shared<GroupTable>();
        for (const WorkerSpec& spec : options.Groups()) {
            auto entry = MakeEntry(spec);
            if (!entry) {
                return entry.error();
            }
            first->entries.push_back(std::move(*entry));
        }
        SetTable(std::move(first));
        control_ = std::make_unique<ControlThread>();
        server_->Start();
        started_ = true;
        return Status::Ok();
    }

    std::uint16_t port() const override { return server_->port(); }
    std::string url() const override { return server_->url(); }

    std::vector<std::string> handshake_addresses() const override {
        std::vector<std::string> addresses;
        const std::shared_ptr<const GroupTable> current = table();  // held: another thread may replace it
        for (const auto& entry : current->entries) {
            addresses.push_back(entry->handle.handshake_address);
        }
        return addresses;
    }

    std::shared_ptr<const group::GroupSnapshot> Snapshot(std::int32_t index) const override {
        const std::shared_ptr<const GroupTable> current = table();
        for (const auto& entry : current->entries) {
            if (entry->index == index && entry->managed()) {
                return entry->handle.group->Snapshot();
            }
        }
        return nullptr;
    }

    bool ready() const override { return Ready(); }

    void BeginShutdown() override {
        if (!draining.exchange(true)) {
            shutdown_at_ = std::chrono::steady_clock::now();
            if (server_ != nullptr) {
                server_->BeginDrain();
            }
            LogInfo("shutdown_begins", {{"requests_open", requests_open.load()},
                                        {"timeout_seconds", options.shutdown_timeout_seconds}});
        }
    }

    void HurryShutdown() override { hurry_.store(true, std::memory_order_relaxed); }

    bool WaitForShutdown() override {
        BeginShutdown();
        const auto deadline =
            shutdown_at_ + std::chrono::duration_cast<std::chrono::nanoseconds>(
                               std::chrono::duration<double>(options.shutdown_timeout_seconds));
        const auto until = [](auto when, auto&& condition) {
            while (!condition() && std::chrono::steady_clock::now() < when) {
                std::this_thread::sleep_for(kPoll);
            }
            return condition();
        };
        const auto idle = [this] { return requests_open.load(std::memory_order_relaxed) == 0; };
        until(deadline, [&] { return idle() || hurry_.load(std::memory_order_relaxed); });
        const std::int64_t cut = requests_open.load(std::memory_order_relaxed);
        if (cut != 0) {
            LogWarning("shutdown_cuts_requests", {{"requests", cut}});
            ForEachShard([](ShardHandler& handler) {
                handler.FailRequests(-1,
                                     Error{ErrorCode::kDraining, "The server is shutting down.", "", true},
                                     group::CancelCause::kDrain);
            });
            until(std::chrono::steady_clock::now() + kCutTime, idle);
        }
        until(std::chrono::steady_clock::now() + kCutTime, [this] {
            return std::all_of(http_stats.begin(), http_stats.end(), [](const http::ShardStats* stats) {
                return stats->bytes_held.load(std::memory_order_relaxed) == 0;
            });
        });
        StopAll();
        LogInfo("shutdown_done", {{"cut", cut}});
        return cut == 0;
    }

    void AddWorker(WorkerSpec spec, std::function<void(Result<std::string>)> done) override {
        control_->Push([this, spec = std::move(spec), done = std::move(done)]() mutable {
            done(DoAdd(std::move(spec)));
        });
    }

    void RemoveWorker(std::string name, std::function<void(Status)> done) override {
        control_->Push([this, name = std::move(name), done = std::move(done)] { done(DoRemove(name)); });
    }

  private:
    template <class F>
    void ForEachShard(F fn) {
        for (int i = 0; i < server_->num_shards(); ++i) {
            server_->Post(i, [handler = handlers_[static_cast<std::size_t>(i)], fn] { fn(*handler); });
        }
    }

    void Publish(const std::shared_ptr<const GroupTable>& next) {
        SetTable(next);
        ForEachShard([next](ShardHandler& handler) { handler.SetTable(next); });
    }

    Result<std::shared_ptr<const text::ModelAssets>> AssetsFor(const WorkerSpec& spec) {
        const std::string path = spec.path.empty() ? options.model : spec.path;
        if (const auto found = assets_.find(path); found != assets_.end()) {
            return found->second;
        }
        text::AssetOptions asset_options;
        asset_options.chat_template = options.chat_template;
        asset_options.tokenizer_path = spec.path.empty() ? options.tokenizer : std::string{};
        std::string where = path;
        std::error_code ignored;
        if (where != ":bytes:" && !asset_options.tokenizer_path.empty() &&
            !std::filesystem::exists(where, ignored)) {
            where = asset_options.tokenizer_path;  // MODEL is a name that only the engine resolves
            asset_options.tokenizer_path.clear();
        }
        const auto begin = std::chrono::steady_clock::now();
        auto loaded = text::LoadModelAssets(where, asset_options);
        if (!loaded && loaded.error().param == "chat_template") {
            return loaded.error();  // names its flag or file itself
        }
        if (!loaded) {
            const std::string named = spec.path.empty() ? "MODEL" : "worker: path";
            return Error::Invalid(spec.path.empty() ? "MODEL" : "path",
                                  named + " '" + path + "': " + loaded.error().message);
        }
        LogInfo(
            "model_loaded",
            {{"path", where},
             {"tokenizer", (*loaded)->tokenizer->kind()},
             {"vocab_size", (*loaded)->vocab_size},
             {"chat_template", (*loaded)->chat_template != nullptr},
             {"seconds", std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()}});
        assets_[path] = *loaded;
        return std::move(*loaded);
    }

    Result<std::shared_ptr<GroupEntry>> MakeEntry(const WorkerSpec& spec) {
        auto entry = std::make_shared<GroupEntry>();
        entry->index = next_index_++;
        entry->spec = spec;
        if (!spec.url.empty()) {
            LogInfo("worker_left_alone", {{"name", spec.name}, {"url", spec.url}});
            return entry;
        }
        auto assets = AssetsFor(spec);
        if (!assets) {
            return assets.error();
        }
        entry->assets = std::move(*assets);
        entry->served_names =
            spec.model.empty() ? options.ServedNames() : std::vector<std::string>{spec.model};
        entry->created = std::chrono::duration_cast<std::chrono::seconds>(
                             std::chrono::system_clock::now().time_since_epoch())
                             .count();
        const int slot = ModelSlot(entry->served_names.front());
        if (slot < 0) {
            return Error::Invalid(
                "model", "one gateway serves at most " + std::to_string(kMaxModels) + " different models");
        }
        entry->model_slot = static_cast<std::size_t>(slot);
        auto handle = group_factory(options, spec, entry->index);
        if (!handle) {
            return Error{handle.error().code, "group " + spec.name + ": " + handle.error().message,
                         handle.error().param, false};
        }
        entry->handle = std::move(*handle);
        LogInfo("group_forming", {{"group", spec.name},
                                  {"ranks", spec.dp_size},
                                  {"runtime", spec.runtime},
                                  {"address", entry->handle.handshake_address}});
        return entry;
    }

    Result<std::string> DoAdd(WorkerSpec spec) {
        const auto current = table();
        if (current->entries.size() >= kMaxWorkers) {
            return Error::Invalid("", "one gateway has at most " + std::to_string(kMaxWorkers) + " workers");
        }
        if (spec.name.empty()) {
            spec.name = "group" + std::to_string(next_index_);
        }
        for (const auto& entry : current->entries) {
            if (entry->spec.name == spec.name) {
                return Error{ErrorCode::kConflict, "A worker named '" + spec.name + "' exists.", "name",
                             false};
            }
        }
        auto entry = MakeEntry(spec);
        if (!entry) {
            Error error = entry.error();
            if (HttpStatus(error.code) >= 500) {
                error.code = ErrorCode::kConflict;  // its addresses are taken: a client's mistake, not a
                                                    // reason to retry
            }
            return error;
        }
        auto next = std::make_shared<GroupTable>(*current);
        next->entries.push_back(*entry);
        Publish(std::move(next));
        return "{\"name\":\"" + spec.name + "\",\"dp_size\":" + std::to_string(spec.dp_size) +
               ",\"address\":\"" + (*entry)->handle.handshake_address + "\"}";
    }

    Status DoRemove(const std::string& name) {
        std::shared_ptr<GroupEntry> entry;
        {
            const auto current = table();
            auto next = std::make_shared<GroupTable>();
            for (const auto& one : current->entries) {
                if (one->spec.name == name) {
                    entry = one;
                } else {
                    next->entries.push_back(one);
                }
            }
            if (entry == nullptr) {
                return Error{ErrorCode::kNotFound, "There is no such worker.", "", false};
            }
            Publish(std::move(next));
        }
        ForEachShard([index = entry->index](ShardHandler& handler) {
            handler.FailRequests(index,
                                 Error{ErrorCode::kUnavailable, "The engine group was removed.", "", true},
                                 group::CancelCause::kDrain);
        });
        // Its sockets are free when this returns: the last reference goes here, and not on a shard.
        const auto deadline = std::chrono::steady_clock::now() + kRemoveTime;
        while (entry.use_count() > 1 && std::chrono::steady_clock::now() < deadline) {
            std::this_thread::sleep_for(kPoll);
        }
        if (entry.use_count() > 1) {
            LogWarning("group_still_referenced", {{"group", name}, {"references", entry.use_count() - 1}});
        }
        retired_.push_back(std::move(entry));
        std::erase_if(retired_, [](const auto& one) { return one.use_count() == 1; });
        LogInfo("group_removed", {{"group", name}});
        return Status::Ok();
    }

    void StopAll() {
        if (stopped_) {
            return;
        }
        stopped_ = true;
        if (pool != nullptr) {
            pool->Stop();
        }
        if (control_ != nullptr) {
            control_->Stop();
        }
        if (server_ != nullptr) {
            server_->Stop();
        }
        // Shards are joined, but their mailboxes live on until no group can push any more.
        std::vector<std::shared_ptr<GroupEntry>> entries = table()->entries;
        entries.insert(entries.end(), retired_.begin(), retired_.end());
        for (const auto& entry : entries) {
            entry->handle.group.reset();
        }
    }

    std::map<std::string, std::shared_ptr<const text::ModelAssets>> assets_;
    std::int32_t next_index_{0};
    std::unique_ptr<http::Server> server_;
    std::vector<ShardHandler*> handlers_;
    std::vector<std::shared_ptr<GroupEntry>> retired_;
    std::unique_ptr<ControlThread> control_;
    std::chrono::steady_clock::time_point shutdown_at_{};
    std::atomic<bool> hurry_{false};
    bool started_{false};
    bool stopped_{false};
};

/// Every stream needs a descriptor: take what the system allows, and say how much that is.
void RaiseFileLimit() {
    rlimit limit{};
    if (::getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        ::setrlimit(RLIMIT_NOFILE, &limit);
        ::getrlimit(RLIMIT_NOFILE, &limit);
    }
    LogInfo("file_limit", {{"descriptors", static_cast<std::uint64_t>(limit.rlim_cur)}});
}

}  // namespace

Result<std::unique_ptr<Gateway>> Gateway::Create(GatewayOptions options, GroupFactory factory) {
    if (const Status valid = Validate(options); !valid) {
        return valid.error();
    }
    if (options.http_threads == 0) {
        options.http_threads = DefaultThreads();
    }
    auto gateway =
        std::make_unique<GatewayImpl>(std::move(options), factory ? std::move(factory) : RealGroups());
    if (const Status loaded = gateway->Load(); !loaded) {
        return loaded.error();
    }
    RaiseFileLimit();
    return Result<std::unique_ptr<Gateway>>{std::move(gateway)};
}

sigset_t StopSignals() {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    if (!HangupIgnored()) {
        sigaddset(&set, SIGHUP);
    }
    return set;
}

int Main(int argc, char** argv) {
    int exit_code = -1;
    auto options = ParseGatewayArgs(argc, argv, exit_code);
    if (exit_code >= 0) {
        return exit_code;
    }
    if (!options) {
        std::cerr << "rankgate gateway: " << options.error().message << "\n";
        return kExitUsage;
    }
    InitLog(options->log_level, options->log_format);
    const sigset_t signals = StopSignals();
    ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);

    auto created = Gateway::Create(*options);
    if (!created) {
        std::cerr << "rankgate gateway: " << created.error().message << "\n";
        return ExitOf(created.error());
    }
    const std::unique_ptr<Gateway> gateway = std::move(*created);
    if (const Status started = gateway->Start(); !started) {
        std::cerr << "rankgate gateway: " << started.error().message << "\n";
        return ExitOf(started.error());
    }
    std::cout << "listening on " << gateway->url() << "\n";
    for (const std::string& address : gateway->handshake_addresses()) {
        if (!address.empty()) {
            std::cout << "engines dial " << address << "\n";
        }
    }
    std::cout.flush();

    int signal = 0;
    ::sigwait(&signals, &signal);
    gateway->BeginShutdown();
    std::atomic<bool> finished{false};
    std::thread impatient{[&] {
        const timespec wait{0, 50'000'000};
        while (!finished.load()) {
            if (::sigtimedwait(&signals, nullptr, &wait) > 0) {
                LogWarning("second_signal", {});
                gateway->HurryShutdown();
            }
        }
    }};
    const bool clean = gateway->WaitForShutdown();
    finished.store(true);
    impatient.join();
    if (signal == SIGINT) {
        return kExitInterrupted;
    }
    return clean ? kExitOk : kExitFailure;
}

}  // namespace rankgate::gateway
