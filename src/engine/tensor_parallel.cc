// SPDX-License-Identifier: Apache-2.0
#include "engine/tensor_parallel.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "base/log.h"
#include "relay/relay.h"
#include "wire/msgpack.h"

namespace rankgate::engine {

namespace {

constexpr Duration kReapFor = std::chrono::seconds(5);
constexpr relay::Seconds kFinishBudget{5.0};

Error ErrorOf(const relay::Failure& failure) {
    return Error{ErrorCode::kEngineError, "tensor-parallel relay: " + failure.Describe(), {}, false};
}

relay::Config ConfigOf(const TensorParallelConfig& tensor) {
    relay::Config config;
    config.rank = tensor.rank;
    config.size = tensor.size;
    config.where = tensor.where;
    config.epoch = tensor.epoch;
    config.join = relay::Seconds{tensor.join_s};
    config.max_frame = relay::kMaxFrameLimit;
    config.publish_stall = relay::Seconds{tensor.stall_s};
    config.stall_after = relay::Seconds{tensor.stall_s};
    config.digest = true;
    // A rank that waits for inputs (or sleeps in a step) learns of a failure at once.
    config.on_failure = [](const relay::Failure&) { Rank::WakeFromSignal(); };
    return config;
}

relay::Frame FrameOf(std::string_view bytes) {
    return {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()};
}
std::string_view BytesOf(relay::Frame frame) {
    return {reinterpret_cast<const char*>(frame.data()), frame.size()};
}

/// The followers' processes. Whatever way rank 0 goes, they go too (parent death signal), and are reaped here
/// when it can.
class Followers {
  public:
    Followers() = default;
    Followers(const Followers&) = delete;
    Followers& operator=(const Followers&) = delete;
    ~Followers() { Reap(Duration{0}); }

    Status Start(const TensorParallelConfig& tensor) {
        for (int rank = 1; rank < tensor.size; ++rank) {
            std::vector<std::string> arguments{"rankgate", "engine"};
            arguments.insert(arguments.end(), tensor.arguments.begin(), tensor.arguments.end());
            for (const std::string& extra :
                 {std::string{"--tensor-parallel-rank"}, std::to_string(rank), std::string{"--relay-where"},
                  tensor.where, std::string{"--relay-epoch"}, std::to_string(tensor.epoch)}) {
                arguments.push_back(extra);
            }
            std::vector<char*> argv;
            argv.reserve(arguments.size() + 1);
            for (std::string& argument : arguments) {
                argv.push_back(argument.data());
            }
            argv.push_back(nullptr);
            const pid_t parent = ::getpid();
            const pid_t child = ::fork();
            if (child < 0) {
                return Error{ErrorCode::kUnavailable,
                             std::string{"cannot start a tensor-parallel rank: "} + std::strerror(errno),
                             {},
                             false};
            }
            if (child == 0) {
                ::prctl(PR_SET_PDEATHSIG, SIGKILL);
                if (::getppid() != parent) {
                    ::_exit(kExitFailure);  // the parent died before the line above
                }
                ::execv("/proc/self/exe", argv.data());
                ::_exit(kExitFailure);
            }
            children_.emplace_back(rank, child);
        }
        return Status::Ok();
    }

    /// Rank of a follower that ended, -1 = all run.
    int FirstEnded() {
        for (auto& [rank, pid] : children_) {
            if (pid > 0 && ::waitpid(pid, nullptr, WNOHANG) == pid) {
                pid = -1;
                return rank;
            }
        }
        return -1;
    }

    /// Waits for all of them; who is not gone in time is killed.
    void Reap(Duration limit) {
        const TimePoint until = std::chrono::steady_clock::now() + limit;
        for (auto& [rank, pid] : children_) {
            while (pid > 0 && ::waitpid(pid, nullptr, WNOHANG) == 0) {
                if (std::chrono::steady_clock::now() >= until) {
                    ::kill(pid, SIGKILL);
                    ::waitpid(pid, nullptr, 0);
                    break;
                }
                std::this_thread::sleep_for(std::chrono::milliseconds(5));
            }
            pid = -1;
        }
    }

