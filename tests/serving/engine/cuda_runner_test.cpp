#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <memory>

#include "foveal/registry.h"
#include "serving/engine.h"
#include "support/expect_error.h"
#include "test_models.h"

// The engine's way to a CUDA device and back, on machines without one: against the libcuda.so.1 of
// tests/cuda/fake_driver.cpp, whose device memory is host memory, and with a stand-in for
// FLASH_ATTN that has CPU_ATTN do its work. All tokens must be those of CPU_ATTN in the same dtype,
// exactly.
namespace foveal::serving {
namespace {

using foveal::testing::expect_error;
using testing::prompts_with_prefix;
using testing::random_model;
using testing::random_tokens;
using testing::serve;

using Prompts = std::vector<std::vector<std::int32_t>>;

constexpr Device kDevice{DeviceType::cuda, 0};

AttentionBackendPtr worker() { return BackendRegistry::global().get("CPU_ATTN"); }

/// A view of the same memory that says "cpu"; expects one that says "cuda:0".
TensorView on_host(const TensorView& tensor) {
  if (tensor.empty()) {
    return tensor;
  }
  EXPECT_EQ(tensor.device(), kDevice) << tensor.describe();
  return TensorView(tensor.data(), tensor.dtype(), tensor.shape(), tensor.strides());
}

KVCacheView on_host(const KVCacheView& cache) { return {on_host(cache.key), on_host(cache.value)}; }

void expect_copy(const TensorView& table, const TensorView& host_copy) {
  ASSERT_FALSE(host_copy.empty());
  EXPECT_EQ(host_copy.device(), Device{});
  EXPECT_NE(host_copy.data(), table.data());
  EXPECT_TRUE(std::equal(table.as<std::int32_t>(), table.as<std::int32_t>() + table.numel(),
                         host_copy.as<std::int32_t>()));
}

class StandInMetadata final : public AttentionMetadata {
 public:
  StandInMetadata(const BuilderConfig& config, const CommonAttentionMetadata& common,
                  AttentionMetadataPtr made)
      : AttentionMetadata("FLASH_ATTN", config, common, 0), inner(std::move(made)) {}
  AttentionMetadataPtr inner;
};

class StandInBuilder final : public AttentionMetadataBuilder {
 public:
  explicit StandInBuilder(const BuilderConfig& config)
      : AttentionMetadataBuilder("FLASH_ATTN", config) {
    EXPECT_EQ(config.device, kDevice);
    EXPECT_NE(config.stream, nullptr);
    BuilderConfig inner = config;
    inner.device = {};
    inner.stream = nullptr;
    inner_ = worker()->make_builder(inner);
  }

 private:
  AttentionMetadataPtr do_build(std::int64_t common_prefix_len,
                                const CommonAttentionMetadata& common, bool fast_build) override {
    expect_copy(common.query_start_loc, common.query_start_loc_host);
    expect_copy(common.seq_lens, common.seq_lens_host);
    CommonAttentionMetadata host = common;
    for (TensorView* table :
         {&host.query_start_loc, &host.seq_lens, &host.block_table, &host.slot_mapping}) {
      *table = on_host(*table);
    }
    host.query_start_loc_host = {};
    host.seq_lens_host = {};
    return std::make_shared<StandInMetadata>(config(), common,
                                             inner_->build(common_prefix_len, host, fast_build));
  }

  std::unique_ptr<AttentionMetadataBuilder> inner_;
};

class StandInImpl final : public AttentionImpl {
 public:
  explicit StandInImpl(const AttentionSpec& spec)
      : AttentionImpl("FLASH_ATTN", spec), inner_(worker()->make_impl(spec)) {}

 private:
  void do_update_kv_cache(const TensorView& key, const TensorView& value,
                          const KVCacheView& kv_cache, const TensorView& slot_mapping,
                          const ExecutionContext& context) const override {
    EXPECT_NE(context.stream, nullptr);
    inner_->update_kv_cache(on_host(key), on_host(value), on_host(kv_cache), on_host(slot_mapping),
                            context);
  }

  void do_forward(const ForwardArgs& args, const AttentionMetadata& metadata,
                  const ExecutionContext& context) const override {
    EXPECT_NE(context.stream, nullptr);
    ForwardArgs host;
    host.query = on_host(args.query);
    host.kv_cache = on_host(args.kv_cache);
    host.output = on_host(args.output);
    inner_->forward(host, *static_cast<const StandInMetadata&>(metadata).inner, context);
  }

  std::unique_ptr<AttentionImpl> inner_;
};

struct StandIn {
  static const char* name() { return "FLASH_ATTN"; }
  static BackendCapabilities capabilities() {
    BackendCapabilities can;
    can.device = DeviceType::cuda;
    can.min_compute_capability = 80;
    can.dtypes = {DType::f16, DType::bf16};
    can.kv_cache_dtypes = {DType::f8e4m3, DType::f8e5m2};
    can.block_sizes = {{.size = 16, .multiples = true}};
    can.attn_types = {AttnType::decoder};
    return can;
  }
  static std::vector<std::string> validate(const SelectorConfig&) { return {}; }
  static KVCacheLayout kv_cache_layout(const KVCacheSpec& spec, std::int64_t num_blocks,
                                       KVCacheOrder order) {
    return KVCacheLayout::flash(spec, num_blocks, order);
  }
  static KVCacheView kv_cache_view(const TensorView& cache, const KVCacheSpec& spec) {
    return KVCacheView::flash(cache, spec);
  }
  static std::unique_ptr<AttentionMetadataBuilder> make_builder(const BuilderConfig& config) {
    return std::make_unique<StandInBuilder>(config);
  }
  static std::unique_ptr<AttentionImpl> make_impl(const AttentionSpec& spec) {
    return std::make_unique<StandInImpl>(spec);
  }
  static void reshape_and_cache(const TensorView&, const TensorView&, const KVCacheView&,
                                const TensorView&, const QuantScales&, const ExecutionContext&) {}
  static void merge_attn_states(const AttentionPart&, const AttentionPart&, const AttentionPart&,
                                const ExecutionContext&) {}
};

class CudaRunner : public ::testing::Test {
 protected:
  void SetUp() override {
    BackendRegistry::global().override_backend("FLASH_ATTN", make_backend<StandIn>);
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
