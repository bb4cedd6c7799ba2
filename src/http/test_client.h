// SPDX-License-Identifier: Apache-2.0
// A raw blocking socket with deadlines, for tests that must see every byte. Failures are values, so that a
// test says what it expected.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "base/unique_fd.h"

namespace rankgate::http {

struct RawReply {
    int status{0};
    std::string head;  // lower-cased names are not guaranteed; see Header
    std::string body;  // chunked coding undone
    bool complete{false};

    std::string Header(std::string_view name) const {
        std::size_t at = 0;
        while ((at = head.find("\r\n", at)) != std::string::npos) {
            at += 2;
            if (head.size() >= at + name.size() + 1 &&
                ::strncasecmp(head.data() + at, name.data(), name.size()) == 0 &&
                head[at + name.size()] == ':') {
                std::size_t begin = at + name.size() + 1;
                while (begin < head.size() && head[begin] == ' ') {
                    ++begin;
                }
                return head.substr(begin, head.find("\r\n", begin) - begin);
            }
        }
        return {};
    }
    bool Has(std::string_view name) const { return !Header(name).empty(); }
};

class RawClient {
  public:
    static constexpr std::chrono::seconds kPatience{10};

    explicit RawClient(std::uint16_t port, int receive_buffer = 0)
        : fd_{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)} {
        if (receive_buffer > 0) {
            ::setsockopt(fd_.get(), SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof receive_buffer);
        }
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_port = htons(port);
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        connected_ = ::connect(fd_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
        const int one = 1;
        ::setsockopt(fd_.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    }
    explicit RawClient(const std::string& unix_path) : fd_{::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)} {
        sockaddr_un address{};
        address.sun_family = AF_UNIX;
        std::strncpy(address.sun_path, unix_path.c_str(), sizeof address.sun_path - 1);
        connected_ = ::connect(fd_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
    }

    bool connected() const { return connected_; }
    int fd() const { return fd_.get(); }

    bool Send(std::string_view bytes) {
        while (!bytes.empty()) {
            const ssize_t n = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
            if (n <= 0) {
                return false;
            }
            bytes.remove_prefix(static_cast<std::size_t>(n));
        }
        return true;
    }

    void HalfClose() { ::shutdown(fd_.get(), SHUT_WR); }
    void Close() { fd_.reset(); }
    void Reset() {
        const linger hard{1, 0};
        ::setsockopt(fd_.get(), SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
        fd_.reset();
    }

    /// More bytes into the buffer; false at EOF, reset or after `patience`.
    bool Fill(std::chrono::milliseconds patience = kPatience) {
        pollfd ready{fd_.get(), POLLIN, 0};
        if (::poll(&ready, 1, static_cast<int>(patience.count())) <= 0) {
            return false;
        }
        char chunk[16384];
        const ssize_t n = ::recv(fd_.get(), chunk, sizeof chunk, 0);
        if (n <= 0) {
            eof_ = n == 0;
            reset_ = n < 0 && errno == ECONNRESET;
            return false;
        }
        buffer_.append(chunk, static_cast<std::size_t>(n));
        return true;
    }

    /// True if the peer closes (FIN or RST) within `patience` and sends nothing more.
    bool ClosedWithin(std::chrono::milliseconds patience) {
        const auto deadline = std::chrono::steady_clock::now() + patience;
        while (std::chrono::steady_clock::now() < deadline) {
            if (!Fill(std::chrono::duration_cast<std::chrono::milliseconds>(
                    deadline - std::chrono::steady_clock::now()))) {
                return eof_ || reset_;
            }
        }
        return false;
    }
    bool eof() const { return eof_; }
    bool reset() const { return reset_; }

    /// Reads until `text` was seen; returns everything up to its end and keeps the rest.
    std::string ReadUntil(std::string_view text, std::chrono::milliseconds patience = kPatience) {
        for (;;) {
            if (const std::size_t at = buffer_.find(text); at != std::string::npos) {
                std::string out = buffer_.substr(0, at + text.size());
                buffer_.erase(0, at + text.size());
                return out;
            }
            if (!Fill(patience)) {
                return {};
            }
        }
    }

    /// One whole answer. `head_only` for answers to HEAD.
    RawReply Read(bool head_only = false) {
        RawReply reply;
        reply.head = ReadUntil("\r\n\r\n");
        if (reply.head.size() < 12) {
            return reply;
        }
        reply.status = std::atoi(reply.head.c_str() + 9);
        if (head_only || reply.status == 204 || reply.status == 100) {
            reply.complete = true;
            return reply;
        }
        if (reply.Header("transfer-encoding") == "chunked") {
            for (;;) {
                const std::string line = ReadUntil("\r\n");
                if (line.empty()) {
                    return reply;
                }
                const auto size = static_cast<std::size_t>(std::strtoul(line.c_str(), nullptr, 16));
                const std::string chunk = ReadExactly(size + 2);
                if (chunk.size() != size + 2) {
                    return reply;
                }
                if (size == 0) {
                    reply.complete = true;
                    return reply;
                }
                reply.body += chunk.substr(0, size);
            }
        }
        if (reply.Has("content-length")) {
            const auto size =
                static_cast<std::size_t>(std::strtoul(reply.Header("content-length").c_str(), nullptr, 10));
            reply.body = ReadExactly(size);
            reply.complete = reply.body.size() == size;
            return reply;
        }
        while (Fill()) {
        }
        reply.body = std::move(buffer_);
        buffer_.clear();
        reply.complete = eof_;
        return reply;
    }

    std::string ReadExactly(std::size_t size) {
        while (buffer_.size() < size) {
            if (!Fill()) {
                break;
            }
        }
        std::string out = buffer_.substr(0, size);
        buffer_.erase(0, size);
        return out;
    }

    const std::string& buffered() const { return buffer_; }

  private:
    UniqueFd fd_;
    std::string buffer_;
    bool connected_{false};
    bool eof_{false};
    bool reset_{false};
};

inline std::string Get(std::string_view path, std::string_view headers = "") {
    return "GET " + std::string{path} + " HTTP/1.1\r\nHost: t\r\n" + std::string{headers} + "\r\n";
}
inline std::string Post(std::string_view path, std::string_view body, std::string_view headers = "") {
    return "POST " + std::string{path} +
           " HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: " +
           std::to_string(body.size()) + "\r\n" + std::string{headers} + "\r\n" + std::string{body};
}

}  // namespace rankgate::http
