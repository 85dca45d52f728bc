// What becomes of scores between the two products: soft cap, bias, mask and softmax, compiled once
// per Highway target.

#if defined(FOVEAL_CPU_SCORES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEAL_CPU_SCORES_INL_H_
#undef FOVEAL_CPU_SCORES_INL_H_
#else
#define FOVEAL_CPU_SCORES_INL_H_
#endif

#include <cstdint>

#include "cpu/attention_kernel.h"
#include "cpu/row_ops-inl.h"
#include "cpu/tile-inl.h"
#include "cpu/vector_math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace foveal {
namespace HWY_NAMESPACE {

/// See online_softmax.
inline constexpr float kMaxSlack = 8.0F;

/// Scores of a block of rows and some keys, [key][rows.stride].
struct Scores {
  const AttentionCall& call;
  const WorkItem& item;
  std::int64_t kv_head;
  const RowBlock& rows;
  float* data;
  std::int64_t first_key;
  std::int64_t num_keys;
  /// What `data` still has to be multiplied by, a positive number.
  float factor = 1.0F;
};

inline void soft_cap(const Scores& scores, float cap) {
  const FloatTag d;
  for (std::int64_t i = 0; i < scores.num_keys * scores.rows.stride;
       i += static_cast<std::int64_t>(hn::Lanes(d))) {
    const auto scaled = hn::Mul(hn::Load(d, scores.data + i), hn::Set(d, 1.0F / cap));
    hn::Store(hn::Mul(tanh(d, scaled), hn::Set(d, cap)), d, scores.data + i);
  }
}

inline void add_alibi(const Scores& scores) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  const std::int64_t n = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t row = 0; row < scores.rows.stride; row += n) {
    const auto slope = hn::Load(d, scores.rows.slope + row);
    const auto position = hn::Load(di, scores.rows.position + row);
    for (std::int64_t key = 0; key < scores.num_keys; ++key) {
      const auto key_position = hn::Set(di, static_cast<std::int32_t>(scores.first_key + key));
      const auto distance = hn::ConvertTo(d, hn::Sub(key_position, position));
      float* score = scores.data + key * scores.rows.stride + row;
      hn::Store(hn::MulAdd(slope, distance, hn::Load(d, score)), d, score);
    }
  }
}

/// −∞ for keys a row does not see, whatever the score was: it may be NaN.
inline void mask_scores(const Scores& scores) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  const std::int64_t n = static_cast<std::int64_t>(hn::Lanes(d));
  const auto hidden = hn::Set(d, kMinusInfinity);
  for (std::int64_t row = 0; row < scores.rows.stride; row += n) {
    const auto begin = hn::Load(di, scores.rows.visible_begin + row);
    const auto end = hn::Load(di, scores.rows.visible_end + row);
    for (std::int64_t key = 0; key < scores.num_keys; ++key) {
      const auto position = hn::Set(di, static_cast<std::int32_t>(scores.first_key + key));
      const auto visible = hn::AndNot(hn::Lt(position, begin), hn::Lt(position, end));
      float* score = scores.data + key * scores.rows.stride + row;
      hn::Store(hn::IfThenElse(hn::RebindMask(d, visible), hn::Load(d, score), hidden), d, score);
    }
  }
}

/// The user's score and mask, element by element, for the keys causality and window leave.
inline void apply_custom(const Scores& scores) {
  const AttentionCall& call = scores.call;
  const RowBlock& rows = scores.rows;
  for (std::int64_t key = 0; key < scores.num_keys; ++key) {
    for (std::int64_t row = 0; row < rows.num_rows; ++row) {
      const ScoreIndex index{.request = scores.item.request,
                             .query_head = rows.query_head(call, scores.kv_head, row),
                             .query_row = rows.token(call, row),
                             .query_position = rows.position[row],
                             .key_position = scores.first_key + key};
      float& score = scores.data[key * rows.stride + row];
      const bool visible = index.key_position >= rows.visible_begin[row] &&
                           index.key_position < rows.visible_end[row] &&
                           (call.mask_mod == nullptr || (*call.mask_mod)(index));
      if (!visible) {
        score = kMinusInfinity;
      } else if (call.score_mod != nullptr) {
        score = (*call.score_mod)(score, index);
      }
    }
  }
}

inline bool is_masked(const Scores& scores) {
  return scores.rows.visible_begin[scores.rows.num_rows - 1] > scores.first_key ||
         scores.rows.visible_end[0] < scores.first_key + scores.num_keys;
}

/// Whether the layer does nothing to scores but to mask them.
inline bool are_plain(const AttentionCall& call) {
  return call.soft_cap == 0.0F && call.alibi_slopes == nullptr && call.score_mod == nullptr &&
         call.mask_mod == nullptr;
}

