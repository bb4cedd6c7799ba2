// SPDX-License-Identifier: Apache-2.0
// What every command line has in common: the check of a flag that is a real number, and the end of a command
// that could not be parsed. Header only: who includes it links CLI11.
#pragma once

#include <CLI/CLI.hpp>
#include <iostream>
#include <string>
#include <string_view>

namespace rankgate {

/// What a flag of seconds, microseconds or rates takes at most.
inline constexpr double kMostNumber = 1e9;
/// The least of a flag that must be above zero: a millisecond, where it is seconds.
inline constexpr double kLeastPositive = 1e-3;

/// CLI11's own Range lets NaN through (it is neither below nor above), and its PositiveNumber lets through
/// seconds that no clock can hold and prints the largest double as the bound.
inline CLI::Validator NumberWithin(double low, double high) {
    const std::string bounds = "[" + CLI::detail::to_string(low) + " - " + CLI::detail::to_string(high) + "]";
    return CLI::Validator{[low, high, bounds](std::string& text) {
                              double value = 0;
                              const bool within =
                                  CLI::detail::lexical_cast(text, value) && value >= low && value <= high;
                              return within ? std::string{} : "Value " + text + " not in range " + bounds;
                          },
                          bounds};
}

/// The exit code after a failed parse: help and version are printed and are no failure (0); anything else is
/// one line with the command's name, `message` and 2.
inline int ParseFailed(const CLI::App& app, const CLI::ParseError& error, std::string_view message) {
    if (error.get_exit_code() == 0) {
        return app.exit(error);
    }
    std::cerr << app.get_name() << ": " << message << '\n';
    return 2;
}

}  // namespace rankgate
