// A task's scratch, and what is loaded into it, compiled once per Highway target.

#if defined(FOVEAL_CPU_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEAL_CPU_TILE_INL_H_
#undef FOVEAL_CPU_TILE_INL_H_
#else
#define FOVEAL_CPU_TILE_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "cpu/attention_kernel.h"
#include "cpu/row_ops-inl.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace foveal {
namespace HWY_NAMESPACE {

using cpu::AttentionCall;
using cpu::kBlockRows;
using cpu::kMaxItemRows;
using cpu::kTileKeys;
using cpu::padded_size;
using cpu::WorkItem;

inline constexpr std::int64_t kCacheLine = 64;
inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

/// A thread's scratch, given out from its beginning.
class Scratch {
 public:
  explicit Scratch(float* begin) : next_(begin) {}

  template <typename T = float>
  T* take(std::int64_t floats) {
    float* const taken = next_;
    next_ += floats;
    return reinterpret_cast<T*>(taken);
  }

 private:
  float* next_;
};

/// Rows are multiplied four at a time, and rows on lanes are whole vectors of them.
HWY_INLINE std::int64_t pad_rows(std::int64_t rows) {
  const std::int64_t multiple =
      std::max<std::int64_t>(4, static_cast<std::int64_t>(hn::Lanes(FloatTag())));
  return (rows + multiple - 1) / multiple * multiple;
}

/// Up to kBlockRows rows of an item, and what is kept of them from tile to tile.
struct RowBlock {
  /// What the constructor takes of the scratch.
  static std::int64_t scratch_floats(std::int64_t head_size, std::int64_t head_size_v) {
    return kBlockRows * (padded_size(head_size) + padded_size(head_size_v) + 7);
  }

  RowBlock(const AttentionCall& call, const WorkItem& item, std::int64_t first, Scratch& scratch)
      : first_row(item.first_row + first),
        num_rows(std::min(kBlockRows, item.num_rows - first)),
        stride(pad_rows(num_rows)) {
    query = scratch.take(kBlockRows * padded_size(call.head_size));
    output = scratch.take(kBlockRows * padded_size(call.head_size_v));
    max = scratch.take(kBlockRows);
    sum = scratch.take(kBlockRows);
    correction = scratch.take(kBlockRows);
    slope = scratch.take(kBlockRows);
    position = scratch.take<std::int32_t>(kBlockRows);
    visible_begin = scratch.take<std::int32_t>(kBlockRows);
    visible_end = scratch.take<std::int32_t>(kBlockRows);
  }

  std::int64_t query_head(const AttentionCall& call, std::int64_t kv_head, std::int64_t row) const {
    return kv_head * call.group_size + (first_row + row) % call.group_size;
  }
  /// Of the item's tokens.
  std::int64_t token(const AttentionCall& call, std::int64_t row) const {
    return (first_row + row) / call.group_size;
  }
  /// Both ends of what a row sees grow with the row.
  std::int64_t first_visible() const { return visible_begin[0]; }
  std::int64_t last_visible() const { return visible_end[num_rows - 1]; }

  std::int64_t first_row;  ///< Packed row of the request.
  std::int64_t num_rows;
  std::int64_t stride;  ///< Rows, padded.

  float* query;   ///< Scaled: with rows on lanes [padded head_size][stride], else [row][padded
                  ///< head_size]
  float* output;  ///< Not normalised: with rows on lanes [size][stride], else [row][padded size]
  // One number a row:
  float* max;         ///< What scores are relative to, see online_softmax.
  float* sum;         ///< Of the weights.
  float* correction;  ///< What the output so far is multiplied by.
  float* slope;
  std::int32_t* position;
  std::int32_t* visible_begin;
  std::int32_t* visible_end;
};

/// Some keys of an item's, which all its blocks are multiplied with.
struct Tile {
  static std::int64_t scratch_floats(std::int64_t head_size, std::int64_t head_size_v) {
    return kTileKeys *
           (padded_size(head_size) + padded_size(head_size_v) + kBlockRows + kBlockRows / 2);
  }

  Tile(const AttentionCall& call, const WorkItem& work, std::int64_t head, Scratch& scratch)
      : item(work),
        kv_head(head),
        key_stride(padded_size(call.head_size)),
        value_stride(call.values_in_keys ? key_stride : padded_size(call.head_size_v)) {
    keys = scratch.take(kTileKeys * padded_size(call.head_size));
    value_space = scratch.take(kTileKeys * padded_size(call.head_size_v));
    values = call.values_in_keys ? keys : value_space;
    scores = scratch.take(kTileKeys * kBlockRows);
    weight_pairs = scratch.take<std::uint32_t>(kTileKeys * kBlockRows / 2);
  }

