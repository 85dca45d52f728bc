#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "foveal/dtype.h"
#include "foveal/export.h"
#include "foveal/tensor.h"

namespace foveal {

/// What the keys of a layer are.
enum class AttnType : std::uint8_t {
  decoder,          ///< Self-attention over the request's own tokens, read from the paged cache.
  encoder,          ///< Self-attention inside the encoder of an encoder-decoder model; no cache.
  encoder_only,     ///< Self-attention of a model without a cache (embedding, classification).
  encoder_decoder,  ///< Cross attention: queries of the decoder, keys of the encoder from the paged
                    ///< cache.
};

FOVEAL_API std::string_view to_string(AttnType type);
FOVEAL_API std::optional<AttnType> attn_type_from_string(std::string_view name);

/// A sliding window in tokens to the left and to the right of a row's own position; both exclude
/// the token itself, and −1 is unlimited. A row at position p sees keys p−left … p+right.
struct Window {
  std::int64_t left = -1;
  std::int64_t right = -1;

  /// The usual decoder window of W tokens, counting the token itself: keys p−W+1 … p.
  static constexpr Window of_tokens(std::int64_t tokens) { return {tokens - 1, 0}; }
  constexpr bool unlimited() const { return left < 0 && right < 0; }
  friend bool operator==(const Window&, const Window&) = default;
};

/// Where one score stands; all numbers count from 0. Positions are absolute within the request.
struct ScoreIndex {
  std::int64_t request = 0;
  std::int64_t query_head = 0;
  std::int64_t query_row = 0;  ///< Row within the request's queries of this step.
  std::int64_t query_position = 0;
  std::int64_t key_position = 0;
};

/// A user's own score, applied after the soft cap and instead of ALiBi: takes the scaled, capped
/// score and returns the new one. Called from many threads at once.
using ScoreMod = std::function<float(float score, const ScoreIndex& index)>;
/// A user's own mask: whether the row sees the key, on top of causality and window. Called from
/// many threads.
using MaskMod = std::function<bool(const ScoreIndex& index)>;

/// Scales of quantised tensors, one a layer: what is stored is value / scale. They apply on every
/// path; leave them at 1 where a tensor is not fp8.
struct QuantScales {
  float q = 1.0F;
  float k = 1.0F;
  float v = 1.0F;
  friend bool operator==(const QuantScales&, const QuantScales&) = default;
};

/// The dimensions of multi-head latent attention (MLA, DeepSeek V2 and V3). A cache entry is the
/// normalised latent (kv_lora_rank) followed by the rotated key part that all heads share
/// (qk_rope_head_dim).
struct MlaDims {
  std::int64_t kv_lora_rank = 512;
  std::int64_t qk_nope_head_dim = 128;
  std::int64_t qk_rope_head_dim = 64;
  std::int64_t v_head_dim = 128;

  constexpr std::int64_t qk_head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }
  constexpr std::int64_t cache_entry() const { return kv_lora_rank + qk_rope_head_dim; }
  friend bool operator==(const MlaDims&, const MlaDims&) = default;
};

/// What never changes for a layer.
///
/// For an MLA layer set `mla`; then num_kv_heads must be 1, head_size is mla->cache_entry() and
/// head_size_v is mla->kv_lora_rank. The scale of an MLA layer is the model's own (usually
/// 1/√qk_head_dim, with YaRN's factor), never 1/√head_size: set it.
struct AttentionSpec {
  std::int64_t num_heads = 0;  ///< Query heads.
  std::int64_t num_kv_heads =
      0;  ///< Divides num_heads; query head h reads KV head h / (num_heads / num_kv_heads).
  std::int64_t head_size = 0;             ///< Of queries and keys.
  std::int64_t head_size_v = 0;           ///< Of values and output; 0 means head_size.
  std::optional<float> scale{};           ///< Softmax scale; by default 1/√head_size.
  DType dtype = DType::bf16;              ///< Of query, key, value and output.
  std::optional<DType> kv_cache_dtype{};  ///< Of the cache; by default dtype.
  AttnType attn_type = AttnType::decoder;
  Window window{};               ///< On top of causality.
  float logits_soft_cap = 0.0F;  ///< score ← cap·tanh(score/cap); 0 turns it off.
  std::vector<float>
      alibi_slopes;  ///< [num_heads] or empty. Bias slope·(key position − row position).
  std::vector<float>
      sinks;             ///< [num_heads] or empty. One extra logit a head in the denominator only.
  ScoreMod score_mod{};  ///< Excludes alibi_slopes.
  MaskMod mask_mod{};
  QuantScales scales{};
  std::string kv_sharing_target{};  ///< Name of an earlier layer whose cache this one reads; it
                                    ///< then writes none.
  std::optional<MlaDims> mla{};

