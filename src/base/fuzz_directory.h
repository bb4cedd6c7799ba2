// SPDX-License-Identifier: Apache-2.0
// A private directory (0700) for a fuzz target whose code under test reads files; removed when the process
// ends. Fuzz targets only.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

#include "base/check.h"

namespace rankgate {

/// The same one for the life of the process; a target has one `name`.
inline const std::string& FuzzDirectory(const std::string& name) {
    // Made before the exit handler is registered, hence destroyed after it has run.
    static const std::string directory = [&] {
        std::string made = "/tmp/rankgate-" + name + "-fuzz-XXXXXX";
        RG_CHECK(::mkdtemp(made.data()) != nullptr);
        return made;
    }();
    static const int registered = std::atexit([] {
        std::error_code ignored;
        std::filesystem::remove_all(FuzzDirectory({}), ignored);
    });
    (void)registered;
    return directory;
}

}  // namespace rankgate
