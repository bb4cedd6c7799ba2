// SPDX-License-Identifier: Apache-2.0
#include "transport/engine_link.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "base/unique_fd.h"
#include "transport/handshake.h"
#include "transport/zmq_util.h"
#include "transport/zmtp_dialer.h"

namespace rankgate::transport {
namespace {

constexpr int kHandshakeLingerMs = 5000;
constexpr int kReconnectMs = 50;
constexpr int kReconnectMaxMs = 1000;
constexpr int kHeartbeatMs = 5000;
constexpr int kHeartbeatTimeoutMs = 20000;
/// Multimodal tensors come beside the payload; a frame above this is not a request.
constexpr std::int64_t kMaxInputFrameBytes = 1LL << 30;
constexpr int kInputMessagesHeld = 1024;
constexpr std::uint64_t kMaxInputMessageBytes = 4ULL << 30;
/// A frontend says nothing on an output socket.
constexpr std::uint64_t kMaxOutputTalkBytes = 64 << 10;

class ZmqEngineLink final : public EngineLink {
  public:
    ZmqEngineLink(EngineLinkOptions options, const Clock& clock)
        : options_{std::move(options)},
          clock_{clock},
          handshake_{options_, clock},
          context_{std::make_unique<ZmqContext>()},
          epoll_{::epoll_create1(EPOLL_CLOEXEC)},
          wake_{::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)} {
        RG_CHECK(epoll_.valid() && wake_.valid());
        Add(wake_.get(), kTagWake);
    }

    ~ZmqEngineLink() override {
        CloseInputs();
        if (greeter_.valid()) {
            greeter_.Set(ZMQ_LINGER, 0);  // never got as far as READY: nobody waits for what is queued
        }
        greeter_.Close();
        coordinator_in_.Close();
        coordinator_out_.Close();
        CloseOutputs();
        context_.reset();  // bounded by the lingers
    }

    Status Start() {
        identity_ = wire::RankIdentity(options_.engine_index);
        greeter_ = ZmqSocket(*context_, ZMQ_DEALER);
        Common(greeter_, options_.handshake_address);
        greeter_.Set(ZMQ_ROUTING_ID, identity_);
        greeter_.Set(ZMQ_LINGER, kHandshakeLingerMs);
        greeter_.Set(ZMQ_MAXMSGSIZE, kMaxControlFrameBytes);
        if (const int error = greeter_.Connect(options_.handshake_address); error != 0) {
            return ConnectError("the handshake address", options_.handshake_address, error);
        }
        Add(greeter_.fd(), kTagGreeter);
        if (const int error = greeter_.Send(handshake_.Hello(), false); error != 0) {
            return Error{ErrorCode::kSendFailed, "HELLO: " + ZmqErrorText(error), {}, true};
        }
        return {};
    }

    Status AwaitInit(TimePoint deadline) override {
        while (handshake_.step() == EngineHandshake::Step::kGreeting) {
            if (reader_.Receive(greeter_) == MultipartReader::Got::kMessage) {
                // The last frame counts, as in the Python engines.
                if (const Status read = handshake_.OnHandshakeMessage(reader_.frames().back()); !read.ok()) {
                    LogWarning("init_refused",
                               {{"engine", options_.engine_index}, {"reason", read.error().message}});
                }
                continue;
            }
            if (!WaitUntil(deadline)) {
                return Error{
                    ErrorCode::kTimeout,
                    "no INIT from " + options_.handshake_address + " after " +
                        std::to_string(
                            std::chrono::duration_cast<std::chrono::seconds>(handshake_.waited()).count()) +
                        " s: is a frontend running there, and does it await this engine index?",
                    {},
                    true};
            }
        }
        return {};
    }

    const EngineAddresses& addresses() const override { return handshake_.addresses(); }

