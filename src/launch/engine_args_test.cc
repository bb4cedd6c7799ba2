// SPDX-License-Identifier: Apache-2.0
#include "launch/engine_args.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace rankgate::launch {
namespace {

using Argv = std::vector<std::string>;

TEST(EngineArgsTest, ReadsTheGroupSizeInBothForms) {
    EXPECT_EQ(SplitEngineFlags(EngineKind::kVllm, {"--data-parallel-size", "4"}).data_parallel_size, 4);
    EXPECT_EQ(SplitEngineFlags(EngineKind::kVllm, {"--data-parallel-size=2"}).data_parallel_size, 2);
    EXPECT_EQ(SplitEngineFlags(EngineKind::kVllm, {"-dp", "3"}).data_parallel_size, 3);
    EXPECT_EQ(SplitEngineFlags(EngineKind::kTokenSpeed, {"--data-parallel-size=8"}).data_parallel_size, 8);
}

TEST(EngineArgsTest, AnUnparsableSizeIsAWarningNotAGuess) {
    for (const Argv& flags :
         {Argv{"--data-parallel-size", "two"}, Argv{"--data-parallel-size=0"},
          Argv{"--data-parallel-size=-1"}, Argv{"--data-parallel-size", "2x"}, Argv{"--data-parallel-size"},
          Argv{"--data-parallel-size="}, Argv{"--data-parallel-size", "99999999999"}}) {
        const EngineFlags out = SplitEngineFlags(EngineKind::kVllm, flags);
        EXPECT_FALSE(out.data_parallel_size.has_value()) << flags.back();
        ASSERT_EQ(out.warnings.size(), 2u) << flags.back();
        EXPECT_NE(out.warnings[0].find("not guessed"), std::string::npos);
    }
}

TEST(EngineArgsTest, OwnedFlagsAreDroppedAndEverythingElseKeepsItsOrder) {
    const EngineFlags out = SplitEngineFlags(
        EngineKind::kVllm,
        {"--dtype", "bfloat16", "--headless", "--enforce-eager", "--data-parallel-address", "10.0.0.1",
         "--data-parallel-rpc-port=5", "--seed", "-1", "--model=x", "--max-model-len=512"});
    EXPECT_EQ(out.kept,
              (Argv{"--dtype", "bfloat16", "--enforce-eager", "--seed", "-1", "--max-model-len=512"}));
    EXPECT_EQ(out.warnings.size(), 4u);
}

TEST(EngineArgsTest, ADroppedFlagWithoutValueDoesNotEatTheNextOption) {
    const EngineFlags out =
        SplitEngineFlags(EngineKind::kVllm, {"--data-parallel-size", "--enforce-eager", "--headless", "x"});
    EXPECT_EQ(out.kept, (Argv{"--enforce-eager", "x"}));
}

EngineRequest Request(EngineKind kind, int dp) {
    EngineRequest request;
    request.kind = kind;
    request.model = "M";
    request.data_parallel_size = dp;
    request.program = {"prog"};
    return request;
}

TEST(EngineArgsTest, DenseGroupsGetOneLauncherPerRank) {
    const auto commands = BuildCommands(Request(EngineKind::kVllm, 2), {}, 61000, Lockstep::kDense);
    ASSERT_EQ(commands.size(), 2u);
    EXPECT_EQ(commands[0].argv,
              (Argv{"prog", "M", "--headless", "--data-parallel-size", "2", "--data-parallel-size-local", "1",
                    "--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", "61000"}));
    EXPECT_EQ(commands[1].argv,
              (Argv{"prog", "M", "--headless", "--data-parallel-size", "2", "--data-parallel-size-local", "1",
                    "--data-parallel-start-rank", "1", "--data-parallel-address", "127.0.0.1",
                    "--data-parallel-rpc-port", "61000"}));
}

TEST(EngineArgsTest, LockstepAndUnknownGroupsGetOneLauncherForAll) {
    for (const Lockstep lockstep : {Lockstep::kLockstep, Lockstep::kUnknown}) {
        const auto commands = BuildCommands(Request(EngineKind::kVllm, 4), {}, 61000, lockstep);
        ASSERT_EQ(commands.size(), 1u);
        EXPECT_EQ(commands[0].ranks, 4);
        EXPECT_EQ(commands[0].argv[6], "4");  // --data-parallel-size-local
    }
}

TEST(EngineArgsTest, TheUsersOwnCopyOfASharedFlagWins) {
    EngineRequest request = Request(EngineKind::kVllm, 1);
    request.max_model_len = 4096;
    request.max_num_seqs = 16;
    const EngineFlags flags = SplitEngineFlags(EngineKind::kVllm, {"--max-model-len=512"});
    const auto argv = BuildCommands(request, flags, 1, Lockstep::kDense)[0].argv;
    EXPECT_EQ(std::count(argv.begin(), argv.end(), "--max-model-len"), 0);
    EXPECT_EQ(std::count(argv.begin(), argv.end(), "--max-model-len=512"), 1);
    EXPECT_EQ(std::count(argv.begin(), argv.end(), "--max-num-seqs"), 1);
}

TEST(EngineArgsTest, TokenSpeedDefaultsCanBeOverridden) {
    const EngineFlags flags =
        SplitEngineFlags(EngineKind::kTokenSpeed, {"--grammar-backend", "none", "--port", "1"});
    const auto argv =
        BuildTokenSpeedCommands(Request(EngineKind::kTokenSpeed, 2), flags, 25000, 31000)[0].argv;
    EXPECT_EQ(argv, (Argv{"prog", "--headless", "--model", "M", "--port", "31000", "--dist-init-addr",
                          "127.0.0.1:31233", "--data-parallel-size", "2", "--data-parallel-address",
                          "127.0.0.1", "--data-parallel-rpc-port", "25000", "--zmq-engine-index", "0",
                          "--enable-output-logprobs", "--grammar-backend", "none"}));
}

TEST(EngineArgsTest, Qwen3OnTokenSpeedIsExcludedFromGroupsOnly) {
    EngineRequest request = Request(EngineKind::kTokenSpeed, 2);
    request.model = "Qwen/Qwen3-8B";
    ASSERT_FALSE(CheckGroupable(request).ok());
    EXPECT_NE(CheckGroupable(request).error().message.find("Qwen3"), std::string::npos);
    request.data_parallel_size = 1;
    EXPECT_TRUE(CheckGroupable(request).ok());
    request.data_parallel_size = 2;
    request.kind = EngineKind::kVllm;
    EXPECT_TRUE(CheckGroupable(request).ok());
}

TEST(EngineArgsTest, ExpertsInTheConfigMeanLockstep) {
    const std::string dir = testing::TempDir() + "engine_args_test";
    std::filesystem::create_directories(dir);
    const auto write = [&](const char* text) { std::ofstream(dir + "/config.json") << text; };
    EXPECT_EQ(LockstepOf(dir + "/absent"), Lockstep::kUnknown);
    write("{\"num_hidden_layers\": 2}");
    EXPECT_EQ(LockstepOf(dir), Lockstep::kDense);
    write("{\"num_experts\": 2}");
    EXPECT_EQ(LockstepOf(dir), Lockstep::kLockstep);
    write("{\"text_config\": {\"n_routed_experts\": 64}}");
    EXPECT_EQ(LockstepOf(dir), Lockstep::kLockstep);
    write("{broken");
    EXPECT_EQ(LockstepOf(dir), Lockstep::kUnknown);
    std::filesystem::remove_all(dir);
}

TEST(EngineArgsTest, GpuSlicesCoverTensorTimesDataParallel) {
    EXPECT_EQ(**GpuSlice("4,5,6,7", 2, 2), "6,7");
    EXPECT_FALSE((*GpuSlice(nullptr, 0, 2)).has_value());
    const auto tooFew = GpuSlice("0,1", 2, 2);
    ASSERT_FALSE(tooFew.ok());
    EXPECT_NE(tooFew.error().message.find("need 4"), std::string::npos);
}

}  // namespace
}  // namespace rankgate::launch
