// Flash attention of one tile of packed query rows over some keys, in float32.
//
// Scores are kept transposed, [key][row]: vector lanes are rows. Then keys are read as they lie,
// one broadcast an element, without a transposed copy of every tile; maximum and sum of the softmax
// run down the columns without horizontal operations; masks, slopes and corrections are one vector
// for all keys; and both products are the same small matrix product. Where a tile has few rows
// (decode), lanes would stay empty, so that scores are dot products with lanes over the head
// instead.

#include "cpu/attention_kernel.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention_kernel.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h:
#include "cpu/multiply-inl.h"
#include "cpu/row_ops-inl.h"
#include "cpu/tile-inl.h"
#include "cpu/vector_math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace foveal {
namespace HWY_NAMESPACE {

// ---- scores ----

/// Scores with rows on lanes. Keys past the last one, up to a multiple of 4, give scores that
/// nothing reads.
void score_rows_on_lanes(const AttentionCall& call, const Tile& tile) {
  multiply(tile.keys, tile.key_stride, 1, tile.query_columns, tile.row_stride, call.head_size,
           nullptr, tile.scores, tile.row_stride, tile.num_keys, tile.row_stride);
}

/// Scores of few rows: dot products, four keys at a time for one load of the query.
void score_head_on_lanes(const Tile& tile) {
  const FloatTag d;
  const std::int64_t n = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t key = 0; key < tile.num_keys; key += 4) {
    const float* k0 = tile.keys + key * tile.key_stride;
    const float* k1 = k0 + tile.key_stride;
    const float* k2 = k1 + tile.key_stride;
    const float* k3 = k2 + tile.key_stride;
    float* scores = tile.scores + key * tile.row_stride;
    for (std::int64_t row = 0; row < tile.item.num_rows; ++row) {
      const float* query = tile.query + row * tile.key_stride;
      auto s0 = hn::Zero(d);
      auto s1 = hn::Zero(d);
      auto s2 = hn::Zero(d);
      auto s3 = hn::Zero(d);
      for (std::int64_t i = 0; i < tile.key_stride; i += n) {
        const auto q = hn::Load(d, query + i);
        s0 = hn::MulAdd(q, hn::Load(d, k0 + i), s0);
        s1 = hn::MulAdd(q, hn::Load(d, k1 + i), s1);
        s2 = hn::MulAdd(q, hn::Load(d, k2 + i), s2);
        s3 = hn::MulAdd(q, hn::Load(d, k3 + i), s3);
      }
      scores[row] = hn::GetLane(hn::SumOfLanes(d, s0));
      scores[row + tile.row_stride] = hn::GetLane(hn::SumOfLanes(d, s1));
      scores[row + 2 * tile.row_stride] = hn::GetLane(hn::SumOfLanes(d, s2));
      scores[row + 3 * tile.row_stride] = hn::GetLane(hn::SumOfLanes(d, s3));
    }
    for (std::int64_t i = key; i < key + 4; ++i) {
      std::fill(tile.scores + i * tile.row_stride + tile.item.num_rows,
                tile.scores + (i + 1) * tile.row_stride, 0.0F);
    }
  }
}

// ---- mask ----

void soft_cap(const Tile& tile, float cap) {
  const FloatTag d;
  for (std::int64_t i = 0; i < tile.num_keys * tile.row_stride;
       i += static_cast<std::int64_t>(hn::Lanes(d))) {
    const auto scaled = hn::Mul(hn::Load(d, tile.scores + i), hn::Set(d, 1.0F / cap));
    hn::Store(hn::Mul(tanh(d, scaled), hn::Set(d, cap)), d, tile.scores + i);
  }
}

void add_alibi(const Tile& tile) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  const std::int64_t n = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t row = 0; row < tile.row_stride; row += n) {
    const auto slope = hn::Load(d, tile.slope + row);
    const auto position = hn::Load(di, tile.position + row);
    for (std::int64_t key = 0; key < tile.num_keys; ++key) {
      const auto key_position = hn::Set(di, static_cast<std::int32_t>(tile.first_key + key));
      const auto distance = hn::ConvertTo(d, hn::Sub(key_position, position));
      float* score = tile.scores + key * tile.row_stride + row;
      hn::Store(hn::MulAdd(slope, distance, hn::Load(d, score)), d, score);
    }
  }
}

