// SPDX-License-Identifier: Apache-2.0
// Leader and followers as threads of one process, on every back-end: what the thread sanitizer can see.
// Faults of whole processes are process_test.cc's.
#include "relay/relay.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <ctime>
#include <filesystem>
#include <latch>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "base/unique_fd.h"
#include "relay/budget.h"
#include "relay/control.h"
#include "relay/os.h"
#include "relay/rendezvous.h"

namespace rankgate::relay {
namespace {

bool Readable(int fd) {
    pollfd p{fd, POLLIN, 0};
    return ::poll(&p, 1, 0) == 1;
}

int FreePort() {
    const UniqueFd fd{::socket(AF_INET, SOCK_STREAM, 0)};
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    EXPECT_EQ(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
    ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &length);
    return ntohs(address.sin_port);
}

class RelayTest : public testing::TestWithParam<Backend> {
  protected:
    void SetUp() override {
        std::string name = testing::TempDir() + "relayXXXXXX";
        ASSERT_NE(::mkdtemp(name.data()), nullptr);
        folder_ = name;
        where_ = GetParam() == Backend::kTcp ? "tcp://127.0.0.1:" + std::to_string(FreePort())
                                             : folder_ + "/relay";
    }
    void TearDown() override {
        EXPECT_TRUE(std::filesystem::is_empty(folder_)) << "the rendezvous folder is not empty";
        std::filesystem::remove_all(folder_);
    }
    Config Make(int rank, int size) const {
        Config config;
        config.rank = rank;
        config.size = size;
        config.where = where_;
        config.epoch = 4711;
        config.backend = GetParam();
        config.join = Seconds{20};
        config.publish_stall = Seconds{20};
        return config;
    }
    /// Runs one thread per follower beside `leader_body`; both get joined ends.
    template <class L, class F>
    void Run(int size, L leader_body, F follower_body, std::function<void(Config&)> change = {}) {
        std::vector<std::thread> threads;
        std::latch bodies{size -
                          1};  // an end that goes without Finish is a death: nobody goes before all are done
        for (int r = 1; r < size; ++r) {
            threads.emplace_back([&, r] {
                Config config = Make(r, size);
                if (change) {
                    change(config);
                }
                Follower follower{config};
                auto joined = follower.Join();
                EXPECT_TRUE(joined) << joined.failure().Describe();
                if (joined) {
                    follower_body(follower, r);
                }
                bodies.arrive_and_wait();
            });
        }
        {
            Config config = Make(0, size);
            if (change) {
                change(config);
            }
            Leader leader{config};
            auto joined = leader.Join();
            EXPECT_TRUE(joined) << joined.failure().Describe();
            if (joined) {
                leader_body(leader);
            }
            for (std::thread& thread : threads) {
                thread.join();
            }
        }
    }
    std::string folder_;
    std::string where_;
};

std::uint64_t Publish(Leader& leader, const std::vector<std::string>& texts) {
    std::vector<Frame> frames;
    for (const std::string& text : texts) {
        frames.push_back(std::as_bytes(std::span{text}));
    }
    std::uint64_t number = 0;
    auto done = leader.Publish(frames, &number);
    EXPECT_TRUE(done) << done.failure().Describe();
    return number;
}

std::string Text(Frame frame) {
    return {reinterpret_cast<const char*>(frame.data()), frame.size()};
}

std::uint64_t Hash(const Step& step, std::uint64_t hash) {
    const auto mix = [&](std::uint64_t value) { hash = (hash ^ value) * 0x100000001B3ULL; };
    mix(step.number());
    mix(step.size());
    for (std::size_t i = 0; i < step.size(); ++i) {
        mix(step[i].size());
        for (const std::byte b : step[i]) {
            mix(static_cast<std::uint64_t>(b));
        }
    }
    return hash;
}

TEST_P(RelayTest, EveryRankGetsTheSameStepsInOrder) {
    std::array<std::uint64_t, 4> hashes{};
    Run(
        4,
        [&](Leader& leader) {
            for (std::uint64_t i = 1; i <= 300; ++i) {
                std::vector<std::string> texts;
                for (std::uint64_t k = 0; k < i % 5; ++k) {
                    texts.emplace_back((i * 97 + k * 1013) % 9000, static_cast<char>('a' + i % 26));
                }
                EXPECT_EQ(Publish(leader, texts), i);
            }
            EXPECT_TRUE(leader.Finish(Seconds{20}));
        },
        [&](Follower& follower, int rank) {
            std::uint64_t hash = 1;
            for (;;) {
                Step step;
                auto got = follower.NextStep(std::nullopt, &step);
                if (!got) {
                    EXPECT_EQ(got.failure().code, Code::kClosed) << got.failure().Describe();
                    break;
                }
                hash = Hash(step, hash);
            }
            EXPECT_TRUE(follower.Finish(Seconds{20}));
            EXPECT_FALSE(follower.failure());
            hashes[static_cast<std::size_t>(rank)] = hash;
        });
    EXPECT_NE(hashes[1], 0U);
    EXPECT_EQ(hashes[1], hashes[2]);
    EXPECT_EQ(hashes[1], hashes[3]);
}

TEST_P(RelayTest, AStepLargerThanTheRingArrivesWhole) {
    const std::string big(9 << 20, 'x');
    std::vector<std::string> many(1500, "frame");
    Run(
        3,
        [&](Leader& leader) {
            Publish(leader, {big, "tail"});
            Publish(leader, many);
            Publish(leader, {});
            EXPECT_TRUE(leader.Finish(Seconds{20}));
        },
        [&](Follower& follower, int) {
            Step step;
            ASSERT_TRUE(follower.NextStep(std::nullopt, &step));
            ASSERT_EQ(step.size(), 2U);
            EXPECT_EQ(step[0].size(), big.size());
            EXPECT_TRUE(Text(step[0]) == big);
            EXPECT_EQ(Text(step[1]), "tail");
            ASSERT_TRUE(follower.NextStep(std::nullopt, &step));
            ASSERT_EQ(step.size(), 1500U);
            EXPECT_EQ(Text(step[1499]), "frame");
            ASSERT_TRUE(follower.NextStep(std::nullopt, &step));
            EXPECT_EQ(step.size(), 0U);
            EXPECT_TRUE(follower.Finish(Seconds{20}));
        });
}

TEST_P(RelayTest, TooLargeIsRefusedAndTheStreamGoesOn) {
    Run(
        2,
        [&](Leader& leader) {
            const std::string text(101, 'x');
            const Frame frame = std::as_bytes(std::span{text});
            std::uint64_t number = 0;
            auto refused = leader.Publish(std::span{&frame, 1}, &number);
            ASSERT_FALSE(refused);
            EXPECT_EQ(refused.failure().code, Code::kTooLarge);
            EXPECT_FALSE(leader.failure());
            EXPECT_EQ(Publish(leader, {"ok"}), 1U);
            EXPECT_TRUE(leader.Finish(Seconds{20}));
        },
        [&](Follower& follower, int) {
            Step step;
            ASSERT_TRUE(follower.NextStep(std::nullopt, &step));
            EXPECT_EQ(Text(step[0]), "ok");
            EXPECT_TRUE(follower.Finish(Seconds{20}));
        },
        [](Config& config) { config.max_frame = 100; });
}

TEST_P(RelayTest, TheSlowestReaderHoldsTheLeaderToTheLag) {
    std::atomic<std::uint64_t> published{0};
    std::atomic<bool> looked{false};
    Run(
        3,
        [&](Leader& leader) {
            for (int i = 0; i < 20; ++i) {
                published = Publish(leader, {"x"});
            }
            EXPECT_TRUE(leader.Finish(Seconds{20}));
        },
        [&](Follower& follower, int rank) {
            Step step;
            for (std::uint64_t i = 1; i <= 20; ++i) {
                if (rank == 2) {
                    // Taken: i - 1 steps. However long this takes, no step above (i - 1) + lag can be out.
                    for (int spin = 0; spin < 50; ++spin) {
                        std::this_thread::yield();
                        EXPECT_LE(published.load(), i - 1 + 3);
                    }
                    looked = true;
                }
                ASSERT_TRUE(follower.NextStep(std::nullopt, &step));
            }
            EXPECT_TRUE(follower.Finish(Seconds{20}));
        },
        [](Config& config) { config.max_lag_steps = 3; });
    EXPECT_TRUE(looked);
}

TEST_P(RelayTest, PollingAndDeadlinesAreNoFailures) {
    std::atomic<int> ready{0};
    Run(
        2,
        [&](Leader& leader) {
            while (ready.load() == 0) {
                std::this_thread::yield();
            }
            Publish(leader, {"x"});
            EXPECT_TRUE(leader.Finish(Seconds{20}));
        },
        [&](Follower& follower, int) {
            Step step;
            auto nothing = follower.TryNextStep(&step);
            ASSERT_TRUE(nothing);
            EXPECT_FALSE(*nothing);
            auto late = follower.NextStep(Seconds{0.02}, &step);
            ASSERT_TRUE(late);
            EXPECT_EQ(*late, Wait::kTimeout);
            bool asked = false;
            auto broken = follower.NextStep(std::nullopt, &step, [&] { return asked = true; });
            ASSERT_TRUE(broken);
            EXPECT_EQ(*broken, Wait::kInterrupted);
            EXPECT_TRUE(asked);
            ready = 1;
            for (;;) {
                auto got = follower.TryNextStep(&step);
                ASSERT_TRUE(got) << got.failure().Describe();
                if (*got) {
                    break;
                }
                std::this_thread::yield();
            }
            EXPECT_EQ(step.number(), 1U);
            EXPECT_TRUE(follower.Finish(Seconds{20}));
        });
}

TEST_P(RelayTest, OneCauseForAllAndItIsReadableBeforeItIsRaised) {
    std::atomic<int> told{0};
    std::atomic<bool> all_in{false};
    Run(
        4,
        [&](Leader& leader) {
            all_in = true;
            pollfd p{leader.failure_fd(), POLLIN, 0};
            EXPECT_EQ(::poll(&p, 1, 10000), 1);
            const auto cause = leader.failure();
            ASSERT_TRUE(cause);
            EXPECT_EQ(cause->code, Code::kRemoteFailure);
            EXPECT_EQ(cause->origin_rank, 2);
            EXPECT_EQ(cause->text_view(), "out of memory");
            std::uint64_t number = 0;
            auto refused = leader.Publish({}, &number);
            ASSERT_FALSE(refused);
            EXPECT_EQ(refused.failure().text_view(), "out of memory");
            leader.Fail(Code::kCorrupt, "later");
            EXPECT_EQ(leader.failure()->text_view(), "out of memory");
            while (told.load() < 3) {
                std::this_thread::yield();
            }
        },
        [&](Follower& follower, int rank) {
            while (!all_in) {
                std::this_thread::yield();
            }
            if (rank == 2) {
                follower.Fail(Code::kRemoteFailure, "out of memory");
            }
            Step step;
            for (int i = 0; i < 2; ++i) {
                auto got = follower.NextStep(Seconds{10}, &step);
                ASSERT_FALSE(got);
                EXPECT_EQ(got.failure().code, Code::kRemoteFailure);
                EXPECT_EQ(got.failure().origin_rank, 2);
                EXPECT_TRUE(Readable(follower.failure_fd()));
            }
            auto end = follower.Finish(Seconds{1});
            ASSERT_FALSE(end);
            EXPECT_EQ(end.failure().text_view(), "out of memory");
            ++told;
        });
}

TEST_P(RelayTest, WhoeverHasRaisedTheFailureFindsTheDescriptorReadable) {
    for (int i = 0; i < 1000; ++i) {
        Leader leader{Make(0, 1)};
        std::latch ready{4};
        std::vector<std::thread> threads;
        for (int t = 0; t < 3; ++t) {
            threads.emplace_back([&] {
                ready.arrive_and_wait();
                while (!leader.failure()) {
                }
                EXPECT_TRUE(Readable(leader.failure_fd()));
            });
        }
        ready.arrive_and_wait();
        leader.Fail(Code::kRemoteFailure, "out of memory");
        EXPECT_TRUE(Readable(leader.failure_fd()));
        for (std::thread& thread : threads) {
            thread.join();
        }
    }
}

TEST_P(RelayTest, DivergenceNamesRankAndStepEverywhere) {
    std::atomic<int> done{0};
    const auto check = [](const Failure& failure) {
        EXPECT_EQ(failure.code, Code::kDiverged) << failure.Describe();
        EXPECT_EQ(failure.origin_rank, 2);
        EXPECT_EQ(failure.step, 17U);
    };
    Run(
        4,
        [&](Leader& leader) {
            for (;;) {
                std::uint64_t number = 0;
                auto published = leader.Publish({}, &number);
                if (!published) {
                    check(published.failure());
                    EXPECT_LE(number, 17U + 2U);
                    break;
                }
                if (Status set = leader.SetDigest(number * 7); !set) {
                    check(set.failure());
                    break;
                }
            }
            while (done < 3) {
                std::this_thread::yield();
            }
        },
        [&](Follower& follower, int rank) {
            for (;;) {
                Step step;
                auto got = follower.NextStep(Seconds{10}, &step);
                if (!got) {
                    check(got.failure());
                    break;
                }
                ASSERT_EQ(*got, Wait::kReady);
                if (Status set =
                        follower.SetDigest(step.number() * 7 + (rank == 2 && step.number() == 17 ? 1 : 0));
                    !set) {
                    check(set.failure());
                    break;
                }
            }
            ++done;
        },
        [](Config& config) { config.digest = true; });
}

TEST_P(RelayTest, CloseWakesTheCallOfAnotherThread) {
    Run(
        2,
        [&](Leader& leader) {
            pollfd p{leader.failure_fd(), POLLIN, 0};
            EXPECT_EQ(::poll(&p, 1, 10000), 1);
            EXPECT_EQ(leader.failure()->code, Code::kPeerDied);
        },
        [&](Follower& follower, int) {
            std::atomic<bool> waiting{false};
            std::thread other{[&] {
                Step step;
                auto got = follower.NextStep(std::nullopt, &step, [&] {
                    waiting = true;
                    return false;
                });
                ASSERT_FALSE(got);
                EXPECT_EQ(got.failure().code, Code::kClosed);
            }};
            while (!waiting) {
                std::this_thread::yield();
            }
            follower.Close();
            other.join();
            follower.Close();
            Step step;
            EXPECT_EQ(follower.NextStep(Seconds{0}, &step).failure().code, Code::kClosed);
        });
}

TEST_P(RelayTest, ARankThatIsClosedInTheJoinIsGoneForTheOthers) {
    for (const int closed : {0, 1}) {
        Leader leader{Make(0, 3)};
        Follower follower{Make(1, 3)};
        std::latch both{2};
        const auto waiting = [&, left = 3]() mutable {  // from the third look on it waits for rank 2
            if (--left == 0) {
                both.count_down();
            }
            return false;
        };
        std::thread other{[&] {
            auto joined = follower.Join(waiting);
            ASSERT_FALSE(joined);
            EXPECT_EQ(joined.failure().code, closed == 0 ? Code::kLeaderDied : Code::kClosed);
            EXPECT_EQ(follower.failure().has_value(), closed == 0);
        }};
        std::thread closer{[&] {
            both.wait();
            if (closed == 0) {
                leader.Close();
            } else {
                follower.Close();
                leader.Fail(Code::kRemoteFailure, "over");
            }
        }};
        auto joined = leader.Join(waiting);
        ASSERT_FALSE(joined);
        EXPECT_EQ(joined.failure().code, closed == 0 ? Code::kClosed : Code::kRemoteFailure);
        EXPECT_EQ(leader.failure().has_value(), closed != 0);
        closer.join();
        other.join();
    }
}

TEST_P(RelayTest, FinishIsCollectiveAndNoDeath) {
    Run(
        3,
        [&](Leader& leader) {
            Publish(leader, {"last"});
            EXPECT_TRUE(leader.Finish(Seconds{20}));
            EXPECT_TRUE(leader.Finish(Seconds{20}));
            std::uint64_t number = 0;
            EXPECT_EQ(leader.Publish({}, &number).failure().code, Code::kClosed);
            EXPECT_FALSE(leader.failure());
        },
        [&](Follower& follower, int rank) {
            if (rank == 1) {
                EXPECT_TRUE(follower.Finish(Seconds{20}));  // it need not have read everything
                return;
            }
            Step step;
            ASSERT_TRUE(follower.NextStep(std::nullopt, &step));
            EXPECT_EQ(follower.NextStep(std::nullopt, &step).failure().code, Code::kClosed);
            EXPECT_TRUE(follower.Finish(Seconds{20}));
            EXPECT_FALSE(Readable(follower.failure_fd()));
        });
}

TEST_P(RelayTest, ARankThatDoesNotComeToFinishIsNamed) {
    std::atomic<bool> over{false};
    Run(
        3,
        [&](Leader& leader) {
            auto end = leader.Finish(Seconds{0.1});
            ASSERT_FALSE(end);
            EXPECT_EQ(end.failure().code, Code::kPeerStalled);
            EXPECT_EQ(end.failure().MissingRanks(), std::vector<int>{2});
            EXPECT_EQ(end.failure().phase, Phase::kFinish);
            over = true;
        },
        [&](Follower& follower, int rank) {
            if (rank == 1) {
                auto end = follower.Finish(Seconds{20});
                ASSERT_FALSE(end);
                EXPECT_EQ(end.failure().MissingRanks(), std::vector<int>{2});
            }
            while (!over) {
                std::this_thread::yield();
            }
        });
}

TEST_P(RelayTest, WhoeverWaitsInFinishIsNotBlamedForAnother) {
    std::atomic<bool> over{false};
    std::latch in{2};  // the others' time begins before rank 0's
    Run(
        4,
        [&](Leader& leader) {
            in.wait();
            EXPECT_EQ(leader.Finish(Seconds{0.2}).failure().MissingRanks(), std::vector<int>{3});
            over = true;
        },
        [&](Follower& follower, int rank) {
            if (rank != 3) {
                bool first = true;
                auto end = follower.Finish(Seconds{0.2}, [&] {
                    if (std::exchange(first, false)) {
                        in.count_down();
                    }
                    return false;
                });
                ASSERT_FALSE(end);
                EXPECT_EQ(end.failure().code, Code::kPeerStalled);
                EXPECT_EQ(end.failure().origin_rank, 3);
                EXPECT_EQ(end.failure().MissingRanks(), std::vector<int>{3});
            }
            while (!over) {
                std::this_thread::yield();
            }
        });
}

TEST_P(RelayTest, AFinishToWhichRankZeroDoesNotComeEndsInItsTime) {
    std::atomic<bool> over{false};
    Run(
        2,
        [&](Leader& leader) {
            // Told over a connection where no memory is shared.
            const SteadyTime until = Now() + std::chrono::seconds{20};
            while (!(over && leader.failure()) && Now() < until) {
                std::this_thread::yield();
            }
            ASSERT_TRUE(leader.failure());
            EXPECT_EQ(leader.failure()->code, Code::kPeerStalled);
        },
        [&](Follower& follower, int) {
            const SteadyTime started = Now();
            auto end = follower.Finish(Seconds{0.2});
            EXPECT_LT(Now() - started, std::chrono::milliseconds{900});
            ASSERT_FALSE(end);
            EXPECT_EQ(end.failure().MissingRanks(), std::vector<int>{0});
            EXPECT_EQ(end.failure().deadline_s, 0.2);
            over = true;
        });
}

TEST_P(RelayTest, ALastRankThatGoesFromFinishIsMissedByALeaderThatStillWorks) {
    Run(
        2,
        [&](Leader& leader) {
            pollfd failed{leader.failure_fd(), POLLIN, 0};
            ASSERT_EQ(::poll(&failed, 1, 20000), 1);
            std::uint64_t number = 0;
            for (const Failure& failure : {*leader.failure(), leader.Publish({}, &number).failure(),
                                           leader.Finish(Seconds{1}).failure()}) {
                EXPECT_EQ(failure.code, Code::kPeerDied);
                EXPECT_EQ(failure.origin_rank, 1);
                EXPECT_EQ(failure.phase, Phase::kFinish);
            }
        },
        [&](Follower& follower, int) {
            auto end = follower.Finish(Seconds{20}, [] { return true; });
            ASSERT_TRUE(end) << end.failure().Describe();
            EXPECT_EQ(*end, Wait::kInterrupted);
            follower.Close();
        });
}

TEST_P(RelayTest, AMissingRankIsNamedOnAllRanksPresent) {
    std::thread present{[&] {
        Config config = Make(1, 4);
        config.join = Seconds{0.3};
        Follower follower{config};
        auto joined = follower.Join();
        ASSERT_FALSE(joined);
        EXPECT_EQ(joined.failure().code, Code::kJoinTimeout);
        EXPECT_EQ(joined.failure().MissingRanks(), (std::vector<int>{2, 3}));
        Step step;
        EXPECT_EQ(follower.NextStep(Seconds{0}, &step).failure().code, Code::kJoinTimeout);
    }};
    Config config = Make(0, 4);
    config.join = Seconds{0.3};
    Leader leader{config};
    auto joined = leader.Join();
    present.join();
    ASSERT_FALSE(joined);
    EXPECT_EQ(joined.failure().code, Code::kJoinTimeout);
    EXPECT_EQ(joined.failure().MissingRanks(), (std::vector<int>{2, 3}));
    EXPECT_EQ(joined.failure().deadline_s, 0.3);
    EXPECT_NE(joined.failure().text_view().find("rank 3 (never said HELLO)"), std::string_view::npos);
    EXPECT_TRUE(Readable(leader.failure_fd()));
}

TEST_P(RelayTest, AFollowerAloneHasADeadlineToo) {
    Config config = Make(1, 2);
    config.join = Seconds{0.1};
    Follower follower{config};
    auto joined = follower.Join();
    ASSERT_FALSE(joined);
    EXPECT_EQ(joined.failure().code, Code::kJoinTimeout);
    EXPECT_EQ(joined.failure().MissingRanks(), std::vector<int>{0});
    EXPECT_EQ(joined.failure().phase, Phase::kDial);
}

TEST_P(RelayTest, ASecondLeaderIsRefusedAtOnceThoughTheNameBecomesFreeMeanwhile) {
    if (GetParam() == Backend::kTcp) {
        return;  // bind() alone decides there
    }
    Result<Listener> first = Listener::Open(Make(0, 2));
    ASSERT_TRUE(first) << first.failure().Describe();
    std::thread owner{[&] {
        // Leaves the moment the newcomer has looked once, as a leader does whose group has come.
        pollfd listening{first->fd(), POLLIN, 0};
        ASSERT_EQ(::poll(&listening, 1, 20000), 1);
        const UniqueFd look = first->Accept();
        pollfd looking{look.get(), POLLIN, 0};
        EXPECT_EQ(::poll(&looking, 1, 20000), 1);
        first->Close();
    }};
    Result<Listener> second = Listener::Open(Make(0, 2));
    owner.join();
    ASSERT_FALSE(second.ok());
    EXPECT_EQ(second.failure().code, Code::kDuplicateRank);
}

TEST_P(RelayTest, ASecondConnectionThatIsLostIsMadeAgain) {
    if (GetParam() != Backend::kTcp) {
        return;  // nobody else makes two
    }
    Result<Listener> first = Listener::Open(Make(0, 2));
    ASSERT_TRUE(first) << first.failure().Describe();
    std::thread owner{[&] {
        // Answers HELLO and refuses what comes next; the real rank 0 starts once the follower has let go.
        pollfd p{first->fd(), POLLIN, 0};
        ASSERT_EQ(::poll(&p, 1, 20000), 1);
        UniqueFd control = first->Accept();
        first->Close();
        WelcomeBody welcome;
        welcome.epoch = 4711;
        welcome.max_frame = 1 << 20;
        welcome.join_left_s = 20;
        welcome.max_lag_steps = 2;
        welcome.abi = AbiHash();
        ASSERT_TRUE(SendAll(control.get(), Encode(MessageType::kWelcome, welcome)));
        std::array<char, 256> bytes{};
        p.fd = control.get();
        do {
            ASSERT_EQ(::poll(&p, 1, 20000), 1);
        } while (::recv(control.get(), bytes.data(), bytes.size(), 0) > 0);
        Leader leader{Make(0, 2)};
        auto joined = leader.Join();
        ASSERT_TRUE(joined) << joined.failure().Describe();
        Publish(leader, {"first"});
        ASSERT_TRUE(leader.Finish(Seconds{20}));
    }};
    {
        Follower follower{Make(1, 2)};
        auto joined = follower.Join();
        EXPECT_TRUE(joined) << joined.failure().Describe();
        Step step;
        EXPECT_TRUE(follower.NextStep(Seconds{20}, &step));
        EXPECT_TRUE(follower.Finish(Seconds{20}));
    }
    owner.join();
}

TEST_P(RelayTest, ANameWithoutAFileWillDoAndIsFreeAfterwards) {
    if (GetParam() == Backend::kTcp) {
        return;
    }
    where_ = "@relay_test-" + std::to_string(::getpid()) + "-" + std::to_string(std::random_device{}());
    for (int i = 0; i < 2; ++i) {
        Run(
            3,
            [&](Leader& leader) {
                Publish(leader, {"first"});
                EXPECT_TRUE(leader.Finish(Seconds{20}));
            },
            [&](Follower& follower, int) {
                Step step;
                ASSERT_TRUE(follower.NextStep(Seconds{20}, &step));
                EXPECT_EQ(Text(step[0]), "first");
                EXPECT_TRUE(follower.Finish(Seconds{20}));
            });
    }
    Result<Listener> first = Listener::Open(Make(0, 2));
    ASSERT_TRUE(first) << first.failure().Describe();
    Result<Listener> second = Listener::Open(Make(0, 2));
    ASSERT_FALSE(second.ok());
    EXPECT_EQ(second.failure().code, Code::kDuplicateRank);
}

TEST_P(RelayTest, AnInterruptedFollowerMayJoinAgain) {
    Follower follower{Make(1, 3)};
    std::thread leader_thread{[&] {
        Leader leader{Make(0, 3)};
        auto joined = leader.Join();
        ASSERT_TRUE(joined) << joined.failure().Describe();
        Publish(leader, {"first"});
        ASSERT_TRUE(leader.Finish(Seconds{20}));
    }};
    // With rank 2 away it can only be interrupted: the second time it has rank 0's answer and waits for GO.
    for (const int looks : {1, 3}) {
        int left = looks;
        auto broken = follower.Join([&] { return --left == 0; });
        ASSERT_TRUE(broken) << broken.failure().Describe();
        EXPECT_FALSE(broken->has_value());
        EXPECT_FALSE(follower.failure().has_value());
    }
    std::thread other_thread{[&] {
        Follower other{Make(2, 3)};
        auto joined = other.Join();
        ASSERT_TRUE(joined) << joined.failure().Describe();
        Step step;
        ASSERT_TRUE(other.NextStep(Seconds{20}, &step));
        ASSERT_TRUE(other.Finish(Seconds{20}));
    }};
    auto joined = follower.Join();
    EXPECT_TRUE(joined) << joined.failure().Describe();
    Step step;
    auto read = follower.NextStep(Seconds{20}, &step);
    EXPECT_TRUE(read) << read.failure().Describe();
    EXPECT_EQ(Text(step[0]), "first");
    EXPECT_TRUE(follower.Finish(Seconds{20}));
    other_thread.join();
    leader_thread.join();
}

TEST_P(RelayTest, StrangersAreRefusedByNameAndTheGroupIsNotDisturbed) {
    std::atomic<int> refused{0};
    std::vector<std::thread> strangers;
    const auto stranger = [&](Code code, std::function<void(Config&)> change) {
        strangers.emplace_back([&, code, change] {
            Config config = Make(1, 2);
            config.join = Seconds{20};
            change(config);
            Follower follower{config};
            auto joined = follower.Join();
            EXPECT_FALSE(joined);
            if (!joined) {
                EXPECT_EQ(joined.failure().code, code) << joined.failure().Describe();
            }
            ++refused;
        });
    };
    stranger(Code::kBadEpoch, [](Config& c) { c.epoch += 1; });
    stranger(Code::kVersionMismatch, [](Config& c) { c.size = 3; });
    stranger(Code::kVersionMismatch, [](Config& c) { c.digest = true; });
    std::thread real{[&] {
        while (refused < 3) {
            std::this_thread::yield();
        }
        Follower follower{Make(1, 2)};
        auto joined = follower.Join();
        ASSERT_TRUE(joined) << joined.failure().Describe();
        Step step;
        ASSERT_TRUE(follower.NextStep(std::nullopt, &step));
        EXPECT_TRUE(follower.Finish(Seconds{20}));
    }};
    {
        Leader leader{Make(0, 2)};
        auto joined = leader.Join();
        EXPECT_TRUE(joined);
        if (joined) {
            Publish(leader, {"x"});
            EXPECT_TRUE(leader.Finish(Seconds{20}));
        }
        real.join();
    }
    for (std::thread& thread : strangers) {
        thread.join();
    }
}

/// Sends a HELLO for rank 1 of 2 by hand; the type of the answer, kHello if the connection was closed
/// instead.
MessageType RawHello(const UniqueFd& fd, std::uint64_t epoch, Backend backend, std::uint64_t nonce) {
    HelloBody hello;
    hello.abi = AbiHash();
    hello.epoch = epoch;
    hello.nonce = nonce;
    hello.rank = 1;
    hello.size = 2;
    hello.pid = static_cast<std::uint32_t>(::getpid());
    hello.backend = static_cast<std::uint32_t>(backend);
    EXPECT_TRUE(SendAll(fd.get(), Encode(MessageType::kHello, hello)));
    MessageParser parser;
    for (;;) {
        pollfd p{fd.get(), POLLIN, 0};
        EXPECT_EQ(::poll(&p, 1, 20000), 1);
        const ssize_t n = ::recv(fd.get(), parser.Room().data(), parser.Room().size(), 0);
        if (n <= 0) {
            return MessageType::kHello;
        }
        parser.Added(static_cast<std::size_t>(n));
        Message message;
        if (parser.Next(&message) == MessageParser::State::kMessage) {
            return message.type;
        }
    }
}

TEST_P(RelayTest, ARepeatedHelloIsAnsweredAgainAnotherOneOnlyOnceTheFirstHasGone) {
    std::thread followers{[&] {
        const auto dial = [&] {
            UniqueFd fd;
            while (!fd.valid()) {
                fd = Dial(where_);
                std::this_thread::yield();
            }
            return fd;
        };
        UniqueFd first = dial();
        EXPECT_EQ(RawHello(first, 4711, GetParam(), 7), MessageType::kWelcome);
        UniqueFd again = dial();
        EXPECT_EQ(RawHello(again, 4711, GetParam(), 7), MessageType::kWelcome)
            << "the same nonce is the same rank";
        const UniqueFd twin = dial();
        EXPECT_EQ(RawHello(twin, 4711, GetParam(), 8), MessageType::kFail)
            << "another nonce while the first lives";
        first.reset();
        again.reset();
        Follower follower{Make(1, 2)};
        auto joined = follower.Join();
        ASSERT_TRUE(joined) << joined.failure().Describe();
        Step step;
        EXPECT_TRUE(follower.NextStep(std::nullopt, &step));
        EXPECT_TRUE(follower.Finish(Seconds{20}));
    }};
    Leader leader{Make(0, 2)};
    auto joined = leader.Join();
    EXPECT_TRUE(joined) << joined.failure().Describe();
    if (joined) {
        Publish(leader, {"first"});
        EXPECT_TRUE(leader.Finish(Seconds{20}));
    }
    followers.join();
}

/// What a scheduler does with a step: it adds and aborts, and drops what it cannot read.
class Scheduler {
  public:
    void Act(const Step& step) {
        for (std::size_t i = 0; i < step.size(); ++i) {
            const std::string text = Text(step[i]);
            const std::size_t space = text.find(' ');
            const std::string verb = text.substr(0, space);
            if (space == std::string::npos || (verb != "add" && verb != "abort")) {
                ++dropped_;
                continue;
            }
            const std::string id = text.substr(space + 1);
            if (verb == "abort") {
                std::erase(running_, id);
            } else if (std::find(running_.begin(), running_.end(), id) == running_.end()) {
                running_.push_back(id);
            } else {
                ++dropped_;  // a duplicate
            }
        }
        log_ += std::to_string(step.number()) + ":";
        for (const std::string& id : running_) {
            log_ += id + ",";
        }
        log_ += ";" + std::to_string(dropped_) + "\n";
        if (running_.size() > 20) {
            running_.erase(running_.begin(), running_.begin() + 10);  // some finish, the oldest first
        }
    }
    const std::string& log() const { return log_; }
    int dropped() const { return dropped_; }

