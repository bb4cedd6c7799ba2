// SPDX-License-Identifier: Apache-2.0
// The small commands around the gateway. Each takes argv[0] = its own name and returns the exit code.
#pragma once

namespace rankgate::apps {

int TopMain(int argc, char** argv);
int BenchMain(int argc, char** argv);
int SimMain(int argc, char** argv);
int DoctorMain(int argc, char** argv);

}  // namespace rankgate::apps
