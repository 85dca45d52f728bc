#include <gtest/gtest.h>
#include <stdlib.h>

#include "foveal/registry.h"
#include "serving/engine.h"
#include "stand_in_flash_attn.h"
#include "support/expect_error.h"
#include "test_models.h"

// The engine's way to a CUDA device and back, on machines without one: against the libcuda.so.1 of
// tests/cuda/fake_driver.cpp, whose device memory is host memory, and with a stand-in for
// FLASH_ATTN. All tokens must be those of CPU_ATTN in the same dtype, exactly.
namespace foveal::serving {
namespace {

using foveal::testing::expect_error;
using testing::prompts_with_prefix;
using testing::random_model;
using testing::random_tokens;
using testing::serve;
using testing::StandInFlashAttn;

using Prompts = std::vector<std::vector<std::int32_t>>;

class CudaRunner : public ::testing::Test {
 protected:
  void SetUp() override {
    BackendRegistry::global().override_backend("FLASH_ATTN", make_backend<StandInFlashAttn>);
    on_cuda_.device = DeviceType::cuda;
  }
  void TearDown() override {
    unsetenv("FAKE_CUDA_FAIL");
    BackendRegistry::global().clear_override("FLASH_ATTN");
  }

  /// The same on both devices; f16 is the default of CUDA only.
  void expect_same(const Prompts& prompts, std::int64_t max_tokens, EngineStats* stats = nullptr) {
    EngineConfig on_cpu = on_cuda_;
    on_cpu.device = DeviceType::cpu;
    on_cpu.dtype = on_cuda_.dtype.value_or(DType::f16);
    EXPECT_EQ(serve(model_, on_cuda_, prompts, max_tokens, stats),
              serve(model_, on_cpu, prompts, max_tokens));
  }

  Model model_ = random_model();
  EngineConfig on_cuda_;
};

TEST_F(CudaRunner, GivesTheTokensOfTheCpu) {
  const Prompts prompts = {random_tokens(1, 3), random_tokens(17, 4), random_tokens(33, 5)};
  expect_same(prompts, 20);
  on_cuda_.dtype = DType::bf16;
  expect_same(prompts, 20);
  on_cuda_.kv_cache_dtype = DType::f8e4m3;
  expect_same(prompts, 20);
}

TEST_F(CudaRunner, ServesBatchesChunksAndPreemptedRequests) {
  const Prompts prompts = prompts_with_prefix(16);
  EngineStats stats;
  expect_same(prompts, 20, &stats);
  EXPECT_GE(stats.prefix_hit_tokens, 15 * 32);
  on_cuda_.max_num_batched_tokens = 23;
  expect_same(prompts, 20);
  on_cuda_.block_size = 32;
  on_cuda_.num_blocks = 1 + 8;
  expect_same(prompts, 60, &stats);
  EXPECT_GT(stats.preemptions, 0);
}

TEST_F(CudaRunner, FillsTheContextToItsEnd) {
  expect_same({random_tokens(250, 2), random_tokens(256, 3)}, 100);
}

TEST_F(CudaRunner, SaysWhereItRuns) {
  const Engine engine(model_, on_cuda_);
  EXPECT_EQ(engine.runner().device().describe(), "cuda:0 (Fake H200)");
  EXPECT_EQ(engine.runner().selection().chosen, "FLASH_ATTN");
  EXPECT_EQ(engine.runner().selection().config.compute_capability, 90);
  EXPECT_EQ(engine.runner().builder().config().spec.dtype, DType::f16);
  // Null block and a context of 256 tokens for each of 16 sequences; 2 layers of K and V.
  EXPECT_EQ(engine.runner().num_blocks(), 1 + 16 * 16);
  EXPECT_EQ(engine.runner().cache_bytes(), (1 + 16 * 16) * 2 * 2 * 16 * 2 * 16 * 2);
}

TEST_F(CudaRunner, NamesWhatTheBackendRefuses) {
  BackendRegistry::global().clear_override("FLASH_ATTN");  // The real one has these reasons.
  on_cuda_.dtype = DType::f32;
  expect_error(
      ErrorCode::unsupported, [&] { Engine(model_, on_cuda_); },
      "FLASH_ATTN: dtype is f32, accepted are f16, bf16");
  on_cuda_.dtype = DType::f16;
  on_cuda_.block_size = 24;
  expect_error(
      ErrorCode::unsupported, [&] { Engine(model_, on_cuda_); },
      "block_size is 24, accepted are any multiple of 16");
}

TEST_F(CudaRunner, PassesTheDriversErrorsOn) {
  Engine engine(model_, on_cuda_);
  engine.add_request(random_tokens(5, 1), {}, nullptr);
  setenv("FAKE_CUDA_FAIL", "cuStreamSynchronize=700", 1);
  expect_error(
      ErrorCode::device, [&] { engine.step(); }, "cuStreamSynchronize");
  setenv("FAKE_CUDA_FAIL", "cuMemAlloc_v2=2", 1);
  expect_error(
      ErrorCode::out_of_memory, [&] { Engine(model_, on_cuda_); },
      "the KV cache of 257 blocks on cuda:0 (Fake H200) needs");
}

}  // namespace
}  // namespace foveal::serving
