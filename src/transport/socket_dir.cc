// SPDX-License-Identifier: Apache-2.0
#include "transport/socket_dir.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/log.h"

namespace rankgate::transport {
namespace {

constexpr std::string_view kMagic = "rankgate-facts 2";
constexpr std::int32_t kMaxRanks = 65536;

/// No gateway could use this directory.
Error Refuse(std::string text) {
    return Error::Invalid("--socket-dir", std::move(text));
}
/// Another gateway uses it now.
Error Taken(std::string text) {
    return Error{ErrorCode::kUnavailable, std::move(text), "--socket-dir", false};
}
Error SystemError(const std::string& what, int error) {
    return Error{SettingError(error), what + ": " + std::strerror(error), "--socket-dir", false};
}

/// Makes `path` and missing parents, all 0700.
Status MakeDirectory(const std::string& path) {
    for (std::size_t at = 1; at <= path.size(); ++at) {
        if (at != path.size() && path[at] != '/') {
            continue;
        }
        const std::string part = path.substr(0, at);
        if (::mkdir(part.c_str(), 0700) != 0 && errno != EEXIST) {
            return SystemError("--socket-dir " + path + ": cannot create " + part, errno);
        }
    }
    return {};
}

Status CheckDirectory(const std::string& path) {
    struct stat info {};
    if (::lstat(path.c_str(), &info) != 0) {
        return SystemError("--socket-dir " + path, errno);
    }
    if (!S_ISDIR(info.st_mode)) {
        return Refuse("--socket-dir " + path + " is not a directory");
    }
    if (info.st_uid != ::geteuid()) {
        return Refuse("--socket-dir " + path + " belongs to uid " + std::to_string(info.st_uid) +
                      ", not to us: whoever owns it could replace the sockets");
    }
    if ((info.st_mode & 077) != 0) {
        return Refuse("--socket-dir " + path + " is open to others; run: chmod 700 " + path);
    }
    return {};
}

char HexDigit(unsigned value) {
    return "0123456789abcdef"[value & 15U];
}

std::string ToHex(std::string_view bytes) {
    std::string out;
    out.reserve(bytes.size() * 2 + 1);
    for (const char c : bytes) {
        const auto byte = static_cast<unsigned char>(c);
        out.push_back(HexDigit(byte >> 4U));
        out.push_back(HexDigit(byte));
    }
    return out.empty() ? "-" : out;
}

bool FromHex(std::string_view text, std::string& out) {
    out.clear();
    if (text == "-") {
        return true;
    }
    if (text.size() % 2 != 0) {
        return false;
    }
    const auto digit = [](char c) {
        return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    };
    for (std::size_t i = 0; i < text.size(); i += 2) {
        const int high = digit(text[i]);
        const int low = digit(text[i + 1]);
        if (high < 0 || low < 0) {
            return false;
        }
        out.push_back(static_cast<char>(high * 16 + low));
    }
    return true;
}

bool ParseInt(std::string_view text, std::int32_t low, std::int32_t high, std::int32_t& out) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
    return error == std::errc{} && end == text.data() + text.size() && out >= low && out <= high;
}

/// Is anybody accepting on this socket file? A full backlog counts as yes.
bool SomebodyListens(const std::string& path) {
    const UniqueFd fd{::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)};
    if (!fd.valid()) {
        return true;
    }
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
    if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) {
        return true;
    }
    return errno != ECONNREFUSED && errno != ENOENT;
}

}  // namespace

std::string SerialiseFacts(const LinkFacts& facts) {
    std::string out{kMagic};
    out += "\ndialect " + facts.dialect + "\nsize " + std::to_string(facts.size) + "\nbase " +
           std::to_string(facts.base_index) + "\nhandshake " + ToHex(facts.handshake) + "\ninput " +
           ToHex(facts.input) + "\noutput " + ToHex(facts.output) + "\n";
    for (const auto& [rank, known] : facts.ranks) {
        out += "rank " + std::to_string(rank) + " " + ToHex(known.raw) + " " +
               ToHex(known.parallel_config_hash) + " " + std::to_string(known.pid) + "\n";
    }
    out += "end\n";
    return out;
}

