// SPDX-License-Identifier: Apache-2.0
#include "launch/supervisor.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <thread>

#include "base/clock.h"
#include "base/log.h"
#include "base/unique_fd.h"
#include "base/utf8.h"

namespace rankgate::launch {
namespace {

using std::chrono::milliseconds;

/// A line longer than this is forwarded in pieces.
constexpr std::size_t kMaxLine = 8192;
/// How long a burst of an engine's lines waits for the reader of our stderr.
constexpr milliseconds kLogPatience{500};
/// Bytes read from one child between two looks at the others.
constexpr std::size_t kReadChunk = 16'384;

int PidfdOpen(pid_t pid) noexcept {
    return static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
}

std::string Describe(int status) {
    if (WIFSIGNALED(status)) {
        return "signal " + std::to_string(WTERMSIG(status)) + " (" + ::strsignal(WTERMSIG(status)) + ")";
    }
    return "exit status " + std::to_string(WEXITSTATUS(status));
}

struct Child {
    ProcessSpec spec;
    pid_t pid{0};
    UniqueFd pidfd;
    UniqueFd output;
    std::string line;
    TimePoint started{};
    TimePoint restart_at{};
    bool wants_restart{false};
    int failures{0};
};

// What the child reports through a close-on-exec pipe if it never became the program.
struct ExecFailure {
    int error;
};

Status Spawn(Child& child) {
    std::vector<std::string> environment;
    for (char** entry = environ; *entry != nullptr; ++entry) {
        const std::string_view text{*entry};
        const bool replaced =
            std::any_of(child.spec.environment.begin(), child.spec.environment.end(), [&](const auto& pair) {
                return text.size() > pair.first.size() &&
                       text.compare(0, pair.first.size(), pair.first) == 0 && text[pair.first.size()] == '=';
            });
        if (!replaced) {
            environment.emplace_back(text);
        }
    }
    for (const auto& [key, value] : child.spec.environment) {
        environment.push_back(key + "=" + value);
    }
    std::vector<char*> argv;
    argv.reserve(child.spec.argv.size() + 1);
    for (std::string& arg : child.spec.argv) {
        argv.push_back(arg.data());
    }
    argv.push_back(nullptr);
    std::vector<char*> envp;
    envp.reserve(environment.size() + 1);
    for (std::string& entry : environment) {
        envp.push_back(entry.data());
    }
    envp.push_back(nullptr);

    int output[2];
    int failure[2];
    if (::pipe2(output, O_CLOEXEC) != 0) {
        return Error{ErrorCode::kInternal, std::string("pipe: ") + std::strerror(errno), "", false};
    }
    UniqueFd output_read{output[0]};
    UniqueFd output_write{output[1]};
    if (::pipe2(failure, O_CLOEXEC) != 0) {
        return Error{ErrorCode::kInternal, std::string("pipe: ") + std::strerror(errno), "", false};
    }
    UniqueFd failure_read{failure[0]};
    UniqueFd failure_write{failure[1]};
    const pid_t parent = ::getpid();
    const pid_t pid = ::fork();
    if (pid < 0) {
        return Error{ErrorCode::kInternal, std::string("fork: ") + std::strerror(errno), "", false};
    }
    if (pid == 0) {
        // Only async-signal-safe calls from here on.
        ::setpgid(0, 0);
        ::prctl(PR_SET_PDEATHSIG, SIGTERM);
        if (::getppid() != parent) {
            ::_exit(1);  // the parent died before the line above
        }
        sigset_t none;
        sigemptyset(&none);
        ::sigprocmask(SIG_SETMASK, &none, nullptr);
        for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE, SIGCHLD}) {
            ::signal(signal, SIG_DFL);
        }
        const int null = ::open("/dev/null", O_RDONLY);
        if (null >= 0) {
            ::dup2(null, STDIN_FILENO);
        }
        ::dup2(output_write.get(), STDOUT_FILENO);
        ::dup2(output_write.get(), STDERR_FILENO);
        ::execvpe(argv[0], argv.data(), envp.data());
        const ExecFailure report{errno};
        const ssize_t written = ::write(failure_write.get(), &report, sizeof report);
        (void)written;
        ::_exit(127);
    }
    ::setpgid(pid, pid);  // in both processes: whoever comes first
    failure_write.reset();
    output_write.reset();
    ExecFailure report{};
    ssize_t got = 0;
    do {
        got = ::read(failure_read.get(), &report, sizeof report);
    } while (got < 0 && errno == EINTR);
    if (got == sizeof report) {
        int status = 0;
        ::waitpid(pid, &status, 0);
        return Error{SettingError(report.error),
                     "cannot start " + child.spec.name + ": " + child.spec.argv[0] + ": " +
                         std::strerror(report.error),
                     "", false};
    }
    child.pid = pid;
    child.pidfd.reset(PidfdOpen(pid));
    child.output = std::move(output_read);
    ::fcntl(child.output.get(), F_SETFL, O_NONBLOCK);
    child.started = std::chrono::steady_clock::now();
    child.wants_restart = false;
    return Status::Ok();
}