/// Whether a row of the tile does not see one of its keys. Ranges grow with the row.
bool is_partly_visible(const Tile& tile) {
  return tile.visible_begin[tile.item.num_rows - 1] > tile.first_key ||
         tile.visible_end[0] < tile.first_key + tile.num_keys;
}

/// −∞ for keys a row does not see, whatever the score was: it may be NaN.
void mask_scores(const Tile& tile) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  const std::int64_t n = static_cast<std::int64_t>(hn::Lanes(d));
  const auto hidden = hn::Set(d, kMinusInfinity);
  for (std::int64_t row = 0; row < tile.row_stride; row += n) {
    const auto begin = hn::Load(di, tile.visible_begin + row);
    const auto end = hn::Load(di, tile.visible_end + row);
    for (std::int64_t key = 0; key < tile.num_keys; ++key) {
      const auto position = hn::Set(di, static_cast<std::int32_t>(tile.first_key + key));
      const auto visible = hn::AndNot(hn::Lt(position, begin), hn::Lt(position, end));
      float* score = tile.scores + key * tile.row_stride + row;
      hn::Store(hn::IfThenElse(hn::RebindMask(d, visible), hn::Load(d, score), hidden), d, score);
    }
  }
}

/// The user's score and mask, element by element, for the keys causality and window leave.
void apply_custom(const AttentionCall& call, const Tile& tile) {
  for (std::int64_t key = 0; key < tile.num_keys; ++key) {
    for (std::int64_t row = 0; row < tile.item.num_rows; ++row) {
      const ScoreIndex index{.request = tile.item.request,
                             .query_head = tile.query_head(call, row),
                             .query_row = tile.token(call, row),
                             .query_position = tile.position[row],
                             .key_position = tile.first_key + key};
      float& score = tile.scores[key * tile.row_stride + row];
      const bool visible = index.key_position >= tile.visible_begin[row] &&
                           index.key_position < tile.visible_end[row] &&
                           (call.mask_mod == nullptr || (*call.mask_mod)(index));
      if (!visible) {
        score = kMinusInfinity;
      } else if (call.score_mod != nullptr) {
        score = (*call.score_mod)(score, index);
      }
    }
  }
}

// ---- softmax ----

/// Scores become weights exp(score − max of the row so far); the row's sum is brought up to date,
/// and `correction` says what earlier weights have to be multiplied by. NaN scores make the sum
/// NaN.
void online_softmax(const Tile& tile) {
  const FloatTag d;
  const std::int64_t n = static_cast<std::int64_t>(hn::Lanes(d));
  const auto minus_infinity = hn::Set(d, kMinusInfinity);
  for (std::int64_t row = 0; row < tile.row_stride; row += n) {
    float* const scores = tile.scores + row;
    const auto old_max = hn::Load(d, tile.max + row);
    // Two running maxima for the latency.
    auto even_max = old_max;
    auto odd_max = old_max;
    std::int64_t key = 0;
    for (; key + 2 <= tile.num_keys; key += 2) {
      even_max = hn::Max(even_max, hn::Load(d, scores + key * tile.row_stride));
      odd_max = hn::Max(odd_max, hn::Load(d, scores + (key + 1) * tile.row_stride));
    }
    if (key < tile.num_keys) {
      even_max = hn::Max(even_max, hn::Load(d, scores + key * tile.row_stride));
    }
    const auto new_max = hn::Max(even_max, odd_max);
    hn::Store(new_max, d, tile.max + row);
    // A row that has seen nothing: −∞ − 0 gives weights and correction 0, −∞ − −∞ would give NaN.
    const auto shift = hn::IfThenElse(hn::Eq(new_max, minus_infinity), hn::Zero(d), new_max);
    const auto correction = exp(d, hn::Sub(old_max, shift));
    hn::Store(correction, d, tile.correction + row);
    auto sum = hn::Mul(hn::Load(d, tile.sum + row), correction);
    for (key = 0; key < tile.num_keys; ++key) {
      float* const score = scores + key * tile.row_stride;
      const auto weight = exp(d, hn::Sub(hn::Load(d, score), shift));
      hn::Store(weight, d, score);
      sum = hn::Add(sum, weight);
    }
    hn::Store(sum, d, tile.sum + row);
  }
}

