// SPDX-License-Identifier: Apache-2.0
#include "transport/zmtp_message.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "transport/zmtp.h"

namespace rankgate::transport {
namespace {

/// The kernel's own bound of one call.
constexpr std::size_t kMaxPieces = 1024;

}  // namespace

void ZmtpMessage::Begin(std::size_t frames) {
    headers_.resize(frames * kMaxZmtpFrameHeader);
    pieces_.clear();
    size_ = 0;
}

void ZmtpMessage::Add(std::string_view body) {
    const std::size_t at = pieces_.size() / 2 * kMaxZmtpFrameHeader;
    char* header = headers_.data() + at;
    const bool more = at + kMaxZmtpFrameHeader < headers_.size();
    const std::size_t header_size = ZmtpFrameHeader(header, body.size(), more);
    pieces_.push_back({header, header_size});
    pieces_.push_back({const_cast<char*>(body.data()), body.size()});
    size_ += header_size + body.size();
}

ssize_t ZmtpMessage::Send(int fd) {
    msghdr message{};
    message.msg_iov = pieces_.data();
    message.msg_iovlen = std::min(pieces_.size(), kMaxPieces);
    ssize_t n = 0;
    do {
        n = ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (n < 0 && errno == EINTR);
    return n;
}

void ZmtpMessage::AppendTo(std::string& out, std::size_t from) const {
    for (const iovec& piece : pieces_) {
        const std::size_t skipped = std::min(from, piece.iov_len);
        from -= skipped;
        out.append(static_cast<const char*>(piece.iov_base) + skipped, piece.iov_len - skipped);
    }
}

}  // namespace rankgate::transport
