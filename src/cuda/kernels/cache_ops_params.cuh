#pragma once

// Parameters of reshape_and_cache and merge_attn_states. Included by both sides.
namespace foveal::cuda {

struct CacheWriteParams {
  const void* key;
  const void* value;
  void* key_cache;
  void* value_cache;
  const long long* slots;
  long long num_slots_given;                           ///< Rows to write.
  long long key_row, key_head, value_row, value_head;  ///< Strides in elements.
  long long key_block, key_token, key_cache_head;
  long long value_block, value_token, value_cache_head;
  long long slots_in_cache;  ///< Slots from here on are skipped: never written outside the cache.
  int num_heads;
  int block_size;
  float key_scale;
  float value_scale;
};

struct MergePart {
  void* output;
  float* lse;
  long long row_stride, head_stride;
  long long lse_head_stride, lse_row_stride;
};

struct MergeParams {
  MergePart result;  ///< lse may be null.
  MergePart a;
  MergePart b;
  int num_rows;
  int num_heads;
};

}  // namespace foveal::cuda
