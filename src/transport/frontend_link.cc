// SPDX-License-Identifier: Apache-2.0
#include "transport/frontend_link.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <poll.h>
#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "base/unique_fd.h"
#include "transport/socket_dir.h"
#include "transport/zmq_util.h"
#include "transport/zmtp_socket.h"

namespace rankgate::transport {
namespace {

constexpr int kHeartbeatMs = 5000;
constexpr int kHeartbeatTimeoutMs = 20000;
constexpr int kBacklog = 1024;
constexpr int kOutputMessagesHeld = 4096;
/// Frames of one output together; an input says its registration and nothing else.
constexpr std::uint64_t kMaxOutputMessageBytes = 1ULL << 30;
constexpr std::uint64_t kMaxControlMessageBytes = 4ULL << 20;
/// Connections to one native socket: a group's own twice over, those that replace them, strays.
constexpr std::size_t kMaxStrays = 64;
/// Aborts that are queued at close get this long to leave.
constexpr int kCloseLingerMs = 100;
constexpr std::size_t kMaxDeferredEvents = 4096;
/// A busy neighbour must not delay the news of a lost rank for ever.
constexpr Duration kMaxDefer = std::chrono::milliseconds(250);
constexpr Duration kFindEvery = std::chrono::milliseconds(20);
constexpr Duration kFindFor = std::chrono::milliseconds(500);
/// An engine says HELLO as soon as it is connected; a handshake connection silent for this long is a stray,
/// or an engine whose HELLO was lost because a stray took its identity before it was read.
constexpr Duration kSilentGreeter = std::chrono::seconds(2);
/// After so many rounds without news it is looked at less often: an engine that greeted an earlier gateway is
/// silent, too, and loads for minutes.
constexpr std::int32_t kSilentRounds = 20;
constexpr Duration kSilentGreeterLater = std::chrono::seconds(30);
/// Between two of them: the first has INIT by then, offered or repeated.
constexpr Duration kSilentTurn = std::chrono::milliseconds(1600);
/// Time for a connection that was told to dial again (libzmq: 0.1 s).
constexpr Duration kOfferAfter = std::chrono::milliseconds(400);
constexpr int kMonitored = ZMQ_EVENT_ACCEPTED | ZMQ_EVENT_DISCONNECTED | ZMQ_EVENT_HANDSHAKE_SUCCEEDED |
                           ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL | ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL;

enum Plane : std::size_t { kHandshake, kInput, kOutput, kPlanes };
constexpr std::array<std::string_view, kPlanes> kPlaneNames{"handshake", "input", "output"};

std::int32_t PeerPid(int fd) {
    ucred credentials{};
    socklen_t size = sizeof credentials;
    if (fd < 0 || ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
        return 0;
    }
    return credentials.pid == ::getpid() ? 0 : credentials.pid;
}

UniqueFd OpenPid(std::int32_t pid) {
    return UniqueFd{static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))};
}

class ZmqFrontendLink final : public FrontendLink {
  public:
    ZmqFrontendLink(FrontendLinkOptions options, const Clock& clock)
        : options_{std::move(options)}, clock_{clock} {
        queued_ = std::make_unique<QueuedBytes[]>(static_cast<std::size_t>(options_.size));
        ranks_.resize(static_cast<std::size_t>(options_.size));
        context_ = std::make_unique<ZmqContext>();
        epoll_ = UniqueFd{::epoll_create1(EPOLL_CLOEXEC)};
        RG_CHECK(epoll_.valid());
    }

    ~ZmqFrontendLink() override {
        for (std::size_t plane = 0; plane < kPlanes; ++plane) {
            monitors_[plane].Close(sockets_[plane]);
            sockets_[plane].Close();
            if (native_[plane] != nullptr) {
                native_[plane]->Close(std::chrono::milliseconds(kCloseLingerMs));
            }
        }
        context_.reset();
    }

    Status Start() {
        auto dir = SocketDir::Open(options_.socket_dir, options_.group);
        if (!dir.ok()) {
            return dir.error();
        }
        dir_ = std::move(*dir);
        LinkFacts known = LoadFacts();
        if (Status bound = BindData(known); !bound.ok()) {
            return bound;
        }
        FrontendHandshakeOptions handshake;
        handshake.dialect = options_.dialect;
        handshake.size = options_.size;
        handshake.base_index = options_.base_index;
        handshake.addresses = addresses_;
        handshake.ready_timeout = options_.ready_timeout;
        handshake_ = std::make_unique<FrontendHandshake>(handshake, clock_);
        if (!options_.handshake_address.empty()) {
            if (Status bound = BindHandshake(); !bound.ok()) {
                return bound;
            }
        }
        if (known.input == addresses_.inputs[0] && known.output == addresses_.outputs[0]) {
            candidates_ = std::move(known.ranks);
        }
        if (!candidates_.empty()) {
            LogInfo("reattach_expected", {{"group", options_.group}, {"ranks", candidates_.size()}});
            probe_fast_until_ = clock_.Now() + kProbeFastFor;
            next_probe_ = clock_.Now();
        }
        SaveFacts();
        return {};
    }

    const std::string& handshake_address() const override { return handshake_address_; }
    const EngineAddresses& addresses() const override { return addresses_; }
    std::optional<Dialect> dialect() const override {
        if (handshake_ != nullptr && handshake_->dialect()) {
            return handshake_->dialect();
        }
        return candidates_.empty() ? std::nullopt : std::optional{candidates_.begin()->second.ready.dialect};
    }

    void Watch(int fd) override { AddToEpoll(fd, kTagExtra); }

