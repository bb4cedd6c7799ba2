// SPDX-License-Identifier: Apache-2.0
// One streamed token on the shard, from the ids of a batch to the bytes on its socket: the real gateway with
// one shard, a real client on real sockets (a process of its own), and a group that only hands over batches.
// Each step gives every stream one token, and the next step waits until the client has read all of it, so
// that each token is its own write. Prints CPU and heap allocations a token; instructions come from running
// it twice under callgrind with different --steps (scripts/bench.sh does) and dividing the difference, which
// takes out the start, the requests and the end.
//
//   shard_bench [--streams 64] [--steps 2000] [--json]
#include <arpa/inet.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/log.h"
#include "gateway/gateway.h"

// Every heap allocation of the process, whichever library makes it.
namespace {
std::atomic<std::uint64_t> g_allocations{0};
}
extern "C" {
void* __libc_malloc(std::size_t size);
void* __libc_calloc(std::size_t count, std::size_t size);
void* __libc_realloc(void* old, std::size_t size);
void* __libc_memalign(std::size_t alignment, std::size_t size);
void* malloc(std::size_t size) {
    g_allocations.fetch_add(1, std::memory_order_relaxed);
    return __libc_malloc(size);
}
void* calloc(std::size_t count, std::size_t size) {
    g_allocations.fetch_add(1, std::memory_order_relaxed);
    return __libc_calloc(count, size);
}
void* realloc(void* old, std::size_t size) {
    g_allocations.fetch_add(1, std::memory_order_relaxed);
    return __libc_realloc(old, size);
}
void* aligned_alloc(std::size_t alignment, std::size_t size) {
    g_allocations.fetch_add(1, std::memory_order_relaxed);
    return __libc_memalign(alignment, size);
}
}

namespace rankgate::gateway {
namespace {

constexpr int kWarmSteps = 50;
constexpr std::string_view kText = "Hello, this is a stream of \"words\" and lines\n";

/// Hands over what it is told to, and takes its batches back.
class StepGroup final : public group::Group {
  public:
    StepGroup() {
        auto snapshot = std::make_shared<group::GroupSnapshot>();
        snapshot->runtime = "vllm";
        snapshot->size = snapshot->live = 1;
        snapshot->serving = true;
        snapshot->max_model_len = 1 << 20;
        group::RankInfo rank;
        rank.state = group::RankState::kLive;
        rank.max_model_len = 1 << 20;
        snapshot->ranks.push_back(rank);
        snapshot_ = std::move(snapshot);
    }
    void Submit(group::StreamKey stream, std::unique_ptr<wire::GenerateRequest>,
                group::OutputMailbox& reply) override {
        keys_[submitted_.load(std::memory_order_relaxed)] = stream;
        reply_ = &reply;
        submitted_.fetch_add(1, std::memory_order_release);
    }
    void Cancel(group::StreamKey, group::OutputMailbox&, group::CancelCause) override {}
    void Admin(group::AdminCall, std::function<void(std::vector<group::AdminReply>)>) override {}
    std::shared_ptr<const group::GroupSnapshot> Snapshot() const override { return snapshot_; }
    void Recycle(std::unique_ptr<group::OutputBatch> batch) noexcept override {
        spare_.Push(std::move(batch));
    }

    void Expect(std::size_t streams) { keys_.resize(streams); }
    std::size_t submitted() const { return submitted_.load(std::memory_order_acquire); }
    void Step(int step, wire::FinishReason finish) {
        auto batch = spare_.Pop();
        if (batch == nullptr) {
            batch = std::make_unique<group::OutputBatch>();
        }
        batch->Clear();
        const auto token = static_cast<wire::TokenId>(
            static_cast<unsigned char>(kText[static_cast<std::size_t>(step) % kText.size()]));
        for (const group::StreamKey key : keys_) {
            group::Output output;
            output.stream = key;
            output.first_token = static_cast<std::uint32_t>(batch->tokens.size());
            output.num_tokens = 1;
            output.finish_reason = finish;
            output.rank = 0;
            batch->tokens.push_back(token);
            batch->outputs.push_back(output);
        }
        reply_->Push(std::move(batch));
    }

