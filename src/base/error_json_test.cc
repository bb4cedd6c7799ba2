// SPDX-License-Identifier: Apache-2.0
#include "base/error_json.h"

#include <gtest/gtest.h>

#include "base/utf8.h"

namespace rankgate {
namespace {

TEST(ErrorJson, HasAllFourKeysAlways) {
    EXPECT_EQ(ErrorJson(Error::Invalid("stop", "No.")),
              R"({"error":{"message":"No.","type":"invalid_request_error","param":"stop","code":null}})");
    EXPECT_EQ(ErrorJson(Error{ErrorCode::kUnavailable, "Later.", "", true}),
              R"({"error":{"message":"Later.","type":"service_unavailable_error","param":null,)"
              R"("code":"service_unavailable"}})");
}

TEST(ErrorJson, IsBoundedAndValidUtf8WhateverTheMessageQuotes) {
    std::string text;
    while (text.size() < 1 << 20) {
        text += "\xF0\x9F\x91\x8D";  // the bound falls inside a character
    }
    for (const std::string& lead :
         {std::string{}, std::string{"a"}, std::string{"ab"}, std::string{"\xFF"}}) {
        const std::string body = ErrorJson(Error::Invalid(lead + text, lead + text));
        EXPECT_LT(body.size(), kMaxErrorMessage + kMaxErrorParam + 200);
        EXPECT_TRUE(IsValidUtf8(body));
        // What was cut off is no damage to what is left.
        EXPECT_EQ(body.find("\xEF\xBF\xBD\""), std::string::npos) << lead;
    }
    EXPECT_TRUE(IsValidUtf8(ErrorJson(Error::Invalid("\xC0\x80", "\xE2\x82"))));
}

}  // namespace
}  // namespace rankgate
