// SPDX-License-Identifier: Apache-2.0
// The load mailbox: one shared page per rank in which the engine publishes its load after every step and from
// which a gateway on the same host reads on demand, without a message. A seqlock: the writer never waits, a
// reader retries or gives up. The path travels in the ready response under kLoadPageKey. Mode 0600 in a 0700
// directory of the same user; anything else is refused.
//
// Layout, little-endian, 8-byte fields (docs/engine.md and docs/examples show a Python writer):
//   0 magic "RGLOAD1\0"   8 version 1   16 epoch (random per writer)   24 writer pid   32 sequence (odd =
//   being written) 40 num_running   48 num_waiting   56 kv_active_pages   64 kv_total_pages   72 step_counter
//   80 CLOCK_MONOTONIC ns   88 closed (1 = no more)
// LoadPageWriter: the rank's core thread. LoadPageReader: any one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "base/result.h"
#include "wire/generate.h"

namespace rankgate::engine {

/// wire::ReadyResponse::rankgate_load_mailbox on the wire.
inline constexpr const char* kLoadPageKey = "rankgate_load_mailbox";
inline constexpr std::size_t kLoadPageSize = 4096;
inline constexpr std::uint64_t kLoadPageVersion = 1;

struct LoadPage;  // the mapped bytes; see mailbox.cc

class LoadPageWriter {
  public:
    LoadPageWriter() = default;
    LoadPageWriter(const LoadPageWriter&) = delete;
    LoadPageWriter& operator=(const LoadPageWriter&) = delete;
    /// Marks the page closed, unmaps and unlinks it.
    ~LoadPageWriter();

    /// Creates `directory` (0700, must be ours) and the page in it. An old page of the same name is replaced,
    /// never reused.
    Status Open(const std::string& directory, const std::string& name);
    void Publish(const wire::LoadSnapshot& load) noexcept;
    const std::string& path() const noexcept { return path_; }
    bool is_open() const noexcept { return page_ != nullptr; }

  private:
    LoadPage* page_{nullptr};
    std::string path_;
};

/// What a reader got: the load and how old it is.
struct LoadReading {
    wire::LoadSnapshot load;
    std::uint64_t epoch{0};
    std::int64_t age_ns{0};
};

class LoadPageReader {
  public:
    LoadPageReader() = default;
    LoadPageReader(const LoadPageReader&) = delete;
    LoadPageReader& operator=(const LoadPageReader&) = delete;
    ~LoadPageReader();

    /// Maps the page read-only after checking owner, mode, size, magic and version (of the file and its
    /// directory).
    Status Open(const std::string& path);
    /// The newest consistent sample; nothing when the page is closed or empty, or it never settled in a
    /// bounded number of tries. Costs no system call (clock_gettime is a vDSO read).
    std::optional<LoadReading> Read() const noexcept;
    /// True when the writer closed the page or its process is gone (one kill(pid, 0)).
    bool WriterGone() const noexcept;
    bool is_open() const noexcept { return page_ != nullptr; }
    void Close() noexcept;

  private:
    const LoadPage* page_{nullptr};
};

}  // namespace rankgate::engine
