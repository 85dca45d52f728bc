#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "foveal/registry.h"

// A stand-in for FLASH_ATTN on the fake driver of tests/cuda, whose device memory is host memory:
// it expects tensors of "cuda:0" and a stream, and has CPU_ATTN do the work.
namespace foveal::serving::testing {

inline constexpr Device kDevice{DeviceType::cuda, 0};

inline AttentionBackendPtr worker() { return BackendRegistry::global().get("CPU_ATTN"); }

/// A view of the same memory that says "cpu"; expects one that says "cuda:0".
inline TensorView on_host(const TensorView& tensor) {
  if (tensor.empty()) {
    return tensor;
  }
  EXPECT_EQ(tensor.device(), kDevice) << tensor.describe();
  return TensorView(tensor.data(), tensor.dtype(), tensor.shape(), tensor.strides());
}

inline KVCacheView on_host(const KVCacheView& cache) {
  return {on_host(cache.key), on_host(cache.value)};
}

inline void expect_copy(const TensorView& table, const TensorView& host_copy) {
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

struct StandInFlashAttn {
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

}  // namespace foveal::serving::testing
