// SPDX-License-Identifier: Apache-2.0
// Where ranks meet: a unix socket by path or by a name without a file (@name), or a TCP address. Leaves no
// name behind: the leader removes the path once all have joined, and whoever outlives a killed leader removes
// the stale one. One thread at a time.
#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>
#include <utility>

#include "base/unique_fd.h"
#include "relay/types.h"

namespace rankgate::relay {

/// Empty, or what is wrong with an address (`where`).
std::string CheckAddress(std::string_view where);

class Listener {
  public:
    Listener() = default;
    Listener(Listener&& other) noexcept { *this = std::move(other); }
    Listener& operator=(Listener&& other) noexcept {
        Close();
        fd_ = std::move(other.fd_);
        path_ = std::exchange(other.path_, {});
        tcp_ = other.tcp_;
        device_ = other.device_;
        inode_ = other.inode_;
        return *this;
    }
    ~Listener() { Close(); }

    /// Non-blocking. A live listener on the same address is kDuplicateRank; a dead one's name is taken over.
    static Result<Listener> Open(const Config& config);
    int fd() const noexcept { return fd_.get(); }
    /// The next waiting connection, non-blocking, or an invalid descriptor.
    UniqueFd Accept() noexcept;
    /// Removes the name (only if it is still ours) and the socket.
    void Close() noexcept;
    /// In a forked child: forgets everything without touching it.
    void Abandon() noexcept {
        path_.clear();
        static_cast<void>(fd_.release());
    }

  private:
    UniqueFd fd_;
    std::string path_;  // empty: there is nothing to remove
    bool tcp_{false};
    dev_t device_{0};
    ino_t inode_{0};
};

/// One attempt. Invalid with errno set when nobody listens (yet).
UniqueFd Dial(const std::string& where) noexcept;

/// Removes a unix path on which nobody listens any more; leaves anything else alone. False if it belongs to
/// somebody: a live listener, or what is no socket.
bool RemoveIfStale(const std::string& where) noexcept;

/// The peer's pid (0 = unknown or another host); false if it belongs to another user.
bool CheckPeerUser(int socket, pid_t* pid) noexcept;

}  // namespace rankgate::relay
