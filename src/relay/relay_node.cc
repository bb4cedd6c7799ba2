// SPDX-License-Identifier: Apache-2.0
// One rank as a process of its own, driven by process_test.cc: key=value arguments, one event per line on
// stdout, one answer per line on stdin where it was told to hold. Linked with the hooked library, so that a
// test can stop it at any named point.
#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "relay/hooks.h"
#include "relay/relay.h"

namespace {

using namespace rankgate::relay;

constexpr std::array<const char*, 11> kPoints{"before_dial",  "before_listen", "after_hello",   "before_map",
                                              "before_ready", "before_go",     "before_go_ack", "in_publish",
                                              "in_read",      "before_wait",   "before_wake"};
constexpr std::array<const char*, 7> kActions{"none", "drop",   "duplicate", "corrupt",
                                              "skip", "replay", "old_epoch"};

std::string g_hold;         // point at which to ask, once
std::uint64_t g_hold_step;  // 0 = any
int g_hold_skip;            // let this many hits pass first
std::string g_always;       // "point:action" on every hit
std::string g_tell;         // point whose first hit is only reported

void Say(const std::string& text) {
    const std::string line = text + "\n";
    [[maybe_unused]] const ssize_t n = ::write(STDOUT_FILENO, line.data(), line.size());
}

std::string Ask() {
    std::string line;
    char c = 0;
    while (::read(STDIN_FILENO, &c, 1) == 1 && c != '\n') {
        line += c;
    }
    return line;
}

HookAction ActionFrom(const std::string& name) {
    for (std::size_t i = 0; i < kActions.size(); ++i) {
        if (name == kActions[i]) {
            return static_cast<HookAction>(i);
        }
    }
    return HookAction::kNone;
}

HookAction OnHook(Point point, std::uint64_t argument) {
    const std::string name = kPoints[static_cast<std::size_t>(point)];
    if (g_tell == name) {
        g_tell.clear();
        Say("reached " + name);
    }
    if (g_hold == name && (g_hold_step == 0 || g_hold_step == argument)) {
        if (g_hold_skip-- > 0) {
            return HookAction::kNone;
        }
        g_hold.clear();
        Say("holds " + name);
        return ActionFrom(Ask());
    }
    if (!g_always.empty() && g_always.substr(0, g_always.find(':')) == name) {
        return ActionFrom(g_always.substr(g_always.find(':') + 1));
    }
    return HookAction::kNone;
}

std::string Describe(const Failure& f) {
    return "fail " + std::string{CodeName(f.code)} + " origin=" + std::to_string(f.origin_rank) +
           " phase=" + std::string{PhaseName(f.phase)} + " step=" + std::to_string(f.step) +
           " expected=" + std::to_string(f.expected) + " got=" + std::to_string(f.got) +
           " missing=" + std::to_string(f.missing);
}

/// Copies of every socket that neither the fork handler nor exec knows, held by a child that outlives us.
void Leak() {
    std::vector<int> copies;
    for (int fd = 3; fd < 64; ++fd) {
        struct stat info {};
        if (::fstat(fd, &info) == 0 && S_ISSOCK(info.st_mode)) {
            copies.push_back(::dup(fd));
        }
    }
    const pid_t child = ::fork();
    if (child == 0) {
        ::close(STDOUT_FILENO);
        ::close(STDIN_FILENO);
        ::sleep(5);
        ::_exit(0);
    }
    for (const int fd : copies) {
        ::close(fd);
    }
    Say("leaked");
}

std::string g_salt;  // makes one group's requests unlike another's

std::string FrameText(std::uint64_t step, std::uint64_t frame, std::size_t bytes) {
    std::string text(bytes, static_cast<char>('a' + (step + frame) % 26));
    const std::string tag = g_salt + std::to_string(step) + ":" + std::to_string(frame);
    text.replace(0, std::min(bytes, tag.size()), tag.substr(0, bytes));
    return text;
}

}  // namespace

