// Attention of few rows (decode): too few to fill the lanes, so that lanes are over the head. Keys
// and values are widened on the way into the products; each is read once, and what bounds the speed
// is the memory. Compiled once per Highway target.

#if defined(FOVEAL_CPU_FEW_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEAL_CPU_FEW_ROWS_INL_H_
#undef FOVEAL_CPU_FEW_ROWS_INL_H_
#else
#define FOVEAL_CPU_FEW_ROWS_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/attention_kernel.h"
#include "cpu/row_ops-inl.h"
#include "cpu/scores-inl.h"
#include "cpu/tile-inl.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace foveal {
namespace HWY_NAMESPACE {

/// Where the rows of up to a tile's keys or values are.
struct TokenRows {
  const std::byte* at[kTileKeys];
  std::int64_t count = 0;
  std::int64_t bytes = 0;  ///< Of a row.
};

/// Rows that the memory begins to fetch while others are used, or a part of each.
struct FetchedRows {
  FetchedRows(const TokenRows& of, std::int64_t part, std::int64_t parts)
      : rows(of), begin(of.bytes * part / parts), end(of.bytes * (part + 1) / parts) {}

  HWY_INLINE void fetch(std::int64_t index) const {
    for (std::int64_t i = begin; i < end; i += kCacheLine) {
      hwy::Prefetch(rows.at[index] + i);
    }
  }

