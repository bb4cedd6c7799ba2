// SPDX-License-Identifier: Apache-2.0
// The relay over real processes (relay_node), one per rank. Order comes from holds at named points, never
// from sleeps. Every case demands that all processes end by themselves in time, that all ranks have equal
// step hashes or one first cause, and that no name is left.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "relay/types.h"

namespace rankgate::relay {
namespace {

using Clock = std::chrono::steady_clock;
using Args = std::map<std::string, std::string>;

class Node {
  public:
    explicit Node(const Args& args) {
        std::array<int, 2> in{};
        std::array<int, 2> out{};
        EXPECT_EQ(::pipe2(in.data(), O_CLOEXEC), 0);
        EXPECT_EQ(::pipe2(out.data(), O_CLOEXEC), 0);
        std::vector<std::string> words{RELAY_NODE};
        for (const auto& [key, value] : args) {
            words.push_back(key + "=" + value);
        }
        std::vector<char*> argv;
        for (std::string& word : words) {
            argv.push_back(word.data());
        }
        argv.push_back(nullptr);
        pid_ = ::fork();
        if (pid_ == 0) {
            ::dup2(in[0], STDIN_FILENO);
            ::dup2(out[1], STDOUT_FILENO);
            ::execv(argv[0], argv.data());
            ::_exit(127);
        }
        ::close(in[0]);
        ::close(out[1]);
        in_.reset(in[1]);
        out_.reset(out[0]);
    }
    Node(const Node&) = delete;
    Node& operator=(const Node&) = delete;
    ~Node() {
        if (pid_ > 0) {
            ::kill(pid_, SIGKILL);
            ::waitpid(pid_, nullptr, 0);
        }
    }

    /// The next line, or "" at the end of file or of the time.
    std::string Line(double seconds = 20) {
        const auto until = Clock::now() + std::chrono::duration<double>(seconds);
        for (;;) {
            const std::size_t nl = buffer_.find('\n');
            if (nl != std::string::npos) {
                std::string line = buffer_.substr(0, nl);
                buffer_.erase(0, nl + 1);
                return line;
            }
            const auto left =
                std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
            pollfd p{out_.get(), POLLIN, 0};
            if (left <= 0 || ::poll(&p, 1, static_cast<int>(left)) != 1) {
                return "";
            }
            char chunk[512];
            const ssize_t n = ::read(out_.get(), chunk, sizeof chunk);
            if (n <= 0) {
                return "";
            }
            buffer_.append(chunk, static_cast<std::size_t>(n));
        }
    }
    void Await(const std::string& line) { EXPECT_EQ(Line(), line); }
    void Answer(const std::string& what) {
        const std::string line = what + "\n";
        EXPECT_EQ(::write(in_.get(), line.data(), line.size()), static_cast<ssize_t>(line.size()));
    }
    void Signal(int number) { ::kill(pid_, number); }
    /// Waits for the process itself; -1 if it does not end in time, 256 + n if signal n ended it.
    int End(double seconds = 20) {
        const auto until = Clock::now() + std::chrono::duration<double>(seconds);
        int status = 0;
        while (Clock::now() < until) {
            if (::waitpid(pid_, &status, WNOHANG) == pid_) {
                pid_ = -1;
                return WIFEXITED(status) ? WEXITSTATUS(status) : 256 + WTERMSIG(status);
            }
            ::usleep(500);
        }
        return -1;
    }

