#pragma once

#include <cstddef>

#include "foveal/dtype.h"

namespace foveal::cpu {

/// The dtypes the functions below take: f32, f16, bf16, f8e4m3, f8e5m2.
constexpr bool is_row_dtype(DType dtype) { return is_float(dtype) && dtype != DType::f64; }

/// `size` contiguous elements as float32, exactly.
void row_to_float(DType dtype, const void* source, float* target, std::size_t size);

/// source / divisor, rounded to nearest even; fp8 saturates as in core/convert.h.
void row_from_float(DType dtype, const float* source, float divisor, void* target,
                    std::size_t size);

/// target = weight_a · a + weight_b · b; the rows have room for `size` rounded up to a multiple of
/// 16. A weight of exactly 0 leaves its row unread.
void blend_rows(const float* a, float weight_a, const float* b, float weight_b, float* target,
                std::size_t size);

}  // namespace foveal::cpu