    Status Register(std::string_view ready_response, std::string_view parallel_config_hash,
                    TimePoint deadline, Duration register_late) override {
        if (handshake_.step() != EngineHandshake::Step::kInitialised) {
            return Error{ErrorCode::kConflict, "register comes once, after INIT", {}, false};
        }
        // TokenSpeed engines say READY first and register then, vLLM's the other way round.
        const bool ready_first = options_.dialect == Dialect::kTokenSpeed || register_late > Duration::zero();
        if (ready_first) {
            SendReady(parallel_config_hash);
            const TimePoint until = clock_.Now() + register_late;
            while (clock_.Now() < until && WaitUntil(until)) {
            }
        }
        if (Status connected = ConnectData(ready_response); !connected.ok()) {
            return connected;
        }
        for (Client& client : clients_) {
            if (client.native_input != nullptr) {
                continue;  // its first message, whatever its owner does meanwhile
            }
            if (const int error = client.input.Send(ready_response, false); error != 0) {
                return Error{ErrorCode::kSendFailed, "registration: " + ZmqErrorText(error), {}, true};
            }
        }
        handshake_.OnRegistrationSent();
        while (handshake_.step() == EngineHandshake::Step::kAwaitingCoordinator) {
            if (reader_.Receive(coordinator_in_) == MultipartReader::Got::kMessage) {
                const auto frames = reader_.frames();
                if (frames.size() == 1 && frames[0] == "READY") {
                    handshake_.OnCoordinatorReady();
                }
                continue;
            }
            if (!WaitUntil(deadline)) {
                return Error{ErrorCode::kTimeout, "the coordinator never said READY", {}, true};
            }
        }
        if (!ready_first) {
            SendReady(parallel_config_hash);
        }
        ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, greeter_.fd(), nullptr);
        greeter_.Close();  // lingers until READY left
        return {};
    }

    void RepeatRegistration(std::string_view ready_response) override {
        for (Client& client : clients_) {
            if (client.native_input != nullptr) {
                client.native_input->Send(ready_response, {});
            } else {
                (void)client.input.Send(ready_response, false);
            }
        }
        empty_ = false;  // the sends may have consumed the wake-up of something that arrived
    }

    std::size_t Poll(Duration wait, const OnInput& on_input) override {
        // A socket that was read until nothing came signals what comes next through its descriptor, so one
        // look at the epoll set replaces asking each socket and each monitor (two system calls apiece): an
        // engine polls between any two steps.
        if (!empty_) {
            if (const std::size_t handled = Drain(on_input); handled > 0) {
                return handled;
            }
        }
        return Sleep(Milliseconds(wait)) ? Drain(on_input) : 0;
    }

    int poll_fd() const override { return epoll_.get(); }

    void Wake() noexcept override {
        const std::uint64_t one = 1;
        const ssize_t n = ::write(wake_.get(), &one, sizeof one);
        (void)n;  // full counter: it is awake already
    }

    Status Send(std::int32_t client_index, std::string_view payload,
                std::span<const std::string_view> aux) override {
        if (client_index == -1) {
            if (!coordinator_out_.valid()) {
                return Error::Invalid("client_index", "no coordinator was named in INIT");
            }
            return SendOn(coordinator_out_, payload, aux, coordinator_queued_);
        }
        if (client_index < 0 || static_cast<std::size_t>(client_index) >= clients_.size()) {
            return Error::Invalid("client_index", "client_index " + std::to_string(client_index) +
                                                      " is not one of the " +
                                                      std::to_string(clients_.size()) + " outputs");
        }
        const auto index = static_cast<std::size_t>(client_index);
        if (ZmtpDialer* output = clients_[index].native_output.get(); output != nullptr) {
            if (!output->valid()) {
                return Closed();
            }
            if (Status fits = CheckBound(payload, aux, output->queued_bytes()); !fits.ok()) {
                return fits;
            }
            output->Send(payload, aux);
            return {};
        }
        return SendOn(clients_[index].output, payload, aux, queued_[index]);
    }

    void SendDead() override {
        for (Client& client : clients_) {
            if (client.native_output != nullptr && client.native_output->valid()) {
                client.native_output->Send(wire::kEngineCoreDead, {});
            } else if (client.output.valid()) {
                (void)client.output.Send(wire::kEngineCoreDead, false);
            }
        }
    }

