// SPDX-License-Identifier: Apache-2.0
// Named points at which a test can hold, kill or stop a rank, or damage what it is about to send. Compiled in
// only for the library variant that tests link (RANKGATE_RELAY_HOOKS); in the product each point is nothing.
#pragma once

#include <cstdint>

namespace rankgate::relay {

enum class Point : std::uint8_t {
    kBeforeDial,
    kBeforeListen,
    kAfterHello,
    kBeforeMap,
    kBeforeReady,
    kBeforeGo,
    kBeforeGoAck,
    kInPublish,   // argument: step; between two fragments of a step, or before its only one
    kInRead,      // argument: step; after a fragment was read, before its cursor moves
    kBeforeWait,  // before a futex or poll wait
    kBeforeWake,  // before readers are woken
};

/// What the hook asks for; only the points that can obey look at it.
enum class HookAction : std::uint8_t { kNone, kDrop, kDuplicate, kCorrupt, kSkip, kReplay, kOldEpoch };

#ifdef RANKGATE_RELAY_HOOKS
using HookFunction = HookAction (*)(Point, std::uint64_t);
extern HookFunction g_hook;
inline HookAction Hook(Point point, std::uint64_t argument = 0) {
    return g_hook != nullptr ? g_hook(point, argument) : HookAction::kNone;
}
#else
constexpr HookAction Hook(Point /*point*/, std::uint64_t /*argument*/ = 0) {
    return HookAction::kNone;
}
#endif

}  // namespace rankgate::relay
