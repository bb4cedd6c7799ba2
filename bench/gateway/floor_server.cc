// SPDX-License-Identifier: Apache-2.0
// The floor: a one-thread epoll server that answers every completion request with canned SSE chunks, one
// send() per chunk. No tokenizer, no engine, no JSON: what remains is the kernel's own price of the traffic,
// to which the gateway is compared.
//   floor_server PORT STEP_US [ECHO_CPU]     (0 = flat out: every stream gets a chunk in each round)
// With ECHO_CPU, a second process on that CPU is asked first, over a UNIX socket, and sends back what it got:
// the hand-overs that an engine in a process of its own costs a first token, and nothing else.
// Build: g++ -O2 -std=c++20 floor_server.cc
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace {

struct Connection {
    int fd{-1};
    std::string in;
    int left{0};  // chunks still to send
    bool listed{false};
};

const std::string kChunk = [] {
    std::string event =
        "data: "
        "{\"id\":\"cmpl-000000000000000000000000\",\"object\":\"text_completion\",\"created\":1700000000,"
        "\"model\":\"m\","
        "\"choices\":[{\"index\":0,\"text\":\"a\",\"logprobs\":null,\"finish_reason\":null}]}\n\n";
    char head[16];
    std::snprintf(head, sizeof head, "%zx\r\n", event.size());
    return head + event + "\r\n";
}();
const std::string kHead =
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
const std::string kEndEvent = "data: {\"choices\":[],\"usage\":{\"completion_tokens\":";

std::string End(int tokens) {
    const std::string event = kEndEvent + std::to_string(tokens) + "}}\n\ndata: [DONE]\n\n";
    char head[16];
    std::snprintf(head, sizeof head, "%zx\r\n", event.size());
    return head + event + "\r\n0\r\n\r\n";
}

void Send(int fd, std::string_view bytes) {
    while (!bytes.empty()) {
        const ssize_t n = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
        if (n < 0) {
            if (errno == EAGAIN) {
                ::usleep(100);
                continue;
            }
            return;
        }
        bytes.remove_prefix(static_cast<std::size_t>(n));
    }
}

int Number(const std::string& text, const char* key) {
    const std::size_t at = text.find(key);
    return at == std::string::npos ? 16 : std::atoi(text.c_str() + at + std::strlen(key));
}

/// Starts the process that echoes; returns our end of its socket.
int StartEcho(int cpu) {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) {
        std::perror("socketpair");
        std::exit(1);
    }
    if (::fork() == 0) {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        ::close(ends[0]);
        cpu_set_t cpus;
        CPU_ZERO(&cpus);
        CPU_SET(cpu, &cpus);
        ::sched_setaffinity(0, sizeof cpus, &cpus);
        const int poller = ::epoll_create1(0);  // it waits as an engine does
        epoll_event event{};
        event.events = EPOLLIN;
        ::epoll_ctl(poller, EPOLL_CTL_ADD, ends[1], &event);
        char buffer[4096];
        for (;;) {
            ::epoll_wait(poller, &event, 1, -1);
            const ssize_t n = ::recv(ends[1], buffer, sizeof buffer, 0);
            if (n <= 0 || ::send(ends[1], buffer, static_cast<std::size_t>(n), 0) != n) {
                ::_exit(0);
            }
        }
    }
    ::close(ends[1]);
    return ends[0];
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3 && argc != 4) {
        std::fprintf(stderr, "usage: floor_server PORT STEP_US [ECHO_CPU]\n");
        return 2;
    }
    const int step_us = std::atoi(argv[2]);
    const int listener = ::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    const int one = 1;
    ::setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(std::atoi(argv[1])));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (::bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 ||
        ::listen(listener, 4096) != 0) {
        std::perror("bind");
        return 1;
    }
    const int poller = ::epoll_create1(0);
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = listener;
    ::epoll_ctl(poller, EPOLL_CTL_ADD, listener, &event);
    int timer = -1;
    if (step_us > 0) {
        timer = ::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
        itimerspec every{};
        every.it_interval.tv_sec = every.it_value.tv_sec = step_us / 1000000;
        every.it_interval.tv_nsec = every.it_value.tv_nsec = (step_us % 1000000) * 1000L;
        ::timerfd_settime(timer, 0, &every, nullptr);
        event.data.fd = timer;
        ::epoll_ctl(poller, EPOLL_CTL_ADD, timer, &event);
    }
    const int echo = argc == 4 ? StartEcho(std::atoi(argv[3])) : -1;
    if (echo >= 0) {
        event.data.fd = echo;
        ::epoll_ctl(poller, EPOLL_CTL_ADD, echo, &event);
    }
    constexpr std::size_t kQuestion = 200;  // bytes, as many as a small ADD has
    std::size_t echoed = 0;
    std::deque<int> asked;
    std::unordered_map<int, Connection> connections;
    std::vector<int> running;
    std::unordered_map<int, int> wanted;
    const auto step = [&] {
        std::vector<int> next;
        next.reserve(running.size());
        for (const int fd : running) {
            Connection& connection = connections[fd];
            if (connection.left > 0) {
                Send(fd, kChunk);
                --connection.left;
            }
            if (connection.left > 0) {
                next.push_back(fd);
            } else {
                Send(fd, End(wanted[fd]));
                connection.listed = false;
            }
        }
        running = std::move(next);
    };
    const auto start = [&](int fd) {
        if (connections.find(fd) == connections.end()) {
            return;
        }
        Send(fd, kHead);
        connections[fd].listed = true;
        running.push_back(fd);
    };
    epoll_event events[256];
    for (;;) {
        const int ready = ::epoll_wait(poller, events, 256, step_us == 0 && !running.empty() ? 0 : -1);
        for (int i = 0; i < ready; ++i) {
            const int fd = events[i].data.fd;
            if (fd == listener) {
                int accepted = 0;
                while ((accepted = ::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK)) >= 0) {
                    ::setsockopt(accepted, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                    connections[accepted].fd = accepted;
                    event.events = EPOLLIN;
                    event.data.fd = accepted;
                    ::epoll_ctl(poller, EPOLL_CTL_ADD, accepted, &event);
                }
                continue;
            }
            if (fd == timer) {
                std::uint64_t ticks = 0;
                if (::read(timer, &ticks, sizeof ticks) > 0) {
                    step();
                }
                continue;
            }
            char buffer[16384];
            if (fd == echo) {
                const ssize_t n = ::recv(echo, buffer, sizeof buffer, 0);
                if (n <= 0) {
                    return 1;
                }
                for (echoed += static_cast<std::size_t>(n); echoed >= kQuestion && !asked.empty();
                     echoed -= kQuestion) {
                    start(asked.front());
                    asked.pop_front();
                }
                continue;
            }
            const ssize_t n = ::recv(fd, buffer, sizeof buffer, 0);
            if (n <= 0) {
                for (std::size_t k = 0; k < running.size(); ++k) {
                    if (running[k] == fd) {
                        running.erase(running.begin() + static_cast<std::ptrdiff_t>(k));
                        break;
                    }
                }
                connections.erase(fd);
                ::close(fd);
                continue;
            }
            Connection& connection = connections[fd];
            connection.in.append(buffer, static_cast<std::size_t>(n));
            for (;;) {
                const std::size_t end = connection.in.find("\r\n\r\n");
                if (end == std::string::npos) {
                    break;
                }
                const std::size_t size =
                    connection.in.find("Content-Length: ") < end
                        ? static_cast<std::size_t>(
                              std::atoi(connection.in.c_str() + connection.in.find("Content-Length: ") + 16))
                        : 0;
                if (connection.in.size() < end + 4 + size) {
                    break;
                }
                const std::string request = connection.in.substr(0, end + 4 + size);
                connection.in.erase(0, request.size());
                const int tokens = Number(request, "\"max_tokens\":");
                if (request.find("\"stream\":true") == std::string::npos) {
                    const std::string body =
                        "{\"choices\":[{\"text\":\"a\"}],\"usage\":{\"completion_tokens\":" +
                        std::to_string(tokens) + "}}";
                    Send(fd, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: " +
                                 std::to_string(body.size()) + "\r\n\r\n" + body);
                    continue;
                }
                wanted[fd] = tokens;
                connection.left = tokens;
                if (echo >= 0) {
                    asked.push_back(fd);
                    Send(echo, std::string(kQuestion, '.'));
                } else {
                    start(fd);
                }
            }
        }
        if (step_us == 0 && !running.empty()) {
            step();
        }
    }
}
