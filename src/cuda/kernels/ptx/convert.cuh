#pragma once

// The narrow floating types by their bits, and conversions between them.
namespace ptx {

struct f16 {
  unsigned short bits;
};
struct bf16 {
  unsigned short bits;
};
/// 1-4-3, bias 7, no infinities, S.1111.111 is NaN.
struct f8e4m3 {
  unsigned char bits;
};
/// 1-5-2, bias 15, as IEEE.
struct f8e5m2 {
  unsigned char bits;
};

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(bf16 value) {
  return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}
__device__ __forceinline__ float to_float(f16 value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}

/// Two floats, rounded to nearest even, `low` in the lower half.
template <typename T>
__device__ __forceinline__ unsigned pack(float low, float high);
template <>
__device__ __forceinline__ unsigned pack<bf16>(float low, float high) {
  unsigned result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
template <>
__device__ __forceinline__ unsigned pack<f16>(float low, float high) {
  unsigned result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

template <typename T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float value) {
  return {static_cast<unsigned short>(pack<bf16>(value, 0.0F))};
}
template <>
__device__ __forceinline__ f16 from_float<f16>(float value) {
  return {static_cast<unsigned short>(pack<f16>(value, 0.0F))};
}

namespace detail {

/// a·b of two packed halves; the addend −0 changes no result.
__device__ __forceinline__ unsigned multiply(bf16, unsigned a, unsigned b) {
  unsigned result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(0x80008000U));
  return result;
}
__device__ __forceinline__ unsigned multiply(f16, unsigned a, unsigned b) {
  unsigned result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(0x80008000U));
  return result;
}

/// How the exponent and mantissa of an 8-bit value in the upper half of 16 bits are moved to line
/// up with those of T, and the power of two that then makes up for the difference in bias (exact,
/// subnormals included), as two packed T; and all bits of T's exponents.
template <typename T, typename F8>
struct Widening;
template <>
struct Widening<bf16, f8e4m3> {
  static constexpr int kShift = 4;
  static constexpr unsigned kFactor = 0x7B807B80U;  // 2^120
  static constexpr unsigned kExponents = 0x7F807F80U;
};
template <>
struct Widening<bf16, f8e5m2> {
  static constexpr int kShift = 3;
  static constexpr unsigned kFactor = 0x77807780U;  // 2^112
  static constexpr unsigned kExponents = 0x7F807F80U;
};
template <>
struct Widening<f16, f8e4m3> {
  static constexpr int kShift = 1;
  static constexpr unsigned kFactor = 0x5C005C00U;  // 2^8
  static constexpr unsigned kExponents = 0x7C007C00U;
};

/// The bits of an 8-bit type's upper byte which, all set, say that it is no finite number, in both
/// halves; and the lowest of them.
template <typename F8>
struct NotFinite;
template <>
struct NotFinite<f8e4m3> {
  static constexpr unsigned kBits = 0x7F007F00U;
  static constexpr unsigned kLowest = 0x01000100U;
};
template <>
struct NotFinite<f8e5m2> {
  static constexpr unsigned kBits = 0x7C007C00U;
  static constexpr unsigned kLowest = 0x04000400U;
};

/// 0xFFFF for each half whose upper byte is no finite number: adding the lowest of those bits
/// carries into the sign then, which prmt spreads over the half.
template <typename F8>
__device__ __forceinline__ unsigned not_finite(unsigned upper_bytes) {
  const unsigned carried = (upper_bytes & NotFinite<F8>::kBits) + NotFinite<F8>::kLowest;
  unsigned mask;
  asm("prmt.b32 %0, %1, 0, 0xBB99;" : "=r"(mask) : "r"(carried));
  return mask;
}

}  // namespace detail

/// The 8-bit values in the upper bytes of the two halves, exactly, as packed T. The lower bytes do
/// not matter.
template <typename T, typename F8>
__device__ __forceinline__ unsigned widen_pair(unsigned upper_bytes) {
  using W = detail::Widening<T, F8>;
  const unsigned moved = (upper_bytes & 0x80008000U) | ((upper_bytes & 0x7F007F00U) >> W::kShift);
  // With all exponent bits set, a mantissa that is not 0 makes a NaN: that of S.1111.111 is not.
  return detail::multiply(T{}, moved, W::kFactor) |
         (detail::not_finite<F8>(upper_bytes) & W::kExponents);
}
template <>
__device__ __forceinline__ unsigned widen_pair<f16, f8e5m2>(unsigned upper_bytes) {
  return upper_bytes & 0xFF00FF00U;  // e5m2 is the upper half of f16.
}

