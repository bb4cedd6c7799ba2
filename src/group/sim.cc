// SPDX-License-Identifier: Apache-2.0
// See sim.h. A rank is a continuous-batching engine in fluid time: a step costs a base, a share per running
// sequence and a share per prompt token; prompts are chunked into the step's token budget; KV pages are
// reserved at admission. The gateway is the product's own GroupCore. What changes between the rows of the
// table is only what it gets to hear about the ranks.
#include "group/sim.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <queue>
#include <string>
#include <vector>

#include "group/core.h"

namespace rankgate::group {
namespace {

using std::chrono::duration;
using std::chrono::duration_cast;
using std::chrono::microseconds;
using std::chrono::milliseconds;

enum class Knowledge : std::uint8_t { kBlind, kOwn, kPiggyback, kLoadOnly, kMailbox, kOracle };
constexpr std::array<std::string_view, 6> kKnowledge{
    "round robin", "own in-flight only", "stale piggyback", "load-only batches", "mailbox", "oracle"};
enum class Trace : std::uint8_t { kSteady, kBurst, kLongPrompts, kShared };
constexpr std::array<std::string_view, 4> kTraces{"steady", "burst", "long-prompts", "shared"};

struct SimOptions {
    int ranks{4};
    int seconds{60};
    int seeds{3};
    double load{1.0};  // scales every arrival rate
    int trace{-1};     // -1 = all
};

constexpr std::int64_t kStepTokens = 8192;
constexpr std::size_t kMaxRunning = 64;
constexpr std::int64_t kPage = 16;
constexpr std::int64_t kPages = 8192;
constexpr Duration kStepBase = milliseconds{5};
constexpr Duration kPerSequence = microseconds{25};
constexpr Duration kPerPromptToken = microseconds{50};
constexpr Duration kWireDelay = microseconds{100};
constexpr Duration kLoadOnlyEvery = milliseconds{100};

struct Rng {
    std::uint64_t state;
    double Uniform() noexcept {
        state += 0x9e3779b97f4a7c15ULL;
        return (static_cast<double>(Mix(state) >> 11) + 0.5) * 0x1p-53;
    }
    double Exponential(double mean) noexcept { return -mean * std::log(Uniform()); }
    std::int64_t Length(double mean, std::int64_t most) noexcept {
        return std::clamp<std::int64_t>(static_cast<std::int64_t>(Exponential(mean)), 1, most);
    }
};

struct Arrival {
    double at;  // seconds
    std::int64_t prompt;
    std::int64_t output;
    std::int32_t hidden_rank{-1};  // >= 0: another gateway's, already placed
};

std::vector<Arrival> MakeTrace(Trace trace, const SimOptions& options, std::uint64_t seed) {
    Rng rng{Mix(seed * 7919 + static_cast<std::uint64_t>(trace))};
    std::vector<Arrival> arrivals;
    const double scale = options.load * options.ranks / 4.0;
    const auto poisson = [&](double rate, auto make) {
        // Simulated time, and no count: NOLINTNEXTLINE(clang-analyzer-security.FloatLoopCounter)
        for (double t = rng.Exponential(1 / rate); t < options.seconds; t += rng.Exponential(1 / rate)) {
            arrivals.push_back(make(t));
        }
    };
    const auto chat = [&](double t) { return Arrival{t, rng.Length(500, 4000), rng.Length(100, 800)}; };
    switch (trace) {
        case Trace::kSteady:
            poisson(60 * scale, chat);
            break;
        case Trace::kBurst:
            poisson(20 * scale, chat);
            // NOLINTNEXTLINE(clang-analyzer-security.FloatLoopCounter)
            for (double t = 1; t < options.seconds; t += rng.Exponential(2.0)) {
                for (int i = 0; i < static_cast<int>(50 * scale); ++i) {
                    arrivals.push_back(chat(t));
                }
            }
            break;
        case Trace::kLongPrompts:
            poisson(30 * scale, [&](double t) {
                return rng.Uniform() < 0.04 ? Arrival{t, 15'000 + rng.Length(15'000, 60'000), 60}
                                            : Arrival{t, rng.Length(200, 2000), rng.Length(60, 400)};
            });
            break;
        case Trace::kShared:
            // Half of the work comes through another gateway that sticks to a few ranks for a while, then
            // moves.
            poisson(30 * scale, chat);
            poisson(30 * scale, [&](double t) {
                Arrival a = chat(t);
                const auto favourite = static_cast<int>(t / 4.0) % options.ranks;
                a.hidden_rank = rng.Uniform() < 0.7
                                    ? favourite
                                    : static_cast<std::int32_t>(rng.Uniform() * options.ranks);
                return a;
            });
            break;
    }
    std::stable_sort(arrivals.begin(), arrivals.end(),
                     [](const Arrival& a, const Arrival& b) { return a.at < b.at; });
    return arrivals;
}

struct Sequence {
    std::string id;  // empty: another gateway's
    std::size_t arrival;
    std::int64_t prompt_left;
    std::int64_t output_left;
    std::int64_t pages;
    bool started{false};
};

struct SimRankState {
    std::deque<Sequence> waiting;
    std::vector<Sequence> running;
    std::int64_t pages_used{0};
    bool stepping{false};
    wire::LoadSnapshot planned;  // sampled after planning, as upstream does
    wire::LoadSnapshot sampled;  // sampled after the step's finishes
    TimePoint sampled_at{};
    TimePoint load_sent_at{};
    wire::LoadSnapshot load_sent;
    std::vector<std::pair<std::size_t, std::int64_t>> prefill;  // this step: running index, tokens

    wire::LoadSnapshot Sample() const {
        wire::LoadSnapshot load;
        load.num_running = static_cast<std::int64_t>(running.size());
        load.num_waiting = static_cast<std::int64_t>(waiting.size());
        load.kv_active_pages = pages_used;
        load.kv_total_pages = kPages;
        return load;
    }
    double WorkAhead() const {  // seconds until a newcomer's prompt is through, roughly
        double tokens = 0;
        for (const Sequence& s : running) {
            tokens += static_cast<double>(s.prompt_left);
        }
        for (const Sequence& s : waiting) {
            tokens += static_cast<double>(s.prompt_left);
        }
        const double step =
            duration<double>(kStepBase + kPerSequence * static_cast<std::int64_t>(running.size())).count();
        const double queue =
            running.size() + waiting.size() >= kMaxRunning
                ? static_cast<double>(running.size() + waiting.size() - kMaxRunning + 1) * 0.05
                : 0;
        return tokens * duration<double>(kPerPromptToken).count() + step + queue;
    }
};

struct Metrics {
    double mean_ttft_ms{0};
    double p99_ttft_ms{0};
    double imbalance{0};
};

class Simulation {
  public:
    Simulation(const SimOptions& options, Knowledge knowledge, const std::vector<Arrival>& arrivals,
               bool shared)
        : options_{options},
          knowledge_{knowledge},
          arrivals_{arrivals},
          core_{Config(options, shared)},
          ranks_(static_cast<std::size_t>(options.ranks)) {
        for (std::int32_t r = 0; r < options.ranks; ++r) {
            RankFacts facts;
            facts.max_num_batched_tokens = kStepTokens;
            (void)core_.RankRegistered(r, facts, now_);
            core_.RankUp(r, now_);
        }
        Execute();
    }

    Metrics Run() {
        for (std::size_t i = 0; i < arrivals_.size(); ++i) {
            events_.push({At(arrivals_[i].at), order_++, Event::kArrive, 0, i});
        }
        for (int t = 0; t < options_.seconds * 10; ++t) {
            events_.push({At(t * 0.1), order_++, Event::kProbe, 0, 0});
        }
        while (!events_.empty()) {
            const Event event = events_.top();
            events_.pop();
            now_ = event.at;
            switch (event.kind) {
                case Event::kArrive:
                    Arrive(event.index);
                    break;
                case Event::kAdd:
                    Add(event.rank, event.index);
                    break;
                case Event::kStepEnd:
                    StepEnd(event.rank);
                    break;
                case Event::kOutput:
                    Deliver(event.index);
                    break;
                case Event::kProbe:
                    Probe();
                    break;
            }
        }
        Metrics metrics;
        if (!ttft_ms_.empty()) {
            for (const double t : ttft_ms_) {
                metrics.mean_ttft_ms += t / static_cast<double>(ttft_ms_.size());
            }
            const std::size_t at = std::min(ttft_ms_.size() - 1, ttft_ms_.size() * 99 / 100);
            std::nth_element(ttft_ms_.begin(), ttft_ms_.begin() + static_cast<std::ptrdiff_t>(at),
                             ttft_ms_.end());
            metrics.p99_ttft_ms = ttft_ms_[at];
        }
        metrics.imbalance = probes_ > 0 ? spread_ / static_cast<double>(probes_) : 0;
        return metrics;
    }

  private:
    struct Event {
        enum Kind : std::uint8_t { kArrive, kAdd, kStepEnd, kOutput, kProbe };
        TimePoint at;
        std::uint64_t order;
        Kind kind;
        std::int32_t rank;
        std::size_t index;
        bool operator<(const Event& other) const {
            return at != other.at ? at > other.at : order > other.order;
        }
    };
    struct Message {
        std::int32_t rank;
        std::vector<std::pair<std::string, bool>> rows;  // id, terminal
        bool has_load;
        wire::LoadSnapshot load;
    };

    static CoreConfig Config(const SimOptions& options, bool shared) {
        CoreConfig config;
        config.size = options.ranks;
        config.sole_feeder = !shared;
        config.max_requests = 1 << 20;
        return config;
    }
    static TimePoint At(double seconds) {
        return TimePoint{} + std::chrono::hours{1} + duration_cast<Duration>(duration<double>(seconds));
    }
    SimRankState& Rank(std::int32_t r) { return ranks_[static_cast<std::size_t>(r)]; }

    void Arrive(std::size_t index) {
        const Arrival& a = arrivals_[index];
        if (a.hidden_rank >= 0) {
            events_.push({now_ + kWireDelay, order_++, Event::kAdd, a.hidden_rank, index});
            return;
        }
        auto request = std::make_unique<wire::GenerateRequest>();
        request->id = std::to_string(index);
        request->prompt_token_ids.resize(static_cast<std::size_t>(a.prompt));
        if (knowledge_ == Knowledge::kMailbox) {
            for (std::int32_t r = 0; r < options_.ranks; ++r) {
                if (Rank(r).sampled_at != TimePoint{}) {
                    core_.MailboxLoad(r, Rank(r).sampled, Rank(r).sampled_at);
                }
            }
        } else if (knowledge_ == Knowledge::kBlind) {
            request->data_parallel_rank =
                static_cast<std::int32_t>(index % static_cast<std::size_t>(options_.ranks));
        } else if (knowledge_ == Knowledge::kOracle) {
            std::int32_t best = 0;
            for (std::int32_t r = 1; r < options_.ranks; ++r) {
                best = Rank(r).WorkAhead() + Pending(r) < Rank(best).WorkAhead() + Pending(best) ? r : best;
            }
            request->data_parallel_rank = best;
        }
        core_.Submit(0, index, std::move(request), now_);
        Execute();
    }

    /// Requests on their way to a rank, in seconds of prompt.
    double Pending(std::int32_t r) const {
        return on_the_way_.empty() ? 0 : on_the_way_[static_cast<std::size_t>(r)];
    }

    void Execute() {
        core_.Flush();
        on_the_way_.resize(ranks_.size());
        for (Action action; core_.PopAction(action);) {
            if (action.kind == ActionKind::kSendAdd) {
                const auto index = static_cast<std::size_t>(std::stoull(action.request->id));
                ids_.resize(std::max(ids_.size(), index + 1));
                ids_[index] = action.request->id;
                on_the_way_[static_cast<std::size_t>(action.rank)] +=
                    static_cast<double>(arrivals_[index].prompt) * duration<double>(kPerPromptToken).count();
                events_.push({now_ + kWireDelay, order_++, Event::kAdd, action.rank, index});
            } else if (action.kind == ActionKind::kDeliver) {
                const auto index = static_cast<std::size_t>(action.stream);
                if (!first_token_.contains(index)) {
                    first_token_.insert(index);
                    ttft_ms_.push_back(duration<double, std::milli>(now_ - At(arrivals_[index].at)).count());
                }
            }
        }
    }

    void Add(std::int32_t r, std::size_t index) {
        const Arrival& a = arrivals_[index];
        const bool ours = a.hidden_rank < 0;
        if (ours) {
            on_the_way_[static_cast<std::size_t>(r)] -=
                static_cast<double>(a.prompt) * duration<double>(kPerPromptToken).count();
        }
        Rank(r).waiting.push_back({ours ? ids_[index] : std::string{}, index, a.prompt, a.output,
                                   (a.prompt + a.output + kPage - 1) / kPage});
        if (!Rank(r).stepping) {
            StepBegin(r);
        }
    }

    void StepBegin(std::int32_t r) {
        SimRankState& rank = Rank(r);
        std::int64_t budget = kStepTokens;
        rank.prefill.clear();
        std::int64_t decoding = 0;
        for (std::size_t i = 0; i < rank.running.size(); ++i) {
            if (rank.running[i].prompt_left == 0) {
                --budget;
                ++decoding;
            }
        }
        for (std::size_t i = 0; i < rank.running.size() && budget > 0; ++i) {
            Chunk(rank, i, budget);
        }
        while (!rank.waiting.empty() && budget > 0 && rank.running.size() < kMaxRunning &&
               (rank.pages_used + rank.waiting.front().pages <= kPages || rank.running.empty())) {
            rank.pages_used += rank.waiting.front().pages;
            rank.running.push_back(std::move(rank.waiting.front()));
            rank.waiting.pop_front();
            Chunk(rank, rank.running.size() - 1, budget);
        }
        rank.planned = rank.Sample();
        if (rank.running.empty()) {
            rank.stepping = false;
            return;
        }
        rank.stepping = true;
        std::int64_t prompt_tokens = 0;
        for (const auto& [index, tokens] : rank.prefill) {
            prompt_tokens += tokens;
        }
        const Duration cost = kStepBase + kPerSequence * decoding + kPerPromptToken * prompt_tokens;
        events_.push({now_ + cost, order_++, Event::kStepEnd, r, 0});
    }
    static void Chunk(SimRankState& rank, std::size_t i, std::int64_t& budget) {
        const std::int64_t tokens = std::min(budget, rank.running[i].prompt_left);
        if (tokens > 0) {
            rank.prefill.emplace_back(i, tokens);
            budget -= tokens;
        }
    }

    void StepEnd(std::int32_t r) {
        SimRankState& rank = Rank(r);
        Message message{r, {}, false, {}};
        for (const auto& [i, tokens] : rank.prefill) {
            rank.running[i].prompt_left -= tokens;
        }
        std::vector<Sequence> left;
        for (Sequence& s : rank.running) {
            const bool emits = s.prompt_left == 0;
            if (emits) {
                --s.output_left;
                if (!s.id.empty()) {
                    message.rows.emplace_back(s.id, s.output_left <= 0);
                }
            }
            if (emits && s.output_left <= 0) {
                rank.pages_used -= s.pages;
            } else {
                left.push_back(std::move(s));
            }
        }
        rank.running.swap(left);
        rank.sampled = rank.Sample();
        rank.sampled_at = now_;
        Attach(rank, message);
        if (!message.rows.empty() || message.has_load) {
            messages_.push_back(std::move(message));
            events_.push({now_ + kWireDelay, order_++, Event::kOutput, r, messages_.size() - 1});
        }
        StepBegin(r);
        if (knowledge_ == Knowledge::kMailbox) {
            rank.sampled = rank.Sample();  // the scheduler publishes after planning too
            rank.sampled_at = now_ + Duration{1};
        }
    }

    void Attach(SimRankState& rank, Message& message) {
        if (knowledge_ == Knowledge::kPiggyback) {
            message.has_load = !message.rows.empty();
            message.load = rank.planned;
        } else if (knowledge_ == Knowledge::kLoadOnly || knowledge_ == Knowledge::kMailbox) {
            const bool idle = rank.running.empty() && rank.waiting.empty();
            const bool changed = rank.sampled.num_running != rank.load_sent.num_running ||
                                 rank.sampled.num_waiting != rank.load_sent.num_waiting ||
                                 rank.sampled.kv_active_pages != rank.load_sent.kv_active_pages;
            message.has_load =
                !message.rows.empty() || (changed && (idle || now_ - rank.load_sent_at >= kLoadOnlyEvery));
            message.load = rank.sampled;
            if (message.has_load) {
                rank.load_sent = rank.sampled;
                rank.load_sent_at = now_;
            }
        }
    }

    void Deliver(std::size_t index) {
        const Message& message = messages_[index];
        rows_.clear();
        for (const auto& [id, terminal] : message.rows) {
            StepOutput& row = rows_.emplace_back();
            row.request_id = id;
            row.num_tokens = 1;
            row.finish_reason = terminal ? wire::FinishReason::kLength : wire::FinishReason::kNone;
        }
        EngineStep step;
        step.rank = message.rank;
        step.outputs = rows_;
        step.load = message.has_load ? &message.load : nullptr;
        core_.OnStep(step, now_);
        Execute();
        messages_[index].rows.clear();
        messages_[index].rows.shrink_to_fit();
    }

    void Probe() {
        double most = 0;
        double sum = 0;
        for (const SimRankState& rank : ranks_) {
            const auto n = static_cast<double>(rank.running.size() + rank.waiting.size());
            most = std::max(most, n);
            sum += n;
        }
        spread_ += most - sum / static_cast<double>(ranks_.size());
        ++probes_;
    }

    struct IndexSet {
        std::vector<bool> bits;
        bool contains(std::size_t i) const { return i < bits.size() && bits[i]; }
        void insert(std::size_t i) {
            if (i >= bits.size()) {
                bits.resize(i * 2 + 64);
            }
            bits[i] = true;
        }
    };

    SimOptions options_;
    Knowledge knowledge_;
    const std::vector<Arrival>& arrivals_;
    TimePoint now_{At(0)};
    GroupCore<VllmProtocol> core_;
    std::vector<SimRankState> ranks_;
    std::priority_queue<Event> events_;
    std::uint64_t order_{0};
    std::vector<Message> messages_;
    std::vector<StepOutput> rows_;
    std::vector<std::string> ids_;
    std::vector<double> on_the_way_;
    IndexSet first_token_;
    std::vector<double> ttft_ms_;
    double spread_{0};
    std::uint64_t probes_{0};
};

constexpr char kUsage[] =
    "usage: rankgate sim [--ranks N] [--seconds S] [--seeds K] [--load F] [--trace "
    "steady|burst|long-prompts|shared]\n"
    "Routes a trace through the real rank choice in front of simulated ranks, once per source of load "
    "knowledge,\n"
    "and prints mean and p99 time to first token (ms) and imbalance (requests on the fullest rank above the "
    "mean).\n";

int Bad(const char* flag, const char* value, const char* allowed) {
    std::fprintf(stderr, "rankgate sim: %s %s: %s\n%s", flag, value, allowed, kUsage);
    return 2;
}

template <class T>
bool Parse(const char* text, T least, T most, T& out) {
    const char* end = text + std::strlen(text);
    const auto [at, error] = std::from_chars(text, end, out);
    return error == std::errc{} && at == end && out >= least && out <= most;
}

}  // namespace

int SimMain(int argc, char** argv) {
    SimOptions options;
    for (int i = 1; i < argc; ++i) {
        const std::string_view flag = argv[i];
        if (flag == "--help" || flag == "-h") {
            std::fputs(kUsage, stdout);
            return 0;
        }
        if (i + 1 >= argc) {
            return Bad(argv[i], "", "needs a value, or is unknown");
        }
        const char* value = argv[++i];
        if (flag == "--ranks") {
            if (!Parse(value, 1, 64, options.ranks)) {
                return Bad("--ranks", value, "allowed are 1 to 64");
            }
        } else if (flag == "--seconds") {
            if (!Parse(value, 1, 3600, options.seconds)) {
                return Bad("--seconds", value, "allowed are 1 to 3600");
            }
        } else if (flag == "--seeds") {
            if (!Parse(value, 1, 100, options.seeds)) {
                return Bad("--seeds", value, "allowed are 1 to 100");
            }
        } else if (flag == "--load") {
            if (!Parse(value, 0.01, 10.0, options.load)) {
                return Bad("--load", value, "allowed are 0.01 to 10");
            }
        } else if (flag == "--trace") {
            for (std::size_t t = 0; t < kTraces.size(); ++t) {
                options.trace = kTraces[t] == value ? static_cast<int>(t) : options.trace;
            }
            if (options.trace < 0) {
                return Bad("--trace", value, "allowed are steady, burst, long-prompts, shared");
            }
        } else {
            return Bad(argv[i - 1], "", "is unknown");
        }
    }
    std::printf("%d ranks, %d s, %d seeds, load x %.2f\n\n", options.ranks, options.seconds, options.seeds,
                options.load);
    std::printf(
        "| trace | what the gateway knows | mean TTFT ms | p99 TTFT ms | imbalance |\n| --- | --- | ---: | "
        "---: | ---: |\n");
    for (std::size_t t = 0; t < kTraces.size(); ++t) {
        if (options.trace >= 0 && options.trace != static_cast<int>(t)) {
            continue;
        }
        for (std::size_t k = 0; k < kKnowledge.size(); ++k) {
            Metrics mean;
            for (int seed = 0; seed < options.seeds; ++seed) {
                const auto arrivals =
                    MakeTrace(static_cast<Trace>(t), options, static_cast<std::uint64_t>(seed));
                const Metrics m = Simulation{options, static_cast<Knowledge>(k), arrivals,
                                             static_cast<Trace>(t) == Trace::kShared}
                                      .Run();
                mean.mean_ttft_ms += m.mean_ttft_ms / options.seeds;
                mean.p99_ttft_ms += m.p99_ttft_ms / options.seeds;
                mean.imbalance += m.imbalance / options.seeds;
            }
            std::printf("| %s | %s | %.1f | %.1f | %.2f |\n", kTraces[t].data(), kKnowledge[k].data(),
                        mean.mean_ttft_ms, mean.p99_ttft_ms, mean.imbalance);
        }
    }
    return 0;
}

}  // namespace rankgate::group
