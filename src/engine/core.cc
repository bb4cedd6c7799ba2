// SPDX-License-Identifier: Apache-2.0
#include "engine/core.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "wire/msgpack.h"

namespace rankgate::engine {

using wire::FinishReason;

namespace {

constexpr std::size_t kMaxPauseWaiters = 1024;

bool SameLoad(const wire::LoadSnapshot& a, const wire::LoadSnapshot& b) noexcept {
    return a.num_running == b.num_running && a.num_waiting == b.num_waiting &&
           a.kv_active_pages == b.kv_active_pages;
}

bool Idle(const wire::LoadSnapshot& load) noexcept {
    return load.num_running == 0 && load.num_waiting == 0;
}

std::string MsgBool(bool value) {
    return value ? "\xc3" : "\xc2";
}

/// Positional arguments of a utility call: at most `limit` values.
class Arguments {
  public:
    explicit Arguments(std::string_view raw) : reader_{raw} { ok_ = reader_.ReadArray(left_); }
    bool ok() const noexcept { return ok_ && reader_.ok(); }
    std::uint32_t left() const noexcept { return left_; }
    bool Bool(bool fallback) {
        bool value = fallback;
        if (ok() && left_ > 0) {
            --left_;
            reader_.ReadBool(value);
        }
        return value;
    }
    std::string_view Str(std::string_view fallback) {
        std::string_view value = fallback;
        if (ok() && left_ > 0) {
            --left_;
            reader_.ReadStr(value);
        }
        return value;
    }
    std::int64_t Int(std::int64_t fallback) {
        std::int64_t value = fallback;
        if (ok() && left_ > 0) {
            --left_;
            reader_.ReadInt(value);
        }
        return value;
    }
    void Skip() {
        if (ok() && left_ > 0) {
            --left_;
            reader_.Skip();
        }
    }
    /// Everything was read, nothing was left over, nothing was wrong.
    bool Complete() const noexcept { return ok() && left_ == 0; }