Result<LinkFacts> ParseFacts(std::string_view text, std::optional<Dialect> dialect) {
    const auto bad = [](std::string what) {
        return Error{ErrorCode::kDecode, "facts file: " + std::move(what), "--socket-dir", false};
    };
    LinkFacts facts;
    bool first = true;
    while (!text.empty()) {
        const std::size_t newline = text.find('\n');
        if (newline == std::string_view::npos) {
            return bad("unfinished line");
        }
        const std::string_view line = text.substr(0, newline);
        text.remove_prefix(newline + 1);
        if (first) {
            if (line != kMagic) {
                return bad("unknown format");
            }
            first = false;
            continue;
        }
        if (line == "end") {
            if (!text.empty()) {
                return bad("text after the end");
            }
            if (facts.size < 1) {
                return bad("no size");
            }
            for (const auto& [rank, known] : facts.ranks) {
                if (wire::DialectName(known.ready.dialect) != facts.dialect) {
                    return bad("rank " + std::to_string(rank) + " is not of dialect " + facts.dialect);
                }
            }
            return facts;
        }
        const std::size_t space = line.find(' ');
        if (space == std::string_view::npos) {
            return bad("line without a value");
        }
        const std::string_view key = line.substr(0, space);
        const std::string_view value = line.substr(space + 1);
        bool fine = true;
        if (key == "dialect") {
            facts.dialect = value;
        } else if (key == "size") {
            fine = ParseInt(value, 1, kMaxRanks, facts.size);
        } else if (key == "base") {
            fine = ParseInt(value, 0, kMaxRanks - 1, facts.base_index);
        } else if (key == "handshake") {
            fine = FromHex(value, facts.handshake);
        } else if (key == "input") {
            fine = FromHex(value, facts.input);
        } else if (key == "output") {
            fine = FromHex(value, facts.output);
        } else if (key == "rank") {
            const std::size_t second = value.find(' ');
            const std::size_t third = second == std::string_view::npos ? second : value.find(' ', second + 1);
            const std::size_t fourth = third == std::string_view::npos ? third : value.find(' ', third + 1);
            std::int32_t rank = 0;
            std::int32_t pid = 0;
            std::string raw;
            std::string hash;
            fine = fourth != std::string_view::npos &&
                   ParseInt(value.substr(0, second), 0, kMaxRanks - 1, rank) && rank < facts.size &&
                   FromHex(value.substr(second + 1, third - second - 1), raw) &&
                   FromHex(value.substr(third + 1, fourth - third - 1), hash) &&
                   ParseInt(value.substr(fourth + 1), 0, INT32_MAX, pid);
            if (fine) {
                auto known = ParseReadyResponse(raw, dialect);
                if (!known.ok()) {
                    return bad("rank " + std::to_string(rank) + ": " + known.error().message);
                }
                known->parallel_config_hash = hash;
                known->pid = pid;
                facts.ranks[rank] = std::move(*known);
            }
        } else {
            fine = false;
        }
        if (!fine) {
            return bad("bad line \"" + std::string(line.substr(0, 60)) + "\"");
        }
    }
    return bad("no end");
}

Result<SocketDir> SocketDir::Open(const std::string& path, std::int32_t group) {
    SocketDir dir;
    dir.group_ = group;
    if (path.empty()) {
        const char* base = std::getenv("TMPDIR");
        std::string pattern =
            std::string(base != nullptr && base[0] == '/' ? base : "/tmp") + "/rankgate-XXXXXX";
        if (::mkdtemp(pattern.data()) == nullptr) {
            // Nobody named this directory: a file system that is read-only or full is the machine's state.
            return Taken("cannot create " + pattern + ": " + std::strerror(errno) +
                         "; name another folder with --socket-dir");
        }
        dir.path_ = pattern;
        dir.temporary_ = true;
        return dir;
    }
    dir.path_ = path;
    while (dir.path_.size() > 1 && dir.path_.back() == '/') {
        dir.path_.pop_back();
    }
    if (dir.path_[0] != '/') {
        char* cwd = ::getcwd(nullptr, 0);
        if (cwd == nullptr) {
            return SystemError("cannot resolve " + path, errno);
        }
        dir.path_ = std::string(cwd) + "/" + dir.path_;
        std::free(cwd);
    }
    if (Status made = MakeDirectory(dir.path_); !made.ok()) {
        return made.error();
    }
    if (Status fine = CheckDirectory(dir.path_); !fine.ok()) {
        return fine.error();
    }
    const std::string lock = dir.path_ + "/g" + std::to_string(group) + ".lock";
    dir.lock_ = UniqueFd{::open(lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600)};
    if (!dir.lock_.valid()) {
        return SystemError("cannot open " + lock, errno);
    }
    if (::flock(dir.lock_.get(), LOCK_EX | LOCK_NB) != 0) {
        return Taken("another gateway uses group " + std::to_string(group) + " of --socket-dir " + dir.path_);
    }
    return dir;
}

