#pragma once

#include <cstdint>

#include "cuda/driver.h"
#include "cuda/kernels/flash_attn/shape.cuh"

// Which tile shapes the kernels of FLASH_ATTN get: pure functions of the problem and the device.
namespace foveal::cuda::flash_attn {

/// What of a layer decides the tile.
struct HeadShape {
  int head_size = 0;
  int head_size_v = 0;
  int cache_bytes = 2;  ///< Of an element.
  int page_size = 0;    ///< 0: plain keys and values.
  int group = 1;

  friend auto operator<=>(const HeadShape&, const HeadShape&) = default;
};

struct TileConfig {
  int row_tiles = 1;
  int warps_m = 1;
  int warps_n = 1;
  int block_n = 64;
  int stages = 2;
  bool query_in_registers = false;
  int min_blocks = 1;  ///< Blocks that one SM should hold: bounds the registers.

  friend auto operator<=>(const TileConfig&, const TileConfig&) = default;

  ForwardShape shape(const HeadShape& head) const {
    return {head.head_size, head.head_size_v, head.cache_bytes, head.page_size, row_tiles,
            warps_m,        warps_n,          block_n,          stages};
  }
};

/// For requests with many rows (prefill): a block has many rows, each warp all keys.
TileConfig prefill_tile(const HeadShape& head, const DeviceProperties& device);

/// For requests with few rows (decode): a tile holds all of them, the warps share the keys.
/// `max_query_len` is the step's.
TileConfig decode_tile(const HeadShape& head, std::int64_t max_query_len,
                       const DeviceProperties& device);

}  // namespace foveal::cuda::flash_attn
