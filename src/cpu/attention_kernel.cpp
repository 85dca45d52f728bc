// Flash attention of packed query rows over some keys, with float32 sums (docs/cpu.md).
//
// Scores are kept transposed, [key][row], and so is the output, [element][row]: vector lanes are
// rows. Then keys and values are read as they lie, one broadcast an element; maximum and sum of the
// softmax run down the columns without horizontal operations; masks, slopes and corrections are one
// vector for all keys; and both products are the same small matrix product. A tile of keys is
// loaded once for all blocks of 64 rows of the item. Where there are few rows (decode), lanes would
// stay empty, so that scores are dot products with lanes over the head instead, and outputs rows.

#include "cpu/attention_kernel.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention_kernel.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h:
#include "cpu/few_rows-inl.h"
#include "cpu/products-inl.h"
#include "cpu/row_ops-inl.h"
#include "cpu/scores-inl.h"
#include "cpu/tile-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace foveal {
namespace HWY_NAMESPACE {

// ---- store ----

/// Normalises a row and writes it, with its LSE. The sink is one more term of the denominator.
void write_row(const AttentionCall& call, std::int64_t token, std::int64_t head,
               const float* output, float max, float sum) {
  std::byte* const target = call.output.row(token, head);
  const auto size = static_cast<std::size_t>(call.head_size_v);
  // The key that `max` was taken from has the weight 1, so that only a row without keys has the sum
  // 0.
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

/// A row of the block is finished, as far as the item goes.
void finish_row(const AttentionCall& call, const Tile& tile, const RowBlock& block,
                std::int64_t row, const float* output) {
  if (tile.item.partial_row < 0) {
    write_row(call, tile.item.first_token + block.token(call, row),
              block.query_head(call, tile.kv_head, row), output, block.max[row], block.sum[row]);
    return;
  }
  const cpu::PartialBuffer& partials = call.partials;
  const std::int64_t target = tile.kv_head * partials.rows + tile.item.partial_row +
                              block.first_row - tile.item.first_row + row;
  std::copy(output, output + partials.stride, partials.output + target * partials.stride);
  partials.max[target] = block.max[row];
  partials.sum[target] = block.sum[row];
}

// ---- rows on lanes ----

/// output[element][row] += Σ weights[key][row] · values[key][element] without the products of
/// weights that are 0: the values of keys that some rows see and others do not may be infinite. (So
/// a visible key whose weight underflows counts as not seen.)
template <class Products>
void accumulate_nonzero(const AttentionCall& call, const Tile& tile, const Scores& scores) {
  const FloatTag d;
  const std::int64_t stride = scores.rows.stride;
  for (std::int64_t i = 0; i < call.head_size_v; ++i) {
    for (std::int64_t row = 0; row < stride; row += static_cast<std::int64_t>(hn::Lanes(d))) {
      float* const output = scores.rows.output + i * stride + row;
      auto sum = hn::Load(d, output);
      for (std::int64_t key = 0; key < scores.num_keys; ++key) {
        const auto weight = hn::Load(d, scores.data + key * stride + row);
        const auto value = hn::Set(d, Products::value(call, tile, key, i));
        sum = hn::IfThenElse(hn::Ne(weight, hn::Zero(d)), hn::MulAdd(weight, value, sum), sum);
      }
      hn::Store(sum, d, output);
    }
  }
}

/// Outputs so far, multiplied by the rows' corrections. Most often these are 1.
void correct_columns(const AttentionCall& call, const RowBlock& block) {
  const FloatTag d;
  for (std::int64_t row = 0; row < block.stride; row += static_cast<std::int64_t>(hn::Lanes(d))) {
    const auto correction = hn::Load(d, block.correction + row);
    if (hn::AllTrue(d, hn::Eq(correction, hn::Set(d, 1.0F)))) {
      continue;
    }
    for (std::int64_t i = 0; i < call.head_size_v; ++i) {
      float* const output = block.output + i * block.stride + row;
      hn::Store(hn::Mul(hn::Load(d, output), correction), d, output);
    }
  }
}

/// One block of rows and one tile of keys.
template <class Products>
void attend_to_tile(const AttentionCall& call, const Tile& tile, const RowBlock& block) {
  // Keys that no row of the block sees, behind the last that one does, are not touched.
  const Scores scores{.call = call,
                      .item = tile.item,
                      .kv_head = tile.kv_head,
                      .rows = block,
                      .data = tile.scores,
                      .first_key = tile.first_key,
                      .num_keys = std::min(tile.num_keys, block.last_visible() - tile.first_key),
                      .factor = Products::factor(call)};
  if (scores.num_keys <= 0 || block.first_visible() >= tile.first_key + tile.num_keys) {
    return;
  }
  Products::multiply_keys(tile, scores);
  const bool masked = modify_scores(scores);
  Products::weigh(tile, scores);
  correct_columns(call, block);
  const bool hidden = masked || scores.num_keys % Products::kKeyStep != 0;
  if (hidden && !Products::all_values_finite(call, tile)) {
    accumulate_nonzero<Products>(call, tile, scores);
  } else {
    Products::accumulate_values(tile, scores);
  }
}

template <class Products>
void attend_with_rows_on_lanes(const AttentionCall& call, const WorkItem& item,
                               std::int64_t kv_head, float* scratch_begin) {
  Scratch scratch(scratch_begin);
  Tile tile(call, item, kv_head, scratch);
  static_assert(kBlockRows <= kTileKeys);
  // A block's queries before the first tile, and outputs after the last, in the place of keys and
  // values.
  float* const rows = tile.keys;
  const std::int64_t output_stride = padded_size(call.head_size_v);
  const auto for_each_block = [&](const auto& use) {
    Scratch of_blocks = scratch;
    for (std::int64_t row = 0; row < item.num_rows; row += kBlockRows) {
      use(RowBlock(call, item, row, of_blocks));
    }
  };

  for_each_block([&](const RowBlock& block) {
    Products::load_query(call, tile, block, rows);
    start_rows(call, tile, block);
  });
  {
    const typename Products::Scope scope(call);
    for (tile.first_key = item.keys.begin; tile.first_key < item.keys.end;
         tile.first_key += tile.num_keys) {
      tile.num_keys = keys_in_tile(item, tile.first_key);
      Products::load_tile(call, tile);
      for_each_block([&](const RowBlock& block) { attend_to_tile<Products>(call, tile, block); });
    }
  }
  for_each_block([&](const RowBlock& block) {
    transpose(block.output, block.stride, output_stride, block.stride, rows, output_stride);
    for (std::int64_t row = 0; row < block.num_rows; ++row) {
      finish_row(call, tile, block, row, rows + row * output_stride);
    }
  });
}

// ---- the head on lanes ----

/// accumulate_nonzero for outputs that are rows.
void accumulate_nonzero_rows(const Tile& tile, const RowBlock& block, std::int64_t output_stride) {
  const FloatTag d;
  for (std::int64_t row = 0; row < block.num_rows; ++row) {
    for (std::int64_t key = 0; key < tile.num_keys; ++key) {
      const float weight = tile.scores[row * kTileKeys + key];
      for (std::int64_t i = 0; weight != 0.0F && i < output_stride;
           i += static_cast<std::int64_t>(hn::Lanes(d))) {
        float* const output = block.output + row * output_stride + i;
        const auto value = hn::Load(d, tile.values + key * tile.value_stride + i);
        hn::Store(hn::MulAdd(hn::Set(d, weight), value, hn::Load(d, output)), d, output);
      }
    }
  }
}

/// correct_columns for outputs that are rows.
void correct_rows(const RowBlock& block, std::int64_t output_stride) {
  const FloatTag d;
  for (std::int64_t row = 0; row < block.num_rows; ++row) {
    const float correction = block.correction[row];
    float* const output = block.output + row * output_stride;
    for (std::int64_t i = 0; correction != 1.0F && i < output_stride;
         i += static_cast<std::int64_t>(hn::Lanes(d))) {
      hn::Store(hn::Mul(hn::Load(d, output + i), hn::Set(d, correction)), d, output + i);
    }
  }
}

/// modify_scores for scores [row][kTileKeys].
bool modify_score_rows(const AttentionCall& call, const Tile& tile, const RowBlock& block) {
  const Scores scores{.call = call,
                      .item = tile.item,
                      .kv_head = tile.kv_head,
                      .rows = block,
                      .data = reinterpret_cast<float*>(tile.weight_pairs),
                      .first_key = tile.first_key,
                      .num_keys = tile.num_keys};
  if (are_plain(call) && !is_masked(scores)) {
    return false;
  }
  transpose(tile.scores, kTileKeys, block.stride, kTileKeys, scores.data, block.stride);
  const bool masked = modify_scores(scores);
  transpose(scores.data, block.stride, kTileKeys, block.stride, tile.scores, kTileKeys);
  return masked;
}

void attend_with_head_on_lanes(const AttentionCall& call, const WorkItem& item,
                               std::int64_t kv_head, float* scratch_begin) {
  Scratch scratch(scratch_begin);
  Tile tile(call, item, kv_head, scratch);
  const RowBlock block(call, item, 0, scratch);
  const std::int64_t output_stride = padded_size(call.head_size_v);
  load_query_rows(call, tile, block, block.query);
  start_rows(call, tile, block);

  TokenRows keys;
  TokenRows values;
  const auto find_keys = [&] {
    tile.num_keys = keys_in_tile(item, tile.first_key);
    find_rows(call, tile, call.key, call.head_size, tile.first_key, tile.num_keys, keys);
  };
  for (tile.first_key = item.keys.begin, find_keys(); tile.num_keys > 0;) {
    find_rows(call, tile, call.value, call.head_size_v, tile.first_key, tile.num_keys, values);
    with_format(call.key.dtype, [&](auto format) {
      const auto score = call.batch_invariant ? score_rows_in_order<decltype(format)>
                                              : score_rows<decltype(format)>;
      score(tile, block, keys, call.head_size, values);
    });
    const bool masked = modify_score_rows(call, tile, block);
    online_softmax_of_rows(tile, block, call.batch_invariant);
    correct_rows(block, output_stride);
    bool finite = true;
    if (masked) {
      tile.values = tile.value_space;
      tile.value_stride = output_stride;
      load_tokens(call, tile, call.value, call.head_size_v, tile.values, tile.value_stride);
      finite = F32Products::all_values_finite(call, tile);
    }
    if (!finite) {
      accumulate_nonzero_rows(tile, block, output_stride);
    }
    tile.first_key += tile.num_keys;
    find_keys();
    if (finite) {
      with_format(call.value.dtype, [&](auto format) {
        accumulate_rows<decltype(format)>(tile, block, values, call.head_size_v, keys);
      });
    }
  }
  for (std::int64_t row = 0; row < block.num_rows; ++row) {
    finish_row(call, tile, block, row, block.output + row * output_stride);
  }
}

// ---- tasks ----

void run_work_item(const AttentionCall& call, const WorkItem& item, std::int64_t kv_head,
                   float* scratch) {
  // The head on lanes is faster up to half a vector of rows (measured for 4 and 8 rows of heads of
  // 128).
  const bool few = item.num_rows * 2 <= static_cast<std::int64_t>(hn::Lanes(FloatTag()));
  // A batch-invariant row has the same bits either way, but for weights rounded to bfloat16.
  if (!few || (call.batch_invariant && call.bf16 != nullptr)) {
    // Whose columns come in sixteens.
    if constexpr (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3) {
      if (call.bf16 != nullptr) {
        return attend_with_rows_on_lanes<Bf16Products>(call, item, kv_head, scratch);
      }
    }
    attend_with_rows_on_lanes<F32Products>(call, item, kv_head, scratch);
  } else {
    attend_with_head_on_lanes(call, item, kv_head, scratch);
  }
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

std::int64_t scratch_floats(std::int64_t head_size, std::int64_t head_size_v, std::int64_t rows) {
  return HWY_STATIC_DISPATCH(Tile)::scratch_floats(head_size, head_size_v) +
         (rows + kBlockRows - 1) / kBlockRows *
             HWY_STATIC_DISPATCH(RowBlock)::scratch_floats(head_size, head_size_v);
}

std::int64_t max_item_rows(std::int64_t head_size, std::int64_t head_size_v) {
  constexpr std::int64_t kFloats = std::int64_t{1} << 17;
  const std::int64_t rows = kFloats / (head_size + head_size_v);
  return std::clamp(rows / kBlockRows * kBlockRows, kBlockRows, kMaxItemRows);
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