void EmitLine(const Child& child, std::string_view text) {
    std::string line = "[" + child.spec.name + "] ";
    AppendLossyUtf8(line, text);
    // A burst waits for a reader that is merely slow. One that stands still must stop neither the engines,
    // whose pipes fill up when nobody empties them, nor the end of this program: its lines are dropped.
    static std::atomic<bool> reader_stands{false};
    if (!reader_stands) {
        pollfd room{STDERR_FILENO, POLLOUT, 0};
        ::poll(&room, 1, static_cast<int>(kLogPatience.count()));
    }
    reader_stands = !WriteLogLine(line);
}

// Forwards what the child has written; false at end of file.
bool ForwardOutput(Child& child) {
    char buffer[kReadChunk];
    const ssize_t got = ::read(child.output.get(), buffer, sizeof buffer);
    if (got < 0) {
        return errno == EAGAIN || errno == EINTR;
    }
    if (got == 0) {
        return false;
    }
    child.line.append(buffer, static_cast<std::size_t>(got));
    std::size_t at = 0;
    for (;;) {
        // Progress bars redraw with a carriage return: each redraw is a line of its own here.
        const std::size_t end = child.line.find_first_of("\r\n", at);
        if (end == std::string::npos) {
            break;
        }
        if (end > at) {
            EmitLine(child, std::string_view(child.line).substr(at, end - at));
        }
        at = end + 1;
    }
    child.line.erase(0, at);
    if (child.line.size() > kMaxLine) {
        EmitLine(child, child.line);
        child.line.clear();
    }
    return true;
}

}  // namespace