SocketDir::SocketDir(SocketDir&& other) noexcept
    : path_{std::move(other.path_)},
      group_{other.group_},
      temporary_{std::exchange(other.temporary_, false)},
      claimed_{std::exchange(other.claimed_, {})},
      lock_{std::move(other.lock_)} {
    other.path_.clear();
}

SocketDir& SocketDir::operator=(SocketDir&& other) noexcept {
    if (this != &other) {
        Remove();
        path_ = std::move(other.path_);
        other.path_.clear();
        group_ = other.group_;
        temporary_ = std::exchange(other.temporary_, false);
        claimed_ = std::exchange(other.claimed_, {});
        lock_ = std::move(other.lock_);
    }
    return *this;
}

SocketDir::~SocketDir() {
    Remove();
}

void SocketDir::Remove() noexcept {
    for (const std::string& path : claimed_) {
        ::unlink(path.c_str());
    }
    claimed_.clear();
    if (temporary_ && !path_.empty()) {
        ::rmdir(path_.c_str());
        temporary_ = false;
    }
}

Result<std::string> SocketDir::Claim(std::string_view name) {
    const std::string path = path_ + "/" + std::string(name);
    constexpr std::size_t kMax = sizeof(sockaddr_un{}.sun_path) - 1;
    if (path.size() > kMax) {
        return Refuse("--socket-dir: the socket path " + path + " has " + std::to_string(path.size()) +
                      " bytes, the system allows " + std::to_string(kMax) + ": choose a shorter directory");
    }
    struct stat info {};
    if (::lstat(path.c_str(), &info) != 0) {
        if (errno != ENOENT) {
            return SystemError("cannot look at " + path, errno);
        }
        claimed_.push_back(path);
        return "ipc://" + path;
    }
    if (!S_ISSOCK(info.st_mode)) {
        return Refuse(path + " exists and is not a socket: not touching it");
    }
    if (SomebodyListens(path)) {
        return Taken("somebody is listening on " + path + ": another gateway uses this --socket-dir");
    }
    if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
        return SystemError("cannot remove stale socket " + path, errno);
    }
    claimed_.push_back(path);
    LogInfo("stale_socket_removed", {{"path", path}});
    return "ipc://" + path;
}

std::string SocketDir::FactsPath() const {
    return path_ + "/g" + std::to_string(group_) + ".facts";
}

Status SocketDir::Save(const LinkFacts& facts) const {
    const std::string path = FactsPath();
    const std::string temporary = path + ".new";
    ::unlink(temporary.c_str());
    {
        const UniqueFd fd{
            ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600)};
        if (!fd.valid()) {
            return SystemError("cannot write " + temporary, errno);
        }
        const std::string text = SerialiseFacts(facts);
        std::size_t done = 0;
        while (done < text.size()) {
            const ssize_t n = ::write(fd.get(), text.data() + done, text.size() - done);
            if (n < 0 && errno == EINTR) {
                continue;
            }
            if (n <= 0) {
                return SystemError("cannot write " + temporary, errno);
            }
            done += static_cast<std::size_t>(n);
        }
    }
    if (::rename(temporary.c_str(), path.c_str()) != 0) {
        return SystemError("cannot replace " + path, errno);
    }
    return {};
}

Result<std::optional<LinkFacts>> SocketDir::Load(std::optional<Dialect> dialect) const {
    const std::string path = FactsPath();
    const UniqueFd fd{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW)};
    if (!fd.valid()) {
        if (errno == ENOENT) {
            return std::optional<LinkFacts>{};
        }
        return SystemError("cannot read " + path, errno);
    }
    struct stat info {};
    if (::fstat(fd.get(), &info) != 0 || !S_ISREG(info.st_mode) || info.st_uid != ::geteuid() ||
        (info.st_mode & 077) != 0) {
        return Refuse(path + " is not a private file of ours: not trusting it");
    }
    if (info.st_size > static_cast<off_t>(kMaxFactsBytes)) {
        return Refuse(path + " is too large to be ours");
    }
    std::string text(static_cast<std::size_t>(info.st_size), '\0');
    std::size_t done = 0;
    while (done < text.size()) {
        const ssize_t n = ::read(fd.get(), text.data() + done, text.size() - done);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            break;
        }
        done += static_cast<std::size_t>(n);
    }
    text.resize(done);
    auto facts = ParseFacts(text, dialect);
    if (!facts.ok()) {
        return facts.error();
    }
    return std::optional<LinkFacts>{std::move(*facts)};
}

}  // namespace rankgate::transport