  std::int64_t value_head_size() const { return head_size_v == 0 ? head_size : head_size_v; }
  DType cache_dtype() const { return kv_cache_dtype.value_or(dtype); }
  std::int64_t group_size() const { return num_heads / num_kv_heads; }
  FOVEAL_API float softmax_scale() const;
  bool uses_cache() const {
    return attn_type == AttnType::decoder || attn_type == AttnType::encoder_decoder;
  }
  /// Throws invalid_argument naming the first member that contradicts the rules above (heads not
  /// divisible, sizes not positive, wrong length of slopes or sinks, a window below −1, a negative
  /// soft cap, …).
  FOVEAL_API void validate() const;
};

/// How the head dimensions of a paged cache lie in memory: tokens of a block outside heads, or
/// inside.
enum class KVCacheOrder : std::uint8_t { nhd, hnd };

FOVEAL_API std::string_view to_string(KVCacheOrder order);

/// What a layer needs of the KV-cache manager; enough for it to size pages without knowing the
/// backend.
struct KVCacheSpec {
  enum class Kind : std::uint8_t { full, sliding_window, mla, cross, encoder_only };

  Kind kind = Kind::full;
  std::int64_t block_size = 16;  ///< Tokens a block of the cache manager.
  std::int64_t num_kv_heads = 0;
  std::int64_t head_size = 0;
  std::int64_t head_size_v = 0;
  DType dtype = DType::bf16;
  std::int64_t sliding_window = 0;  ///< Tokens, itself counted; for kind sliding_window.
  std::int64_t page_size_padded =
      0;  ///< Bytes a page takes in memory when larger than needed; 0 means no padding.

  /// The cache that a layer of this spec wants, with blocks of `block_size` tokens.
  FOVEAL_API static KVCacheSpec from(const AttentionSpec& spec, std::int64_t block_size);

  /// Bytes of one block: block_size · num_kv_heads · (head_size + head_size_v) elements, without
  /// the value part for mla (the latent is both) and nothing for encoder_only; page_size_padded
  /// when larger.
  FOVEAL_API std::int64_t page_size_bytes() const;
  /// Most blocks one request can hold at a time. A sliding window frees what it has passed, so it
  /// needs the window plus one step's tokens, and one block more because the window may start
  /// inside a block.
  FOVEAL_API std::int64_t max_blocks_per_request(std::int64_t max_seq_len,
                                                 std::int64_t max_tokens_per_step) const;
};

FOVEAL_API std::string_view to_string(KVCacheSpec::Kind kind);

/// A backend's cache tensor: logical shape, and the order of its dimensions in memory, outermost
/// first.
struct KVCacheLayout {
  std::vector<std::int64_t> shape{};
  std::vector<int> stride_order{};
  DType dtype = DType::bf16;

  /// The layout of the flash family: [num_blocks, 2, block_size, num_kv_heads, head_size]; where
  /// keys and values differ in size, side by side in [num_blocks, num_kv_heads, block_size,
  /// head_size + head_size_v]. KVCacheView::flash reads both.
  FOVEAL_API static KVCacheLayout flash(const KVCacheSpec& spec, std::int64_t num_blocks,
                                        KVCacheOrder order);
  /// That of MLA: [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim].
  FOVEAL_API static KVCacheLayout latent(const KVCacheSpec& spec, std::int64_t num_blocks);

  FOVEAL_API std::int64_t size_bytes() const;
  /// The logical view of `data`, size_bytes() long, with the strides that stride_order asks for.
  FOVEAL_API TensorView view(void* data, Device device = {}) const;
};

/// The paged keys and values as kernels take them: two views [num_blocks, block_size, num_kv_heads,
/// head size] of any strides, the head dimension contiguous. NHD, HND, interleaved and padded
/// caches differ in strides only.
struct KVCacheView {
  TensorView key{};
  TensorView value{};

  bool empty() const { return key.empty(); }
  std::int64_t num_blocks() const { return key.size(0); }
  std::int64_t block_size() const { return key.size(1); }

  /// From a cache of KVCacheLayout::flash.
  FOVEAL_API static KVCacheView flash(const TensorView& cache, const KVCacheSpec& spec);
  /// From [num_blocks, 2, block_size, num_kv_heads, head_size] (blocks first).
  FOVEAL_API static KVCacheView from_blocks_first(const TensorView& cache);
  /// From [2, num_blocks, block_size, num_kv_heads, head_size] (K and V first, older engines).
  FOVEAL_API static KVCacheView from_kv_first(const TensorView& cache);
  /// From [num_blocks, num_kv_heads, block_size, head_size + head_size_v] (K and V of a token side
  /// by side, newer engines).
  FOVEAL_API static KVCacheView from_packed(const TensorView& cache, std::int64_t head_size);
};

}  // namespace foveal
