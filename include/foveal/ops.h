#pragma once

#include "foveal/backend.h"

/// Operations beside attention itself, served by the first backend of the tensors' device.
namespace foveal {

/// Merges two partial attentions of the same queries over disjoint keys, by their natural-log LSEs:
///   m = max(a.lse, b.lse), w = exp(lse − m), output = (w_a·a.output + w_b·b.output) / (w_a + w_b),
///   lse = m + log(w_a + w_b)
/// (Dao et al., FlashAttention, 2022, appendix). An LSE of −inf or +inf marks an empty part: it
/// contributes nothing even if its output holds NaN. Two empty parts give 0 and −inf.
///
/// Outputs are [T, num_heads, head_size_v] of one floating dtype, LSEs f32 [num_heads, T] of any
/// strides; result.lse may be absent, result.output may be one of the inputs. Throws
/// invalid_argument when shapes, dtypes or devices disagree.
FOVEAL_API void merge_attn_states(const AttentionPart& result, const AttentionPart& a,
                                  const AttentionPart& b, const ExecutionContext& context = {});

/// Writes keys [T, num_kv_heads, head_size] and values [T, num_kv_heads, head_size_v] into a paged
/// cache at slot_mapping (i64 [≤ T]): slot = block·block_size + offset, −1 writes nothing. Into an
/// fp8 cache goes value / scale, rounded to nearest even and saturated; otherwise the caches' dtype
/// must be that of key and value. Throws invalid_argument; then nothing has been written.
FOVEAL_API void reshape_and_cache(const TensorView& key, const TensorView& value,
                                  const KVCacheView& kv_cache, const TensorView& slot_mapping,
                                  const QuantScales& scales = {},
                                  const ExecutionContext& context = {});

}  // namespace foveal
