// SPDX-License-Identifier: Apache-2.0
// The relay's figures beside what engines use today, one process per rank, all in one run: last-follower
// latency, publish time, rate and losses, join, kill-to-told, idle CPU, and the machine's own floors. Prints
// a table and writes JSON. Usage: relay_bench [--full | --quick] [--rr] [--out FILE] [--only DESIGN]; --quick
// is the latency of 256 B alone. The ring's steps carry [send time][payload]; every rank stamps its arrivals
// into shared memory.
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zmq.h>
#ifdef RELAY_BENCH_GLOO
#include <gloo/broadcast.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>
#endif

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "relay/os.h"
#include "relay/relay.h"

namespace {

using namespace rankgate::relay;

constexpr std::size_t kMaxSamples = 20000;
constexpr int kMaxBenchRanks = 8;

std::int64_t NowNs() {
    timespec t{};
    ::clock_gettime(CLOCK_MONOTONIC, &t);
    return std::int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

void SleepUntil(std::int64_t at) {
    const timespec t{static_cast<time_t>(at / 1'000'000'000), static_cast<long>(at % 1'000'000'000)};
    while (::clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, nullptr) == EINTR) {
    }
}

/// What all ranks of one run write into; mapped before the fork.
struct Shared {
    std::atomic<std::int64_t> arrived[kMaxBenchRanks][kMaxSamples];
    std::atomic<std::uint64_t> counted[kMaxBenchRanks];
    std::atomic<int> ready;
    std::atomic<int> stop;
    std::atomic<std::int64_t> told[kMaxBenchRanks];
    std::atomic<std::int64_t> cpu_ns[kMaxBenchRanks];
    std::atomic<std::uint32_t> ping;
    std::atomic<std::uint32_t> pong;
};

Shared* MapShared() {
    void* p = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return new (p) Shared;
}

bool g_rr = false;
bool g_full = false;
bool g_quick = false;
int g_patience_ms = 2000;  // a frame that has not come by then is lost

void Prioritise() {
    if (g_rr) {
        sched_param param{};
        param.sched_priority = 10;
        if (::sched_setscheduler(0, SCHED_RR, &param) != 0) {
            std::perror("SCHED_RR");
            std::exit(1);
        }
    }
}

struct Spread {
    double p50{0};
    double p99{0};
    double max{0};
};
Spread SpreadOf(std::vector<double> values) {
    if (values.empty()) {
        return {};
    }
    std::sort(values.begin(), values.end());
    const auto at = [&](double q) {
        return values[static_cast<std::size_t>(q * static_cast<double>(values.size() - 1) + 0.5)];
    };
    return {at(0.5), at(0.99), values.back()};
}

std::string MakeFolder() {
    std::string name = "/tmp/relaybenchXXXXXX";
    if (::mkdtemp(name.data()) == nullptr) {
        std::perror("mkdtemp");
        std::exit(1);
    }
    return name;
}

/// One design under test: rank 0 sends a step of one frame, the others receive it. Made after the fork, in
/// each rank.
class Link {
  public:
    virtual ~Link() = default;
    virtual void Send(const std::string& frame) = 0;
    /// Receives one step's frame to `to`; false when it did not come within g_patience_ms (lost).
    virtual bool Receive(std::byte* to, std::size_t room) = 0;
};

class RelayLink final : public Link {
  public:
    RelayLink(int rank, int size, const std::string& where, Backend backend, int spin_us, int lag) {
        Config config;
        config.rank = rank;
        config.size = size;
        config.where = where;
        config.epoch = 1;
        config.backend = backend;
        config.spin_us = spin_us;
        config.max_lag_steps = lag;
        if (rank == 0) {
            leader_ = std::make_unique<Leader>(config);
            Must(leader_->Join());
        } else {
            follower_ = std::make_unique<Follower>(config);
            Must(follower_->Join());
        }
    }
    ~RelayLink() override {
        if (leader_) {
            Must(leader_->Finish(Seconds{20}));
        } else {
            Must(follower_->Finish(Seconds{20}));
        }
    }
    void Send(const std::string& frame) override {
        const Frame f = std::as_bytes(std::span{frame});
        std::uint64_t number = 0;
        Must(leader_->Publish(std::span{&f, 1}, &number));
    }
    bool Receive(std::byte* to, std::size_t room) override {
        Step step;
        auto got = follower_->NextStep(Seconds{g_patience_ms / 1000.0}, &step);
        Must(got);
        if (*got != Wait::kReady) {
            return false;
        }
        std::memcpy(to, step[0].data(), std::min(room, step[0].size()));
        return true;
    }

