// SPDX-License-Identifier: Apache-2.0
// What this build is.
#pragma once

#include <iosfwd>

namespace rankgate::apps {

inline constexpr const char* kVersion = RANKGATE_VERSION;

/// Version, compiler and options of the build, and the wire versions that it speaks.
void PrintVersion(std::ostream& out);

}  // namespace rankgate::apps