  const TokenRows& rows;
  std::int64_t begin;
  std::int64_t end;
};

/// While row `index` is used, the one kAhead later is fetched, which may be one of those that are
/// used next.
HWY_INLINE void fetch_ahead(const FetchedRows& now, const FetchedRows& next, std::int64_t index) {
  constexpr std::int64_t kAhead = 24;
  if (index + kAhead < now.rows.count) {
    now.fetch(index + kAhead);
  } else if (index + kAhead - now.rows.count < next.rows.count) {
    next.fetch(index + kAhead - now.rows.count);
  }
}

inline void find_rows(const AttentionCall& call, const Tile& tile, const cpu::TokenTensor& tokens,
                      std::int64_t size, std::int64_t first, std::int64_t count, TokenRows& rows) {
  rows.count = count;
  rows.bytes = size * size_of(tokens.dtype);
  find_tokens(call, tile, tokens, first, count, rows.at);
}

/// Elements i … of a row of `size`, as far as there are any, then zeros.
template <class Format>
HWY_INLINE hn::Vec<FloatTag> load_elements(const std::byte* row, std::int64_t i,
                                           std::int64_t size) {
  using Raw = typename Format::Raw;
  const FloatTag d;
  const auto* const from = reinterpret_cast<const Raw*>(row) + i;
  if (i + static_cast<std::int64_t>(hn::Lanes(d)) <= size) {
    return Format::load(d, from);
  }
  HWY_ALIGN Raw piece[16] = {};
  std::memcpy(piece, from, static_cast<std::size_t>(size - i) * sizeof(Raw));
  return Format::load(d, piece);
}

#if HWY_TARGET != HWY_SCALAR && !HWY_HAVE_SCALABLE
/// The sum of a vector's blocks of four lanes.
template <class D>
HWY_INLINE void store_sum_of_blocks(D d, hn::Vec<D> blocks, float* target) {
  if constexpr (hn::MaxLanes(D()) == 4) {
    hn::StoreU(blocks, d, target);
  } else {
    const hn::Half<D> half;
    store_sum_of_blocks(half, hn::Add(hn::LowerHalf(half, blocks), hn::UpperHalf(half, blocks)),
                        target);
  }
}
#endif

/// The sums over the lanes of four vectors, to target[0], …, target[3].
HWY_INLINE void store_sums(hn::Vec<FloatTag> a, hn::Vec<FloatTag> b, hn::Vec<FloatTag> c,
                           hn::Vec<FloatTag> e, float* target) {
  const FloatTag d;
#if HWY_TARGET == HWY_SCALAR || HWY_HAVE_SCALABLE
  target[0] = hn::GetLane(hn::SumOfLanes(d, a));
  target[1] = hn::GetLane(hn::SumOfLanes(d, b));
  target[2] = hn::GetLane(hn::SumOfLanes(d, c));
  target[3] = hn::GetLane(hn::SumOfLanes(d, e));
#else
  // In each block of four lanes: a0 + a2, b0 + b2, a1 + a3, b1 + b3; then the sums of all four.
  const hn::Repartition<double, FloatTag> pairs;
  const auto add_halves = [&](hn::Vec<FloatTag> x, hn::Vec<FloatTag> y) HWY_ATTR {
    return hn::BitCast(pairs, hn::Add(hn::InterleaveLower(d, x, y), hn::InterleaveUpper(d, x, y)));
  };
  const auto ab = add_halves(a, b);
  const auto ce = add_halves(c, e);
  const auto blocks = hn::Add(hn::BitCast(d, hn::InterleaveLower(pairs, ab, ce)),
                              hn::BitCast(d, hn::InterleaveUpper(pairs, ab, ce)));
  store_sum_of_blocks(d, blocks, target);
#endif
}

/// Scores of kRows rows (1 or 4) and four keys, [row][kTileKeys]: dot products.
template <class Format, int kRows>
HWY_INLINE void score_four_keys(const float* query, std::int64_t query_stride,
                                const std::byte* const* keys, std::int64_t size, float* scores) {
  const FloatTag d;
  using V = hn::Vec<FloatTag>;
  const V zero = hn::Zero(d);
  V s00 = zero, s01 = zero, s02 = zero, s03 = zero;
  V s10 = zero, s11 = zero, s12 = zero, s13 = zero;
  V s20 = zero, s21 = zero, s22 = zero, s23 = zero;
  V s30 = zero, s31 = zero, s32 = zero, s33 = zero;
  for (std::int64_t i = 0; i < size; i += static_cast<std::int64_t>(hn::Lanes(d))) {
    const V k0 = load_elements<Format>(keys[0], i, size);
    const V k1 = load_elements<Format>(keys[1], i, size);
    const V k2 = load_elements<Format>(keys[2], i, size);
    const V k3 = load_elements<Format>(keys[3], i, size);
    const auto add_row = [&](std::int64_t row, V& s0, V& s1, V& s2, V& s3) HWY_ATTR {
      if (row < kRows) {
        const V q = hn::Load(d, query + row * query_stride + i);
        s0 = hn::MulAdd(q, k0, s0);
        s1 = hn::MulAdd(q, k1, s1);
        s2 = hn::MulAdd(q, k2, s2);
        s3 = hn::MulAdd(q, k3, s3);
      }
    };
    add_row(0, s00, s01, s02, s03);
    add_row(1, s10, s11, s12, s13);
    add_row(2, s20, s21, s22, s23);
    add_row(3, s30, s31, s32, s33);
  }
  store_sums(s00, s01, s02, s03, scores);
  if constexpr (kRows > 1) {
    store_sums(s10, s11, s12, s13, scores + kTileKeys);
    store_sums(s20, s21, s22, s23, scores + 2 * kTileKeys);
    store_sums(s30, s31, s32, s33, scores + 3 * kTileKeys);
  }
}

/// Scores of all rows of the block, while the rows of `next` are fetched.
template <class Format>
void score_rows(const Tile& tile, const RowBlock& block, const TokenRows& keys,
                std::int64_t head_size, const TokenRows& next) {
  const FetchedRows all_keys(keys, 0, 1);
  const FetchedRows all_next(next, 0, 1);
  for (std::int64_t key = 0; key < keys.count; key += 4) {
    const std::byte* four[4];
    for (std::int64_t i = 0; i < 4; ++i) {
      fetch_ahead(all_keys, all_next, key + i);
      four[i] = keys.at[std::min(key + i, keys.count - 1)];
    }
    for (std::int64_t row = 0; row < block.num_rows;) {
      const float* const query = block.query + row * tile.key_stride;
      float* const scores = tile.scores + row * kTileKeys + key;
      if (row + 4 <= block.num_rows) {
        score_four_keys<Format, 4>(query, tile.key_stride, four, head_size, scores);
        row += 4;
      } else {
        score_four_keys<Format, 1>(query, tile.key_stride, four, head_size, scores);
        row += 1;
      }
    }
  }
}

/// Scores of kRows rows (1 or 4) and a vector of keys, which lie [key][stride]: lanes are keys, and
/// the terms of a product are added in the order of the head.
template <int kRows, class Fetch>
HWY_INLINE void score_keys_in_order(const float* query, const float* keys, std::int64_t stride,
                                    std::int64_t size, float* scores, const Fetch& fetch) {
  const TransposeTag d;
  using V = hn::Vec<TransposeTag>;
  V s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
  for (std::int64_t i = 0; i < size; i += 4) {
    fetch(i + 4);
    V k0, k1, k2, k3;
    load_columns(d, keys + i, stride, k0, k1, k2, k3);
    const auto add_row = [&](std::int64_t row, V& sum) HWY_ATTR {
      if (row < kRows) {
        const float* const q = query + row * stride + i;
        sum = hn::MulAdd(hn::Set(d, q[0]), k0, sum);
        sum = hn::MulAdd(hn::Set(d, q[1]), k1, sum);
        sum = hn::MulAdd(hn::Set(d, q[2]), k2, sum);
        sum = hn::MulAdd(hn::Set(d, q[3]), k3, sum);
      }
    };
    add_row(0, s0);
    add_row(1, s1);
    add_row(2, s2);
    add_row(3, s3);
  }
  hn::Store(s0, d, scores);
  if constexpr (kRows > 1) {
    hn::Store(s1, d, scores + kTileKeys);
    hn::Store(s2, d, scores + 2 * kTileKeys);
    hn::Store(s3, d, scores + 3 * kTileKeys);
  }
}

/// score_rows with the bits that rows on lanes have. A vector of keys at a time is widened, into
/// the place of the tile's keys.
template <class Format>
void score_rows_in_order(const Tile& tile, const RowBlock& block, const TokenRows& keys,
                         std::int64_t head_size, const TokenRows& next) {
  const FetchedRows all_keys(keys, 0, 1);
  const FetchedRows all_next(next, 0, 1);
  const std::int64_t n = static_cast<std::int64_t>(hn::Lanes(TransposeTag()));
  for (std::int64_t first = 0; first < keys.count; first += n) {
    const std::int64_t count = std::min(n, keys.count - first);
    // As many rows as there are keys, evenly over the work, of which widening is a fifth.
    std::int64_t fetched = 0;
    const auto fetch = [&](std::int64_t done, std::int64_t of) HWY_ATTR {
      for (; fetched * of < done * n; ++fetched) {
        fetch_ahead(all_keys, all_next, first + fetched);
      }
    };
    for (std::int64_t key = 0; key < count; ++key) {
      fetch(key + 1, 5 * n);
      load_row_as<Format>(keys.at[first + key], tile.keys + key * tile.key_stride,
                          static_cast<std::size_t>(head_size));
    }
    zero_padding(tile.keys, count, head_size, tile.key_stride);
    const auto fetch_more = [&](std::int64_t elements)
                                HWY_ATTR { fetch(head_size + 4 * elements, 5 * head_size); };
    for (std::int64_t row = 0; row < block.num_rows;) {
      const float* const query = block.query + row * tile.key_stride;
      float* const scores = tile.scores + row * kTileKeys + first;
      if (row + 4 <= block.num_rows) {
        score_keys_in_order<4>(query, tile.keys, tile.key_stride, head_size, scores, fetch_more);
        row += 4;
      } else {
        score_keys_in_order<1>(query, tile.keys, tile.key_stride, head_size, scores, fetch_more);
        row += 1;
      }
    }
  }
}

/// The rows' sums with the tile's weights, key by key, on lanes of rows.
inline void add_weights_in_order(const Tile& tile, const RowBlock& block) {
  const TransposeTag d;
  for (std::int64_t row = 0; row < block.num_rows; row += static_cast<std::int64_t>(hn::Lanes(d))) {
    auto sum = hn::Mul(hn::Load(d, block.sum + row), hn::Load(d, block.correction + row));
    for (std::int64_t key = 0; key < tile.num_keys; key += 4) {
      hn::Vec<TransposeTag> w0, w1, w2, w3;  // Past the last key they are 0.
      load_columns(d, tile.scores + row * kTileKeys + key, kTileKeys, w0, w1, w2, w3);
      sum = hn::Add(hn::Add(hn::Add(hn::Add(sum, w0), w1), w2), w3);
    }
    hn::Store(sum, d, block.sum + row);
  }
}

/// online_softmax for scores [row][kTileKeys], in its order of the sum if wanted.
inline void online_softmax_of_rows(const Tile& tile, const RowBlock& block, bool in_order) {
  const FloatTag d;
  const std::int64_t n = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t num_keys = (tile.num_keys + n - 1) / n * n;
  for (std::int64_t row = 0; row < block.num_rows; ++row) {
    float* const scores = tile.scores + row * kTileKeys;
    std::fill(scores + tile.num_keys, scores + num_keys, kMinusInfinity);
    auto max = hn::Set(d, kMinusInfinity);
    for (std::int64_t key = 0; key < num_keys; key += n) {
      max = hn::Max(max, hn::Load(d, scores + key));
    }
    const float tile_max = hn::GetLane(hn::MaxOfLanes(d, max));
    const float old_max = block.max[row];
    const float new_max = tile_max > old_max + kMaxSlack ? tile_max : old_max;
    const auto shift = hn::Set(d, new_max == kMinusInfinity ? 0.0F : new_max);
    auto sum = hn::Zero(d);
    for (std::int64_t key = 0; key < num_keys; key += n) {
      const auto weight = exp(d, hn::Sub(hn::Load(d, scores + key), shift));
      hn::Store(weight, d, scores + key);
      sum = hn::Add(sum, weight);
    }
    const float correction =
        new_max == old_max ? 1.0F : hn::GetLane(exp(d, hn::Sub(hn::Set(d, old_max), shift)));
    block.max[row] = new_max;
    block.correction[row] = correction;
    if (!in_order) {
      block.sum[row] = block.sum[row] * correction + hn::GetLane(hn::SumOfLanes(d, sum));
    }
  }
  if (in_order) {
    add_weights_in_order(tile, block);
  }
}

/// output[row][i …] += Σ weights[row][key] · values[key][i …] for kRows rows (1 or 4) and four
/// vectors of elements.
template <class Format, int kRows>
HWY_INLINE void accumulate_four_vectors(const float* weights, const TokenRows& values,
                                        std::int64_t i, std::int64_t size, float* output,
                                        std::int64_t output_stride, const FetchedRows& now,
                                        const FetchedRows& next, bool fetch) {
  const FloatTag d;
  using V = hn::Vec<FloatTag>;
  const std::int64_t n = static_cast<std::int64_t>(hn::Lanes(d));
  // Past the padded end of a row lies the next one, or what belongs to no output.
  const std::int64_t end = output_stride - i;
  const auto start = [&](std::int64_t row, std::int64_t j) HWY_ATTR {
    return row < kRows && j * n < end ? hn::Load(d, output + row * output_stride + j * n)
                                      : hn::Zero(d);
  };
  V s00 = start(0, 0), s01 = start(0, 1), s02 = start(0, 2), s03 = start(0, 3);
  V s10 = start(1, 0), s11 = start(1, 1), s12 = start(1, 2), s13 = start(1, 3);
  V s20 = start(2, 0), s21 = start(2, 1), s22 = start(2, 2), s23 = start(2, 3);
  V s30 = start(3, 0), s31 = start(3, 1), s32 = start(3, 2), s33 = start(3, 3);
  for (std::int64_t key = 0; key < values.count; ++key) {
    if (fetch) {
      fetch_ahead(now, next, key);
    }
    const auto load = [&](std::int64_t j) HWY_ATTR {
      return i + j * n < size ? load_elements<Format>(values.at[key], i + j * n, size)
                              : hn::Zero(d);
    };
    const V v0 = load(0);
    const V v1 = load(1);
    const V v2 = load(2);
    const V v3 = load(3);
    const auto add_row = [&](std::int64_t row, V& s0, V& s1, V& s2, V& s3) HWY_ATTR {
      if (row < kRows) {
        const V weight = hn::Set(d, weights[row * kTileKeys + key]);
        s0 = hn::MulAdd(weight, v0, s0);
        s1 = hn::MulAdd(weight, v1, s1);
        s2 = hn::MulAdd(weight, v2, s2);
        s3 = hn::MulAdd(weight, v3, s3);
      }
    };
    add_row(0, s00, s01, s02, s03);
    add_row(1, s10, s11, s12, s13);
    add_row(2, s20, s21, s22, s23);
    add_row(3, s30, s31, s32, s33);
  }
  const auto finish = [&](std::int64_t row, V s0, V s1, V s2, V s3) HWY_ATTR {
    float* const target = output + row * output_stride;
    hn::Store(s0, d, target);
    if (n < end) {
      hn::Store(s1, d, target + n);
    }
    if (2 * n < end) {
      hn::Store(s2, d, target + 2 * n);
    }
    if (3 * n < end) {
      hn::Store(s3, d, target + 3 * n);
    }
  };
  finish(0, s00, s01, s02, s03);
  if constexpr (kRows > 1) {
    finish(1, s10, s11, s12, s13);
    finish(2, s20, s21, s22, s23);
    finish(3, s30, s31, s32, s33);
  }
}

/// The same for all rows and elements, while the rows of `next` are fetched.
template <class Format>
void accumulate_rows(const Tile& tile, const RowBlock& block, const TokenRows& values,
                     std::int64_t size, const TokenRows& next) {
  const std::int64_t output_stride = padded_size(size);
  const std::int64_t elements = 4 * static_cast<std::int64_t>(hn::Lanes(FloatTag()));
  const std::int64_t steps = (size + elements - 1) / elements;
  for (std::int64_t step = 0; step < steps; ++step) {
    const std::int64_t i = step * elements;
    const FetchedRows part_of_values(values, step, steps);
    const FetchedRows part_of_next(next, step, steps);
    for (std::int64_t row = 0; row < block.num_rows;) {
      const float* const weights = tile.scores + row * kTileKeys;
      float* const output = block.output + row * output_stride + i;
      if (row + 4 <= block.num_rows) {
        accumulate_four_vectors<Format, 4>(weights, values, i, size, output, output_stride,
                                           part_of_values, part_of_next, row == 0);
        row += 4;
      } else {
        accumulate_four_vectors<Format, 1>(weights, values, i, size, output, output_stride,
                                           part_of_values, part_of_next, row == 0);
        row += 1;
      }
    }
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace foveal
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
