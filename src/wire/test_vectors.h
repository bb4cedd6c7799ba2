// SPDX-License-Identifier: Apache-2.0
// Test support: loads the captured frames of tests/vectors/ and decodes msgpack generically, so that a test
// compares what a message decoder says with what the bytes say.
#pragma once

#include <boost/json/value.hpp>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "wire/protocol.h"

namespace rankgate::wire::test {

/// One captured message.
struct Vector {
    std::string name;
    std::string direction;
    std::string socket;
    std::string outcome;
    std::string note;
    std::vector<std::string> frames;
    boost::json::value fields;  // what the real decoder made of it, where recorded
    boost::json::value header;  // of the file

    /// Frames from `first` on, as views.
    std::vector<std::string_view> From(std::size_t first) const;
};

/// "vllm/outputs.dp1" -> every message of that file, exchanges flattened. Aborts the test program when the
/// file is not there: a missing vector is never a pass.
std::vector<Vector> LoadVectors(std::string_view name);

std::string FromHex(std::string_view hex);
std::string ToHex(std::string_view bytes);

/// Generic msgpack -> JSON. Extensions become {"ext": code, "hex": "..."}, binaries {"bin": "hex"},
/// non-finite floats their names, integer keys decimal strings. Aborts on malformed bytes.
boost::json::value ToJson(std::string_view msgpack);

/// Equality that does not mind whether a whole number is int, uint or double.
bool SameJson(const boost::json::value& left, const boost::json::value& right);

/// How often this test program has called operator new (test_allocations.cc replaces it).
std::uint64_t AllocationCount() noexcept;

}  // namespace rankgate::wire::test