    bool Wait(Duration timeout) override {
        // A send may have consumed the wake-up of something that arrived: look before sleeping.
        for (std::size_t plane : {std::size_t{kHandshake}, std::size_t{kInput}}) {
            if (std::exchange(sent_[plane], false) && !ready_[plane]) {
                ready_[plane] = Readable(sockets_[plane]);
            }
        }
        if (std::any_of(ready_.begin(), ready_.end(), [](bool r) { return r; }) || monitor_ready_ ||
            !dead_pids_.empty()) {
            timeout = Duration::zero();
        }
        // Round up: a deadline a fraction of a millisecond away must not spin.
        const auto ms = std::chrono::ceil<std::chrono::milliseconds>(timeout).count();
        bool extra = false;
        std::array<epoll_event, 32> events;
        const int n = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()),
                                   static_cast<int>(std::clamp<std::int64_t>(ms, 0, 60'000)));
        for (int i = 0; i < n; ++i) {
            const std::uint64_t tag = events[static_cast<std::size_t>(i)].data.u64;
            if (const std::uint64_t plane = tag >> 32U; plane != 0) {
                ZmtpListener& native = *native_[plane - 1];
                native.OnEpoll(tag, events[static_cast<std::size_t>(i)].events, clock_.Now());
                ready_[plane - 1] = native.readable();
                monitor_ready_ = monitor_ready_ || native.has_events();
            } else if (tag < kPlanes) {
                ready_[tag] = true;
            } else if (tag == kTagMonitor) {
                monitor_ready_ = true;
            } else if (tag >= kTagPid) {
                dead_pids_.push_back(static_cast<std::int32_t>(tag - kTagPid));
            } else {
                extra = true;
            }
        }
        if (!dead_pids_.empty()) {
            // What a process said before it ended is read before it counts as gone.
            for (std::size_t plane = 0; plane < kPlanes; ++plane) {
                if (native_[plane] != nullptr) {
                    native_[plane]->LookEverywhere();
                    ready_[plane] = native_[plane]->readable();
                }
            }
        }
        return extra;
    }

    int poll_fd() const override { return epoll_.get(); }

    bool Poll(Handler& handler) override {
        now_ = clock_.Now();
        if (std::exchange(monitor_ready_, false)) {
            ReadMonitors();
        }
        for (std::size_t plane = 0; plane < kPlanes; ++plane) {
            ApplyEvents(plane, handler, false);
        }
        bool more = false;
        std::array<bool, kPlanes> drained{};
        drained[kHandshake] = PollHandshake();
        drained[kInput] = PollInput();
        drained[kOutput] = PollOutput(handler);
        for (std::size_t plane = 0; plane < kPlanes; ++plane) {
            ReadNativeEvents(plane);
            ApplyEvents(plane, handler, drained[plane]);
            more = more || !drained[plane] || !deferred_[plane].empty();
        }
        for (const std::int32_t pid : std::exchange(dead_pids_, {})) {
            OnProcessGone(pid, handler);
        }
        handshake_->OnTick();
        for (const auto& native : native_) {
            if (native != nullptr) {
                native->Tick(now_);
            }
        }
        DispatchHandshake(handler);
        if (!candidates_.empty() && now_ >= next_probe_) {
            Probe(handler);
        }
        if (next_silent_ && now_ >= *next_silent_) {
            WakeSilentGreeter();
        }
        if (offer_at_ && now_ >= *offer_at_) {
            offer_at_.reset();
            for (std::int32_t rank = 0; rank < options_.size; ++rank) {
                if (!candidates_.contains(rank)) {
                    handshake_->OfferInit(rank);
                }
            }
            DispatchHandshake(handler);
        }
        if (find_until_ != TimePoint{} && now_ >= next_find_) {
            FindUnreachable(handler);
        }
        for (const std::int32_t rank : std::exchange(unreachable_, {})) {
            handler.OnPeerLost(rank, PeerLoss::kUnreachable);
        }
        return more || monitor_ready_;
    }

    std::optional<TimePoint> next_deadline() const override {
        std::optional<TimePoint> next = handshake_->next_deadline();
        if (!candidates_.empty() && (!next || next_probe_ < *next)) {
            next = next_probe_;
        }
        if (find_until_ != TimePoint{} && (!next || next_find_ < *next)) {
            next = next_find_;
        }
        for (const std::optional<TimePoint>& at : {next_silent_, offer_at_}) {
            if (at && (!next || *at < *next)) {
                next = at;
            }
        }
        return next;
    }

    Status Send(std::int32_t rank, std::uint8_t type, std::string_view payload, Urgency urgency,
                std::span<const std::string_view> aux) override {
        const auto index = static_cast<std::size_t>(rank);
        RG_DCHECK(index < ranks_.size());
        std::uint64_t size = payload.size();
        for (const std::string_view frame : aux) {
            size += frame.size();
        }
        const std::uint64_t queued = queued_bytes(rank);
        const std::uint64_t limit =
            options_.max_queued_bytes_per_rank + (urgency == Urgency::kControl ? kControlReserveBytes : 0);
        // One frame is always let through an empty queue: a request may be larger than the bound.
        if (queued != 0 && queued + size > limit) {
            return Error{ErrorCode::kSendFailed,
                         "rank " + std::to_string(rank) + " does not read: " + std::to_string(queued >> 20U) +
                             " MiB are queued for it",
                         {},
                         true};
        }
        const char type_byte = static_cast<char>(type);
        if (native_[kInput] != nullptr) {
            if (const int error =
                    native_[kInput]->Send(ranks_[index].identity, {&type_byte, 1}, payload, aux);
                error != 0) {
                return Unreachable(rank, error);
            }
            return {};
        }
        ZmqSocket& socket = sockets_[kInput];
        sent_[kInput] = true;
        if (const int error = socket.Send(ranks_[index].identity, true); error != 0) {
            return Unreachable(rank, error);
        }
        int error = socket.Send({&type_byte, 1}, true);
        if (error == 0) {
            error = socket.SendCounted(payload, !aux.empty(), queued_[index]);
        }
        for (std::size_t i = 0; error == 0 && i < aux.size(); ++i) {
            error = socket.SendCounted(aux[i], i + 1 < aux.size(), queued_[index]);
        }
        if (error != 0) {
            // Out of memory, at most: the message is unfinished and libzmq would take the next one for its
            // rest.
            RG_BUG("a message to a rank broke off between its frames");
            return Error{ErrorCode::kSendFailed, ZmqErrorText(error), {}, true};
        }
        return {};
    }

    std::uint64_t queued_bytes(std::int32_t rank) const override {
        if (native_[kInput] != nullptr) {
            return native_[kInput]->queued_bytes(ranks_[static_cast<std::size_t>(rank)].identity);
        }
        return queued_[static_cast<std::size_t>(rank)].bytes.load(std::memory_order_relaxed);
    }

    void Forget(std::int32_t rank, bool may_return) override {
        RankLink& link = ranks_[static_cast<std::size_t>(rank)];
        const bool known = handshake_->step(rank) >= FrontendHandshake::Step::kRegistered;
        if (known && may_return) {
            candidates_[rank] = FactsOf(rank);
            link.output_seen = false;
            probe_fast_until_ = now_ + kProbeFastFor;
            next_probe_ = now_ + kProbeEvery;
        } else {
            candidates_.erase(rank);
        }
        link.wedged = false;
        link.input_gone = false;
        handshake_->OnLost(rank);
        SaveFacts();
    }

    void SetWedged(std::int32_t rank, bool wedged) override {
        ranks_[static_cast<std::size_t>(rank)].wedged = wedged;
    }

    FrontendHandshake::Step step(std::int32_t rank) const override { return handshake_->step(rank); }
    std::int32_t pid(std::int32_t rank) const override { return ranks_[static_cast<std::size_t>(rank)].pid; }

    bool ProcessGone(std::int32_t rank) const override {
        const RankLink& link = ranks_[static_cast<std::size_t>(rank)];
        if (link.pid == 0) {
            return false;
        }
        if (!link.pidfd.valid()) {
            return true;  // opened once, and closed when it fired
        }
        pollfd item{link.pidfd.get(), POLLIN, 0};
        return ::poll(&item, 1, 0) == 1;
    }

    bool output_connected(std::int32_t rank) const override {
        return ranks_[static_cast<std::size_t>(rank)].fd[kOutput] >= 0;
    }

    bool input_connected(std::int32_t rank) const override {
        return ranks_[static_cast<std::size_t>(rank)].fd[kInput] >= 0;
    }

  private:
    static constexpr std::uint64_t kTagMonitor = 100;
    static constexpr std::uint64_t kTagExtra = 101;
    static constexpr std::uint64_t kTagPid = 1000;

    struct RankLink {
        std::string identity;
        std::array<int, kPlanes> fd{-1, -1, -1};  // its connections, where attributed
        std::int32_t pid{0};
        UniqueFd pidfd;
        /// Handshake connection that greeted first and lost the identity to another one that greeted.
        int displaced{-1};
        std::string host;  // where its HELLO reached us, for INIT on a wildcard address
        bool wedged{false};
        bool output_seen{false};
        bool input_gone{false};  // found to be unreachable; nothing is known of a new connection yet
    };
    static constexpr std::int32_t kUnknown = -1;
    /// A connection of an engine that another one has replaced: its end is no news.
    static constexpr std::int32_t kReplaced = -2;

    struct Connection {
        int fd;
        std::int32_t pid;
        std::int32_t rank;
        TimePoint since;
    };
    struct Deferred {
        ZmqMonitor::Event event;
        std::int32_t rank;  // who it was when the event was read, -1 = not known
        TimePoint read_at;
        UniqueFd held;  // native: until the event is applied, its number is nobody else's
    };

    static Error Unreachable(std::int32_t rank, int error) {
        return Error{
            ErrorCode::kRankLost, "rank " + std::to_string(rank) + ": " + ZmqErrorText(error), {}, true};
    }

    void AddToEpoll(int fd, std::uint64_t tag) {
        epoll_event event{};
        event.events = EPOLLIN;
        event.data.u64 = tag;
        RG_CHECK(::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0);
    }

    static bool Readable(ZmqSocket& socket) {
        if (!socket.valid()) {
            return false;
        }
        int events = 0;
        std::size_t size = sizeof events;
        return ::zmq_getsockopt(socket.get(), ZMQ_EVENTS, &events, &size) == 0 && (events & ZMQ_POLLIN) != 0;
    }

    // ---- binding ----

    ZmqSocket MakeSocket(int type, const std::string& address, std::int64_t max_bytes) {
        const bool tcp = !IsIpc(address);
        ZmqSocket socket(*context_, type);
        socket.Set(ZMQ_LINGER, kCloseLingerMs);
        socket.Set(ZMQ_IPV6, IsIpv6Literal(address) ? 1 : 0);
        socket.Set(ZMQ_BACKLOG, kBacklog);
        socket.Set(ZMQ_MAXMSGSIZE, max_bytes);
        if (type == ZMQ_ROUTER) {
            socket.Set(ZMQ_ROUTER_MANDATORY, 1);
            socket.Set(ZMQ_ROUTER_HANDOVER, 1);
        }
        if (tcp) {
            socket.Set(ZMQ_TCP_KEEPALIVE, 1);
            // An ipc peer cannot vanish without the kernel telling us, and a stopped one shall be able to go
            // on: tcp only.
            socket.Set(ZMQ_HEARTBEAT_IVL, kHeartbeatMs);
            socket.Set(ZMQ_HEARTBEAT_TIMEOUT, kHeartbeatTimeoutMs);
            socket.Set(ZMQ_HEARTBEAT_TTL, kHeartbeatTimeoutMs);
        }
        return socket;
    }

    Status Adopt(Plane plane, ZmqSocket socket, const std::string& address, std::string_view setting) {
        static std::atomic<std::uint64_t> serial{0};
        const std::string name = "rg-" + std::string(kPlaneNames[plane]) + "-" +
                                 std::to_string(serial.fetch_add(1, std::memory_order_relaxed));
        monitors_[plane] = ZmqMonitor(*context_, socket, name, kMonitored);
        if (const int error = socket.Bind(address); error != 0) {
            monitors_[plane].Close(socket);
            return Error{SettingError(error),
                         "cannot bind the " + std::string(kPlaneNames[plane]) + " socket to " + address +
                             ": " + ZmqErrorText(error) + " (set by " + std::string(setting) + ")",
                         std::string(setting), false};
        }
        sockets_[plane] = std::move(socket);
        AddToEpoll(sockets_[plane].fd(), plane);
        AddToEpoll(monitors_[plane].fd(), kTagMonitor);
        ready_[plane] = true;  // look once: the descriptor's first edge may be gone already
        monitor_ready_ = true;
        return {};
    }

    Status BindData(const LinkFacts& known) {
        const std::string prefix = "g" + std::to_string(options_.group);
        const bool tcp = !options_.data_host.empty();
        wildcard_ = options_.data_host == "0.0.0.0" || options_.data_host == "::" ||
                    options_.data_host == "[::]" || options_.data_host == "*";
        std::string input;
        std::string output;
        if (tcp) {
            const std::string host =
                options_.data_host.find(':') != std::string::npos && options_.data_host[0] != '['
                    ? "[" + options_.data_host + "]"
                    : options_.data_host;
            const bool same_host = known.input.starts_with("tcp://" + host + ":");
            input = same_host ? known.input : "tcp://" + host + ":*";
            output = same_host ? known.output : "tcp://" + host + ":*";
        } else {
            auto in = dir_.Claim(prefix + "-in.sock");
            if (!in.ok()) {
                return in.error();
            }
            auto out = dir_.Claim(prefix + "-out.sock");
            if (!out.ok()) {
                return out.error();
            }
            input = *in;
            output = *out;
        }
        const std::string_view setting = tcp ? "--data-parallel-address" : "--socket-dir";
        for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
            ranks_[rank].identity = wire::RankIdentity(options_.base_index + static_cast<std::int32_t>(rank));
        }
        if (!tcp && options_.native && !LibzmqWanted()) {
            // Heartbeats, which only tcp needs, want a thread that answers while its owner is busy: libzmq's.
            if (Status bound = BindNative(
                    kInput, ZmtpRole::kRouter,
                    {kMaxControlFrameBytes, kMaxControlMessageBytes, kMaxFramesPerMessage}, input, setting);
                !bound.ok()) {
                return bound;
            }
            if (Status bound = BindNative(
                    kOutput, ZmtpRole::kPull,
                    {kMaxOutputFrameBytes, kMaxOutputMessageBytes, kMaxFramesPerMessage}, output, setting);
                !bound.ok()) {
                return bound;
            }
            addresses_.inputs = {input};
            addresses_.outputs = {output};
            return {};
        }
        ZmqSocket router = MakeSocket(ZMQ_ROUTER, input, kMaxControlFrameBytes);
        // Unbounded in messages: Send counts bytes, per rank.
        router.Set(ZMQ_SNDHWM, 0);
        if (Status bound = Adopt(kInput, std::move(router), input, setting); !bound.ok()) {
            return bound;
        }
        ZmqSocket pull = MakeSocket(ZMQ_PULL, output, kMaxOutputFrameBytes);
        pull.Set(ZMQ_RCVHWM, kOutputMessagesHeld);
        if (Status bound = Adopt(kOutput, std::move(pull), output, setting); !bound.ok()) {
            return bound;
        }
        addresses_.inputs = {tcp ? sockets_[kInput].LastEndpoint() : input};
        addresses_.outputs = {tcp ? sockets_[kOutput].LastEndpoint() : output};
        return {};
    }

