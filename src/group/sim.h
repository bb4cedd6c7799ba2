// SPDX-License-Identifier: Apache-2.0
// The routing simulator behind `rankgate sim`: the real rank choice of GroupCore in front of modelled engine
// ranks, under one trace and several sources of load knowledge. Deterministic, no I/O but its table; called
// by apps/ only.
#pragma once

namespace rankgate::group {

int SimMain(int argc, char** argv);

}  // namespace rankgate::group