    std::int32_t connected_clients() const override {
        return static_cast<std::int32_t>(
            std::count_if(clients_.begin(), clients_.end(), [](const Client& c) { return c.connected; }));
    }

    Duration AwayFor(std::int32_t client) const override {
        const Client& one = clients_[static_cast<std::size_t>(client)];
        return one.connected ? Duration::zero() : clock_.Now() - one.away_since;
    }

    std::uint64_t queued_bytes(std::int32_t client) const override {
        const auto index = static_cast<std::size_t>(client);
        if (const ZmtpDialer* output = clients_[index].native_output.get(); output != nullptr) {
            return output->queued_bytes();
        }
        return queued_[index].bytes.load(std::memory_order_relaxed);
    }

    void Flush() override {
        for (Client& client : clients_) {
            if (client.native_output != nullptr) {
                client.native_output->Flush();
            }
        }
    }

    std::uint64_t malformed_inputs() const override { return malformed_; }

    void CloseInputs() override {
        for (Client& client : clients_) {
            if (client.input.valid()) {
                client.monitor.Close(client.input);
                client.input.Close();
                client.connected = false;
                client.away_since = clock_.Now();
            }
            if (client.native_input != nullptr && client.native_input->valid()) {
                client.native_input->Close(Duration::zero());
                NoteConnection(client);
            }
        }
    }

    void CloseOutputs() override {
        const TimePoint until = clock_.Now() + options_.linger;
        for (Client& client : clients_) {
            client.output.Close();
            if (client.native_output != nullptr) {
                client.native_output->Close(std::max(Duration::zero(), until - clock_.Now()));
            }
        }
    }

  private:
    static constexpr std::uint64_t kTagWake = 0;
    static constexpr std::uint64_t kTagGreeter = 1;
    static constexpr std::uint64_t kTagData = 2;
    static constexpr std::uint64_t kTagNews = 3;
    static constexpr std::uint64_t kTagNative = 16;  // + 2 * client, + 1 for its output

    struct Client {
        ZmqSocket input;
        ZmqSocket output;
        ZmqMonitor monitor;
        // In place of those three, on ipc:
        std::unique_ptr<ZmtpDialer> native_input;
        std::unique_ptr<ZmtpDialer> native_output;
        bool connected{false};
        TimePoint away_since{};
    };

    void Add(int fd, std::uint64_t tag) {
        epoll_event event{};
        event.events = EPOLLIN;
        event.data.u64 = tag;
        RG_CHECK(::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0);
    }

    void Common(ZmqSocket& socket, const std::string& address) {
        socket.Set(ZMQ_IPV6, IsIpv4Literal(address) ? 0 : 1);
        socket.Set(ZMQ_RECONNECT_IVL, kReconnectMs);
        socket.Set(ZMQ_RECONNECT_IVL_MAX, kReconnectMaxMs);
        if (!IsIpc(address)) {
            socket.Set(ZMQ_TCP_KEEPALIVE, 1);
            socket.Set(ZMQ_HEARTBEAT_IVL, kHeartbeatMs);
            socket.Set(ZMQ_HEARTBEAT_TIMEOUT, kHeartbeatTimeoutMs);
            socket.Set(ZMQ_HEARTBEAT_TTL, kHeartbeatTimeoutMs);
        }
    }

    static Error ConnectError(std::string_view what, const std::string& address, int error) {
        return Error{ErrorCode::kUnavailable,
                     "cannot connect to " + std::string(what) + " " + address + ": " + ZmqErrorText(error),
                     {},
                     false};
    }

    void SendReady(std::string_view hash) {
        if (const int error = greeter_.Send(handshake_.Ready(hash), false); error != 0) {
            LogWarning("ready_not_sent",
                       {{"engine", options_.engine_index}, {"reason", ZmqErrorText(error)}});
        }
    }

