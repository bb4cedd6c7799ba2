// SPDX-License-Identifier: Apache-2.0
#include "apps/version.h"

#include <ostream>

namespace rankgate::apps {

void PrintVersion(std::ostream& out) {
    out << "rankgate " << kVersion << "\n  build       g++ " << __VERSION__ << ", " << RANKGATE_BUILD_TYPE
#ifdef RANKGATE_HAS_LLAMA
        << ", llama.cpp"
#endif
#ifdef RANKGATE_HAS_RUST
        << ", tokenizer.json"
#endif
        << "\n  wire        vLLM EngineCore 0.26 and newer (seen: 0.32.0), TokenSpeed 0.1.1 (9 to 14 element "
           "batches)\n"
        << "  handshake   ZeroMQ ROUTER/DEALER, 2-byte little-endian rank identities\n";
}

}  // namespace rankgate::apps
