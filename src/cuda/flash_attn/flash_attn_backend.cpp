// FLASH_ATTN: attention on CUDA devices from compute capability 8.0 on.

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "core/builtin_backends.h"
#include "cuda/driver.h"
#include "cuda/flash_attn/builder.h"
#include "cuda/flash_attn/heuristics.h"
#include "cuda/flash_attn/impl.h"
#include "foveal/selector.h"

namespace foveal {
namespace cuda::flash_attn {
namespace {

struct FlashAttn {
  static const char* name() { return kName; }

  static std::string runtime() {
    if (!available()) {
      return unavailable_reason();
    }
    const int version = driver_version();
    return "driver for CUDA " + std::to_string(version / 1000) + "." +
           std::to_string(version % 1000 / 10);
  }

  static BackendCapabilities capabilities() {
    BackendCapabilities can;
    can.device = DeviceType::cuda;
    can.min_compute_capability = 80;
    can.dtypes = {DType::f16, DType::bf16, DType::f8e4m3};
    can.kv_cache_dtypes = {DType::f8e4m3, DType::f8e5m2};
    can.head_size_multiple = 8;
    can.max_head_size = 256;
    can.different_head_size_v = true;
    can.block_sizes = {{.size = 16, .multiples = true}};
    can.attn_types = {AttnType::decoder, AttnType::encoder, AttnType::encoder_only,
                      AttnType::encoder_decoder};
    can.sinks = true;
    can.sliding_window = true;
    can.soft_cap = true;
    can.alibi = true;
    can.non_causal = true;
    can.lse = true;
    can.graphs = GraphSupport::always;
    can.batch_invariant = true;
    can.cascade = true;
    return can;
  }

  static std::vector<std::string> validate(const SelectorConfig& config) {
    std::vector<std::string> reasons;
    if (!available()) {
      reasons.push_back(unavailable_reason());
    }
    if (config.dtype == DType::f8e4m3) {
      // The group is not known here; the builder looks at it.
      DeviceProperties device;
      device.compute_capability = config.compute_capability;
      device.shared_bytes_per_block = std::numeric_limits<int>::max();
      const auto size = static_cast<int>(config.head_size);
      const std::int64_t size_v = config.head_size_v > 0 ? config.head_size_v : size;
      const std::string reason = why_not_sm90({.head_size = size,
                                               .head_size_v = static_cast<int>(size_v),
                                               .query_bytes = 1,
                                               .cache_bytes = 1},
                                              device);
      if (!reason.empty()) {
        reasons.push_back("dtype is f8e4m3, and " + reason);
      }
      if (config.kv_cache_dtype.value_or(config.dtype) != config.dtype) {
        reasons.push_back("kv_cache_dtype is " + std::string(to_string(*config.kv_cache_dtype)) +
                          ", with dtype f8e4m3 it must be the same");
      }
    }
    return reasons;
  }

  static KVCacheLayout kv_cache_layout(const KVCacheSpec& spec, std::int64_t num_blocks,
                                       KVCacheOrder order) {
    return KVCacheLayout::flash(spec, num_blocks, order);
  }

  static KVCacheView kv_cache_view(const TensorView& cache, const KVCacheSpec& spec) {
    return KVCacheView::flash(cache, spec);
  }

  static std::unique_ptr<AttentionMetadataBuilder> make_builder(const BuilderConfig& config) {
    return std::make_unique<FlashBuilder>(config);
  }

  static std::unique_ptr<AttentionImpl> make_impl(const AttentionSpec& spec) {
    return std::make_unique<FlashImpl>(spec);
  }

  static void reshape_and_cache(const TensorView& key, const TensorView& value,
                                const KVCacheView& kv_cache, const TensorView& slot_mapping,
                                const QuantScales& scales, const ExecutionContext& context) {
    flash_attn::reshape_and_cache(key, value, kv_cache, slot_mapping, scales, context);
  }

  static void merge_attn_states(const AttentionPart& result, const AttentionPart& a,
                                const AttentionPart& b, const ExecutionContext& context) {
    flash_attn::merge_attn_states(result, a, b, nullptr, context);
  }
};

}  // namespace
}  // namespace cuda::flash_attn

AttentionBackendPtr make_flash_attn_backend() {
  return make_backend<cuda::flash_attn::FlashAttn>();
}

}  // namespace foveal
