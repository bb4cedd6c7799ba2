// SPDX-License-Identifier: Apache-2.0
#include "gateway/groups.h"

#include <utility>

#include "group/group_actor.h"
#include "http/socket.h"

namespace rankgate::gateway {

GroupFactory RealGroups() {
    return
        [](const GatewayOptions& options, const WorkerSpec& spec, std::int32_t index) -> Result<GroupHandle> {
            group::GroupActorOptions actor;
            if (spec.runtime == "auto") {
                actor.link.dialect.reset();  // the first engine that registers says
            } else {
                actor.link.dialect =
                    spec.runtime == "tokenspeed" ? wire::Dialect::kTokenSpeed : wire::Dialect::kVllm;
            }
            actor.link.group = index;
            actor.link.size = spec.dp_size;
            actor.link.handshake_address = "tcp://" + http::HostPort(spec.address, spec.rpc_port);
            actor.link.socket_dir = spec.socket_dir;
            const bool loopback = spec.address == "localhost" || spec.address == "::1" ||
                                  spec.address == "[::1]" || spec.address.starts_with("127.");
            if (!loopback && options.allow_remote_engines) {
                actor.link.data_host = http::StripBrackets(spec.address);
            }
            actor.own_thread = options.http_threads != 1;
            auto started = group::GroupActor::Start(std::move(actor));
            if (!started) {
                return started.error();
            }
            GroupHandle handle;
            // libzmq names a v4 address as a mapped v6 one; people and other programs dial the plain form.
            handle.handshake_address = (*started)->handshake_address();
            constexpr std::string_view kMapped = "tcp://[::ffff:";
            if (handle.handshake_address.starts_with(kMapped)) {
                const std::size_t end = handle.handshake_address.find(']');
                handle.handshake_address =
                    "tcp://" + handle.handshake_address.substr(kMapped.size(), end - kMapped.size()) +
                    handle.handshake_address.substr(end + 1);
            }
            if (options.http_threads == 1) {
                group::GroupActor* tenant = started->get();
                handle.tenant =
                    LoopTenant{tenant->poll_fd(), [tenant] { tenant->RunOnce(Duration::zero()); },
                               [tenant] { return tenant->next_deadline(); },
                               [tenant] { tenant->HoldCommands(); }, [tenant] { tenant->RunCommands(); }};
            }
            handle.group = std::move(*started);
            return handle;
        };
}

}  // namespace rankgate::gateway
