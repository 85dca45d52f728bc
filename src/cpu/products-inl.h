// The two products of attention with rows on lanes, and how their operands lie, in float32 and by
// instructions for bfloat16; compiled once per Highway target.

#if defined(FOVEAL_CPU_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEAL_CPU_PRODUCTS_INL_H_
#undef FOVEAL_CPU_PRODUCTS_INL_H_
#else
#define FOVEAL_CPU_PRODUCTS_INL_H_
#endif

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "cpu/attention_kernel.h"
#include "cpu/multiply-inl.h"
#include "cpu/scores-inl.h"
#include "cpu/tile-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace foveal {
namespace HWY_NAMESPACE {

/// Everything is widened to float32 when it is loaded.
struct F32Products {
  /// Keys are multiplied in multiples of this: weights of 0 fill up.
  static constexpr std::int64_t kKeyStep = 1;

  /// Scores::factor of the products; queries are scaled.
  static float factor(const AttentionCall& /*call*/) { return 1.0F; }

  /// Lives as long as products are made.
  struct Scope {
    explicit Scope(const AttentionCall& /*call*/) {}
  };

  /// Queries become columns. `rows` has room for the block's as rows.
  static void load_query(const AttentionCall& call, const Tile& tile, const RowBlock& block,
                         float* rows) {
    load_query_rows(call, tile, block, rows);
    transpose(rows, tile.key_stride, block.stride, tile.key_stride, block.query, block.stride);
  }

  static void load_tile(const AttentionCall& call, const Tile& tile) {
    load_tokens(call, tile, call.key, call.head_size, tile.keys, tile.key_stride);
    if (!call.values_in_keys) {
      load_tokens(call, tile, call.value, call.head_size_v, tile.values, tile.value_stride);
    }
  }

  /// Keys past the last one, up to a multiple of 4, give scores that nothing reads.
  static void multiply_keys(const Tile& tile, const Scores& scores) {
    multiply(tile.keys, tile.key_stride, 1, scores.rows.query, scores.rows.stride,
             scores.call.head_size, false, scores.data, scores.rows.stride, scores.num_keys,
             scores.rows.stride);
  }

  static void weigh(const Tile& /*tile*/, const Scores& scores) { online_softmax(scores); }

  static bool all_values_finite(const AttentionCall& /*call*/, const Tile& tile) {
    const FloatTag d;
    auto zeros = hn::Zero(d);  // x − x is 0 for a finite x and NaN for others.
    for (std::int64_t i = 0; i < tile.num_keys * tile.value_stride;
         i += static_cast<std::int64_t>(hn::Lanes(d))) {
      const auto value = hn::Load(d, tile.values + i);
      zeros = hn::Add(zeros, hn::Sub(value, value));
    }
    return hn::AllFalse(d, hn::IsNaN(zeros));
  }

  static float value(const AttentionCall& /*call*/, const Tile& tile, std::int64_t key,
                     std::int64_t i) {
    return tile.values[key * tile.value_stride + i];
  }

  static void accumulate_values(const Tile& tile, const Scores& scores) {
    multiply(tile.values, 1, tile.value_stride, scores.data, scores.rows.stride, scores.num_keys,
             true, scores.rows.output, scores.rows.stride, scores.call.head_size_v,
             scores.rows.stride);
  }
};

/// Queries, keys, values and weights are bfloat16 (fp8 widens to it exactly), sums are float32.
/// Keys lie as rows, queries and weights as columns of pairs, values as columns.
struct Bf16Products {
  static constexpr std::int64_t kKeyStep = 32;

  static std::int64_t pad(std::int64_t size, std::int64_t multiple) {
    return (size + multiple - 1) / multiple * multiple;
  }
  static std::int64_t depth(const AttentionCall& call) { return pad(call.head_size, 32); }
  /// All of it has half the size of float32, so that the places are those of the tile's floats, the
  /// values' shared by rows and columns.
  static std::uint16_t* key_rows(const Tile& tile) {
    return reinterpret_cast<std::uint16_t*>(tile.keys);
  }
  static std::uint16_t* value_rows(const AttentionCall& call, const Tile& tile) {
    return call.values_in_keys ? key_rows(tile)
                               : reinterpret_cast<std::uint16_t*>(tile.value_space);
  }
  static std::int64_t value_row_stride(const AttentionCall& call) {
    return call.values_in_keys ? depth(call) : padded_size(call.head_size_v);
  }
  static std::uint16_t* value_columns(const AttentionCall& call, const Tile& tile) {
    return reinterpret_cast<std::uint16_t*>(tile.value_space) +
           kTileKeys * padded_size(call.head_size_v);
  }