  private:
    template <class T>
    static void Must(const T& result) {
        if (!result) {
            std::fprintf(stderr, "relay: %s\n", result.failure().Describe().c_str());
            std::exit(1);
        }
    }
    std::unique_ptr<Leader> leader_;
    std::unique_ptr<Follower> follower_;
};

class ZmqLink : public Link {
  public:
    enum class Kind { kPub, kXpubNoDrop, kPush, kRouter };
    ZmqLink(int rank, int size, const std::string& where, Kind kind) : kind_{kind}, size_{size} {
        context_ = zmq_ctx_new();
        const auto open = [&](int type) {
            void* s = zmq_socket(context_, type);
            const int linger = 0;
            zmq_setsockopt(s, ZMQ_LINGER, &linger, sizeof linger);
            sockets_.push_back(s);
            return s;
        };
        const std::string address = "ipc://" + where;
        if (rank == 0) {
            if (kind == Kind::kPush) {
                for (int r = 1; r < size; ++r) {
                    zmq_bind(open(ZMQ_PUSH), (address + std::to_string(r)).c_str());
                }
            } else {
                void* s = open(kind == Kind::kPub          ? ZMQ_PUB
                               : kind == Kind::kXpubNoDrop ? ZMQ_XPUB
                                                           : ZMQ_ROUTER);
                const int on = 1;
                if (kind == Kind::kXpubNoDrop) {
                    zmq_setsockopt(s, ZMQ_XPUB_NODROP, &on, sizeof on);
                }
                if (kind == Kind::kRouter) {
                    zmq_setsockopt(s, ZMQ_ROUTER_MANDATORY, &on, sizeof on);
                }
                zmq_bind(s, address.c_str());
            }
        } else {
            void* s = open(kind == Kind::kPush ? ZMQ_PULL : kind == Kind::kRouter ? ZMQ_DEALER : ZMQ_SUB);
            const int retry = 2;
            zmq_setsockopt(s, ZMQ_RECONNECT_IVL, &retry, sizeof retry);
            if (kind == Kind::kRouter) {
                const char id = static_cast<char>(rank);
                zmq_setsockopt(s, ZMQ_ROUTING_ID, &id, 1);
            }
            if (kind == Kind::kPub || kind == Kind::kXpubNoDrop) {
                zmq_setsockopt(s, ZMQ_SUBSCRIBE, "", 0);
            }
            zmq_connect(s, (kind == Kind::kPush ? address + std::to_string(rank) : address).c_str());
        }
        // None of these designs knows when everybody is in: they are given a second, which their users do not
        // have.
        std::this_thread::sleep_for(std::chrono::seconds{1});
    }
    ~ZmqLink() override {
        std::this_thread::sleep_for(std::chrono::milliseconds{100});
        for (void* s : sockets_) {
            zmq_close(s);
        }
        zmq_ctx_term(context_);
    }
    void Send(const std::string& frame) override {
        switch (kind_) {
            case Kind::kPub:
            case Kind::kXpubNoDrop:
                while (zmq_send(sockets_[0], frame.data(), frame.size(), 0) < 0 && errno == EAGAIN) {
                }
                break;
            case Kind::kPush:
                for (void* s : sockets_) {
                    zmq_send(s, frame.data(), frame.size(), 0);
                }
                break;
            case Kind::kRouter:
                for (int r = 1; r < size_; ++r) {
                    const char id = static_cast<char>(r);
                    while (zmq_send(sockets_[0], &id, 1, ZMQ_SNDMORE) < 0 &&
                           (errno == EHOSTUNREACH || errno == EAGAIN)) {
                    }
                    zmq_send(sockets_[0], frame.data(), frame.size(), 0);
                }
                break;
        }
    }
    bool Receive(std::byte* to, std::size_t room) override {
        const int timeout = g_patience_ms;
        if (!set_) {
            zmq_setsockopt(sockets_[0], ZMQ_RCVTIMEO, &timeout, sizeof timeout);
            set_ = true;
        }
        return zmq_recv(sockets_[0], to, room, 0) >= 0;
    }

