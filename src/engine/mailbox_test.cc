// SPDX-License-Identifier: Apache-2.0
#include "engine/mailbox.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>

namespace rankgate::engine {
namespace {

class LoadPageTest : public ::testing::Test {
  protected:
    void SetUp() override {
        std::string pattern = ::testing::TempDir() + "/rgpageXXXXXX";
        ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
        directory_ = pattern + "/pages";
        root_ = pattern;
    }
    void TearDown() override {
        ::rmdir(directory_.c_str());
        ::rmdir(root_.c_str());
    }
    std::string directory_;
    std::string root_;
};

wire::LoadSnapshot Load(std::int64_t n) {
    wire::LoadSnapshot load;
    load.num_running = n;
    load.num_waiting = 2 * n;
    load.kv_active_pages = 3 * n;
    load.kv_total_pages = 4 * n + 1;
    load.step_counter = n;
    return load;
}

TEST_F(LoadPageTest, ReaderSeesWhatWasPublishedAndHowOldItIs) {
    LoadPageWriter writer;
    ASSERT_TRUE(writer.Open(directory_, "rank0").ok());
    LoadPageReader reader;
    ASSERT_TRUE(reader.Open(writer.path()).ok());
    EXPECT_FALSE(reader.Read().has_value()) << "nothing published yet";
    writer.Publish(Load(7));
    const auto reading = reader.Read();
    ASSERT_TRUE(reading.has_value());
    EXPECT_EQ(reading->load.num_running, 7);
    EXPECT_EQ(reading->load.num_waiting, 14);
    EXPECT_EQ(reading->load.kv_active_pages, 21);
    EXPECT_EQ(reading->load.kv_total_pages, 29);
    EXPECT_NEAR(reading->load.kv_usage, 21.0 / 29.0, 1e-9);
    EXPECT_GE(reading->age_ns, 0);
    EXPECT_FALSE(reader.WriterGone());
}

TEST_F(LoadPageTest, FileIsPrivateAndGoesWithItsWriter) {
    std::string path;
    LoadPageReader reader;
    {
        LoadPageWriter writer;
        ASSERT_TRUE(writer.Open(directory_, "rank0").ok());
        path = writer.path();
        struct stat info {};
        ASSERT_EQ(::stat(path.c_str(), &info), 0);
        EXPECT_EQ(info.st_mode & 0777, 0600u);
        ASSERT_EQ(::stat(directory_.c_str(), &info), 0);
        EXPECT_EQ(info.st_mode & 0777, 0700u);
        writer.Publish(Load(1));
        ASSERT_TRUE(reader.Open(path).ok());
    }
    EXPECT_FALSE(reader.Read().has_value());
    EXPECT_TRUE(reader.WriterGone());
    EXPECT_NE(::access(path.c_str(), F_OK), 0);
}

TEST_F(LoadPageTest, RefusesAnOpenDirectoryAndAForeignFile) {
    ASSERT_EQ(::mkdir(directory_.c_str(), 0755), 0);
    LoadPageWriter writer;
    EXPECT_FALSE(writer.Open(directory_, "rank0").ok());
    ASSERT_EQ(::chmod(directory_.c_str(), 0700), 0);
    const std::string path = directory_ + "/short";
    FILE* file = ::fopen(path.c_str(), "w");
    ASSERT_NE(file, nullptr);
    ::fputs("RGLOAD1", file);
    ::fclose(file);
    ::chmod(path.c_str(), 0600);
    LoadPageReader reader;
    EXPECT_FALSE(reader.Open(path).ok()) << "a short file would be a SIGBUS";
    ASSERT_EQ(::truncate(path.c_str(), static_cast<off_t>(kLoadPageSize)), 0);
    EXPECT_FALSE(reader.Open(path).ok()) << "wrong version";
    ::unlink(path.c_str());
    EXPECT_FALSE(reader.Open("relative").ok());
}

TEST_F(LoadPageTest, NewWriterGetsANewEpochAndAFreshFile) {
    LoadPageReader old_reader;
    LoadPageReader new_reader;
    auto first = std::make_unique<LoadPageWriter>();
    ASSERT_TRUE(first->Open(directory_, "rank0").ok());
    first->Publish(Load(1));
    ASSERT_TRUE(old_reader.Open(first->path()).ok());
    LoadPageWriter second;
    ASSERT_TRUE(second.Open(directory_, "rank0").ok());
    second.Publish(Load(2));
    ASSERT_TRUE(new_reader.Open(second.path()).ok());
    EXPECT_EQ(old_reader.Read()->load.num_running, 1);
    EXPECT_EQ(new_reader.Read()->load.num_running, 2);
    EXPECT_NE(old_reader.Read()->epoch, new_reader.Read()->epoch);
}

TEST_F(LoadPageTest, ReaderNoticesADeadWriter) {
    int pipe_fds[2];
    ASSERT_EQ(::pipe(pipe_fds), 0);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
        auto* writer = new LoadPageWriter;  // never destroyed: dies like a killed engine
        if (!writer->Open(directory_, "rank0").ok()) {
            ::_exit(1);
        }
        writer->Publish(Load(1));
        (void)!::write(pipe_fds[1], "x", 1);
        ::pause();
        ::_exit(0);
    }
    char byte = 0;
    ASSERT_EQ(::read(pipe_fds[0], &byte, 1), 1);
    LoadPageReader reader;
    ASSERT_TRUE(reader.Open(directory_ + "/rank0").ok());
    EXPECT_FALSE(reader.WriterGone());
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    EXPECT_TRUE(reader.WriterGone());
    ::unlink((directory_ + "/rank0").c_str());
    ::close(pipe_fds[0]);
    ::close(pipe_fds[1]);
}

TEST_F(LoadPageTest, NeverATornSampleUnderARacingWriter) {
    LoadPageWriter writer;
    ASSERT_TRUE(writer.Open(directory_, "rank0").ok());
    writer.Publish(Load(1));
    LoadPageReader reader;
    ASSERT_TRUE(reader.Open(writer.path()).ok());
    std::atomic<bool> stop{false};
    std::thread thread{[&] {
        for (std::int64_t n = 1; !stop.load(std::memory_order_relaxed); ++n) {
            writer.Publish(Load(n));
        }
    }};
    // As many whole samples as it takes, not as many tries: on a busy machine the writer may be stopped in
    // the middle of a sample for a whole time slice, and every try fails meanwhile.
    int seen = 0;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (seen <= 100'000 && std::chrono::steady_clock::now() < deadline) {
        if (const auto reading = reader.Read()) {
            const auto& load = reading->load;
            ASSERT_EQ(load.num_waiting, 2 * load.num_running);
            ASSERT_EQ(load.kv_active_pages, 3 * load.num_running);
            ASSERT_EQ(load.kv_total_pages, 4 * load.num_running + 1);
            ++seen;
        }
    }
    stop.store(true);
    thread.join();
    EXPECT_GT(seen, 100'000);
}

}  // namespace
}  // namespace rankgate::engine
