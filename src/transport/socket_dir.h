// SPDX-License-Identifier: Apache-2.0
// The directory that holds a group's ipc sockets and what a restarted gateway must remember. Refuses, before
// anything is bound, everything that would let a stranger in or tear down a live neighbour: wrong owner or
// mode, symbolic links, paths that the kernel would truncate, sockets that somebody still listens on, files
// that are no sockets. One gateway per directory and group (lock file).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "base/unique_fd.h"
#include "transport/handshake.h"

namespace rankgate::transport {

/// What survives a restart of the gateway. Ranks without an entry were not live.
struct LinkFacts {
    std::string dialect;
    std::int32_t size{0};
    std::int32_t base_index{0};
    std::string handshake;
    std::string input;
    std::string output;
    std::map<std::int32_t, RankFacts> ranks;
};

std::string SerialiseFacts(const LinkFacts& facts);
/// Bounded and strict: anything unexpected is an error, never a half-read table.
/// Every rank's facts must be of `dialect`, or where that is unset, of the one that the text names.
Result<LinkFacts> ParseFacts(std::string_view text, std::optional<Dialect> dialect);

class SocketDir {
  public:
    /// Opens or creates `path` (0700). Empty = a private temporary directory, removed with the object.
    static Result<SocketDir> Open(const std::string& path, std::int32_t group);
    SocketDir() = default;
    SocketDir(SocketDir&& other) noexcept;
    SocketDir& operator=(SocketDir&& other) noexcept;
    ~SocketDir();

    /// "ipc://<dir>/<name>" ready to bind: length checked, stale socket removed, live one refused. The file
    /// is unlinked with the object, so close the socket first.
    Result<std::string> Claim(std::string_view name);

    bool persistent() const noexcept { return !temporary_; }
    const std::string& path() const noexcept { return path_; }
    /// Atomic replace, 0600.
    Status Save(const LinkFacts& facts) const;
    /// nullopt when there are none.
    Result<std::optional<LinkFacts>> Load(std::optional<Dialect> dialect) const;

    static constexpr std::size_t kMaxFactsBytes = 16 << 20;

  private:
    void Remove() noexcept;
    std::string FactsPath() const;

    std::string path_;
    std::int32_t group_{0};
    bool temporary_{false};
    std::vector<std::string> claimed_;  // libzmq leaves the files behind; we unlink them when done
    UniqueFd lock_;
};

}  // namespace rankgate::transport
