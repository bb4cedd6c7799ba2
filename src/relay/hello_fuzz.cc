// SPDX-License-Identifier: Apache-2.0
// Whatever connects to the leader: any bytes in any portions must end as messages, "need more" or "bad", and
// never grow anything.
#include "relay/control.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    using namespace rankgate::relay;
    MessageParser parser;
    const HelloExpectation expected{7, 4, 0, 0};
    std::size_t at = 0;
    while (at < size) {
        const std::span<std::byte> room = parser.Room();
        if (room.empty()) {
            __builtin_trap();  // the longest message must always fit
        }
        const std::size_t part = std::min({room.size(), size - at, std::size_t{1} + data[at] % 97});
        std::memcpy(room.data(), data + at, part);
        parser.Added(part);
        at += part;
        Message message;
        MessageParser::State state;
        while ((state = parser.Next(&message)) == MessageParser::State::kMessage) {
            if (message.type == MessageType::kHello) {
                const auto refused = CheckHello(message.As<HelloBody>(), expected);
                if (refused && (refused->code == Code::kOk || refused->Describe().empty())) {
                    __builtin_trap();
                }
            } else if (message.type == MessageType::kFail) {
                const Failure failure = message.AsFailure();
                if (failure.code == Code::kOk || CodeName(failure.code) == "unknown" ||
                    failure.Describe().size() > 1024) {
                    __builtin_trap();
                }
            }
        }
        if (state == MessageParser::State::kBad) {
            break;
        }
    }
    return 0;
}
