#include <memory>

#include "core/builtin_backends.h"
#include "cpu/cache_ops.h"
#include "cpu/instruction_set.h"
#include "cpu/merge_states.h"
#include "cpu/planned_step.h"
#include "foveal/selector.h"

namespace foveal {
namespace {

constexpr const char* kName = "CPU_ATTN";

class CpuImpl final : public AttentionImpl {
 public:
  explicit CpuImpl(const AttentionSpec& spec) : AttentionImpl(kName, spec) {}

 private:
  void do_update_kv_cache(const TensorView& key, const TensorView& value,
                          const KVCacheView& kv_cache, const TensorView& slot_mapping,
                          const ExecutionContext& context) const override {
    cpu::reshape_and_cache(key, value, kv_cache, slot_mapping, spec().scales, context);
  }

  void do_forward(const ForwardArgs& args, const AttentionMetadata& metadata,
                  const ExecutionContext& context) const override {
    const bool paged = !metadata.common().block_table.empty();
    const TensorView& key = paged ? args.kv_cache.key : args.key;
    const TensorView& value = paged ? args.kv_cache.value : args.value;
    cpu::attend(spec(),
                {.query = args.query,
                 .key = key,
                 .value = value,
                 .output = args.output,
                 .lse = args.lse,
                 .key_scale = is_fp8(key.dtype()) ? spec().scales.k : 1.0F,
                 .value_scale = is_fp8(value.dtype()) ? spec().scales.v : 1.0F},
                metadata, context);
  }
};

struct CpuAttention {
  static std::string_view name() { return kName; }

  static BackendCapabilities capabilities() {
    BackendCapabilities can = cpu::capabilities_of_kernel();
    can.head_size_multiple = 8;
    can.max_head_size = 512;
    can.attn_types = {AttnType::decoder, AttnType::encoder, AttnType::encoder_only,
                      AttnType::encoder_decoder};
    can.cascade = true;
    return can;
  }

  static std::string runtime() { return "instruction set " + cpu::instruction_set().name; }

  /// The capabilities say it all.
  static std::vector<std::string> validate(const SelectorConfig& /*config*/) { return {}; }

  static KVCacheLayout kv_cache_layout(const KVCacheSpec& spec, std::int64_t num_blocks,
                                       KVCacheOrder order) {
    return KVCacheLayout::flash(spec, num_blocks, order);
  }

  static KVCacheView kv_cache_view(const TensorView& cache, const KVCacheSpec& spec) {
    return KVCacheView::flash(cache, spec);
  }

  static std::unique_ptr<AttentionMetadataBuilder> make_builder(const BuilderConfig& config) {
    return std::make_unique<cpu::StepBuilder>(kName, config);
  }

  static std::unique_ptr<AttentionImpl> make_impl(const AttentionSpec& spec) {
    return std::make_unique<CpuImpl>(spec);
  }

  static void reshape_and_cache(const TensorView& key, const TensorView& value,
                                const KVCacheView& kv_cache, const TensorView& slot_mapping,
                                const QuantScales& scales, const ExecutionContext& context) {
    cpu::reshape_and_cache(key, value, kv_cache, slot_mapping, scales, context);
  }

  static void merge_attn_states(const AttentionPart& result, const AttentionPart& a,
                                const AttentionPart& b, const ExecutionContext& context) {
    cpu::merge_attn_states(result, a, b, context);
  }
};

}  // namespace

AttentionBackendPtr make_cpu_attn_backend() {
  cpu::instruction_set();  // A wrong FOVEAL_CPU_TARGET is an error here, not in the first step.
  return make_backend<CpuAttention>();
}

}  // namespace foveal