  private:
    wire::Reader reader_;
    std::uint32_t left_{0};
    bool ok_{false};
};

std::unique_ptr<Codec> MakeCodec(const CoreConfig& config, const ModelFacts& facts) {
    RequestLimits limits;
    limits.max_model_len = config.scheduler.max_model_len;
    limits.vocab_size = facts.vocab_size;
    limits.eos_token_ids = facts.eos_token_ids;
    return config.dialect == wire::Dialect::kVllm ? MakeVllmCodec(limits) : MakeTokenSpeedCodec(limits);
}

}  // namespace

EngineCore::EngineCore(const CoreConfig& config, ModelRunner& runner, const Clock& clock)
    : config_{config},
      runner_{runner},
      clock_{clock},
      codec_{MakeCodec(config, runner.facts())},
      scheduler_{config.scheduler, runner} {
    RG_CHECK(config_.num_clients >= 1);
    Told fresh;
    fresh.load = scheduler_.Load();
    told_.assign(static_cast<std::size_t>(config_.num_clients), fresh);
}

EngineCore::~EngineCore() = default;

void EngineCore::Ignore(std::string_view what, std::string_view why) {
    counters_.ignored += 1;
    std::uint64_t suppressed = 0;
    if (log_limit_.Allow(suppressed)) {
        LogWarning("engine_input_ignored", {{"what", what}, {"why", why}, {"suppressed", suppressed}});
    }
}

void EngineCore::OnInput(std::uint8_t type, std::string_view payload, std::span<const std::string_view> aux,
                         std::int32_t input_client) {
    command_.Clear();
    codec_->Decode(type, payload, aux, command_);
    if (command_.add != nullptr) {
        OnAdd(std::move(command_.add), command_.add_status, input_client);
    } else if (command_.utility.has_value()) {
        OnUtility(*command_.utility, input_client);
    } else if (!command_.problem.empty()) {
        Ignore("message", command_.problem);
    }
    for (const std::string_view id : command_.aborts) {
        if (const Sequence* sequence = scheduler_.Abort(id)) {
            counters_.aborts += 1;
            if (config_.has_coordinator) {
                ended_.emplace_back(sequence->request.client_index, sequence->request.id);
            }
        }
    }
}

void EngineCore::Refuse(std::unique_ptr<Sequence> sequence, const Error& error, std::int32_t client) {
    counters_.refused += 1;
    std::uint64_t suppressed = 0;
    if (log_limit_.Allow(suppressed)) {
        LogWarning("engine_request_refused", {{"request_id", sequence->request.id.substr(0, 128)},
                                              {"param", error.param},
                                              {"why", error.message},
                                              {"suppressed", suppressed}});
    }
    sequence->request.client_index = client;
    sequence->finish = draining_ ? FinishReason::kAbort : FinishReason::kError;
    sequence->stop_reason = (error.param.empty() ? std::string{} : error.param + ": ") + error.message;
    rows_.push_back(Row{sequence.get()});
    refused_.push_back(std::move(sequence));
}

void EngineCore::OnAdd(std::unique_ptr<Sequence> sequence, const Status& decoded, std::int32_t input_client) {
    counters_.requests += 1;
    const std::int32_t wanted = sequence->request.client_index;
    // A client index that nobody listens on would lose the answer; the socket it came by is the next best
    // address.
    const std::int32_t client = ValidClient(wanted) ? wanted : (ValidClient(input_client) ? input_client : 0);
    if (const Sequence* live = scheduler_.Find(sequence->request.id)) {
        counters_.duplicates += 1;
        if (live->request.client_index == client) {
            // An error under this id would end the live request at its frontend, and that one did nothing
            // wrong.
            Ignore("add", "its id is the id of a running request");
        } else {
            Refuse(std::move(sequence),
                   Error{ErrorCode::kConflict, "a request with this id is running", "request_id", false},
                   client);
        }
        return;
    }
    if (draining_) {
        Refuse(std::move(sequence), Error{ErrorCode::kDraining, "the engine is shutting down", {}, true},
               client);
        return;
    }
    if (!decoded.ok()) {
        Refuse(std::move(sequence), decoded.error(), client);
        return;
    }
    if (!ValidClient(wanted)) {
        Refuse(std::move(sequence), Error::Invalid("client_index", "no output was given for this client"),
               client);
        return;
    }
    if (Status fit = runner_.Check(sequence->request); !fit.ok()) {
        Refuse(std::move(sequence), fit.error(), client);
        return;
    }
    Sequence* raw = sequence.get();
    if (Status added = scheduler_.Add(sequence); !added.ok()) {
        RG_CHECK(sequence.get() == raw);
        Refuse(std::move(sequence), added.error(), client);
    }
}

void EngineCore::Answer(const UtilityAnswer& answer) {
    codec_->EncodeUtility(config_.engine_index,
                          std::chrono::duration<double>(clock_.Now().time_since_epoch()).count(), answer,
                          outbox_);
}

void EngineCore::AbortAll() {
    for (Sequence* sequence : scheduler_.Live()) {
        Sequence* aborted = scheduler_.Abort(sequence->request.id);
        RG_CHECK(aborted == sequence);
        rows_.push_back(Row{aborted});
    }
    // The rows point at sequences that live until the next plan: say it now.
    Flush(scheduler_.Load());
}

std::vector<std::string> EngineCore::IdsOf(std::int32_t client) const {
    std::vector<std::string> ids;
    for (const Sequence* sequence : scheduler_.Live()) {
        if (sequence->request.client_index == client) {
            ids.push_back(sequence->request.id);
        }
    }
    return ids;
}

void EngineCore::Drain() {
    draining_ = true;
    AbortAll();
    AnswerWhenDrained();
}

void EngineCore::Pause(std::string_view mode, UtilityAnswer answer) {
    if (mode == "keep") {
        scheduler_.SetPause(PauseState::kPausedAll);
        Answer(answer);
    } else if (mode == "wait") {
        scheduler_.SetPause(PauseState::kPausedNew);
        if (waiting_for_drain_.size() >= kMaxPauseWaiters) {
            answer.failure = "too many pause calls are waiting";
            Answer(answer);
            return;
        }
        waiting_for_drain_.push_back(std::move(answer));
        AnswerWhenDrained();
    } else if (mode == "abort") {
        scheduler_.SetPause(PauseState::kPausedNew);
        AbortAll();
        Answer(answer);
    } else {
        answer.failure = "unknown pause mode '" + std::string{mode.substr(0, 32)} + "': abort, wait or keep";
        Answer(answer);
    }
}

void EngineCore::AnswerWhenDrained() {
    if (waiting_for_drain_.empty() ||
        (scheduler_.num_running() > 0 && scheduler_.pause() == PauseState::kPausedNew)) {
        return;
    }
    for (UtilityAnswer& answer : waiting_for_drain_) {
        Answer(answer);
    }
    waiting_for_drain_.clear();
}

void EngineCore::OnUtility(const UtilityCommand& call, std::int32_t input_client) {
    UtilityAnswer answer;
    answer.call_id = call.call_id;
    answer.client = ValidClient(call.client) ? call.client : (ValidClient(input_client) ? input_client : 0);
    const auto fail = [&](const std::string& why) {
        answer.failure = "Call to " + std::string{call.method.substr(0, 128)} + " method failed: " + why;
        answer.result.clear();
        Answer(answer);
    };
    if (!call.refusal.empty()) {
        fail(call.refusal);
        return;
    }
    if (!ValidClient(call.client)) {
        fail("no output was given for client " + std::to_string(call.client));
        return;
    }
    Arguments args{call.args};
    const auto bad_arguments = [&] { fail("wrong number or type of arguments"); };
    const std::string_view method = call.method;
    if (method == "is_sleeping" || method == "is_scheduler_paused") {
        if (!args.Complete()) {
            return bad_arguments();
        }
        answer.result =
            MsgBool(method == "is_sleeping" ? sleeping_ : scheduler_.pause() != PauseState::kRunning);
        Answer(answer);
    } else if (method == "get_supported_tasks") {
        if (!args.Complete()) {
            return bad_arguments();
        }
        wire::Writer writer{answer.result};
        writer.Array(1);
        writer.Str("generate");
        Answer(answer);
    } else if (method == "pause_scheduler") {
        const std::string_view mode = args.Str("abort");
        const bool clear = args.Bool(true);
        if (!args.Complete()) {
            return bad_arguments();
        }
        if (clear) {
            runner_.ResetPrefixCache();
        }
        Pause(mode, std::move(answer));
    } else if (method == "resume_scheduler") {
        if (!args.Complete()) {
            return bad_arguments();
        }
        scheduler_.SetPause(PauseState::kRunning);
        AnswerWhenDrained();
        Answer(answer);
    } else if (method == "sleep") {
        const std::int64_t level = args.Int(1);
        const std::string_view mode = args.Str("abort");
        if (!args.Complete() || level < 0 || level > 2) {
            return bad_arguments();
        }
        sleeping_ = true;
        runner_.ResetPrefixCache();
        Pause(mode, std::move(answer));
    } else if (method == "wake_up") {
        args.Skip();  // tags: there is only one thing to wake
        if (!args.Complete()) {
            return bad_arguments();
        }
        sleeping_ = false;
        scheduler_.SetPause(PauseState::kRunning);
        AnswerWhenDrained();
        Answer(answer);
    } else if (method == "reset_prefix_cache") {
        const bool reset_running = args.Bool(false);
        args.Bool(false);  // reset_connector: there is none
        if (!args.Complete()) {
            return bad_arguments();
        }
        if (reset_running) {
            scheduler_.PreemptAll();
        }
        const bool free = scheduler_.num_running() == 0;
        if (free) {
            runner_.ResetPrefixCache();
            prefix_reset_ = true;
        }
        answer.result = MsgBool(free);
        Answer(answer);
    } else if (method == "reset_mm_cache" || method == "reset_encoder_cache" ||
               method == "execute_dummy_batch") {
        if (!args.Complete()) {
            return bad_arguments();
        }
        Answer(answer);
    } else if (method == "rankgate_stats") {
        const wire::LoadSnapshot load = Load();
        const std::pair<std::string_view, std::uint64_t> entries[] = {
            {"num_running", static_cast<std::uint64_t>(load.num_running)},
            {"num_waiting", static_cast<std::uint64_t>(load.num_waiting)},
            {"kv_active_pages", static_cast<std::uint64_t>(load.kv_active_pages)},
            {"kv_total_pages", static_cast<std::uint64_t>(load.kv_total_pages)},
            {"requests", counters_.requests},
            {"refused", counters_.refused},
            {"duplicates", counters_.duplicates},
            {"aborts", counters_.aborts},
            {"finished", counters_.finished},
            {"failed", counters_.failed},
            {"ignored", counters_.ignored},
            {"tokens", counters_.tokens},
            {"steps", counters_.steps},
        };
        wire::Writer writer{answer.result};
        writer.Map(std::size(entries));
        for (const auto& [key, value] : entries) {
            writer.Str(key);
            writer.Uint(value);
        }
        Answer(answer);
    } else if (method == "add_lora" || method == "remove_lora" || method == "pin_lora" ||
               method == "list_loras") {
        fail("this engine has no LoRA support");
    } else if (method == "profile") {
        fail("this engine has no profiler");
    } else {
        fail("this engine has no such method");
    }
}

bool EngineCore::runnable() const noexcept {
    switch (scheduler_.pause()) {
        case PauseState::kRunning:
            return scheduler_.has_work();
        case PauseState::kPausedNew:
            return scheduler_.num_running() > 0;
        case PauseState::kPausedAll:
            return false;
    }
    return false;
}

wire::LoadSnapshot EngineCore::Load() const noexcept {
    return scheduler_.Load();
}

Result<bool> EngineCore::Step() {
    if (!runnable()) {
        Flush(scheduler_.Load());
        AnswerWhenDrained();
        return false;
    }
    const StepPlan& plan = scheduler_.Plan();
    RG_CHECK(!plan.empty());
    const wire::LoadSnapshot before = config_.stale_load ? scheduler_.Load() : wire::LoadSnapshot{};
    result_.items.clear();
    const std::size_t items = plan.items.size();
    if (Status ran = runner_.Run(plan, result_); !ran.ok()) {
        return ran.error();
    }
    RG_CHECK(result_.items.size() == items);
    counters_.steps += 1;
    const std::size_t first = rows_.size();
    scheduler_.Advance(result_, rows_);
    for (std::size_t i = first; i < rows_.size(); ++i) {
        const Sequence& sequence = *rows_[i].sequence;
        counters_.tokens += 1;
        if (sequence.finish != FinishReason::kNone) {
            counters_.finished += 1;
            counters_.failed += sequence.finish == FinishReason::kError ? 1 : 0;
        }
    }
    Flush(config_.stale_load ? before : scheduler_.Load());
    AnswerWhenDrained();
    return true;
}

void EngineCore::Flush(const wire::LoadSnapshot& load) {
    const TimePoint now = clock_.Now();
    PrefixStats prefix = scheduler_.PeekPrefixStats();
    prefix.reset = prefix_reset_;
    StepReport report;
    report.engine_index = config_.engine_index;
    report.load = load;
    report.monotonic_seconds = std::chrono::duration<double>(now.time_since_epoch()).count();
    report.name_finished = config_.has_coordinator;
    bool prefix_told = false;
    for (std::int32_t client = 0; client < config_.num_clients; ++client) {
        report.client = client;
        report.rows = rows_;
        if (config_.num_clients > 1) {
            client_rows_.clear();
            for (const Row& row : rows_) {
                if (row.sequence->request.client_index == client) {
                    client_rows_.push_back(row);
                }
            }
            report.rows = client_rows_;
        }
        report.also_finished.clear();
        for (auto& [owner, id] : ended_) {
            if (owner == client) {
                report.also_finished.push_back(std::move(id));
            }
        }
        Told& told = told_[static_cast<std::size_t>(client)];
        const bool changed = !config_.stale_load && !SameLoad(load, told.load);
        // Going idle is told at once: after it there may be no message for hours. Other changes without
        // tokens are rate-limited.
        const bool load_due =
            changed && ((Idle(load) && !Idle(told.load)) || now - told.when >= config_.load_interval);
        if (report.rows.empty() && report.also_finished.empty() && !load_due) {
            continue;
        }
        report.prefix = prefix_told ? PrefixStats{} : prefix;
        const std::size_t before = outbox_.size();
        codec_->EncodeStep(report, load_due, outbox_);
        if (outbox_.size() > before) {
            told.load = load;
            told.when = now;
            prefix_told = true;
        }
    }
    if (prefix_told) {
        scheduler_.TakePrefixStats();
        prefix_reset_ = false;
    }
    if (config_.has_coordinator && (load.num_running != told_running_ || load.num_waiting != told_waiting_)) {
        told_running_ = load.num_running;
        told_waiting_ = load.num_waiting;
        report.client = -1;
        report.rows = {};
        report.also_finished.clear();
        report.prefix = PrefixStats{};
        codec_->EncodeStep(report, true, outbox_);
    }
    rows_.clear();
    refused_.clear();
    ended_.clear();
}

TimePoint EngineCore::next_due() const noexcept {
    if (!rows_.empty() || !ended_.empty()) {
        return TimePoint{};
    }
    TimePoint due = TimePoint::max();
    const wire::LoadSnapshot load = scheduler_.Load();
    for (const Told& told : told_) {
        if (!config_.stale_load && !SameLoad(load, told.load)) {
            due = std::min(due,
                           Idle(load) && !Idle(told.load) ? TimePoint{} : told.when + config_.load_interval);
        }
    }
    return due;
}

std::string PackInput(std::uint8_t type, std::int32_t client, std::string_view payload) {
    std::string packed;
    packed.reserve(5 + payload.size());
    packed.push_back(static_cast<char>(type));
    for (int shift = 0; shift < 32; shift += 8) {
        packed.push_back(static_cast<char>((static_cast<std::uint32_t>(client) >> shift) & 0xff));
    }
    packed.append(payload);
    return packed;
}

void ApplyPackedInput(EngineCore& core, std::string_view packed) {
    if (packed.size() < 5) {
        return;
    }
    std::uint32_t client = 0;
    for (std::size_t i = 0; i < 4; ++i) {
        client |= static_cast<std::uint32_t>(static_cast<unsigned char>(packed[1 + i])) << (8 * i);
    }
    core.OnInput(static_cast<std::uint8_t>(packed[0]), packed.substr(5), {},
                 static_cast<std::int32_t>(client));
}

}  // namespace rankgate::engine
