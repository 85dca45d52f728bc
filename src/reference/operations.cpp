#include "reference/operations.h"

#include "core/check.h"
#include "core/tensor_checks.h"
#include "reference/attention.h"

namespace foveal::reference {
namespace {

/// Tokens [T, heads, size] → cache [num_blocks, block_size, heads, size].
void write_tokens(const TensorView& tokens, const TensorView& cache, const TensorView& slot_mapping,
                  float scale) {
  const std::int64_t block_size = cache.size(1);
  for (std::int64_t token = 0; token < slot_mapping.size(0); ++token) {
    const auto slot = static_cast<std::int64_t>(load(slot_mapping, {token}));
    if (slot < 0) {
      continue;  // Contract 9: padding.
    }
    for (std::int64_t head = 0; head < cache.size(2); ++head) {
      for (std::int64_t d = 0; d < cache.size(3); ++d) {
        // Tokens that are fp8 themselves are already stored as value / scale.
        const double value = load(tokens, {token, head, d}) * scale_of(tokens, scale);
        store(cache, {slot / block_size, slot % block_size, head, d},
              value / scale_of(cache, scale));
      }
    }
  }
}

Part load_part(const AttentionPart& part, std::int64_t row, std::int64_t head) {
  Part loaded{{}, load(part.lse, {head, row})};
  for (std::int64_t d = 0; d < part.output.size(2); ++d) {
    loaded.output.push_back(load(part.output, {row, head, d}));
  }
  return loaded;
}

}  // namespace

void reshape_and_cache(const TensorView& key, const TensorView& value, const KVCacheView& kv_cache,
                       const TensorView& slot_mapping, const QuantScales& scales) {
  check(key.device().type == DeviceType::cpu, "key is {}, it must be on cpu", key);
  write_tokens(key, kv_cache.key, slot_mapping, scales.k);
  write_tokens(value, kv_cache.value, slot_mapping, scales.v);
}

void concat_and_cache_mla(const TensorView& latent, const TensorView& key_rope,
                          const TensorView& kv_cache, const TensorView& slot_mapping, float scale) {
  const TensorView entries = with_one_head(kv_cache);
  const std::int64_t rank = latent.size(1);
  write_tokens(with_one_head(latent), entries.slice(3, 0, rank), slot_mapping, scale);
  write_tokens(with_one_head(key_rope), entries.slice(3, rank, entries.size(3)), slot_mapping,
               scale);
}

void merge_attn_states(const AttentionPart& result, const AttentionPart& a,
                       const AttentionPart& b) {
  for (std::int64_t row = 0; row < result.output.size(0); ++row) {
    for (std::int64_t head = 0; head < result.output.size(1); ++head) {
      // Both parts are read before the result is written: it may be one of them.
      const Part merged = merge(load_part(a, row, head), load_part(b, row, head));
      for (std::int64_t d = 0; d < result.output.size(2); ++d) {
        store(result.output, {row, head, d}, merged.output[static_cast<std::size_t>(d)]);
      }
      if (!result.lse.empty()) {
        store(result.lse, {head, row}, merged.lse);
      }
    }
  }
}

}  // namespace foveal::reference
