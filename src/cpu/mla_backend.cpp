// CPU_MLA: both ways of MLA on the kernel of CPU_ATTN. On the latent cache that is attention with
// one KV head whose values are the beginning of its keys; on decompressed keys and values,
// attention with as many KV heads as query heads.

#include <array>
#include <memory>

#include "core/builtin_backends.h"
#include "cpu/cache_ops.h"
#include "cpu/instruction_set.h"
#include "cpu/merge_states.h"
#include "cpu/planned_step.h"
#include "foveal/selector.h"

namespace foveal {
namespace cpu {
namespace {

constexpr const char* kMlaName = "CPU_MLA";

/// [rows, size] as [rows, 1, size].
TensorView rows_with_one_head(const TensorView& rows) {
  return {rows.data(), rows.dtype(), std::array{rows.size(0), std::int64_t{1}, rows.size(1)},
          std::array{rows.stride(0), std::int64_t{0}, rows.stride(1)}};
}

/// [num_blocks, block_size, entry] as [num_blocks, block_size, 1, entry].
TensorView cache_with_one_head(const TensorView& cache) {
  return {cache.data(), cache.dtype(),
          std::array{cache.size(0), cache.size(1), std::int64_t{1}, cache.size(2)},
          std::array{cache.stride(0), cache.stride(1), std::int64_t{0}, cache.stride(2)}};
}

class CpuMlaImpl final : public MlaAttentionImpl {
 public:
  explicit CpuMlaImpl(const AttentionSpec& spec) : MlaAttentionImpl(kMlaName, spec) {}

 private:
  /// Latents and rotated keys are written as keys and values of two views of the entries.
  void do_update_kv_cache(const TensorView& latent, const TensorView& key_rope,
                          const TensorView& kv_cache, const TensorView& slot_mapping,
                          const ExecutionContext& context) const override {
    const TensorView entries = cache_with_one_head(kv_cache);
    const std::int64_t rank = spec().mla->kv_lora_rank;
    const float scale = spec().scales.k;
    reshape_and_cache(rows_with_one_head(latent), rows_with_one_head(key_rope),
                      {entries.slice(3, 0, rank), entries.slice(3, rank, entries.size(3))},
                      slot_mapping, {.q = 1.0F, .k = scale, .v = scale}, context);
  }

  void do_forward_mha(const MlaPrefillArgs& args, const AttentionMetadata& metadata,
                      const ExecutionContext& context) const override {
    attend(spec(),
           {.query = args.query,
            .key = args.key,
            .value = args.value,
            .output = args.output,
            .lse = args.lse},
           metadata, context);
  }

  void do_forward_mqa(const MlaDecodeArgs& args, const AttentionMetadata& metadata,
                      const ExecutionContext& context) const override {
    const TensorView entries = cache_with_one_head(args.kv_cache);
    const float scale = is_fp8(entries.dtype()) ? spec().scales.k : 1.0F;
    attend(spec(),
           {.query = args.query,
            .key = entries,
            .value = entries.slice(3, 0, spec().mla->kv_lora_rank),
            .output = args.output,
            .lse = args.lse,
            .key_scale = scale,
            .value_scale = scale},
           metadata, context);
  }
};

struct CpuMla {
  static const char* name() { return kMlaName; }

  /// Any head sizes: those of the spec are the latent's, and the kernel's scratch grows with them.
  static BackendCapabilities capabilities() {
    BackendCapabilities can = capabilities_of_kernel();
    can.attn_types = {AttnType::decoder};
    can.mla = true;
    return can;
  }

  static std::string runtime() { return "instruction set " + cpu::instruction_set().name; }

  /// The capabilities say it all.
  static std::vector<std::string> validate(const SelectorConfig& /*config*/) { return {}; }

  /// In one order only.
  static KVCacheLayout kv_cache_layout(const KVCacheSpec& spec, std::int64_t num_blocks,
                                       KVCacheOrder /*order*/) {
    return KVCacheLayout::latent(spec, num_blocks);
  }

  static std::unique_ptr<AttentionMetadataBuilder> make_builder(const BuilderConfig& config) {
    return std::make_unique<StepBuilder>(kMlaName, config);
  }

  static std::unique_ptr<MlaAttentionImpl> make_mla_impl(const AttentionSpec& spec) {
    return std::make_unique<CpuMlaImpl>(spec);
  }

  static void merge_attn_states(const AttentionPart& result, const AttentionPart& a,
                                const AttentionPart& b, const ExecutionContext& context) {
    cpu::merge_attn_states(result, a, b, context);
  }
};

}  // namespace
}  // namespace cpu

AttentionBackendPtr make_cpu_mla_backend() {
  cpu::instruction_set();  // A wrong FOVEAL_CPU_TARGET is an error here, not in the first step.
  return make_backend<cpu::CpuMla>();
}

}  // namespace foveal
