// SPDX-License-Identifier: Apache-2.0
// Slot headers and payloads that nobody honest wrote, with and without checksums, through the assembler: it
// may refuse or deliver, but a delivered step must be consistent, and memory must stay within what has really
// arrived.
#include <cstring>

#include "relay/slot.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    using namespace rankgate::relay;
    if (size < 1) {
        return 0;
    }
    Config config;
    config.epoch = 5;
    config.max_frame = 1 << 16;
    config.checksum = (data[0] & 1U) != 0;
    const bool mend = (data[0] & 2U) != 0;
    Assembler assembler{config, kRingPayload};
    ++data;
    --size;
    SlotHeader go;
    go.seq = 1;
    go.epoch = 5;
    go.flags = kSlotGo;
    go.crc = SlotChecksum(go, nullptr);
    if (assembler.Feed(go, nullptr) != Assembler::Fed::kGo) {
        __builtin_trap();
    }
    while (size >= sizeof(SlotHeader)) {
        SlotHeader header;
        std::memcpy(static_cast<void*>(&header), data, sizeof header);
        data += sizeof header;
        size -= sizeof header;
        // Mostly plausible numbers, or nothing beyond the first comparison would ever be reached.
        if (mend) {
            header.seq = assembler.next_seq();
            header.epoch = 5;
            header.step = assembler.next_step();
            header.total &= 0xFFFF;
            header.flags &= 7U;
        }
        std::vector<std::byte> payload(kRingPayload);
        const std::size_t n = std::min<std::size_t>({size, header.length, kRingPayload});
        std::memcpy(payload.data(), data, n);
        data += n;
        size -= n;
        if (mend && header.length <= kRingPayload) {
            header.crc = SlotChecksum(header, payload.data());
        }
        switch (assembler.Feed(header, payload.data())) {
            case Assembler::Fed::kStep: {
                const Step step = assembler.Take();
                std::size_t total = 0;
                for (std::size_t i = 0; i < step.size(); ++i) {
                    for (const std::byte b : step[i]) {
                        total += static_cast<std::size_t>(b) & 0U;
                    }
                    total += step[i].size();
                }
                if (total != step.bytes()) {
                    __builtin_trap();
                }
                break;
            }
            case Assembler::Fed::kFailed:
                return 0;
            default:
                break;
        }
    }
    return 0;
}
