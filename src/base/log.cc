// SPDX-License-Identifier: Apache-2.0
// The logging library stays inside this file: its header costs seconds in every translation unit that sees
// it.
#include "base/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <chrono>
#include <memory>

#include "base/utf8.h"

namespace rankgate {
namespace {

struct Sink {
    std::shared_ptr<spdlog::logger> logger;
    std::atomic<LogLevel> level{LogLevel::kInfo};
    std::atomic<LogFormat> format{LogFormat::kText};

    Sink()
        : logger{std::make_shared<spdlog::logger>("rankgate",
                                                  std::make_shared<spdlog::sinks::stderr_sink_mt>())} {
        logger->set_pattern("%v");
        logger->set_level(spdlog::level::trace);
        logger->flush_on(spdlog::level::trace);
    }
};

Sink& TheSink() {
    static Sink* const sink = new Sink;  // never destroyed: threads may log until the very end
    return *sink;
}

const char* LevelName(LogLevel level) {
    switch (level) {
        case LogLevel::kDebug:
            return "debug";
        case LogLevel::kInfo:
            return "info";
        case LogLevel::kWarning:
            return "warning";
        case LogLevel::kError:
            return "error";
    }
    return "?";
}

std::string Timestamp() {
    const auto now = std::chrono::system_clock::now();
    const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
    const auto millis =
        std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count() % 1000;
    std::tm utc{};
    gmtime_r(&seconds, &utc);
    char text[40];
    const std::size_t n = std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &utc);
    std::snprintf(text + n, sizeof text - n, ".%03dZ", static_cast<int>(millis));
    return text;
}

bool NeedsQuotes(std::string_view value) {
    return value.empty() || value.find_first_of(" =\"\n\r\t\\") != std::string_view::npos;
}

}  // namespace

void InitLog(LogLevel level, LogFormat format) {
    TheSink().level = level;
    TheSink().format = format;
}

bool LogEnabled(LogLevel level) noexcept {
    return level >= TheSink().level.load(std::memory_order_relaxed);
}

void Log(LogLevel level, std::string_view event, std::initializer_list<LogField> fields) noexcept {
    if (!LogEnabled(level)) {
        return;
    }
    std::string line;
    if (TheSink().format.load(std::memory_order_relaxed) == LogFormat::kJson) {
        line = "{\"time\":\"" + Timestamp() + "\",\"level\":\"" + LevelName(level) + "\",\"event\":";
        AppendJsonString(line, event);
        for (const LogField& field : fields) {
            line += ',';
            AppendJsonString(line, field.key);
            line += ':';
            if (field.bare) {
                line += field.value;
            } else {
                AppendJsonString(line, field.value);
            }
        }
        line += '}';
    } else {
        line = Timestamp() + ' ' + LevelName(level) + ' ' + std::string(event);
        for (const LogField& field : fields) {
            line += ' ';
            line += field.key;
            line += '=';
            if (!field.bare && NeedsQuotes(field.value)) {
                AppendJsonString(line, field.value);
            } else {
                line += ToValidUtf8(field.value);
            }
        }
    }
    TheSink().logger->log(spdlog::level::info, spdlog::string_view_t(line.data(), line.size()));
}

bool LogLimiter::Allow(std::uint64_t& suppressed) noexcept {
    const std::int64_t second =
        std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now().time_since_epoch())
            .count();
    std::int64_t window = window_.load(std::memory_order_relaxed);
    if (window != second && window_.compare_exchange_strong(window, second, std::memory_order_relaxed)) {
        used_.store(0, std::memory_order_relaxed);
    }
    if (used_.fetch_add(1, std::memory_order_relaxed) >= per_second_) {
        suppressed_.fetch_add(1, std::memory_order_relaxed);
        return false;
    }
    suppressed = suppressed_.exchange(0, std::memory_order_relaxed);
    return true;
}

}  // namespace rankgate