    Status ConnectData(std::string_view registration) {
        static std::atomic<std::uint64_t> serial{0};
        const EngineAddresses& where = handshake_.addresses();
        // TokenSpeed engines use the first pair only.
        const std::size_t count = options_.dialect == Dialect::kTokenSpeed
                                      ? 1
                                      : std::min(where.inputs.size(), where.outputs.size());
        queued_ = std::make_unique<QueuedBytes[]>(count);
        const auto linger =
            static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(options_.linger).count());
        for (std::size_t i = 0; i < count; ++i) {
            Client& client = clients_.emplace_back();
            client.away_since = clock_.Now();
            if (options_.native && !LibzmqWanted() && IsIpcFile(where.inputs[i]) &&
                IsIpcFile(where.outputs[i])) {
                ConnectNative(client, i, where.inputs[i], where.outputs[i], registration);
                continue;
            }
            client.input = ZmqSocket(*context_, ZMQ_DEALER);
            Common(client.input, where.inputs[i]);
            client.input.Set(ZMQ_ROUTING_ID, identity_);
            client.input.Set(ZMQ_LINGER, 0);
            client.input.Set(ZMQ_RCVHWM, kInputMessagesHeld);
            client.input.Set(ZMQ_MAXMSGSIZE, kMaxInputFrameBytes);
            client.monitor =
                ZmqMonitor(*context_, client.input, "rg-engine-" + std::to_string(serial.fetch_add(1)),
                           ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_DISCONNECTED);
            client.output = ZmqSocket(*context_, ZMQ_PUSH);
            Common(client.output, where.outputs[i]);
            client.output.Set(ZMQ_LINGER, linger);
            client.output.Set(ZMQ_SNDHWM, 0);  // Send counts bytes
            if (const int error = client.output.Connect(where.outputs[i]); error != 0) {
                return ConnectError("output", where.outputs[i], error);
            }
            if (const int error = client.input.Connect(where.inputs[i]); error != 0) {
                return ConnectError("input", where.inputs[i], error);
            }
            Add(client.input.fd(), kTagData);
            Add(client.monitor.fd(), kTagData);
        }
        if (!where.coordinator_input.empty()) {
            coordinator_in_ = ZmqSocket(*context_, ZMQ_XSUB);
            Common(coordinator_in_, where.coordinator_input);
            coordinator_in_.Set(ZMQ_LINGER, 0);
            if (const int error = coordinator_in_.Connect(where.coordinator_input); error != 0) {
                return ConnectError("coordinator", where.coordinator_input, error);
            }
            (void)coordinator_in_.Send(std::string_view("\x01", 1), false);  // subscribe to everything
            Add(coordinator_in_.fd(), kTagData);
        }
        if (!where.coordinator_output.empty()) {
            coordinator_out_ = ZmqSocket(*context_, ZMQ_PUSH);
            Common(coordinator_out_, where.coordinator_output);
            coordinator_out_.Set(ZMQ_LINGER, linger);
            coordinator_out_.Set(ZMQ_SNDHWM, 0);
            if (const int error = coordinator_out_.Connect(where.coordinator_output); error != 0) {
                return ConnectError("coordinator", where.coordinator_output, error);
            }
        }
        return {};
    }

    void ConnectNative(Client& client, std::size_t index, const std::string& input, const std::string& output,
                       std::string_view registration) {
        constexpr std::size_t kScheme = std::string_view{"ipc://"}.size();
        if (keeper_ == nullptr) {
            keeper_ = std::make_unique<ZmtpKeeper>();
            Add(keeper_->news_fd(), kTagNews);
        }
        const ZmtpLimits requests{static_cast<std::uint64_t>(kMaxInputFrameBytes), kMaxInputMessageBytes,
                                  kMaxFramesPerMessage};
        const ZmtpLimits nothing{kMaxOutputTalkBytes, kMaxOutputTalkBytes, kMaxFramesPerMessage};
        const std::uint64_t tag = kTagNative + 2 * index;
        client.native_output = std::make_unique<ZmtpDialer>(*keeper_, output.substr(kScheme), ZmtpRole::kPush,
                                                            std::string{}, nothing, epoll_.get(), tag + 1);
        client.native_input =
            std::make_unique<ZmtpDialer>(*keeper_, input.substr(kScheme), ZmtpRole::kDealer, identity_,
                                         requests, epoll_.get(), tag, registration);
    }

    /// Whether the frontend is there, as far as the native input knows.
    void NoteConnection(Client& client) {
        const bool up = client.native_input->connected();
        if (!up && client.connected) {
            client.away_since = clock_.Now();
        }
        client.connected = up;
    }

    static Error Closed() { return Error{ErrorCode::kUnavailable, "the output is closed", {}, false}; }

    Status CheckBound(std::string_view payload, std::span<const std::string_view> aux,
                      std::uint64_t held) const {
        std::uint64_t size = payload.size();
        for (const std::string_view frame : aux) {
            size += frame.size();
        }
        if (held != 0 && held + size > options_.max_queued_output_bytes) {
            return Error{ErrorCode::kSendFailed,
                         "the frontend takes no outputs: " + std::to_string(held >> 20U) + " MiB wait for it",
                         {},
                         true};
        }
        return {};
    }

    Status SendOn(ZmqSocket& socket, std::string_view payload, std::span<const std::string_view> aux,
                  QueuedBytes& queued) {
        if (!socket.valid()) {
            return Closed();
        }
        if (Status fits = CheckBound(payload, aux, queued.bytes.load(std::memory_order_relaxed));
            !fits.ok()) {
            return fits;
        }
        int error = socket.SendCounted(payload, !aux.empty(), queued);
        for (std::size_t i = 0; error == 0 && i < aux.size(); ++i) {
            error = socket.SendCounted(aux[i], i + 1 < aux.size(), queued);
        }
        if (error != 0) {
            return Error{ErrorCode::kSendFailed, ZmqErrorText(error), {}, true};
        }
        return {};
    }

    std::size_t Drain(const OnInput& on_input) {
        std::size_t handled = 0;
        for (std::size_t i = 0; i < clients_.size(); ++i) {
            Client& client = clients_[i];
            if (client.native_input != nullptr) {
                while (handled < kMaxInputsPerPoll && client.native_input->readable() &&
                       TakeNative(client, static_cast<std::int32_t>(i), on_input)) {
                    ++handled;
                }
                NoteConnection(client);
                while (client.native_output->readable() &&
                       client.native_output->Receive() != ZmtpDialer::Got::kNothing) {
                }
                continue;
            }
            if (!client.input.valid()) {
                continue;
            }
            ZmqMonitor::Event event;
            while (client.monitor.Next(event)) {
                const bool up = event.kind == ZMQ_EVENT_HANDSHAKE_SUCCEEDED;
                if (!up && client.connected) {
                    client.away_since = clock_.Now();
                }
                client.connected = up;
            }
            while (handled < kMaxInputsPerPoll && client.input.valid() &&
                   Take(client.input, static_cast<std::int32_t>(i), on_input)) {
                ++handled;
            }
        }
        while (coordinator_in_.valid() && handled < kMaxInputsPerPoll &&
               Take(coordinator_in_, -1, on_input)) {
            ++handled;
        }
        empty_ = handled < kMaxInputsPerPoll;
        return handled;
    }

    /// False when nothing was there.
    bool Take(ZmqSocket& socket, std::int32_t client, const OnInput& on_input) {
        const auto got = reader_.Receive(socket);
        if (got == MultipartReader::Got::kNothing) {
            return false;
        }
        Hand(reader_.frames(), got == MultipartReader::Got::kMessage, client, on_input);
        reader_.Release();
        return true;
    }

    bool TakeNative(Client& client, std::int32_t index, const OnInput& on_input) {
        const ZmtpDialer::Got got = client.native_input->Receive();
        if (got == ZmtpDialer::Got::kNothing) {
            return false;
        }
        Hand(client.native_input->frames(), got == ZmtpDialer::Got::kMessage, index, on_input);
        return true;
    }

    void Hand(std::span<const std::string_view> frames, bool whole, std::int32_t client,
              const OnInput& on_input) {
        if (client == -1 && frames.size() == 1 && frames[0] == "READY") {
            return;  // the coordinator repeats it for late joiners
        }
        if (!whole || frames.size() < 2 || frames[0].size() != 1) {
            ++malformed_;
            std::uint64_t suppressed = 0;
            if (malformed_log_.Allow(suppressed)) {
                LogWarning("input_malformed", {{"engine", options_.engine_index},
                                               {"frames", frames.size()},
                                               {"type_bytes", frames.empty() ? 0 : frames[0].size()},
                                               {"suppressed", suppressed}});
            }
            return;
        }
        InputFrames input;
        input.type = static_cast<std::uint8_t>(frames[0][0]);
        input.payload = frames[1];
        input.aux = frames.subspan(2);
        input.client = client;
        on_input(input);
    }

    /// False when the deadline passed. Returns early on anything readable.
    bool WaitUntil(TimePoint deadline) {
        const TimePoint now = clock_.Now();
        if (now >= deadline) {
            return false;
        }
        Sleep(Milliseconds(deadline - now));
        return true;
    }

    /// Rounded up, so that a deadline a fraction of a millisecond away does not spin; at most a second.
    static int Milliseconds(Duration wait) {
        return static_cast<int>(
            std::clamp<std::int64_t>(std::chrono::ceil<std::chrono::milliseconds>(wait).count(), 0, 1000));
    }

    /// True if something may be there to read.
    bool Sleep(int ms) {
        bool readable = false;
        std::array<epoll_event, 16> events;
        const int n = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), ms);
        for (int i = 0; i < n; ++i) {
            const std::uint64_t tag = events[static_cast<std::size_t>(i)].data.u64;
            if (tag == kTagWake || tag == kTagNews) {
                std::uint64_t count = 0;
                const ssize_t r =
                    ::read(tag == kTagWake ? wake_.get() : keeper_->news_fd(), &count, sizeof count);
                (void)r;
            }
            if (tag == kTagNews) {
                for (Client& client : clients_) {
                    if (client.native_input != nullptr) {
                        client.native_input->OnNews();
                        client.native_output->OnNews();
                    }
                }
            } else if (tag >= kTagNative) {
                Client& client = clients_[(tag - kTagNative) / 2];
                ZmtpDialer& native = tag % 2 == 0 ? *client.native_input : *client.native_output;
                native.OnEpoll(events[static_cast<std::size_t>(i)].events);
            }
            readable = readable || tag != kTagWake;
        }
        return readable;
    }

    const EngineLinkOptions options_;
    const Clock& clock_;
    EngineHandshake handshake_;
    std::string identity_;

    std::unique_ptr<QueuedBytes[]> queued_;  // before the context, whose thread writes to it
    QueuedBytes coordinator_queued_;
    std::unique_ptr<ZmqContext> context_;
    UniqueFd epoll_;
    UniqueFd wake_;
    std::unique_ptr<ZmtpKeeper> keeper_;  // before the dialers, which it outlives
    bool empty_{false};  // every input was read to its end, and nothing was sent on one since
    ZmqSocket greeter_;
    std::vector<Client> clients_;
    ZmqSocket coordinator_in_;
    ZmqSocket coordinator_out_;
    MultipartReader reader_;
    std::uint64_t malformed_{0};
    LogLimiter malformed_log_{5};
};

}  // namespace

Result<std::unique_ptr<EngineLink>> EngineLink::Connect(EngineLinkOptions options, const Clock& clock) {
    auto link = std::make_unique<ZmqEngineLink>(std::move(options), clock);
    if (Status started = link->Start(); !started.ok()) {
        return started.error();
    }
    return std::unique_ptr<EngineLink>(std::move(link));
}

}  // namespace rankgate::transport