  private:
    std::vector<std::string> running_;
    std::string log_;
    int dropped_{0};
};

TEST_P(RelayTest, EveryRankActsOnTheSameListInTheSameStepWhateverItsOwnClock) {
    constexpr int kItems = 4000;
    std::array<std::string, 4> logs{};
    std::array<int, 4> dropped{};
    Run(
        4,
        [&](Leader& leader) {
            std::mt19937 random{11};
            const SteadyTime start = Now();
            int id = 0;
            for (int sent = 0; sent < kItems;) {
                // 2000 items a second, in whatever bunches the clock makes of it; some steps are empty.
                const auto due =
                    std::min<std::int64_t>(kItems, (Now() - start) / std::chrono::microseconds{500});
                std::vector<std::string> items;
                while (sent + static_cast<int>(items.size()) < due && items.size() < 64) {
                    const std::string name = std::to_string(random() % 4 == 0 ? id : ++id);
                    switch (random() % 8) {
                        case 0:
                            items.push_back("abort " + std::to_string(id));
                            break;
                        case 1:
                            items.push_back(std::string{"\x00\xff garbage", 10});
                            break;
                        case 2:
                            items.push_back("add " + name);
                            items.push_back("abort " + name);  // right behind its add
                            break;
                        case 3:
                            items.push_back("add " + name);
                            items.push_back("add " + name);
                            break;
                        default:
                            items.push_back("add " + name);
                    }
                }
                sent += static_cast<int>(items.size());
                Publish(leader, items);
            }
            EXPECT_TRUE(leader.Finish(Seconds{20}));
        },
        [&](Follower& follower, int rank) {
            std::mt19937 random{static_cast<unsigned>(rank)};
            Scheduler scheduler;
            for (;;) {
                Step step;
                auto got = follower.NextStep(std::nullopt, &step);
                if (!got) {
                    EXPECT_EQ(got.failure().code, Code::kClosed) << got.failure().Describe();
                    break;
                }
                scheduler.Act(step);
                const timespec pause{0, static_cast<long>(random() % 5'000'000)};
                ::nanosleep(&pause, nullptr);
            }
            EXPECT_TRUE(follower.Finish(Seconds{20}));
            logs[static_cast<std::size_t>(rank)] = scheduler.log();
            dropped[static_cast<std::size_t>(rank)] = scheduler.dropped();
        });
    EXPECT_GT(logs[1].size(), 1000U);
    EXPECT_TRUE(logs[1] == logs[2] && logs[1] == logs[3]);
    EXPECT_GT(dropped[1], kItems / 20);
    EXPECT_EQ(dropped[1], dropped[2]);
    EXPECT_EQ(dropped[1], dropped[3]);
}

TEST_P(RelayTest, OneRankAloneNeedsNobody) {
    Config config;
    Leader leader{config};
    ASSERT_TRUE(leader.Join());
    EXPECT_EQ(Publish(leader, {"x"}), 1U);
    EXPECT_EQ(Publish(leader, {}), 2U);
    EXPECT_TRUE(leader.Finish(Seconds{1}));
    EXPECT_THROW(Follower{Config{}}, std::invalid_argument);
}

TEST_P(RelayTest, CallsInTheWrongOrderAreErrorsNotHangs) {
    Leader leader{Make(0, 2)};
    std::uint64_t number = 0;
    EXPECT_EQ(leader.Publish({}, &number).failure().code, Code::kClosed);
    EXPECT_EQ(leader.Finish(Seconds{1}).failure().code, Code::kClosed);
    EXPECT_TRUE(leader.Check());
    leader.Fail(Code::kRemoteFailure, "before join");
    EXPECT_EQ(leader.Join().failure().code, Code::kRemoteFailure);
    EXPECT_TRUE(Readable(leader.failure_fd()));
}

Nanos ThreadCpu() {
    timespec t{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return std::chrono::seconds{t.tv_sec} + Nanos{t.tv_nsec};
}

void Pace(Nanos gap) {
    const timespec t{0, static_cast<long>(gap.count())};
    ::nanosleep(&t, nullptr);
}

TEST_P(RelayTest, AFollowerThatForesawItsStepsSleepsWhenNoMoreCome) {
    Run(
        3,
        [](Leader& leader) {
            for (int i = 0; i < 100; ++i) {
                Pace(std::chrono::milliseconds{1});
                Publish(leader, {"step"});
            }
            Pace(std::chrono::milliseconds{600});  // idle
            Publish(leader, {"late"});
        },
        [](Follower& follower, int /*rank*/) {
            Step step;
            for (int i = 0; i < 100; ++i) {
                ASSERT_TRUE(follower.NextStep(Seconds{20}, &step));
            }
            const Nanos before = ThreadCpu();
            auto late = follower.NextStep(Seconds{20}, &step);
            ASSERT_TRUE(late) << late.failure().Describe();
            EXPECT_EQ(Text(step[0]), "late");
            // One look at most, and a few wake-ups by the slice.
            EXPECT_LT(ThreadCpu() - before, std::chrono::milliseconds{6});
        });
}

TEST_P(RelayTest, AFollowerThatASignalWakesBeforeItsStepSleepsOn) {
    constexpr int kLearned = 12;
    constexpr int kSignals = 10;
    constexpr auto kGap = std::chrono::milliseconds{60};
    struct sigaction ignore {};
    ignore.sa_handler = [](int) {};
    struct sigaction before {};
    ASSERT_EQ(::sigaction(SIGUSR2, &ignore, &before), 0);
    std::atomic<pthread_t> waiter{pthread_self()};
    Nanos used{0};
    Run(
        2,
        [&](Leader& leader) {
            for (int i = 0; i < kLearned + kSignals; ++i) {
                Pace(kGap / 6);
                if (i >= kLearned) {
                    ::pthread_kill(waiter, SIGUSR2);
                }
                Pace(kGap - kGap / 6);
                Publish(leader, {"step"});
            }
        },
        [&](Follower& follower, int /*rank*/) {
            waiter = pthread_self();
            Step step;
            for (int i = 0; i < kLearned + kSignals; ++i) {
                const Nanos start = ThreadCpu();
                ASSERT_TRUE(follower.NextStep(Seconds{20}, &step));
                used += i < kLearned ? Nanos{0} : ThreadCpu() - start;
            }
        });
    ::sigaction(SIGUSR2, &before, nullptr);
    // Five sixths of each gap if it looked from the signal on, and then no look until that is paid off.
    EXPECT_LT(used, kGap / 3);
}

TEST_P(RelayTest, ARealTimeFollowerNeverKeepsAnOrdinaryLeaderFromItsCpu) {
    cpu_set_t all;
    CPU_ZERO(&all);
    ASSERT_EQ(::sched_getaffinity(0, sizeof all, &all), 0);
    cpu_set_t one;
    CPU_ZERO(&one);
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (CPU_ISSET(cpu, &all) != 0) {
            CPU_SET(cpu, &one);
            break;
        }
    }
    std::atomic<bool> allowed{true};
    std::vector<double> late;
    Run(
        2,
        [&](Leader& leader) {
            ::sched_setaffinity(0, sizeof one, &one);
            for (int i = 0; i < 400 && allowed; ++i) {
                const SteadyTime due = Now() + std::chrono::microseconds{500};
                Pace(std::chrono::microseconds{500});
                late.push_back(Seconds{Now() - due}.count() * 1000);
                Publish(leader, {"step"});
            }
            ::sched_setaffinity(0, sizeof all, &all);
            Publish(leader, {});
        },
        [&](Follower& follower, int /*rank*/) {
            ::sched_setaffinity(0, sizeof one, &one);
            sched_param param{};
            param.sched_priority = 10;
            if (::sched_setscheduler(0, SCHED_FIFO, &param) != 0) {
                allowed = false;
            }
            Step step;
            do {
                ASSERT_TRUE(follower.NextStep(Seconds{20}, &step));
            } while (step.size() > 0);
        });
    if (!allowed) {
        GTEST_SKIP() << "SCHED_FIFO is not allowed here";
    }
    // A single look is less than a millisecond; the median is far from any bound that a spinning follower of
    // higher priority would leave.
    std::sort(late.begin(), late.end());
    EXPECT_LT(late[late.size() / 2], 1.0);
}

INSTANTIATE_TEST_SUITE_P(Backends, RelayTest,
                         testing::Values(Backend::kRing, Backend::kStream, Backend::kTcp),
                         [](const auto& param) { return std::string{BackendName(param.param)}; });

}  // namespace
}  // namespace rankgate::relay
