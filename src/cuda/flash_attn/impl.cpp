#include "cuda/flash_attn/impl.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <optional>

#include "core/check.h"
#include "cuda/flash_attn/tensor_args.h"
#include "cuda/flash_attn/tensor_maps.h"

namespace foveal::cuda::flash_attn {
namespace {

constexpr float kLog2E = std::numbers::log2e_v<float>;

/// From the accumulator of query · key to the score; a query or cache in fp8 holds value / scale.
float score_scale(const AttentionSpec& spec, bool paged) {
  const bool fp8_keys = is_fp8(paged ? spec.cache_dtype() : spec.dtype);
  return spec.softmax_scale() * (is_fp8(spec.dtype) ? spec.scales.q : 1.0F) *
         (fp8_keys ? spec.scales.k : 1.0F);
}

bool same_strides(const CacheView& a, const CacheView& b) {
  return a.block_bytes == b.block_bytes && a.token_bytes == b.token_bytes;
}

}  // namespace

FlashImpl::FlashImpl(const AttentionSpec& spec) : AttentionImpl(kName, spec) {
  const bool head_values = !spec.alibi_slopes.empty() || !spec.sinks.empty();
  if (spec.dtype != DType::f16 && spec.dtype != DType::bf16 && spec.dtype != DType::f8e4m3) {
    fail(ErrorCode::unsupported, "dtype is {}, {} takes f16, bf16 and f8e4m3",
         to_string(spec.dtype), kName);
  }
  if (is_fp8(spec.dtype) && spec.cache_dtype() != spec.dtype) {
    fail(ErrorCode::unsupported, "kv_cache_dtype is {}, with a query in {} {} takes the same",
         to_string(spec.cache_dtype()), to_string(spec.dtype), kName);
  }
  if (spec.cache_dtype() != spec.dtype && !is_fp8(spec.cache_dtype())) {
    fail(ErrorCode::unsupported,
         "kv_cache_dtype is {}, {} takes that of the query, f8e4m3 and f8e5m2",
         to_string(spec.cache_dtype()), kName);
  }
  for (const std::int64_t size : {spec.head_size, spec.value_head_size()}) {
    if (size % 8 != 0 || size > 256) {
      fail(ErrorCode::unsupported, "a head size is {}, {} takes multiples of 8 up to 256", size,
           kName);
    }
  }
  if (spec.score_mod || spec.mask_mod) {
    fail(ErrorCode::unsupported,
         "score_mod and mask_mod are functions of the host, {} cannot call them", kName);
  }
  if (head_values && spec.num_heads > kMaxHeadValues) {
    fail(ErrorCode::unsupported, "num_heads is {}, {} takes at most {} with ALiBi or sinks",
         spec.num_heads, kName, kMaxHeadValues);
  }
  for (std::size_t h = 0; h < spec.alibi_slopes.size(); ++h) {
    head_values_.alibi_slope[h] = spec.alibi_slopes[h] * kLog2E;
  }
  for (std::size_t h = 0; h < spec.sinks.size(); ++h) {
    head_values_.sink[h] = spec.sinks[h] * kLog2E;
  }
}

void FlashImpl::do_update_kv_cache(const TensorView& key, const TensorView& value,
                                   const KVCacheView& kv_cache, const TensorView& slot_mapping,
                                   const ExecutionContext& context) const {
  reshape_and_cache(key, value, kv_cache, slot_mapping, spec().scales, context);
}

void FlashImpl::run_pass(const ForwardArgs& args, const FlashMetadata& metadata, const Pass& pass,
                         unsigned char* workspace, Stream stream) const {
  const CommonAttentionMetadata& common = metadata.common();
  const AttentionSpec& layer = spec();
  const bool paged = metadata.page_size > 0;
  const TensorView& key = paged ? args.kv_cache.key : args.key;
  const TensorView& value = paged ? args.kv_cache.value : args.value;
  // A cascade's passes leave the sink to their merge.
  const bool sinks = !layer.sinks.empty() && metadata.passes.size() == 1;

  ForwardParams params{};
  params.query = rows_view(args.query);
  params.output = rows_view(args.output);
  params.key = paged ? cache_view(key) : plain_view(key);
  params.value = paged ? cache_view(value) : plain_view(value);
  if (!args.lse.empty()) {
    params.lse = args.lse.as<float>();
    params.lse_head_stride = args.lse.stride(0);
    params.lse_row_stride = args.lse.stride(1);
  }
  if (paged) {
    params.block_table = common.block_table.as<const int>();
    params.table_stride = common.block_table.stride(0);
  } else {
    const TensorView& starts =
        common.key_start_loc.empty() ? common.query_start_loc : common.key_start_loc;
    params.key_start_loc = starts.as<const int>();
  }
  params.scale = score_scale(layer, paged) * kLog2E;
  params.inverse_scale = 1.0F / params.scale;
  params.soft_cap = layer.logits_soft_cap * kLog2E;
  params.value_scale = is_fp8(paged ? layer.cache_dtype() : layer.dtype) ? layer.scales.v : 1.0F;
  params.window_left = window_bound(layer.window.left);
  params.window_right = pass.causal ? 0 : window_bound(layer.window.right);
  params.key_begin = pass.key_begin;
  params.num_kv_heads = static_cast<int>(layer.num_kv_heads);

  // Whatever can fail comes before the first launch.
  std::array<std::optional<Launch>, 2> launches;
  for (std::size_t i = 0; i < launches.size(); ++i) {
    const ClassPlan& plan = pass.classes[i];
    if (!plan.active) {
      continue;
    }
    ForwardVariant variant = forward_variant(layer, pass.causal, metadata.page_size,
                                             metadata.pages_per_block, plan.variant.tile);
    variant.output_dtype = args.output.dtype();
    variant.sinks = sinks;
    variant.cache_vector_bytes = static_cast<int>(std::min(vector_bytes(key), vector_bytes(value)));
    variant.row_vector_bytes =
        static_cast<int>(std::min(vector_bytes(args.query), vector_bytes(args.output)));
    if (variant.tile.is_sm90() && !(copies_in_bulk(args.query) && copies_in_bulk(key) &&
                                    copies_in_bulk(value) && vector_bytes(args.output) == 16)) {
      check(!is_fp8(layer.dtype),
            "query is {}, key {}, value {} and output {}: with a query in fp8 their addresses and "
            "strides must be multiples of 16 bytes",
            args.query.describe(), key.describe(), value.describe(), args.output.describe());
      variant.tile = without_bulk_copies(variant.tile, variant.head);
    }
    if (variant.tile.is_sm90()) {
      variant.joint_addresses = false;  // Of no concern to it.
    } else {
      variant.joint_addresses &= same_strides(params.key, params.value);
    }
    Launch& found = launches[i].emplace();
    // The builder's choice fits the usual layer; looking one up costs more than comparing.
    found.kernel =
        variant == plan.variant ? plan.kernel : &forward_kernel(variant, metadata.device);
    found.head_values = variant.alibi || variant.sinks;
    found.config = {
        .grid = {static_cast<unsigned>(plan.max_items), static_cast<unsigned>(layer.num_kv_heads),
                 1},
        .block = {static_cast<unsigned>(variant.tile.threads(variant.head)), 1, 1},
        .dynamic_shared_bytes = static_cast<unsigned>(variant.tile.shared_bytes(variant.head)),
        .stream = stream};
    if (variant.tile.is_sm90()) {
      // Blocks that stay, and take work until none is left.
      const auto [items, heads, one] = found.config.grid;
      found.config.grid = {std::min(items * heads, static_cast<unsigned>(plan.capacity)), one, one};
      found.maps = tensor_maps(args.query, key, value, variant.tile, variant.head);
    }
  }
  for (std::size_t i = 0; i < launches.size(); ++i) {
    if (!launches[i]) {
      continue;
    }
    const ClassPlan& plan = pass.classes[i];
    params.counts = plan.counts;
    params.items = plan.items;
    params.counters = plan.counters;
    params.partial_output = reinterpret_cast<float*>(workspace + plan.partial_output);
    params.partial_lse = reinterpret_cast<float*>(workspace + plan.partial_lse);
    if (const auto& maps = launches[i]->maps) {
      launch_forward(*launches[i], params, maps->query, maps->key, maps->value);
    } else {
      launch_forward(*launches[i], params);
    }
  }
}

template <typename... Maps>
void FlashImpl::launch_forward(const Launch& found, const ForwardParams& params,
                               const Maps&... maps) const {
  if (found.head_values) {
    launch(*found.kernel, found.config, params, maps..., head_values_);
  } else {
    launch(*found.kernel, found.config, params, maps..., HeadValues<1>{});
  }
}

void FlashImpl::do_forward(const ForwardArgs& args, const AttentionMetadata& metadata,
                           const ExecutionContext& context) const {
  const auto& plan = static_cast<const FlashMetadata&>(metadata);
  if (plan.passes.empty()) {
    return;
  }
  const DType output = args.output.dtype();
  if (output != DType::f16 && output != DType::bf16) {  // The core allows f32 for a query in fp8.
    fail(ErrorCode::unsupported, "output is {}, {} writes f16 and bf16", args.output.describe(),
         kName);
  }
  const ContextGuard guard(plan.device);
  auto* workspace = context.workspace.empty()
                        ? (plan.workspace ? plan.workspace->as<unsigned char>() : nullptr)
                        : context.workspace.as<unsigned char>();
  if (plan.passes.size() == 1) {
    run_pass(args, plan, plan.passes.front(), workspace, context.stream);
    return;
  }
  // Cascade: the common prefix for all rows at once, the rest of each request, then both together.
  const std::int64_t rows = plan.common().num_actual_tokens;
  const Device device = args.query.device();
  const auto first_rows = [&](const TensorView& tensor) { return tensor.slice(0, 0, rows); };
  std::array<AttentionPart, 2> parts;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const Pass& pass = plan.passes[i];
    ForwardArgs part = args;
    part.output = TensorView(workspace + pass.output, args.output.dtype(),
                             {rows, spec().num_heads, spec().value_head_size()}, device);
    part.lse = TensorView(workspace + pass.lse, DType::f32, {spec().num_heads, rows}, device);
    run_pass(part, plan, pass, workspace, context.stream);
    parts[i] = {part.output, part.lse};
  }
  AttentionPart result{first_rows(args.output), {}};
  if (!args.lse.empty()) {
    result.lse = args.lse.slice(1, 0, rows);
  }
  merge_attn_states(result, parts[0], parts[1], spec().sinks.empty() ? nullptr : &head_values_,
                    context);
}

}  // namespace foveal::cuda::flash_attn
