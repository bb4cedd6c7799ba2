// SPDX-License-Identifier: Apache-2.0
// Test helper: prints what LoadPageReader makes of a page, one line, so that writers in other languages can
// be checked.
#include <cstdio>
#include <string>

#include "engine/mailbox.h"

int main(int argc, char** argv) {
    rankgate::engine::LoadPageReader reader;
    if (argc != 2) {
        return 2;
    }
    if (const rankgate::Status opened = reader.Open(argv[1]); !opened.ok()) {
        std::printf("refused %s\n", opened.error().message.c_str());
        return 1;
    }
    const auto reading = reader.Read();
    if (!reading.has_value()) {
        std::printf("nothing gone=%d\n", reader.WriterGone() ? 1 : 0);
        return 0;
    }
    const auto& load = reading->load;
    std::printf("%lld %lld %lld %lld %lld fresh=%d gone=%d\n", static_cast<long long>(load.num_running),
                static_cast<long long>(load.num_waiting), static_cast<long long>(load.kv_active_pages),
                static_cast<long long>(load.kv_total_pages), static_cast<long long>(load.step_counter),
                reading->age_ns >= 0 && reading->age_ns < 60'000'000'000 ? 1 : 0,
                reader.WriterGone() ? 1 : 0);
    return 0;
}
