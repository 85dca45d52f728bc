#include "foveal/ops.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/check.h"
#include "core/tensor_checks.h"
#include "foveal/registry.h"

namespace foveal {
namespace {

/// The first backend of the global registry, in order of preference, that serves the device with
/// plain K and V, and has the dtypes. (Where none has them, the first of the device: its functions
/// may do more than its layers.)
AttentionBackendPtr backend_of(Device device, DType dtype, DType cache_dtype) {
  BackendRegistry& registry = BackendRegistry::global();
  AttentionBackendPtr first;
  for (const BackendRegistry::Entry& entry : registry.entries()) {
    AttentionBackendPtr backend;
    try {
      backend = registry.get(entry.id);
    } catch (const Error&) {
      continue;  // It cannot be loaded here; the next one may.
    }
    const BackendCapabilities& can = backend->capabilities();
    if (can.device != device.type || can.mla || !can.auto_select) {
      continue;
    }
    const auto has = [](const std::vector<DType>& dtypes, DType wanted) {
      return std::find(dtypes.begin(), dtypes.end(), wanted) != dtypes.end();
    };
    if (has(can.dtypes, dtype) && (cache_dtype == dtype || has(can.kv_cache_dtypes, cache_dtype))) {
      return backend;
    }
    first = first ? first : backend;
  }
  if (!first) {
    fail(ErrorCode::unsupported, "no backend serves tensors on {}", to_string(device));
  }
  return first;
}

void check_part(std::string_view name, const AttentionPart& part, const TensorView& like) {
  const std::string output = fmt::format("{}.output", name);
  check_tensor(output, part.output, like.dtype(), like.device(),
               {like.size(0), like.size(1), like.size(2)}, "[num_tokens, num_heads, head_size_v]");
  check_last_contiguous(output, part.output);
  check_tensor(fmt::format("{}.lse", name), part.lse, DType::f32, like.device(),
               {like.size(1), like.size(0)}, "[num_heads, num_tokens]");
}

}  // namespace

void merge_attn_states(const AttentionPart& result, const AttentionPart& a, const AttentionPart& b,
                       const ExecutionContext& context) {
  const TensorView& output = result.output;
  check_ndim("result.output", output, 3);
  check(is_float(output.dtype()) && !is_fp8(output.dtype()),
        "result.output is {}, its dtype must be f32, f16 or bf16", output);
  check_last_contiguous("result.output", output);
  if (!result.lse.empty()) {
    check_tensor("result.lse", result.lse, DType::f32, output.device(),
                 {output.size(1), output.size(0)}, "[num_heads, num_tokens]");
  }
  check_part("a", a, output);
  check_part("b", b, output);
  backend_of(output.device(), output.dtype(), output.dtype())
      ->merge_attn_states(result, a, b, context);
}

void reshape_and_cache(const TensorView& key, const TensorView& value, const KVCacheView& kv_cache,
                       const TensorView& slot_mapping, const QuantScales& scales,
                       const ExecutionContext& context) {
  check_ndim("key", key, 3);
  check_ndim("kv_cache.key", kv_cache.key, 4);
  const Device device = key.device();
  const DType dtype = key.dtype();
  const DType cache_dtype = kv_cache.key.dtype();
  check(is_float(dtype), "key is {}, its dtype must be a floating type", key);
  check(cache_dtype == dtype || is_fp8(cache_dtype),
        "kv_cache.key is {}, its dtype must be {} as that of key, or an fp8", kv_cache.key,
        to_string(dtype));
  check_last_contiguous("key", key);
  check_tensor("value", value, dtype, device, {key.size(0), key.size(1), -1},
               "[num_tokens, num_kv_heads, head_size_v]");
  check_last_contiguous("value", value);
  check_kv_cache(kv_cache, -1, key.size(1), key.size(2), value.size(2), cache_dtype, device);
  check(scales.k > 0.0F && scales.v > 0.0F && std::isfinite(scales.k) && std::isfinite(scales.v),
        "scales are k = {} and v = {}, they must be positive and finite", scales.k, scales.v);
  check_slot_mapping(slot_mapping, key.size(0), kv_cache.num_blocks() * kv_cache.block_size(),
                     device);
  backend_of(device, dtype, cache_dtype)
      ->reshape_and_cache(key, value, kv_cache, slot_mapping, scales, context);
}

}  // namespace foveal
