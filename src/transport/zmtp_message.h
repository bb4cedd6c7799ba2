// SPDX-License-Identifier: Apache-2.0
// One message on its way into a socket: its frames with their ZMTP headers, in one system call and without a
// copy of what the socket takes. Used by both native sockets (zmtp_socket.h, zmtp_dialer.h); one thread.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace rankgate::transport {

class ZmtpMessage {
  public:
    /// Exactly `frames` calls of Add follow. The memory of the message before is used again.
    void Begin(std::size_t frames);
    /// A view, until Send and AppendTo are done.
    void Add(std::string_view body);
    /// Bytes, headers included.
    std::size_t size() const noexcept { return size_; }
    /// What a socket takes of it at once, without waiting; -1 with errno.
    ssize_t Send(int fd);
    /// What is behind its first `from` bytes.
    void AppendTo(std::string& out, std::size_t from) const;

  private:
    std::vector<char> headers_;
    std::vector<iovec> pieces_;  // header, body, header, body, ...
    std::size_t size_{0};
};

}  // namespace rankgate::transport
