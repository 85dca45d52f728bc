#include <gtest/gtest.h>

#include "foveal/registry.h"
#include "replay/replay.h"
#include "serving/engine/stand_in_flash_attn.h"
#include "support/expect_error.h"
#include "test_traces.h"

// A replay on CUDA without a GPU: on the fake driver, and a stand-in for FLASH_ATTN.
namespace foveal::replay {
namespace {

using foveal::testing::expect_error;

class CudaReplay : public ::testing::Test {
 protected:
  void SetUp() override {
    BackendRegistry::global().override_backend("FLASH_ATTN",
                                               make_backend<serving::testing::StandInFlashAttn>);
    options_.geometry = testing::tiny_geometry();
    options_.geometry.layers[0].head_size = 16;
    options_.device = DeviceType::cuda;
    options_.max_num_seqs = 6;
    options_.max_num_batched_tokens = 200;
    options_.num_blocks = 150;
    options_.num_layers = 3;
    options_.check_every = 1;
  }
  void TearDown() override { BackendRegistry::global().clear_override("FLASH_ATTN"); }

  Options options_;
};

TEST_F(CudaReplay, CountsWhatTheCpuCounts) {
  const Trace trace = testing::branching_trace(20, 8);
  const Report on_cuda = run(trace, options_);
  EXPECT_EQ(on_cuda.machine, "cuda:0 (Fake H200)");
  EXPECT_EQ(on_cuda.backends, "FLASH_ATTN");
  EXPECT_EQ(on_cuda.options.dtype, DType::bf16);
  EXPECT_EQ(on_cuda.rows_checked, on_cuda.all.steps);
  options_.device = DeviceType::cpu;
  options_.dtype = DType::bf16;
  const Report on_cpu = run(trace, options_);
  EXPECT_EQ(on_cuda.all.steps, on_cpu.all.steps);
  EXPECT_EQ(on_cuda.cached_tokens, on_cpu.cached_tokens);
  EXPECT_GT(on_cuda.cached_tokens, 0);
  EXPECT_EQ(on_cuda.kv_bytes, on_cpu.kv_bytes);
}

TEST_F(CudaReplay, NamesWhatIsNotServed) {
  options_.geometry = find_geometry("deepseek-v3");
  expect_error(
      ErrorCode::unsupported, [&] { run(testing::branching_trace(2, 9), options_); },
      "FLASH_ATTN: ");
}

}  // namespace
}  // namespace foveal::replay
