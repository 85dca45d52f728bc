#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "foveal/spec.h"

namespace foveal::cpu {

/// Packed query rows (tokens × query heads of one KV head) that are multiplied with a tile of keys
/// together: 64 rows of float32 queries, keys, values and output for heads of 128 take 128 KiB.
inline constexpr std::int64_t kBlockRows = 64;
/// Rows of a task, at most: blocks that share the loading of keys and values.
inline constexpr std::int64_t kMaxItemRows = 8 * kBlockRows;
/// Keys a task handles at a time. Tiles begin at multiples of this position, so that which keys
/// share a tile depends on nothing but their positions.
inline constexpr std::int64_t kTileKeys = 64;

/// The keys [begin, end) that a row sees.
struct KeyRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t tiles() const {
    return begin >= end ? 0 : (end - 1) / kTileKeys - begin / kTileKeys + 1;
  }
};

/// Causality and window of a layer (contracts 1 and 3), and whether all rows see all keys of an
/// item instead.
struct RowMask {
  bool causal = true;
  Window window;

  /// Both ends grow with the position.
  KeyRange visible(std::int64_t seq_len, std::int64_t position) const {
    // No sequence is longer than 2^31; larger windows are no windows.
    constexpr std::int64_t kFar = std::int64_t{1} << 32;
    const std::int64_t begin =
        window.left < 0 ? 0 : std::max<std::int64_t>(0, position - std::min(window.left, kFar));
    std::int64_t end = seq_len;
    if (causal) {
      end = std::min(end, position + 1);
    }
    if (window.right >= 0) {
      end = std::min(end, position + std::min(window.right, kFar) + 1);
    }
    return {begin, std::max(begin, end)};
  }
};

/// What one task does, for one KV head: packed rows first_row … first_row + num_rows − 1 of the
/// tokens from first_token (row i is token i / group, head i % group of the KV head) over `keys`.
struct WorkItem {
  std::int64_t request = 0;  ///< Whose row of the block table holds the keys.
  std::int64_t first_token = 0;
  std::int64_t first_row = 0;
  std::int64_t num_rows = 0;
  KeyRange keys;
  std::int64_t first_position = 0;  ///< Of first_token.
  std::int64_t seq_len = 0;
  bool unmasked = false;  ///< A shared prefix: every row sees all of `keys`.
  /// Where the rows' partial results go, in rows of the partial buffer of one KV head; −1: this is
  /// all that the rows see, and the item writes the output.
  std::int64_t partial_row = -1;
};

/// Partial results of the same rows over disjoint keys, to be merged in order.
struct MergeItem {
  std::int64_t first_token = 0;
  std::int64_t first_row = 0;
  std::int64_t num_rows = 0;
  std::int64_t first_part = 0;  ///< In Plan::parts.
  std::int64_t num_parts = 0;
};

/// An item for one KV head.
struct Task {
  std::int32_t item = 0;
  std::int32_t kv_head = 0;
};

/// A step's tasks, then its merges × KV heads.
struct Plan {
  std::vector<WorkItem> items;
  /// The requests with the longest items first. Within a request one KV head after the other, whose
  /// keys and values then come out of a cache for all items but the first, and these longest first.
  std::vector<Task> tasks;
  std::vector<MergeItem> merges;
  std::vector<std::int64_t> parts;  ///< Partial row of a merge item's first row.
  std::int64_t partial_rows = 0;    ///< A KV head.
  std::int64_t max_rows = 0;        ///< Of an item.
};

struct PlanInput {
  std::span<const std::int32_t> query_start_loc;  ///< num_reqs + 1
  std::span<const std::int32_t> seq_lens;
  RowMask mask;
  std::int64_t num_kv_heads = 1;
  std::int64_t group_size = 1;
  std::int64_t common_prefix_len = 0;
  int num_threads = 1;
  std::int64_t num_splits = 0;              ///< 0: by load.
  std::int64_t max_item_rows = kBlockRows;  ///< A multiple of kBlockRows.
};

/// The inputs of the decision for a cascade.
struct CascadeInput {
  std::int64_t common_prefix_len = 0;
  std::int64_t num_reqs = 1;
  std::int64_t num_tokens = 0;
  std::int64_t group_size = 1;
  std::int64_t head_size = 0;
  std::int64_t head_size_v = 0;
  std::int64_t max_item_rows = kBlockRows;
};

/// Whether loading a shared prefix for the rows of all requests together saves more than it costs
/// to merge each row's two results (docs/cpu.md). Requests are taken to have equally many rows.
bool cascade_pays(const CascadeInput& input);

/// Cuts a step into tasks. Keys no row of a task sees are not part of it. Splits of the keys are
/// made from what is visible, where a task would be more than a thread's share of the step.
Plan make_plan(const PlanInput& input);

}  // namespace foveal::cpu
