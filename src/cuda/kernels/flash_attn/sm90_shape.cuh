#pragma once

// Tile shape of a forward kernel for sm_90a and the shared memory that follows from it. Included by
// both sides.
namespace foveal::cuda::flash_attn {

struct Sm90Shape {
  int head_size;
  int head_size_v;
  int query_bytes;  ///< Of an element.
  int cache_bytes;  ///< Of keys and values as they come.
  int page_size;    ///< Tokens of a block of the cache; 0: keys and values are plain.
  int warpgroups;   ///< Of 64 query rows each.
  int block_n;      ///< Keys of a tile.
  int query_stages;
  int stages;  ///< Tiles of keys, and of values, in flight or in use.

  constexpr int block_m() const { return 64 * warpgroups; }
  /// Keys are multiplied in the query's type; values in 16 bits, for products of fp8 are not added
  /// up in float32.
  constexpr bool widens_keys() const { return cache_bytes < query_bytes; }
  constexpr bool widens_values() const { return cache_bytes == 1; }
  /// Warps that widen: four of another warpgroup, or, where the outputs leave no registers for more
  /// threads, one of the producers'.
  constexpr int wideners() const {
    if (!widens_values()) return 0;
    return head_size_v <= 192 ? 4 : 1;
  }
  constexpr int threads() const { return 128 * (warpgroups + (wideners() == 4 ? 2 : 1)); }
  /// A row of a tile is cut into pieces of 128 bytes, each with a tile of its own.
  static constexpr int chunks(int bytes) { return (bytes + 127) / 128; }
  /// Rows leave a warp in pieces of so many columns, through shared memory, where they stand a
  /// 16-byte chunk further apart, so that the eight rows of a matrix lie in different banks.
  constexpr int store_columns() const { return head_size_v % 64 == 0 ? 64 : 32; }
  constexpr int store_pitch() const { return store_columns() * 2 + 16; }
  static constexpr int work_stages() { return 2; }
  static constexpr int work_bytes() { return 128; }
  /// Tokens that one copy brings: they must lie in one block of the cache.
  constexpr int box_tokens() const {
    if (page_size == 0) return block_n;
    int a = page_size;
    int b = block_n;
    while (b != 0) {
      const int rest = a % b;
      a = b;
      b = rest;
    }
    return a;
  }
};

/// Offsets in dynamic shared memory; tiles begin at multiples of 1024 bytes.
struct Sm90Layout {
  int query;   ///< [stage][chunk][block_m][128 bytes]
  int keys;    ///< [stage][chunk][block_n][128 bytes]
  int values;  ///< Likewise; and, where they are widened, as they come:
  int raw_keys;
  int raw_values;
  int key_bytes;  ///< Of a stage.
  int value_bytes;
  int raw_key_bytes;
  int raw_value_bytes;
  /// [warp of consumers][16 rows][store_pitch]; where nothing is left for it, in the query's place.
  int output;
  int barriers;  ///< full and empty of each stage of six rings, and one more
  int works;     ///< [work_stages]
  int total;
};

constexpr Sm90Layout sm90_layout(const Sm90Shape& s) {
  Sm90Layout layout{};
  layout.query = 0;
  layout.keys = s.query_stages * s.chunks(s.head_size * s.query_bytes) * s.block_m() * 128;
  layout.key_bytes = s.chunks(s.head_size * s.query_bytes) * s.block_n * 128;
  layout.value_bytes = s.chunks(s.head_size_v * 2) * s.block_n * 128;
  layout.raw_key_bytes =
      s.widens_keys() ? s.chunks(s.head_size * s.cache_bytes) * s.block_n * 128 : 0;
  layout.raw_value_bytes =
      s.widens_values() ? s.chunks(s.head_size_v * s.cache_bytes) * s.block_n * 128 : 0;
  layout.values = layout.keys + s.stages * layout.key_bytes;
  layout.raw_keys = layout.values + s.stages * layout.value_bytes;
  layout.raw_values = layout.raw_keys + s.stages * layout.raw_key_bytes;
  layout.output = layout.raw_values + s.stages * layout.raw_value_bytes;
  layout.barriers = layout.output + s.block_m() * s.store_pitch();
  constexpr int kMostBytes = 227 * 1024;
  constexpr int kBarriersAndWorks = 1024;
  if (layout.barriers > kMostBytes - kBarriersAndWorks) {
    layout.barriers = layout.output;
    layout.output = layout.query;
  }
  const int rings = 4 * s.stages + s.query_stages + s.work_stages();
  layout.works = (layout.barriers + (2 * rings + 1) * 8 + 15) / 16 * 16;
  layout.total = layout.works + s.work_stages() * s.work_bytes();
  return layout;
}

}  // namespace foveal::cuda::flash_attn
