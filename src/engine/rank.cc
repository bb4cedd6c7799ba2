// SPDX-License-Identifier: Apache-2.0
#include "engine/rank.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "base/log.h"
#include "wire/vllm/request.h"

namespace rankgate::engine {

namespace {

constexpr Duration kIdlePoll = std::chrono::seconds(1);
constexpr Duration kFaultPoll = std::chrono::milliseconds(2);
constexpr Duration kDialSlice = std::chrono::milliseconds(200);
constexpr Duration kClientCheckEvery = std::chrono::milliseconds(500);
/// A step waits while a frontend that reads has this much unread: a rank that is faster than its reader must
/// not fill the memory.
constexpr std::uint64_t kSoftQueueBytes = 4U << 20;
/// A frontend that read nothing for so long holds nobody up any more; its outputs then queue to the link's
/// bound.
constexpr Duration kBehindPatience = std::chrono::seconds(2);
constexpr Duration kBehindPoll = std::chrono::milliseconds(1);
/// Inputs of one mirrored step, in bytes; a single larger one has a step of its own.
constexpr std::size_t kMirroredBytes = std::size_t{64} << 20;
/// The relay's largest frame, less what PackInput puts in front.
constexpr std::size_t kLargestMirrored = (std::size_t{1} << 30) - 64;
/// A scripted death comes after what was said before it, if that leaves within this time: tests want exact
/// token counts.
constexpr Duration kDeathDelay = std::chrono::milliseconds(500);
/// Claimed towards frontends that look at the version: the wire we speak is that of this release.
constexpr const char* kVllmVersion = "0.32.0+rankgate";
constexpr const char* kTokenSpeedVersion = "tokenspeed-0.1.1+rankgate";

/// Written by signal handlers and the relay's thread at any time, also while a rank ends: made once, never
/// closed.
std::atomic<int> g_wake_fd{-1};

std::string InstanceId() {
    std::random_device random;
    static constexpr char kHex[] = "0123456789abcdef";
    std::string id{"rankgate-"};
    for (int i = 0; i < 4; ++i) {
        std::uint32_t word = random();
        for (int digit = 0; digit < 8; ++digit, word >>= 4) {
            id.push_back(kHex[word & 15]);
        }
    }
    return id;
}

}  // namespace

Rank::Rank(RankConfig config, ModelRunner& runner, const Clock& clock)
    : config_{std::move(config)}, runner_{runner}, clock_{clock} {
    if (g_wake_fd.load() < 0) {
        g_wake_fd.store(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    }
}

Rank::~Rank() {}

void Rank::WakeFromSignal() noexcept {
    const std::uint64_t one = 1;
    const ssize_t written = ::write(g_wake_fd.load(), &one, sizeof one);
    (void)written;  // no rank yet, or a full counter: nobody sleeps
}

void Rank::WaitForWork(Duration wait) noexcept {
    pollfd watched[2] = {{link_->poll_fd(), POLLIN, 0}, {g_wake_fd.load(), POLLIN, 0}};
    timespec limit{};
    limit.tv_sec = static_cast<time_t>(wait.count() / 1'000'000'000);
    limit.tv_nsec = static_cast<long>(wait.count() % 1'000'000'000);
    if (::ppoll(watched, 2, &limit, nullptr) > 0 && watched[1].revents != 0) {
        std::uint64_t count = 0;
        const ssize_t taken = ::read(watched[1].fd, &count, sizeof count);
        (void)taken;
    }
}

std::string Rank::ReadyResponse() const {
    const SchedulerConfig& scheduler = config_.scheduler;
    const bool tokenspeed = config_.dialect == wire::Dialect::kTokenSpeed;
    wire::ReadyResponse ready;
    ready.max_model_len = scheduler.max_model_len;
    ready.num_gpu_blocks =
        scheduler.num_gpu_blocks + (tokenspeed ? 1 : 0);  // TokenSpeed counts its null page
    ready.block_size = scheduler.block_size;
    ready.dtype = runner_.facts().dtype;
    ready.vllm_version = tokenspeed ? kTokenSpeedVersion : kVllmVersion;
    ready.tensor_parallel_size = config_.tensor_parallel_size;
    // vLLM: above 1 would claim lockstep, and these ranks are independent.
    ready.data_parallel_size = tokenspeed ? config_.data_parallel_size : 1;
    ready.world_size = static_cast<std::int64_t>(config_.tensor_parallel_size) *
                       (tokenspeed ? config_.data_parallel_size : 1);
    ready.data_parallel_rank = config_.data_parallel_rank;
    ready.max_num_seqs =
        static_cast<std::int64_t>(scheduler.max_num_seqs) * (tokenspeed ? config_.data_parallel_size : 1);
    ready.max_num_batched_tokens = scheduler.max_num_batched_tokens;
    ready.instance_id = InstanceId();
    ready.kv_cache_size_tokens = scheduler.num_gpu_blocks * scheduler.block_size;
    ready.kv_cache_max_concurrency = static_cast<double>(scheduler.num_gpu_blocks * scheduler.block_size) /
                                     static_cast<double>(scheduler.max_model_len);
    ready.enable_sleep_mode = true;
    if (page_.is_open()) {
        ready.rankgate_load_mailbox = page_.path();
    }
    std::string bytes;
    wire::EncodeReadyResponse(ready, config_.dialect, bytes);
    return bytes;
}

Status Rank::Connect(const std::atomic<int>& stop) {
    transport::EngineLinkOptions options;
    options.dialect =
        config_.dialect == wire::Dialect::kVllm ? transport::Dialect::kVllm : transport::Dialect::kTokenSpeed;
    options.handshake_address = config_.handshake_address;
    options.engine_index = static_cast<std::uint16_t>(config_.base_index + config_.data_parallel_rank);
    options.local = config_.dialect == wire::Dialect::kTokenSpeed;
    options.headless = true;
    auto link = transport::EngineLink::Connect(options, clock_);
    if (!link.ok()) {
        return link.error();
    }
    link_ = std::move(link).value();
    LogInfo("engine_dialling", {{"address", config_.handshake_address}, {"index", options.engine_index}});
    const TimePoint limit = clock_.Now() + config_.init_timeout;
    while (true) {
        Status init = link_->AwaitInit(std::min(limit, clock_.Now() + kDialSlice));
        if (init.ok()) {
            break;
        }
        if (stop.load() != 0) {
            return Error{ErrorCode::kDraining, "interrupted while waiting for the gateway", {}, false};
        }
        if (init.error().code != ErrorCode::kTimeout) {
            return init;
        }
        if (mirror_ != nullptr) {
            if (Status healthy = mirror_->Check(); !healthy.ok()) {
                return healthy;
            }
        }
        if (clock_.Now() >= limit) {
            return Error{
                ErrorCode::kTimeout,
                "no gateway answered at " + config_.handshake_address + " within " +
                    std::to_string(
                        std::chrono::duration_cast<std::chrono::seconds>(config_.init_timeout).count()) +
                    " s",
                {},
                true};
        }
    }
    if (!config_.load_page_dir.empty()) {
        page_name_ = "rank" + std::to_string(options.engine_index) + "-" + std::to_string(::getpid());
        if (Status opened = page_.Open(config_.load_page_dir, page_name_); !opened.ok()) {
            // The reports on the wire carry the same numbers; only their age differs.
            LogWarning("engine_load_page_unavailable", {{"why", opened.error().message}});
        }
    }
    CoreConfig core;
    core.dialect = config_.dialect;
    core.scheduler = config_.scheduler;
    core.engine_index = options.engine_index;
    core.num_clients = static_cast<std::int32_t>(link_->addresses().outputs.size());
    core.has_coordinator = !link_->addresses().coordinator_output.empty();
    core.stale_load = config_.stale_load;
    if (mirror_ != nullptr) {
        if (Status begun = mirror_->Begin(core); !begun.ok()) {
            return begun;
        }
    }
    core_ = std::make_unique<EngineCore>(core, runner_, clock_);
    backlogs_.resize(static_cast<std::size_t>(core.num_clients));
    page_.Publish(core_->Load());
    const std::string ready = ReadyResponse();
    const TimePoint register_limit = clock_.Now() + config_.init_timeout;
    return link_->Register(ready, "", register_limit);
}

void Rank::Mirror(std::uint8_t type, std::int32_t client, std::string_view payload) {
    if (payload.size() > kLargestMirrored) {
        LogWarning("engine_input_ignored", {{"why", "it is larger than a step of the tensor-parallel ranks"},
                                            {"bytes", payload.size()}});
        return;
    }
    inputs_.push_back(PackInput(type, client, payload));
    input_bytes_ += inputs_.back().size();
}

std::size_t Rank::DropClient(std::int32_t client) {
    const std::vector<std::string> ids = core_->IdsOf(client);
    if (ids.empty()) {
        return 0;
    }
    std::string payload;  // both dialects abort with an array of ids
    const std::vector<std::string_view> views{ids.begin(), ids.end()};
    wire::vllm::EncodeAbort(views, payload);
    if (mirror_ != nullptr) {
        Mirror(static_cast<std::uint8_t>(wire::vllm::RequestType::kAbort), client, payload);
    } else {
        core_->OnInput(static_cast<std::uint8_t>(wire::vllm::RequestType::kAbort), payload, {}, client);
    }
    return ids.size();
}

Status Rank::Round() {
    if (mirror_ != nullptr) {
        // What does not fit into this step goes into the next ones.
        std::vector<std::string_view> views;
        std::size_t bytes = 0;
        for (const std::string& packed : inputs_) {
            if (!views.empty() && bytes + packed.size() > kMirroredBytes) {
                break;
            }
            views.emplace_back(packed);
            bytes += packed.size();
        }
        if (Status published = mirror_->Publish(views); !published.ok()) {
            return published;
        }
        for (const std::string_view packed : views) {
            ApplyPackedInput(*core_, packed);
        }
        inputs_.erase(inputs_.begin(), inputs_.begin() + static_cast<std::ptrdiff_t>(views.size()));
        input_bytes_ -= bytes;
    }
    Result<bool> stepped = core_->Step();
    if (!stepped.ok()) {
        return stepped.error();
    }
    return mirror_ != nullptr ? mirror_->SetDigest(core_->Digest()) : Status::Ok();
}

void Rank::SendOutbox() {
    Outbox& outbox = core_->outbox();
    std::vector<std::string_view> aux;
    for (std::size_t i = 0; i < outbox.size(); ++i) {
        const OutMessage& message = outbox[i];
        aux.clear();
        for (std::size_t k = 0; k < message.aux.size(); ++k) {
            aux.push_back(message.aux[k]);
        }
        const Status sent = link_->Send(message.client, message.payload, aux);
        if (!sent.ok()) {
            const std::size_t dropped = message.client >= 0 ? DropClient(message.client) : 0;
            std::uint64_t suppressed = 0;
            if (send_log_.Allow(suppressed)) {
                LogWarning("engine_send_failed", {{"client", message.client},
                                                  {"why", sent.error().message},
                                                  {"requests_dropped", dropped},
                                                  {"suppressed", suppressed}});
            }
        }
    }
    outbox.Clear();
}

void Rank::CheckClients() {
    const TimePoint now = clock_.Now();
    if (now < next_client_check_) {
        return;
    }
    next_client_check_ = now + kClientCheckEvery;
    const auto clients = static_cast<std::int32_t>(link_->addresses().outputs.size());
    for (std::int32_t client = 0; client < clients; ++client) {
        if (link_->AwayFor(client) > config_.away_timeout) {
            if (const std::size_t dropped = DropClient(client); dropped > 0) {
                LogWarning("engine_frontend_away", {{"client", client}, {"requests_dropped", dropped}});
            }
        }
    }
}

bool Rank::FrontendsAreBehind() {
    bool behind = false;
    for (std::size_t i = 0; i < backlogs_.size(); ++i) {
        const auto client = static_cast<std::int32_t>(i);
        const std::uint64_t bytes = link_->queued_bytes(client);
        Backlog& backlog = backlogs_[i];
        if (bytes <= kSoftQueueBytes) {
            backlog = Backlog{};
            continue;
        }
        const TimePoint now = clock_.Now();
        if (backlog.bytes == 0 || bytes < backlog.bytes) {
            backlog.progress = now;
        }
        backlog.bytes = bytes;
        behind = behind ||
                 (now - backlog.progress < kBehindPatience && link_->AwayFor(client) == Duration::zero());
    }
    return behind;
}

void Rank::LetOutputsLeave() {
    const TimePoint limit = clock_.Now() + kDeathDelay;
    for (std::size_t i = 0; i < backlogs_.size(); ++i) {
        while (link_->queued_bytes(static_cast<std::int32_t>(i)) > 0 && clock_.Now() < limit) {
            link_->Flush();
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    }
    std::this_thread::sleep_for(
        std::chrono::milliseconds(20));  // small messages sit in libzmq's own buffer a moment longer
}

bool Rank::ApplyFaults() {
    FaultSource* faults = runner_.faults();
    Fault fault;
    while (faults != nullptr && faults->TakeFault(fault)) {
        LogWarning("engine_fault_injected",
                   {{"kind", static_cast<int>(fault.kind)}, {"number", fault.number}});
        switch (fault.kind) {
            case Fault::Kind::kDie:
                LetOutputsLeave();
                ::kill(::getpid(), fault.number > 0 ? static_cast<int>(fault.number) : SIGKILL);
                break;
            case Fault::Kind::kExit:
                LetOutputsLeave();
                ::_exit(static_cast<int>(fault.number));
            case Fault::Kind::kLastWords:
                link_->SendDead();
                exit_code_ = kExitDied;
                return true;
            case Fault::Kind::kDeaf:
                link_->CloseInputs();
                break;
            case Fault::Kind::kMute:
                link_->CloseOutputs();
                break;
            case Fault::Kind::kRawMessage:
                if (!fault.frames.empty()) {
                    const std::vector<std::string_view> rest{fault.frames.begin() + 1, fault.frames.end()};
                    (void)link_->Send(static_cast<std::int32_t>(fault.number), fault.frames.front(), rest)
                        .ok();
                }
                break;
            case Fault::Kind::kIdentity:
                core_->set_engine_index(static_cast<std::int32_t>(fault.number));
                break;
            case Fault::Kind::kSleep:
                std::this_thread::sleep_for(std::chrono::milliseconds(fault.number));
                break;
        }
    }
    return false;
}

Status Rank::Loop(const std::atomic<int>& stop) {
    const transport::EngineLink::OnInput on_input = [&](const transport::InputFrames& in) {
        if (mirror_ != nullptr) {
            Mirror(in.type, in.client, in.payload);
        } else {
            core_->OnInput(in.type, in.payload, in.aux, in.client);
        }
    };
    const bool faults = runner_.faults() != nullptr;
    bool drained = false;
    while (stop.load(std::memory_order_relaxed) == 0) {
        Duration wait{0};
        if (!core_->runnable() && inputs_.empty()) {
            const TimePoint now = clock_.Now();
            const TimePoint due = core_->next_due();
            wait = due <= now ? Duration{0} : std::min(kIdlePoll, Duration{due - now});
            wait = faults ? std::min(wait, kFaultPoll) : wait;
        }
        const bool behind = core_->runnable() && FrontendsAreBehind();
        if (behind || (wait > Duration{0} && drained)) {
            WaitForWork(behind ? kBehindPoll : wait);
        }
        // A full helping means that more may be there, of which the descriptor need not tell again.
        // Nothing more is taken while the ranks have a whole step's worth to go through.
        drained = input_bytes_ < kMirroredBytes &&
                  link_->Poll(Duration{0}, on_input) < transport::EngineLink::kMaxInputsPerPoll;
        if (!behind) {  // else inputs were taken (aborts too), and tokens wait until the frontend has read
                        // some
            if (Status round = Round(); !round.ok()) {
                return round;
            }
        }
        SendOutbox();
        page_.Publish(core_->Load());
        CheckClients();
        if (faults && ApplyFaults()) {
            return Status::Ok();
        }
    }
    core_->Drain();
    SendOutbox();
    page_.Publish(core_->Load());
    return Status::Ok();
}

int Rank::Run(const std::atomic<int>& stop, StepMirror* mirror) {
    mirror_ = mirror;
    if (Status connected = Connect(stop); !connected.ok()) {
        if (stop.load() != 0) {
            return stop.load() == SIGINT ? kExitInterrupted : kExitOk;
        }
        LogError("engine_start_failed", {{"why", connected.error().message}});
        return kExitFailure;
    }
    LogInfo("engine_ready", {{"model", runner_.facts().model_name},
                             {"max_model_len", config_.scheduler.max_model_len},
                             {"max_num_seqs", config_.scheduler.max_num_seqs},
                             {"max_num_batched_tokens", config_.scheduler.max_num_batched_tokens},
                             {"num_gpu_blocks", config_.scheduler.num_gpu_blocks},
                             {"block_size", config_.scheduler.block_size},
                             {"clients", link_->addresses().outputs.size()}});
    const Status ended = Loop(stop);
    if (!ended.ok()) {
        LogError("engine_died", {{"why", ended.error().message}});
        link_->SendDead();
        exit_code_ = kExitDied;
    }
    link_.reset();  // lingers, bounded, until the last words left
    const CoreCounters& counters = core_->counters();
    LogInfo("engine_stopped", {{"requests", counters.requests},
                               {"tokens", counters.tokens},
                               {"aborts", counters.aborts},
                               {"refused", counters.refused},
                               {"ignored", counters.ignored}});
    if (exit_code_ == kExitOk && stop.load() == SIGINT) {
        return kExitInterrupted;
    }
    return exit_code_;
}

}  // namespace rankgate::engine
