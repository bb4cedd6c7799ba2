// SPDX-License-Identifier: Apache-2.0
#include "relay/crc.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace rankgate::relay {
namespace {

constexpr std::array<std::uint32_t, 256> MakeTable() {
    std::array<std::uint32_t, 256> table{};
    for (std::uint32_t i = 0; i < 256; ++i) {
        std::uint32_t c = i;
        for (int k = 0; k < 8; ++k) {
            c = (c & 1U) != 0 ? (c >> 1) ^ 0x82F63B78U : c >> 1;
        }
        table[i] = c;
    }
    return table;
}
constexpr std::array<std::uint32_t, 256> kTable = MakeTable();

struct Portable {
    static std::uint32_t Word(std::uint32_t crc, std::uint64_t word) noexcept {
        for (int i = 0; i < 8; ++i) {
            crc = (crc >> 8) ^ kTable[(crc ^ static_cast<std::uint32_t>(word >> (8 * i))) & 0xFFU];
        }
        return crc;
    }
};

// The shape both versions share: 32-byte blocks feed four lanes, the rest feeds lane 0 (its last word
// zero-padded), and the lanes and the length are folded. A template with the step as a policy cannot carry
// the target attribute, hence the macro.
#define RG_CHECKSUM_BODY(WORD)                                      \
    std::uint32_t a = seed, b = ~seed, c = seed + 1, d = ~seed + 1; \
    const std::size_t whole = size;                                 \
    while (size >= 32) {                                            \
        std::uint64_t w[4];                                         \
        std::memcpy(w, data, 32);                                   \
        a = WORD(a, w[0]);                                          \
        b = WORD(b, w[1]);                                          \
        c = WORD(c, w[2]);                                          \
        d = WORD(d, w[3]);                                          \
        data += 32;                                                 \
        size -= 32;                                                 \
    }                                                               \
    while (size > 0) {                                              \
        std::uint64_t w = 0;                                        \
        const std::size_t n = size < 8 ? size : 8;                  \
        std::memcpy(&w, data, n);                                   \
        a = WORD(a, w);                                             \
        data += n;                                                  \
        size -= n;                                                  \
    }                                                               \
    a = WORD(a, (static_cast<std::uint64_t>(b) << 32) | c);         \
    a = WORD(a, (static_cast<std::uint64_t>(d) << 32) ^ whole);     \
    return a

#if defined(__x86_64__)
[[gnu::target("sse4.2")]] inline std::uint32_t WordSse(std::uint32_t crc, std::uint64_t word) noexcept {
    return static_cast<std::uint32_t>(_mm_crc32_u64(crc, word));
}
[[gnu::target("sse4.2")]] std::uint32_t ChecksumSse(const std::byte* data, std::size_t size,
                                                    std::uint32_t seed) noexcept {
    RG_CHECKSUM_BODY(WordSse);
}
#endif

}  // namespace

std::uint32_t ChecksumPortable(const std::byte* data, std::size_t size, std::uint32_t seed) noexcept {
    RG_CHECKSUM_BODY(Portable::Word);
}

std::uint32_t Checksum(const std::byte* data, std::size_t size, std::uint32_t seed) noexcept {
#if defined(__x86_64__)
    static const bool fast = __builtin_cpu_supports("sse4.2") != 0;
    if (fast) {
        return ChecksumSse(data, size, seed);
    }
#endif
    return ChecksumPortable(data, size, seed);
}

}  // namespace rankgate::relay