// ---- product ----

/// output = correction · output + weights · values
void accumulate_values(const Tile& tile) {
  multiply(tile.scores, 1, tile.row_stride, tile.values, tile.value_stride, tile.num_keys,
           tile.correction, tile.output, tile.output_stride, tile.item.num_rows,
           tile.output_stride);
}

bool all_values_finite(const Tile& tile) {
  const FloatTag d;
  auto zeros = hn::Zero(d);  // x − x is 0 for a finite x and NaN for others.
  for (std::int64_t i = 0; i < tile.num_keys * tile.value_stride;
       i += static_cast<std::int64_t>(hn::Lanes(d))) {
    const auto value = hn::Load(d, tile.values + i);
    zeros = hn::Add(zeros, hn::Sub(value, value));
  }
  return hn::AllFalse(d, hn::IsNaN(zeros));
}

/// The same without the products of weights that are 0: the values of keys that some rows see and
/// others do not may be infinite. (So a visible key whose weight underflows counts as not seen.)
void accumulate_nonzero(const Tile& tile) {
  const FloatTag d;
  const std::int64_t n = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t row = 0; row < tile.item.num_rows; ++row) {
    for (std::int64_t i = 0; i < tile.output_stride; i += n) {
      float* const output = tile.output + row * tile.output_stride + i;
      auto sum = hn::Mul(hn::Set(d, tile.correction[row]), hn::Load(d, output));
      for (std::int64_t key = 0; key < tile.num_keys; ++key) {
        const float weight = tile.scores[key * tile.row_stride + row];
        if (weight != 0.0F) {
          sum = hn::MulAdd(hn::Set(d, weight),
                           hn::Load(d, tile.values + key * tile.value_stride + i), sum);
        }
      }
      hn::Store(sum, d, output);
    }
  }
}

// ---- store ----

/// Normalises a row and writes it, with its LSE. The sink is one more term of the denominator.
void write_row(const AttentionCall& call, std::int64_t token, std::int64_t head,
               const float* output, float max, float sum) {
  std::byte* const target = call.output.row(token, head);
  const auto size = static_cast<std::size_t>(call.head_size_v);
  // The largest weight is 1, so that only a row without keys has the sum 0.
  const bool empty = sum == 0.0F;
  if (empty) {
    std::memset(target, 0, size * static_cast<std::size_t>(size_of(call.output.dtype)));
  } else {
    const float sink = call.sinks == nullptr ? 0.0F : std::exp(call.sinks[head] - max);
    store_row(call.output.dtype, output, sum + sink, call.value_scale, target, size);
  }
  if (call.lse != nullptr) {
    call.lse[head * call.lse_head_stride + token * call.lse_token_stride] =
        empty ? kMinusInfinity : max + std::log(sum);
  }
}

void write_rows(const AttentionCall& call, const Tile& tile) {
  for (std::int64_t row = 0; row < tile.item.num_rows; ++row) {
    const float* output = tile.output + row * tile.output_stride;
    if (tile.item.partial_row < 0) {
      write_row(call, tile.item.first_token + tile.token(call, row), tile.query_head(call, row),
                output, tile.max[row], tile.sum[row]);
      continue;
    }
    const cpu::PartialBuffer& partials = call.partials;
    const std::int64_t target = tile.kv_head * partials.rows + tile.item.partial_row + row;
    std::copy(output, output + partials.stride, partials.output + target * partials.stride);
    partials.max[target] = tile.max[row];
    partials.sum[target] = tile.sum[row];
  }
}

// ---- the algorithm ----

