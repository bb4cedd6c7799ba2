// SPDX-License-Identifier: Apache-2.0
#include "engine/core.h"

#include <gtest/gtest.h>

namespace rankgate::engine {
namespace {

TEST(EngineCore, Placeholder) { SUCCEED(); }

}  // namespace
}  // namespace rankgate::engine
