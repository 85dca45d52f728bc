#include "foveal/spec.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>
#include <utility>

#include "core/check.h"
#include "core/tensor_checks.h"

namespace foveal {
namespace {

constexpr std::array<std::pair<std::string_view, AttnType>, 4> kAttnTypes{{
    {"decoder", AttnType::decoder},
    {"encoder", AttnType::encoder},
    {"encoder_only", AttnType::encoder_only},
    {"encoder_decoder", AttnType::encoder_decoder},
}};

std::int64_t ceil_div(std::int64_t value, std::int64_t divisor) {
  return value / divisor + (value % divisor != 0 ? 1 : 0);
}

/// Of sizes that come from outside, so their product need not fit.
std::int64_t product(std::span<const std::int64_t> sizes, std::string_view what) {
  std::int64_t bound = 1;
  std::int64_t result = 1;
  for (const std::int64_t size : sizes) {
    check(size >= 0 && !__builtin_mul_overflow(bound, std::max<std::int64_t>(size, 1), &bound),
          "{} are the product of [{}]: each must be >= 0, and they must be countable in 63 bits",
          what, fmt::join(sizes, ", "));
    result *= size;
  }
  return result;
}

bool values_differ(const KVCacheSpec& spec) {
  return spec.head_size_v != 0 && spec.head_size_v != spec.head_size;
}

void check_per_head(const std::vector<float>& values, std::string_view name,
                    std::int64_t num_heads) {
  check(values.empty() || std::ssize(values) == num_heads,
        "AttentionSpec: {} has {} entries, it must have num_heads = {} or none", name,
        values.size(), num_heads);
  check(std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); }),
        "AttentionSpec: {} holds a value that is not finite", name);
}

}  // namespace

std::string_view to_string(AttnType type) {
  return kAttnTypes[static_cast<std::size_t>(type)].first;
}

std::optional<AttnType> attn_type_from_string(std::string_view name) {
  for (const auto& [known, type] : kAttnTypes) {
    if (known == name) {
      return type;
    }
  }
  return std::nullopt;
}

std::string_view to_string(KVCacheOrder order) {
  return order == KVCacheOrder::nhd ? "NHD" : "HND";
}

std::string_view to_string(KVCacheSpec::Kind kind) {
  switch (kind) {
    case KVCacheSpec::Kind::full:
      return "full";
    case KVCacheSpec::Kind::sliding_window:
      return "sliding_window";
    case KVCacheSpec::Kind::mla:
      return "mla";
    case KVCacheSpec::Kind::cross:
      return "cross";
    case KVCacheSpec::Kind::encoder_only:
      return "encoder_only";
  }
  return "unknown";
}

float AttentionSpec::softmax_scale() const {
  return scale.value_or(1.0F / std::sqrt(static_cast<float>(head_size)));
}

