// SPDX-License-Identifier: Apache-2.0
#include "relay/slot.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "relay/crc.h"

namespace rankgate::relay {
namespace {

/// Up to here the buffer of a step is taken at once; beyond, it grows with what has really arrived.
constexpr std::size_t kTrustedBytes = std::size_t{64} << 20;

constexpr std::size_t kLengthBytes = sizeof(std::uint64_t);

}  // namespace

std::uint32_t SlotChecksum(const SlotHeader& header, const std::byte* payload) noexcept {
    SlotHeader clean = header;
    clean.crc = 0;
    const std::uint32_t seed =
        Checksum(reinterpret_cast<const std::byte*>(&clean), sizeof clean, 0x52474C52U);
    return header.length == 0 ? seed : Checksum(payload, header.length, seed);
}

bool PlausibleLength(const SlotHeader& header, std::size_t payload_limit) noexcept {
    return header.length <= payload_limit;
}

std::optional<Failure> StepSource::Check(std::span<const Frame> frames, const Config& config) noexcept {
    Failure failure;
    failure.code = Code::kTooLarge;
    failure.phase = Phase::kPublish;
    failure.origin_rank = static_cast<std::int16_t>(config.rank);
    if (frames.size() > kMaxFramesPerStep) {
        failure.expected = kMaxFramesPerStep;
        failure.got = frames.size();
        failure.SetText("too many frames in one step; nothing was sent");
        return failure;
    }
    std::uint64_t total = frames.size() * kLengthBytes;
    for (std::size_t i = 0; i < frames.size(); ++i) {
        if (frames[i].size() > config.max_frame) {
            failure.expected = config.max_frame;
            failure.got = frames[i].size();
            failure.SetText("frame " + std::to_string(i) + " has " + std::to_string(frames[i].size()) +
                            " bytes, max_frame is " + std::to_string(config.max_frame) +
                            "; nothing was sent");
            return failure;
        }
        total += frames[i].size();
    }
    if (total > kMaxStepBytes) {
        failure.expected = kMaxStepBytes;
        failure.got = total;
        failure.SetText("the step is larger than a step may be; nothing was sent");
        return failure;
    }
    return std::nullopt;
}

StepSource::StepSource(std::span<const Frame> frames, std::uint64_t step)
    : frames_{frames}, step_{step}, total_{frames.size() * kLengthBytes} {
    for (const Frame& frame : frames) {
        total_ += frame.size();
    }
}

std::size_t StepSource::Copy(std::byte* to, std::size_t room) noexcept {
    const std::size_t wanted = room;
    const std::size_t n = frames_.size();
    while (room > 0 && piece_ < 2 * n) {
        const std::byte* from = nullptr;
        std::size_t size = 0;
        std::uint64_t length = 0;
        if (piece_ < n) {
            length = frames_[piece_].size();
            from = reinterpret_cast<const std::byte*>(&length);
            size = kLengthBytes;
        } else {
            from = frames_[piece_ - n].data();
            size = frames_[piece_ - n].size();
        }
        const std::size_t part = std::min(room, size - offset_);
        if (part > 0) {
            std::memcpy(to, from + offset_, part);
        }
        to += part;
        room -= part;
        offset_ += part;
        if (offset_ == size) {
            ++piece_;
            offset_ = 0;
        }
    }
    return wanted - room;
}

Frame Step::operator[](std::size_t i) const noexcept {
    // The table holds the end of each frame relative to the first one (Assembler::Complete rewrote the
    // lengths).
    const auto end = [&](std::size_t k) {
        std::uint64_t value = 0;
        std::memcpy(&value, data_.get() + k * kLengthBytes, sizeof value);
        return value;
    };
    const std::uint64_t begin = i == 0 ? 0 : end(i - 1);
    return {data_.get() + count_ * kLengthBytes + begin, static_cast<std::size_t>(end(i) - begin)};
}

Assembler::Assembler(const Config& config, std::size_t payload_limit) noexcept
    : payload_limit_{payload_limit},
      max_frame_{config.max_frame},
      epoch_{config.epoch},
      checksum_{config.checksum} {}

Assembler::Fed Assembler::Refuse(Code code, std::uint64_t expected, std::uint64_t got,
                                 std::string_view text) noexcept {
    failure_ = Failure{};
    failure_.code = code;
    failure_.phase = Phase::kRead;
    failure_.origin_rank = 0;
    failure_.step = next_step_;
    failure_.expected = expected;
    failure_.got = got;
    failure_.SetText(text);
    return Fed::kFailed;
}

Assembler::Fed Assembler::Feed(const SlotHeader& header, const std::byte* payload) noexcept {
    if (header.seq != next_seq_) {
        return header.seq > next_seq_
                   ? Refuse(Code::kSequenceGap, next_seq_, header.seq, "a slot is missing")
                   : Refuse(Code::kForeignFrame, next_seq_, header.seq, "an old slot came again");
    }
    if (header.epoch != epoch_) {
        return Refuse(Code::kBadEpoch, epoch_, header.epoch, "a slot of another epoch");
    }
    if (!PlausibleLength(header, payload_limit_)) {
        return Refuse(Code::kCorrupt, payload_limit_, header.length, "impossible slot length");
    }
    constexpr std::uint32_t kKnown = kSlotFirst | kSlotLast | kSlotAbort | kSlotGo;
    const bool bare = (header.flags & (kSlotAbort | kSlotGo)) != 0;
    if (bare || (header.flags & ~kKnown) != 0) {
        if (checksum_ && SlotChecksum(header, payload) != header.crc) {
            return Refuse(Code::kCorrupt, 0, header.crc, "checksum of a slot is wrong");
        }
        if ((header.flags & ~kKnown) != 0 || header.length != 0) {
            return Refuse(Code::kVersionMismatch, kKnown, header.flags, "a slot of an unknown kind");
        }
        if ((header.flags & kSlotGo) != 0) {
            if (go_seen_ || header.seq != 1) {
                return Refuse(Code::kForeignFrame, 1, header.seq, "GO in the middle of the stream");
            }
            go_seen_ = true;
            ++next_seq_;
            return Fed::kGo;
        }
        open_ = false;
        data_.reset();
        ++next_seq_;
        return Fed::kMore;
    }
    if (!go_seen_) {
        return Refuse(Code::kForeignFrame, 1, header.seq, "a step before GO");
    }
    const bool first = (header.flags & kSlotFirst) != 0;
    const bool last = (header.flags & kSlotLast) != 0;
    if (first) {
        if (open_ || header.step != next_step_ || header.fragment != 0) {
            return Refuse(Code::kForeignFrame, next_step_, header.step, "not the next step");
        }
        if (header.n_frames > kMaxFramesPerStep || header.total > kMaxStepBytes ||
            header.total < std::uint64_t{header.n_frames} * kLengthBytes) {
            return Refuse(Code::kCorrupt, kMaxStepBytes, header.total, "impossible step size");
        }
        filled_ = 0;
        fragment_ = 0;
        n_frames_ = header.n_frames;
        total_ = header.total;
        capacity_ = static_cast<std::size_t>(std::min<std::uint64_t>(total_, kTrustedBytes));
        data_.reset(capacity_ > 0 ? new (std::nothrow) std::byte[capacity_] : nullptr);
        open_ = true;
    } else if (!open_ || header.step != next_step_ || header.fragment != fragment_ ||
               header.n_frames != n_frames_ || header.total != total_) {
        return Refuse(Code::kForeignFrame, fragment_, header.fragment, "not the next part of this step");
    }
    if (header.length > total_ - filled_ || (last && filled_ + header.length != total_)) {
        return Refuse(Code::kCorrupt, total_ - filled_, header.length, "the parts of a step do not add up");
    }
    if (filled_ + header.length > capacity_) {
        const std::size_t more =
            static_cast<std::size_t>(std::min<std::uint64_t>(total_, std::uint64_t{capacity_} * 2));
        std::unique_ptr<std::byte[]> grown{new (std::nothrow) std::byte[more]};
        if (grown) {
            std::memcpy(grown.get(), data_.get(), filled_);
        }
        data_ = std::move(grown);
        capacity_ = more;
    }
    if (!data_ && capacity_ > 0) {
        return Refuse(Code::kTooLarge, 0, total_, "no memory for this step");
    }
    std::byte* at = data_.get() + filled_;
    if (header.length > 0) {
        std::memcpy(at, payload, header.length);
    }
    if (checksum_ && SlotChecksum(header, at) != header.crc) {
        return Refuse(Code::kCorrupt, 0, header.crc, "checksum of a slot is wrong");
    }
    filled_ += header.length;
    ++fragment_;
    ++next_seq_;
    return last ? Complete() : Fed::kMore;
}

Assembler::Fed Assembler::Complete() noexcept {
    std::uint64_t end = 0;
    for (std::size_t i = 0; i < n_frames_; ++i) {
        std::uint64_t length = 0;
        std::memcpy(&length, data_.get() + i * kLengthBytes, sizeof length);
        if (length > max_frame_) {
            return Refuse(Code::kCorrupt, max_frame_, length, "a frame is larger than max_frame");
        }
        end += length;
        std::memcpy(data_.get() + i * kLengthBytes, &end, sizeof end);
    }
    if (end + std::uint64_t{n_frames_} * kLengthBytes != total_) {
        return Refuse(Code::kCorrupt, total_, end, "the frames of a step do not add up");
    }
    open_ = false;
    ++next_step_;
    return Fed::kStep;
}

Step Assembler::Take() noexcept {
    Step step;
    step.number_ = next_step_ - 1;
    step.count_ = n_frames_;
    step.total_ = static_cast<std::size_t>(total_);
    step.data_ = std::move(data_);
    return step;
}

}  // namespace rankgate::relay
