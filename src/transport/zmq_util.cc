// SPDX-License-Identifier: Apache-2.0
#include "transport/zmq_util.h"

#include <arpa/inet.h>
#include <sys/un.h>

#include <cstdlib>
#include <cstring>
#include <new>

namespace rankgate::transport {
namespace {

/// Header in front of a counted frame's bytes, in one allocation.
struct CountedBlock {
    QueuedBytes* counter;
    std::uint64_t size;
    std::atomic<std::uint32_t>
        handed_over;  // makes the hand-over to libzmq's thread visible to race detectors
};

void FreeCounted(void* /*data*/, void* hint) {
    auto* block = static_cast<CountedBlock*>(hint);
    (void)block->handed_over.load(std::memory_order_acquire);
    block->counter->bytes.fetch_sub(block->size, std::memory_order_acq_rel);
    block->~CountedBlock();
    std::free(block);
}

}  // namespace

std::string ZmqSocket::LastEndpoint() const {
    char text[512];
    std::size_t size = sizeof text;
    if (::zmq_getsockopt(socket_, ZMQ_LAST_ENDPOINT, text, &size) != 0 || size == 0) {
        return {};
    }
    return std::string(text, size - 1);
}

int ZmqSocket::fd() const {
    int fd = -1;
    std::size_t size = sizeof fd;
    RG_CHECK(::zmq_getsockopt(socket_, ZMQ_FD, &fd, &size) == 0);
    return fd;
}

int ZmqSocket::Send(std::string_view bytes, bool more) noexcept {
    zmq_msg_t message;
    if (::zmq_msg_init_size(&message, bytes.size()) != 0) {
        return ENOMEM;
    }
    if (!bytes.empty()) {
        std::memcpy(::zmq_msg_data(&message), bytes.data(), bytes.size());
    }
    for (;;) {
        if (::zmq_msg_send(&message, socket_, ZMQ_DONTWAIT | (more ? ZMQ_SNDMORE : 0)) >= 0) {
            return 0;
        }
        if (errno != EINTR) {
            const int error = errno;
            ::zmq_msg_close(&message);
            return error;
        }
    }
}

int ZmqSocket::SendCounted(std::string_view bytes, bool more, QueuedBytes& counter) noexcept {
    void* memory = std::malloc(sizeof(CountedBlock) + bytes.size());
    if (memory == nullptr) {
        return ENOMEM;
    }
    auto* block = new (memory) CountedBlock{&counter, bytes.size(), 0};
    char* data = static_cast<char*>(memory) + sizeof(CountedBlock);
    if (!bytes.empty()) {
        std::memcpy(data, bytes.data(), bytes.size());
    }
    zmq_msg_t message;
    counter.bytes.fetch_add(bytes.size(), std::memory_order_acq_rel);
    block->handed_over.store(1, std::memory_order_release);
    if (::zmq_msg_init_data(&message, data, bytes.size(), FreeCounted, block) != 0) {
        FreeCounted(data, block);
        return ENOMEM;
    }
    for (;;) {
        if (::zmq_msg_send(&message, socket_, ZMQ_DONTWAIT | (more ? ZMQ_SNDMORE : 0)) >= 0) {
            return 0;
        }
        if (errno != EINTR) {
            const int error = errno;
            ::zmq_msg_close(&message);  // calls FreeCounted
            return error;
        }
    }
}

MultipartReader::Got MultipartReader::Receive(ZmqSocket& socket) {
    count_ = 0;
    bool surplus = false;
    for (;;) {
        if (count_ == messages_.size()) {
            messages_.emplace_back();
            views_.emplace_back();
        }
        ZmqMessage& message = messages_[count_];
        if (socket.Receive(message) == ZmqSocket::Got::kNothing) {
            // Parts of one message arrive together, so this is the first part unless the socket failed
            // half-way.
            return count_ == 0 ? Got::kNothing : Got::kMalformed;
        }
        if (count_ == 0 || fd_ < 0) {
            // libzmq 4.3.4: the identity frame of a ROUTER that was asked for ZMQ_EVENTS first names no
            // connection, the frames after it do.
            fd_ = message.source_fd();
        }
        const bool more = message.more();
        views_[count_] = message.view();
        if (count_ + 1 < kMaxFramesPerMessage) {
            ++count_;
        } else {
            surplus = true;
        }
        if (!more) {
            // Vectors may have grown while views into inline frames were taken: take them again.
            for (std::size_t i = 0; i < count_; ++i) {
                views_[i] = messages_[i].view();
            }
            return surplus ? Got::kMalformed : Got::kMessage;
        }
    }
}

void MultipartReader::Release() noexcept {
    for (std::size_t i = 0; i < count_; ++i) {
        messages_[i] = ZmqMessage{};
    }
    count_ = 0;
}

ZmqMonitor::ZmqMonitor(const ZmqContext& context, ZmqSocket& socket, const std::string& name, int events) {
    const std::string address = "inproc://" + name;
    RG_CHECK(::zmq_socket_monitor(socket.get(), address.c_str(), events) == 0);
    pair_ = ZmqSocket(context, ZMQ_PAIR);
    pair_.Set(ZMQ_LINGER, 0);
    RG_CHECK(pair_.Connect(address) == 0);
}

bool ZmqMonitor::Next(Event& event) {
    ZmqMessage head;
    if (pair_.Receive(head) == ZmqSocket::Got::kNothing) {
        return false;
    }
    const std::string_view bytes = head.view();
    event = {};
    if (bytes.size() >= 6) {
        std::memcpy(&event.kind, bytes.data(), 2);
        std::memcpy(&event.value, bytes.data() + 2, 4);
    }
    ZmqMessage address;
    while (head.more() && pair_.Receive(address) == ZmqSocket::Got::kFrame && address.more()) {
    }
    return true;
}

void ZmqMonitor::Close(ZmqSocket& socket) noexcept {
    if (pair_.valid()) {
        if (socket.valid()) {
            ::zmq_socket_monitor(socket.get(), nullptr, 0);
        }
        pair_.Close();
    }
}

bool LibzmqWanted() noexcept {
    const char* transport =
        std::getenv("RANKGATE_TRANSPORT");  // NOLINT(concurrency-mt-unsafe): nobody sets it
    return transport != nullptr && std::string_view{transport} == "libzmq";
}

bool IsIpc(std::string_view address) noexcept {
    return address.starts_with("ipc://");
}
bool IsIpcFile(std::string_view address) noexcept {
    constexpr std::size_t kScheme = std::string_view{"ipc://"}.size();
    return IsIpc(address) && address.size() > kScheme && address[kScheme] != '@' &&
           address.size() - kScheme < sizeof(sockaddr_un::sun_path);
}
bool IsIpv6Literal(std::string_view address) noexcept {
    return address.starts_with("tcp://[");
}

bool IsIpv4Literal(std::string_view address) {
    constexpr std::string_view kTcp = "tcp://";
    if (!address.starts_with(kTcp)) {
        return false;
    }
    address.remove_prefix(kTcp.size());
    const std::string host{address.substr(0, address.rfind(':'))};
    in_addr parsed{};
    return ::inet_pton(AF_INET, host.c_str(), &parsed) == 1;
}

std::string ZmqErrorText(int error) {
    return ::zmq_strerror(error);
}

}  // namespace rankgate::transport