/// Four 8-bit values as two registers of packed T, in order.
template <typename T, typename F8>
__device__ __forceinline__ void widen(unsigned (&result)[2], unsigned four) {
  result[0] = widen_pair<T, F8>(__byte_perm(four, 0U, 0x1404));
  result[1] = widen_pair<T, F8>(__byte_perm(four, 0U, 0x3424));
}

/// The same apart: the first and third, the second and fourth. Cheaper by an instruction.
template <typename T, typename F8>
__device__ __forceinline__ void widen_even_odd(unsigned (&result)[2], unsigned four) {
  result[0] = widen_pair<T, F8>(four << 8);
  result[1] = widen_pair<T, F8>(four);
}

namespace detail {

/// Two packed 8-bit values to packed f16, by an instruction of sm_89 and later.
__device__ __forceinline__ unsigned to_f16_pair(f8e4m3, unsigned short two) {
  unsigned result;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(two));
  return result;
}
__device__ __forceinline__ unsigned to_f16_pair(f8e5m2, unsigned short two) {
  unsigned result;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(result) : "h"(two));
  return result;
}

__device__ __forceinline__ unsigned from_f16_pair(f16, unsigned pair) { return pair; }
__device__ __forceinline__ unsigned from_f16_pair(bf16, unsigned pair) {
  return pack<bf16>(to_float(f16{static_cast<unsigned short>(pair)}),
                    to_float(f16{static_cast<unsigned short>(pair >> 16)}));
}

}  // namespace detail

/// Four 8-bit values as two registers of packed T, in order, exactly (sm_89 and later).
template <typename T, typename F8>
__device__ __forceinline__ uint2 widen_sm89(unsigned four) {
  const auto half = [](unsigned two) {
    return detail::from_f16_pair(T{}, detail::to_f16_pair(F8{}, static_cast<unsigned short>(two)));
  };
  return {half(four), half(four >> 16)};
}

/// One float to an 8-bit type: nearest even, finite values saturated at the largest. By bits, since
/// sm_80 has no instruction for it.
template <int kExponentBits, int kMantissaBits, unsigned kLargest, unsigned kInfinity,
          unsigned kNaN>
__device__ __forceinline__ unsigned char narrow_bits(float value) {
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  const unsigned bits = __float_as_uint(value);
  const unsigned magnitude = bits & 0x7FFFFFFFU;
  unsigned result;
  if (magnitude > 0x7F800000U) {
    result = kNaN;
  } else if (magnitude == 0x7F800000U) {
    result = kInfinity;
  } else if (magnitude < static_cast<unsigned>(127 + 1 - kBias) << 23) {
    // Subnormal: adding the power of two whose last place is the smallest subnormal rounds to it.
    const float unit =
        __uint_as_float(static_cast<unsigned>(127 + 1 - kBias - kMantissaBits + 23) << 23);
    result = __float_as_uint(__uint_as_float(magnitude) + unit) - __float_as_uint(unit);
  } else {
    const unsigned odd = (magnitude >> (23 - kMantissaBits)) & 1U;
    const unsigned rounded = magnitude + (1U << (22 - kMantissaBits)) - 1U + odd;
    result =
        (rounded >> (23 - kMantissaBits)) - (static_cast<unsigned>(127 - kBias) << kMantissaBits);
    result = result > kLargest ? kLargest : result;
  }
  return static_cast<unsigned char>(((bits >> 24) & 0x80U) | result);
}
template <>
__device__ __forceinline__ f8e4m3 from_float<f8e4m3>(float value) {
  return {narrow_bits<4, 3, 0x7EU, 0x7EU, 0x7FU>(value)};
}
template <>
__device__ __forceinline__ f8e5m2 from_float<f8e5m2>(float value) {
  return {narrow_bits<5, 2, 0x7BU, 0x7CU, 0x7EU>(value)};
}

}  // namespace ptx
