// SPDX-License-Identifier: Apache-2.0
// A group whose runtime nobody declared: the front of the actor that it turns into. All sockets are bound and
// the handshake runs as for every group (both dialects share it up to the registration); the first rank that
// is Live says which wire it speaks, the actor of that wire takes over the very same link in the middle of
// that event, and nothing that was read is lost or asked for again. From then on each call costs one load of
// a pointer. Before that, requests are answered that nobody is there. Made by GroupActor::Start; thread rule
// as for GroupActor.
#pragma once

#include <functional>
#include <memory>

#include "group/group_actor.h"

namespace rankgate::group {

/// A concrete actor without a thread of its own, and its side of the link.
struct MadeActor {
    std::unique_ptr<GroupActor> actor;
    transport::FrontendLink::Handler* handler{nullptr};  // owned by the actor
};
using ActorMaker =
    std::function<MadeActor(transport::Dialect dialect, std::unique_ptr<transport::FrontendLink> link)>;

std::unique_ptr<GroupActor> StartAutoActor(const GroupActorOptions& options,
                                           std::unique_ptr<transport::FrontendLink> link,
                                           std::shared_ptr<const Clock> clock, ActorMaker make);

}  // namespace rankgate::group
