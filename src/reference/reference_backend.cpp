// REFERENCE and REFERENCE_MLA: the contract in float64 as plain loops, which judges every other
// backend. Chosen by name only.

#include <algorithm>
#include <array>
#include <utility>

#include "core/builtin_backends.h"
#include "reference/attention.h"
#include "reference/operations.h"

namespace foveal {
namespace reference {
namespace {

constexpr const char* kName = "REFERENCE";
constexpr const char* kMlaName = "REFERENCE_MLA";

class ReferenceBuilder final : public AttentionMetadataBuilder {
 public:
  ReferenceBuilder(const char* backend, const BuilderConfig& config)
      : AttentionMetadataBuilder(backend, config), name_(backend) {}

 private:
  AttentionMetadataPtr do_build(std::int64_t common_prefix_len,
                                const CommonAttentionMetadata& common,
                                bool /*fast_build*/) override {
    return std::make_shared<ReferenceMetadata>(name_, config(), common, common_prefix_len);
  }

  const char* name_;
};

const ReferenceMetadata& own(const AttentionMetadata& metadata) {
  return static_cast<const ReferenceMetadata&>(metadata);
}

class ReferenceImpl final : public AttentionImpl {
 public:
  explicit ReferenceImpl(const AttentionSpec& spec) : AttentionImpl(kName, spec) {}

 private:
  void do_update_kv_cache(const TensorView& key, const TensorView& value,
                          const KVCacheView& kv_cache, const TensorView& slot_mapping,
                          const ExecutionContext& /*context*/) const override {
    reference::reshape_and_cache(key, value, kv_cache, slot_mapping, spec().scales);
  }

  void do_forward(const ForwardArgs& args, const AttentionMetadata& metadata,
                  const ExecutionContext& context) const override {
    const bool paged = !metadata.common().block_table.empty();
    const TensorView key = paged ? args.kv_cache.key : as_one_block(args.key);
    const TensorView value = paged ? args.kv_cache.value : as_one_block(args.value);
    attend(spec(),
           {.query = args.query,
            .key = key,
            .value = value,
            .output = args.output,
            .lse = args.lse,
            .query_scale = scale_of(args.query, spec().scales.q),
            .key_scale = scale_of(key, spec().scales.k),
            .value_scale = scale_of(value, spec().scales.v),
            .paged = paged},
           own(metadata), context.pool());
  }
};

class ReferenceMlaImpl final : public MlaAttentionImpl {
 public:
  explicit ReferenceMlaImpl(const AttentionSpec& spec) : MlaAttentionImpl(kMlaName, spec) {}

 private:
  void do_update_kv_cache(const TensorView& latent, const TensorView& key_rope,
                          const TensorView& kv_cache, const TensorView& slot_mapping,
                          const ExecutionContext& /*context*/) const override {
    concat_and_cache_mla(latent, key_rope, kv_cache, slot_mapping, spec().scales.k);
  }

  void do_forward_mha(const MlaPrefillArgs& args, const AttentionMetadata& metadata,
                      const ExecutionContext& context) const override {
    attend(spec(),
           {.query = args.query,
            .key = as_one_block(args.key),
            .value = as_one_block(args.value),
            .output = args.output,
            .lse = args.lse,
            .query_scale = scale_of(args.query, spec().scales.q),
            .key_scale = scale_of(args.key, spec().scales.k),
            .value_scale = scale_of(args.value, spec().scales.v),
            .paged = false},
           own(metadata), context.pool());
  }

