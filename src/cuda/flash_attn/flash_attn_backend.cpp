// FLASH_ATTN: attention on CUDA devices from compute capability 8.0 on.

#include <array>
#include <memory>
#include <utility>

#include "core/builtin_backends.h"
#include "cuda/driver.h"
#include "cuda/flash_attn/builder.h"
#include "cuda/flash_attn/impl.h"

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
    can.dtypes = {DType::f16, DType::bf16};
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

  static std::vector<std::string> validate(const SelectorConfig& /*config*/) {
    if (!available()) {
      return {unavailable_reason()};
    }
    return {};
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
