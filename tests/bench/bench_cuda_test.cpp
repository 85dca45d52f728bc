// What the bench adds on a GPU: its kernels compile without one, and tiny shapes run on one.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bench/bench.h"
#include "bench/cuda_keys.h"
#include "cuda/driver.h"
#include "cuda/nvrtc.h"
#include "foveal/error.h"

namespace foveal::bench {
namespace {

class BenchKernels : public ::testing::TestWithParam<int> {};

TEST_P(BenchKernels, CompileWithoutSpills) {
  if (!cuda::nvrtc().available) {
    GTEST_SKIP() << cuda::nvrtc().reason;
  }
  if (!cuda::nvrtc_knows(cuda::arch_name(GetParam()))) {
    GTEST_SKIP() << "NVRTC does not know " << cuda::arch_name(GetParam());
  }
  std::vector<cuda::KernelKey> keys{read_sum_key(GetParam())};
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const std::int64_t columns : {1, 100, 2048, 8192, 32768}) {
      keys.push_back(softmax_rows(dtype, columns, GetParam()).key);
    }
  }
  cuda::Jit jit(cuda::JitOptions{});
  for (const auto& cubin : jit.compile_all(keys)) {
    EXPECT_EQ(cubin->resources.spill_store_bytes, 0) << cubin->key_text;
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, BenchKernels, ::testing::Values(80, 90, 100, 120),
                         [](const auto& info) { return "sm_" + std::to_string(info.param); });

TEST(BenchSoftmax, ThreadsCoverTheRow) {
  for (const std::int64_t columns : {1, 8, 257, 8192, 8193, 131072}) {
    const SoftmaxRows rows = softmax_rows(DType::bf16, columns, 90);
    EXPECT_LE(rows.threads, 1024);
    EXPECT_EQ(rows.threads % 32, 0);
  }
  EXPECT_EQ(softmax_rows(DType::bf16, 2048, 90).threads, 256);
  EXPECT_THAT(softmax_rows(DType::bf16, 32768, 90).key.text(), ::testing::HasSubstr("kVectors=4"));
}

TEST(BenchGpu, TinyShapesGiveWholeRows) {
  if (!cuda::available()) {
    GTEST_SKIP() << cuda::unavailable_reason();
  }
  Options options;
  options.shapes = {.device = DeviceType::cuda,
                    .num_heads = 4,
                    .head_size = 64,
                    .batch = {2},
                    .seq_len = {200, 333}};
  const Report report = run(options);
  EXPECT_GT(report.ceilings.read_gb_per_s, 0);
  // cuBLAS may not be there, which is then said.
  if (report.ceilings.products) {
    EXPECT_GT(report.ceilings.products->tflops, 0);
  } else {
    EXPECT_THAT(report.ceilings.no_products, ::testing::HasSubstr("libcublas"));
  }
  for (const Row& row : report.rows) {
    SCOPED_TRACE(row.shape.text());
    EXPECT_EQ(row.attention.failure, "");
    EXPECT_GT(row.attention.times.median_us, 0);
    EXPECT_TRUE(!report.ceilings.products || roofline(report.ceilings, row)->fraction > 0);
    if (row.shape.kind == Kind::cascade) {
      EXPECT_GT(row.other_ratio(), 0);
    }
    if (row.shape.kind == Kind::naive) {
      // cuBLAS may not be there, which the row then says.
      ASSERT_TRUE(row.other.has_value());
      EXPECT_TRUE(row.other->times.count > 0 ||
                  row.other->failure.find("libcublas") != std::string::npos)
          << row.other->failure;
    }
  }
}

TEST(BenchGpu, WithoutOneTheReasonIsTold) {
  if (cuda::available()) {
    GTEST_SKIP() << "there is a GPU";
  }
  Options options;
  options.shapes.device = DeviceType::cuda;
  EXPECT_THROW(run(options), Error);
}

}  // namespace
}  // namespace foveal::bench
