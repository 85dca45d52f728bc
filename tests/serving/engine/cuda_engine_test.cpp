#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <optional>
#include <string>

#include "foveal/commands.h"
#include "serving/attention_device.h"
#include "serving/engine.h"
#include "serving/model.h"
#include "serving/tokenizer.h"
#include "test_models.h"

// The engine on a GPU against the engine on the CPU; skipped where there is none.
namespace foveal::serving {
namespace {

using testing::expect_greedy;
using testing::prompts_with_prefix;
using testing::random_model;
using testing::random_tokens;
using testing::serve;
using testing::serve_alone;
using testing::shared_dir;

using Prompts = std::vector<std::vector<std::int32_t>>;

/// Why no test can run; empty when they can.
std::string why_not_cuda() {
  try {
    open_attention_device(DeviceType::cuda);
    return {};
  } catch (const Error& error) {
    return error.what();
  }
}

/// How far from the largest a logit may be that is taken for it.
double tolerance_of(DType dtype) { return dtype == DType::f16 ? 0.01 : 0.1; }

class CudaEngine : public ::testing::TestWithParam<DType> {
 protected:
  void SetUp() override {
    if (const std::string reason = why_not_cuda(); !reason.empty()) {
      GTEST_SKIP() << reason;
    }
    config_.device = DeviceType::cuda;
    config_.dtype = GetParam();
  }

  void expect_same(const Prompts& prompts, const Prompts& outputs, std::int64_t max_tokens) {
    expect_greedy(model_, prompts, outputs, serve_alone(model_, {}, prompts, max_tokens),
                  tolerance_of(GetParam()));
  }

  Model model_ = random_model();
  EngineConfig config_;
};

TEST_P(CudaEngine, GivesTheTokensOfTheCpu) {
  const Prompts prompts = {random_tokens(1, 3), random_tokens(17, 4), random_tokens(33, 5),
                           random_tokens(200, 6)};
  expect_same(prompts, serve(model_, config_, prompts, 20), 20);
  expect_same(prompts, serve_alone(model_, config_, prompts, 20), 20);
}

TEST_P(CudaEngine, ServesABatchWithASharedPrefix) {
  const Prompts prompts = prompts_with_prefix(16);
  EngineStats stats;
  expect_same(prompts, serve(model_, config_, prompts, 20, &stats), 20);
  EXPECT_GE(stats.prefix_hit_tokens, 15 * 32);
}

TEST_P(CudaEngine, ServesChunks) {
  const Prompts prompts = prompts_with_prefix(4);
  config_.max_num_seqs = 4;
  for (const std::int64_t budget : {4, 5, 23, 64}) {
    config_.max_num_batched_tokens = budget;
    SCOPED_TRACE(budget);
    expect_same(prompts, serve(model_, config_, prompts, 20), 20);
  }
}

TEST_P(CudaEngine, ServesOnAfterPreemptions) {
  const Prompts prompts = prompts_with_prefix(6);
  EngineStats stats;
  for (const std::int64_t block_size : {16, 32}) {
    config_.block_size = block_size;
    config_.num_blocks = 1 + 128 / block_size;
    expect_same(prompts, serve(model_, config_, prompts, 60, &stats), 60);
    EXPECT_GT(stats.preemptions, 0);
  }
}

TEST_P(CudaEngine, KeepsTheCacheInFp8) {
  const Prompts prompts = prompts_with_prefix(8);
  for (const DType cache : {DType::f8e4m3, DType::f8e5m2}) {
    config_.kv_cache_dtype = cache;
    // A key at the brink of two fp8 numbers may fall to the other side, and steps are up to a
    // quarter.
    EngineConfig on_cpu;
    on_cpu.dtype = GetParam();
    on_cpu.kv_cache_dtype = cache;
    expect_greedy(model_, prompts, serve(model_, config_, prompts, 10),
                  serve(model_, on_cpu, prompts, 10), 1.0);
  }
}

TEST_P(CudaEngine, GivesTheTextOfTheCpu) {
  struct Case {
    std::filesystem::path model, tokenizer;
    std::string prompt;
  };
  const std::filesystem::path folder = shared_dir() / "data" / "models";
  for (const Case& each :
       {Case{folder / "stories260K.bin", folder / "tok512.bin", "Once upon a time"},
        Case{default_model_path(), {}, "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n"}}) {
    if (!std::filesystem::exists(each.model)) {
      continue;
    }
    const Model model = load_model(each.model);
    const auto tokenizer = load_tokenizer(each.model, each.tokenizer, model.config.vocab_size);
    Prompts prompts = {tokenizer->encode(each.prompt, true)};
    if (const std::optional<std::int32_t> bos = tokenizer->bos()) {
      prompts[0].insert(prompts[0].begin(), *bos);
    }
    EngineConfig config = config_;
    config.max_seq_len = 256;
    EngineConfig on_cpu;
    on_cpu.max_seq_len = 256;
    expect_greedy(model, prompts, serve(model, config, prompts, 64),
                  serve(model, on_cpu, prompts, 64), 5 * tolerance_of(GetParam()));
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, CudaEngine, ::testing::Values(DType::f16, DType::bf16),
                         [](const auto& info) { return std::string(to_string(info.param)); });

TEST(GenerateOnCuda, SaysWhyItCannot) {
  if (why_not_cuda().empty()) {
    GTEST_SKIP() << "there is a GPU";
  }
  CLI::App app;
  int exit_code = -1;
  tools::add_generate_command(app, exit_code);
  ::testing::internal::CaptureStdout();
  std::string message;
  try {
    app.parse("generate --device cuda --prompt hello", false);
  } catch (const Error& error) {
    message = error.what();
  }
  EXPECT_EQ(::testing::internal::GetCapturedStdout(), "");
  EXPECT_NE(message.find("device is cuda"), std::string::npos) << message;
  EXPECT_EQ(message, why_not_cuda());
  EXPECT_EQ(exit_code, -1) << "main makes 1 of an error";
}

}  // namespace
}  // namespace foveal::serving
