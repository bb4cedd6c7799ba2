// SPDX-License-Identifier: Apache-2.0
#include "relay/hooks.h"

#ifdef RANKGATE_RELAY_HOOKS
namespace rankgate::relay {
HookFunction g_hook = nullptr;
}
#endif
