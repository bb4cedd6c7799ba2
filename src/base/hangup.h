// SPDX-License-Identifier: Apache-2.0
// SIGHUP ends a command in order, as SIGTERM does, unless it was ignored when the command was started
// (nohup). Asked by every command that runs until it is told to stop.
#pragma once

#include <csignal>

namespace rankgate {

/// To be asked before this process sets an action for SIGHUP of its own.
inline bool HangupIgnored() noexcept {
    struct sigaction hangup {};
    return ::sigaction(SIGHUP, nullptr, &hangup) == 0 && hangup.sa_handler == SIG_IGN;
}

}  // namespace rankgate
