#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cpu/bf16_instructions.h"
#include "cpu/plan.h"
#include "foveal/dtype.h"
#include "foveal/spec.h"

namespace foveal::cpu {

/// Rows [tokens, heads, size] of a query or output; strides in bytes.
struct RowTensor {
  std::byte* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;

  std::byte* row(std::int64_t token, std::int64_t head) const {
    return data + token * token_stride + head * head_stride;
  }
};

/// Keys or values [blocks, block size, KV heads, size]; strides in bytes. Plain ones are one block.
struct TokenTensor {
  const std::byte* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t block_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
};

/// Where the keys of a request are.
struct TokenIndex {
  const std::int32_t* block_table = nullptr;  ///< Null: plain keys.
  std::int64_t table_stride = 0;
  std::uint32_t block_size = 0;                 ///< The kernel's.
  std::uint32_t blocks_per_entry = 1;           ///< Of the table, which counts in the manager's.
  const std::int32_t* key_start_loc = nullptr;  ///< Plain keys: where each request's begin.

  /// Calls use(kernel block, token of it, tokens) for the pieces of `count` keys from position
  /// `first` on that lie in one block. Divisions only where it begins: they take as long as a row.
  template <typename Use>
  void for_each_run(std::int64_t request, std::int64_t first, std::int64_t count,
                    const Use& use) const {
    if (count == 0) {
      return;  // There may be no table and no starts.
    }
    if (block_table == nullptr) {
      use(std::int64_t{0}, key_start_loc[request] + first, count);
      return;
    }
    const auto position = static_cast<std::uint32_t>(first);
    const std::uint32_t block = position / block_size;
    std::uint32_t token = position % block_size;
    const std::int32_t* entry = block_table + request * table_stride + block / blocks_per_entry;
    for (std::uint32_t part = block % blocks_per_entry; count > 0;) {
      const std::int64_t run = std::min<std::int64_t>(count, block_size - token);
      use(std::int64_t{*entry} * blocks_per_entry + part, std::int64_t{token}, run);
      count -= run;
      token = 0;
      if (++part == blocks_per_entry) {
        part = 0;
        ++entry;
      }
    }
  }
};

/// Partial results, [KV heads · rows]: unnormalised outputs of `stride` floats, what they are
/// relative to (the largest score or up to 8 less) and the sum of exp(score − that).
struct PartialBuffer {
  float* output = nullptr;
  float* max = nullptr;
  float* sum = nullptr;
  std::int64_t stride = 0;
  std::int64_t rows = 0;  ///< A KV head.
};

/// All that the tasks of one forward share.
struct AttentionCall {
  RowTensor query;
  RowTensor output;
  float* lse = nullptr;  ///< May be null.
  std::int64_t lse_head_stride = 0;
  std::int64_t lse_token_stride = 0;
  TokenTensor key;
  TokenTensor value;
  bool values_in_keys = false;  ///< A value is the beginning of its key, and is loaded with it.
  TokenIndex index;
  PartialBuffer partials;

  std::int64_t group_size = 1;
  std::int64_t head_size = 0;
  std::int64_t head_size_v = 0;
  RowMask mask;
  float scale = 1.0F;        ///< Softmax scale times k_scale.
  float value_scale = 1.0F;  ///< v_scale.
  float soft_cap = 0.0F;
  const float* alibi_slopes = nullptr;  ///< Of all query heads, or null.
  const float* sinks = nullptr;         ///< Likewise.
  const ScoreMod* score_mod = nullptr;
  const MaskMod* mask_mod = nullptr;
  bool batch_invariant = false;
  /// Where query, keys and values are bfloat16 (or fp8, which is a part of it) and the machine's
  /// instructions for that pay; else null.
  const Bf16Instructions* bf16 = nullptr;
};

/// Floats of scratch a thread needs for items of up to `rows` rows; aligned to 64 bytes.
std::int64_t scratch_floats(std::int64_t head_size, std::int64_t head_size_v, std::int64_t rows);

/// Rows of an item, at most: what a thread keeps of them shall fit an L2 beside other things.
std::int64_t max_item_rows(std::int64_t head_size, std::int64_t head_size_v);

/// Floats between the rows of scratch and partial buffers for rows of `size`.
constexpr std::int64_t padded_size(std::int64_t size) { return (size + 15) / 16 * 16; }

void run_work_item(const AttentionCall& call, const WorkItem& item, std::int64_t kv_head,
                   float* scratch);

void run_merge_item(const AttentionCall& call, const Plan& plan, const MergeItem& item,
                    std::int64_t kv_head, float* scratch);

}  // namespace foveal::cpu
