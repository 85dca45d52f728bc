#include "cuda/flash_attn/heuristics.h"

#include <algorithm>

namespace foveal::cuda::flash_attn {
namespace {

/// A block takes 1 KiB of shared memory for itself.
constexpr int kBlockOverhead = 1024;

bool fits(const TileConfig& tile, const HeadShape& head, const DeviceProperties& device) {
  const int bytes = shared_layout(tile.shape(head)).total;
  return bytes <= device.shared_bytes_per_block &&
         (bytes + kBlockOverhead) * tile.min_blocks <= device.shared_bytes_per_sm;
}

/// Gives up, in order: blocks an SM, stages, keys of a tile, rows of a block.
TileConfig shrink_to_fit(TileConfig tile, const HeadShape& head, const DeviceProperties& device) {
  const int smallest_n = 16 * tile.warps_n;
  while (!fits(tile, head, device)) {
    if (tile.stages > 2) {
      --tile.stages;
    } else if (tile.min_blocks > 1) {
      --tile.min_blocks;
    } else if (tile.block_n > smallest_n) {
      tile.block_n = tile.block_n / 2 / smallest_n * smallest_n;
    } else if (tile.warps_m > 1) {
      tile.warps_m /= 2;
    } else {
      break;
    }
  }
  return tile;
}

int widest(const HeadShape& head) { return std::max(head.head_size, head.head_size_v); }

}  // namespace

TileConfig prefill_tile(const HeadShape& head, const DeviceProperties& device) {
  // With 16 rows a warp, reading keys and values out of shared memory takes as long as multiplying
  // with them; 32 rows halve that, as far as the accumulators (32 · head_size_v / 32 registers)
  // leave room for the scores.
  TileConfig tile{.row_tiles = 2, .warps_m = 4, .block_n = 64, .stages = 2, .min_blocks = 2};
  if (widest(head) <= 64) {
    tile.query_in_registers = true;
  } else if (widest(head) <= 128 && head.cache_bytes == 2) {
    tile.block_n = 48;  // With 64 the registers do not suffice.
  } else if (widest(head) > 128) {
    tile.row_tiles = 1;
    tile.warps_m = 8;
    tile.min_blocks = 1;
  }
  return shrink_to_fit(tile, head, device);
}

TileConfig decode_tile(const HeadShape& head, std::int64_t max_query_len,
                       const DeviceProperties& device) {
  // Bound by memory: what counts is bytes in flight, about 40 KiB an SM at least.
  TileConfig tile{.row_tiles = 1,
                  .warps_m = 1,
                  .warps_n = 4,
                  .block_n = 64,
                  .stages = 3,
                  .query_in_registers = widest(head) <= 128,
                  .min_blocks = 2};
  const std::int64_t all_rows = max_query_len * head.group;
  const std::int64_t rows = all_rows <= 64 ? all_rows : head.group;
  if (rows > 16) {
    tile.row_tiles = 2;
    tile.query_in_registers = widest(head) <= 64;
  }
  if (rows > 32) {
    tile.warps_m = 2;
    tile.warps_n = 2;
    tile.block_n = 64;
  }
  if (widest(head) <= 64 && tile.row_tiles == 1) {
    tile.block_n = 128;
  }
  if (widest(head) > 128) {
    tile.min_blocks = 1;
    tile.row_tiles = 1;  // The accumulators of 32 rows would not fit.
    if (rows > 16) {
      tile.warps_m = rows > 32 ? 4 : 2;
      tile.warps_n = rows > 32 ? 1 : 2;
    }
  }
  return shrink_to_fit(tile, head, device);
}

}  // namespace foveal::cuda::flash_attn
