// SPDX-License-Identifier: Apache-2.0
// Which ports a launched engine will touch, as pure functions. Two layouts: vLLM ranks only dial the
// handshake port, which is allocated; TokenSpeed derives a whole cluster of ports from two flags, and two
// clusters that meet make a worker fail at start or, worse, listen on its neighbour's port. Called by the
// launcher before anything is started.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace rankgate::launch {

/// Handshake ports that are derived from a socket path live here; no other derived port may.
inline constexpr int kHandshakeBandFirst = 20'000;
inline constexpr int kHandshakeBandLast = 29'999;
/// TokenSpeed derives its torch store from --port by this distance when it is not told otherwise.
inline constexpr int kTokenSpeedPortDelta = 233;
/// Where the derived store port hops to when it would fall into the handshake band.
inline constexpr int kBandHop = 10'000;
/// Ports above the store port that a TokenSpeed engine probes or binds: D+1..D+6, then one per DP rank.
inline constexpr int kTokenSpeedClusterBase = 6;

/// FNV-1a, 64 bit.
std::uint64_t Fnv1a64(std::string_view bytes) noexcept;

/// The handshake port of a socket path (the text after ipc://), folded into the band. Both sides can compute
/// it.
int HandshakePortOf(std::string_view socket_path) noexcept;

/// The port D of `--dist-init-addr 127.0.0.1:D` for a worker on `port`: +233, or -233 near the top of the
/// range, hopped out of the handshake band. Valid for every port in [1, 65535].
int TokenSpeedStorePort(int port) noexcept;

/// Smallest distance between the ports of neighbouring TokenSpeed workers that keeps their clusters apart.
int TokenSpeedWorkerSpacing(int data_parallel_size) noexcept;

/// Inclusive range of ports with the reason it is taken, e.g. "worker 1: torch store and scheduler ports".
struct PortRange {
    int first{0};
    int last{0};
    std::string what;
};

struct TokenSpeedWorker {
    int port{0};
    int handshake_port{0};
    int data_parallel_size{1};
};

/// Every port that one worker uses.
std::vector<PortRange> PortsOf(const TokenSpeedWorker& worker, std::string_view name);

/// An error that names both owners and the port if any two ranges meet or one leaves [1, 65535].
Status CheckDisjoint(const std::vector<PortRange>& ranges);

/// `count` workers from `base_port` on, spaced, each with a handshake port of its own, checked disjoint.
/// `busy` says whether a port is taken on this host (injected for tests); a worker whose cluster is not free
/// moves up by the spacing.
Result<std::vector<TokenSpeedWorker>> PlanTokenSpeed(int base_port, int count, int data_parallel_size,
                                                     const std::vector<std::string>& socket_paths,
                                                     bool (*busy)(int port));

/// A free TCP port of the loopback interface, from the kernel. The caller binds it at once; a race ends in a
/// bind error, never a hang.
Result<int> AllocatePort();
/// True if a listener or a socket in another state holds 127.0.0.1:port.
bool PortBusy(int port);

}  // namespace rankgate::launch