void AttentionSpec::validate() const {
  check(num_heads > 0, "AttentionSpec: num_heads is {}, it must be positive", num_heads);
  check(num_kv_heads > 0, "AttentionSpec: num_kv_heads is {}, it must be positive", num_kv_heads);
  check(num_heads % num_kv_heads == 0,
        "AttentionSpec: num_heads is {}, it must be a multiple of num_kv_heads = {}", num_heads,
        num_kv_heads);
  check(head_size > 0, "AttentionSpec: head_size is {}, it must be positive", head_size);
  check(head_size_v >= 0,
        "AttentionSpec: head_size_v is {}, it must be positive, or 0 for head_size", head_size_v);
  constexpr std::int64_t kWidest = std::numeric_limits<std::int32_t>::max();
  for (const auto& [name, value] : {std::pair{"num_heads", num_heads},
                                    {"head_size", head_size},
                                    {"head_size_v", head_size_v}}) {
    check(value <= kWidest, "AttentionSpec: {} is {}, it may be at most {}", name, value, kWidest);
  }
  check(is_float(dtype), "AttentionSpec: dtype is {}, it must be a floating type",
        to_string(dtype));
  check(is_float(cache_dtype()), "AttentionSpec: kv_cache_dtype is {}, it must be a floating type",
        to_string(cache_dtype()));
  check(std::isfinite(softmax_scale()), "AttentionSpec: scale is {}, it must be finite",
        softmax_scale());
  check(window.left >= -1 && window.right >= -1 && window.left < kWidest && window.right < kWidest,
        "AttentionSpec: window is ({}, {}), each side must be in [0, {}), or -1 for unlimited",
        window.left, window.right, kWidest);
  // Below, score / cap would leave the range of float32.
  constexpr float kLeastSoftCap = 1e-30F;
  check(logits_soft_cap == 0.0F ||
            (logits_soft_cap >= kLeastSoftCap && std::isfinite(logits_soft_cap)),
        "AttentionSpec: logits_soft_cap is {}, it must be {} at least, or 0 to turn it off",
        logits_soft_cap, kLeastSoftCap);
  check_per_head(alibi_slopes, "alibi_slopes", num_heads);
  check_per_head(sinks, "sinks", num_heads);
  check(alibi_slopes.empty() || !score_mod,
        "AttentionSpec: score_mod and alibi_slopes are both set; one score is applied, give one of "
        "them");
  for (const auto& [name, value] : {std::pair{"q", scales.q}, {"k", scales.k}, {"v", scales.v}}) {
    check(value > 0.0F && std::isfinite(value),
          "AttentionSpec: scales.{} is {}, it must be positive and finite", name, value);
  }
  if (mla) {
    const MlaDims& dims = *mla;
    check(dims.kv_lora_rank > 0 && dims.qk_nope_head_dim > 0 && dims.qk_rope_head_dim > 0 &&
              dims.v_head_dim > 0,
          "AttentionSpec: mla has kv_lora_rank {}, qk_nope_head_dim {}, qk_rope_head_dim {}, "
          "v_head_dim {}; "
          "all must be positive",
          dims.kv_lora_rank, dims.qk_nope_head_dim, dims.qk_rope_head_dim, dims.v_head_dim);
    check(std::max({dims.kv_lora_rank, dims.qk_nope_head_dim, dims.qk_rope_head_dim,
                    dims.v_head_dim}) <= kWidest,
          "AttentionSpec: mla has a dimension of more than {}", kWidest);
    check(num_kv_heads == 1, "AttentionSpec: num_kv_heads is {}, an MLA layer has 1", num_kv_heads);
    check(head_size == dims.cache_entry(),
          "AttentionSpec: head_size is {}, an MLA layer has kv_lora_rank + qk_rope_head_dim = {}",
          head_size, dims.cache_entry());
    check(value_head_size() == dims.kv_lora_rank,
          "AttentionSpec: head_size_v is {}, an MLA layer has kv_lora_rank = {}", value_head_size(),
          dims.kv_lora_rank);
    check(scale.has_value(),
          "AttentionSpec: scale is unset, an MLA layer must give the model's own");
    check(attn_type == AttnType::decoder,
          "AttentionSpec: attn_type is {}, an MLA layer must be a decoder", to_string(attn_type));
  }
}

KVCacheSpec KVCacheSpec::from(const AttentionSpec& spec, std::int64_t block_size) {
  spec.validate();
  check(block_size > 0, "KVCacheSpec::from: block_size is {}, it must be positive", block_size);
  KVCacheSpec cache;
  cache.block_size = block_size;
  cache.num_kv_heads = spec.num_kv_heads;
  cache.head_size = spec.head_size;
  cache.head_size_v = spec.value_head_size();
  cache.dtype = spec.cache_dtype();
  if (spec.mla) {
    cache.kind = Kind::mla;
    cache.head_size_v = 0;
  } else if (spec.attn_type == AttnType::encoder_decoder) {
    cache.kind = Kind::cross;
  } else if (!spec.uses_cache()) {
    cache.kind = Kind::encoder_only;
  } else if (spec.window.left >= 0) {
    cache.kind = Kind::sliding_window;
    cache.sliding_window = spec.window.left + 1;
  }
  return cache;
}

std::int64_t KVCacheSpec::page_size_bytes() const {
  if (kind == Kind::encoder_only) {
    return 0;
  }
  const std::int64_t content =
      head_size + (kind == Kind::mla ? 0 : (head_size_v == 0 ? head_size : head_size_v));
  const std::int64_t needed = product(std::array{block_size, num_kv_heads, content, size_of(dtype)},
                                      "KVCacheSpec: a page's bytes");
  check(page_size_padded == 0 || page_size_padded >= needed,
        "KVCacheSpec: page_size_padded is {} bytes, it must be at least the {} that a page needs, "
        "or 0",
        page_size_padded, needed);
  return std::max(needed, page_size_padded);
}

