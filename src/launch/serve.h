// SPDX-License-Identifier: Apache-2.0
// `rankgate serve MODEL [flags] [-- engine flags]`: the gateway in this process, its engines as supervised
// children. argv[0] is the sub-command's name. Returns the exit code: 0 fine, 1 runtime failure, 2 bad flags,
// 3 the engine died, 130 interrupted.
#pragma once

namespace rankgate::launch {

int ServeMain(int argc, char** argv);

}  // namespace rankgate::launch
