// SPDX-License-Identifier: Apache-2.0
// A native data socket reads what any peer says, in portions of any size: the same comes out as from one
// piece, frames are inside their limits, and memory follows what came, not what was announced. The first byte
// is the own role, the second the portion.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "base/check.h"
#include "transport/zmtp.h"

namespace {

using namespace rankgate::transport;  // NOLINT: a program of one file

constexpr ZmtpLimits kLimits{4096, 16384, 8};

std::string Read(ZmtpRole own, std::string_view bytes, std::size_t portion) {
    ZmtpDecoder decoder{own, kLimits};
    std::string said;
    while (!bytes.empty()) {
        const std::span<char> space = decoder.Space();
        RG_CHECK(!space.empty() && space.size() <= (1U << 20));
        const std::size_t n = std::min({portion, bytes.size(), space.size()});
        std::memcpy(space.data(), bytes.data(), n);
        bytes.remove_prefix(n);
        decoder.Filled(n);
        for (auto got = decoder.Next(); got != ZmtpDecoder::Got::kNothing; got = decoder.Next()) {
            said += static_cast<char>('0' + static_cast<int>(got));
            if (got == ZmtpDecoder::Got::kBroken) {
                return said;
            }
            if (got == ZmtpDecoder::Got::kReady) {
                said += decoder.identity();
                continue;
            }
            RG_CHECK(decoder.ready());
            RG_CHECK(!decoder.frames().empty() && decoder.frames().size() <= kLimits.frames);
            for (const std::string_view frame : decoder.frames()) {
                RG_CHECK(frame.size() <= kLimits.frame_bytes);
                said += frame;
                said += '|';
            }
        }
    }
    return said;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size < 2) {
        return 0;
    }
    const auto own = static_cast<ZmtpRole>(data[0] & 3U);
    const std::string_view rest{reinterpret_cast<const char*>(data) + 2, size - 2};
    // Most inputs are about what comes after a proper greeting.
    std::string bytes;
    if ((data[0] & 4U) == 0) {
        constexpr ZmtpRole kPeers[] = {ZmtpRole::kDealer, ZmtpRole::kPush, ZmtpRole::kRouter,
                                       ZmtpRole::kPull};
        AppendZmtpHello(bytes, kPeers[static_cast<std::size_t>(own)], "id");
        bytes.resize((data[0] & 8U) != 0 ? 64 : bytes.size());
    }
    bytes += rest;
    RG_CHECK(Read(own, bytes, 1 + data[1]) == Read(own, bytes, bytes.size()));
    return 0;
}