  private:
    pid_t pid_{-1};
    UniqueFd in_;
    UniqueFd out_;
    std::string buffer_;
};

#if defined(__SANITIZE_THREAD__)
constexpr double kPatience = 6;  // a process takes that much longer to start
#elif defined(__SANITIZE_ADDRESS__)
constexpr double kPatience = 2;
#else
constexpr double kPatience = 1;
#endif
/// A join budget that all processes can be started in.
std::string JoinS(double seconds) {
    return std::to_string(seconds * kPatience);
}
std::chrono::duration<double> Within(double seconds) {
    return std::chrono::duration<double>{seconds * kPatience};
}

int FreePort() {
    const UniqueFd fd{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    EXPECT_EQ(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
    ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &length);
    return ntohs(address.sin_port);
}

int Runs(const char* variable, int fallback) {
    const char* text = std::getenv(variable);
    return text != nullptr ? std::atoi(text) : fallback;
}

/// One busy process per core while it lives.
class Burners {
  public:
    Burners() {
        for (long i = 0; i < ::sysconf(_SC_NPROCESSORS_ONLN); ++i) {
            const pid_t pid = ::fork();
            if (pid == 0) {
                volatile std::uint64_t x = 0;
                for (;;) {
                    x = x + 1;
                }
            }
            pids_.push_back(pid);
        }
    }
    Burners(const Burners&) = delete;
    Burners& operator=(const Burners&) = delete;
    ~Burners() {
        for (const pid_t pid : pids_) {
            ::kill(pid, SIGKILL);
            ::waitpid(pid, nullptr, 0);
        }
    }

  private:
    std::vector<pid_t> pids_;
};

class ProcessTest : public testing::TestWithParam<const char*> {
  protected:
    void SetUp() override {
        std::string name = testing::TempDir() + "relayXXXXXX";
        ASSERT_NE(::mkdtemp(name.data()), nullptr);
        folder_ = name;
        NewAddress();
    }
    void TearDown() override {
        nodes_.clear();
        EXPECT_TRUE(std::filesystem::is_empty(folder_)) << "a name is left in the rendezvous folder";
        std::filesystem::remove_all(folder_);
    }
    void NewAddress() {
        where_ = std::string{GetParam()} == "tcp" ? "tcp://127.0.0.1:" + std::to_string(FreePort())
                                                  : folder_ + "/relay";
    }
    Node& Start(int rank, int size, Args args = {}) {
        args["rank"] = std::to_string(rank);
        args["size"] = std::to_string(size);
        args["where"] = where_;
        args["backend"] = GetParam();
        nodes_[rank] = std::make_unique<Node>(args);
        return *nodes_[rank];
    }
    Node& At(int rank) { return *nodes_[rank]; }

    /// Every rank was served everything, with one hash.
    void Served() {
        std::string first;
        for (auto& [rank, node] : nodes_) {
            const std::string line = node->Line();
            EXPECT_EQ(line.substr(0, 5), "hash ") << "rank " << rank << ": " << line;
            first = first.empty() ? line : first;
            EXPECT_EQ(line, first) << "rank " << rank;
            EXPECT_EQ(node->End(), 0) << "rank " << rank;
        }
        nodes_.clear();
    }
    /// Every rank but these raised this; returns the lines.
    std::map<int, std::string> OneCause(const std::string& begins, const std::vector<int>& but = {},
                                        double seconds = 20) {
        std::map<int, std::string> lines;
        for (auto& [rank, node] : nodes_) {
            if (std::find(but.begin(), but.end(), rank) != but.end()) {
                continue;
            }
            std::string line = node->Line(seconds);
            while (line.substr(0, 4) == "had " || line == "joined" || line == "idle") {
                line = node->Line(seconds);
            }
            EXPECT_EQ(line.substr(0, begins.size()), begins) << "rank " << rank << ": " << line;
            EXPECT_EQ(node->End(), 3) << "rank " << rank;
            lines[rank] = line;
        }
        return lines;
    }

    std::string folder_;
    std::string where_;
    std::map<int, std::unique_ptr<Node>> nodes_;
};

/// A ring has no way to drop or double a slot: there it is the skip and replay cases.
class StreamProcessTest : public ProcessTest {};
/// Over TCP there is no pidfd: a descriptor leaked past the fork handler hides a death until the beat stops.
class OneHostProcessTest : public ProcessTest {};
/// Only the ring wakes its readers itself.
class RingProcessTest : public ProcessTest {};

TEST_P(ProcessTest, EveryOrderOfComingIsServedFirstFrameIncluded) {
    for (const int size : {2, 3, 4, 8}) {
        for (int late = 0; late < size; ++late) {
            NewAddress();
            const std::string hold = late == 0 ? "before_listen" : "before_dial";
            for (int r = 0; r < size; ++r) {
                Start(r, size,
                      r == late ? Args{{"hold", hold}}
                                : Args{{"tell", late == 0 ? "before_dial" : "before_wait"}});
            }
            At(late).Await("holds " + hold);
            for (int r = 0; r < size; ++r) {
                if (r != late) {
                    At(r).Await(std::string{"reached "} + (late == 0 ? "before_dial" : "before_wait"));
                }
            }
            At(late).Answer("go");
            Served();
        }
        NewAddress();
        for (int r = 0; r < size; ++r) {
            Start(r, size);
        }
        Served();
    }
}

TEST_P(ProcessTest, TheFrameBehindGoIsNeverLostUnderLoad) {
    const Burners burners;
    const int runs = Runs("RELAY_RUNS", 9);
    const std::array<int, 3> sizes{2, 4, 8};
    for (int i = 0; i < runs; ++i) {
        NewAddress();
        const int size = sizes[static_cast<std::size_t>(i) % sizes.size()];
        for (int r = 0; r < size; ++r) {
            Start(r, size, {{"join", "60"}, {"steps", "3"}});
        }
        Served();
        ASSERT_FALSE(HasFailure()) << "run " << i << " of " << runs << ", size " << size;
    }
}

TEST_P(ProcessTest, ColdStartsWithRandomDelaysLoseNothing) {
    const int runs = Runs("RELAY_COLD_STARTS", 3);
    const double longest = runs > 20 ? 2.0 : 0.1;
    std::mt19937 random{5};
    const std::array<int, 3> sizes{2, 4, 8};
    for (int i = 0; i < runs; ++i) {
        NewAddress();
        const int size = sizes[static_cast<std::size_t>(i) % sizes.size()];
        std::vector<std::pair<double, int>> order;
        for (int r = 0; r < size; ++r) {
            order.emplace_back(std::uniform_real_distribution<>{0, longest}(random), r);
        }
        std::sort(order.begin(), order.end());
        double now = 0;
        for (const auto& [at, r] : order) {
            ::usleep(static_cast<unsigned>((at - now) * 1e6));
            now = at;
            Start(r, size, {{"join", "60"}});
        }
        Served();
        ASSERT_FALSE(HasFailure()) << "run " << i;
    }
}

TEST_P(ProcessTest, AMissingRankIsNamedOnAll) {
    for (const int missing : {1, 3}) {
        NewAddress();
        nodes_.clear();
        for (int r = 0; r < 4; ++r) {
            if (r != missing) {
                Start(r, 4, {{"join", JoinS(0.5)}});
            }
        }
        for (const auto& [rank, line] :
             OneCause("fail join_timeout origin=" + std::to_string(missing) + " phase=dial")) {
            EXPECT_NE(line.find(" missing=" + std::to_string(1 << missing)), std::string::npos) << line;
        }
    }
}

TEST_P(ProcessTest, ARankHeldAtAPhaseIsMissingWithThatPhase) {
    // A rank that never dials, one whose READY never comes, one whose ACK never comes.
    for (const auto& [point, phase] : std::map<std::string, std::string>{
             {"before_dial", "dial"}, {"before_ready", "ready"}, {"before_go_ack", "ack"}}) {
        NewAddress();
        nodes_.clear();
        Start(0, 3, {{"join", JoinS(0.7)}});
        Start(1, 3, {{"join", JoinS(0.7)}, {"idle", "1"}});
        Start(2, 3, {{"join", JoinS(0.7)}, {"hold", point}});
        At(2).Await("holds " + point);
        OneCause("fail join_timeout origin=2 phase=" + phase, {2});
        At(2).Answer("go");
        const std::string line = At(2).Line();
        EXPECT_TRUE(line.substr(0, 5) == "fail " || line.substr(0, 4) == "had ") << line;
        EXPECT_EQ(At(2).End(), 3);
    }
}

TEST_P(ProcessTest, ARankZeroThatWaitsForAnAckIsNotTakenForStalled) {
    Start(0, 3, {{"join", JoinS(1.5)}, {"stall_after", "0.3"}});
    Start(1, 3, {{"join", JoinS(1.5)}, {"stall_after", "0.3"}, {"idle", "1"}});
    Start(2, 3, {{"join", JoinS(1.5)}, {"stall_after", "0.3"}, {"hold", "before_go_ack"}});
    At(2).Await("holds before_go_ack");
    OneCause("fail join_timeout origin=2 phase=ack", {2});
    At(2).Signal(SIGKILL);
    EXPECT_EQ(At(2).End(), 256 + SIGKILL);
}

TEST_P(ProcessTest, ARankKilledBeforeGoMayComeAgain) {
    for (const char* point : {"before_dial", "after_hello", "before_map", "before_ready"}) {
        NewAddress();
        nodes_.clear();
        Start(0, 3);
        Start(1, 3);
        Start(2, 3, {{"hold", point}});
        At(2).Await(std::string{"holds "} + point);
        At(2).Signal(SIGKILL);
        EXPECT_EQ(At(2).End(), 256 + SIGKILL);
        Start(2, 3);
        Served();
    }
}

TEST_P(ProcessTest, ARankKilledBeforeGoThatStaysAwayIsMissing) {
    for (const char* point : {"after_hello", "before_ready"}) {
        NewAddress();
        nodes_.clear();
        Start(0, 3, {{"join", JoinS(0.7)}});
        Start(1, 3, {{"join", JoinS(0.7)}});
        Start(2, 3, {{"hold", point}});
        At(2).Await(std::string{"holds "} + point);
        At(2).Signal(SIGKILL);
        OneCause("fail join_timeout origin=2", {2});
    }
}

TEST_P(ProcessTest, ARankKilledBetweenGoAndAckEndsTheGroup) {
    Start(0, 3);
    Start(1, 3, {{"idle", "1"}});
    Start(2, 3, {{"hold", "before_go_ack"}});
    At(2).Await("holds before_go_ack");
    At(2).Signal(SIGKILL);
    OneCause("fail peer_died origin=2", {2});
}

TEST_P(ProcessTest, ALeaderKilledInTheJoinIsToldAtOnceAndLeavesNoName) {
    Start(0, 4, {{"hold", "before_go"}});
    for (int r = 1; r < 4; ++r) {
        Start(r, 4, {{"join", "15"}});
    }
    At(0).Await("holds before_go");
    const auto at = Clock::now();
    At(0).Signal(SIGKILL);
    OneCause("fail leader_died origin=0", {0});
    EXPECT_LT(Clock::now() - at, Within(3));
}

TEST_P(ProcessTest, AFollowerStoppedInTheJoinIsMissingOnAllAndToldOnceItRunsAgain) {
    for (const auto& [point, phase] : std::map<std::string, std::string>{{"after_hello", "ready"},
                                                                         {"before_map", "ready"},
                                                                         {"before_ready", "ready"},
                                                                         {"before_go_ack", "ack"}}) {
        NewAddress();
        nodes_.clear();
        Start(0, 4, {{"join", JoinS(0.7)}});
        Start(1, 4, {{"join", JoinS(0.7)}, {"idle", "1"}});
        Start(2, 4, {{"join", JoinS(0.7)}, {"hold", point}});
        Start(3, 4, {{"join", JoinS(0.7)}, {"idle", "1"}});
        At(2).Await("holds " + point);
        const auto at = Clock::now();
        At(2).Signal(SIGSTOP);
        At(2).Answer("go");
        for (const auto& [rank, line] : OneCause("fail join_timeout origin=2 phase=" + phase, {2})) {
            EXPECT_NE(line.find(" missing=4"), std::string::npos) << line;
        }
        EXPECT_LT(Clock::now() - at, Within(3)) << point;  // the budget and the ends of the processes
        At(2).Signal(SIGCONT);
        for (const int r : {0, 1, 3}) {
            nodes_.erase(r);
        }
        OneCause("fail join_timeout origin=2");
    }
}

TEST_P(ProcessTest, ALeaderStoppedInTheJoinIsMissingOnAllAndToldOnceItRunsAgain) {
    for (const char* point : {"before_go", "before_wait"}) {
        NewAddress();
        nodes_.clear();
        Start(0, 3,
              {{"join", JoinS(0.7)},
               {"hold", point},
               {"hold_skip", std::string{point} == "before_wait" ? "1" : "0"}});
        for (int r = 1; r < 3; ++r) {
            Start(r, 3, {{"join", JoinS(0.7)}});
        }
        At(0).Await(std::string{"holds "} + point);
        const auto at = Clock::now();
        At(0).Signal(SIGSTOP);
        At(0).Answer("go");
        for (const auto& [rank, line] : OneCause("fail join_timeout origin=0", {0})) {
            EXPECT_NE(line.find(" missing=1"), std::string::npos) << line;
        }
        // The budget, the second that a follower waits longer than rank 0, and the ends of the processes.
        EXPECT_LT(Clock::now() - at, Within(4)) << point;
        At(0).Signal(SIGCONT);
        const std::string line = At(0).Line();
        EXPECT_EQ(line.substr(0, 18), "fail join_timeout ") << line;
        EXPECT_EQ(At(0).End(), 3);
    }
}

TEST_P(ProcessTest, ASecondProcessWithTheSameRankIsRefused) {
    Start(0, 3);
    Start(1, 3, {{"hold", "before_ready"}});
    At(1).Await("holds before_ready");
    Node twin{{{"rank", "1"}, {"size", "3"}, {"where", where_}, {"backend", GetParam()}}};
    EXPECT_EQ(twin.Line().substr(0, 28), "fail duplicate_rank origin=1");
    EXPECT_EQ(twin.End(), 3);
    At(1).Answer("go");
    Start(2, 3);
    Served();
}

TEST_P(ProcessTest, ASecondLeaderOnTheAddressIsRefusedAndTheGroupIsServed) {
    Start(0, 3, {{"tell", "before_wait"}});
    At(0).Await("reached before_wait");
    Node second{{{"rank", "0"}, {"size", "3"}, {"where", where_}, {"backend", GetParam()}, {"epoch", "2"}}};
    EXPECT_EQ(second.Line().substr(0, 27), "fail duplicate_rank origin=");
    EXPECT_EQ(second.End(), 3);
    Start(1, 3);
    Start(2, 3);
    Served();
}

TEST_P(ProcessTest, GroupsSideBySideReachExactlyTheirOwnRanks) {
    // Data parallel times tensor parallel: every group numbers its ranks from 0.
    for (const auto& [groups, size] : std::vector<std::pair<int, int>>{{2, 4}, {4, 2}}) {
        std::vector<std::vector<std::unique_ptr<Node>>> all(static_cast<std::size_t>(groups));
        std::vector<std::string> addresses;
        for (int g = 0; g < groups; ++g) {
            NewAddress();
            addresses.push_back(std::string{GetParam()} == "tcp" ? where_ : where_ + std::to_string(g));
        }
        for (int r = size - 1; r >= 0; --r) {
            for (int g = 0; g < groups; ++g) {
                all[static_cast<std::size_t>(g)].push_back(
                    std::make_unique<Node>(Args{{"rank", std::to_string(r)},
                                                {"size", std::to_string(size)},
                                                {"where", addresses[static_cast<std::size_t>(g)]},
                                                {"backend", GetParam()},
                                                {"steps", "200"},
                                                {"salt", "group " + std::to_string(g) + " "}}));
            }
        }
        std::set<std::string> seen;
        for (auto& group : all) {
            std::string first;
            for (auto& node : group) {
                const std::string line = node->Line();
                EXPECT_EQ(line.substr(0, 5), "hash ") << line;
                EXPECT_EQ(line.substr(line.find(" steps")), " steps 200") << line;
                first = first.empty() ? line : first;
                EXPECT_EQ(line, first);
                EXPECT_EQ(node->End(), 0);
            }
            EXPECT_TRUE(seen.insert(first).second) << "two groups have seen the same requests";
        }
    }
}

TEST_P(ProcessTest, AWrongNumberIsRefusedAtTheStartNotAHang) {
    Start(0, 2, {{"tell", "before_wait"}});
    At(0).Await("reached before_wait");
    // Rank 1 of another group, by its epoch; a rank counted over all groups; a rank of a larger group.
    const auto refused = [&](Args args, const std::string& line) {
        args["where"] = where_;
        args["backend"] = GetParam();
        Node stranger{args};
        EXPECT_EQ(stranger.Line().substr(0, line.size()), line);
        EXPECT_NE(stranger.End(), 0);
    };
    refused({{"rank", "1"}, {"size", "2"}, {"epoch", "2"}}, "fail bad_epoch origin=");
    refused({{"rank", "5"}, {"size", "8"}}, "fail version_mismatch origin=");
    refused({{"rank", "3"}, {"size", "2"}}, "bad config rank:");
    Start(1, 2);
    Served();
}

TEST_P(ProcessTest, NoiseOnTheAddressDisturbsNobody) {
    Start(0, 3, {{"tell", "before_wait"}});
    At(0).Await("reached before_wait");
    std::mt19937 random{1};
    std::vector<UniqueFd> connections;
    for (int i = 0; i < 40; ++i) {
        UniqueFd fd;
        if (std::string{GetParam()} == "tcp") {
            fd.reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
            sockaddr_in address{};
            address.sin_family = AF_INET;
            address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
            address.sin_port =
                htons(static_cast<std::uint16_t>(std::stoi(where_.substr(where_.rfind(':') + 1))));
            ASSERT_EQ(::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
        } else {
            fd.reset(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
            sockaddr_un address{};
            address.sun_family = AF_UNIX;
            std::copy(where_.begin(), where_.end(), address.sun_path);
            ASSERT_EQ(::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
        }
        std::vector<char> noise(random() % 300);
        for (char& c : noise) {
            c = static_cast<char>(random());
        }
        if (i % 3 != 0) {  // the others say nothing at all
            [[maybe_unused]] const ssize_t n = ::send(fd.get(), noise.data(), noise.size(), MSG_NOSIGNAL);
        }
        connections.push_back(std::move(fd));
    }
    Start(1, 3);
    Start(2, 3);
    Served();
}

TEST_P(ProcessTest, DamagedSlotsHaveTheirNamesAndNumbers) {
    const std::map<std::string, std::string> cases{{"corrupt", "corrupt"},
                                                   {"replay", "foreign_frame"},
                                                   {"skip", "sequence_gap"},
                                                   {"old_epoch", "bad_epoch"}};
    for (const auto& [action, code] : cases) {
        NewAddress();
        nodes_.clear();
        Start(0, 3, {{"steps", "100"}, {"hold", "in_publish"}, {"hold_step", "17"}, {"idle", "1"}});
        Start(1, 3, {{"steps", "100"}});
        Start(2, 3, {{"steps", "100"}});
        At(0).Await("holds in_publish");
        At(0).Answer(action);
        for (const auto& [rank, line] : OneCause("fail " + code + " origin=0 phase=read step=17")) {
            if (code == "sequence_gap") {
                EXPECT_NE(line.find("expected=18 got=19"), std::string::npos) << line;  // GO was slot 1
            }
        }
    }
}

TEST_P(StreamProcessTest, ADroppedOrDoubledSlotIsNoticedOnAStream) {
    for (const auto& [action, code] :
         std::map<std::string, std::string>{{"drop", "sequence_gap"}, {"duplicate", "foreign_frame"}}) {
        NewAddress();
        nodes_.clear();
        Start(0, 2,
              {{"steps", "100"}, {"hold", "in_publish"}, {"hold_step", "17"}, {"idle", "1"}, {"lag", "50"}});
        Start(1, 2, {{"steps", "100"}});
        At(0).Await("holds in_publish");
        At(0).Answer(action);
        OneCause("fail " + code + " origin=0");
    }
}

TEST_P(ProcessTest, AStepHalfOutWhenTheLeaderIsKilledIsDeliveredToNobody) {
    // Two fragments are out, the third is held.
    Start(0, 3,
          {{"steps", "2"},
           {"bytes", "3000000"},
           {"hold", "in_publish"},
           {"hold_step", "2"},
           {"hold_skip", "2"}});
    Start(1, 3, {{"steps", "2"}});
    Start(2, 3, {{"steps", "2"}});
    At(0).Await("holds in_publish");
    At(0).Signal(SIGKILL);
    for (const int r : {1, 2}) {
        const std::string had = At(r).Line();
        EXPECT_TRUE(had == "had 1" || had == "had 0") << had;
    }
    OneCause("fail leader_died origin=0", {0});
}

TEST_P(ProcessTest, AFollowerKilledInTheMiddleOfAReadIsNamed) {
    Start(0, 3, {{"steps", "100000"}});
    Start(1, 3);
    Start(2, 3, {{"hold", "in_read"}, {"hold_step", "5"}});
    At(2).Await("holds in_read");
    const auto at = Clock::now();
    At(2).Signal(SIGKILL);
    OneCause("fail peer_died origin=2", {2});
    EXPECT_LT(Clock::now() - at, Within(1));
}

TEST_P(ProcessTest, ADeadFollowerNeverBlocksTheLeaderAndTheNextStartIsClean) {
    // At the start; in the traffic; after it has read a step and before it has said so. Rank 0 goes on
    // publishing into a ring of 16 slots and is to stop by itself.
    for (const char* moment : {"before_go_ack", "before_wait", "in_read"}) {
        NewAddress();
        nodes_.clear();
        Args held{{"hold", moment}};
        if (std::string{moment} == "in_read") {
            held["hold_step"] = "40";
        } else if (std::string{moment} == "before_wait") {
            held["hold_skip"] = "30";
        }
        Start(0, 4, {{"steps", "100000000"}, {"ring_slots", "16"}, {"epoch", "1"}});
        Start(1, 4, {{"ring_slots", "16"}});
        Start(2, 4, held);
        Start(3, 4, {{"ring_slots", "16"}});
        At(2).Await(std::string{"holds "} + moment);
        const auto at = Clock::now();
        At(2).Signal(SIGKILL);
        OneCause("fail peer_died origin=2", {2});
        EXPECT_LT(Clock::now() - at, Within(2)) << moment;
        EXPECT_TRUE(std::filesystem::is_empty(folder_)) << moment;
        nodes_.clear();
        for (int r = 0; r < 4; ++r) {
            Start(r, 4, {{"epoch", "2"}});
        }
        Served();
    }
}

TEST_P(ProcessTest, KilledIdleRanksAreToldFast) {
    for (const int victim : {0, 2}) {
        NewAddress();
        nodes_.clear();
        for (int r = 0; r < 4; ++r) {
            Start(r, 4, {{"idle", "1"}});
        }
        for (int r = 0; r < 4; ++r) {
            At(r).Await("idle");
        }
        const auto at = Clock::now();
        At(victim).Signal(SIGKILL);
        OneCause(victim == 0 ? "fail leader_died origin=0" : "fail peer_died origin=2", {victim});
        // The ends of the processes and a busy machine are in it; the figure itself comes from the bench.
        EXPECT_LT(Clock::now() - at, Within(0.5));
    }
}

TEST_P(ProcessTest, KilledAtAnyMomentTheOthersEndWithOneCauseAndNoNameIsLeft) {
    std::mt19937 random{std::random_device{}()};
    const int runs = Runs("RELAY_KILLS", 12);
    for (int i = 0; i < runs; ++i) {
        NewAddress();
        nodes_.clear();
        const int size = std::array{2, 3, 5}[static_cast<std::size_t>(i) % 3];
        const int victim = static_cast<int>(random() % static_cast<unsigned>(size));
        for (int r = 0; r < size; ++r) {
            Start(r, size, {{"join", JoinS(0.7)}, {"steps", "300"}, {"bytes", i % 2 == 0 ? "100" : "20000"}});
        }
        // Any moment: from before main() to after the end.
        ::usleep(static_cast<unsigned>(random() % 40000));
        At(victim).Signal(SIGKILL);
        const auto at = Clock::now();
        std::string first;
        std::string seen;
        for (auto& [rank, node] : nodes_) {
            if (rank == victim) {
                continue;
            }
            std::string line = node->Line();
            if (line.substr(0, 4) == "had ") {
                line = node->Line();
            }
            const int status = node->End();
            EXPECT_TRUE(status == 0 || status == 3) << "rank " << rank << " status " << status;
            const std::string what =
                line.substr(0, line.find(' ', 5)) + (status == 3 ? line.substr(line.find(" origin"), 9) : "");
            seen += "; rank " + std::to_string(rank) + ": " + line;
            const bool named = what == "fail peer_died origin=" + std::to_string(victim) ||
                               what == "fail join_timeout origin=" + std::to_string(victim) ||
                               what == "fail leader_died origin=0";
            EXPECT_TRUE(status == 0 || named) << "rank " << rank << ", victim " << victim << ": " << line;
            if (victim != 0) {
                // Rank 0 lives and has told everybody the same. Without it each follower can only say what it
                // saw itself.
                first = first.empty() ? what : first;
                EXPECT_EQ(what, first) << "rank " << rank << ", victim " << victim << ": " << line;
            }
        }
        EXPECT_LT(Clock::now() - at, Within(6));
        for (const auto& left : std::filesystem::directory_iterator{folder_}) {
            ADD_FAILURE() << left.path() << " is left; victim " << victim << " of " << size << seen;
        }
        ASSERT_FALSE(HasFailure()) << "run " << i;
    }
}

TEST_P(ProcessTest, AStoppedFollowerIsWaitedForWithinTheBudget) {
    Start(0, 3, {{"steps", "2000"}, {"publish_stall", "10"}, {"say_joined", "1"}});
    Start(1, 3);
    Start(2, 3, {{"hold", "in_read"}, {"hold_step", "1000"}});
    At(2).Await("holds in_read");
    At(2).Signal(SIGSTOP);
    At(2).Answer("go");
    EXPECT_EQ(At(0).Line(), "joined");
    EXPECT_EQ(At(0).Line(0.7), "");  // it waits
    At(2).Signal(SIGCONT);
    Served();
}

TEST_P(ProcessTest, AStoppedFollowerBeyondTheBudgetIsNamedOnAll) {
    Start(0, 3, {{"steps", "100000"}, {"publish_stall", "0.5"}});
    Start(1, 3);
    Start(2, 3, {{"hold", "in_read"}, {"hold_step", "10"}});
    At(2).Await("holds in_read");
    At(2).Signal(SIGSTOP);
    At(2).Answer("go");
    OneCause("fail publish_stalled origin=2", {2});
    At(2).Signal(SIGCONT);
    nodes_.erase(0);
    nodes_.erase(1);
    OneCause("fail publish_stalled origin=2");
}

TEST_P(ProcessTest, AMachineThatStoodStillBlamesNobody) {
    const Args budgets{{"publish_stall", "1"}, {"stall_after", "1"}, {"steps", "3000"}};
    Start(0, 3, budgets);
    Start(1, 3, budgets);
    Args held = budgets;
    held["hold"] = "in_read";
    held["hold_step"] = "1000";
    Start(2, 3, held);
    At(2).Await("holds in_read");
    for (auto& [rank, node] : nodes_) {
        node->Signal(SIGSTOP);
    }
    At(2).Answer("go");
    EXPECT_EQ(At(0).Line(2.5), "");
    for (auto& [rank, node] : nodes_) {
        node->Signal(SIGCONT);
    }
    Served();
}

TEST_P(ProcessTest, ADigestThatDiffersAtStep17EndsAllAtStep17) {
    for (int r = 0; r < 3; ++r) {
        Start(r, 3, {{"steps", "100000"}, {"digest", r == 1 ? "17" : "0"}});
    }
    OneCause("fail diverged origin=1 phase=digest step=17");
}

TEST_P(ProcessTest, ASlowReaderLosesNothing) {
    Start(0, 3, {{"steps", "2500"}, {"frames", "20"}});
    Start(1, 3);
    Start(2, 3, {{"slow_us", "100"}});
    Served();
}

TEST_P(ProcessTest, FramesLargerThanTheRingArriveWhole) {
    Start(0, 3, {{"steps", "5"}, {"frames", "3"}, {"bytes", "300000"}, {"ring_slots", "16"}});
    Start(1, 3);
    Start(2, 3);
    Served();
}

TEST_P(OneHostProcessTest, ADeathHiddenByALeakedDescriptorIsSeenAnyway) {
    Start(0, 3, {{"idle", "1"}});
    Start(1, 3, {{"idle", "1"}});
    Start(2, 3, {{"leak", "1"}, {"idle", "1"}});
    At(2).Await("leaked");
    At(2).Await("idle");
    const auto at = Clock::now();
    At(2).Signal(SIGKILL);
    OneCause("fail peer_died origin=2", {2});
    EXPECT_LT(Clock::now() - at, Within(2));
}

TEST_P(RingProcessTest, ALostWakeUpCostsAMomentNotAHang) {
    // Nobody is ever woken: every wait ends by its own cap of 200 ms.
    Start(0, 2, {{"steps", "4"}, {"always", "before_wake:drop"}});
    Start(1, 2, {{"slow_us", "1000"}});
    const auto at = Clock::now();
    Served();
    // GO and four steps of at most 250 ms each, the end (50 ms a look), and a busy machine.
    EXPECT_LT(Clock::now() - at, Within(5 * 0.25 + 0.75));
}

INSTANTIATE_TEST_SUITE_P(Backends, StreamProcessTest, testing::Values("stream", "tcp"),
                         [](const auto& param) { return std::string{param.param}; });
INSTANTIATE_TEST_SUITE_P(Backends, OneHostProcessTest, testing::Values("ring", "stream"),
                         [](const auto& param) { return std::string{param.param}; });
INSTANTIATE_TEST_SUITE_P(Backends, RingProcessTest, testing::Values("ring"),
                         [](const auto& param) { return std::string{param.param}; });
INSTANTIATE_TEST_SUITE_P(Backends, ProcessTest, testing::Values("ring", "stream", "tcp"),
                         [](const auto& param) { return std::string{param.param}; });

}  // namespace
}  // namespace rankgate::relay
