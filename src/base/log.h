// SPDX-License-Identifier: Apache-2.0
// The one façade over the logging library: an event name plus key/value pairs, as text or as one JSON object
// a line on stderr.
//   LogInfo("rank_live", {{"group", 0}, {"rank", 1}, {"engine", "vllm 0.32.0"}});
// Thread-safe; never called per token. Values are sanitised to valid UTF-8. A site that input can drive is
// wrapped in a LogLimiter. A reader of stderr that stands still costs lines, which are counted, and never
// time.
#pragma once

#include <atomic>
#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

namespace rankgate {

enum class LogLevel : std::uint8_t { kDebug, kInfo, kWarning, kError };
enum class LogFormat : std::uint8_t { kText, kJson };

/// One key with a string, integer, floating or boolean value. The value is copied as text at construction.
struct LogField {
    LogField(std::string_view k, std::string_view v) : key{k}, value{v} {}
    LogField(std::string_view k, const char* v) : key{k}, value{v} {}
    LogField(std::string_view k, const std::string& v) : key{k}, value{v} {}
    LogField(std::string_view k, bool v) : key{k}, value{v ? "true" : "false"}, bare{true} {}
    template <class T>
        requires(std::integral<T> || std::floating_point<T>)
    LogField(std::string_view k, T v) : key{k}, value{std::to_string(v)}, bare{true} {}

    std::string_view key;
    std::string value;
    bool bare{false};  // printed without quotes in JSON
};

void InitLog(LogLevel level, LogFormat format);
bool LogEnabled(LogLevel level) noexcept;
void Log(LogLevel level, std::string_view event, std::initializer_list<LogField> fields) noexcept;

inline void LogDebug(std::string_view event, std::initializer_list<LogField> fields = {}) noexcept {
    Log(LogLevel::kDebug, event, fields);
}
inline void LogInfo(std::string_view event, std::initializer_list<LogField> fields = {}) noexcept {
    Log(LogLevel::kInfo, event, fields);
}
inline void LogWarning(std::string_view event, std::initializer_list<LogField> fields = {}) noexcept {
    Log(LogLevel::kWarning, event, fields);
}
inline void LogError(std::string_view event, std::initializer_list<LogField> fields = {}) noexcept {
    Log(LogLevel::kError, event, fields);
}

/// Writes `line` and a newline to stderr in one piece, or drops it: true if it was written. Never blocks, and
/// says how many lines were dropped as soon as there is room again.
bool WriteLogLine(std::string_view line) noexcept;

/// Lets `per_second` events a second through and counts the rest. Synchronised.
class LogLimiter {
  public:
    explicit LogLimiter(std::uint32_t per_second) : per_second_{per_second} {}
    /// True if the event may be logged; `suppressed` then holds how many were dropped since the last one let
    /// through.
    bool Allow(std::uint64_t& suppressed) noexcept;

  private:
    const std::uint32_t per_second_;
    std::atomic<std::int64_t> window_{-1};
    std::atomic<std::uint32_t> used_{0};
    std::atomic<std::uint64_t> suppressed_{0};
};

}  // namespace rankgate
