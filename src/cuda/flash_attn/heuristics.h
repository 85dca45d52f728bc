#pragma once

#include <cstdint>
#include <string>

#include "cuda/driver.h"
#include "cuda/kernels/flash_attn/shape.cuh"
#include "cuda/kernels/flash_attn/sm90_shape.cuh"

// Which tile shapes the kernels of FLASH_ATTN get: pure functions of the problem and the device.
namespace foveal::cuda::flash_attn {

/// What of a layer decides the tile.
struct HeadShape {
  int head_size = 0;
  int head_size_v = 0;
  int query_bytes = 2;  ///< Of an element…
  int cache_bytes = 2;  ///< …and of keys and values as they come.
  int page_size = 0;    ///< 0: plain keys and values.
  int group = 1;

  friend auto operator<=>(const HeadShape&, const HeadShape&) = default;
};

/// Of one of two kernels: that of sm_80 and later, or, with warpgroups, that of sm_90a.
struct TileConfig {
  int row_tiles = 1;
  int warps_m = 1;
  int warps_n = 1;
  bool teams = false;  ///< The warps over keys share rows: see ForwardShape.
  int block_n = 64;
  int stages = 2;
  bool query_in_registers = false;
  int min_blocks = 1;  ///< Blocks that one SM should hold: bounds the registers.
  /// sm_90a: consumers of 64 rows each, which with block_n and stages is all that counts there.
  int warpgroups = 0;
  int query_stages = 1;  ///< Tiles of query rows in flight or in use.

  friend auto operator<=>(const TileConfig&, const TileConfig&) = default;

  bool is_sm90() const { return warpgroups > 0; }
  ForwardShape shape(const HeadShape& head) const {
    return {head.head_size,   head.head_size_v,
            head.cache_bytes, head.page_size,
            row_tiles,        warps_m,
            warps_n,          teams,
            block_n,          stages};
  }
  Sm90Shape sm90_shape(const HeadShape& head) const {
    return {head.head_size,   head.head_size_v, head.query_bytes,
            head.cache_bytes, head.page_size,   warpgroups,
            block_n,          query_stages,     stages};
  }
  int block_m() const { return is_sm90() ? 64 * warpgroups : 16 * row_tiles * warps_m; }
  int threads(const HeadShape& head) const {
    return is_sm90() ? sm90_shape(head).threads() : 32 * warps_m * warps_n;
  }
  int shared_bytes(const HeadShape& head) const {
    return is_sm90() ? sm90_layout(sm90_shape(head)).total : shared_layout(shape(head)).total;
  }
};

/// For requests with many rows (prefill): a block has many rows, each warp all keys. That of sm_90a
/// where the device and the layer allow it, unless `version` is 2.
TileConfig prefill_tile(const HeadShape& head, std::int64_t max_query_len, int version,
                        const DeviceProperties& device);

/// Why the kernel of sm_90a cannot serve such a layer on such a device; empty when it can.
std::string why_not_sm90(const HeadShape& head, const DeviceProperties& device);

/// For tensors that the copy engine cannot read: the same tile by the kernel of sm_80, which a plan
/// for the other serves too.
TileConfig without_bulk_copies(const TileConfig& tile, const HeadShape& head);

/// For requests with few rows (decode): a tile holds all of them, the warps share the keys.
/// `max_query_len` is the step's. Queries in fp8 have the kernel of sm_90a here too.
TileConfig decode_tile(const HeadShape& head, std::int64_t max_query_len,
                       const DeviceProperties& device);

}  // namespace foveal::cuda::flash_attn
