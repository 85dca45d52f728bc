#pragma once

// Tile shape of a forward kernel for sm_90a and the shared memory that follows from it. Included by
// both sides.
namespace foveal::cuda::flash_attn {

struct Sm90Shape {
  int head_size;
  int head_size_v;
  int page_size;   ///< Tokens of a block of the cache; 0: keys and values are plain.
  int warpgroups;  ///< Of 64 query rows each.
  int block_n;     ///< Keys of a tile.
  int query_stages;
  int stages;      ///< Tiles of keys, and of values, in flight or in use.

  constexpr int block_m() const { return 64 * warpgroups; }
  constexpr int threads() const { return 128 * (warpgroups + 1); }
  /// A row of a tile is cut into pieces of 64 elements, 128 bytes, each with a tile of its own.
  constexpr int chunks() const { return (head_size + 63) / 64; }
  constexpr int chunks_v() const { return (head_size_v + 63) / 64; }
  static constexpr int work_stages() { return 2; }
  static constexpr int work_bytes() { return 112; }
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
  int query;   ///< [stage][chunk][block_m][64]
  int keys;    ///< [stage][chunk][block_n][64]
  int values;  ///< Likewise.
  int key_bytes;
  int value_bytes;
  int barriers;  ///< full and empty of each stage of four rings, and one more
  int works;  ///< [work_stages]
  int total;
};

constexpr Sm90Layout sm90_layout(const Sm90Shape& s) {
  Sm90Layout layout{};
  layout.query = 0;
  layout.keys = s.query_stages * s.chunks() * s.block_m() * 128;
  layout.key_bytes = s.chunks() * s.block_n * 128;
  layout.value_bytes = s.chunks_v() * s.block_n * 128;
  layout.values = layout.keys + s.stages * layout.key_bytes;
  layout.barriers = layout.values + s.stages * layout.value_bytes;
  const int rings = 2 * s.stages + s.query_stages + s.work_stages();
  layout.works = (layout.barriers + (2 * rings + 1) * 8 + 15) / 16 * 16;
  layout.total = layout.works + s.work_stages() * s.work_bytes();
  return layout;
}

}  // namespace foveal::cuda::flash_attn
