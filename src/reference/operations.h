#pragma once

#include "foveal/backend.h"

namespace foveal::reference {

/// Contracts 8 and 9; see ops.h.
void reshape_and_cache(const TensorView& key, const TensorView& value, const KVCacheView& kv_cache,
                       const TensorView& slot_mapping, const QuantScales& scales);

/// Writes latents [T, L] and rotated keys [T, R] side by side as cache entries [L + R].
void concat_and_cache_mla(const TensorView& latent, const TensorView& key_rope,
                          const TensorView& kv_cache, const TensorView& slot_mapping, float scale);

/// Contract 6; see ops.h.
void merge_attn_states(const AttentionPart& result, const AttentionPart& a, const AttentionPart& b);

}  // namespace foveal::reference
