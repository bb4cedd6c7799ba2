// SPDX-License-Identifier: Apache-2.0
// What one group actor costs: requests and tokens through real sockets against fake ranks, and the CPU of the
// actor's own thread per request and per token. Prints one JSON object a line.
//   group_bench [requests] [ranks]
#include <poll.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <dirent.h>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "group/group_actor.h"
#include "transport/fake_rank.h"

namespace {
std::atomic<long> actor_tid{0};
std::atomic<std::uint64_t> actor_allocations{0};
}  // namespace

// Counts what the actor's thread allocates (libzmq's own mallocs are not in it).
[[gnu::noinline]] void* operator new(std::size_t size) {
    thread_local const long tid = ::gettid();
    if (tid == actor_tid.load(std::memory_order_relaxed)) {
        actor_allocations.fetch_add(1, std::memory_order_relaxed);
    }
    void* memory = std::malloc(size);
    if (memory == nullptr) {
        throw std::bad_alloc();
    }
    return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
    std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
    std::free(memory);
}

namespace {

using namespace rankgate;
using namespace rankgate::group;
using std::chrono::seconds;

struct Run {
    std::uint64_t requests{0};
    std::uint64_t tokens{0};
    std::uint64_t errors{0};
    std::uint64_t batches{0};
    double seconds{0};
    double actor_cpu{0};
    double zmq_cpu{0};
    std::uint64_t allocations{0};
};

double Now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double ThreadCpu(long tid) {
    clockid_t clock = static_cast<clockid_t>((~static_cast<unsigned>(tid) << 3U) |
                                             6U);  // the kernel's per-thread CPU clock
    timespec spent{};
    return ::clock_gettime(clock, &spent) == 0
               ? static_cast<double>(spent.tv_sec) + static_cast<double>(spent.tv_nsec) * 1e-9
               : 0;
}

std::vector<long> Threads() {
    std::vector<long> ids;
    DIR* dir = ::opendir("/proc/self/task");
    while (const dirent* entry = ::readdir(dir)) {
        if (entry->d_name[0] != '.') {
            ids.push_back(std::atol(entry->d_name));
        }
    }
    ::closedir(dir);
    return ids;
}

std::string NameOf(long tid) {
    std::ifstream file("/proc/self/task/" + std::to_string(tid) + "/comm");
    std::string name;
    std::getline(file, name);
    return name;
}

/// Keeps `window` requests open until `total` ended.
Run Drive(Group& group, std::uint64_t total, std::uint64_t window, std::int64_t max_tokens,
          std::size_t prompt, long actor, long io) {
    static StreamKey next = 0;
    OutputMailbox* box = new OutputMailbox;  // outlives the actor: leaked on purpose, the process ends soon
    Run run;
    std::uint64_t open = 0;
    std::uint64_t sent = 0;
    const double actor_before = ThreadCpu(actor);
    const double io_before = ThreadCpu(io);
    const std::uint64_t allocations_before = actor_allocations.load();
    const double begin = Now();
    const auto submit = [&] {
        auto request = std::make_unique<wire::GenerateRequest>();
        ++next;
        request->id = "chatcmpl-0123456789abcdef-" + std::to_string(next);
        request->prompt_token_ids.assign(prompt, 1234);
        request->sampling.max_tokens = max_tokens;
        request->sampling.temperature = 0.7;
        request->sampling.eos_token_id = 2;
        request->arrival_time = 1.0;
        group.Submit(next, std::move(request), *box);
        ++sent;
        ++open;
    };
    while (run.requests + run.errors < total && Now() - begin < 60) {
        while (open < window && sent < total) {
            submit();
        }
        pollfd item{box->fd(), POLLIN, 0};
        ::poll(&item, 1, 1000);
        box->Acknowledge();
        while (auto batch = box->Pop()) {
            ++run.batches;
            for (const Output& output : batch->outputs) {
                run.tokens += output.num_tokens;
                if (output.error >= 0) {
                    ++run.errors;
                    --open;
                } else if (output.finish_reason != wire::FinishReason::kNone) {
                    ++run.requests;
                    --open;
                }
            }
            group.Recycle(std::move(batch));
        }
    }
    run.seconds = Now() - begin;
    run.actor_cpu = ThreadCpu(actor) - actor_before;
    run.allocations = actor_allocations.load() - allocations_before;
    run.zmq_cpu = ThreadCpu(io) - io_before;
    return run;
}

void Print(const char* name, const Run& run) {
    const double ended = static_cast<double>(run.requests + run.errors);
    const auto tokens = static_cast<double>(run.tokens);
    std::printf(
        "{\"bench\":\"%s\",\"requests\":%llu,\"errors\":%llu,\"tokens\":%llu,\"batches\":%llu,\"seconds\":%."
        "3f,"
        "\"requests_per_s\":%.0f,\"tokens_per_s\":%.0f,\"actor_cpu_s\":%.3f,\"io_thread_cpu_s\":%.3f,"
        "\"actor_us_per_request\":%.2f,\"actor_us_per_token\":%.3f,\"requests_per_actor_core\":%.0f,"
        "\"tokens_per_actor_core\":%.0f,\"actor_allocations_per_request\":%.2f,\"actor_allocations_per_"
        "token\":%.4f}\n",
        name, static_cast<unsigned long long>(run.requests), static_cast<unsigned long long>(run.errors),
        static_cast<unsigned long long>(run.tokens), static_cast<unsigned long long>(run.batches),
        run.seconds, ended / run.seconds, tokens / run.seconds, run.actor_cpu, run.zmq_cpu,
        run.actor_cpu / ended * 1e6, run.actor_cpu / tokens * 1e6, ended / run.actor_cpu,
        tokens / run.actor_cpu, static_cast<double>(run.allocations) / ended,
        static_cast<double>(run.allocations) / tokens);
    std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
    const std::uint64_t requests = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 20000;
    const int ranks = argc > 2 ? std::atoi(argv[2]) : 2;
    GroupActorOptions options;
    options.link.size = ranks;
    const auto before = Threads();
    auto actor = GroupActor::Start(options);
    if (!actor.ok()) {
        std::fprintf(stderr, "%s\n", actor.error().message.c_str());
        return 1;
    }
    long actor_thread = 0;
    long io_thread = 0;
    for (const long tid : Threads()) {
        if (std::find(before.begin(), before.end(), tid) == before.end()) {
            const std::string name = NameOf(tid);
            if (name.find("IO") != std::string::npos) {
                io_thread = tid;
            } else if (name.find("Reaper") == std::string::npos) {
                actor_thread = tid;
                actor_tid.store(tid);
            }
        }
    }
    std::vector<std::unique_ptr<transport::FakeRank>> fakes;
    for (int rank = 0; rank < ranks; ++rank) {
        transport::FakeRankOptions fake;
        fake.handshake_address = (*actor)->handshake_address();
        fake.engine_index = static_cast<std::uint16_t>(rank);
        fake.record = false;
        fakes.push_back(std::make_unique<transport::FakeRank>(fake));
    }
    while ((*actor)->Snapshot()->live < ranks) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    (void)Drive(**actor, requests / 10, 64, 1, 32, actor_thread, io_thread);
    Print("one_token_window_256", Drive(**actor, requests, 256, 1, 32, actor_thread, io_thread));
    Print("one_token_prompt_4k", Drive(**actor, requests / 10, 64, 1, 4096, actor_thread, io_thread));
    Print("stream_window_256", Drive(**actor, requests / 10, 256, 256, 32, actor_thread, io_thread));
    Print("stream_window_1024", Drive(**actor, requests / 10, 1024, 256, 32, actor_thread, io_thread));
    Print("single_stream", Drive(**actor, requests / 20, 1, 4, 32, actor_thread, io_thread));
    (*actor)->Close();
    return 0;
}
