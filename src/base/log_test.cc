// SPDX-License-Identifier: Apache-2.0
#include "base/log.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <string>

#include "base/unique_fd.h"

namespace rankgate {
namespace {

/// stderr as a pipe that this test reads, or does not.
class LogTest : public testing::Test {
  protected:
    LogTest() {
        int ends[2];
        EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
        read_.reset(ends[0]);
        const UniqueFd write{ends[1]};
        ::fcntl(read_.get(), F_SETFL, O_NONBLOCK);
        before_.reset(::dup(STDERR_FILENO));
        ::dup2(write.get(), STDERR_FILENO);
    }
    ~LogTest() override { ::dup2(before_.get(), STDERR_FILENO); }

    std::string Read() const {
        std::string all;
        char buffer[4096];
        for (ssize_t n = 0; (n = ::read(read_.get(), buffer, sizeof buffer)) > 0;) {
            all.append(buffer, static_cast<std::size_t>(n));
        }
        return all;
    }

    UniqueFd read_;
    UniqueFd before_;
};

TEST_F(LogTest, WritesLongLinesWhole) {
    const std::string line(10'000, 'x');
    EXPECT_TRUE(WriteLogLine(line));
    EXPECT_EQ(Read(), line + "\n");
}

TEST_F(LogTest, AReaderThatStandsStillCostsLinesAndNoTime) {
    constexpr int kLines = 2'000;
    int dropped = 0;
    for (int i = 0; i < kLines; ++i) {
        dropped += WriteLogLine(std::string(99, 'x')) ? 0 : 1;  // would block for ever at 64 KiB
    }
    EXPECT_GT(dropped, 0);
    EXPECT_EQ(Read().size(), static_cast<std::size_t>(kLines - dropped) * 100);
    LogWarning("after");
    const std::string text = Read();
    EXPECT_NE(text.find("warning log_lines_dropped lines=" + std::to_string(dropped) + "\n"),
              std::string::npos)
        << text;
    EXPECT_NE(text.find("warning after\n"), std::string::npos) << text;
    LogWarning("again");
    EXPECT_EQ(Read().find("log_lines_dropped"), std::string::npos);
}

TEST_F(LogTest, AFullDiskIsOutlived) {
    const UniqueFd full{::open("/dev/full", O_WRONLY | O_CLOEXEC)};
    ASSERT_TRUE(full.valid());
    ::dup2(full.get(), STDERR_FILENO);
    EXPECT_FALSE(WriteLogLine("line"));
}

}  // namespace
}  // namespace rankgate