  private:
    std::shared_ptr<const group::GroupSnapshot> snapshot_;
    std::vector<group::StreamKey> keys_;
    std::atomic<std::size_t> submitted_{0};
    group::OutputMailbox* reply_{nullptr};
    Mailbox<group::OutputBatch> spare_;
};

/// The other process: opens the streams, and says a byte whenever each of them has got one chunk more.
int Client(std::uint16_t port, int streams, int tell) {
    std::vector<int> sockets;
    std::vector<pollfd> polls;
    std::vector<std::uint64_t> chunks(static_cast<std::size_t>(streams));
    const std::string body = R"({"model":"m","prompt":"x","stream":true,"max_tokens":1000000})";
    const std::string ask =
        "POST /v1/completions HTTP/1.1\r\nHost: b\r\nContent-Type: application/json\r\nContent-Length: " +
        std::to_string(body.size()) + "\r\n\r\n" + body;
    for (int i = 0; i < streams; ++i) {
        const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
        sockaddr_in to{};
        to.sin_family = AF_INET;
        to.sin_port = htons(port);
        to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        if (::connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to) != 0 ||
            ::write(fd, ask.data(), ask.size()) != static_cast<ssize_t>(ask.size())) {
            return 1;
        }
        polls.push_back({fd, POLLIN, 0});
    }
    std::uint64_t told = 0;
    std::size_t open = polls.size();
    std::vector<char> buffer(1 << 16);
    while (open > 0) {
        if (::poll(polls.data(), polls.size(), 60'000) <= 0) {
            return 1;
        }
        for (std::size_t i = 0; i < polls.size(); ++i) {
            if (polls[i].revents == 0) {
                continue;
            }
            const ssize_t n = ::read(polls[i].fd, buffer.data(), buffer.size());
            if (n <= 0) {
                return 1;
            }
            const std::string_view got{buffer.data(), static_cast<std::size_t>(n)};
            for (std::size_t at = got.find("data: {"); at != std::string_view::npos;
                 at = got.find("data: {", at + 1)) {
                ++chunks[i];
            }
            if (got.find("data: [DONE]") != std::string_view::npos) {
                polls[i].fd = -1;
                --open;
                chunks[i] = ~std::uint64_t{0};
            }
        }
        const std::uint64_t least = *std::min_element(chunks.begin(), chunks.end());
        for (; told < least && told < (std::uint64_t{1} << 40U) && open > 0; ++told) {
            if (::write(tell, "+", 1) != 1) {
                return 1;
            }
        }
    }
    return ::write(tell, ".", 1) == 1 ? 0 : 1;
}

double CpuSeconds() {
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

int Run(const char* self, int streams, int steps, bool json) {
    InitLog(LogLevel::kWarning, LogFormat::kText);
    GatewayOptions options;
    options.model = ":bytes:";
    options.served_model_names = {"m"};
    options.host = "127.0.0.1";
    options.port = 0;
    options.http_threads = 1;
    options.log_level = LogLevel::kWarning;
    StepGroup* group = nullptr;
    auto gateway = Gateway::Create(options, [&](const GatewayOptions&, const WorkerSpec&, std::int32_t) {
        auto made = std::make_unique<StepGroup>();
        group = made.get();
        group->Expect(static_cast<std::size_t>(streams));
        return Result<GroupHandle>{GroupHandle{std::move(made), "tcp://none:0"}};
    });
    RG_CHECK(gateway.ok());
    RG_CHECK((*gateway)->Start().ok());
    int told[2];
    RG_CHECK(::pipe(told) == 0);
    const std::string port = std::to_string((*gateway)->port());
    const std::string count = std::to_string(streams);
    const std::string fd = std::to_string(told[1]);
    const pid_t child = ::fork();
    if (child == 0) {
        ::execl(self, self, "--client", port.c_str(), count.c_str(), fd.c_str(), nullptr);
        ::_exit(127);
    }
    ::close(told[1]);
    while (group->submitted() < static_cast<std::size_t>(streams)) {
        ::usleep(1000);
    }
    char byte = 0;
    const auto read_step = [&] { RG_CHECK(::read(told[0], &byte, 1) == 1); };
    for (int i = 0; i < kWarmSteps; ++i) {
        group->Step(i, wire::FinishReason::kNone);
        read_step();
    }
    const double cpu = CpuSeconds();
    const std::uint64_t allocations = g_allocations.load();
    for (int i = 0; i < steps; ++i) {
        group->Step(i, wire::FinishReason::kNone);
        read_step();
    }
    const double spent = CpuSeconds() - cpu;
    const std::uint64_t allocated = g_allocations.load() - allocations;
    group->Step(0, wire::FinishReason::kLength);
    while (byte != '.') {
        read_step();
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    RG_CHECK(status == 0);
    const double tokens = static_cast<double>(streams) * steps;
    std::printf(json ? "{\"streams\":%d,\"steps\":%d,\"cpu_ns_per_token\":%.0f,\"allocations\":%llu,"
                       "\"allocations_per_token\":%.6f}\n"
                     : "%d streams, %d steps: %.0f ns of CPU a token (write to the socket included), %llu "
                       "allocations, %.6f a token\n",
                streams, steps, spent / tokens * 1e9, static_cast<unsigned long long>(allocated),
                static_cast<double>(allocated) / tokens);
    (*gateway)->HurryShutdown();
    (*gateway)->BeginShutdown();
    (*gateway)->WaitForShutdown();
    // The shard also has timers; per token there must be nothing.
    return static_cast<double>(allocated) / tokens < 0.001 ? 0 : 1;
}

}  // namespace
}  // namespace rankgate::gateway

int main(int argc, char** argv) {
    if (argc == 5 && std::strcmp(argv[1], "--client") == 0) {
        return rankgate::gateway::Client(static_cast<std::uint16_t>(std::atoi(argv[2])), std::atoi(argv[3]),
                                         std::atoi(argv[4]));
    }
    int streams = 64;
    int steps = 2000;
    bool json = false;
    for (int i = 1; i < argc; ++i) {
        if (std::strcmp(argv[i], "--json") == 0) {
            json = true;
        } else if (i + 1 < argc && std::strcmp(argv[i], "--streams") == 0) {
            streams = std::atoi(argv[++i]);
        } else if (i + 1 < argc && std::strcmp(argv[i], "--steps") == 0) {
            steps = std::atoi(argv[++i]);
        } else {
            std::fprintf(stderr, "shard_bench: %s? --streams N, --steps N, --json\n", argv[i]);
            return 2;
        }
    }
    return rankgate::gateway::Run(argv[0], streams, steps, json);
}