/// Contract 2, from the scaled product on. Returns whether a row may not see one of the keys.
inline bool modify_scores(const Scores& scores) {
  const AttentionCall& call = scores.call;
  if (call.soft_cap > 0.0F) {
    soft_cap(scores, call.soft_cap);
  }
  if (call.alibi_slopes != nullptr) {
    add_alibi(scores);
  }
  if (call.score_mod != nullptr || call.mask_mod != nullptr) {
    apply_custom(scores);
    return true;
  }
  const bool masked = is_masked(scores);
  if (masked) {
    mask_scores(scores);
  }
  return masked;
}

/// Non-negative numbers as bfloat16, rounded to nearest, in the lower and the upper half of words.
HWY_INLINE auto pair_bf16(hn::Vec<FloatTag> lower, hn::Vec<FloatTag> upper) {
  const hn::RebindToUnsigned<FloatTag> du;
  const auto half = hn::Set(du, 0x8000U);
  return hn::Or(hn::ShiftRight<16>(hn::Add(hn::BitCast(du, lower), half)),
                hn::And(hn::Add(hn::BitCast(du, upper), half), hn::Set(du, 0xFFFF0000U)));
}

/// Scores become weights exp(score − rows.max); the rows' sums are brought up to date, and
/// rows.correction says what earlier weights have to be multiplied by.
///
/// rows.max is the largest score when it was last set. It is set anew only when a score exceeds it
/// by more than kMaxSlack, so that corrections are rare: weights up to e^kMaxSlack lose nothing in
/// float32. NaN scores make the sum NaN.
///
/// With `pairs` scores.factor is applied, and the weights are written there too, as bfloat16, [key
/// / 2][rows.stride], a pair of keys in a word; pairs up to a multiple of 32 keys are 0.
template <bool kPairs = false>
HWY_INLINE void online_softmax(const Scores& scores, std::uint32_t* pairs = nullptr) {
  const FloatTag d;
  const RowBlock& rows = scores.rows;
  const std::int64_t n = static_cast<std::int64_t>(hn::Lanes(d));
  const auto minus_infinity = hn::Set(d, kMinusInfinity);
  for (std::int64_t row = 0; row < rows.stride; row += n) {
    float* const column = scores.data + row;
    // Two running maxima for the latency.
    auto even_max = minus_infinity;
    auto odd_max = minus_infinity;
    std::int64_t key = 0;
    for (; key + 2 <= scores.num_keys; key += 2) {
      even_max = hn::Max(even_max, hn::Load(d, column + key * rows.stride));
      odd_max = hn::Max(odd_max, hn::Load(d, column + (key + 1) * rows.stride));
    }
    if (key < scores.num_keys) {
      even_max = hn::Max(even_max, hn::Load(d, column + key * rows.stride));
    }
    const auto factor = hn::Set(d, scores.factor);
    auto tile_max = hn::Max(even_max, odd_max);
    if constexpr (kPairs) {
      tile_max = hn::Mul(tile_max, factor);
    }
    const auto old_max = hn::Load(d, rows.max + row);
    const auto exceeded = hn::Gt(tile_max, hn::Add(old_max, hn::Set(d, kMaxSlack)));
    const auto new_max = hn::IfThenElse(exceeded, tile_max, old_max);
    hn::Store(new_max, d, rows.max + row);
    // A row that has seen nothing: −∞ − 0 gives weights and correction 0, −∞ − −∞ would give NaN.
    const auto shift = hn::IfThenElse(hn::Eq(new_max, minus_infinity), hn::Zero(d), new_max);
    const auto correction = exp(d, hn::Sub(old_max, shift));
    hn::Store(correction, d, rows.correction + row);
    auto sum = hn::Mul(hn::Load(d, rows.sum + row), correction);
    const auto weigh = [&](std::int64_t key) HWY_ATTR {
      float* const score = column + key * rows.stride;
      auto difference = hn::Load(d, score);
      if constexpr (kPairs) {
        difference = hn::MulSub(difference, factor, shift);
      } else {
        difference = hn::Sub(difference, shift);
      }
      const auto weight = exp(d, difference);
      hn::Store(weight, d, score);
      sum = hn::Add(sum, weight);
      return weight;
    };
    if constexpr (kPairs) {
      const hn::RebindToUnsigned<FloatTag> du;
      std::uint32_t* const pair_column = pairs + row;
      key = 0;
      for (; key + 2 <= scores.num_keys; key += 2) {
        const auto even = weigh(key);
        hn::Store(pair_bf16(even, weigh(key + 1)), du, pair_column + key / 2 * rows.stride);
      }
      if (key < scores.num_keys) {
        hn::Store(pair_bf16(weigh(key), hn::Zero(d)), du, pair_column + key / 2 * rows.stride);
        key += 2;
      }
      for (; key % 32 != 0; key += 2) {
        hn::Store(hn::Zero(du), du, pair_column + key / 2 * rows.stride);
      }
    } else {
      for (key = 0; key < scores.num_keys; ++key) {
        weigh(key);
      }
    }
    hn::Store(sum, d, rows.sum + row);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace foveal
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