void run_work_item(const AttentionCall& call, const WorkItem& item, std::int64_t kv_head,
                   float* scratch) {
  Tile tile(call, item, kv_head, scratch);
  // Dot products are faster up to half a vector of rows (measured for 4 and 8 rows of heads of
  // 128). They add in another order, which a batch-invariant row must not depend on.
  const bool rows_on_lanes =
      call.batch_invariant || item.num_rows * 2 > static_cast<std::int64_t>(hn::Lanes(FloatTag()));
  load_query(call, tile, rows_on_lanes);
  start_rows(call, tile);
  const bool custom = call.score_mod != nullptr || call.mask_mod != nullptr;

  for (tile.first_key = item.keys.begin; tile.first_key < item.keys.end;
       tile.first_key += tile.num_keys) {
    tile.num_keys = keys_in_tile(item, tile.first_key);

    load_tokens(call, tile, call.key, call.head_size, tile.keys, tile.key_stride);
    if (rows_on_lanes) {
      score_rows_on_lanes(call, tile);
    } else {
      score_head_on_lanes(tile);
    }
    if (call.soft_cap > 0.0F) {
      soft_cap(tile, call.soft_cap);
    }
    if (call.alibi_slopes != nullptr) {
      add_alibi(tile);
    }
    const bool masked = custom || is_partly_visible(tile);
    if (custom) {
      apply_custom(call, tile);
    } else if (masked) {
      mask_scores(tile);
    }
    online_softmax(tile);
    if (!call.values_in_keys) {
      load_tokens(call, tile, call.value, call.head_size_v, tile.values, tile.value_stride);
    }
    if (masked && !all_values_finite(tile)) {
      accumulate_nonzero(tile);
    } else {
      accumulate_values(tile);
    }
  }
  write_rows(call, tile);
}

/// The parts in their order, whichever thread made them.
void run_merge_item(const AttentionCall& call, const cpu::Plan& plan, const cpu::MergeItem& item,
                    std::int64_t kv_head, float* scratch) {
  const FloatTag d;
  const cpu::PartialBuffer& partials = call.partials;
  const std::int64_t* const parts = plan.parts.data() + item.first_part;
  for (std::int64_t row = 0; row < item.num_rows; ++row) {
    float max = kMinusInfinity;
    for (std::int64_t p = 0; p < item.num_parts; ++p) {
      max = std::max(max, partials.max[kv_head * partials.rows + parts[p] + row]);
    }
    std::fill(scratch, scratch + partials.stride, 0.0F);
    float sum = 0.0F;
    for (std::int64_t p = 0; p < item.num_parts; ++p) {
      const std::int64_t part = kv_head * partials.rows + parts[p] + row;
      if (partials.sum[part] == 0.0F) {
        continue;
      }
      const float weight = std::exp(partials.max[part] - max);
      sum += weight * partials.sum[part];
      const float* const output = partials.output + part * partials.stride;
      for (std::int64_t i = 0; i < partials.stride; i += static_cast<std::int64_t>(hn::Lanes(d))) {
        const auto weighted =
            hn::MulAdd(hn::Set(d, weight), hn::Load(d, output + i), hn::Load(d, scratch + i));
        hn::Store(weighted, d, scratch + i);
      }
    }
    const std::int64_t packed = item.first_row + row;
    write_row(call, item.first_token + packed / call.group_size,
              kv_head * call.group_size + packed % call.group_size, scratch, max, sum);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace foveal
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace foveal {

HWY_EXPORT(run_work_item);
HWY_EXPORT(run_merge_item);

namespace cpu {

std::string runtime() {
  // Targets are bits, the best one lowest.
  const std::int64_t targets = hwy::SupportedTargets() & HWY_TARGETS;
  return std::string("instruction set ") + hwy::TargetName(targets & -targets);
}

std::int64_t scratch_floats(std::int64_t head_size, std::int64_t head_size_v) {
  const std::int64_t key = padded_size(head_size);
  const std::int64_t value = padded_size(head_size_v);
  return kTileRows * (key + head_size + value) + kTileKeys * std::max(key, value) +
         kTileKeys * kTileRows + 7 * kTileRows;
}

void run_work_item(const AttentionCall& call, const WorkItem& item, std::int64_t kv_head,
                   float* scratch) {
  HWY_DYNAMIC_DISPATCH(run_work_item)(call, item, kv_head, scratch);
}

void run_merge_item(const AttentionCall& call, const Plan& plan, const MergeItem& item,
                    std::int64_t kv_head, float* scratch) {
  HWY_DYNAMIC_DISPATCH(run_merge_item)(call, plan, item, kv_head, scratch);
}

}  // namespace cpu
}  // namespace foveal
#endif  // HWY_ONCE
