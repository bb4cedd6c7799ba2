// SPDX-License-Identifier: Apache-2.0
// Command-line flags, TOML file and environment of the gateway, shared by `rankgate gateway` and `rankgate
// serve`. Start-up only.
#pragma once

#include <string>

#include "base/result.h"
#include "gateway/options.h"

namespace CLI {
class App;
class ParseError;
}  // namespace CLI

namespace rankgate::gateway {

/// The HTTP and model flags that `serve` and `gateway` share. `options` must outlive the parse.
void AddHttpFlags(CLI::App& app, GatewayOptions& options);
/// The engine-side flags of `gateway` alone.
void AddEngineFlags(CLI::App& app, GatewayOptions& options);

/// What to say about a parse that failed: names the flag, the value and what is allowed.
std::string FlagMessage(const CLI::ParseError& error);

/// Parses `rankgate gateway` arguments (argv[0] is skipped). An error's message names flag, value and what is
/// allowed. `exit_code` >= 0 means: printed help or version, leave with it.
Result<GatewayOptions> ParseGatewayArgs(int argc, char** argv, int& exit_code);

}  // namespace rankgate::gateway
