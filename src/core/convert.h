#pragma once

// Scalar conversions between float and the narrow floating types, by bits: portable, exact when
// widening, round-to-nearest-even when narrowing. Formats: IEEE 754 binary16; bfloat16 (the upper
// half of a binary32); OCP 8-bit floating point, revision 1.0: E4M3 (bias 7, no infinities,
// S.1111.111 is NaN) and E5M2 (bias 15, IEEE-like).

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "foveal/dtype.h"

namespace foveal {
namespace detail {

/// Widens a small float given as sign | exponent | mantissa.
template <int kExponentBits, int kMantissaBits, bool kFiniteOnly>
constexpr float widen(std::uint32_t bits) {
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  constexpr std::uint32_t kExponentMax = (1U << kExponentBits) - 1;
  const std::uint32_t sign = (bits >> (kExponentBits + kMantissaBits)) << 31;
  const std::uint32_t exponent = (bits >> kMantissaBits) & kExponentMax;
  const std::uint32_t mantissa = bits & ((1U << kMantissaBits) - 1);
  if (exponent == kExponentMax && !kFiniteOnly) {
    return std::bit_cast<float>(sign | 0x7F800000U | (mantissa << (23 - kMantissaBits)));
  }
  if (exponent == kExponentMax && mantissa == (1U << kMantissaBits) - 1) {
    return std::bit_cast<float>(sign | 0x7FC00000U);
  }
  if (exponent == 0) {
    // Subnormal: mantissa · 2^(1 − bias − mantissa bits), exact in float.
    constexpr float kUnit =
        std::bit_cast<float>(static_cast<std::uint32_t>(127 + 1 - kBias - kMantissaBits) << 23);
    const float magnitude = static_cast<float>(mantissa) * kUnit;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 127 - kBias) << 23) |
                              (mantissa << (23 - kMantissaBits)));
}

/// Narrows with round-to-nearest-even. What is too large becomes infinity or, with kFiniteOnly, the
/// largest finite value (a cache must not turn large activations into NaN); NaN stays NaN.
template <int kExponentBits, int kMantissaBits, bool kFiniteOnly>
constexpr std::uint32_t narrow(float value) {
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  constexpr std::uint32_t kExponentMax = (1U << kExponentBits) - 1;
  constexpr std::uint32_t kMantissaMask = (1U << kMantissaBits) - 1;
  constexpr std::uint32_t kNaN =
      (kExponentMax << kMantissaBits) | (kFiniteOnly ? kMantissaMask : 1U << (kMantissaBits - 1));
  constexpr std::uint32_t kTooLarge = kFiniteOnly
                                          ? (kExponentMax << kMantissaBits) | (kMantissaMask - 1)
                                          : kExponentMax << kMantissaBits;
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 31) << (kExponentBits + kMantissaBits);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) {
    return sign | kNaN;
  }
  const int exponent = static_cast<int>(magnitude >> 23) - 127;
  // Bits of the 24-bit significand that fall away; more of them for subnormal results.
  const int subnormal_shift = exponent < 1 - kBias ? 1 - kBias - exponent : 0;
  const int dropped = 23 - kMantissaBits + subnormal_shift;
  if (dropped > 24) {
    return sign;
  }
  const std::uint32_t significand = (magnitude & 0x7FFFFFU) | (exponent > -127 ? 0x800000U : 0U);
  std::uint32_t kept = significand >> dropped;
  const std::uint32_t rest = significand & ((1U << dropped) - 1);
  const std::uint32_t half = 1U << (dropped - 1);
  if (rest > half || (rest == half && (kept & 1U) != 0)) {
    ++kept;
  }
  // A carry out of the mantissa runs into the exponent field, which is what rounding up means.
  const std::uint32_t result =
      subnormal_shift > 0
          ? kept
          : kept + (static_cast<std::uint32_t>(exponent + kBias - 1) << kMantissaBits);
  if (exponent >= 1 - kBias && (exponent + kBias > static_cast<int>(kExponentMax) ||
                                result >= (kFiniteOnly ? kNaN : kTooLarge))) {
    return sign | kTooLarge;
  }
  return sign | result;
}

}  // namespace detail

constexpr float f16_to_float(std::uint16_t bits) { return detail::widen<5, 10, false>(bits); }
constexpr float bf16_to_float(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}
constexpr float f8e4m3_to_float(std::uint8_t bits) { return detail::widen<4, 3, true>(bits); }
constexpr float f8e5m2_to_float(std::uint8_t bits) { return detail::widen<5, 2, false>(bits); }

constexpr std::uint16_t float_to_f16(float value) {
  return static_cast<std::uint16_t>(detail::narrow<5, 10, false>(value));
}
constexpr std::uint16_t float_to_bf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) {
    return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  }
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}
/// Saturates at ±448.
constexpr std::uint8_t float_to_f8e4m3(float value) {
  return static_cast<std::uint8_t>(detail::narrow<4, 3, true>(value));
}
/// Saturates finite values at ±57344, as a cache write must.
constexpr std::uint8_t float_to_f8e5m2(float value) {
  constexpr float kMax = 57344.0F;
  const bool finite = value - value == 0.0F;
  const float clamped = finite ? (value > kMax ? kMax : (value < -kMax ? -kMax : value)) : value;
  return static_cast<std::uint8_t>(detail::narrow<5, 2, false>(clamped));
}

/// Element `index` of an array of any floating dtype.
inline double load_element(const void* data, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::f64:
      return static_cast<const double*>(data)[index];
    case DType::f32:
      return static_cast<const float*>(data)[index];
    case DType::f16:
      return f16_to_float(static_cast<const std::uint16_t*>(data)[index]);
    case DType::bf16:
      return bf16_to_float(static_cast<const std::uint16_t*>(data)[index]);
    case DType::f8e4m3:
      return f8e4m3_to_float(static_cast<const std::uint8_t*>(data)[index]);
    case DType::f8e5m2:
      return f8e5m2_to_float(static_cast<const std::uint8_t*>(data)[index]);
    case DType::i32:
      return static_cast<const std::int32_t*>(data)[index];
    case DType::i64:
      return static_cast<double>(static_cast<const std::int64_t*>(data)[index]);
    case DType::u8:
      return static_cast<const std::uint8_t*>(data)[index];
  }
  return 0.0;
}

/// Stores into an array of any floating dtype, rounding once (double to the narrow types through
/// float).
inline void store_element(void* data, DType dtype, std::int64_t index, double value) {
  switch (dtype) {
    case DType::f64:
      static_cast<double*>(data)[index] = value;
      break;
    case DType::f32:
      static_cast<float*>(data)[index] = static_cast<float>(value);
      break;
    case DType::f16:
      static_cast<std::uint16_t*>(data)[index] = float_to_f16(static_cast<float>(value));
      break;
    case DType::bf16:
      static_cast<std::uint16_t*>(data)[index] = float_to_bf16(static_cast<float>(value));
      break;
    case DType::f8e4m3:
      static_cast<std::uint8_t*>(data)[index] = float_to_f8e4m3(static_cast<float>(value));
      break;
    case DType::f8e5m2:
      static_cast<std::uint8_t*>(data)[index] = float_to_f8e5m2(static_cast<float>(value));
      break;
    case DType::i32:
      static_cast<std::int32_t*>(data)[index] = static_cast<std::int32_t>(value);
      break;
    case DType::i64:
      static_cast<std::int64_t*>(data)[index] = static_cast<std::int64_t>(value);
      break;
    case DType::u8:
      static_cast<std::uint8_t*>(data)[index] = static_cast<std::uint8_t>(value);
      break;
  }
}

}  // namespace foveal
