// SPDX-License-Identifier: Apache-2.0
// How a step is cut into slots and put together again. A step is one run of bytes, [length of each frame,
// u64][frames], cut into slots that carry sequence, epoch, step, fragment and checksum. Same format in the
// ring and on the stream back-ends.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "relay/relay.h"
#include "relay/types.h"

namespace rankgate::relay {

inline constexpr std::size_t kSlotBytes = 4096;

enum SlotFlags : std::uint32_t {
    kSlotFirst = 1,
    kSlotLast = 2,
    kSlotAbort = 4,  // the step begun before is not going to be finished; its number is used again
    kSlotGo = 8,     // the first slot of a group: the data plane works
};

/// One cache line in front of the payload. In the ring `seq` is stored last (release) and read first
/// (acquire).
struct SlotHeader {
    std::uint64_t seq{0};
    std::uint64_t epoch{0};
    std::uint64_t step{0};
    std::uint64_t total{0};  // bytes of the whole step, length table included
    std::uint32_t n_frames{0};
    std::uint32_t fragment{0};  // from 0
    std::uint32_t length{0};    // payload bytes in this slot
    std::uint32_t flags{0};
    std::uint32_t crc{0};  // of this header with crc = 0 and the payload; 0 when checksums are off
    std::uint32_t reserved{0};
    /// Steady-clock nanoseconds at which the leader of this host began to publish the step: what the next one
    /// is foreseen from (prewake.h). 0 = not said.
    std::int64_t sent_at{0};
};
static_assert(sizeof(SlotHeader) == 64);

inline constexpr std::size_t kRingPayload = kSlotBytes - sizeof(SlotHeader);
inline constexpr std::size_t kStreamPayload = 64 * 1024 - sizeof(SlotHeader);

std::uint32_t SlotChecksum(const SlotHeader& header, const std::byte* payload) noexcept;

/// The bytes of one step, read in order. Borrows the frames. `Copy` fills a slot, `Views` lists the pieces
/// for a scatter write.
class StepSource {
  public:
    /// kTooLarge names the frame. The source must not outlive `frames`.
    static std::optional<Failure> Check(std::span<const Frame> frames, const Config& config) noexcept;
    StepSource(std::span<const Frame> frames, std::uint64_t step);

    std::uint64_t step() const noexcept { return step_; }
    std::uint64_t total() const noexcept { return total_; }
    std::uint32_t n_frames() const noexcept { return static_cast<std::uint32_t>(frames_.size()); }
    /// Copies the next at most `room` bytes to `to`; returns how many.
    std::size_t Copy(std::byte* to, std::size_t room) noexcept;

  private:
    std::span<const Frame> frames_;
    std::uint64_t step_;
    std::uint64_t total_;
    std::size_t piece_{0};  // the length table's entries first, then the frames
    std::size_t offset_{0};
};

/// Puts a step together; validates everything it is handed. One per follower, one thread. Its state survives
/// an interrupted wait.
class Assembler {
  public:
    enum class Fed : std::uint8_t { kMore, kStep, kGo, kFailed };

    Assembler(const Config& config, std::size_t payload_limit) noexcept;
    /// Takes the slot that must be the next one. The bytes may be shared memory: they are copied before they
    /// are believed.
    Fed Feed(const SlotHeader& header, const std::byte* payload) noexcept;
    /// The finished step; call once after kStep.
    Step Take() noexcept;
    const Failure& failure() const noexcept { return failure_; }

    std::uint64_t next_seq() const noexcept { return next_seq_; }
    std::uint64_t next_step() const noexcept { return next_step_; }
    void Adopt(std::size_t max_frame, bool checksum) noexcept {
        max_frame_ = max_frame;
        checksum_ = checksum;
    }

  private:
    Fed Refuse(Code code, std::uint64_t expected, std::uint64_t got, std::string_view text) noexcept;
    Fed Complete() noexcept;

    std::size_t payload_limit_;
    std::size_t max_frame_;
    std::uint64_t epoch_;
    bool checksum_;
    std::uint64_t next_seq_{1};
    std::uint64_t next_step_{1};
    bool go_seen_{false};
    // the step being put together
    bool open_{false};
    std::uint32_t fragment_{0};
    std::uint32_t n_frames_{0};
    std::uint64_t total_{0};
    std::uint64_t filled_{0};
    std::size_t capacity_{0};
    std::unique_ptr<std::byte[]> data_;
    Failure failure_;
};

/// What a slot of this stream must look like before its payload is touched; for the stream back-ends' parser
/// too.
bool PlausibleLength(const SlotHeader& header, std::size_t payload_limit) noexcept;

}  // namespace rankgate::relay
