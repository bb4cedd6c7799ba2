// SPDX-License-Identifier: Apache-2.0
#include "base/mailbox.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <thread>
#include <vector>

namespace rankgate {
namespace {

struct Item : MailboxNode {
    Item(int p, int n) : producer{p}, number{n} {}
    int producer;
    int number;
};

std::vector<std::thread> Producers(Mailbox<Item>& box, int count, int each) {
    std::vector<std::thread> producers;
    for (int p = 0; p < count; ++p) {
        producers.emplace_back([&box, p, each] {
            for (int n = 0; n < each; ++n) {
                box.Push(std::make_unique<Item>(p, n));
            }
        });
    }
    return producers;
}

TEST(MailboxTest, DeliversEverythingInOrderPerProducerAndNeverSleepsOnAFullBox) {
    constexpr int kProducers = 3;
    constexpr int kEach = 20'000;
    Mailbox<Item> box;
    std::vector<std::thread> producers = Producers(box, kProducers, kEach);
    int next[kProducers] = {};
    int taken = 0;
    while (taken < kProducers * kEach) {
        pollfd wait{box.fd(), POLLIN, 0};
        ASSERT_EQ(poll(&wait, 1, 10'000), 1) << "a signal was lost after " << taken;
        box.Acknowledge();
        while (auto item = box.Pop()) {
            ASSERT_EQ(item->number, next[item->producer]++);
            ++taken;
        }
    }
    for (auto& producer : producers) {
        producer.join();
    }
}

TEST(MailboxTest, AHeldBoxWritesNoSignalAndLosesNone) {
    Mailbox<Item> box;
    box.Hold();
    box.Hold();
    box.Push(std::make_unique<Item>(0, 0));
    pollfd wait{box.fd(), POLLIN, 0};
    EXPECT_EQ(poll(&wait, 1, 0), 0) << "the consumer has promised to look";
    box.Acknowledge();
    EXPECT_NE(box.Pop(), nullptr);
    EXPECT_EQ(box.Pop(), nullptr);
    box.Push(std::make_unique<Item>(0, 1));
    EXPECT_EQ(poll(&wait, 1, 0), 1) << "the promise ended with Acknowledge";
    box.Hold();  // too late: the signal is out
    EXPECT_FALSE(box.held());
    box.Acknowledge();
    EXPECT_NE(box.Pop(), nullptr);
    EXPECT_EQ(poll(&wait, 1, 0), 0);
}

TEST(MailboxTest, HoldingBetweenSleepsLosesNoSignalOfOtherThreads) {
    constexpr int kProducers = 2;
    constexpr int kEach = 50'000;
    Mailbox<Item> box;
    std::vector<std::thread> producers = Producers(box, kProducers, kEach);
    int next[kProducers] = {};
    int taken = 0;
    const auto take = [&] {
        box.Acknowledge();
        while (auto item = box.Pop()) {
            ASSERT_EQ(item->number, next[item->producer]++);
            ++taken;
        }
    };
    while (taken < kProducers * kEach) {
        box.Hold();
        take();
        if (taken == kProducers * kEach) {
            break;
        }
        pollfd wait{box.fd(), POLLIN, 0};
        ASSERT_EQ(poll(&wait, 1, 10'000), 1) << "a signal was lost after " << taken;
        take();
    }
    for (auto& producer : producers) {
        producer.join();
    }
}

TEST(MailboxTest, FreesWhatNobodyTook) {
    Mailbox<Item> box;
    for (int n = 0; n < 10; ++n) {
        box.Push(std::make_unique<Item>(0, n));
    }
}

}  // namespace
}  // namespace rankgate
