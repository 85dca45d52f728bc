#pragma once

// Which rows a work item has and which keys they see. Knows nothing of how a kernel holds them.

#include "config.cuh"
#include "flash_attn/params.cuh"
#include "ptx/load.cuh"

namespace flash_attn {

using namespace config;
using namespace foveal::cuda::flash_attn;

/// The rows of a work item and which keys they see.
struct Rows {
  int first;      // Of the request's packed rows.
  int count;      // At most those of a tile.
  int positions;  // Position of the request's first query row.
  int seq_len;
  int window_left, window_right;
  int key_begin;

  __device__ __forceinline__ int position(int row) const {
    return positions + (first + row) / kGroup;
  }
  /// Row `row` sees keys low … high − 1.
  __device__ __forceinline__ int low(int row) const {
    return kLeftBound ? max(key_begin, position(row) - window_left) : key_begin;
  }
  __device__ __forceinline__ int high(int row) const {
    return kRightBound ? min(seq_len, position(row) + window_right + 1) : seq_len;
  }
};

__device__ __forceinline__ WorkItem load_item(const ForwardParams& p, int index) {
  const auto* source = reinterpret_cast<const int4*>(p.items + index);
  const int4 a = ptx::load_global(source);
  const int4 b = ptx::load_global(source + 1);
  const int4 c = ptx::load_global(source + 2);
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w, c.x, c.y, c.z, c.w};
}

__device__ __forceinline__ Rows rows_of(const WorkItem& item, const ForwardParams& p,
                                        int tile_rows) {
  return {.first = item.first_row,
          .count = min(tile_rows, item.query_len * kGroup - item.first_row),
          .positions = item.seq_len - item.query_len,
          .seq_len = item.seq_len,
          .window_left = p.window_left,
          .window_right = p.window_right,
          .key_begin = p.key_begin};
}

}  // namespace flash_attn
