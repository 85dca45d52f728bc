#include "cuda/flash_attn/heuristics.h"

#include <fmt/format.h>

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
      tile.block_n -= smallest_n;
    } else if (tile.warps_m > 1) {
      tile.warps_m /= 2;
    } else {
      break;
    }
  }
  return tile;
}

int widest(const HeadShape& head) { return std::max(head.head_size, head.head_size_v); }

TileConfig sm90_tile(const HeadShape& head, std::int64_t max_query_len) {
  // Two warpgroups have registers for scores of 128 keys, outputs of 128 columns and weights; the
  // outputs of 64 columns leave room for three.
  TileConfig tile{.block_n = 128, .stages = 2, .warpgroups = 2, .query_stages = 2};
  const bool widens = head.cache_bytes == 1;
  const bool widens_keys = widens && head.query_bytes == 2;
  if (widest(head) <= 64) {
    // With few rows the larger tile is mostly empty.
    tile.warpgroups = widens || max_query_len * head.group <= 256 ? 2 : 3;
    // Small tiles leave room for one more, so that warpgroups may be further apart.
    tile.stages = widens ? 2 : 3;
  } else if (widest(head) > 128) {
    tile.query_stages = 1;  // What the shared memory holds.
    const int size_v = head.head_size_v;
    if (widens_keys) {
      tile.block_n = size_v <= 128 ? 80 : 64;
    } else {
      tile.block_n = size_v <= 128 ? 128 : size_v <= 192 ? 96 : widens ? 80 : 64;
    }
  } else if (widens_keys) {
    tile.query_stages = 1;
  }
  return tile;
}

}  // namespace

std::string why_not_sm90(const HeadShape& head, const DeviceProperties& device) {
  if (device.compute_capability != 90) {
    return fmt::format("the device's compute capability is {}, it must be 90",
                       device.compute_capability);
  }
  if (head.cache_bytes < head.query_bytes && widest(head) > 192) {
    return "the cache is in fp8 and a head size is 256";
  }
  for (const int size : {head.head_size, head.head_size_v}) {
    if (size != 64 && size != 96 && size != 128 && size != 192 && size != 256) {
      return fmt::format("a head size is {}, served are 64, 96, 128, 192 and 256", size);
    }
  }
  if (head.head_size != head.head_size_v && (head.head_size != 192 || head.head_size_v != 128)) {
    return fmt::format("the head sizes are {} and {}, they must be equal, or 192 and 128",
                       head.head_size, head.head_size_v);
  }
  const TileConfig tile = sm90_tile(head, std::int64_t{1} << 30);
  if (tile.block_m() % head.group != 0) {
    return fmt::format("{} query heads share a KV head, their number must divide {}", head.group,
                       tile.block_m());
  }
  if (tile.shared_bytes(head) > device.shared_bytes_per_block) {
    return fmt::format("heads of {} and {} do not fit into shared memory", head.head_size,
                       head.head_size_v);
  }
  return {};
}

TileConfig without_bulk_copies(const TileConfig& tile, const HeadShape& head) {
  TileConfig result{
      .row_tiles = widest(head) <= 128 ? 2 : 1, .warps_m = 1, .block_n = tile.block_n, .stages = 2};
  result.warps_m = tile.block_m() / (16 * result.row_tiles);
  return result;
}

TileConfig prefill_tile(const HeadShape& head, std::int64_t max_query_len, int version,
                        const DeviceProperties& device) {
  if (version != 2 && why_not_sm90(head, device).empty()) {
    TileConfig tile = sm90_tile(head, max_query_len);
    if (tile.block_m() % head.group != 0) {
      tile = sm90_tile(head, std::int64_t{1} << 30);
    }
    return tile;
  }
  // With 16 rows a warp, reading keys and values out of shared memory takes as long as multiplying
  // with them; 32 rows halve that, as far as the accumulators (32 · head_size_v / 32 registers)
  // leave room for the scores.
  TileConfig tile{.row_tiles = 2, .warps_m = 4, .block_n = 64, .stages = 2, .min_blocks = 2};
  if (widest(head) <= 64) {
    // More keys where they are plain: of 64, each of the four warps brings whole blocks of 16.
    tile.query_in_registers = true;
    tile.block_n = head.cache_bytes == 2 && head.page_size == 0 ? 96 : 64;
    if (!fits(tile, head, device)) {
      tile.block_n = 64;
    }
  } else if (widest(head) <= 128) {
    if (head.cache_bytes == 2 && !fits(tile, head, device)) {
      tile.block_n = 48;
    }
  } else if (widest(head) <= 256 && head.cache_bytes == 2 &&
             tile.shape(head).head_pad_v() % 32 == 0) {
    // Two warps share 32 rows and each has half the columns. One stage leaves room for more keys,
    // in whole blocks of the cache.
    tile.warps_n = 2;
    tile.teams = true;
    tile.block_n = head.page_size == 0 || 96 % head.page_size == 0 ? 96 : 64;
    tile.stages = 1;
    tile.min_blocks = 1;
  } else {
    tile.row_tiles = 1;
    tile.warps_m = 8;
    tile.min_blocks = 1;
  }
  return shrink_to_fit(tile, head, device);
}

TileConfig decode_tile(const HeadShape& head, std::int64_t max_query_len,
                       const DeviceProperties& device) {
  if (head.query_bytes == 1) {
    return sm90_tile(head, max_query_len);
  }
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
