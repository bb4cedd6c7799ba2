// SPDX-License-Identifier: Apache-2.0
// One-thread epoll client of the gateway bench: C keep-alive connections, each with one request after the
// other. Connections are opened first; it prints READY, waits for a line on stdin (the caller notes the
// server's CPU time), runs, and prints one JSON line. Every answer is checked: status 200, the right
// completion_tokens in `usage`, [DONE] for streams.
//   loader PORT KIND C REQUESTS_PER_CONNECTION TOKENS POLL_US     KIND: stream | whole | chat-stream |
//   chat-whole
// POLL_US > 0: looks at its sockets that often only, so that the server does not pay for waking this process.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

namespace {

double Now() {
    timespec now{};
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

struct Connection {
    int fd{-1};
    std::string request;
    int left{0};
    double sent{0};
    double first{0};
    double last{0};
    std::string tail;     // the end of what was read: enough to see ends and usage across reads
    std::size_t need{0};  // whole answers: bytes of head and body
    std::size_t got{0};
    bool done{false};
};

double Percentile(std::vector<double>& values, double p) {
    if (values.empty()) {
        return 0;
    }
    const auto at = static_cast<std::size_t>(p * static_cast<double>(values.size() - 1));
    std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(at), values.end());
    return values[at];
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 7) {
        std::fprintf(stderr, "usage: loader PORT KIND C REQUESTS TOKENS POLL_US\n");
        return 2;
    }
    const int port = std::atoi(argv[1]);
    const std::string kind = argv[2];
    const int count = std::atoi(argv[3]);
    const int requests = std::atoi(argv[4]);
    const int tokens = std::atoi(argv[5]);
    const int poll_us = std::atoi(argv[6]);
    const bool stream = kind.ends_with("stream");
    const bool chat = kind.starts_with("chat");
    const std::string usage = "\"completion_tokens\":" + std::to_string(tokens);