int main(int argc, char** argv) {
    std::map<std::string, std::string> args;
    for (int i = 1; i < argc; ++i) {
        const std::string arg = argv[i];
        const std::size_t eq = arg.find('=');
        args[arg.substr(0, eq)] = eq == std::string::npos ? "1" : arg.substr(eq + 1);
    }
    const auto number = [&](const char* key, double fallback) {
        return args.contains(key) ? std::atof(args[key].c_str()) : fallback;
    };
    Config config;
    config.rank = static_cast<int>(number("rank", 0));
    config.size = static_cast<int>(number("size", 1));
    config.where = args["where"];
    config.epoch = static_cast<std::uint64_t>(number("epoch", 1));
    config.backend = args["backend"] == "tcp"      ? Backend::kTcp
                     : args["backend"] == "stream" ? Backend::kStream
                                                   : Backend::kRing;
    config.join = Seconds{number("join", 10)};
    config.publish_stall = Seconds{number("publish_stall", 10)};
    config.stall_after = Seconds{number("stall_after", 0)};
    config.max_lag_steps = static_cast<int>(number("lag", 2));
    // digest=N: this rank's state is another one from step N on; 0 = never.
    config.digest = args.contains("digest");
    const auto odd_from = static_cast<std::uint64_t>(number("digest", 0));
    const auto digest_of = [&](std::uint64_t step) {
        return step + (odd_from != 0 && step >= odd_from ? 1U : 0U);
    };
    config.ring_slots = static_cast<std::size_t>(number("ring_slots", 1024));
    if (const std::string why = config.Validate(); !why.empty()) {
        Say("bad config " + why);
        return 2;
    }
    g_hold = args["hold"];
    g_hold_step = static_cast<std::uint64_t>(number("hold_step", 0));
    g_hold_skip = static_cast<int>(number("hold_skip", 0));
    g_always = args["always"];
    g_tell = args["tell"];
    g_salt = args["salt"];
    g_hook = &OnHook;
    const auto steps = static_cast<std::uint64_t>(number("steps", 1));
    const auto frames_per_step = static_cast<std::uint64_t>(number("frames", 1));
    const auto bytes = static_cast<std::size_t>(number("bytes", 64));
    const auto slow_us = static_cast<unsigned>(number("slow_us", 0));
    const bool idle = args.contains("idle");
    const auto failed = [](const Failure& failure) {
        Say(Describe(failure));
        return 3;
    };
    std::uint64_t hash = 0xCBF29CE484222325ULL;
    const auto mix = [&](const void* data, std::size_t n) {
        // Eight bytes at a time: the hash must not be what a slow reader is slow at.
        const auto* p = static_cast<const char*>(data);
        for (; n >= 8; p += 8, n -= 8) {
            std::uint64_t word = 0;
            std::memcpy(&word, p, 8);
            hash = (hash ^ word) * 0x100000001B3ULL;
        }
        for (; n > 0; ++p, --n) {
            hash = (hash ^ static_cast<unsigned char>(*p)) * 0x100000001B3ULL;
        }
    };

    if (config.rank == 0) {
        Leader leader{config};
        auto joined = leader.Join();
        if (!joined) {
            return failed(joined.failure());
        }
        if (args.contains("say_joined")) {
            Say("joined");
        }
        for (std::uint64_t s = 1; s <= steps; ++s) {
            std::vector<std::string> texts;
            std::vector<Frame> frames;
            for (std::uint64_t f = 0; f < frames_per_step; ++f) {
                texts.push_back(FrameText(s, f, bytes));
            }
            for (const std::string& text : texts) {
                frames.push_back(std::as_bytes(std::span{text}));
                mix(text.data(), text.size());
            }
            std::uint64_t out = 0;
            auto done = leader.Publish(frames, &out);
            if (!done) {
                // Asked to shut down after a failure, it says the same at once.
                if (auto end = leader.Finish(Seconds{20}); end || end.failure().code != done.failure().code) {
                    Say("finish does not know of the failure");
                }
                return failed(done.failure());
            }
            if (config.digest) {
                if (auto set = leader.SetDigest(digest_of(s)); !set) {
                    return failed(set.failure());
                }
            }
        }
        if (idle) {
            Say("idle");
            pollfd p{leader.failure_fd(), POLLIN, 0};
            ::poll(&p, 1, 20000);
            if (auto failure = leader.failure()) {
                return failed(*failure);
            }
        }
        auto end = leader.Finish(Seconds{20});
        if (!end) {
            return failed(end.failure());
        }
        Say("hash " + std::to_string(hash) + " steps " + std::to_string(steps));
        return 0;
    }
    Follower follower{config};
    auto joined = follower.Join();
    if (!joined) {
        return failed(joined.failure());
    }
    if (args.contains("say_joined")) {
        Say("joined");
    }
    if (args.contains("leak")) {
        Leak();
    }
    std::uint64_t got_steps = 0;
    bool told_idle = false;
    for (;;) {
        if (idle && got_steps == steps && !told_idle) {
            told_idle = true;
            Say("idle");
        }
        Step step;
        auto got = follower.NextStep(std::nullopt, &step);
        if (!got) {
            if (got.failure().code == Code::kClosed) {
                break;
            }
            Say("had " + std::to_string(got_steps));
            return failed(got.failure());
        }
        ++got_steps;
        if (config.digest) {
            if (auto set = follower.SetDigest(digest_of(step.number())); !set) {
                return failed(set.failure());
            }
        }
        for (std::size_t i = 0; i < step.size(); ++i) {
            mix(step[i].data(), step[i].size());
        }
        if (slow_us > 0) {
            ::usleep(slow_us);
        }
    }
    auto end = follower.Finish(Seconds{20});
    if (!end) {
        return failed(end.failure());
    }
    Say("hash " + std::to_string(hash) + " steps " + std::to_string(got_steps));
    return 0;
}