    Status BindNative(Plane plane, ZmtpRole role, const ZmtpLimits& limits, const std::string& address,
                      std::string_view setting) {
        constexpr std::string_view kIpc = "ipc://";
        ZmtpListener::Options options;
        options.role = role;
        options.limits = limits;
        options.backlog = kBacklog;
        options.max_connections = 4 * ranks_.size() + kMaxStrays;
        options.epoll = epoll_.get();
        options.tag = static_cast<std::uint32_t>(plane + 1);
        auto bound = ZmtpListener::Bind(address.substr(kIpc.size()), options);
        if (!bound.ok()) {
            return Error{bound.error().code,
                         "cannot bind the " + std::string(kPlaneNames[plane]) + " socket to " + address +
                             ": " + bound.error().message + " (set by " + std::string(setting) + ")",
                         std::string(setting), false};
        }
        native_[plane] = std::move(*bound);
        return {};
    }

    Status BindHandshake() {
        std::string address = options_.handshake_address;
        if (address.ends_with(":0")) {
            address.back() = '*';
        }
        ZmqSocket router = MakeSocket(ZMQ_ROUTER, address, kMaxControlFrameBytes);
        if (Status bound = Adopt(kHandshake, std::move(router), address, "--data-parallel-rpc-port");
            !bound.ok()) {
            return bound;
        }
        handshake_address_ = IsIpc(address) ? address : sockets_[kHandshake].LastEndpoint();
        return {};
    }

