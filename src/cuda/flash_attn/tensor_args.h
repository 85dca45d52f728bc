#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/kernels/flash_attn/params.cuh"
#include "foveal/tensor.h"

// Tensors as kernel arguments.
namespace foveal::cuda::flash_attn {

/// The largest power of two up to 16 that divides the address of every row of the tensor and the
/// length of its last dimension, in bytes: what may be moved at a time.
inline std::int64_t vector_bytes(const TensorView& tensor) {
  const std::int64_t element = size_of(tensor.dtype());
  std::uint64_t bits = reinterpret_cast<std::uintptr_t>(tensor.data()) | 16U;
  for (int d = 0; d + 1 < tensor.ndim(); ++d) {
    // The stride of a dimension of size 1 is never used.
    bits |= tensor.size(d) > 1 ? static_cast<std::uint64_t>(tensor.stride(d) * element) : 0U;
  }
  bits |= static_cast<std::uint64_t>(tensor.size(tensor.ndim() - 1) * element);
  return static_cast<std::int64_t>(bits & (~bits + 1U));
}

/// [rows, heads, size]
inline RowsView rows_view(const TensorView& tensor) {
  return {tensor.data(), tensor.stride(0), tensor.stride(1)};
}

/// [blocks, block_size, heads, size]
inline CacheView cache_view(const TensorView& tensor) {
  const std::int64_t element = size_of(tensor.dtype());
  return {tensor.data(), tensor.stride(0) * element, tensor.stride(1) * element,
          tensor.stride(2) * element};
}

/// [keys, heads, size]
inline CacheView plain_view(const TensorView& tensor) {
  const std::int64_t element = size_of(tensor.dtype());
  return {tensor.data(), 0, tensor.stride(0) * element, tensor.stride(1) * element};
}

}  // namespace foveal::cuda::flash_attn
