// SPDX-License-Identifier: Apache-2.0
// The engine's end of the wire: dials a frontend, shakes hands, receives requests, sends outputs and last
// words. It frames and bounds, but never looks into a request or an output. Used by engine/ (rankgate engine,
// the Python bindings) and by FakeRank.
//
//   auto link = EngineLink::Connect(options, clock);            // queues HELLO; the frontend may come up
//   minutes later link->AwaitInit(deadline);                                  // vLLM order: addresses first,
//   then load the model link->Register(ready_response_bytes, "", deadline);         // connects
//   inputs/outputs, registers, READY while (...) {
//       link->Poll(50ms, [&](const InputFrames& in) {...});     // or watch poll_fd() and call Poll(0ms, ...)
//       link->Send(client_index, payload);
//   }
//   link->SendDead();                                           // ENGINE_CORE_DEAD to every frontend
//
// TokenSpeed order (READY before the registration) is chosen by the dialect, the calls are the same. Thread
// rule: one thread owns the link and makes every call; the exceptions are marked "any thread". Every call is
// bounded by the deadline it is given.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "wire/protocol.h"

namespace rankgate::transport {

using wire::Dialect;

/// What INIT told the engine.
struct EngineAddresses {
    std::vector<std::string> inputs;
    std::vector<std::string> outputs;
    std::string coordinator_input;   // empty = none
    std::string coordinator_output;  // empty = none
};

struct EngineLinkOptions {
    Dialect dialect{Dialect::kVllm};
    std::string handshake_address;  // tcp://host:port (or ipc:// in tests)
    std::uint16_t engine_index{0};
    bool local{false};
    bool headless{true};
    /// Outputs that no frontend takes are held up to this many bytes per client; beyond it Send fails and the
    /// engine should abort.
    std::uint64_t max_queued_output_bytes{256ULL << 20};
    /// How long last words may linger at destruction.
    Duration linger{std::chrono::seconds(4)};
    /// Data sockets on ipc are read and written on the owner's thread (zmtp_dialer.h) instead of libzmq's.
    /// The environment's RANKGATE_TRANSPORT=libzmq overrules it.
    bool native{true};
};

/// One message of an input socket. Views live during the callback only.
struct InputFrames {
    std::uint8_t type{0};  // 00 ADD, 01 ABORT, 02 START_DP_WAVE, 03 UTILITY
    std::string_view payload;
    std::span<const std::string_view> aux;
    std::int32_t client{0};  // index of the input socket; -1 = the coordinator
};

class EngineLink {
  public:
    /// Callback of Poll: once per message, in the order of arrival per socket. Must not call Poll or destroy
    /// the link.
    using OnInput = std::function<void(const InputFrames&)>;

    static Result<std::unique_ptr<EngineLink>> Connect(EngineLinkOptions options, const Clock& clock);
    virtual ~EngineLink() = default;

    /// Waits for the frontend's INIT. Default limit of the real engines: 5 min (vLLM), 10 min (TokenSpeed).
    /// Slices of `stop`: give a near deadline and call again to stay interruptible; HELLO is not repeated.
    virtual Status AwaitInit(TimePoint deadline) = 0;
    virtual const EngineAddresses& addresses() const = 0;

    /// Connects to every input and output, registers on each input with `ready_response` (msgpack map), waits
    /// for the coordinator's READY if INIT named one, sends READY (with `parallel_config_hash` unless empty)
    /// and closes the handshake socket.
    /// A positive `register_late` reverses the order and waits in between (a race that tests provoke).
    virtual Status Register(std::string_view ready_response, std::string_view parallel_config_hash,
                            TimePoint deadline, Duration register_late = Duration::zero()) = 0;
    /// Sends the registration once more on every input (tests).
    virtual void RepeatRegistration(std::string_view ready_response) = 0;

    /// Handles what is there, waiting up to `wait` for the first message; at most kMaxInputsPerPoll messages
    /// a call, so that a flood never starves the engine's step. Returns how many were handled. Messages
    /// without type or payload are dropped and counted.
    virtual std::size_t Poll(Duration wait, const OnInput& on_input) = 0;
    /// Readable when Poll may have work (an epoll descriptor, level-triggered as long as the caller drains
    /// with Poll(0)).
    virtual int poll_fd() const = 0;
    /// Makes a waiting Poll return. Any thread.
    virtual void Wake() noexcept = 0;

    /// Queues `[payload][aux...]` on outputs[client_index]; -1 = the coordinator. kSendFailed when the byte
    /// bound is reached, kInvalidArgument for an index that INIT did not list (a real engine goes mute there;
    /// we refuse that one message).
    virtual Status Send(std::int32_t client_index, std::string_view payload,
                        std::span<const std::string_view> aux = {}) = 0;
    /// The 16 bytes ENGINE_CORE_DEAD to every output. Destroying the link afterwards lingers until they left
    /// or `linger` passed.
    virtual void SendDead() = 0;

    /// Frontends whose input socket is connected at the moment (monitored), and for how long client `i` has
    /// been away (0 = here).
    virtual std::int32_t connected_clients() const = 0;
    virtual Duration AwayFor(std::int32_t client) const = 0;
    /// Bytes queued for a client that have not yet been written out. Any thread.
    virtual std::uint64_t queued_bytes(std::int32_t client) const = 0;
    /// Writes what is queued as far as it goes; Poll does so, too. For owners that wait for queued_bytes to
    /// fall without a Poll.
    virtual void Flush() = 0;
    virtual std::uint64_t malformed_inputs() const = 0;

    /// Faults for tests and the script runner: close only the input sockets (deaf) or only the outputs
    /// (mute).
    virtual void CloseInputs() = 0;
    virtual void CloseOutputs() = 0;

    static constexpr std::size_t kMaxInputsPerPoll = 256;
};

}  // namespace rankgate::transport