    const int poller = ::epoll_create1(0);
    std::vector<Connection> connections(static_cast<std::size_t>(count));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int one = 1;
    for (std::size_t i = 0; i < connections.size(); ++i) {
        Connection& connection = connections[i];
        connection.fd = ::socket(AF_INET, SOCK_STREAM, 0);
        if (::connect(connection.fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
            std::perror("connect");
            return 1;
        }
        ::setsockopt(connection.fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        const std::string number = std::to_string(i);
        const std::string prompt =
            chat ? "\"messages\":[{\"role\":\"user\",\"content\":\"tell me about " + number + "\"}]"
                 : "\"prompt\":\"tell me about number " + number + "\"";
        const std::string body =
            "{\"model\":\"m\"," + prompt + ",\"max_tokens\":" + std::to_string(tokens) +
            ",\"ignore_eos\":true,\"temperature\":0" +
            (stream ? ",\"stream\":true,\"stream_options\":{\"include_usage\":true}" : "") + "}";
        connection.request = std::string{"POST "} + (chat ? "/v1/chat/completions" : "/v1/completions") +
                             " HTTP/1.1\r\nHost: localhost\r\nUser-Agent: loader\r\nAccept: "
                             "application/json\r\nContent-Type: application/json\r\n"
                             "Content-Length: " +
                             std::to_string(body.size()) + "\r\n\r\n" + body;
        connection.left = requests;
        epoll_event event{};
        event.events = EPOLLIN;
        event.data.u64 = i;
        ::epoll_ctl(poller, EPOLL_CTL_ADD, connection.fd, &event);
    }
    std::printf("READY\n");
    std::fflush(stdout);
    std::string line;
    std::getline(std::cin, line);

    std::vector<double> first_tokens;
    std::vector<double> gaps;
    std::vector<double> whole;
    long answers = 0;
    long bad = 0;
    long reads = 0;
    int open = count;
    const double begin = Now();
    const auto send = [&](Connection& connection) {
        connection.sent = Now();
        connection.first = 0;
        connection.tail.clear();
        connection.need = 0;
        connection.got = 0;
        --connection.left;
        if (::send(connection.fd, connection.request.data(), connection.request.size(), MSG_NOSIGNAL) !=
            static_cast<ssize_t>(connection.request.size())) {
            ++bad;
        }
    };
    for (Connection& connection : connections) {
        send(connection);
    }
    std::vector<epoll_event> events(1024);
    static char buffer[1 << 18];
    double progress = begin;
    while (open > 0) {
        if (poll_us > 0) {
            ::usleep(static_cast<useconds_t>(poll_us));
        }
        const int ready =
            ::epoll_wait(poller, events.data(), static_cast<int>(events.size()), poll_us > 0 ? 0 : 1000);
        const double now = Now();
        if (ready > 0) {
            progress = now;
        } else if (now - progress > 30) {
            std::fprintf(stderr, "loader: nothing came for 30 s, %d connections open\n", open);
            return 1;
        }
        for (int i = 0; i < ready; ++i) {
            Connection& connection = connections[events[static_cast<std::size_t>(i)].data.u64];
            const ssize_t n = ::recv(connection.fd, buffer, sizeof buffer, MSG_DONTWAIT);
            if (n <= 0) {
                if (n < 0 && errno == EAGAIN) {
                    continue;
                }
                ++bad;
                --open;
                ::epoll_ctl(poller, EPOLL_CTL_DEL, connection.fd, nullptr);
                continue;
            }
            ++reads;
            connection.tail.append(buffer, static_cast<std::size_t>(n));
            bool end = false;
            if (stream) {
                if (connection.first == 0 && connection.tail.find("\n\n") != std::string::npos) {
                    connection.first = now;
                    first_tokens.push_back(now - connection.sent);
                    if (!connection.tail.starts_with("HTTP/1.1 200")) {
                        ++bad;
                    }
                } else if (connection.first != 0) {
                    gaps.push_back(now - connection.last);
                }
                connection.last = now;
                end = connection.tail.ends_with("\r\n0\r\n\r\n");
                if (end) {
                    bad += connection.tail.find("data: [DONE]") == std::string::npos ||
                                   connection.tail.find(usage) == std::string::npos
                               ? 1
                               : 0;
                } else if (connection.first == 0 && connection.tail.size() > 4096) {
                    ++bad;
                    end = true;
                } else if (connection.first != 0 && connection.tail.size() > 1024) {
                    connection.tail.erase(0, connection.tail.size() - 1024);
                }
            } else {
                if (connection.need == 0) {
                    const std::size_t head = connection.tail.find("\r\n\r\n");
                    std::size_t length = connection.tail.find("Content-Length: ");
                    if (length == std::string::npos) {
                        length = connection.tail.find("content-length: ");
                    }
                    if (head != std::string::npos && length != std::string::npos) {
                        connection.need =
                            head + 4 +
                            static_cast<std::size_t>(std::atoi(connection.tail.c_str() + length + 16));
                    }
                }
                end = connection.need != 0 && connection.tail.size() >= connection.need;
                if (end) {
                    bad += connection.tail.starts_with("HTTP/1.1 200") &&
                                   connection.tail.find(usage) != std::string::npos
                               ? 0
                               : 1;
                }
            }
            if (end) {
                ++answers;
                whole.push_back(now - connection.sent);
                if (connection.left > 0) {
                    send(connection);
                } else {
                    --open;
                    ::epoll_ctl(poller, EPOLL_CTL_DEL, connection.fd, nullptr);
                }
            }
        }
    }
    const double seconds = Now() - begin;
    std::printf(
        "{\"answers\":%ld,\"bad\":%ld,\"seconds\":%.6f,\"tokens\":%ld,\"reads\":%ld,\"ttft_p50_us\":%.1f,"
        "\"ttft_p99_us\":%.1f,"
        "\"gap_p50_us\":%.1f,\"gap_p99_us\":%.1f,\"whole_p50_us\":%.1f,\"whole_p99_us\":%.1f}\n",
        answers, bad, seconds, answers * tokens, reads, Percentile(first_tokens, 0.5) * 1e6,
        Percentile(first_tokens, 0.99) * 1e6, Percentile(gaps, 0.5) * 1e6, Percentile(gaps, 0.99) * 1e6,
        Percentile(whole, 0.5) * 1e6, Percentile(whole, 0.99) * 1e6);
    return bad == 0 ? 0 : 1;
}
