#pragma once

#include <cstdint>

#include "foveal/spec.h"
#include "foveal/tensor.h"

namespace foveal {

/// The cache manager's null block: it is never handed out, and padded table entries may name it.
inline constexpr std::int64_t kNullBlock = 0;
/// A slot of padding: nothing is written for it.
inline constexpr std::int64_t kPaddingSlot = -1;

/// What a scheduling step tells every backend. Built once a step by the engine; all tensors are
/// borrowed until the metadata made from it is no longer used. Lengths are int32, slots int64.
///
/// Request r has query rows query_start_loc[r] … query_start_loc[r+1]−1 and seq_lens[r] keys, those
/// of this step included. Row i of a request with q queries and n keys stands at absolute position
/// n − q + i.
struct CommonAttentionMetadata {
  std::int64_t num_reqs = 0;
  std::int64_t num_actual_tokens =
      0;  ///< Rows of query that count; a padded query tensor may be longer.
  std::int64_t max_query_len = 0;  ///< At least the longest query length.
  std::int64_t max_seq_len = 0;    ///< At least the longest seq_len; may be an upper bound.
  TensorView query_start_loc{};    ///< i32 [num_reqs + 1], starts at 0, non-decreasing.
  TensorView
      seq_lens;  ///< i32 [num_reqs]; 0 for padded requests. Cross attention: encoder lengths.
  TensorView query_start_loc_host{};  ///< Host copy, for metadata on another device; may be absent.
  TensorView seq_lens_host{};         ///< Host copy or upper bounds, likewise.
  /// i32 [num_reqs, max_blocks]: the cache manager's blocks in order of position. Absent when keys
  /// and values are passed to forward as plain tensors.
  TensorView block_table{};
  /// i64 [num_actual_tokens]: block·block_size + offset of each new token, −1 for padding. May be
  /// absent when nothing is written to the cache.
  TensorView slot_mapping{};
  /// i32 [num_reqs + 1]: where each request's keys start in plain key and value tensors; by default
  /// query_start_loc. Request r has seq_lens[r] keys from there.
  TensorView key_start_loc{};
  bool causal = true;  ///< Encoder and cross attention need false.
  /// i32 [num_reqs]: keys this context-parallel rank holds, for backends that gather over ranks
  /// themselves; absent without context parallelism. forward attends to seq_lens keys in any case.
  TensorView cp_local_seq_lens{};
};

}  // namespace foveal
