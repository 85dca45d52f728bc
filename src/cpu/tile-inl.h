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

#include "cpu/attention_kernel.h"
#include "cpu/row_ops-inl.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace foveal {
namespace HWY_NAMESPACE {

using cpu::AttentionCall;
using cpu::kTileKeys;
using cpu::kTileRows;
using cpu::WorkItem;

inline constexpr std::int64_t kCacheLine = 64;
inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

/// Rows are multiplied four at a time, and rows on lanes are whole vectors of them.
HWY_INLINE std::int64_t pad_rows(std::int64_t rows) {
  const std::int64_t multiple =
      std::max<std::int64_t>(4, static_cast<std::int64_t>(hn::Lanes(FloatTag())));
  return (rows + multiple - 1) / multiple * multiple;
}

/// One tile's scratch, and where it is in the keys.
struct Tile {
  Tile(const AttentionCall& call, const WorkItem& work, std::int64_t head, float* scratch)
      : item(work),
        kv_head(head),
        row_stride(pad_rows(work.num_rows)),
        key_stride(cpu::padded_size(call.head_size)),
        output_stride(cpu::padded_size(call.head_size_v)),
        value_stride(call.values_in_keys ? key_stride : output_stride) {
    const auto take = [&scratch](std::int64_t floats) {
      float* taken = scratch;
      scratch += floats;
      return taken;
    };
    query = take(kTileRows * key_stride);
    query_columns = take(call.head_size * kTileRows);
    keys = values = take(kTileKeys * std::max(key_stride, value_stride));
    scores = take(kTileKeys * kTileRows);
    output = take(kTileRows * output_stride);
    max = take(kTileRows);
    sum = take(kTileRows);
    correction = take(kTileRows);
    slope = take(kTileRows);
    position = reinterpret_cast<std::int32_t*>(take(kTileRows));
    visible_begin = reinterpret_cast<std::int32_t*>(take(kTileRows));
    visible_end = reinterpret_cast<std::int32_t*>(take(kTileRows));
  }

  std::int64_t query_head(const AttentionCall& call, std::int64_t row) const {
    return kv_head * call.group_size + (item.first_row + row) % call.group_size;
  }
  /// Of the item's tokens.
  std::int64_t token(const AttentionCall& call, std::int64_t row) const {
    return (item.first_row + row) / call.group_size;
  }

  const WorkItem& item;
  std::int64_t kv_head;
  std::int64_t row_stride;  ///< Rows, padded.
  std::int64_t key_stride;
  std::int64_t output_stride;
  std::int64_t value_stride;  ///< Of values that are part of their keys: that of the keys.

  float* query;          ///< [row][key_stride], scaled
  float* query_columns;  ///< [head_size][row_stride], scaled
  float* keys;           ///< [key][key_stride]
  float* values;         ///< [key][value_stride], in the place of the keys: one tile fits an L1
  float* scores;         ///< [key][row_stride]; after the softmax, the weights
  float* output;         ///< [row][output_stride], not normalised
  // One number a row:
  float* max;
  float* sum;
  float* correction;  ///< What sum and output so far are multiplied by.
  float* slope;
  std::int32_t* position;
  std::int32_t* visible_begin;
  std::int32_t* visible_end;

  std::int64_t first_key = 0;
  std::int64_t num_keys = 0;
};

// ---- load
// ----------------------------------------------------------------------------------------

inline void zero_padding(float* rows, std::int64_t num_rows, std::int64_t size,
                         std::int64_t stride) {
  for (std::int64_t row = 0; row < num_rows && size < stride; ++row) {
    std::fill(rows + row * stride + size, rows + (row + 1) * stride, 0.0F);
  }
}

/// Scaled queries, and with rows on lanes their transpose, where rows of padding are 0.
inline void load_query(const AttentionCall& call, const Tile& tile, bool rows_on_lanes) {
  const FloatTag d;
  for (std::int64_t row = 0; row < tile.item.num_rows; ++row) {
    const std::byte* source =
        call.query.row(tile.item.first_token + tile.token(call, row), tile.query_head(call, row));
    float* target = tile.query + row * tile.key_stride;
    load_row(call.query.dtype, source, target, static_cast<std::size_t>(call.head_size));
    for (std::int64_t i = 0; i < tile.key_stride; i += static_cast<std::int64_t>(hn::Lanes(d))) {
      hn::Store(hn::Mul(hn::Load(d, target + i), hn::Set(d, call.scale)), d, target + i);
    }
  }
  zero_padding(tile.query, tile.item.num_rows, call.head_size, tile.key_stride);
  if (!rows_on_lanes) {
    return;
  }
  for (std::int64_t i = 0; i < call.head_size; ++i) {
    float* column = tile.query_columns + i * tile.row_stride;
    for (std::int64_t row = 0; row < tile.item.num_rows; ++row) {
      column[row] = tile.query[row * tile.key_stride + i];
    }
    std::fill(column + tile.item.num_rows, column + tile.row_stride, 0.0F);
  }
}

inline void start_rows(const AttentionCall& call, const Tile& tile) {
  for (std::int64_t row = 0; row < tile.row_stride; ++row) {
    tile.max[row] = kMinusInfinity;
    tile.sum[row] = 0.0F;
    tile.slope[row] = 0.0F;
    tile.position[row] = 0;
    tile.visible_begin[row] = 0;
    tile.visible_end[row] = 0;
  }
  for (std::int64_t row = 0; row < tile.item.num_rows; ++row) {
    const std::int64_t position = tile.item.first_position + tile.token(call, row);
    const cpu::KeyRange visible =
        tile.item.unmasked ? tile.item.keys : call.mask.visible(tile.item.seq_len, position);
    tile.position[row] = static_cast<std::int32_t>(position);
    tile.visible_begin[row] = static_cast<std::int32_t>(visible.begin);
    tile.visible_end[row] = static_cast<std::int32_t>(visible.end);
    if (call.alibi_slopes != nullptr) {
      tile.slope[row] = call.alibi_slopes[tile.query_head(call, row)];
    }
  }
  std::fill(tile.output, tile.output + tile.row_stride * tile.output_stride, 0.0F);
}

/// The keys from `first` on that share a tile with it, up to the item's last.
HWY_INLINE std::int64_t keys_in_tile(const WorkItem& item, std::int64_t first) {
  return std::min(item.keys.end, (first / kTileKeys + 1) * kTileKeys) - first;
}

/// Where the rows of `count` keys (or values) from position `first` on are.
inline void find_tokens(const AttentionCall& call, const Tile& tile, const cpu::TokenTensor& tokens,
                        std::int64_t first, std::int64_t count, const std::byte** rows) {
  std::int64_t key = 0;
  while (key < count) {
    const cpu::TokenRun run = call.index.find(tile.item.request, first + key);
    const std::byte* source = tokens.data + run.block * tokens.block_stride +
                              run.token * tokens.token_stride + tile.kv_head * tokens.head_stride;
    const std::int64_t end = std::min(count, key + run.count);
    for (; key < end; ++key, source += tokens.token_stride) {
      rows[key] = source;
    }
  }
}

/// The tile's keys or values as float32. Between them the memory begins to fetch those of the next
/// tile: pages and strides between heads leave hardware prefetchers nothing to follow.
inline void load_tokens(const AttentionCall& call, const Tile& tile, const cpu::TokenTensor& tokens,
                        std::int64_t size, float* target, std::int64_t stride) {
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
    load_row(tokens.dtype, rows[key], target + key * stride, static_cast<std::size_t>(size));
  }
  zero_padding(target, tile.num_keys, size, stride);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace foveal
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
