// SPDX-License-Identifier: Apache-2.0
#include "launch/port_plan.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/unique_fd.h"

namespace rankgate::launch {
namespace {

constexpr int kHighestPort = 65'535;
/// How often a planned worker moves on before the plan gives up.
constexpr int kMaxMoves = 1'000;

bool InBand(int port) noexcept {
    return port >= kHandshakeBandFirst && port <= kHandshakeBandLast;
}

}  // namespace

std::uint64_t Fnv1a64(std::string_view bytes) noexcept {
    std::uint64_t hash = 0xcbf29ce484222325ULL;
    for (const char c : bytes) {
        hash ^= static_cast<unsigned char>(c);
        hash *= 0x100000001b3ULL;
    }
    return hash;
}

int HandshakePortOf(std::string_view socket_path) noexcept {
    constexpr std::uint64_t kWidth = kHandshakeBandLast - kHandshakeBandFirst + 1;
    return kHandshakeBandFirst + static_cast<int>(Fnv1a64(socket_path) % kWidth);
}

int TokenSpeedStorePort(int port) noexcept {
    int store = port + kTokenSpeedPortDelta;
    if (store > kHighestPort) {
        store = port - kTokenSpeedPortDelta;
    }
    // One hop leaves the band for good: the band is exactly as wide as the hop.
    return InBand(store) ? store + kBandHop : store;
}

int TokenSpeedWorkerSpacing(int data_parallel_size) noexcept {
    return 16 + data_parallel_size;
}

std::vector<PortRange> PortsOf(const TokenSpeedWorker& worker, std::string_view name) {
    const std::string prefix{name};
    const int store = TokenSpeedStorePort(worker.port);
    return {
        {worker.handshake_port, worker.handshake_port, prefix + ": handshake port"},
        {worker.port, worker.port, prefix + ": --port"},
        {store, store + kTokenSpeedClusterBase + worker.data_parallel_size,
         prefix + ": torch store and scheduler ports"},
    };
}

Status CheckDisjoint(const std::vector<PortRange>& ranges) {
    std::vector<PortRange> sorted = ranges;
    std::sort(sorted.begin(), sorted.end(),
              [](const PortRange& a, const PortRange& b) { return a.first < b.first; });
    for (std::size_t i = 0; i < sorted.size(); ++i) {
        const PortRange& range = sorted[i];
        if (range.first < 1 || range.last > kHighestPort) {
            return Error::Invalid("port", range.what + " would need ports " + std::to_string(range.first) +
                                              "-" + std::to_string(range.last) +
                                              ", outside 1-65535; choose another base port");
        }
        if (i > 0 && sorted[i - 1].last >= range.first) {
            return Error::Invalid("port", "port " + std::to_string(range.first) + " is needed twice: by " +
                                              sorted[i - 1].what + " and by " + range.what +
                                              "; choose another base port or socket directory");
        }
    }
    return Status::Ok();
}

Result<std::vector<TokenSpeedWorker>> PlanTokenSpeed(int base_port, int count, int data_parallel_size,
                                                     const std::vector<std::string>& socket_paths,
                                                     bool (*busy)(int port)) {
    RG_CHECK(static_cast<int>(socket_paths.size()) == count);
    std::vector<TokenSpeedWorker> workers;
    std::vector<PortRange> taken;
    const int spacing = TokenSpeedWorkerSpacing(data_parallel_size);
    int port = base_port;
    int moves = 0;
    while (static_cast<int>(workers.size()) < count) {
        const std::size_t index = workers.size();
        const TokenSpeedWorker worker{port, HandshakePortOf(socket_paths[index]), data_parallel_size};
        const std::vector<PortRange> ports = PortsOf(worker, "worker " + std::to_string(index));
        std::vector<PortRange> all = taken;
        all.insert(all.end(), ports.begin(), ports.end());
        const Status disjoint = CheckDisjoint(all);
        bool free = disjoint.ok();
        for (const PortRange& range : ports) {
            for (int p = range.first; free && p <= range.last; ++p) {
                free = !busy(p);
            }
        }
        port += spacing;
        if (free) {
            workers.push_back(worker);
            taken = std::move(all);
        } else if (++moves > kMaxMoves || port > kHighestPort) {
            if (!disjoint.ok()) {
                return disjoint.error();
            }
            return Error::Invalid("port", "no free block of ports for TokenSpeed worker " +
                                              std::to_string(index) + " from " + std::to_string(base_port) +
                                              " up; its handshake port is " +
                                              std::to_string(worker.handshake_port));
        }
    }
    return workers;
}

Result<int> AllocatePort() {
    UniqueFd fd{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    if (!fd.valid() || ::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
        ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
        return Error{ErrorCode::kInternal,
                     std::string("no free TCP port on 127.0.0.1: ") + std::strerror(errno), "", false};
    }
    return static_cast<int>(ntohs(address.sin_port));
}

bool PortBusy(int port) {
    UniqueFd fd{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    // No SO_REUSEADDR: a port in TIME_WAIT looks free with it, and the engine's own bind then fails.
    return !fd.valid() || ::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0;
}

}  // namespace rankgate::launch
