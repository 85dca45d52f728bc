#pragma once

#include "ptx/math.cuh"

namespace flash_attn {

constexpr float kInfinity = __builtin_bit_cast(float, 0x7F800000U);
constexpr float kLog2E = 1.44269504088896340736F;
constexpr float kLn2 = 0.69314718055994530942F;

/// cap · tanh(score / cap) for scores in base 2. tanh x = 1 − 2/(e^{2x} + 1) is off by 2^-22 of the
/// cap at most, and right at both ends.
__device__ __forceinline__ float soft_cap(float score, float cap) {
  const float e2x = ptx::exp2_approx(score * (2.0F * kLog2E * kLog2E / (cap * kLog2E)));
  return cap - 2.0F * cap * ptx::reciprocal_approx(e2x + 1.0F);
}

/// Maximum and sum over the four lanes that hold a row of an mma accumulator.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFU, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFU, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xFFFFFFFFU, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFFU, x, 2);
}

}  // namespace flash_attn
