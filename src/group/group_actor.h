// SPDX-License-Identifier: Apache-2.0
// One engine group at work: the thread (or event-loop tenant) that owns the group's sockets
// (transport/frontend_link.h) and its pure core (core.h), takes commands from shards through a mailbox, and
// hands each shard one OutputBatch per turn. No lock and no per-token hand-over on this path; in steady state
// nothing is allocated per token.
//
//   auto actor = GroupActor::Start(options);             // binds, then runs on a thread of its own
//   actor->Submit(stream, std::move(request), mailbox);  // any thread
//   actor->Close();                                      // bounded; also by the destructor
//
// With options.own_thread = false the owner's loop runs it: wait for poll_fd() or next_deadline(), then
// RunOnce(). Every reply mailbox must outlive the actor: a batch for it may be on its way until Close
// returned.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/clock.h"
#include "base/result.h"
#include "group/core.h"
#include "group/group.h"
#include "transport/frontend_link.h"

namespace rankgate::group {

struct GroupActorOptions {
    transport::FrontendLinkOptions link;
    /// Group number and size come from `link`; id_epoch and initial_wave are chosen here when 0.
    CoreConfig core;
    bool own_thread{true};
    /// An administrative call that a rank has not answered after this long is reported as timed out.
    Duration admin_timeout{std::chrono::seconds(300)};
};

class GroupActor : public Group {
  public:
    static Result<std::unique_ptr<GroupActor>> Start(GroupActorOptions options);
    /// Start on a link that is there already, and with its clock.
    static std::unique_ptr<GroupActor> StartOn(GroupActorOptions options,
                                               std::unique_ptr<transport::FrontendLink> link,
                                               const std::shared_ptr<const Clock>& clock);
    ~GroupActor() override = default;

    /// tcp://host:port that engines dial, with the real port. Immutable.
    virtual const std::string& handshake_address() const = 0;

    /// New requests are refused from now on; running ones go on. Any thread.
    virtual void BeginDrain() = 0;
    /// True once draining and nothing is in flight. Any thread.
    virtual bool drained() const = 0;
    /// Ends every live stream with an error (and an ABORT to its rank), closes the sockets, joins the thread.
    /// Idempotent; bounded by the sockets' linger (100 ms) plus one turn. The owner's thread.
    virtual void Close() = 0;

    // For owners with a loop of their own (own_thread = false); their thread only.
    virtual int poll_fd() const = 0;
    virtual TimePoint next_deadline() const = 0;
    /// One turn: commands, messages, timers, hand-over. Sleeps at most `max_wait` for something to do.
    virtual void RunOnce(Duration max_wait) = 0;
    /// The loop is about to submit or cancel, and promises RunCommands() (or RunOnce()) before it sleeps:
    /// what is pushed until then wakes nobody.
    virtual void HoldCommands() {}
    /// The short turn after HoldCommands(): what was pushed is taken, sent and answered; nothing is received.
    virtual void RunCommands() {}

    /// Turn limits, so that neither side starves the other.
    static constexpr std::size_t kMaxCommandsPerTurn = 512;
    /// A half-closed rank gets this long to show whether it is deaf or mute, or on its way out.
    static constexpr Duration kLossGrace = std::chrono::milliseconds(50);
    static constexpr Duration kTick = std::chrono::milliseconds(100);
    /// Messages in a row from one rank that do not decode: it is given up.
    static constexpr std::uint32_t kMaxUndecodable = 100;
    static constexpr std::size_t kMaxAdminCalls = 1024;
};

}  // namespace rankgate::group