  private:
    std::vector<std::pair<int, pid_t>> children_;
};

/// The first frame of the first step: what a follower's core must know of the leader's.
std::string PackCoreConfig(const CoreConfig& config) {
    std::string bytes;
    wire::Writer writer{bytes};
    writer.Array(6);
    writer.Int(config.engine_index);
    writer.Int(config.num_clients);
    writer.Bool(config.has_coordinator);
    writer.Int(config.scheduler.max_model_len);
    writer.Int(config.scheduler.num_gpu_blocks);
    writer.Int(config.scheduler.max_num_seqs);
    return bytes;
}

Status UnpackCoreConfig(std::string_view bytes, CoreConfig& config) {
    wire::Reader reader{bytes};
    std::uint32_t count = 0;
    std::int64_t length = 0;
    std::int64_t blocks = 0;
    std::int64_t seqs = 0;
    if (!reader.ReadArray(count) || count != 6 || !reader.ReadInt32(config.engine_index) ||
        !reader.ReadInt32(config.num_clients) || !reader.ReadBool(config.has_coordinator) ||
        !reader.ReadInt(length) || !reader.ReadInt(blocks) || !reader.ReadInt(seqs) ||
        config.num_clients < 1) {
        return Error{ErrorCode::kDecode, "the leader's first step is not a configuration", {}, false};
    }
    if (length != config.scheduler.max_model_len || blocks != config.scheduler.num_gpu_blocks ||
        seqs != config.scheduler.max_num_seqs) {
        return Error{ErrorCode::kConflict, "this rank's model or limits differ from the leader's", {}, false};
    }
    return Status::Ok();
}

class RelayMirror final : public StepMirror {
  public:
    RelayMirror(relay::Leader& leader, const std::atomic<int>& stop) : leader_{leader}, stop_{stop} {}

    Status Begin(const CoreConfig& config) override {
        const std::string packed = PackCoreConfig(config);
        const std::string_view frame{packed};
        return Send({&frame, 1});
    }
    Status Publish(std::span<const std::string_view> inputs) override { return Send(inputs); }
    Status SetDigest(std::uint64_t digest) override {
        if (interrupted_) {
            return Status::Ok();
        }
        relay::Status set = leader_.SetDigest(digest);
        return set.ok() ? Status::Ok() : Status{ErrorOf(set.failure())};
    }

    Status Check() override {
        relay::Status healthy = leader_.Check();
        return healthy.ok() ? Status::Ok() : Status{ErrorOf(healthy.failure())};
    }

  private:
    Status Send(std::span<const std::string_view> inputs) {
        frames_.clear();
        for (const std::string_view input : inputs) {
            frames_.push_back(FrameOf(input));
        }
        std::uint64_t number = 0;
        relay::Result<relay::Wait> sent =
            leader_.Publish(frames_, &number, [this] { return stop_.load() != 0; });
        if (!sent.ok()) {
            return ErrorOf(sent.failure());
        }
        // Interrupted: the step went to nobody, and the loop ends before another one.
        interrupted_ = *sent == relay::Wait::kInterrupted;
        return Status::Ok();
    }

