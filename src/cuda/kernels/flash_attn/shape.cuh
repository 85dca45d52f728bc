#pragma once

// Tile shape of a forward kernel and the shared memory that follows from it. Included by both
// sides.
namespace foveal::cuda::flash_attn {

struct ForwardShape {
  int head_size;
  int head_size_v;
  int cache_bytes;  ///< Of an element of the cache: 2, or 1 for fp8.
  int page_size;    ///< Tokens of a block of the cache; 0: keys and values are plain.
  int row_tiles;    ///< 16-row tiles of a warp.
  int warps_m;      ///< Warps over query rows.
  int warps_n;      ///< Warps over keys; their results are merged at the end…
  bool teams;       ///< …or, with one stage, they exchange weights, and each has some columns of
                    ///< all keys' values.
  int block_n;      ///< Keys of a tile.
  int stages;       ///< Tiles of keys and values in flight or in use. With one, keys come while
                    ///< values are in use, and values while keys are.

  constexpr int block_m() const { return 16 * row_tiles * warps_m; }
  constexpr int threads() const { return 32 * warps_m * warps_n; }
  /// What the warps of a team exchange: weights in 16 bits, and a number for each row of each warp.
  constexpr int team_bytes() const { return 16 * row_tiles * (2 * block_n + 4 * warps_n); }
  constexpr int head_pad() const { return (head_size + 15) / 16 * 16; }
  constexpr int head_pad_v() const { return (head_size_v + 15) / 16 * 16; }
  /// fp8 keys and values that one warp alone multiplies with are widened by it, in registers;
  /// those that several do, once for all of them, through shared memory.
  constexpr bool widens_in_registers() const { return cache_bytes == 1 && warps_m == 1; }
  /// A tile of keys touches at most so many blocks of the cache.
  constexpr int pages_per_tile() const {
    if (page_size == 0) return 0;
    if (pages_aligned()) return page_size >= block_n ? 1 : block_n / page_size;
    return block_n / page_size + 2;
  }
  /// Copies are asked for so many tiles before they are needed.
  constexpr int ahead() const { return stages > 2 ? stages - 1 : 1; }
  /// Numbers of the blocks of so many tiles are held: of those whose keys are asked for next, and
  /// of those asked for at the same time.
  constexpr int page_ring() const { return ahead() > 1 ? 2 * ahead() : 4; }
  /// Tiles begin at multiples of block_n, so they then begin with a block or inside one.
  constexpr bool pages_aligned() const {
    return page_size != 0 && (page_size % block_n == 0 || block_n % page_size == 0);
  }
};

/// Bytes from one row of a tile to the next: an odd number of 16-byte chunks, so that the eight
/// rows that ldmatrix reads at once lie in different banks without any swizzle.
constexpr int row_bytes(int bytes) { return ((bytes + 15) / 16 | 1) * 16; }

/// Offsets in dynamic shared memory.
struct SharedLayout {
  int query;      ///< [block_m][head_pad], later the output's rows.
  int stages;     ///< Keys, then values, of each stage, as they lie in the cache.
  int key_bytes;  ///< Of one stage.
  int stage_bytes;
  int wide_key;  ///< fp8 caches with several warps over rows: the tile in use, in 16 bits.
  int wide_value;
  int teams;        ///< What their warps exchange.
  int page_ids;     ///< [page_ring][pages_per_tile]
  int block_state;  ///< Of the block: BlockState.
  int total;
};

constexpr SharedLayout shared_layout(const ForwardShape& s) {
  SharedLayout layout{};
  const int query_row = row_bytes(2 * s.head_pad());
  const int output_row = row_bytes(2 * s.head_pad_v());
  layout.query = 0;
  layout.stages = s.block_m() * (query_row > output_row ? query_row : output_row);
  const int key_row = s.cache_bytes == 2 ? query_row : row_bytes(s.head_size);
  const int value_row = s.cache_bytes == 2 ? output_row : row_bytes(s.head_size_v);
  layout.key_bytes = s.block_n * key_row;
  layout.stage_bytes = layout.key_bytes + s.block_n * value_row;
  int end = layout.stages + s.stages * layout.stage_bytes;
  if (s.cache_bytes == 1 && !s.widens_in_registers()) {
    layout.wide_key = end;
    layout.wide_value = end + s.block_n * query_row;
    end = layout.wide_value + s.block_n * output_row;
  }
  if (s.teams) {
    layout.teams = end;
    end += s.warps_m * s.team_bytes();
  }
  layout.block_state = end;
  end += 96;
  layout.page_ids = end;
  end += s.page_ring() * s.pages_per_tile() * 4;
  if (s.warps_n > 1 && !s.teams) {
    // The warps' partial results at the end: float32 rows, then maximum and sum of each.
    const int merge = layout.stages + s.warps_n * s.block_m() * ((s.head_pad_v() + 4) * 4 + 8);
    end = merge > end ? merge : end;
  }
  layout.total = end;
  return layout;
}

}  // namespace foveal::cuda::flash_attn
