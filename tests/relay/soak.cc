// SPDX-License-Identifier: Apache-2.0
// relay_soak STEPS [FOLLOWERS]: so many steps of changing shape through the ring, one process per rank. Exact
// (every rank has the same hash over every byte) and flat (resident memory and descriptors do not grow after
// the warm-up). Exit status 0 only if both hold.
#include <dirent.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <new>
#include <string>
#include <vector>

#include "relay/relay.h"

namespace {

using namespace rankgate::relay;

/// Pages a process may gain after the warm-up; a leak of one byte a step would be thousands.
constexpr long kSlackPages = 512;

struct Usage {
    long pages{0};
    long fds{0};
};
Usage Measure() {
    Usage usage;
    long size = 0;
    std::ifstream{"/proc/self/statm"} >> size >> usage.pages;
    if (DIR* dir = ::opendir("/proc/self/fd")) {
        while (::readdir(dir) != nullptr) {
            ++usage.fds;
        }
        ::closedir(dir);
    }
    return usage;
}

std::uint64_t Mix(std::uint64_t hash, std::span<const std::byte> bytes) {
    std::size_t i = 0;
    for (; i + 8 <= bytes.size(); i += 8) {
        std::uint64_t word = 0;
        std::memcpy(&word, bytes.data() + i, 8);
        hash = (hash ^ word) * 0x100000001B3ULL;
    }
    for (; i < bytes.size(); ++i) {
        hash = (hash ^ static_cast<std::uint64_t>(bytes[i])) * 0x100000001B3ULL;
    }
    return hash;
}

struct Report {
    std::atomic<std::uint64_t> hash;
    std::atomic<std::uint64_t> steps;
    std::atomic<int> flat;
};

bool Flat(int rank, const Usage& before, const Usage& after) {
    const bool flat = after.pages <= before.pages + kSlackPages && after.fds == before.fds;
    std::printf("rank %d: resident %ld -> %ld pages, descriptors %ld -> %ld%s\n", rank, before.pages,
                after.pages, before.fds, after.fds, flat ? "" : "  GREW");
    return flat;
}

int RunRank(int rank, int size, const std::string& where, std::uint64_t steps, Report& report) {
    Config config;
    config.rank = rank;
    config.size = size;
    config.where = where;
    config.epoch = 1;
    config.max_lag_steps = 64;
    const std::uint64_t warm = std::min<std::uint64_t>(steps / 10, 100000);
    Usage before;
    std::uint64_t hash = 1;
    std::uint64_t done = 0;
    if (rank == 0) {
        Leader leader{config};
        if (auto joined = leader.Join(); !joined) {
            std::printf("rank 0: %s\n", joined.failure().Describe().c_str());
            return 1;
        }
        std::string pool(20000, '\0');
        std::uint64_t x = 88172645463325252ULL;
        const auto random = [&] {
            x ^= x << 13;
            x ^= x >> 7;
            return x ^= x << 17;
        };
        for (char& c : pool) {
            c = static_cast<char>(random());
        }
        std::vector<Frame> frames;
        for (; done < steps; ++done) {
            if (done == warm) {
                before = Measure();
            }
            frames.clear();
            for (std::uint64_t n = random() % 4; n > 0; --n) {
                const std::size_t length = random() % 1000 == 0 ? 20000 : random() % 300;
                frames.push_back(
                    std::as_bytes(std::span{pool}).subspan(random() % (pool.size() - length + 1), length));
            }
            for (const Frame& frame : frames) {
                hash = Mix(hash, frame);
            }
            hash = hash * 31 + frames.size();
            std::uint64_t number = 0;
            if (auto published = leader.Publish(frames, &number); !published) {
                std::printf("rank 0: %s\n", published.failure().Describe().c_str());
                return 1;
            }
        }
        report.flat = Flat(rank, before, Measure()) ? 1 : 0;
        if (auto end = leader.Finish(Seconds{30}); !end) {
            std::printf("rank 0: %s\n", end.failure().Describe().c_str());
            return 1;
        }
    } else {
        Follower follower{config};
        if (auto joined = follower.Join(); !joined) {
            std::printf("rank %d: %s\n", rank, joined.failure().Describe().c_str());
            return 1;
        }
        for (;; ++done) {
            if (done == warm) {
                before = Measure();
            }
            Step step;
            auto got = follower.NextStep(std::nullopt, &step);
            if (!got) {
                if (got.failure().code == Code::kClosed) {
                    break;
                }
                std::printf("rank %d: %s\n", rank, got.failure().Describe().c_str());
                return 1;
            }
            for (std::size_t i = 0; i < step.size(); ++i) {
                hash = Mix(hash, step[i]);
            }
            hash = hash * 31 + step.size();
        }
        report.flat = Flat(rank, before, Measure()) ? 1 : 0;
        if (auto end = follower.Finish(Seconds{30}); !end) {
            std::printf("rank %d: %s\n", rank, end.failure().Describe().c_str());
            return 1;
        }
    }
    report.hash = hash;
    report.steps = done;
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    const std::uint64_t steps = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 10'000'000;
    const int size = 1 + (argc > 2 ? std::atoi(argv[2]) : 3);
    std::string folder = "/tmp/relaysoakXXXXXX";
    void* memory = ::mmap(nullptr, sizeof(Report) * kMaxRanks, PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (steps == 0 || size < 2 || size > kMaxRanks || memory == MAP_FAILED ||
        ::mkdtemp(folder.data()) == nullptr) {
        std::fprintf(stderr, "usage: relay_soak STEPS [FOLLOWERS]\n");
        return 2;
    }
    auto* reports = static_cast<Report*>(memory);
    std::vector<pid_t> pids;
    for (int r = 0; r < size; ++r) {
        new (&reports[r]) Report{};
        std::fflush(stdout);
        const pid_t pid = ::fork();
        if (pid == 0) {
            const int status = RunRank(r, size, folder + "/relay", steps, reports[r]);
            std::fflush(stdout);
            ::_exit(status);
        }
        pids.push_back(pid);
    }
    bool ok = true;
    for (int r = 0; r < size; ++r) {
        int status = 0;
        ::waitpid(pids[static_cast<std::size_t>(r)], &status, 0);
        ok = ok && status == 0;
    }
    for (int r = 0; r < size; ++r) {
        ok = ok && reports[r].steps == steps && reports[r].hash == reports[0].hash && reports[r].flat == 1;
    }
    ok = ok && std::filesystem::is_empty(folder);
    std::filesystem::remove_all(folder);
    std::printf("%llu steps to %d followers: %s\n", static_cast<unsigned long long>(steps), size - 1,
                ok ? "exact and flat" : "FAILED");
    return ok ? 0 : 1;
}
