// SPDX-License-Identifier: Apache-2.0
#include "transport/fake_rank.h"

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "wire/handshake.h"
#include "wire/msgpack.h"
#include "wire/tokenspeed/outputs.h"
#include "wire/tokenspeed/request.h"
#include "wire/vllm/outputs.h"
#include "wire/vllm/request.h"

namespace rankgate::transport {
namespace {

constexpr Duration kIdleWait = std::chrono::milliseconds(20);

std::string AddressOf(const FakeRankOptions& options) {
    return options.handshake_address;
}

}  // namespace

FakeRank::FakeRank(FakeRankOptions options) : options_{std::move(options)} {
    thread_ = std::thread([this] { Run(); });
}

FakeRank::~FakeRank() {
    {
        const std::lock_guard lock{mutex_};
        stop_ = true;
        if (shared_link_ != nullptr) {
            shared_link_->Wake();
        }
    }
    changed_.notify_all();
    thread_.join();
}

void FakeRank::Post(std::function<void()> what) {
    const std::lock_guard lock{mutex_};
    posted_.push_back(std::move(what));
    if (shared_link_ != nullptr) {
        shared_link_->Wake();
    }
}

bool FakeRank::Pause(Duration duration) {
    std::unique_lock lock{mutex_};
    return !changed_.wait_for(lock, duration, [this] { return stop_; });
}

std::string FakeRank::ReadyMap() const {
    wire::ReadyResponse ready;
    ready.max_model_len = options_.max_model_len;
    ready.num_gpu_blocks = 1024;
    ready.block_size = 16;
    ready.vllm_version = options_.version;
    ready.data_parallel_size = options_.data_parallel_size;
    ready.data_parallel_rank = options_.engine_index;
    ready.max_num_seqs = 256;
    ready.max_num_batched_tokens = 8192;
    ready.instance_id = options_.instance_id;
    if (!options_.load_page.empty()) {
        ready.rankgate_load_mailbox = options_.load_page;
    }
    std::string bytes;
    wire::EncodeReadyResponse(ready, options_.dialect, bytes);
    return bytes;
}

void FakeRank::Run() {
    EngineLinkOptions link_options;
    link_options.dialect = options_.dialect;
    link_options.handshake_address = AddressOf(options_);
    link_options.engine_index = options_.engine_index;
    link_options.linger = std::chrono::milliseconds(200);
    auto link = EngineLink::Connect(link_options, clock_);
    RG_CHECK(link.ok());
    link_ = std::move(*link);
    {
        const std::lock_guard lock{mutex_};
        shared_link_ = link_.get();
    }
    const auto stopped = [this] {
        const std::lock_guard lock{mutex_};
        return stop_;
    };
    while (!stopped() && !link_->AwaitInit(clock_.Now() + std::chrono::milliseconds(50)).ok()) {
    }
    if (!stopped() && Pause(options_.load_time)) {
        const Status registered =
            link_->Register(ReadyMap(), options_.parallel_config_hash,
                            clock_.Now() + std::chrono::seconds(10), options_.register_late);
        RG_CHECK(registered.ok());
        if (options_.register_twice) {
            link_->RepeatRegistration(ReadyMap());
        }
        {
            const std::lock_guard lock{mutex_};
            serving_ = true;
        }
        changed_.notify_all();
    }
    TimePoint next_step = clock_.Now();
    while (!stopped()) {
        std::vector<std::function<void()>> posted;
        {
            const std::lock_guard lock{mutex_};
            posted.swap(posted_);
        }
        for (const auto& what : posted) {
            what();
        }
        if (frozen_ || gone_) {
            Pause(std::chrono::milliseconds(5));
            continue;
        }
        Duration wait = kIdleWait;
        if (!running_.empty()) {
            wait = std::clamp<Duration>(next_step - clock_.Now(), Duration::zero(), kIdleWait);
        }
        link_->Poll(wait, [this](const InputFrames& input) { OnInput(input); });
        if (!running_.empty() && clock_.Now() >= next_step) {
            Step();
            next_step = clock_.Now() + options_.step_time;
        }
    }
    {
        const std::lock_guard lock{mutex_};
        shared_link_ = nullptr;
    }
    link_.reset();
}

void FakeRank::OnInput(const InputFrames& input) {
    Received received;
    received.type = input.type;
    received.aux_frames = input.aux.size();
    std::int64_t prompt = 0;
    std::int64_t want = 0;
    if (input.type == 0) {
        if (options_.dialect == Dialect::kVllm) {
            wire::vllm::DecodedAdd add;
            wire::vllm::DecodeAdd(input.payload, add);
            received.id = add.request.id;
            prompt = static_cast<std::int64_t>(add.request.prompt_token_ids.size());
            want = add.request.sampling.max_tokens;
        } else {
            wire::tokenspeed::DecodedRequest add;
            wire::tokenspeed::DecodeRequest(input.payload, add);
            received.id = add.request.rid;
            prompt = static_cast<std::int64_t>(add.request.input_ids ? add.request.input_ids->size() : 0);
            want = add.request.sampling.max_new_tokens.value_or(16);
        }
        if (options_.auto_answer) {
            running_.push_back({received.id, prompt, 0, std::max<std::int64_t>(want, 1)});
        }
    } else if (input.type == 1) {
        std::vector<std::string_view> ids;
        const Status read = options_.dialect == Dialect::kVllm
                                ? wire::vllm::DecodeAbort(input.payload, ids)
                                : wire::tokenspeed::DecodeAbort(input.payload, ids);
        if (read.ok()) {
            std::erase_if(running_, [&](const Running& one) {
                return std::find(ids.begin(), ids.end(), std::string_view{one.id}) != ids.end();
            });
        }
    } else if (input.type == 3) {
        Answer(input.payload);
    }
    {
        const std::lock_guard lock{mutex_};
        ++counts_[input.type];
        running_count_ = running_.size();
        if (options_.record) {
            received.payload = input.payload;
            received_.push_back(std::move(received));
        }
    }
    if (options_.record) {
        changed_.notify_all();
    }
}

void FakeRank::Answer(std::string_view payload) {
    const wire::vllm::UtilityCall call = wire::vllm::DecodeUtility(payload);
    if (!call.status.ok()) {
        return;
    }
    wire::vllm::UtilityReply reply;
    reply.call_id = call.call_id;
    wire::Writer writer{reply.result};
    if (call.method == "is_sleeping" || call.method == "is_scheduler_paused") {
        writer.Bool(false);
    } else if (call.method == "reset_prefix_cache" || call.method == "add_lora" ||
               call.method == "remove_lora") {
        writer.Bool(true);
    } else if (call.method == "list_loras") {
        writer.Array(2);
        writer.Int(1);
        writer.Int(2);
    } else if (call.method == "pause_scheduler" || call.method == "resume_scheduler" ||
               call.method == "sleep" || call.method == "wake_up" || call.method == "profile") {
        writer.Nil();
    } else {
        reply.failure_message = "Call to " + std::string(call.method) + " method failed: unknown";
    }
    wire::vllm::OutputsBatch batch;
    batch.engine_index = options_.engine_index;
    batch.utility = &reply;
    std::string bytes;
    wire::AuxFrames aux;
    wire::vllm::EncodeOutputs(batch, bytes, aux);
    (void)link_->Send(call.client_index, bytes);
}

void FakeRank::Step() {
    std::vector<wire::RequestOutput> outputs(running_.size());
    for (std::size_t i = 0; i < running_.size(); ++i) {
        Running& one = running_[i];
        wire::RequestOutput& output = outputs[i];
        output.request_id = one.id;
        output.new_token_ids = {static_cast<wire::TokenId>(one.prompt + one.done)};
        if (one.done == 0) {
            output.num_prompt_tokens = static_cast<std::int32_t>(one.prompt);
            output.num_cached_tokens = 0;
        }
        ++one.done;
        output.completion_tokens = one.done;
        if (one.done >= one.want) {
            output.finish_reason = wire::FinishReason::kLength;
        }
    }
    std::erase_if(running_, [](const Running& one) { return one.done >= one.want; });
    ++steps_;
    {
        const std::lock_guard lock{mutex_};
        running_count_ = running_.size();
    }
    buffer_.clear();
    if (options_.dialect == Dialect::kVllm) {
        wire::vllm::SchedulerStats stats;
        stats.load.num_running = static_cast<std::int64_t>(running_.size());
        stats.load.kv_usage = 0.0;
        stats.load.step_counter = steps_;
        wire::vllm::OutputsBatch batch;
        batch.engine_index = options_.engine_index;
        batch.outputs = outputs;
        batch.stats = options_.with_stats ? &stats : nullptr;
        wire::AuxFrames aux;
        wire::vllm::EncodeOutputs(batch, buffer_, aux);
    } else {
        wire::tokenspeed::OutputsBatch batch;
        batch.engine_index = options_.engine_index;
        batch.outputs = outputs;
        batch.load.num_running = static_cast<std::int64_t>(running_.size());
        batch.load.kv_total_pages = options_.with_stats ? 1024 : 0;
        wire::tokenspeed::EncodeOutputs(batch, buffer_);
    }
    (void)link_->Send(0, buffer_);
}

bool FakeRank::WaitServing(Duration limit) {
    std::unique_lock lock{mutex_};
    return changed_.wait_for(lock, limit, [this] { return serving_; });
}

bool FakeRank::WaitFor(const std::function<bool(const Received&)>& wanted, Received* found, Duration limit) {
    std::unique_lock lock{mutex_};
    return changed_.wait_for(lock, limit, [&] {
        const auto at = std::find_if(received_.begin(), received_.end(), wanted);
        if (at == received_.end()) {
            return false;
        }
        if (found != nullptr) {
            *found = *at;
        }
        received_.erase(at);
        return true;
    });
}

std::string FakeRank::NextAdd(Duration limit) {
    Received add;
    return WaitFor([](const Received& one) { return one.type == 0; }, &add, limit) ? add.id : std::string{};
}

std::size_t FakeRank::CountReceived(std::uint8_t type) const {
    const std::lock_guard lock{mutex_};
    return counts_[type];
}

std::vector<FakeRank::Received> FakeRank::TakeReceived() {
    const std::lock_guard lock{mutex_};
    std::vector<Received> all(std::make_move_iterator(received_.begin()),
                              std::make_move_iterator(received_.end()));
    received_.clear();
    return all;
}

std::size_t FakeRank::running() const {
    const std::lock_guard lock{mutex_};
    return running_count_;
}

void FakeRank::SayRaw(std::vector<std::string> frames) {
    Post([this, frames = std::move(frames)] {
        if (frames.empty() || link_ == nullptr) {
            return;
        }
        const std::vector<std::string_view> aux(frames.begin() + 1, frames.end());
        (void)link_->Send(0, frames[0], aux);
    });
}

void FakeRank::SayTokens(std::string id, std::vector<wire::TokenId> tokens, wire::FinishReason finish) {
    wire::RequestOutput output;
    output.request_id = std::move(id);
    output.new_token_ids = std::move(tokens);
    output.finish_reason = finish;
    std::string bytes;
    if (options_.dialect == Dialect::kVllm) {
        wire::vllm::OutputsBatch batch;
        batch.engine_index = options_.engine_index;
        batch.outputs = {&output, 1};
        wire::AuxFrames aux;
        wire::vllm::EncodeOutputs(batch, bytes, aux);
    } else {
        wire::tokenspeed::OutputsBatch batch;
        batch.engine_index = options_.engine_index;
        batch.outputs = {&output, 1};
        wire::tokenspeed::EncodeOutputs(batch, bytes);
    }
    SayRaw({std::move(bytes)});
}

void FakeRank::SayFinished(std::vector<std::string> ids) {
    wire::vllm::OutputsBatch batch;
    batch.engine_index = options_.engine_index;
    batch.finished_requests = ids;
    std::string bytes;
    wire::AuxFrames aux;
    wire::vllm::EncodeOutputs(batch, bytes, aux);
    SayRaw({std::move(bytes)});
}

void FakeRank::Deaf() {
    Post([this] { link_->CloseInputs(); });
}

void FakeRank::Mute() {
    Post([this] { link_->CloseOutputs(); });
}

void FakeRank::Die(bool last_words) {
    Post([this, last_words] {
        if (last_words) {
            link_->SendDead();
        }
        link_->CloseInputs();
        link_->CloseOutputs();
        gone_ = true;
    });
}

void FakeRank::Freeze(bool frozen) {
    std::uint64_t mine = 0;
    {
        const std::lock_guard lock{mutex_};
        mine = ++freezes_asked_;
    }
    Post([this, frozen, mine] {
        frozen_ = frozen;
        const std::lock_guard lock{mutex_};
        freezes_done_ = mine;
        changed_.notify_all();
    });
    std::unique_lock lock{mutex_};
    changed_.wait_for(lock, std::chrono::seconds(5), [&] { return freezes_done_ >= mine; });
}

FakeRankProcess::FakeRankProcess(const std::string& program, const FakeRankOptions& options) {
    const std::string index = std::to_string(options.engine_index);
    const std::string dialect{wire::DialectName(options.dialect)};
    const auto text = [](Duration d) {
        return std::to_string(std::chrono::duration_cast<std::chrono::microseconds>(d).count());
    };
    const std::string load = text(options.load_time);
    const std::string step = text(options.step_time);
    std::vector<std::string> words{program,
                                   options.handshake_address,
                                   index,
                                   dialect,
                                   load,
                                   step,
                                   std::to_string(options.max_model_len)};
    std::vector<char*> argv;
    argv.reserve(words.size() + 1);
    for (std::string& word : words) {
        argv.push_back(word.data());
    }
    argv.push_back(nullptr);
    RG_CHECK(::posix_spawn(&pid_, program.c_str(), nullptr, nullptr, argv.data(), environ) == 0);
}

FakeRankProcess::~FakeRankProcess() {
    Kill();
}

void FakeRankProcess::Signal(int signal) const {
    if (pid_ > 0) {
        ::kill(pid_, signal);
    }
}

void FakeRankProcess::Kill() {
    if (pid_ > 0) {
        ::kill(pid_, SIGKILL);
        ::waitpid(pid_, nullptr, 0);
        pid_ = -1;
    }
}

}  // namespace rankgate::transport
