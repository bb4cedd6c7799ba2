// SPDX-License-Identifier: Apache-2.0
// A FakeRank as a program, for tests that kill, stop or restart a rank: rg_fake_rank ADDRESS INDEX DIALECT
// LOAD_US STEP_US. Ends when its parent does.
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "transport/fake_rank.h"

int main(int argc, char** argv) {
    using namespace rankgate::transport;
    if (argc != 7) {
        std::fprintf(stderr,
                     "usage: rg_fake_rank ADDRESS INDEX vllm|tokenspeed LOAD_US STEP_US MAX_MODEL_LEN\n");
        return 2;
    }
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    FakeRankOptions options;
    options.handshake_address = argv[1];
    options.engine_index = static_cast<std::uint16_t>(std::atoi(argv[2]));
    if (std::string_view{argv[3]} == "tokenspeed") {
        options.dialect = Dialect::kTokenSpeed;
        options.version = "tokenspeed-0.1.1";
    }
    options.load_time = std::chrono::microseconds(std::atoll(argv[4]));
    options.step_time = std::chrono::microseconds(std::atoll(argv[5]));
    options.max_model_len = std::atoll(argv[6]);
    options.instance_id = "pid-" + std::to_string(::getpid());
    options.record = false;
    // Blocked before the rank's threads start, so that only sigwait below sees them.
    sigset_t signals;
    ::sigemptyset(&signals);
    ::sigaddset(&signals, SIGUSR1);
    ::sigaddset(&signals, SIGUSR2);
    ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
    FakeRank rank{options};
    for (;;) {
        int signal = 0;
        ::sigwait(&signals, &signal);
        rank.Freeze(signal == SIGUSR1);
    }
}
