// SPDX-License-Identifier: Apache-2.0
// The default GroupFactory: a real engine group over ZeroMQ. Apart from gateway.cc so that tests of the HTTP
// side need no transport.
#pragma once

#include "gateway/gateway.h"

namespace rankgate::gateway {

GroupFactory RealGroups();

}  // namespace rankgate::gateway
