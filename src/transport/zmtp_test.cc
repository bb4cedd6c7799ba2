// SPDX-License-Identifier: Apache-2.0
// The native data sockets: the decoder against bytes in any portions, both ends against libzmq's sockets, and
// what happens when a peer stops reading, leaves, or takes another's name.
#include "transport/zmtp.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "transport/zmq_util.h"
#include "transport/zmtp_dialer.h"
#include "transport/zmtp_socket.h"

namespace rankgate::transport {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Got = ZmtpDecoder::Got;

std::string Frame(std::string_view body, bool more = false) {
    char header[kMaxZmtpFrameHeader];
    std::string out(header, ZmtpFrameHeader(header, body.size(), more));
    return out += body;
}

std::string Hello(ZmtpRole role, std::string_view identity = {}) {
    std::string out;
    AppendZmtpHello(out, role, identity);
    return out;
}

std::string Command(std::string_view name, std::string_view body) {
    std::string out{"\4", 1};
    out += static_cast<char>(1 + name.size() + body.size());
    out += static_cast<char>(name.size());
    out += name;
    return out += body;
}

/// Everything that comes out when `bytes` go in `portion` at a time: "ready", "broken", or the frames.
std::vector<std::string> Decode(ZmtpRole own, std::string_view bytes, std::size_t portion,
                                ZmtpLimits limits = {}, std::string* replies = nullptr) {
    ZmtpDecoder decoder{own, limits};
    std::vector<std::string> said;
    while (!bytes.empty()) {
        const std::span<char> space = decoder.Space();
        const std::size_t n = std::min({portion, bytes.size(), space.size()});
        std::memcpy(space.data(), bytes.data(), n);
        bytes.remove_prefix(n);
        decoder.Filled(n);
        for (Got got = decoder.Next(); got != Got::kNothing; got = decoder.Next()) {
            if (got == Got::kBroken) {
                said.emplace_back("broken");
                return said;
            }
            std::string text = got == Got::kReady       ? "ready " + decoder.identity()
                               : got == Got::kMalformed ? "malformed"
                                                        : "";
            for (const std::string_view frame : decoder.frames()) {
                text += got == Got::kMessage ? "[" + std::string(frame) + "]" : "";
            }
            said.push_back(text);
        }
        if (replies != nullptr) {
            *replies += decoder.replies();
            decoder.replies().clear();
        }
    }
    return said;
}

TEST(ZmtpDecoderTest, ReadsTheSameInPortionsOfAnySize) {
    const std::string big(70'000, 'b');
    const std::string bytes = Hello(ZmtpRole::kDealer, "\1\2") + Frame("a", true) + Frame("") +
                              Frame(big, true) + Command("PING", std::string("\0\0ctx", 5)) + Frame("end") +
                              Frame("last");
    const std::vector<std::string> expected{std::string("ready ") + "\1\2", "[a][]", "[" + big + "][end]",
                                            "[last]"};
    for (const std::size_t portion :
         {std::size_t{1}, std::size_t{7}, std::size_t{64}, std::size_t{1} << 20}) {
        std::string replies;
        EXPECT_EQ(Decode(ZmtpRole::kRouter, bytes, portion, {}, &replies), expected) << portion;
        EXPECT_EQ(replies, Command("PONG", "ctx"));
    }
}

TEST(ZmtpDecoderTest, RefusesWhatIsNoPeerAsEarlyAsItShows) {
    const std::vector<std::string> broken{"broken"};
    EXPECT_EQ(Decode(ZmtpRole::kPull, "GET / HTTP/1.1\r\n", 1 << 20), broken);
    std::string old = Hello(ZmtpRole::kPush);
    old[10] = 1;  // ZMTP 2
    EXPECT_EQ(Decode(ZmtpRole::kPull, old.substr(0, 11), 1), broken);
    std::string curve = Hello(ZmtpRole::kPush);
    std::memcpy(curve.data() + 12, "CURVE", 5);
    EXPECT_EQ(Decode(ZmtpRole::kPull, curve, 1 << 20), broken);
    EXPECT_EQ(Decode(ZmtpRole::kPull, Hello(ZmtpRole::kDealer), 1 << 20), broken)
        << "a role that does not fit";
    EXPECT_EQ(Decode(ZmtpRole::kPull, Hello(ZmtpRole::kPush).substr(0, 64) + Frame("early"), 1 << 20),
              broken);
    EXPECT_EQ(Decode(ZmtpRole::kPull, Hello(ZmtpRole::kPush).substr(0, 64) + Command("READY", ""), 1 << 20),
              broken);
}

TEST(ZmtpDecoderTest, BoundsFramesMessagesAndTheNumberOfFrames) {
    const ZmtpLimits limits{1000, 3000, 4};
    const std::string hello = Hello(ZmtpRole::kPush);
    const auto last = [&](const std::string& bytes) {
        return Decode(ZmtpRole::kPull, hello + bytes, 1 << 20, limits).back();
    };
    EXPECT_EQ(last(Frame(std::string(1000, 'x'))), "[" + std::string(1000, 'x') + "]");
    EXPECT_EQ(last(Frame(std::string(1001, 'x')).substr(0, 9)), "broken") << "at the announcement already";
    std::string four;
    for (int i = 0; i < 4; ++i) {
        four += Frame(std::string(900, 'x'), true);
    }
    EXPECT_EQ(last(four), "broken") << "3 000 bytes are over";
    EXPECT_EQ(last(Frame("1", true) + Frame("2", true) + Frame("3", true) + Frame("4")), "[1][2][3][4]");
    EXPECT_EQ(last(Frame("1", true) + Frame("2", true) + Frame("3", true) + Frame("4", true) + Frame("5")),
              "malformed");
    std::string endless;
    for (int i = 0; i < 2000; ++i) {
        endless += Frame("", true);
    }
    EXPECT_EQ(last(endless), "broken") << "empty frames cost memory, too";
    EXPECT_EQ(last(std::string("\x08\x01x", 3)), "broken") << "a flag that does not exist";
    EXPECT_EQ(last(Command("ERROR", std::string("\3bad", 4))), "broken");
    EXPECT_EQ(last(Command("PING", "x")), "broken");
    EXPECT_EQ(last(Command("NEWS", "x") + Frame("on")), "[on]") << "commands of later versions are read past";
}

TEST(ZmtpDecoderTest, ReadsReadyOfAnyShapeAndRefusesOneThatDoesNotAddUp) {
    const std::string greeting = Hello(ZmtpRole::kDealer).substr(0, 64);
    const auto ready = [&](const std::string& properties) {
        return Decode(ZmtpRole::kRouter, greeting + Command("READY", properties), 1 << 20).back();
    };
    const std::string type{"\x0bSocket-Type\0\0\0\6DEALER", 22};
    EXPECT_EQ(ready(type), "ready ");
    EXPECT_EQ(ready(std::string("\x08iDENTITY\0\0\0\2me", 15) + type), "ready me") << "any order, any case";
    EXPECT_EQ(ready(type + std::string("\1X\0\0\0\0", 6)), "ready ") << "a property of later versions";
    EXPECT_EQ(ready(type + std::string("\1X\0\0\0\1", 6)), "broken") << "longer than the command";
    EXPECT_EQ(ready(type + std::string("\1X\xff\xff\xff\xff", 6)), "broken");
    EXPECT_EQ(ready(type + std::string("\0\0\0\0\0", 5)), "broken") << "no name";
    EXPECT_EQ(ready(type + "\5I"), "broken");
    EXPECT_EQ(ready(std::string("\1X\0\0\0\0", 6)), "broken") << "no type";
    std::string longest = "\x08Identity" + std::string("\0\0\0\xff", 4) + std::string(255, 'i') + type;
    const auto command = [](const std::string& body) {
        std::string out{"\6\0\0\0\0\0\0", 7};
        out += static_cast<char>((body.size() + 6) >> 8U);
        out += static_cast<char>((body.size() + 6) & 0xffU);
        return out + "\5READY" + body;
    };
    EXPECT_EQ(Decode(ZmtpRole::kRouter, greeting + command(longest), 1 << 20).back(),
              "ready " + std::string(255, 'i'));
    longest = "\x08Identity" + std::string("\0\0\1\0", 4) + std::string(256, 'i') + type;
    EXPECT_EQ(Decode(ZmtpRole::kRouter, greeting + command(longest), 1 << 20).back(), "broken");
    EXPECT_EQ(Decode(ZmtpRole::kRouter, greeting + command(std::string(9000, 'x')), 1 << 20).back(),
              "broken");
    std::string minor = Hello(ZmtpRole::kDealer, "me");
    minor[11] = 0;
    EXPECT_EQ(Decode(ZmtpRole::kRouter, minor, 1).back(), "ready me") << "ZMTP 3.0";
    minor[10] = 4;
    EXPECT_EQ(Decode(ZmtpRole::kRouter, minor, 1).back(), "ready me") << "a later one speaks 3 with us";
}

class ZmtpSocketTest : public ::testing::Test {
  protected:
    ZmtpSocketTest() {
        std::string pattern = "/tmp/rg-zmtp-XXXXXX";
        EXPECT_NE(::mkdtemp(pattern.data()), nullptr);
        dir_ = pattern;
    }
    ~ZmtpSocketTest() override { std::filesystem::remove_all(dir_); }

    std::string Path() const { return dir_ + "/s"; }
    std::string Address() const { return "ipc://" + Path(); }

    std::unique_ptr<ZmtpListener> Listen(ZmtpRole role) {
        ZmtpListener::Options options;
        options.role = role;
        options.epoll = epoll_.get();
        options.tag = 1;
        auto made = ZmtpListener::Bind(Path(), options);
        EXPECT_TRUE(made.ok()) << made.error().message;
        return std::move(*made);
    }
    void Look(ZmtpListener& listener) {
        epoll_event events[16];
        const int n = ::epoll_wait(epoll_.get(), events, 16, 1);
        for (int i = 0; i < n; ++i) {
            listener.OnEpoll(events[i].data.u64, events[i].events, clock_.Now());
        }
    }
    bool Until(const std::function<bool()>& done) {
        const TimePoint limit = clock_.Now() + seconds(10);
        while (!done()) {
            if (clock_.Now() > limit) {
                return false;
            }
        }
        return true;
    }
    /// Looks and receives until `count` messages are in said_.
    bool Hear(ZmtpListener& listener, std::size_t count) {
        return Until([&] {
            Look(listener);
            while (listener.Receive() != ZmtpListener::Got::kNothing) {
                std::string text;
                for (const std::string_view frame : listener.frames()) {
                    text += "[" + std::string(frame) + "]";
                }
                said_.push_back(text);
            }
            ZmtpListener::Event event;
            UniqueFd closed;
            while (listener.NextEvent(event, closed)) {
                kinds_.push_back(event.kind);
            }
            return said_.size() >= count;
        });
    }
    /// A peer made of bytes.
    UniqueFd Raw() const {
        sockaddr_un address{};
        address.sun_family = AF_UNIX;
        std::strcpy(address.sun_path, Path().c_str());
        UniqueFd raw{::socket(AF_UNIX, SOCK_STREAM, 0)};
        EXPECT_EQ(::connect(raw.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
        return raw;
    }
    UniqueFd RawListener() const {
        sockaddr_un address{};
        address.sun_family = AF_UNIX;
        std::strcpy(address.sun_path, Path().c_str());
        UniqueFd raw{::socket(AF_UNIX, SOCK_STREAM, 0)};
        EXPECT_EQ(::bind(raw.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
        EXPECT_EQ(::listen(raw.get(), 8), 0);
        return raw;
    }
    static void Say(const UniqueFd& raw, const std::string& bytes) {
        ASSERT_EQ(::send(raw.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
                  static_cast<ssize_t>(bytes.size()));
    }
    /// What has come so far.
    static void ReadAll(const UniqueFd& raw, std::string& into) {
        std::vector<char> buffer(100'000);
        for (;;) {
            const ssize_t n = ::recv(raw.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
            if (n <= 0) {
                return;
            }
            into.append(buffer.data(), static_cast<std::size_t>(n));
        }
    }
    ZmqSocket Zmq(int type, std::string_view identity = {}) {
        ZmqSocket socket{context_, type};
        socket.Set(ZMQ_LINGER, 1000);
        if (!identity.empty()) {
            socket.Set(ZMQ_ROUTING_ID, identity);
        }
        return socket;
    }
    std::string Next(ZmqSocket& socket) {
        MultipartReader reader;
        std::string text;
        EXPECT_TRUE(Until([&] { return reader.Receive(socket) == MultipartReader::Got::kMessage; }));
        for (const std::string_view frame : reader.frames()) {
            text += "[" + std::string(frame) + "]";
        }
        return text;
    }

    using Kind = ZmtpListener::Event::Kind;
    SteadyClock clock_;
    std::string dir_;
    UniqueFd epoll_{::epoll_create1(EPOLL_CLOEXEC)};
    ZmqContext context_;
    std::vector<std::string> said_;
    std::vector<Kind> kinds_;
};

TEST_F(ZmtpSocketTest, ARouterTalksWithLibzmqsDealer) {
    auto router = Listen(ZmtpRole::kRouter);
    ZmqSocket dealer = Zmq(ZMQ_DEALER, "me");
    EXPECT_EQ(router->Send("me", "x", "y", {}), EHOSTUNREACH);
    ASSERT_EQ(dealer.Connect(Address()), 0);
    const std::string big(300'000, 'b');
    ASSERT_EQ(dealer.Send("one", true), 0);
    ASSERT_EQ(dealer.Send(big, false), 0);
    ASSERT_TRUE(Hear(*router, 1));
    EXPECT_EQ(said_[0], "[me][one][" + big + "]");
    EXPECT_EQ(kinds_, (std::vector{Kind::kAccepted, Kind::kReady}));
    const std::string_view aux[] = {"", big};
    ASSERT_EQ(router->Send("me", "t", "payload", aux), 0);
    ASSERT_EQ(router->Send("me", "t", "second", {}), 0);
    std::string got;
    MultipartReader reader;
    ASSERT_TRUE(Until([&] {
        Look(*router);
        return reader.Receive(dealer) == MultipartReader::Got::kMessage;
    }));
    ASSERT_EQ(reader.frames().size(), 4U);
    EXPECT_EQ(reader.frames()[3], big);
    ASSERT_TRUE(Until([&] {
        Look(*router);
        return reader.Receive(dealer) == MultipartReader::Got::kMessage;
    }));
    EXPECT_EQ(reader.frames()[1], "second");
    EXPECT_EQ(router->queued_bytes("me"), 0U);
}

TEST_F(ZmtpSocketTest, APullHearsEveryMessageBeforeTheEndOfItsConnection) {
    auto pull = Listen(ZmtpRole::kPull);
    {
        ZmqSocket push = Zmq(ZMQ_PUSH);
        push.Set(ZMQ_SNDHWM, 0);
        ASSERT_EQ(push.Connect(Address()), 0);
        for (int i = 0; i < 10'000; ++i) {
            ASSERT_EQ(push.Send(std::to_string(i), false), 0);
        }
    }
    ASSERT_TRUE(Hear(*pull, 10'000));
    for (std::size_t i = 0; i < said_.size(); ++i) {
        ASSERT_EQ(said_[i], "[" + std::to_string(i) + "]");
    }
    ASSERT_TRUE(Until([&] {
        Hear(*pull, 0);
        return kinds_.back() == Kind::kClosed;
    }));
    EXPECT_EQ(kinds_, (std::vector{Kind::kAccepted, Kind::kReady, Kind::kClosed}));
}

TEST_F(ZmtpSocketTest, AStrayIsToldFromAPeer) {
    auto pull = Listen(ZmtpRole::kPull);
    const UniqueFd stray = Raw();
    Say(stray, "hello");
    ASSERT_TRUE(Until([&] {
        Hear(*pull, 0);
        return kinds_.size() == 3;
    }));
    EXPECT_EQ(kinds_, (std::vector{Kind::kAccepted, Kind::kFailed, Kind::kClosed}));
}

TEST_F(ZmtpSocketTest, TheLastWhoTakesANameHasIt) {
    auto router = Listen(ZmtpRole::kRouter);
    ZmqSocket first = Zmq(ZMQ_DEALER, "me");
    ASSERT_EQ(first.Connect(Address()), 0);
    ASSERT_EQ(first.Send("first", false), 0);
    ASSERT_TRUE(Hear(*router, 1));
    ZmqSocket second = Zmq(ZMQ_DEALER, "me");
    ASSERT_EQ(second.Connect(Address()), 0);
    ASSERT_EQ(second.Send("second", false), 0);
    ASSERT_TRUE(Hear(*router, 2));
    ASSERT_EQ(first.Send("unheard", false), 0);
    ASSERT_EQ(second.Send("third", false), 0);
    ASSERT_TRUE(Hear(*router, 3));
    EXPECT_EQ(said_, (std::vector<std::string>{"[me][first]", "[me][second]", "[me][third]"}));
    ASSERT_EQ(router->Send("me", "t", "p", {}), 0);
    EXPECT_EQ(Next(second), "[t][p]");
    EXPECT_EQ(kinds_.size(), 4U) << "the first one's connection stays open";
}

TEST_F(ZmtpSocketTest, WhatAPeerDoesNotReadIsQueuedAndCounted) {
    auto router = Listen(ZmtpRole::kRouter);
    UniqueFd raw = Raw();
    Say(raw, Hello(ZmtpRole::kDealer, "me") + Frame("here"));
    ASSERT_TRUE(Hear(*router, 1));
    std::string expected = Hello(ZmtpRole::kRouter);
    for (int i = 0; i < 50; ++i) {
        const std::string payload(20'000, static_cast<char>('a' + i % 26));
        ASSERT_EQ(router->Send("me", "t", payload, {}), 0);
        expected += Frame("t", true) + Frame(payload);
    }
    EXPECT_GT(router->queued_bytes("me"), 500'000U);
    std::string got;
    ASSERT_TRUE(Until([&] {
        ReadAll(raw, got);
        Look(*router);
        return got.size() == expected.size();
    }));
    EXPECT_EQ(got, expected);
    EXPECT_EQ(router->queued_bytes("me"), 0U);
    raw.reset();
    EXPECT_EQ(router->Send("me", "t", "p", {}), EHOSTUNREACH);
}

TEST_F(ZmtpSocketTest, APeerMaySpeakByteByByteAndPingBetweenFrames) {
    auto router = Listen(ZmtpRole::kRouter);
    const UniqueFd raw = Raw();
    std::string bytes = Hello(ZmtpRole::kDealer, "me") + Frame("a", true) +
                        Command("PING", std::string("\0\x14"
                                                    "context",
                                                    9)) +
                        Frame("", true) + Frame("b");
    bytes[11] = 0;
    for (const char byte : bytes) {
        Say(raw, std::string(1, byte));
        Hear(*router, 0);
    }
    ASSERT_TRUE(Hear(*router, 1));
    EXPECT_EQ(said_[0], "[me][a][][b]");
    std::string got;
    ReadAll(raw, got);
    EXPECT_EQ(got, Hello(ZmtpRole::kRouter) + Command("PONG", "context"));
}

TEST_F(ZmtpSocketTest, AMessageThatWasHalfSaidIsNotDelivered) {
    auto pull = Listen(ZmtpRole::kPull);
    UniqueFd raw = Raw();
    Say(raw, Hello(ZmtpRole::kPush) + Frame("whole") + Frame("first", true) + Frame("second").substr(0, 4));
    raw.reset();
    ASSERT_TRUE(Until([&] {
        Hear(*pull, 0);
        return kinds_.size() == 3;
    }));
    EXPECT_EQ(said_, std::vector<std::string>{"[whole]"});
    EXPECT_EQ(kinds_.back(), Kind::kClosed);
}

TEST_F(ZmtpSocketTest, APeerThatPingsAndDoesNotReadCostsABoundedQueue) {
    auto router = Listen(ZmtpRole::kRouter);
    const UniqueFd raw = Raw();
    Say(raw, Hello(ZmtpRole::kDealer, "me") + Frame("here"));
    ASSERT_TRUE(Hear(*router, 1));
    std::string pings;
    for (int i = 0; i < 1000; ++i) {
        pings += Command("PING", std::string("\0\0sixteen bytes !!", 18));
    }
    for (int i = 0; i < 500; ++i) {  // 500 000 PINGs, 12 MB of answers
        Say(raw, pings);
        Hear(*router, 0);
    }
    EXPECT_LT(router->queued_bytes("me"), 128U * 1024);
    Say(raw, Frame("still heard"));
    EXPECT_TRUE(Hear(*router, 2));
}

TEST_F(ZmtpSocketTest, WhoHasSaidGoodbyeIsNotSentTo) {
    auto router = Listen(ZmtpRole::kRouter);
    const UniqueFd raw = Raw();
    Say(raw, Hello(ZmtpRole::kDealer, "me") + Frame("here"));
    ASSERT_TRUE(Hear(*router, 1));
    ::shutdown(raw.get(), SHUT_WR);
    ASSERT_TRUE(Until([&] {
        Hear(*router, 0);
        return kinds_.back() == Kind::kClosed;
    }));
    EXPECT_EQ(router->Send("me", "t", "p", {}), EHOSTUNREACH);
    EXPECT_EQ(router->queued_bytes("me"), 0U);
}

TEST_F(ZmtpSocketTest, NothingFollowsWhatWasCutOffWhenANameWasTaken) {
    auto router = Listen(ZmtpRole::kRouter);
    const UniqueFd first = Raw();
    Say(first, Hello(ZmtpRole::kDealer, "me") + Frame("here"));
    ASSERT_TRUE(Hear(*router, 1));
    std::string stream = Hello(ZmtpRole::kRouter);
    for (int i = 0; i < 30; ++i) {
        const std::string payload(20'000, static_cast<char>('a' + i));
        ASSERT_EQ(router->Send("me", "t", payload, {}), 0);
        stream += Frame("t", true) + Frame(payload);
    }
    ASSERT_GT(router->queued_bytes("me"), 0U);
    const UniqueFd second = Raw();
    Say(second, Hello(ZmtpRole::kDealer, "me") + Frame("now me"));
    ASSERT_TRUE(Hear(*router, 2));
    EXPECT_EQ(router->queued_bytes("me"), 0U);
    Say(first, Command("PING", std::string("\0\0x", 3)) + Frame("unheard"));
    Say(second, Frame("heard"));
    ASSERT_TRUE(Hear(*router, 3));
    EXPECT_EQ(said_.back(), "[me][heard]");
    std::string got;
    ReadAll(first, got);
    EXPECT_LT(got.size(), stream.size());
    EXPECT_EQ(got, stream.substr(0, got.size()));
    EXPECT_EQ(kinds_.size(), 4U) << "both connections are open";
}

TEST_F(ZmtpSocketTest, ADialerAnswersPingsAndIsNotFloodedByThem) {
    const UniqueFd listener = RawListener();
    ZmtpKeeper keeper;
    ZmtpDialer push{keeper, Path(), ZmtpRole::kPush, {}, {1 << 16, 1 << 16, 8}, epoll_.get(), 7};
    const UniqueFd raw{::accept(listener.get(), nullptr, nullptr)};
    Say(raw, Hello(ZmtpRole::kPull) + Command("PING", std::string("\0\0one", 5)));
    const auto look = [&] {
        epoll_event events[4];
        for (int n = ::epoll_wait(epoll_.get(), events, 4, 0); n > 0; --n) {
            push.OnEpoll(events[n - 1].events);
        }
        push.OnNews();
        EXPECT_EQ(push.Receive(), ZmtpDialer::Got::kNothing);
    };
    std::string got;
    const std::string expected = Hello(ZmtpRole::kPush) + Command("PONG", "one");
    ASSERT_TRUE(Until([&] {
        look();
        ReadAll(raw, got);
        return got.size() == expected.size();
    }));
    EXPECT_EQ(got, expected);
    std::string pings;
    for (int i = 0; i < 1000; ++i) {
        pings += Command("PING", std::string("\0\0sixteen bytes !!", 18));
    }
    for (int i = 0; i < 500; ++i) {
        Say(raw, pings);
        look();
    }
    EXPECT_LT(push.queued_bytes(), 128U * 1024);
    push.Send("out", {});
    // Whatever was answered, what comes is whole frames and ends with the message.
    got.clear();
    ASSERT_TRUE(Until([&] {
        look();
        ReadAll(raw, got);
        return got.ends_with(Frame("out"));
    }));
    const std::string pong = Command("PONG", "sixteen bytes !!");
    got.resize(got.size() - Frame("out").size());
    ASSERT_EQ(got.size() % pong.size(), 0U);
    for (std::size_t i = 0; i < got.size(); i += pong.size()) {
        ASSERT_EQ(got.compare(i, pong.size(), pong), 0);
    }
}

TEST_F(ZmtpSocketTest, ADialersMessagesArriveInOrder) {
    ZmqSocket pull = Zmq(ZMQ_PULL);
    pull.Set(ZMQ_RCVHWM, 0);
    ASSERT_EQ(pull.Bind(Address()), 0);
    ZmtpKeeper keeper;
    ZmtpDialer push{keeper, Path(), ZmtpRole::kPush, {}, {}, epoll_.get(), 7};
    for (int i = 0; i < 10'000; ++i) {
        push.Send(std::to_string(i), {});
    }
    MultipartReader reader;
    for (int i = 0; i < 10'000; ++i) {
        ASSERT_TRUE(Until([&] {
            push.OnNews();
            push.Receive();
            push.Flush();
            return reader.Receive(pull) == MultipartReader::Got::kMessage;
        }));
        ASSERT_EQ(reader.frames()[0], std::to_string(i));
    }
}

TEST_F(ZmtpSocketTest, ADialerWaitsForItsFrontendAndDeliversWhatWasQueued) {
    ZmtpKeeper keeper;
    ZmtpDialer push{keeper, Path(), ZmtpRole::kPush, {}, {}, epoll_.get(), 7};
    push.Send("one", {});
    const std::string_view rest[] = {"b", "c"};
    push.Send("a", rest);
    EXPECT_GT(push.queued_bytes(), 0U);
    ZmqSocket pull = Zmq(ZMQ_PULL);
    ASSERT_EQ(pull.Bind(Address()), 0);
    MultipartReader reader;
    ASSERT_TRUE(Until([&] {
        push.OnNews();
        push.Receive();
        return reader.Receive(pull) == MultipartReader::Got::kMessage;
    }));
    EXPECT_EQ(reader.frames()[0], "one");
    EXPECT_EQ(Next(pull), "[a][b][c]");
    EXPECT_TRUE(push.connected());
    EXPECT_EQ(push.queued_bytes(), 0U);
}

TEST_F(ZmtpSocketTest, ADialerRegistersWithoutItsOwnersHelpAndReceivesInHelpings) {
    ZmqSocket router = Zmq(ZMQ_ROUTER);
    router.Set(ZMQ_ROUTER_MANDATORY, 1);
    ASSERT_EQ(router.Bind(Address()), 0);
    ZmtpKeeper keeper;
    ZmtpDialer dealer{keeper, Path(), ZmtpRole::kDealer, "me", {}, epoll_.get(), 7, "registration"};
    EXPECT_EQ(Next(router), "[me][registration]");
    for (int i = 0; i < 1000; ++i) {
        ASSERT_EQ(router.Send("me", true), 0);
        ASSERT_EQ(router.Send(std::to_string(i), false), 0);
    }
    int count = 0;
    ASSERT_TRUE(Until([&] {
        dealer.OnNews();
        // One message a look: what was read along with it must not be forgotten.
        while (dealer.readable() && dealer.Receive() == ZmtpDialer::Got::kMessage) {
            EXPECT_EQ(dealer.frames()[0], std::to_string(count));
            ++count;
            EXPECT_TRUE(dealer.readable());
        }
        return count == 1000;
    }));
}

TEST_F(ZmtpSocketTest, ADialerComesBackAndAMessageThatWasHalfOutIsDropped) {
    auto first = Listen(ZmtpRole::kPull);
    ZmtpKeeper keeper;
    UniqueFd own{::epoll_create1(EPOLL_CLOEXEC)};
    ZmtpDialer push{keeper, Path(), ZmtpRole::kPush, {}, {1 << 10, 1 << 10, 8}, own.get(), 7};
    ASSERT_TRUE(Until([&] {
        push.OnNews();
        push.Receive();
        Hear(*first, 0);
        return push.connected();
    }));
    for (int i = 0; i < 100; ++i) {
        push.Send(std::to_string(i) + std::string(10'000, '.'), {});
    }
    ASSERT_GT(push.queued_bytes(), 0U);
    ASSERT_TRUE(Hear(*first, 2));
    first.reset();
    said_.clear();
    auto second = Listen(ZmtpRole::kPull);
    ASSERT_TRUE(Until([&] {
        epoll_event events[4];
        for (int n = ::epoll_wait(own.get(), events, 4, 0); n > 0; --n) {
            push.OnEpoll(events[n - 1].events);
        }
        push.OnNews();
        push.Receive();
        Hear(*second, 0);
        return !said_.empty() && said_.back().starts_with("[99.");
    }));
    for (std::size_t i = 1; i < said_.size(); ++i) {
        EXPECT_EQ(std::atoi(said_[i].c_str() + 1), std::atoi(said_[i - 1].c_str() + 1) + 1)
            << "whole and in order";
    }
    EXPECT_EQ(push.queued_bytes(), 0U);
}

TEST_F(ZmtpSocketTest, AFrontendThatComesBackFindsAnEngineThatIsBusy) {
    auto first = Listen(ZmtpRole::kPull);
    ZmtpKeeper keeper;
    UniqueFd own{::epoll_create1(EPOLL_CLOEXEC)};
    ZmtpDialer push{keeper, Path(), ZmtpRole::kPush, {}, {}, own.get(), 7};
    ASSERT_TRUE(Until([&] {
        push.OnNews();
        push.Receive();
        Hear(*first, 0);
        return push.connected();
    }));
    first.reset();
    kinds_.clear();
    auto second = Listen(ZmtpRole::kPull);
    EXPECT_TRUE(Until([&] {  // no call of the dialer in here
        Hear(*second, 0);
        return kinds_.size() == 2;
    }));
    EXPECT_EQ(kinds_, (std::vector{Kind::kAccepted, Kind::kReady}));
    push.Send("still there", {});
    push.OnNews();
    push.Receive();
    push.Send("and again", {});
    ASSERT_TRUE(Until([&] {
        push.OnNews();
        push.Receive();
        Hear(*second, 0);
        return !said_.empty();
    }));
    EXPECT_EQ(said_.back(), "[and again]");
}

TEST_F(ZmtpSocketTest, WhatIsLeftAtTheEndLeavesWithinTheLinger) {
    ZmqSocket pull = Zmq(ZMQ_PULL);
    ASSERT_EQ(pull.Bind(Address()), 0);
    std::size_t heard = 0;
    {
        ZmtpKeeper keeper;
        ZmtpDialer push{keeper, Path(), ZmtpRole::kPush, {}, {}, epoll_.get(), 7};
        const std::string payload(10'000, 'x');
        for (int i = 0; i < 200; ++i) {
            push.Send(payload, {});
        }
        push.Close(seconds(5));
        EXPECT_FALSE(push.valid());
    }
    MultipartReader reader;
    EXPECT_TRUE(Until([&] {
        heard += reader.Receive(pull) == MultipartReader::Got::kMessage ? 1 : 0;
        return heard == 200;
    }));
}

TEST_F(ZmtpSocketTest, LongPathsAreRefusedBeforeAnythingIsBound) {
    ZmtpListener::Options options;
    options.epoll = epoll_.get();
    EXPECT_FALSE(ZmtpListener::Bind("/tmp/" + std::string(200, 'x'), options).ok());
    EXPECT_FALSE(ZmtpListener::Bind("/nonexistent/rg/s", options).ok());
}

}  // namespace
}  // namespace rankgate::transport
