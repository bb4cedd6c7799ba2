// SPDX-License-Identifier: Apache-2.0
// Any bytes as the load page of a rank: opened or refused, and what is read from it is plausible. The first
// byte chooses whether magic, version and sequence are put right, or nothing behind the first comparison is
// reached.
#include <fcntl.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "base/check.h"
#include "base/fuzz_directory.h"
#include "engine/mailbox.h"

namespace {

// One file for the life of the process, in a directory of mode 0700.
const std::string& PagePath() {
    static const std::string path = rankgate::FuzzDirectory("load-page") + "/page";
    return path;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    using namespace rankgate::engine;
    if (size < 1) {
        return 0;
    }
    const std::uint8_t mend = data[0];
    std::string page{reinterpret_cast<const char*>(data) + 1, size - 1};
    if ((mend & 1) != 0) {
        page.resize(kLoadPageSize);
    }
    if ((mend & 2) != 0 && page.size() >= 40) {
        const std::uint64_t version = kLoadPageVersion;
        std::memcpy(page.data(), "RGLOAD1", 8);
        std::memcpy(page.data() + 8, &version, sizeof version);
        page[32] = static_cast<char>(page[32] & ~1);
    }
    if ((mend & 4) != 0 && page.size() >= 96) {
        std::memset(page.data() + 88, 0, 8);  // not closed
    }
    const int fd = ::open(PagePath().c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
    RG_CHECK(fd >= 0 && ::write(fd, page.data(), page.size()) == static_cast<ssize_t>(page.size()));
    ::close(fd);

    LoadPageReader reader;
    const rankgate::Status opened = reader.Open(PagePath());
    RG_CHECK(opened.ok() == reader.is_open());
    if (!opened.ok()) {
        RG_CHECK(!opened.error().message.empty() && !reader.Read() && reader.WriterGone());
        return 0;
    }
    RG_CHECK(page.size() >= kLoadPageSize);
    if (const auto reading = reader.Read()) {
        const auto& load = reading->load;
        RG_CHECK(load.num_running >= 0 && load.num_waiting >= 0);
        RG_CHECK(load.kv_active_pages >= 0 && load.kv_active_pages <= load.kv_total_pages);
        // Without a total the share is unknown, which is a negative number.
        RG_CHECK(load.kv_total_pages == 0 ? load.kv_usage < 0 : load.kv_usage >= 0 && load.kv_usage <= 1);
        RG_CHECK(reading->age_ns >= 0);
    }
    (void)reader.WriterGone();
    return 0;
}
