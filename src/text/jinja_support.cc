// SPDX-License-Identifier: Apache-2.0
#include "text/jinja_support.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <ctime>

#include "base/utf8.h"

namespace rankgate::text::jinja_support {
namespace {

// How many steps pass between two looks at the clock (a system call).
constexpr std::int64_t kStepsPerClock = 2048;

struct State {
    Budget left;
    std::int64_t until_clock{kStepsPerClock};
    std::int64_t cpu_deadline{0};
    std::int64_t live{0};
    int depth{0};
    bool collect{false};
    Tracked* newest{nullptr};
};
thread_local State state;

std::int64_t ThreadCpuNs() noexcept {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

Scope::Scope(const Budget& budget, bool collect) noexcept {
    state.left = budget;
    state.collect = collect;
    state.until_clock = kStepsPerClock;
    state.cpu_deadline = ThreadCpuNs() + budget.cpu_ns;
    state.depth = 0;
    state.live = 0;
}
Scope::~Scope() {
    // Letting go may delete the value itself and others; each leaves the list first.
    while (state.newest != nullptr) {
        Tracked* const survivor = state.newest;
        survivor->Unlink();
        survivor->DropChildren();
    }
    state.collect = false;
    state.left = Budget{};
    state.cpu_deadline = 0;
    state.depth = 0;
}

void Step() {
    if (--state.left.steps < 0) {
        throw LimitExceeded{"takes too many steps"};
    }
    if (--state.until_clock <= 0) {
        state.until_clock = kStepsPerClock;
        if (state.cpu_deadline != 0 && ThreadCpuNs() > state.cpu_deadline) {
            state.until_clock = 1;  // whoever swallows this meets it again at the next step
            throw LimitExceeded{"takes too long"};
        }
    }
}

void Work(std::size_t bytes) noexcept {
    state.until_clock -= static_cast<std::int64_t>(bytes >> 8);
}

void Charge(std::size_t bytes) {
    Work(bytes);
    state.left.bytes -=
        static_cast<std::int64_t>(bytes > (std::size_t{1} << 40) ? std::size_t{1} << 40 : bytes);
    if (state.left.bytes < 0) {
        throw LimitExceeded{"produces too much text"};
    }
}

Tracked::Tracked() {
    Step();
    if (state.live >= state.left.values) {
        throw LimitExceeded{"holds too many values"};
    }
    ++state.live;
    if (state.collect) {
        next_ = state.newest;
        if (next_ != nullptr) {
            next_->previous_ = this;
        }
        state.newest = this;
        linked_ = true;
    }
}

Tracked::~Tracked() {
    --state.live;
    Unlink();
}

void Tracked::Unlink() noexcept {
    // Only values of the running scope are linked, so this is always the list of the thread that made them.
    if (!linked_) {
        return;
    }
    linked_ = false;
    (previous_ == nullptr ? state.newest : previous_->next_) = next_;
    if (next_ != nullptr) {
        next_->previous_ = previous_;
    }
    previous_ = next_ = nullptr;
}

Depth::Depth() {
    if (state.depth >= state.left.depth) {
        throw LimitExceeded{"recurses too deeply"};
    }
    ++state.depth;
}
Depth::~Depth() {
    --state.depth;
}

std::string FloatRepr(double value) {
    if (std::isnan(value)) {
        return "nan";
    }
    if (std::isinf(value)) {
        return value < 0 ? "-inf" : "inf";
    }
    // Python writes the shortest digits, positional while the exponent is in [-4, 16).
    std::array<char, 64> buffer{};
    const double magnitude = std::fabs(value);
    const bool positional = magnitude == 0 || (magnitude >= 1e-4 && magnitude < 1e16);
    const auto format = positional ? std::chars_format::fixed : std::chars_format::scientific;
    const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, format);
    std::string out(buffer.data(), end.ptr);
    if (positional && out.find('.') == std::string::npos) {
        out += ".0";
    }
    return out;
}

std::string StringRepr(std::string_view text) {
    static constexpr char kHex[] = "0123456789abcdef";
    const char quote = text.find('\'') != text.npos && text.find('"') == text.npos ? '"' : '\'';
    std::string out(1, quote);
    for (const char c : text) {
        const auto byte = static_cast<unsigned char>(c);
        if (c == quote || c == '\\') {
            out += '\\';
            out += c;
        } else if (c == '\n') {
            out += "\\n";
        } else if (c == '\r') {
            out += "\\r";
        } else if (c == '\t') {
            out += "\\t";
        } else if (byte < 0x20 || byte == 0x7F) {
            out += "\\x";
            out += kHex[byte >> 4];
            out += kHex[byte & 15];
        } else {
            out += c;
        }
    }
    out += quote;
    return out;
}

namespace {

// Length of the white space character (as Python's str.isspace sees it) at the head of `text`; 0 = none.
std::size_t SpaceAtHead(std::string_view text) noexcept {
    if (text.empty()) {
        return 0;
    }
    const auto byte = static_cast<unsigned char>(text[0]);
    if (byte == ' ' || (byte >= 0x09 && byte <= 0x0D) || (byte >= 0x1C && byte <= 0x1F)) {
        return 1;
    }
    if (byte < 0x80) {
        return 0;
    }
    if (text.starts_with("\xC2\x85") || text.starts_with("\xC2\xA0")) {
        return 2;
    }
    if (text.starts_with("\xE1\x9A\x80") || text.starts_with("\xE2\x80\xA8") ||
        text.starts_with("\xE2\x80\xA9") || text.starts_with("\xE2\x80\xAF") ||
        text.starts_with("\xE2\x81\x9F") || text.starts_with("\xE3\x80\x80")) {
        return 3;
    }
    if (text.starts_with("\xE2\x80") && text.size() >= 3 && static_cast<unsigned char>(text[2]) >= 0x80 &&
        static_cast<unsigned char>(text[2]) <= 0x8A) {
        return 3;
    }
    return 0;
}

std::size_t SpaceAtTail(std::string_view text) noexcept {
    for (std::size_t size = 1; size <= 3 && size <= text.size(); ++size) {
        if (SpaceAtHead(text.substr(text.size() - size)) == size) {
            return size;
        }
    }
    return 0;
}

std::size_t CodePointSize(std::string_view text) noexcept {
    const auto byte = static_cast<unsigned char>(text[0]);
    const std::size_t want = byte < 0xC0 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
    const std::size_t size = std::min(want, text.size());
    return IsValidUtf8(text.substr(0, size)) ? size : 1;
}

bool In(std::string_view name, std::initializer_list<std::string_view> names) noexcept {
    return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

std::string Strip(std::string_view text, bool left, bool right) {
    while (left) {
        const std::size_t size = SpaceAtHead(text);
        if (size == 0) {
            break;
        }
        text.remove_prefix(size);
    }
    while (right) {
        const std::size_t size = SpaceAtTail(text);
        if (size == 0) {
            break;
        }
        text.remove_suffix(size);
    }
    return std::string{text};
}

std::vector<std::string> SplitWhitespace(std::string_view text, std::int64_t max_splits) {
    std::vector<std::string> out;
    while (true) {
        while (const std::size_t size = SpaceAtHead(text)) {
            text.remove_prefix(size);
        }
        if (text.empty()) {
            return out;
        }
        if (max_splits == 0) {
            out.push_back(Strip(text, false, true));
            return out;
        }
        --max_splits;
        std::size_t end = 0;
        while (end < text.size() && SpaceAtHead(text.substr(end)) == 0) {
            ++end;
        }
        out.emplace_back(text.substr(0, end));
        text.remove_prefix(end);
    }
}

std::vector<std::string> CodePoints(std::string_view text) {
    std::vector<std::string> out;
    while (!text.empty()) {
        const std::size_t size = CodePointSize(text);
        out.emplace_back(text.substr(0, size));
        text.remove_prefix(size);
    }
    return out;
}

std::size_t CountCodePoints(std::string_view text) noexcept {
    return static_cast<std::size_t>(std::count_if(
        text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

void AppendUtf8(std::string& out, std::uint32_t code_point) {
    if (code_point > 0x10FFFF || (code_point >= 0xD800 && code_point < 0xE000)) {
        code_point = 0xFFFD;
    }
    const auto put = [&](std::uint32_t byte) { out += static_cast<char>(static_cast<unsigned char>(byte)); };
    if (code_point < 0x80) {
        put(code_point);
    } else if (code_point < 0x800) {
        put(0xC0 | (code_point >> 6));
        put(0x80 | (code_point & 0x3F));
    } else if (code_point < 0x10000) {
        put(0xE0 | (code_point >> 12));
        put(0x80 | ((code_point >> 6) & 0x3F));
        put(0x80 | (code_point & 0x3F));
    } else {
        put(0xF0 | (code_point >> 18));
        put(0x80 | ((code_point >> 12) & 0x3F));
        put(0x80 | ((code_point >> 6) & 0x3F));
        put(0x80 | (code_point & 0x3F));
    }
}

bool IsDictMethod(std::string_view name) noexcept {
    return In(name, {"get", "keys", "values", "items"});
}
bool IsListMethod(std::string_view name) noexcept {
    return In(name, {"append", "pop"});
}
bool IsStrMethod(std::string_view name) noexcept {
    return In(name, {"upper",      "lower",      "strip",      "rstrip",       "lstrip",      "title",
                     "capitalize", "startswith", "endswith",   "split",        "rsplit",      "replace",
                     "format",     "join",       "splitlines", "find",         "rfind",       "index",
                     "count",      "isdigit",    "isspace",    "removeprefix", "removesuffix"});
}

}  // namespace rankgate::text::jinja_support
