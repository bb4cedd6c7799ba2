// SPDX-License-Identifier: Apache-2.0
#include "base/result.h"

#include <gtest/gtest.h>

#include <cerrno>

namespace rankgate {
namespace {

TEST(ResultTest, HoldsEitherValueOrError) {
    Result<int> good{7};
    ASSERT_TRUE(good.ok());
    EXPECT_EQ(*good, 7);
    Result<int> bad{Error::Invalid("temperature", "must be at least 0")};
    ASSERT_FALSE(bad.ok());
    EXPECT_EQ(bad.error().param, "temperature");
    EXPECT_EQ(HttpStatus(bad.error().code), 400);
}

TEST(ResultTest, ClientMistakesAreNeverRetriedBySdks) {
    // SDKs retry 408, 409, 429 and 5xx; a bad argument must be none of them.
    EXPECT_EQ(HttpStatus(ErrorCode::kInvalidArgument), 400);
    EXPECT_EQ(HttpStatus(ErrorCode::kContextLength), 400);
    EXPECT_EQ(OpenAiCode(ErrorCode::kContextLength), "context_length_exceeded");
    EXPECT_EQ(OpenAiCode(ErrorCode::kModelNotFound), "model_not_found");
}

TEST(ResultTest, ASettingIsTheCallersMistakeOnlyIfNoLaterStartCouldUseIt) {
    for (const int error : {ENOENT, EACCES, ENOTDIR, EROFS, EADDRNOTAVAIL, ENODEV}) {
        EXPECT_EQ(SettingError(error), ErrorCode::kInvalidArgument) << error;
    }
    for (const int error : {EADDRINUSE, EMFILE, ENOSPC, ENOMEM}) {
        EXPECT_EQ(SettingError(error), ErrorCode::kUnavailable) << error;
    }
}

TEST(ResultDeathTest, ReadingTheValueOfAnErrorAborts) {
    Result<int> bad{Error{}};
    EXPECT_DEATH((void)bad.value(), "check failed");
}

}  // namespace
}  // namespace rankgate
