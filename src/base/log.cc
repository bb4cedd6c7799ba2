// SPDX-License-Identifier: Apache-2.0
#include "base/log.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <mutex>

#include "base/utf8.h"

namespace rankgate {
namespace {

struct Sink {
    std::atomic<LogLevel> level{LogLevel::kInfo};
    std::atomic<LogFormat> format{LogFormat::kText};
    std::mutex writing;        // one line at a time; held for no wait
    std::uint64_t dropped{0};  // since the last line that got through; under `writing`
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

/// Room for a line without waiting? A pipe that is writable takes PIPE_BUF bytes at once.
bool StderrHasRoom() noexcept {
    pollfd out{STDERR_FILENO, POLLOUT, 0};
    return ::poll(&out, 1, 0) == 1 && (out.revents & POLLOUT) != 0;
}

/// False if nothing of it was written. A long line whose reader stops in the middle stays cut.
bool WriteAll(std::string_view text) noexcept {
    bool begun = false;
    while (!text.empty() && StderrHasRoom()) {
        const ssize_t n = ::write(STDERR_FILENO, text.data(), std::min<std::size_t>(text.size(), PIPE_BUF));
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            break;  // a full disk, a closed pipe: nobody to tell
        }
        begun = true;
        text.remove_prefix(static_cast<std::size_t>(n));
    }
    return begun;
}

bool NeedsQuotes(std::string_view value) {
    return value.empty() || value.find_first_of(" =\"\n\r\t\\") != std::string_view::npos;
}

std::string Render(LogLevel level, std::string_view event, std::initializer_list<LogField> fields) {
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
    return line;
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
    if (LogEnabled(level)) {
        WriteLogLine(Render(level, event, fields));
    }
}

bool WriteLogLine(std::string_view line) noexcept {
    Sink& sink = TheSink();
    const std::string whole = std::string(line) + '\n';
    const std::lock_guard lock{sink.writing};
    if (sink.dropped > 0 && StderrHasRoom()) {
        const auto dropped = static_cast<std::int64_t>(sink.dropped);
        if (WriteAll(Render(LogLevel::kWarning, "log_lines_dropped", {{"lines", dropped}}) + '\n')) {
            sink.dropped = 0;
        }
    }
    if (!WriteAll(whole)) {
        ++sink.dropped;
        return false;
    }
    return true;
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
