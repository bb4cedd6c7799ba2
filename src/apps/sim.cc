// SPDX-License-Identifier: Apache-2.0
// `rankgate sim`: the routing simulator lives beside the rank choice that it drives.
#include "group/sim.h"
#include "apps/tools.h"

namespace rankgate::apps {

int SimMain(int argc, char** argv) {
    return group::SimMain(argc, argv);
}

}  // namespace rankgate::apps