std::int64_t KVCacheSpec::max_blocks_per_request(std::int64_t max_seq_len,
                                                 std::int64_t max_tokens_per_step) const {
  if (kind == Kind::encoder_only) {
    return 0;
  }
  check(block_size > 0, "KVCacheSpec: block_size is {}, it must be positive", block_size);
  check(max_seq_len >= 0 && max_tokens_per_step >= 0,
        "KVCacheSpec: max_seq_len is {} and max_tokens_per_step is {}, both must be >= 0",
        max_seq_len, max_tokens_per_step);
  const std::int64_t whole = ceil_div(max_seq_len, block_size);
  if (kind != Kind::sliding_window) {
    return whole;
  }
  const std::int64_t before = std::min(sliding_window - 1, max_seq_len);
  const std::int64_t live = before + std::min(max_tokens_per_step, max_seq_len - before);
  return std::min(ceil_div(live, block_size) + 1, whole);
}

KVCacheLayout KVCacheLayout::latent(const KVCacheSpec& spec, std::int64_t num_blocks) {
  return {{num_blocks, spec.block_size, spec.head_size}, {0, 1, 2}, spec.dtype};
}

KVCacheLayout KVCacheLayout::flash(const KVCacheSpec& spec, std::int64_t num_blocks,
                                   KVCacheOrder order) {
  if (spec.page_size_padded != 0 && spec.page_size_bytes() == spec.page_size_padded) {
    fail(ErrorCode::unsupported,
         "page_size_padded is {} bytes, a layout has no padding: make a strided view of the cache",
         spec.page_size_padded);
  }
  const bool nhd = order == KVCacheOrder::nhd;
  if (values_differ(spec)) {
    return {{num_blocks, spec.num_kv_heads, spec.block_size, spec.head_size + spec.head_size_v},
            nhd ? std::vector<int>{0, 2, 1, 3} : std::vector<int>{0, 1, 2, 3},
            spec.dtype};
  }
  return {{num_blocks, 2, spec.block_size, spec.num_kv_heads, spec.head_size},
          nhd ? std::vector<int>{0, 1, 2, 3, 4} : std::vector<int>{0, 1, 3, 2, 4},
          spec.dtype};
}

std::int64_t KVCacheLayout::size_bytes() const {
  std::vector<std::int64_t> factors = shape;
  factors.push_back(size_of(dtype));
  return product(factors, "KVCacheLayout: a cache's bytes");
}

TensorView KVCacheLayout::view(void* data, Device device) const {
  check(shape.size() == stride_order.size(),
        "KVCacheLayout: stride_order has {} entries, it must have {} as shape has",
        stride_order.size(), shape.size());
  size_bytes();  // Throws where strides would overflow.
  std::vector<std::int64_t> strides(shape.size(), 0);
  std::int64_t stride = 1;
  for (std::size_t i = stride_order.size(); i-- > 0;) {
    const auto dim = static_cast<std::size_t>(stride_order[i]);
    check(dim < shape.size() && strides[dim] == 0,
          "KVCacheLayout: stride_order is not a permutation of the dimensions");
    strides[dim] = stride;
    stride *= std::max<std::int64_t>(shape[dim], 1);
  }
  return {data, dtype, shape, strides, device};
}

KVCacheView KVCacheView::flash(const TensorView& cache, const KVCacheSpec& spec) {
  return values_differ(spec) ? from_packed(cache, spec.head_size) : from_blocks_first(cache);
}

KVCacheView KVCacheView::from_blocks_first(const TensorView& cache) {
  check_ndim("cache", cache, 5);
  check(cache.size(1) == 2,
        "cache: dimension 1 has size {}, it must be 2 (keys and values) in [num_blocks, 2, "
        "block_size, num_kv_heads, "
        "head_size]",
        cache.size(1));
  return {cache.select(1, 0), cache.select(1, 1)};
}

KVCacheView KVCacheView::from_kv_first(const TensorView& cache) {
  check_ndim("cache", cache, 5);
  check(cache.size(0) == 2,
        "cache: dimension 0 has size {}, it must be 2 (keys and values) in [2, num_blocks, "
        "block_size, num_kv_heads, "
        "head_size]",
        cache.size(0));
  return {cache.select(0, 0), cache.select(0, 1)};
}

KVCacheView KVCacheView::from_packed(const TensorView& cache, std::int64_t head_size) {
  check_ndim("cache", cache, 4);
  check(head_size > 0 && head_size < cache.size(3),
        "head_size is {}, it must be positive and less than the {} elements of keys and values "
        "together",
        head_size, cache.size(3));
  const TensorView tokens_first = cache.permute({0, 2, 1, 3});
  return {tokens_first.slice(3, 0, head_size), tokens_first.slice(3, head_size, cache.size(3))};
}

}  // namespace foveal
