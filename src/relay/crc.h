// SPDX-License-Identifier: Apache-2.0
// Checksum of slots: CRC32C over four interleaved lanes of 8-byte words, folded into one. Four lanes because
// one CRC chain is bound by the latency of the instruction (7 GB/s); four run at memory speed. The value is
// defined by the portable code; the instruction only computes the same faster.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rankgate::relay {

std::uint32_t Checksum(const std::byte* data, std::size_t size, std::uint32_t seed) noexcept;
/// The definition, without special instructions; for tests and other CPUs.
std::uint32_t ChecksumPortable(const std::byte* data, std::size_t size, std::uint32_t seed) noexcept;

}  // namespace rankgate::relay
