// SPDX-License-Identifier: Apache-2.0
// `rankgate engine MODEL [flags]`: one engine rank that dials a gateway. argv[0] is the sub-command's name
// ("engine"), flags follow. Returns the process's exit code: 0 fine, 1 runtime failure, 2 bad flags, 3 the
// engine died, 130 interrupted.
#pragma once

namespace rankgate::engine {

int Main(int argc, char** argv);

}  // namespace rankgate::engine