  /// The softmax can scale along the way, if nothing comes between.
  static float factor(const AttentionCall& call) {
    return call.scale > 0.0F && are_plain(call) ? call.scale : 1.0F;
  }

  /// A score or mask of the user's may throw.
  class Scope {
   public:
    explicit Scope(const AttentionCall& call) : end_(call.bf16->end) { call.bf16->begin(); }
    ~Scope() { end_(); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    void (*end_)();
  };

  static void load_query(const AttentionCall& call, const Tile& tile, const RowBlock& block,
                         float* rows) {
    const std::int64_t words = depth(call) / 2;
    std::fill(rows, rows + block.stride * words, 0.0F);
    for (std::int64_t row = 0; row < block.num_rows; ++row) {
      std::memcpy(rows + row * words, query_row(call, tile, block, row),
                  static_cast<std::size_t>(2 * call.head_size));
    }
    transpose(rows, words, block.stride, words, block.query, block.stride);
  }

  static void load_rows(const AttentionCall& call, const Tile& tile, const cpu::TokenTensor& tokens,
                        std::int64_t size, std::uint16_t* target, std::int64_t stride) {
    for_each_token(call, tile, tokens, size,
                   [&](const std::byte* source, std::int64_t key) HWY_ATTR {
                     load_row_bf16(tokens.dtype, source, target + key * stride, size);
                     std::fill(target + key * stride + size, target + (key + 1) * stride, 0);
                   });
  }

  static void load_row_bf16(DType dtype, const std::byte* source, std::uint16_t* target,
                            std::int64_t size) {
    if (dtype == DType::bf16) {
      std::memcpy(target, source, static_cast<std::size_t>(2 * size));
      return;
    }
    HWY_ALIGN std::array<float, 256> piece;
    for (std::int64_t i = 0; i < size; i += std::ssize(piece)) {
      const auto count = static_cast<std::size_t>(std::min(std::ssize(piece), size - i));
      load_row(dtype, source + i * size_of(dtype), piece.data(), count);
      store_row(DType::bf16, piece.data(), 1.0F, 1.0F, target + i, count);
    }
  }

  static void load_tile(const AttentionCall& call, const Tile& tile) {
    load_rows(call, tile, call.key, call.head_size, key_rows(tile), depth(call));
    std::uint16_t* const rows = value_rows(call, tile);
    const std::int64_t stride = value_row_stride(call);
    if (!call.values_in_keys) {
      load_rows(call, tile, call.value, call.head_size_v, rows, stride);
    }
    const std::int64_t num_keys = pad(tile.num_keys, kKeyStep);
    std::fill(rows + tile.num_keys * stride, rows + num_keys * stride, 0);
    call.bf16->transpose(rows, stride, num_keys, padded_size(call.head_size_v),
                         value_columns(call, tile), kTileKeys);
  }

  /// Keys past the last one, up to a multiple of 16, give scores that nothing reads.
  static void multiply_keys(const Tile& tile, const Scores& scores) {
    const FloatTag d;
    const AttentionCall& call = scores.call;
    const std::int64_t stride = scores.rows.stride;
    call.bf16->multiply(key_rows(tile), depth(call),
                        reinterpret_cast<const std::uint32_t*>(scores.rows.query), stride,
                        depth(call), false, scores.data, stride, pad(scores.num_keys, 16), stride);
    const float scale = call.scale / scores.factor;
    for (std::int64_t i = 0; scale != 1.0F && i < scores.num_keys * stride;
         i += static_cast<std::int64_t>(hn::Lanes(d))) {
      hn::Store(hn::Mul(hn::Load(d, scores.data + i), hn::Set(d, scale)), d, scores.data + i);
    }
  }

  static void weigh(const Tile& tile, const Scores& scores) {
    online_softmax<true>(scores, tile.weight_pairs);
  }

  static bool all_values_finite(const AttentionCall& call, const Tile& tile) {
    const std::uint16_t* const rows = value_rows(call, tile);
    return std::none_of(rows, rows + tile.num_keys * value_row_stride(call),
                        [](std::uint16_t bits) { return (bits & 0x7F80) == 0x7F80; });
  }

  static float value(const AttentionCall& call, const Tile& tile, std::int64_t key,
                     std::int64_t i) {
    return bf16_to_float(value_rows(call, tile)[key * value_row_stride(call) + i]);
  }

  static void accumulate_values(const Tile& tile, const Scores& scores) {
    const AttentionCall& call = scores.call;
    call.bf16->multiply(value_columns(call, tile), kTileKeys, tile.weight_pairs, scores.rows.stride,
                        pad(scores.num_keys, kKeyStep), true, scores.rows.output,
                        scores.rows.stride, padded_size(call.head_size_v), scores.rows.stride);
  }
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace foveal
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