    /// The local address of a connection.
    static std::string HostOf(int fd) {
        sockaddr_storage local{};
        socklen_t size = sizeof local;
        char text[INET6_ADDRSTRLEN] = "127.0.0.1";
        std::string host = text;
        if (fd >= 0 && ::getsockname(fd, reinterpret_cast<sockaddr*>(&local), &size) == 0) {
            if (local.ss_family == AF_INET) {
                host = ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in&>(local).sin_addr, text,
                                   sizeof text);
            } else if (local.ss_family == AF_INET6) {
                const in6_addr& address = reinterpret_cast<const sockaddr_in6&>(local).sin6_addr;
                if (IN6_IS_ADDR_V4MAPPED(&address)) {
                    host = ::inet_ntop(AF_INET, &address.s6_addr[12], text, sizeof text);
                } else {
                    host = "[" + std::string(::inet_ntop(AF_INET6, &address, text, sizeof text)) + "]";
                }
            }
        }
        return host;
    }

    /// INIT with the address that the engine's own handshake connection reached us on.
    std::string InitFor(std::int32_t rank) const {
        const std::string& host = ranks_[static_cast<std::size_t>(rank)].host;
        const auto at = [&host](const std::string& bound) {
            return "tcp://" + host + bound.substr(bound.rfind(':'));
        };
        wire::InitMessage init;
        init.inputs = {at(addresses_.inputs[0])};
        init.outputs = {at(addresses_.outputs[0])};
        std::string bytes;
        wire::EncodeInit(init, bytes);
        return bytes;
    }

    // ---- facts ----

    LinkFacts LoadFacts() {
        if (!dir_.persistent()) {
            return {};
        }
        auto loaded = dir_.Load(options_.dialect);
        if (!loaded.ok()) {
            LogWarning("facts_ignored",
                       {{"group", options_.group}, {"reason", std::string_view{loaded.error().message}}});
            return {};
        }
        if (!loaded->has_value()) {
            return {};
        }
        LinkFacts facts = std::move(**loaded);
        if (facts.size != options_.size || facts.base_index != options_.base_index) {
            LogWarning("facts_ignored",
                       {{"group", options_.group}, {"reason", "they are of a differently shaped group"}});
            return {};
        }
        return facts;
    }

    void SaveFacts() {
        if (!dir_.persistent()) {
            return;
        }
        LinkFacts facts;
        facts.dialect = dialect() ? wire::DialectName(*dialect()) : "auto";
        facts.size = options_.size;
        facts.base_index = options_.base_index;
        facts.handshake = handshake_address_;
        facts.input = addresses_.inputs[0];
        facts.output = addresses_.outputs[0];
        facts.ranks = candidates_;
        for (std::int32_t rank = 0; rank < options_.size; ++rank) {
            if (handshake_->step(rank) >= FrontendHandshake::Step::kRegistered) {
                facts.ranks[rank] = FactsOf(rank);
            }
        }
        if (const Status saved = dir_.Save(facts); !saved.ok()) {
            LogWarning("facts_not_saved",
                       {{"group", options_.group}, {"reason", std::string_view{saved.error().message}}});
        }
    }

    RankFacts FactsOf(std::int32_t rank) const {
        RankFacts facts = handshake_->facts(rank);
        facts.pid = ranks_[static_cast<std::size_t>(rank)].pid;
        return facts;
    }

    // ---- connections ----

    Connection* Find(std::size_t plane, int fd) {
        for (Connection& connection : connections_[plane]) {
            if (connection.fd == fd) {
                return &connection;
            }
        }
        return nullptr;
    }

    Connection& Note(std::size_t plane, int fd) {
        if (Connection* known = Find(plane, fd); known != nullptr) {
            return *known;
        }
        connections_[plane].push_back({fd, PeerPid(fd), -1, now_});
        return connections_[plane].back();
    }

    /// A message that names `rank` came in on `fd`.
    void Attribute(std::size_t plane, int fd, std::int32_t rank) {
        if (fd < 0) {
            return;
        }
        RankLink& link = ranks_[static_cast<std::size_t>(rank)];
        if (link.fd[plane] == fd) {
            return;
        }
        Connection& connection = Note(plane, fd);
        if (connection.rank >= 0 && connection.rank != rank) {
            RankLink& before = ranks_[static_cast<std::size_t>(connection.rank)];
            if (before.fd[plane] == fd) {
                before.fd[plane] = -1;
            }
        }
        connection.rank = rank;
        link.fd[plane] = fd;
        link.input_gone = link.input_gone && plane != kInput;
        const std::int32_t pid = connection.pid;
        if (plane != kHandshake && pid != 0) {
            AdoptPid(rank, pid);
        }
    }

    /// A new engine greets as `rank`: whatever connections the old one still has are no longer the rank's.
    void Detach(std::int32_t rank) {
        RankLink& link = ranks_[static_cast<std::size_t>(rank)];
        for (std::size_t plane : {std::size_t{kInput}, std::size_t{kOutput}}) {
            for (Connection& connection : connections_[plane]) {
                if (connection.rank == rank) {
                    connection.rank = kReplaced;
                }
            }
            link.fd[plane] = -1;
        }
        link.output_seen = false;
        link.wedged = false;
        link.input_gone = false;
        DropPid(link);
    }

    void AdoptPid(std::int32_t rank, std::int32_t pid) {
        RankLink& link = ranks_[static_cast<std::size_t>(rank)];
        if (link.pid != pid) {
            DropPid(link);
            link.pid = pid;
            link.pidfd = OpenPid(pid);
            if (link.pidfd.valid()) {
                AddToEpoll(link.pidfd.get(), kTagPid + static_cast<std::uint64_t>(pid));
            } else if (errno == ESRCH) {
                dead_pids_.push_back(pid);
            } else {
                link.pid = 0;  // another pid namespace, or no pidfd here: connections must do
            }
        }
        AttributeByPid();
    }

    void DropPid(RankLink& link) {
        if (link.pidfd.valid()) {
            ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, link.pidfd.get(), nullptr);
            link.pidfd.reset();
        }
        link.pid = 0;
    }

    /// Gives silent connections to the one rank that has their pid.
    void AttributeByPid() {
        for (std::size_t plane : {std::size_t{kInput}, std::size_t{kOutput}}) {
            for (Connection& connection : connections_[plane]) {
                if (connection.rank != kUnknown || connection.pid == 0) {
                    continue;
                }
                std::int32_t found = -1;
                for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
                    if (ranks_[rank].pid == connection.pid) {
                        found = found == -1 ? static_cast<std::int32_t>(rank) : -2;
                    }
                }
                if (found >= 0) {
                    connection.rank = found;
                    ranks_[static_cast<std::size_t>(found)].fd[plane] = connection.fd;
                }
            }
        }
    }

    void Defer(std::size_t plane, const ZmqMonitor::Event& event, UniqueFd held) {
        const Connection* connection =
            event.kind == ZMQ_EVENT_DISCONNECTED ? Find(plane, event.value) : nullptr;
        deferred_[plane].push_back(
            {event, connection != nullptr ? connection->rank : -1, now_, std::move(held)});
    }

    void ReadNativeEvents(std::size_t plane) {
        if (native_[plane] == nullptr || !native_[plane]->has_events()) {
            return;
        }
        ZmtpListener::Event event;
        UniqueFd closed;
        while (deferred_[plane].size() < kMaxDeferredEvents && native_[plane]->NextEvent(event, closed)) {
            using Kind = ZmtpListener::Event::Kind;
            const std::uint16_t kind = event.kind == Kind::kAccepted ? ZMQ_EVENT_ACCEPTED
                                       : event.kind == Kind::kReady  ? ZMQ_EVENT_HANDSHAKE_SUCCEEDED
                                       : event.kind == Kind::kClosed ? ZMQ_EVENT_DISCONNECTED
                                                                     : ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL;
            Defer(plane, {kind, event.fd}, std::move(closed));
        }
        monitor_ready_ = monitor_ready_ || native_[plane]->has_events();
    }

    void ReadMonitors() {
        for (std::size_t plane = 0; plane < kPlanes; ++plane) {
            ReadNativeEvents(plane);
            if (!monitors_[plane].valid()) {
                continue;
            }
            ZmqMonitor::Event event;
            while (deferred_[plane].size() < kMaxDeferredEvents && monitors_[plane].Next(event)) {
                Defer(plane, event, UniqueFd{});
            }
            if (deferred_[plane].size() >= kMaxDeferredEvents) {
                monitor_ready_ = true;
            }
        }
    }

    /// Events in order, up to the first disconnect while messages that came before it may still be unread.
    void ApplyEvents(std::size_t plane, Handler& handler, bool drained) {
        auto& queue = deferred_[plane];
        while (!queue.empty()) {
            const Deferred& item = queue.front();
            switch (item.event.kind) {
                case ZMQ_EVENT_ACCEPTED:
                    Note(plane, item.event.value);
                    if (plane == kHandshake && !next_silent_) {
                        next_silent_ = now_ + SilentLimit();
                    }
                    AttributeByPid();
                    break;
                case ZMQ_EVENT_HANDSHAKE_SUCCEEDED:
                    if (plane == kInput) {
                        next_probe_ = now_;
                    }
                    break;
                case ZMQ_EVENT_DISCONNECTED:
                    if (!drained && now_ - item.read_at < kMaxDefer) {
                        return;
                    }
                    {
                        const Deferred taken = std::move(queue.front());
                        queue.pop_front();
                        OnDisconnected(plane, taken, handler);
                    }
                    continue;
                default: {
                    std::uint64_t suppressed = 0;
                    if (stray_log_.Allow(suppressed)) {
                        LogWarning("stray_connection", {{"group", options_.group},
                                                        {"socket", kPlaneNames[plane]},
                                                        {"reason", "it does not speak this protocol"},
                                                        {"suppressed", suppressed}});
                    }
                }
            }
            queue.pop_front();
        }
    }

    /// Closes an engine's handshake connection, so that its socket dials again and takes its identity back:
    /// ROUTER hands an identity to whoever came last and leaves the older connection open and unheard for
    /// ever, which its engine cannot know. The number is libzmq's and could be another connection's by now:
    /// only one of the handshake port is touched, and those all know how to dial again.
    void DialAgain(int fd) {
        sockaddr_storage local{};
        socklen_t size = sizeof local;
        if (::getsockname(fd, reinterpret_cast<sockaddr*>(&local), &size) != 0) {
            return;
        }
        in_port_t port = 0;
        if (local.ss_family == AF_INET) {
            port = reinterpret_cast<const sockaddr_in&>(local).sin_port;
        } else if (local.ss_family == AF_INET6) {
            port = reinterpret_cast<const sockaddr_in6&>(local).sin6_port;
        }
        if (port == 0 || !handshake_address_.ends_with(":" + std::to_string(ntohs(port)))) {
            return;
        }
        if (Connection* connection = Find(kHandshake, fd); connection != nullptr) {
            connection->rank = kReplaced;
        }
        ::shutdown(fd, SHUT_RDWR);
    }

    /// A handshake connection that has not said a word: it dials again, and INIT is offered to whoever then
    /// has the identity of a rank that is missing. An engine waits for nothing else, whatever became of its
    /// HELLO. One at a time, the oldest first: whoever dials last has the identity, and needs it until INIT
    /// came.
    void WakeSilentGreeter() {
        next_silent_.reset();
        const Connection* oldest = nullptr;
        const Connection* second = nullptr;
        for (const Connection& connection : connections_[kHandshake]) {
            if (connection.rank != kUnknown) {
                continue;
            }
            if (oldest == nullptr || connection.since < oldest->since) {
                second = std::exchange(oldest, &connection);
            } else if (second == nullptr || connection.since < second->since) {
                second = &connection;
            }
        }
        if (oldest == nullptr) {
            return;
        }
        if (now_ - oldest->since < SilentLimit()) {
            next_silent_ = oldest->since + SilentLimit();
            return;
        }
        ++silent_rounds_;
        LogInfo("silent_greeter", {{"group", options_.group}, {"round", silent_rounds_}});
        if (second != nullptr) {
            next_silent_ = std::max(now_ + kSilentTurn, second->since + SilentLimit());
        }
        offer_at_ = now_ + kOfferAfter;
        DialAgain(oldest->fd);
    }
    Duration SilentLimit() const {
        return silent_rounds_ < kSilentRounds ? kSilentGreeter : kSilentGreeterLater;
    }

    /// What a handshake message says about whose connection it came in on.
    void AttributeGreeting(std::int32_t rank, int fd, std::string_view payload) {
        RankLink& link = ranks_[static_cast<std::size_t>(rank)];
        const int before = link.fd[kHandshake];
        const bool contested =
            before >= 0 && before != fd && handshake_->step(rank) == FrontendHandshake::Step::kInitialised;
        const auto greeting = wire::DecodeGreeting(payload);
        if (!greeting.ok()) {
            if (before != fd) {
                Note(kHandshake, fd).rank = kReplaced;
            }
            if (contested) {
                DialAgain(before);
                link.fd[kHandshake] = -1;
            }
            return;
        }
        if (contested && greeting->kind == wire::Greeting::Kind::kHello) {
            link.displaced = before;
        }
        Attribute(kHandshake, fd, rank);
        link.host = HostOf(fd);
    }

    void OnDisconnected(std::size_t plane, const Deferred& item, Handler& handler) {
        std::int32_t rank = item.rank;
        if (plane == kHandshake) {
            for (RankLink& link : ranks_) {
                link.displaced = link.displaced == item.event.value ? -1 : link.displaced;
            }
        }
        std::int32_t pid = 0;
        auto& table = connections_[plane];
        const auto at = std::find_if(table.begin(), table.end(),
                                     [&](const Connection& c) { return c.fd == item.event.value; });
        if (at != table.end()) {
            if (rank == kUnknown) {
                rank = at->rank;
            }
            pid = at->pid;
            table.erase(at);
        }
        if (rank == kReplaced) {
            return;
        }
        if (rank < 0 && plane == kOutput) {
            rank = OnlyRankWithoutOutput();
        }
        if (rank < 0) {
            if (plane == kInput) {
                ++owners_sought_;
                find_until_ = now_ + kFindFor;
                next_find_ = now_;
            } else if (plane == kOutput) {
                handler.OnPeerLost(-1, PeerLoss::kOutputClosed);
            }
            return;
        }
        RankLink& link = ranks_[static_cast<std::size_t>(rank)];
        if (link.fd[plane] != item.event.value && link.fd[plane] >= 0) {
            return;  // it has a newer connection
        }
        if (plane != kHandshake && pid != 0 && link.pid != 0 && pid != link.pid) {
            return;  // the engine that it replaced
        }
        link.fd[plane] = -1;
        switch (plane) {
            case kHandshake:
                if (link.displaced >= 0 && handshake_->step(rank) == FrontendHandshake::Step::kInitialised) {
                    // The one that greeted before it may still wait for its INIT.
                    DialAgain(std::exchange(link.displaced, -1));
                } else {
                    handshake_->OnHandshakeClosed(rank);
                }
                break;
            case kInput:
                handler.OnPeerLost(rank, PeerLoss::kInputClosed);
                break;
            default:
                handler.OnPeerLost(rank, PeerLoss::kOutputClosed);
                break;
        }
    }

    /// By elimination: the single live rank whose output connection never showed itself, if no silent
    /// connection is left for it.
    std::int32_t OnlyRankWithoutOutput() const {
        for (const Connection& connection : connections_[kOutput]) {
            if (connection.rank == kUnknown) {
                return -1;
            }
        }
        std::int32_t found = -1;
        for (std::int32_t rank = 0; rank < options_.size; ++rank) {
            if (handshake_->step(rank) >= FrontendHandshake::Step::kRegistered &&
                ranks_[static_cast<std::size_t>(rank)].fd[kOutput] < 0) {
                if (found >= 0) {
                    return -1;
                }
                found = rank;
            }
        }
        return found;
    }

    /// An input connection closed and nobody knows whose: ask ROUTER about every rank that could be meant,
    /// and again for a moment, because the news of a closed connection overtakes the end of its pipe.
    void FindUnreachable(Handler& handler) {
        next_find_ = now_ + kFindEvery;
        for (std::int32_t rank = 0; rank < options_.size; ++rank) {
            if (handshake_->step(rank) == FrontendHandshake::Step::kLive &&
                ranks_[static_cast<std::size_t>(rank)].fd[kInput] < 0 &&
                !ranks_[static_cast<std::size_t>(rank)].input_gone) {
                std::uint8_t type = 0;
                const std::string_view payload = handler.ProbePayload(rank, type);
                if (const Status sent = Send(rank, type, payload, Urgency::kControl, {});
                    !sent.ok() && sent.error().code == ErrorCode::kRankLost) {
                    unreachable_.push_back(rank);
                    ranks_[static_cast<std::size_t>(rank)].input_gone = true;
                    owners_sought_ -= owners_sought_ > 0 ? 1 : 0;
                }
            }
        }
        if (owners_sought_ == 0 || now_ >= find_until_) {
            owners_sought_ = 0;
            find_until_ = {};
        }
    }

    void OnProcessGone(std::int32_t pid, Handler& handler) {
        for (std::int32_t rank = 0; rank < options_.size; ++rank) {
            RankLink& link = ranks_[static_cast<std::size_t>(rank)];
            if (link.pid != pid) {
                continue;
            }
            if (link.pidfd.valid()) {
                ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, link.pidfd.get(), nullptr);
                link.pidfd.reset();  // pid stays: ProcessGone answers from it
            }
            handler.OnPeerLost(rank, PeerLoss::kProcessGone);
        }
    }

    // ---- messages ----

    bool PollHandshake() {
        if (!sockets_[kHandshake].valid() || !ready_[kHandshake]) {
            return true;
        }
        for (std::size_t i = 0; i < kMaxControlPerPoll; ++i) {
            const auto got = reader_.Receive(sockets_[kHandshake]);
            if (got == MultipartReader::Got::kNothing) {
                ready_[kHandshake] = false;
                return true;
            }
            const auto frames = reader_.frames();
            if (got == MultipartReader::Got::kMalformed || frames.size() < 2) {
                handshake_->OnHandshakeMessage(frames.empty() ? std::string_view{} : frames[0], {}, false);
                continue;
            }
            const std::int32_t rank = handshake_->RankOf(frames[0]);
            bool serves = false;
            if (rank < 0 && reader_.source_fd() >= 0) {
                Note(kHandshake, reader_.source_fd()).rank = kReplaced;  // it spoke, and is no rank of ours
            }
            if (rank >= 0) {
                if (reader_.source_fd() >= 0) {
                    AttributeGreeting(rank, reader_.source_fd(), frames.back());
                }
                const RankLink& link = ranks_[static_cast<std::size_t>(rank)];
                serves = !link.wedged && link.fd[kInput] >= 0 && link.pid != 0 && !ProcessGone(rank);
            }
            handshake_->OnHandshakeMessage(frames[0], frames.subspan(1), serves);
        }
        return false;
    }

    /// The next message of a data socket. The views live until the next call with the same socket.
    MultipartReader::Got Take(Plane plane, MultipartReader& reader, std::span<const std::string_view>& frames,
                              int& fd) {
        if (ZmtpListener* native = native_[plane].get(); native != nullptr) {
            const ZmtpListener::Got got = native->Receive();
            frames = native->frames();
            fd = native->source_fd();
            return got == ZmtpListener::Got::kMessage     ? MultipartReader::Got::kMessage
                   : got == ZmtpListener::Got::kMalformed ? MultipartReader::Got::kMalformed
                                                          : MultipartReader::Got::kNothing;
        }
        const auto got = reader.Receive(sockets_[plane]);
        frames = reader.frames();
        fd = reader.source_fd();
        return got;
    }

    bool PollInput() {
        if (!ready_[kInput]) {
            return true;
        }
        for (std::size_t i = 0; i < kMaxControlPerPoll; ++i) {
            std::span<const std::string_view> frames;
            int fd = -1;
            const auto got = Take(kInput, reader_, frames, fd);
            if (got == MultipartReader::Got::kNothing) {
                ready_[kInput] = false;
                return true;
            }
            if (got == MultipartReader::Got::kMalformed || frames.empty()) {
                continue;
            }
            const std::int32_t rank = handshake_->RankOf(frames[0]);
            if (rank >= 0) {
                Attribute(kInput, fd, rank);
            }
            handshake_->OnRegistration(frames[0], frames.subspan(1));
        }
        return false;
    }

    bool PollOutput(Handler& handler) {
        if (!ready_[kOutput]) {
            return true;
        }
        for (std::size_t i = 0; i < kMaxOutputsPerPoll; ++i) {
            std::span<const std::string_view> frames;
            int fd = -1;
            const auto got = Take(kOutput, output_reader_, frames, fd);
            if (got == MultipartReader::Got::kNothing) {
                ready_[kOutput] = false;
                return true;
            }
            const std::int32_t from = OutputRank(fd);
            const bool whole = got == MultipartReader::Got::kMessage;  // else: nothing that could be decoded
            const std::int32_t named =
                handler.OnOutput(whole ? frames : std::span<const std::string_view>{}, from);
            if (named >= 0 && named < options_.size) {
                RankLink& link = ranks_[static_cast<std::size_t>(named)];
                if (link.fd[kOutput] != fd) {
                    Attribute(kOutput, fd, named);
                }
                if (!link.output_seen) {
                    link.output_seen = true;
                    next_probe_ = candidates_.empty() ? next_probe_ : now_;
                }
            }
            output_reader_.Release();
        }
        return false;
    }

    std::int32_t OutputRank(int fd) {
        if (fd < 0) {
            return -1;
        }
        if (const Connection* connection = Find(kOutput, fd); connection != nullptr) {
            return std::max(connection->rank, kUnknown);
        }
        Note(kOutput, fd);
        AttributeByPid();
        return std::max(Find(kOutput, fd)->rank, kUnknown);
    }

    // ---- handshake and re-attach ----

    void DispatchHandshake(Handler& handler) {
        for (auto events = handshake_->TakeEvents(); !events.empty(); events = handshake_->TakeEvents()) {
            for (const HandshakeEvent& event : events) {
                Dispatch(event, handler);
            }
        }
    }

    void Dispatch(const HandshakeEvent& event, Handler& handler) {
        using Kind = HandshakeEvent::Kind;
        switch (event.kind) {
            case Kind::kGreeted:
                candidates_.erase(event.rank);
                silent_rounds_ = 0;
                Detach(event.rank);
                LogInfo("rank_greeted", {{"group", options_.group}, {"rank", event.rank}});
                handler.OnProgress(event.rank, FrontendHandshake::Step::kGreeted, {});
                break;
            case Kind::kSendInit: {
                sent_[kHandshake] = true;
                ZmqSocket& socket = sockets_[kHandshake];
                if (event.offer && handshake_->step(event.rank) != FrontendHandshake::Step::kAbsent) {
                    break;
                }
                int error = socket.valid() ? socket.Send(event.identity, true) : EHOSTUNREACH;
                if (error == 0) {
                    error = socket.Send(wildcard_ ? InitFor(event.rank) : event.bytes, false);
                }
                if (event.offer) {
                    if (error == 0) {
                        handshake_->OnOfferTaken(event.rank);
                        handler.OnProgress(event.rank, FrontendHandshake::Step::kInitialised, {});
                    }
                    break;
                }
                if (error == 0) {
                    const bool news = handshake_->step(event.rank) < FrontendHandshake::Step::kInitialised;
                    handshake_->OnInitSent(event.rank);
                    if (news) {
                        handler.OnProgress(event.rank, FrontendHandshake::Step::kInitialised, {});
                    }
                    break;
                }
                RankLink& link = ranks_[static_cast<std::size_t>(event.rank)];
                if (event.again && link.fd[kHandshake] >= 0) {
                    // Open, but nobody under that name: another connection took it and left.
                    DialAgain(std::exchange(link.fd[kHandshake], -1));
                }
                handshake_->OnInitUndeliverable(event.rank);
                break;
            }
            case Kind::kRestarted:
                LogWarning("rank_restarted", {{"group", options_.group}, {"rank", event.rank}});
                handler.OnRestarted(event.rank);
                break;
            case Kind::kRegistered:
                handler.OnProgress(event.rank, FrontendHandshake::Step::kRegistered, {});
                break;
            case Kind::kLive: {
                if (handshake_->step(event.rank) != FrontendHandshake::Step::kLive) {
                    break;  // lost again within the same round
                }
                const bool reattached = candidates_.erase(event.rank) != 0;
                const RankFacts& facts = handshake_->facts(event.rank);
                if (!candidates_.empty() &&
                    candidates_.begin()->second.ready.dialect != facts.ready.dialect) {
                    LogWarning("reattach_given_up",
                               {{"group", options_.group},
                                {"reason", "engines of another runtime came in place of those known"},
                                {"now", wire::DialectName(facts.ready.dialect)}});
                    candidates_.clear();
                }
                LogInfo("rank_live", {{"group", options_.group},
                                      {"rank", event.rank},
                                      {"engine", std::string_view{facts.ready.vllm_version}},
                                      {"pid", ranks_[static_cast<std::size_t>(event.rank)].pid},
                                      {"max_model_len", facts.ready.max_model_len},
                                      {"reattached", reattached}});
                SaveFacts();
                handler.OnLive(event.rank, facts, reattached);
                if (facts.ready.dialect == Dialect::kVllm &&
                    ranks_[static_cast<std::size_t>(event.rank)].fd[kOutput] < 0) {
                    // Peer credentials do not say which output connection is its own; its answer will.
                    std::uint8_t type = 0;
                    const std::string_view payload = handler.ProbePayload(event.rank, type);
                    (void)Send(event.rank, type, payload, Urgency::kControl, {});
                }
                break;
            }
            case Kind::kRefused:
                break;  // logged by the machine
            case Kind::kReadyTimedOut:
                LogError("rank_not_ready",
                         {{"group", options_.group}, {"rank", event.rank}, {"reason", event.reason}});
                handler.OnProgress(event.rank, FrontendHandshake::Step::kInitialised, event.reason);
                break;
            case Kind::kLostInStart:
                LogError("rank_lost_in_start",
                         {{"group", options_.group}, {"rank", event.rank}, {"reason", event.reason}});
                handler.OnProgress(event.rank, FrontendHandshake::Step::kAbsent, event.reason);
                break;
        }
    }

    bool BothConnected(std::int32_t rank, std::int32_t pid) {
        if (pid == 0) {
            return false;
        }
        for (std::size_t plane : {std::size_t{kInput}, std::size_t{kOutput}}) {
            const auto& table = connections_[plane];
            if (std::none_of(table.begin(), table.end(),
                             [pid](const Connection& c) { return c.pid == pid; })) {
                return false;
            }
        }
        AdoptPid(rank, pid);
        return true;
    }

    /// Who of those we know from before is connected? ROUTER takes a message only for a peer that is there.
    void Probe(Handler& handler) {
        next_probe_ = now_ + (now_ < probe_fast_until_ ? kProbeEvery : kProbeSlowly);
        std::vector<std::int32_t> back;
        for (const auto& [rank, facts] : candidates_) {
            RankLink& link = ranks_[static_cast<std::size_t>(rank)];
            if (ProcessGone(rank)) {
                continue;
            }
            std::uint8_t type = 0;
            const std::string_view payload = handler.ProbePayload(rank, type);
            const Status sent = Send(rank, type, payload, Urgency::kControl, {});
            // A busy engine does not answer for minutes: then its process tells us that both connections are
            // back.
            if (sent.ok() &&
                (link.output_seen || BothConnected(rank, facts.pid) ||
                 (facts.ready.dialect == Dialect::kTokenSpeed && !connections_[kOutput].empty()))) {
                back.push_back(rank);
            }
        }
        for (const std::int32_t rank : back) {
            handshake_->Reattach(rank, candidates_[rank]);
        }
        if (!back.empty()) {
            DispatchHandshake(handler);
        }
        for (const std::int32_t rank : back) {
            candidates_.erase(rank);
        }
    }

    const FrontendLinkOptions options_;
    const Clock& clock_;
    TimePoint now_{};

    std::unique_ptr<QueuedBytes[]>
        queued_;  // before the context: libzmq's thread writes to it until the context is gone
    SocketDir dir_;
    std::unique_ptr<ZmqContext> context_;
    std::array<ZmqSocket, kPlanes> sockets_;
    std::array<ZmqMonitor, kPlanes> monitors_;
    UniqueFd epoll_;
    /// Data sockets on ipc: read and written here, without libzmq's thread in between.
    std::array<std::unique_ptr<ZmtpListener>, kPlanes> native_;
    std::array<bool, kPlanes> ready_{};
    std::array<bool, kPlanes> sent_{};
    bool monitor_ready_{false};
    MultipartReader reader_;
    MultipartReader output_reader_;

    std::string handshake_address_;
    bool wildcard_{false};
    EngineAddresses addresses_;
    std::unique_ptr<FrontendHandshake> handshake_;
    std::vector<RankLink> ranks_;
    std::array<std::vector<Connection>, kPlanes> connections_;
    std::array<std::deque<Deferred>, kPlanes> deferred_;
    std::vector<std::int32_t> dead_pids_;
    std::vector<std::int32_t> unreachable_;

    std::map<std::int32_t, RankFacts> candidates_;  // known from before, not connected (yet)
    TimePoint next_probe_{};
    TimePoint probe_fast_until_{};
    TimePoint find_until_{};  // an input of unknown owner closed: whose it was is being found out; zero = no
    TimePoint next_find_{};
    std::size_t owners_sought_{0};          // of so many connections
    std::optional<TimePoint> next_silent_;  // when a silent handshake connection has been silent for too long
    std::optional<TimePoint> offer_at_;
    std::int32_t silent_rounds_{0};
    LogLimiter stray_log_{5};
};

}  // namespace

Result<std::unique_ptr<FrontendLink>> FrontendLink::Bind(FrontendLinkOptions options, const Clock& clock) {
    if (options.size < 1 || options.base_index < 0 ||
        options.base_index + options.size > wire::kMaxRank + 1) {
        return Error::Invalid("--data-parallel-size", "a group has 1 to 65536 ranks");
    }
    auto link = std::make_unique<ZmqFrontendLink>(std::move(options), clock);
    if (Status started = link->Start(); !started.ok()) {
        return started.error();
    }
    return std::unique_ptr<FrontendLink>(std::move(link));
}

}  // namespace rankgate::transport