  const WorkItem& item;
  std::int64_t kv_head;
  std::int64_t key_stride;
  std::int64_t value_stride;  ///< Of values that are part of their keys: that of the keys.

  float* keys;  ///< [key][key_stride]
  float* value_space;
  float* values;  ///< [key][value_stride], in their space or in that of the keys
  float* scores;  ///< Of one block, [key][stride]; after the softmax, the weights
  std::uint32_t*
      weight_pairs;  ///< These as bfloat16, [key / 2][stride], where the product wants it

  std::int64_t first_key = 0;
  std::int64_t num_keys = 0;
};

// ---- load ----

inline void zero_padding(float* rows, std::int64_t num_rows, std::int64_t size,
                         std::int64_t stride) {
  for (std::int64_t row = 0; row < num_rows && size < stride; ++row) {
    std::fill(rows + row * stride + size, rows + (row + 1) * stride, 0.0F);
  }
}

/// Vectors of unknown size cannot be put together from blocks of four lanes: one block at a time.
using TransposeTag = std::conditional_t<HWY_HAVE_SCALABLE, hn::CappedTag<float, 4>, FloatTag>;

#if HWY_TARGET != HWY_SCALAR
/// Elements 0 to 3 of every fourth row, block by block.
template <class D>
HWY_INLINE hn::Vec<D> load_blocks(D d, const float* source, std::int64_t stride) {
  if constexpr (hn::MaxLanes(D()) <= 4) {
    return hn::Load(d, source);
  } else {
    const hn::Half<D> half;
    const std::int64_t rows = static_cast<std::int64_t>(hn::MaxLanes(half));
    return hn::Combine(d, load_blocks(half, source + rows * stride, stride),
                       load_blocks(half, source, stride));
  }
}
#endif

/// Elements 0 to 3 of as many rows as there are lanes, as four vectors over these rows.
template <class D, class V = hn::Vec<D>>
HWY_INLINE void load_columns(D d, const float* source, [[maybe_unused]] std::int64_t stride, V& c0,
                             V& c1, V& c2, V& c3) {
#if HWY_TARGET == HWY_SCALAR
  c0 = hn::Load(d, source);
  c1 = hn::Load(d, source + 1);
  c2 = hn::Load(d, source + 2);
  c3 = hn::Load(d, source + 3);
#else
  const V r0 = load_blocks(d, source, stride);
  const V r1 = load_blocks(d, source + stride, stride);
  const V r2 = load_blocks(d, source + 2 * stride, stride);
  const V r3 = load_blocks(d, source + 3 * stride, stride);
  const V even_low = hn::InterleaveLower(d, r0, r2);
  const V even_high = hn::InterleaveUpper(d, r0, r2);
  const V odd_low = hn::InterleaveLower(d, r1, r3);
  const V odd_high = hn::InterleaveUpper(d, r1, r3);
  c0 = hn::InterleaveLower(d, even_low, odd_low);
  c1 = hn::InterleaveUpper(d, even_low, odd_low);
  c2 = hn::InterleaveLower(d, even_high, odd_high);
  c3 = hn::InterleaveUpper(d, even_high, odd_high);
#endif
}

/// target[column][row] = source[row][column], for whole vectors of rows and a multiple of 4
/// columns.
inline void transpose(const float* source, std::int64_t source_stride, std::int64_t rows,
                      std::int64_t columns, float* target, std::int64_t target_stride) {
  const TransposeTag d;
  for (std::int64_t row = 0; row < rows; row += static_cast<std::int64_t>(hn::Lanes(d))) {
    for (std::int64_t column = 0; column < columns; column += 4) {
      hn::Vec<TransposeTag> c0, c1, c2, c3;
      load_columns(d, source + row * source_stride + column, source_stride, c0, c1, c2, c3);
      float* const to = target + column * target_stride + row;
      hn::Store(c0, d, to);
      hn::Store(c1, d, to + target_stride);
      hn::Store(c2, d, to + 2 * target_stride);
      hn::Store(c3, d, to + 3 * target_stride);
    }
  }
}

inline const std::byte* query_row(const AttentionCall& call, const Tile& tile,
                                  const RowBlock& block, std::int64_t row) {
  return call.query.row(tile.item.first_token + block.token(call, row),
                        block.query_head(call, tile.kv_head, row));
}

/// Scaled queries as rows [row][key_stride], those of padding 0.
inline void load_query_rows(const AttentionCall& call, const Tile& tile, const RowBlock& block,
                            float* rows) {
  const FloatTag d;
  for (std::int64_t row = 0; row < block.num_rows; ++row) {
    float* const target = rows + row * tile.key_stride;
    load_row(call.query.dtype, query_row(call, tile, block, row), target,
             static_cast<std::size_t>(call.head_size));
    for (std::int64_t i = 0; i < tile.key_stride; i += static_cast<std::int64_t>(hn::Lanes(d))) {
      hn::Store(hn::Mul(hn::Load(d, target + i), hn::Set(d, call.scale)), d, target + i);
    }
  }
  zero_padding(rows, block.num_rows, call.head_size, tile.key_stride);
  std::fill(rows + block.num_rows * tile.key_stride, rows + block.stride * tile.key_stride, 0.0F);
}

inline void start_rows(const AttentionCall& call, const Tile& tile, const RowBlock& block) {
  for (std::int64_t row = 0; row < block.stride; ++row) {
    block.max[row] = kMinusInfinity;
    block.sum[row] = 0.0F;
    block.slope[row] = 0.0F;
    block.position[row] = 0;
    block.visible_begin[row] = 0;
    block.visible_end[row] = 0;
  }
  for (std::int64_t row = 0; row < block.num_rows; ++row) {
    const std::int64_t position = tile.item.first_position + block.token(call, row);
    const cpu::KeyRange visible =
        tile.item.unmasked ? tile.item.keys : call.mask.visible(tile.item.seq_len, position);
    block.position[row] = static_cast<std::int32_t>(position);
    block.visible_begin[row] = static_cast<std::int32_t>(visible.begin);
    block.visible_end[row] = static_cast<std::int32_t>(visible.end);
    if (call.alibi_slopes != nullptr) {
      block.slope[row] = call.alibi_slopes[block.query_head(call, tile.kv_head, row)];
    }
  }
  std::fill(block.output, block.output + block.stride * padded_size(call.head_size_v), 0.0F);
}

/// The keys from `first` on that share a tile with it, up to the item's last; 0 or less past it.
HWY_INLINE std::int64_t keys_in_tile(const WorkItem& item, std::int64_t first) {
  return std::min(item.keys.end, (first / kTileKeys + 1) * kTileKeys) - first;
}

/// Where the rows of `count` keys (or values) from position `first` on are.
inline void find_tokens(const AttentionCall& call, const Tile& tile, const cpu::TokenTensor& tokens,
                        std::int64_t first, std::int64_t count, const std::byte** rows) {
  const auto add = [&](std::int64_t block, std::int64_t token, std::int64_t run) HWY_ATTR {
    const std::byte* source = tokens.data + block * tokens.block_stride +
                              token * tokens.token_stride + tile.kv_head * tokens.head_stride;
    for (; run > 0; --run, source += tokens.token_stride) {
      *rows++ = source;
    }
  };
  call.index.for_each_run(tile.item.request, first, count, add);
}

/// Calls load(source, key) for the rows of the tile's keys or values. Between them the memory
/// begins to fetch those of the next tile: pages and strides between heads leave hardware
/// prefetchers nothing to follow.
template <typename Load>
HWY_INLINE void for_each_token(const AttentionCall& call, const Tile& tile,
                               const cpu::TokenTensor& tokens, std::int64_t size,
                               const Load& load) {
  const std::byte* rows[kTileKeys];
  const std::byte* next_rows[kTileKeys];
  const std::int64_t next = tile.first_key + tile.num_keys;
  const std::int64_t num_next = next < tile.item.keys.end ? keys_in_tile(tile.item, next) : 0;
  find_tokens(call, tile, tokens, tile.first_key, tile.num_keys, rows);
  find_tokens(call, tile, tokens, next, num_next, next_rows);
  const std::int64_t row_bytes = size * size_of(tokens.dtype);
  for (std::int64_t key = 0; key < tile.num_keys; ++key) {
    for (std::int64_t i = 0; key < num_next && i < row_bytes; i += kCacheLine) {
      hwy::Prefetch(next_rows[key] + i);
    }
    load(rows[key], key);
  }
}

/// The tile's keys or values as float32.
inline void load_tokens(const AttentionCall& call, const Tile& tile, const cpu::TokenTensor& tokens,
                        std::int64_t size, float* target, std::int64_t stride) {
  for_each_token(call, tile, tokens, size, [&](const std::byte* source, std::int64_t key) HWY_ATTR {
    load_row(tokens.dtype, source, target + key * stride, static_cast<std::size_t>(size));
  });
  zero_padding(target, tile.num_keys, size, stride);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace foveal
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