    relay::Leader& leader_;
    const std::atomic<int>& stop_;
    std::vector<relay::Frame> frames_;
    bool interrupted_{false};
};

int RunLeader(const RankConfig& config, TensorParallelConfig tensor, ModelRunner& runner, const Clock& clock,
              const std::atomic<int>& stop) {
    std::random_device random;
    const auto word = [&random] { return (std::uint64_t{random()} << 32) | random(); };
    // No file: whoever is killed when, nothing stays behind.
    tensor.where = "@rankgate-tp-" + std::to_string(word()) + "-" + std::to_string(word());
    tensor.epoch = word() | 1;
    int code = kExitFailure;
    {
        Followers followers;
        relay::Leader leader{ConfigOf(tensor)};
        if (Status started = followers.Start(tensor); !started.ok()) {
            LogError("tensor_parallel_failed", {{"why", started.error().message}});
        } else {
            int ended = -1;
            relay::Result<std::optional<relay::JoinReport>> joined = leader.Join([&] {
                ended = ended >= 0 ? ended : followers.FirstEnded();
                return ended >= 0 || stop.load() != 0;
            });
            if (!joined.ok()) {
                LogError("tensor_parallel_failed", {{"why", joined.failure().Describe()}});
            } else if (!joined->has_value()) {
                // A Ctrl-C ends ranks that still load, too: that is its doing, not theirs.
                if (stop.load() != 0) {
                    code = stop.load() == SIGINT ? kExitInterrupted : kExitOk;
                } else {
                    LogError("tensor_parallel_failed",
                             {{"why", "a rank ended before it joined"}, {"rank", ended}});
                }
            } else {
                LogInfo("tensor_parallel_joined",
                        {{"ranks", tensor.size}, {"seconds", (*joined)->elapsed_s}});
                RelayMirror mirror{leader, stop};
                Rank rank{config, runner, clock};
                code = rank.Run(stop, &mirror);
                if (code == kExitOk || code == kExitInterrupted) {
                    (void)leader.Finish(kFinishBudget).ok();
                }
            }
        }
        leader.Close();
        followers.Reap(kReapFor);
    }
    return code;
}

int RunFollower(const RankConfig& config, const TensorParallelConfig& tensor, ModelRunner& runner,
                const Clock& clock) {
    // A Ctrl-C reaches the whole foreground group; the leader ends us in order, or our parent's death does.
    ::signal(SIGINT, SIG_IGN);
    ::signal(SIGTERM, SIG_IGN);
    ::signal(SIGHUP, SIG_IGN);
    relay::Config relay_config = ConfigOf(tensor);
    relay_config.parent_death_signal = SIGKILL;
    relay::Follower follower{relay_config};
    const auto failed = [&](const std::string& why) {
        LogError("tensor_parallel_rank_ended", {{"rank", tensor.rank}, {"why", why}});
        follower.Close();
        return kExitDied;
    };
    relay::Result<std::optional<relay::JoinReport>> joined = follower.Join();
    if (!joined.ok()) {
        return failed(joined.failure().Describe());
    }
    std::unique_ptr<EngineCore> core;
    relay::Step step;
    while (true) {
        relay::Result<relay::Wait> waited = follower.NextStep(std::nullopt, &step);
        if (!waited.ok()) {
            if (waited.failure().code == relay::Code::kClosed) {
                (void)follower.Finish(kFinishBudget).ok();
                follower.Close();
                return kExitOk;
            }
            return failed(waited.failure().Describe());
        }
        if (*waited != relay::Wait::kReady) {
            continue;
        }
        if (core == nullptr) {
            CoreConfig core_config;
            core_config.dialect = config.dialect;
            core_config.scheduler = config.scheduler;
            if (Status read =
                    UnpackCoreConfig(step.size() == 1 ? BytesOf(step[0]) : std::string_view{}, core_config);
                !read.ok()) {
                follower.Fail(relay::Code::kRemoteFailure, read.error().message);
                return failed(read.error().message);
            }
            core = std::make_unique<EngineCore>(core_config, runner, clock);
            continue;
        }
        for (std::size_t i = 0; i < step.size(); ++i) {
            ApplyPackedInput(*core, BytesOf(step[i]));
        }
        Result<bool> stepped = core->Step();
        core->outbox().Clear();
        if (!stepped.ok()) {
            follower.Fail(relay::Code::kRemoteFailure, stepped.error().message);
            return failed(stepped.error().message);
        }
        if (relay::Status set = follower.SetDigest(core->Digest()); !set.ok()) {
            return failed(set.failure().Describe());
        }
    }
}

}  // namespace

int RunTensorParallel(const RankConfig& config, const TensorParallelConfig& tensor, ModelRunner& runner,
                      const Clock& clock, const std::atomic<int>& stop) {
    return tensor.rank == 0 ? RunLeader(config, tensor, runner, clock, stop)
                            : RunFollower(config, tensor, runner, clock);
}

}  // namespace rankgate::engine