  void do_forward_mqa(const MlaDecodeArgs& args, const AttentionMetadata& metadata,
                      const ExecutionContext& context) const override {
    // One KV head; the value is the beginning of the key, so it has the key's scale.
    const TensorView key = with_one_head(args.kv_cache);
    const double cache_scale = scale_of(key, spec().scales.k);
    attend(spec(),
           {.query = args.query,
            .key = key,
            .value = key.slice(3, 0, spec().mla->kv_lora_rank),
            .output = args.output,
            .lse = args.lse,
            .query_scale = scale_of(args.query, spec().scales.q),
            .key_scale = cache_scale,
            .value_scale = cache_scale,
            .paged = true},
           own(metadata), context.pool());
  }
};

BackendCapabilities capabilities_of_both() {
  BackendCapabilities can;
  can.dtypes = {DType::f32, DType::f16, DType::bf16, DType::f8e4m3, DType::f8e5m2, DType::f64};
  can.kv_cache_dtypes = {DType::f8e4m3, DType::f8e5m2};
  can.different_head_size_v = true;
  can.sinks = true;
  can.sliding_window = true;
  can.soft_cap = true;
  can.alibi = true;
  can.custom_score = true;
  can.non_causal = true;
  can.lse = true;
  can.batch_invariant = true;
  can.auto_select = false;
  return can;
}

struct Reference {
  static const char* name() { return kName; }

  static BackendCapabilities capabilities() {
    BackendCapabilities can = capabilities_of_both();
    can.attn_types = {AttnType::decoder, AttnType::encoder, AttnType::encoder_only,
                      AttnType::encoder_decoder};
    can.cascade = true;
    return can;
  }

  static std::vector<std::string> validate(const SelectorConfig& /*config*/) { return {}; }

  static KVCacheLayout kv_cache_layout(const KVCacheSpec& spec, std::int64_t num_blocks,
                                       KVCacheOrder order) {
    return KVCacheLayout::flash(spec, num_blocks, order);
  }

  static KVCacheView kv_cache_view(const TensorView& cache, const KVCacheSpec& spec) {
    return KVCacheView::flash(cache, spec);
  }

  static std::unique_ptr<AttentionMetadataBuilder> make_builder(const BuilderConfig& config) {
    return std::make_unique<ReferenceBuilder>(kName, config);
  }

  static std::unique_ptr<AttentionImpl> make_impl(const AttentionSpec& spec) {
    return std::make_unique<ReferenceImpl>(spec);
  }

  static void reshape_and_cache(const TensorView& key, const TensorView& value,
                                const KVCacheView& kv_cache, const TensorView& slot_mapping,
                                const QuantScales& scales, const ExecutionContext& /*context*/) {
    reference::reshape_and_cache(key, value, kv_cache, slot_mapping, scales);
  }

  static void merge_attn_states(const AttentionPart& result, const AttentionPart& a,
                                const AttentionPart& b, const ExecutionContext& /*context*/) {
    reference::merge_attn_states(result, a, b);
  }
};

struct ReferenceMla {
  static const char* name() { return kMlaName; }

  static BackendCapabilities capabilities() {
    BackendCapabilities can = capabilities_of_both();
    can.attn_types = {AttnType::decoder};
    can.mla = true;
    return can;
  }

  static std::vector<std::string> validate(const SelectorConfig& /*config*/) { return {}; }

  /// In one order only.
  static KVCacheLayout kv_cache_layout(const KVCacheSpec& spec, std::int64_t num_blocks,
                                       KVCacheOrder /*order*/) {
    return KVCacheLayout::latent(spec, num_blocks);
  }

  static std::unique_ptr<AttentionMetadataBuilder> make_builder(const BuilderConfig& config) {
    return std::make_unique<ReferenceBuilder>(kMlaName, config);
  }

  static std::unique_ptr<MlaAttentionImpl> make_mla_impl(const AttentionSpec& spec) {
    return std::make_unique<ReferenceMlaImpl>(spec);
  }

  static void merge_attn_states(const AttentionPart& result, const AttentionPart& a,
                                const AttentionPart& b, const ExecutionContext& /*context*/) {
    reference::merge_attn_states(result, a, b);
  }
};

}  // namespace
}  // namespace reference

AttentionBackendPtr make_reference_backend() { return make_backend<reference::Reference>(); }
AttentionBackendPtr make_reference_mla_backend() { return make_backend<reference::ReferenceMla>(); }

}  // namespace foveal
