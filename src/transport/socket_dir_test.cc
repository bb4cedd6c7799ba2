// SPDX-License-Identifier: Apache-2.0
#include "transport/socket_dir.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "wire/handshake.h"

namespace rankgate::transport {
namespace {

class SocketDirTest : public ::testing::Test {
  protected:
    void SetUp() override {
        std::string pattern = "/tmp/rg-dir-XXXXXX";
        ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
        root_ = pattern;
    }
    void TearDown() override { std::filesystem::remove_all(root_); }

    /// Binds a stream socket at `path`; listens if asked. The descriptor stays open until the test ends.
    UniqueFd BindAt(const std::string& path, bool listen) {
        UniqueFd fd{::socket(AF_UNIX, SOCK_STREAM, 0)};
        sockaddr_un address{};
        address.sun_family = AF_UNIX;
        std::strcpy(address.sun_path, path.c_str());
        EXPECT_EQ(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
        if (listen) {
            EXPECT_EQ(::listen(fd.get(), 1), 0);
        }
        return fd;
    }

    std::string root_;
};

TEST_F(SocketDirTest, CreatesMissingDirectoriesPrivately) {
    const std::string path = root_ + "/a/b";
    auto dir = SocketDir::Open(path, 0);
    ASSERT_TRUE(dir.ok()) << dir.error().message;
    struct stat info {};
    ASSERT_EQ(::stat(path.c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777U, 0700U);
    const auto address = dir->Claim("g0-in.sock");
    ASSERT_TRUE(address.ok());
    EXPECT_EQ(*address, "ipc://" + path + "/g0-in.sock");
}

TEST_F(SocketDirTest, RefusesADirectoryThatOthersCanEnterAndSaysHowToCloseIt) {
    ::chmod(root_.c_str(), 0755);
    const auto dir = SocketDir::Open(root_, 0);
    ASSERT_FALSE(dir.ok());
    EXPECT_NE(dir.error().message.find("chmod 700"), std::string::npos);
    EXPECT_EQ(dir.error().param, "--socket-dir");
}

TEST_F(SocketDirTest, RefusesASymbolicLinkAndAFile) {
    ASSERT_EQ(::symlink(root_.c_str(), (root_ + "/link").c_str()), 0);
    EXPECT_FALSE(SocketDir::Open(root_ + "/link", 0).ok());
    std::ofstream(root_ + "/file") << "x";
    EXPECT_FALSE(SocketDir::Open(root_ + "/file", 0).ok());
}

TEST_F(SocketDirTest, RefusesAPathTheKernelWouldTruncateBeforeBinding) {
    const std::string path = root_ + "/" + std::string(100, 'd');
    auto dir = SocketDir::Open(path, 0);
    ASSERT_TRUE(dir.ok());
    const auto address = dir->Claim("g0-in.sock");
    ASSERT_FALSE(address.ok());
    EXPECT_NE(address.error().message.find("107"), std::string::npos) << address.error().message;
}

TEST_F(SocketDirTest, RemovesAStaleSocket) {
    auto dir = SocketDir::Open(root_, 0);
    ASSERT_TRUE(dir.ok());
    BindAt(root_ + "/g0-in.sock", true).reset();  // nobody listens any more, the file stays
    EXPECT_TRUE(dir->Claim("g0-in.sock").ok());
    EXPECT_FALSE(std::filesystem::exists(root_ + "/g0-in.sock"));
}

TEST_F(SocketDirTest, LeavesALiveSocketAlone) {
    auto dir = SocketDir::Open(root_, 0);
    ASSERT_TRUE(dir.ok());
    const UniqueFd live = BindAt(root_ + "/g0-in.sock", true);
    const auto address = dir->Claim("g0-in.sock");
    ASSERT_FALSE(address.ok());
    EXPECT_NE(address.error().message.find("listening"), std::string::npos);
    EXPECT_TRUE(std::filesystem::exists(root_ + "/g0-in.sock"));
}

TEST_F(SocketDirTest, NeverUnlinksAFileThatIsNoSocket) {
    auto dir = SocketDir::Open(root_, 0);
    ASSERT_TRUE(dir.ok());
    std::ofstream(root_ + "/g0-in.sock") << "precious";
    EXPECT_FALSE(dir->Claim("g0-in.sock").ok());
    EXPECT_TRUE(std::filesystem::exists(root_ + "/g0-in.sock"));
}

TEST_F(SocketDirTest, OneGatewayPerGroupAndDirectory) {
    auto first = SocketDir::Open(root_, 0);
    ASSERT_TRUE(first.ok());
    EXPECT_FALSE(SocketDir::Open(root_, 0).ok());
    EXPECT_TRUE(SocketDir::Open(root_, 1).ok());
    *first = SocketDir{};
    EXPECT_TRUE(SocketDir::Open(root_, 0).ok());
}

TEST_F(SocketDirTest, AnonymousDirectoryVanishesAtTheEnd) {
    std::string path;
    {
        auto dir = SocketDir::Open("", 0);
        ASSERT_TRUE(dir.ok());
        EXPECT_FALSE(dir->persistent());
        path = dir->path();
        EXPECT_TRUE(std::filesystem::exists(path));
        ASSERT_TRUE(dir->Claim("x.sock").ok());
        BindAt(path + "/x.sock", true).reset();
    }
    EXPECT_FALSE(std::filesystem::exists(path));
}

LinkFacts SomeFacts() {
    LinkFacts facts;
    facts.dialect = "vllm";
    facts.size = 2;
    facts.handshake = "tcp://127.0.0.1:29550";
    facts.input = "ipc:///x y/in";
    facts.output = "ipc:///x y/out";
    wire::ReadyResponse ready;
    ready.max_model_len = 77;
    ready.num_gpu_blocks = 1;
    ready.block_size = 16;
    ready.vllm_version = "0.32.0";
    wire::EncodeReadyResponse(ready, Dialect::kVllm, facts.ranks[1].raw);
    facts.ranks[1].parallel_config_hash = "abc";
    facts.ranks[1].pid = 4711;
    return facts;
}

TEST_F(SocketDirTest, FactsSurviveARoundTrip) {
    auto dir = SocketDir::Open(root_, 0);
    ASSERT_TRUE(dir.ok());
    auto none = dir->Load(Dialect::kVllm);
    ASSERT_TRUE(none.ok());
    EXPECT_FALSE(none->has_value());
    ASSERT_TRUE(dir->Save(SomeFacts()).ok());
    struct stat info {};
    ASSERT_EQ(::stat((root_ + "/g0.facts").c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777U, 0600U);
    auto facts = dir->Load(Dialect::kVllm);
    ASSERT_TRUE(facts.ok()) << facts.error().message;
    ASSERT_TRUE(facts->has_value());
    EXPECT_EQ((*facts)->input, "ipc:///x y/in");
    EXPECT_EQ((*facts)->size, 2);
    ASSERT_EQ((*facts)->ranks.size(), 1U);
    EXPECT_EQ((*facts)->ranks.at(1).ready.max_model_len, 77);
    EXPECT_EQ((*facts)->ranks.at(1).parallel_config_hash, "abc");
    EXPECT_EQ((*facts)->ranks.at(1).pid, 4711);
}

TEST_F(SocketDirTest, DamagedFactsAreAnErrorAndNeverHalfRead) {
    const std::string text = SerialiseFacts(SomeFacts());
    ASSERT_TRUE(ParseFacts(text, Dialect::kVllm).ok());
    for (std::size_t cut = 0; cut < text.size(); ++cut) {
        EXPECT_FALSE(ParseFacts(std::string_view{text}.substr(0, cut), Dialect::kVllm).ok()) << cut;
    }
    EXPECT_FALSE(ParseFacts(text + "more\n", Dialect::kVllm).ok());
    EXPECT_TRUE(ParseFacts(text, std::nullopt).ok());
    EXPECT_FALSE(ParseFacts(text, Dialect::kTokenSpeed).ok()) << "a declared group takes its own only";
    LinkFacts lying = SomeFacts();
    lying.dialect = "tokenspeed";
    EXPECT_FALSE(ParseFacts(SerialiseFacts(lying), std::nullopt).ok()) << "the ranks are vLLM's";
    EXPECT_FALSE(ParseFacts("rankgate-facts 2\nsize 99999999\nend\n", Dialect::kVllm).ok());
    EXPECT_FALSE(ParseFacts("rankgate-facts 2\nsize 1\nrank 5 00 - 0\nend\n", Dialect::kVllm).ok());
    EXPECT_FALSE(ParseFacts("rankgate-facts 2\nsize 1\nrank 0 zz - 0\nend\n", Dialect::kVllm).ok());
}

TEST_F(SocketDirTest, FactsThatOthersCouldHaveWrittenAreNotTrusted) {
    auto dir = SocketDir::Open(root_, 0);
    ASSERT_TRUE(dir.ok());
    ASSERT_TRUE(dir->Save(SomeFacts()).ok());
    ::chmod((root_ + "/g0.facts").c_str(), 0666);
    EXPECT_FALSE(dir->Load(Dialect::kVllm).ok());
}

}  // namespace
}  // namespace rankgate::transport
