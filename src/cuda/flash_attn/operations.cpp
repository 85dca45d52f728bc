// reshape_and_cache and merge_attn_states: choosing and launching their kernels.

#include <algorithm>
#include <cstdint>

#include "core/check.h"
#include "core/tensor_checks.h"
#include "cuda/flash_attn/impl.h"
#include "cuda/flash_attn/kernels.h"
#include "cuda/flash_attn/tensor_args.h"
#include "cuda/kernels/cache_ops_params.cuh"

namespace foveal::cuda::flash_attn {
namespace {

constexpr unsigned kThreads = 256;

Dim3 warps_grid(std::int64_t warps) {
  return {static_cast<unsigned>((warps * 32 + kThreads - 1) / kThreads), 1, 1};
}

MergePart merge_part(const AttentionPart& part) {
  MergePart result{};
  result.output = part.output.data();
  result.row_stride = part.output.stride(0);
  result.head_stride = part.output.stride(1);
  if (!part.lse.empty()) {
    result.lse = part.lse.as<float>();
    result.lse_head_stride = part.lse.stride(0);
    result.lse_row_stride = part.lse.stride(1);
  }
  return result;
}

}  // namespace

void reshape_and_cache(const TensorView& key, const TensorView& value, const KVCacheView& kv_cache,
                       const TensorView& slot_mapping, const QuantScales& scales,
                       const ExecutionContext& context) {
  check(key.device().type == DeviceType::cuda, "key is {}, it must be on a CUDA device", key);
  const DType dtype = key.dtype();
  const DType cache_dtype = kv_cache.key.dtype();
  if (dtype != DType::f16 && dtype != DType::bf16 && dtype != DType::f32 && dtype != cache_dtype) {
    fail(
        ErrorCode::unsupported,
        "key is {}, reshape_and_cache of {} writes f16, bf16, f32 and what is in the cache's dtype",
        key.describe(), kName);
  }
  const std::int64_t rows = slot_mapping.size(0);
  if (rows == 0) {
    return;
  }
  CacheWriteParams params{};
  params.key = key.data();
  params.value = value.data();
  params.key_cache = kv_cache.key.data();
  params.value_cache = kv_cache.value.data();
  params.slots = slot_mapping.as<const long long>();
  params.num_slots_given = rows;
  params.key_row = key.stride(0);
  params.key_head = key.stride(1);
  params.value_row = value.stride(0);
  params.value_head = value.stride(1);
  params.key_block = kv_cache.key.stride(0);
  params.key_token = kv_cache.key.stride(1);
  params.key_cache_head = kv_cache.key.stride(2);
  params.value_block = kv_cache.value.stride(0);
  params.value_token = kv_cache.value.stride(1);
  params.value_cache_head = kv_cache.value.stride(2);
  params.slots_in_cache = kv_cache.num_blocks() * kv_cache.block_size();
  params.num_heads = static_cast<int>(key.size(1));
  params.block_size = static_cast<int>(kv_cache.block_size());
  params.key_scale = scales.k;
  params.value_scale = scales.v;

  // As many elements at a time as addresses and sizes allow, 16 bytes of the source at most.
  std::int64_t vector = 16 / size_of(dtype);
  for (const TensorView* tensor : {&key, &value}) {
    vector = std::min(vector, vector_bytes(*tensor) / size_of(dtype));
  }
  for (const TensorView* tensor : {&kv_cache.key, &kv_cache.value}) {
    vector = std::min(vector, vector_bytes(*tensor) / size_of(cache_dtype));
  }
  const CacheWriteVariant variant{.dtype = dtype,
                                  .cache_dtype = cache_dtype,
                                  .head_size = static_cast<int>(key.size(2)),
                                  .head_size_v = static_cast<int>(value.size(2)),
                                  .vector = static_cast<int>(std::max<std::int64_t>(vector, 1))};
  const int device = key.device().index;
  const ContextGuard guard(device);
  launch(cache_write_kernel(variant, device),
         {.grid = warps_grid(rows * params.num_heads),
          .block = {kThreads, 1, 1},
          .stream = context.stream},
         params);
}

void merge_attn_states(const AttentionPart& result, const AttentionPart& a, const AttentionPart& b,
                       const HeadValues<kMaxHeadValues>* sinks, const ExecutionContext& context) {
  const TensorView& output = result.output;
  if (output.dtype() != DType::f16 && output.dtype() != DType::bf16 &&
      output.dtype() != DType::f32) {
    fail(ErrorCode::unsupported,
         "result.output is {}, merge_attn_states of {} takes f16, bf16 and f32", output.describe(),
         kName);
  }
  const std::int64_t warps = output.size(0) * output.size(1);
  if (warps == 0) {
    return;
  }
  std::int64_t vector = 16 / size_of(output.dtype());
  for (const AttentionPart* part : {&result, &a, &b}) {
    vector = std::min(vector, vector_bytes(part->output) / size_of(output.dtype()));
  }
  MergeParams params{};
  params.result = merge_part(result);
  params.a = merge_part(a);
  params.b = merge_part(b);
  params.num_rows = static_cast<int>(output.size(0));
  params.num_heads = static_cast<int>(output.size(1));
  const MergeVariant variant{.dtype = output.dtype(),
                             .head_size_v = static_cast<int>(output.size(2)),
                             .vector = static_cast<int>(std::max<std::int64_t>(vector, 1)),
                             .sinks = sinks != nullptr};
  const int device = output.device().index;
  const ContextGuard guard(device);
  const Kernel& kernel = merge_kernel(variant, device);
  const LaunchConfig config{
      .grid = warps_grid(warps), .block = {kThreads, 1, 1}, .stream = context.stream};
  if (sinks != nullptr) {
    launch(kernel, config, params, *sinks);
  } else {
    launch(kernel, config, params, HeadValues<1>{});
  }
}

}  // namespace foveal::cuda::flash_attn
