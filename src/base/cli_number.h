// SPDX-License-Identifier: Apache-2.0
// The check of every command line flag that is a real number. CLI11's own Range lets NaN through (it is
// neither below nor above), and its PositiveNumber lets through seconds that no clock can hold and prints the
// largest double as the bound. Header only: who includes it links CLI11.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace rankgate {

/// What a flag of seconds, microseconds or rates takes at most.
inline constexpr double kMostNumber = 1e9;
/// The least of a flag that must be above zero: a millisecond, where it is seconds.
inline constexpr double kLeastPositive = 1e-3;

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

}  // namespace rankgate