  protected:
    Kind kind_;
    int size_;
    bool set_{false};
    void* context_;
    std::vector<void*> sockets_;
};

#ifdef RELAY_BENCH_GLOO
/// The public design: the number of frames by a gloo broadcast every step, the frames by PUB/SUB.
class GlooPubLink final : public ZmqLink {
  public:
    GlooPubLink(int rank, int size, const std::string& where)
        : ZmqLink{rank, size, where, Kind::kPub}, rank_{rank} {
        gloo::transport::tcp::attr attr;
        attr.hostname = "127.0.0.1";
        auto device = gloo::transport::tcp::CreateDevice(attr);
        const std::string store = where + ".store";
        std::filesystem::create_directories(store);
        gloo::rendezvous::FileStore file_store{store};
        context_gloo_ = std::make_shared<gloo::rendezvous::Context>(rank, size);
        context_gloo_->connectFullMesh(file_store, device);
    }
    void Send(const std::string& frame) override {
        Count(1);
        ZmqLink::Send(frame);
    }
    bool Receive(std::byte* to, std::size_t room) override {
        return Count(0) == 0 || ZmqLink::Receive(to, room);
    }

  private:
    std::int64_t Count(std::int64_t n) {
        gloo::BroadcastOptions options{context_gloo_};
        options.setOutput(&n, 1);
        options.setRoot(0);
        gloo::broadcast(options);
        return n;
    }
    int rank_;
    std::shared_ptr<gloo::rendezvous::Context> context_gloo_;
};
#endif

using MakeLink = std::function<std::unique_ptr<Link>(int rank, int size, const std::string& where, int lag)>;

struct Design {
    std::string name;
    MakeLink make;
    bool lossless;
};

std::vector<Design> Designs() {
    const auto relay = [](Backend backend, int spin_us) -> MakeLink {
        return [=](int rank, int size, const std::string& where, int lag) {
            return std::make_unique<RelayLink>(rank, size, where, backend, spin_us, lag);
        };
    };
    const auto zmq = [](ZmqLink::Kind kind) -> MakeLink {
        return [=](int rank, int size, const std::string& where, int) {
            return std::make_unique<ZmqLink>(rank, size, where, kind);
        };
    };
    std::vector<Design> designs{{"ring", relay(Backend::kRing, -1), true},
                                {"ring, no pre-wake", relay(Backend::kRing, 0), true},
                                {"ring, spinning", relay(Backend::kRing, 1000), true},
                                {"unix stream", relay(Backend::kStream, -1), true},
                                {"PUB/SUB", zmq(ZmqLink::Kind::kPub), false},
                                {"XPUB + NODROP", zmq(ZmqLink::Kind::kXpubNoDrop), true},
                                {"PUSH/PULL", zmq(ZmqLink::Kind::kPush), true},
                                {"ROUTER/DEALER", zmq(ZmqLink::Kind::kRouter), true}};
#ifdef RELAY_BENCH_GLOO
    designs.push_back({"gloo count + PUB/SUB",
                       [](int rank, int size, const std::string& where, int) {
                           return std::make_unique<GlooPubLink>(rank, size, where);
                       },
                       false});
#endif
    return designs;
}

/// Forks `size` ranks; each runs `body` and exits. True if all ended well within two minutes.
bool RunRanks(int size, const std::function<void(int rank)>& body) {
    std::fflush(stdout);
    std::vector<pid_t> pids;
    for (int r = 0; r < size; ++r) {
        const pid_t pid = ::fork();
        if (pid == 0) {
            Prioritise();
            body(r);
            std::fflush(stdout);
            ::_exit(0);
        }
        pids.push_back(pid);
    }
    bool ok = true;
    const std::int64_t until = NowNs() + 120'000'000'000;
    for (const pid_t pid : pids) {
        int status = 0;
        pid_t done = 0;
        while ((done = ::waitpid(pid, &status, WNOHANG)) == 0 && NowNs() < until) {
            ::usleep(1000);
        }
        if (done == 0) {
            ::kill(pid, SIGKILL);
            ::waitpid(pid, &status, 0);
        }
        ok = ok && done == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0;
    }
    return ok;
}

struct Latency {
    Spread last;
    Spread publish;
    double cpu_us{0};  // of all ranks together, per step
    std::size_t lost{0};
    bool ok{false};
};

std::int64_t CpuNs() {
    timespec t{};
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return std::int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

/// Until everybody has everything, or nothing more has come for 1.5 s; returns when the last frame came.
std::int64_t AwaitAll(const Shared& shared, int followers, std::uint64_t count) {
    std::uint64_t before = 0;
    std::int64_t moved = NowNs();
    for (;;) {
        std::uint64_t all = 0;
        for (int r = 1; r <= followers; ++r) {
            all += shared.counted[r].load();
        }
        if (all != before) {
            before = all;
            moved = NowNs();
        }
        if (all == count * static_cast<std::uint64_t>(followers) || NowNs() - moved > 1'500'000'000) {
            return moved;
        }
        ::usleep(50);
    }
}

Latency MeasureLatency(const Design& design, int followers, std::size_t bytes, std::int64_t gap_ns,
                       std::size_t samples) {
    const std::size_t warm = gap_ns > 1'000'000'000 ? 1 : 50;
    const std::size_t total = samples + warm;
    g_patience_ms = 2000 + static_cast<int>(gap_ns / 1'000'000);
    static Shared* shared = MapShared();
    for (auto& row : shared->arrived) {
        for (std::size_t i = 0; i < total; ++i) {
            row[i] = 0;
        }
    }
    for (auto& counted : shared->counted) {
        counted = 0;
    }
    shared->ready = 0;
    const std::string folder = MakeFolder();
    std::atomic<std::int64_t>* sent = shared->arrived[0];
    static std::atomic<std::int64_t>* took = [] {
        void* p = ::mmap(nullptr, sizeof(std::atomic<std::int64_t>) * kMaxSamples, PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        return static_cast<std::atomic<std::int64_t>*>(p);
    }();
    Latency result;
    result.ok = RunRanks(followers + 1, [&](int rank) {
        auto link = design.make(rank, followers + 1, folder + "/link", 2);
        ++shared->ready;
        while (shared->ready.load() < followers + 1) {
            ::usleep(100);
        }
        if (rank == 0) {
            std::string frame(std::max<std::size_t>(bytes, 8), 'x');
            std::int64_t next = NowNs();
            const std::int64_t cpu = CpuNs();
            for (std::uint64_t i = 0; i < total; ++i) {
                next = std::max(next + gap_ns, NowNs());
                if (gap_ns > 0) {
                    SleepUntil(next);
                }
                std::memcpy(frame.data(), &i, sizeof i);
                const std::int64_t t0 = NowNs();
                sent[i] = t0;
                link->Send(frame);
                took[i] = NowNs() - t0;
            }
            shared->cpu_ns[rank] = CpuNs() - cpu;
            AwaitAll(*shared, followers, total);
        } else {
            std::vector<std::byte> buffer(bytes + 64);
            const std::int64_t cpu = CpuNs();
            for (std::size_t n = 0; n < total; ++n) {
                if (!link->Receive(buffer.data(), buffer.size())) {
                    break;
                }
                const std::int64_t now = NowNs();
                std::uint64_t i = 0;
                std::memcpy(&i, buffer.data(), sizeof i);
                if (i < total) {
                    shared->arrived[rank][i] = now;
                }
                shared->counted[rank].store(n + 1, std::memory_order_relaxed);
            }
            shared->cpu_ns[rank] = CpuNs() - cpu;
        }
    });
    std::vector<double> last;
    std::vector<double> publish;
    for (std::size_t i = warm; i < total; ++i) {
        std::int64_t latest = 0;
        bool everywhere = true;
        for (int r = 1; r <= followers; ++r) {
            const std::int64_t at = shared->arrived[r][i];
            everywhere = everywhere && at != 0;
            latest = std::max(latest, at);
        }
        if (!everywhere) {
            ++result.lost;
            continue;
        }
        last.push_back(static_cast<double>(latest - sent[i]) / 1000);
        publish.push_back(static_cast<double>(took[i]) / 1000);
    }
    for (int r = 0; r <= followers; ++r) {
        result.cpu_us += static_cast<double>(shared->cpu_ns[r].load()) / 1000 / static_cast<double>(total);
    }
    result.last = SpreadOf(std::move(last));
    result.publish = SpreadOf(std::move(publish));
    std::filesystem::remove_all(folder);
    return result;
}

struct Rate {
    double per_s{0};
    std::uint64_t lost{0};
    bool ok{false};
};

/// `count` frames of 64 bytes as fast as they go, one frame a step.
Rate MeasureRate(const Design& design, int followers, std::uint64_t count) {
    g_patience_ms = 2000;
    static Shared* shared = MapShared();
    shared->ready = 0;
    for (auto& c : shared->counted) {
        c = 0;
    }
    const std::string folder = MakeFolder();
    static auto* span_ns =
        new (::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))
            std::atomic<std::int64_t>;
    *span_ns = 0;
    Rate rate;
    rate.ok = RunRanks(followers + 1, [&](int rank) {
        auto link = design.make(rank, followers + 1, folder + "/link", 512);
        ++shared->ready;
        while (shared->ready.load() < followers + 1) {
            ::usleep(100);
        }
        if (rank == 0) {
            const std::string frame(64, 'x');
            const std::int64_t t0 = NowNs();
            for (std::uint64_t i = 0; i < count; ++i) {
                link->Send(frame);
            }
            const std::int64_t moved = AwaitAll(*shared, followers, count);
            *span_ns = moved - t0;
        } else {
            std::byte buffer[128];
            std::uint64_t n = 0;
            while (n < count && link->Receive(buffer, sizeof buffer)) {
                shared->counted[rank].store(++n, std::memory_order_relaxed);
            }
        }
    });
    for (int r = 1; r <= followers; ++r) {
        rate.lost += count - shared->counted[r].load();
    }
    rate.per_s = static_cast<double>(count) / (static_cast<double>(*span_ns) / 1e9);
    std::filesystem::remove_all(folder);
    return rate;
}

Config RelayConfig(int rank, int size, const std::string& folder) {
    Config config;
    config.rank = rank;
    config.size = size;
    config.where = folder + "/relay";
    config.epoch = 1;
    return config;
}

Spread MeasureJoin(int followers, int runs) {
    static Shared* shared = MapShared();
    std::vector<double> ms;
    for (int i = 0; i < runs; ++i) {
        shared->ready = 0;
        const std::string folder = MakeFolder();
        RunRanks(followers + 1, [&](int rank) {
            ++shared->ready;
            while (shared->ready.load() < followers + 1) {
                sched_yield();
            }
            if (rank == 0) {
                Leader leader{RelayConfig(rank, followers + 1, folder)};
                auto joined = leader.Join();
                shared->told[0] =
                    joined && *joined ? static_cast<std::int64_t>((**joined).elapsed_s * 1e9) : -1;
                static_cast<void>(leader.Finish(Seconds{20}));
            } else {
                Follower follower{RelayConfig(rank, followers + 1, folder)};
                if (follower.Join()) {
                    static_cast<void>(follower.Finish(Seconds{20}));
                }
            }
        });
        ms.push_back(static_cast<double>(shared->told[0].load()) / 1e6);
        std::filesystem::remove_all(folder);
    }
    return SpreadOf(std::move(ms));
}

/// From the SIGKILL of the last follower to the last survivor's having the named failure in hand; the leader
/// idles in poll().
Spread MeasureKill(int followers, int runs) {
    static Shared* shared = MapShared();
    std::vector<double> ms;
    for (int i = 0; i < runs; ++i) {
        shared->ready = 0;
        for (auto& t : shared->told) {
            t = 0;
        }
        const std::string folder = MakeFolder();
        std::vector<pid_t> pids;
        for (int r = 0; r <= followers; ++r) {
            const pid_t pid = ::fork();
            if (pid == 0) {
                Prioritise();
                if (r == 0) {
                    Leader leader{RelayConfig(r, followers + 1, folder)};
                    if (leader.Join()) {
                        ++shared->ready;
                        pollfd p{leader.failure_fd(), POLLIN, 0};
                        ::poll(&p, 1, 10000);
                        if (leader.failure()) {
                            shared->told[r] = NowNs();
                        }
                    }
                } else {
                    Follower follower{RelayConfig(r, followers + 1, folder)};
                    if (follower.Join()) {
                        ++shared->ready;
                        Step step;
                        auto got = follower.NextStep(Seconds{10}, &step);
                        if (!got && got.failure().code == Code::kPeerDied) {
                            shared->told[r] = NowNs();
                        }
                    }
                }
                ::_exit(0);
            }
            pids.push_back(pid);
        }
        while (shared->ready.load() < followers + 1) {
            ::usleep(100);
        }
        ::usleep(2000);
        const std::int64_t t0 = NowNs();
        ::kill(pids.back(), SIGKILL);
        std::int64_t latest = 0;
        for (std::size_t r = 0; r < pids.size(); ++r) {
            ::waitpid(pids[r], nullptr, 0);
            if (r + 1 < pids.size()) {
                const std::int64_t at = shared->told[r].load();
                latest = at == 0 ? t0 + 10'000'000'000 : std::max(latest, at);
            }
        }
        ms.push_back(static_cast<double>(latest - t0) / 1e6);
        std::filesystem::remove_all(folder);
    }
    return SpreadOf(std::move(ms));
}

/// CPU seconds all ranks together would spend in an idle minute.
double MeasureIdle(int followers, double seconds) {
    static Shared* shared = MapShared();
    shared->ready = 0;
    shared->stop = 0;
    const std::string folder = MakeFolder();
    const auto cpu = [] {
        rusage usage{};
        ::getrusage(RUSAGE_SELF, &usage);
        const auto ns = [](const timeval& t) {
            return std::int64_t{t.tv_sec} * 1'000'000'000 + std::int64_t{t.tv_usec} * 1000;
        };
        return ns(usage.ru_utime) + ns(usage.ru_stime);
    };
    RunRanks(followers + 1, [&](int rank) {
        if (rank == 0) {
            Leader leader{RelayConfig(rank, followers + 1, folder)};
            static_cast<void>(leader.Join());
            ::usleep(100000);
            const std::int64_t before = cpu();
            SleepUntil(NowNs() + static_cast<std::int64_t>(seconds * 1e9));
            shared->cpu_ns[rank] = cpu() - before;
            std::uint64_t number = 0;
            static_cast<void>(leader.Publish({}, &number));
            static_cast<void>(leader.Finish(Seconds{20}));
        } else {
            Follower follower{RelayConfig(rank, followers + 1, folder)};
            static_cast<void>(follower.Join());
            const std::int64_t before = cpu();
            Step step;
            static_cast<void>(follower.NextStep(std::nullopt, &step));
            shared->cpu_ns[rank] = cpu() - before;
            static_cast<void>(follower.Finish(Seconds{20}));
        }
    });
    std::filesystem::remove_all(folder);
    std::int64_t sum = 0;
    for (int r = 0; r <= followers; ++r) {
        sum += shared->cpu_ns[r].load();
    }
    return static_cast<double>(sum) / 1e9 / seconds * 60;
}

/// What the ring is meant to reach on two CPUs, with what it reached in this run. For reading: only losses
/// make the program fail, since a busy machine says nothing about the relay.
class Bars {
  public:
    void AtMost(const std::string& what, double got, double bar) { Add(what, got, "<=", bar, got <= bar); }
    void AtLeast(const std::string& what, double got, double bar) { Add(what, got, ">=", bar, got >= bar); }
    void Print(double futex_us) const {
        std::printf("\nbars (a futex wake takes %.1f us here)\n", futex_us);
        for (const std::string& line : lines_) {
            std::printf("%s\n", line.c_str());
        }
    }

  private:
    void Add(const std::string& what, double got, const char* sign, double bar, bool met) {
        std::array<char, 160> line{};
        std::snprintf(line.data(), line.size(), "  %-44s %12.2f  %s %10.0f  %s", what.c_str(), got, sign, bar,
                      met ? "met" : "MISSED");
        lines_.emplace_back(line.data());
    }
    std::vector<std::string> lines_;
};

struct Floors {
    double line_ns{0};
    double futex_us{0};
    double copy_gb_s{0};
};

Floors MeasureFloors() {
    static Shared* shared = MapShared();
    Floors floors;
    constexpr std::uint32_t kSpins = 50000;
    constexpr std::uint32_t kSleeps = 5000;
    shared->ping = 0;
    shared->pong = 0;
    const auto pair = [&](std::uint32_t n, bool sleep) {
        shared->ping = 0;
        shared->pong = 0;
        const pid_t pid = ::fork();
        const auto wait = [&](std::atomic<std::uint32_t>& word, std::uint32_t want) {
            for (std::uint32_t seen = word.load(); seen != want; seen = word.load()) {
                if (sleep) {
                    FutexWait(word, seen, std::chrono::seconds{1});
                } else {
                    sched_yield();
                }
            }
        };
        const auto put = [&](std::atomic<std::uint32_t>& word, std::uint32_t value) {
            word.store(value);
            if (sleep) {
                FutexWakeAll(word);
            }
        };
        if (pid == 0) {
            Prioritise();
            for (std::uint32_t i = 1; i <= n; ++i) {
                wait(shared->ping, i);
                put(shared->pong, i);
            }
            ::_exit(0);
        }
        const std::int64_t t0 = NowNs();
        for (std::uint32_t i = 1; i <= n; ++i) {
            put(shared->ping, i);
            wait(shared->pong, i);
        }
        const std::int64_t t = NowNs() - t0;
        ::waitpid(pid, nullptr, 0);
        return static_cast<double>(t) / n / 2;
    };
    floors.line_ns = pair(kSpins, false);
    floors.futex_us = pair(kSleeps, true) / 1000;
    std::vector<char> a(8 << 20, 'x');
    std::vector<char> b(8 << 20, 'y');
    const std::int64_t t0 = NowNs();
    for (int i = 0; i < 20; ++i) {
        std::memcpy(b.data(), a.data(), a.size());
        a[static_cast<std::size_t>(i)] = b[b.size() - 1 - static_cast<std::size_t>(i)];
    }
    floors.copy_gb_s = 20.0 * static_cast<double>(a.size()) / static_cast<double>(NowNs() - t0);
    return floors;
}

}  // namespace

int main(int argc, char** argv) {
    std::string out = "build/bench/relay_cpp.json";
    std::string only;
    for (int i = 1; i < argc; ++i) {
        const std::string arg = argv[i];
        if (arg == "--full") {
            g_full = true;
        } else if (arg == "--quick") {
            g_quick = true;
        } else if (arg == "--rr") {
            g_rr = true;
        } else if (arg == "--out" && i + 1 < argc) {
            out = argv[++i];
        } else if (arg == "--only" && i + 1 < argc) {
            only = argv[++i];
        } else {
            std::fprintf(stderr,
                         "usage: relay_bench [--full | --quick] [--rr] [--out FILE] [--only DESIGN]\n");
            return 2;
        }
    }
    std::string json = "{\n \"cpus\": " + std::to_string(::sysconf(_SC_NPROCESSORS_ONLN)) +
                       ", \"sched_rr\": " + (g_rr ? "true" : "false");
    double load = 0;
    ::getloadavg(&load, 1);
    json += ", \"load_average\": " + std::to_string(load);
    std::printf("%ld CPUs, load average %.1f, %s\n", ::sysconf(_SC_NPROCESSORS_ONLN), load,
                g_rr ? "ranks under SCHED_RR" : "ordinary scheduling");
    const Floors floors = MeasureFloors();
    std::printf(
        "floors: a cache line between two processes %.0f ns (with yield), futex wake one way %.1f us, copy "
        "%.1f GB/s\n",
        floors.line_ns, floors.futex_us, floors.copy_gb_s);
    json += ",\n \"floors\": {\"line_ns\": " + std::to_string(floors.line_ns) +
            ", \"futex_us\": " + std::to_string(floors.futex_us) +
            ", \"copy_gb_s\": " + std::to_string(floors.copy_gb_s) + "},\n \"latency\": [";
    std::printf("\n%-22s %3s %8s %9s | %28s | %19s | %11s | %s\n", "design", "F", "bytes", "gap",
                "last follower us p50/p99/max", "publish us p50/p99", "cpu us/step", "lost");
    bool all_ok = true;
    Bars bars;
    const char* comma = "";
    const std::vector<Design> designs = Designs();
    struct Gap {
        const char* name;
        std::int64_t ns;
        std::size_t samples;
    };
    std::vector<Gap> gaps{{"100 us", 100'000, 2000}};
    if (g_full) {
        gaps = {
            {"0", 0, 5000}, {"100 us", 100'000, 5000}, {"10 ms", 10'000'000, 200}, {"5 s", 5'000'000'000, 3}};
    }
    if (g_quick) {
        gaps.push_back({"1 ms", 1'000'000, 1000});
        gaps.push_back({"10 ms", 10'000'000, 150});
    }
    for (const Design& design : designs) {
        if (!only.empty() && design.name != only) {
            continue;
        }
        for (const int followers : {1, 3, 7}) {
            if (design.name == "ring, spinning" && followers + 1 > ::sysconf(_SC_NPROCESSORS_ONLN)) {
                continue;  // spinning ranks would only keep each other from running
            }
            for (const std::size_t bytes : {std::size_t{64}, std::size_t{256}, std::size_t{4096},
                                            std::size_t{65536}, std::size_t{524288}}) {
                if ((!g_full && bytes == 64) || (g_quick && bytes != 256)) {
                    continue;
                }
                for (const Gap& gap : gaps) {
                    if (gap.ns == 5'000'000'000 && bytes != 256) {
                        continue;
                    }
                    const std::size_t samples =
                        bytes > 4096 ? std::min<std::size_t>(gap.samples, 500) : gap.samples;
                    const Latency l = MeasureLatency(design, followers, bytes, gap.ns, samples);
                    all_ok = all_ok && l.ok && (!design.lossless || l.lost == 0);
                    if (design.name == "ring" && bytes == 256 && gap.ns == 100'000 && followers != 3) {
                        bars.AtMost("256 B, " + std::to_string(followers) + " follower(s), last p50, us",
                                    l.last.p50, followers == 1 ? 10 : 35);
                    }
                    std::printf("%-22s %3d %8zu %9s | %8.1f %9.1f %9.0f | %9.1f %9.1f | %11.1f | %zu%s\n",
                                design.name.c_str(), followers, bytes, gap.name, l.last.p50, l.last.p99,
                                l.last.max, l.publish.p50, l.publish.p99, l.cpu_us, l.lost,
                                l.ok ? "" : "  (a rank failed)");
                    json += std::string{comma} + "\n  {\"design\": \"" + design.name +
                            "\", \"followers\": " + std::to_string(followers) +
                            ", \"bytes\": " + std::to_string(bytes) +
                            ", \"gap_ns\": " + std::to_string(gap.ns) +
                            ", \"last_us\": {\"p50\": " + std::to_string(l.last.p50) +
                            ", \"p99\": " + std::to_string(l.last.p99) +
                            ", \"max\": " + std::to_string(l.last.max) +
                            "}, \"publish_us\": {\"p50\": " + std::to_string(l.publish.p50) +
                            ", \"p99\": " + std::to_string(l.publish.p99) +
                            "}, \"cpu_us\": " + std::to_string(l.cpu_us) +
                            ", \"lost\": " + std::to_string(l.lost) +
                            ", \"ok\": " + (l.ok ? "true" : "false") + "}";
                    comma = ",";
                }
            }
        }
    }
    json += "],\n \"rate_64b\": [";
    comma = "";
    if (g_quick) {
        return all_ok ? 0 : 1;
    }
    std::printf("\n%-22s %3s %14s %10s\n", "design, 64 B frames", "F", "frames/s", "lost");
    for (const Design& design : designs) {
        if ((!only.empty() && design.name != only) || design.name == "ring, spinning") {
            continue;
        }
        for (const int followers : {1, 3}) {
            const bool slow = design.name.find("gloo") != std::string::npos;
            const Rate r = MeasureRate(design, followers,
                                       slow                              ? 20'000
                                       : design.name.starts_with("ring") ? 2'000'000
                                                                         : 500'000);
            all_ok = all_ok && r.ok && (!design.lossless || r.lost == 0);
            if (design.name == "ring" && followers == 1) {
                bars.AtLeast("64 B, 1 follower, frames/s", r.per_s, 1e6);
            }
            std::printf("%-22s %3d %14.0f %10llu\n", design.name.c_str(), followers, r.per_s,
                        static_cast<unsigned long long>(r.lost));
            json += std::string{comma} + "\n  {\"design\": \"" + design.name +
                    "\", \"followers\": " + std::to_string(followers) +
                    ", \"frames_per_s\": " + std::to_string(r.per_s) +
                    ", \"lost\": " + std::to_string(r.lost) + "}";
            comma = ",";
        }
    }
    json += "],\n \"relay\": [";
    comma = "";
    std::printf("\n%-10s %3s | %24s | %30s | %s\n", "relay", "F", "join ms p50/p99",
                "kill to told ms p50/p99/max", "CPU s per idle minute, all ranks");
    for (const int followers : {1, 3, 7}) {
        const Spread join = MeasureJoin(followers, g_full ? 200 : 40);
        const Spread kill = MeasureKill(followers, g_full ? 200 : 60);
        const double idle = MeasureIdle(followers, g_full ? 20 : 4);
        const std::string with = std::to_string(followers) + " follower(s), ";
        bars.AtMost(with + "join p50, ms", join.p50, 5);
        bars.AtMost(with + "kill to told p99, ms", kill.p99, 10);
        bars.AtMost(with + "all ranks idle, CPU ms per s", idle / 60 * 1000, 2);
        std::printf("%-10s %3d | %11.2f %12.2f | %9.2f %9.2f %10.2f | %.4f\n", "ring", followers, join.p50,
                    join.p99, kill.p50, kill.p99, kill.max, idle);
        json += std::string{comma} + "\n  {\"followers\": " + std::to_string(followers) +
                ", \"join_ms\": {\"p50\": " + std::to_string(join.p50) +
                ", \"p99\": " + std::to_string(join.p99) +
                "}, \"kill_to_told_ms\": {\"p50\": " + std::to_string(kill.p50) +
                ", \"p99\": " + std::to_string(kill.p99) + ", \"max\": " + std::to_string(kill.max) +
                "}, \"idle_cpu_s_per_minute\": " + std::to_string(idle) + "}";
        comma = ",";
    }
    bars.Print(floors.futex_us);
    json += "]\n}\n";
    std::filesystem::create_directories(
        std::filesystem::path{out}.parent_path().empty() ? "." : std::filesystem::path{out}.parent_path());
    std::ofstream{out} << json;
    std::printf("\nwritten: %s\n", out.c_str());
    if (!all_ok) {
        std::printf("FAILED: a design that must lose nothing lost frames, or a rank did not end\n");
        return 1;
    }
    return 0;
}
