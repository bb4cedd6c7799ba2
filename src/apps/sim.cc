// SPDX-License-Identifier: Apache-2.0
// `rankgate sim`: the routing simulator lives beside the rank choice that it drives.
#include "apps/tools.h"
#include "group/sim.h"

namespace rankgate::apps {

int SimMain(int argc, char** argv) { return group::SimMain(argc, argv); }

}  // namespace rankgate::apps
