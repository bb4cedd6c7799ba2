// SPDX-License-Identifier: Apache-2.0
// See sim.h.
#include "group/sim.h"

#include <cstdio>

namespace rankgate::group {

int SimMain(int /*argc*/, char** /*argv*/) {
    std::fputs("rankgate sim: not built yet\n", stderr);
    return 1;
}

}  // namespace rankgate::group
