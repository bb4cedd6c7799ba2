// SPDX-License-Identifier: Apache-2.0
#include "relay/board.h"

#include <gtest/gtest.h>
#include <unistd.h>

namespace rankgate::relay {
namespace {

Config MakeConfig(int size, bool digest = true) {
    Config config;
    config.size = size;
    config.epoch = 9;
    config.digest = digest;
    config.where = "/tmp/x";
    return config;
}

Failure Named(Code code, int rank) {
    Failure failure;
    failure.code = code;
    failure.origin_rank = static_cast<std::int16_t>(rank);
    return failure;
}

TEST(BoardTest, TheFirstCauseStaysWhoeverComesLater) {
    const Config config = MakeConfig(3);
    auto leader = Board::Create(config, true);
    ASSERT_TRUE(leader);
    Failure failure;
    auto follower = Board::Attach(UniqueFd{::dup(leader->fd())}, config, &failure);
    ASSERT_TRUE(follower);
    EXPECT_FALSE(leader->failure());
    EXPECT_TRUE(follower->Record(1, Named(Code::kCorrupt, 0)));
    EXPECT_FALSE(leader->Record(0, Named(Code::kPeerDied, 1)));
    EXPECT_EQ(leader->failure()->code, Code::kCorrupt);
    EXPECT_EQ(follower->failure()->code, Code::kCorrupt);
}

TEST(BoardTest, RefusesABoardThatIsNotThisGroups) {
    auto leader = Board::Create(MakeConfig(3), true);
    Failure failure;
    Config other = MakeConfig(3);
    other.epoch = 10;
    EXPECT_FALSE(Board::Attach(UniqueFd{::dup(leader->fd())}, other, &failure));
    EXPECT_EQ(failure.code, Code::kBadEpoch);
    EXPECT_FALSE(Board::Attach(UniqueFd{::dup(leader->fd())}, MakeConfig(4), &failure));
    EXPECT_EQ(failure.code, Code::kVersionMismatch);
    EXPECT_FALSE(Board::Attach(MakeMemFd("empty", 8192), MakeConfig(3), &failure));
    EXPECT_EQ(failure.code, Code::kVersionMismatch);
    EXPECT_FALSE(Board::Attach(UniqueFd{}, MakeConfig(3), &failure));
}

TEST(BoardTest, DivergenceIsFoundOnceAllHaveSaidAndBlamesTheOddOne) {
    auto board = Board::Create(MakeConfig(4), false);
    EXPECT_FALSE(board->StoreDigest(2, 17, 99));
    EXPECT_FALSE(board->StoreDigest(1, 17, 5));
    EXPECT_FALSE(board->StoreDigest(0, 17, 5));
    const auto failure = board->StoreDigest(3, 17, 5);
    ASSERT_TRUE(failure);
    EXPECT_EQ(failure->code, Code::kDiverged);
    EXPECT_EQ(failure->origin_rank, 2);
    EXPECT_EQ(failure->step, 17U);
    EXPECT_EQ(failure->expected, 5U);
    EXPECT_EQ(failure->got, 99U);
}

TEST(BoardTest, TheLeaderCanBeTheOddOne) {
    auto board = Board::Create(MakeConfig(3), false);
    EXPECT_FALSE(board->StoreDigest(0, 1, 1));
    EXPECT_FALSE(board->StoreDigest(1, 1, 2));
    EXPECT_EQ(board->StoreDigest(2, 1, 2)->origin_rank, 0);
}

TEST(BoardTest, OnATieTheLeaderIsRight) {
    auto board = Board::Create(MakeConfig(2), false);
    EXPECT_FALSE(board->StoreDigest(1, 1, 2));
    EXPECT_EQ(board->StoreDigest(0, 1, 1)->origin_rank, 1);
}

TEST(BoardTest, EqualDigestsOfManyStepsPass) {
    auto board = Board::Create(MakeConfig(2), false);
    for (std::uint64_t step = 1; step < 100; ++step) {
        EXPECT_FALSE(board->StoreDigest(0, step, step * 3));
        EXPECT_FALSE(board->StoreDigest(1, step, step * 3));
    }
}

TEST(BoardTest, ALateDigestOfAnOldStepSpoilsNothing) {
    auto board = Board::Create(MakeConfig(2), false);
    const std::uint64_t lap = Board::DigestDepth(MakeConfig(2));
    EXPECT_FALSE(board->StoreDigest(0, 1 + lap, 1));
    EXPECT_FALSE(board->StoreDigest(0, 1, 7));
    EXPECT_TRUE(board->StoreDigest(1, 1 + lap, 2));
}

}  // namespace
}  // namespace rankgate::relay