struct Supervisor::Impl {
    SupervisorOptions options;
    std::function<void(const Exit&)> on_exit;
    std::vector<Child> children;
    mutable std::mutex
        mutex;  // guards pids_by_name, started, start_status; never held while waiting for a child
    std::condition_variable changed;
    bool start_done{false};
    Status start_status;
    std::vector<std::pair<std::string, int>> pids;
    std::atomic<bool> serving{false};
    std::atomic<bool> stopping{false};
    UniqueFd wake{::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
    std::thread thread;

    void PublishPids() {
        const std::lock_guard lock(mutex);
        pids.clear();
        for (const Child& child : children) {
            pids.emplace_back(child.spec.name, child.pid);
        }
    }

    void Run() {
        Status status;
        for (Child& child : children) {
            status = Spawn(child);
            if (!status.ok()) {
                break;
            }
            LogInfo("engine_started",
                    {{"name", child.spec.name}, {"pid", child.pid}, {"program", child.spec.argv[0]}});
        }
        PublishPids();
        {
            const std::lock_guard lock(mutex);
            start_done = true;
            start_status = status;
        }
        changed.notify_all();
        while (!stopping.load()) {
            Step();
        }
        StopAll();
        PublishPids();
    }

    void Step() {
        std::vector<pollfd> fds;
        fds.push_back({wake.get(), POLLIN, 0});
        TimePoint next = TimePoint::max();
        for (Child& child : children) {
            fds.push_back({child.output.valid() ? child.output.get() : -1, POLLIN, 0});
            fds.push_back({child.pid > 0 && child.pidfd.valid() ? child.pidfd.get() : -1, POLLIN, 0});
            if (child.wants_restart) {
                next = std::min(next, child.restart_at);
            }
        }
        const TimePoint now = std::chrono::steady_clock::now();
        // Without a pidfd (an old kernel) exits are found by asking each second.
        milliseconds wait{1000};
        if (next != TimePoint::max()) {
            wait = std::clamp(std::chrono::duration_cast<milliseconds>(next - now) + milliseconds(1),
                              milliseconds(0), wait);
        }
        ::poll(fds.data(), fds.size(), static_cast<int>(wait.count()));
        if ((fds[0].revents & POLLIN) != 0) {
            std::uint64_t count = 0;
            const ssize_t got = ::read(wake.get(), &count, sizeof count);
            (void)got;
        }
        for (std::size_t i = 0; i < children.size(); ++i) {
            Child& child = children[i];
            if (fds[1 + 2 * i].revents != 0 && !ForwardOutput(child)) {
                child.output.reset();
            }
            if (child.pid > 0) {
                Reap(child);
            }
        }
        const TimePoint later = std::chrono::steady_clock::now();
        for (Child& child : children) {
            if (child.wants_restart && later >= child.restart_at && !stopping.load()) {
                Restart(child);
            }
        }
    }

    void Reap(Child& child) {
        int status = 0;
        const pid_t got = ::waitpid(child.pid, &status, WNOHANG);
        if (got != child.pid) {
            return;
        }
        DrainOutput(child);
        // Whatever the process left behind in its group must not hold the sockets of its successor.
        ::kill(-child.pid, SIGKILL);
        child.pid = 0;
        child.pidfd.reset();
        PublishPids();
        if (stopping.load()) {
            return;
        }
        const TimePoint now = std::chrono::steady_clock::now();
        child.failures = now - child.started >= options.healthy_after ? 1 : child.failures + 1;
        const bool restart = serving.load() && child.failures <= options.max_failures;
        LogWarning("engine_exited", {{"name", child.spec.name},
                                     {"how", Describe(status)},
                                     {"restarting", restart},
                                     {"failures", child.failures}});
        if (restart) {
            ScheduleRestart(child, now);
            if (child.spec.restart_group >= 0) {
                TakeDownSiblings(child, now);
            }
        }
        on_exit({child.spec.name, Describe(status), restart});
    }

    /// Forwards what can be read without waiting.
    static void ForwardReady(Child& child) {
        while (child.output.valid()) {
            pollfd ready{child.output.get(), POLLIN, 0};
            if (::poll(&ready, 1, 0) <= 0 || !ForwardOutput(child)) {
                break;
            }
        }
    }

    static void DrainOutput(Child& child) {
        ForwardReady(child);
        child.output.reset();
        if (!child.line.empty()) {
            EmitLine(child, child.line);
            child.line.clear();
        }
    }

    void ScheduleRestart(Child& child, TimePoint now) {
        milliseconds backoff = options.first_backoff;
        for (int i = 1; i < child.failures && backoff < options.max_backoff; ++i) {
            backoff *= 2;
        }
        child.wants_restart = true;
        child.restart_at = now + std::min(backoff, options.max_backoff);
    }

    void TakeDownSiblings(const Child& dead, TimePoint now) {
        for (Child& child : children) {
            if (&child == &dead || child.spec.restart_group != dead.spec.restart_group || child.pid <= 0) {
                continue;
            }
            ::kill(-child.pid, SIGKILL);
            int status = 0;
            ::waitpid(child.pid, &status, 0);
            DrainOutput(child);
            child.pid = 0;
            child.pidfd.reset();
            child.wants_restart = true;
            child.restart_at = now + options.first_backoff;
        }
    }

    void Restart(Child& child) {
        const Status status = Spawn(child);
        PublishPids();
        if (status.ok()) {
            LogInfo("engine_restarted",
                    {{"name", child.spec.name}, {"pid", child.pid}, {"failures", child.failures}});
            return;
        }
        ++child.failures;
        const bool again = child.failures <= options.max_failures;
        LogError("engine_restart_failed",
                 {{"name", child.spec.name}, {"why", status.error().message}, {"again", again}});
        if (again) {
            ScheduleRestart(child, std::chrono::steady_clock::now());
        } else {
            child.wants_restart = false;
            on_exit({child.spec.name, status.error().message, false});
        }
    }

    void StopAll() {
        // The group is signalled, so that helpers an engine started itself get the chance to end too.
        Signal(SIGTERM);
        const TimePoint deadline = std::chrono::steady_clock::now() + options.stop_timeout;
        while (AnyAlive() && std::chrono::steady_clock::now() < deadline) {
            for (Child& child : children) {
                if (child.pid > 0) {
                    ForwardReady(child);
                }
            }
            std::this_thread::sleep_for(milliseconds(5));
        }
        if (AnyAlive()) {
            LogWarning("engine_stop_forced", {{"after_ms", options.stop_timeout.count()}});
            Signal(SIGKILL);
            for (Child& child : children) {
                if (child.pid > 0) {
                    int status = 0;
                    ::waitpid(child.pid, &status, 0);
                    child.pid = 0;
                }
            }
        }
        for (Child& child : children) {
            DrainOutput(child);
        }
    }

    void Signal(int signal) {
        for (const Child& child : children) {
            if (child.pid > 0) {
                ::kill(-child.pid, signal);
            }
        }
    }

    bool AnyAlive() {
        bool alive = false;
        for (Child& child : children) {
            int status = 0;
            if (child.pid > 0 && ::waitpid(child.pid, &status, WNOHANG) == child.pid) {
                ::kill(-child.pid, SIGKILL);
                child.pid = 0;
            }
            alive |= child.pid > 0;
        }
        return alive;
    }

    void Wake() noexcept {
        const std::uint64_t one = 1;
        const ssize_t written = ::write(wake.get(), &one, sizeof one);
        (void)written;
    }
};

Supervisor::Supervisor(std::vector<ProcessSpec> specs, SupervisorOptions options,
                       std::function<void(const Exit&)> on_exit)
    : impl_{std::make_unique<Impl>()} {
    impl_->options = options;
    impl_->on_exit = std::move(on_exit);
    for (ProcessSpec& spec : specs) {
        Child child;
        child.spec = std::move(spec);
        impl_->children.push_back(std::move(child));
    }
}

Supervisor::~Supervisor() {
    Stop();
}

Status Supervisor::Start() {
    RG_CHECK(!impl_->thread.joinable());
    impl_->thread = std::thread([this] { impl_->Run(); });
    std::unique_lock lock(impl_->mutex);
    impl_->changed.wait(lock, [this] { return impl_->start_done; });
    return impl_->start_status;
}

void Supervisor::SetServing() noexcept {
    impl_->serving = true;
}

void Supervisor::Stop() noexcept {
    if (!impl_->thread.joinable()) {
        return;
    }
    impl_->stopping = true;
    impl_->Wake();
    impl_->thread.join();
}

int Supervisor::PidOf(const std::string& name) const {
    const std::lock_guard lock(impl_->mutex);
    for (const auto& [known, pid] : impl_->pids) {
        if (known == name) {
            return pid;
        }
    }
    return 0;
}

}  // namespace rankgate::launch
