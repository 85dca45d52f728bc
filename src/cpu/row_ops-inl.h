// Loading rows of any supported dtype as float32 and storing float32 rows as that dtype, compiled
// once per Highway target. All of it goes by bits or by hardware conversions that ignore the
// denormals-are-zero mode, so results do not depend on the host program's floating-point state.

#if defined(FOVEAL_CPU_ROW_OPS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEAL_CPU_ROW_OPS_INL_H_
#undef FOVEAL_CPU_ROW_OPS_INL_H_
#else
#define FOVEAL_CPU_ROW_OPS_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/convert.h"
#include "foveal/dtype.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace foveal {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// At most 16 lanes: scratch is padded to that, whatever the machine's vectors are.
using FloatTag = hn::CappedTag<float, 16>;

// Where Highway converts binary16 by an instruction: exact, with infinities, NaN and subnormals.
// Its emulation elsewhere leaves out infinities and NaN.
#if (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2) || HWY_ARCH_ARM_A64
inline constexpr bool kHasF16Instructions = true;
#else
inline constexpr bool kHasF16Instructions = false;
#endif

template <class D>
HWY_INLINE hn::Vec<D> widen_f16(D d, hn::Vec<hn::Rebind<std::uint16_t, D>> half) {
  if constexpr (kHasF16Instructions) {
    const hn::Rebind<hwy::float16_t, D> dh;
    return hn::PromoteTo(d, hn::BitCast(dh, half));
  } else {
    const hn::RebindToSigned<D> di;
    const auto bits = hn::PromoteTo(di, half);
    const auto magnitude = hn::And(bits, hn::Set(di, 0x7FFF));
    const auto rebias = hn::Set(di, (127 - 15) << 23);
    const auto normal = hn::Add(hn::ShiftLeft<13>(magnitude), rebias);
    const auto subnormal =
        hn::BitCast(di, hn::Mul(hn::ConvertTo(d, magnitude), hn::Set(d, 0x1p-24F)));
    auto value = hn::IfThenElse(hn::Lt(magnitude, hn::Set(di, 0x400)), subnormal, normal);
    value = hn::IfThenElse(hn::Gt(magnitude, hn::Set(di, 0x7BFF)), hn::Add(normal, rebias), value);
    return hn::BitCast(d, hn::Or(value, hn::ShiftLeft<16>(hn::And(bits, hn::Set(di, 0x8000)))));
  }
}

/// The rows of float32 tensors, and the interface of the other formats: an element's storage, its
/// widening and its narrowing (to nearest even), for a vector and for one element.
struct FormatF32 {
  using Raw = float;
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const Raw* source) {
    return hn::LoadU(d, source);
  }
  static float load(Raw value) { return value; }
  template <class D>
  static HWY_INLINE void store(D d, hn::Vec<D> value, Raw* target) {
    hn::StoreU(value, d, target);
  }
  static Raw store(float value) { return value; }
};

struct FormatF16 {
  using Raw = std::uint16_t;
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const Raw* source) {
    return widen_f16(d, hn::LoadU(hn::Rebind<Raw, D>(), source));
  }
  static float load(Raw value) { return f16_to_float(value); }
  template <class D>
  static HWY_INLINE void store(D d, hn::Vec<D> value, Raw* target) {
    if constexpr (kHasF16Instructions) {
      const hn::Rebind<hwy::float16_t, D> dh;
      const hn::Rebind<Raw, D> d16;
      hn::StoreU(hn::BitCast(d16, hn::DemoteTo(dh, value)), d16, target);
    } else {
      HWY_ALIGN float lanes[16];
      hn::Store(value, d, lanes);
      for (std::size_t i = 0; i < hn::Lanes(d); ++i) {
        target[i] = float_to_f16(lanes[i]);
      }
    }
  }
  static Raw store(float value) { return float_to_f16(value); }
};

struct FormatBf16 {
  using Raw = std::uint16_t;
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const Raw* source) {
    const hn::RebindToSigned<D> di;
    const auto bits = hn::PromoteTo(di, hn::LoadU(hn::Rebind<Raw, D>(), source));
    return hn::BitCast(d, hn::ShiftLeft<16>(bits));
  }
  static float load(Raw value) { return bf16_to_float(value); }
  template <class D>
  static HWY_INLINE void store(D /*d*/, hn::Vec<D> value, Raw* target) {
    const hn::RebindToUnsigned<D> du;
    const hn::RebindToSigned<D> di;
    const hn::Rebind<Raw, D> d16;
    const auto bits = hn::BitCast(du, value);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
    const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(du, 0x7FFF)), odd));
    const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(du, 0x40));
    const auto is_nan = hn::RebindMask(du, hn::IsNaN(value));
    const auto narrow = hn::IfThenElse(is_nan, quiet, rounded);
    hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, narrow)), d16, target);
  }
  static Raw store(float value) { return float_to_bf16(value); }
};

/// Narrows to sign | exponent | kMantissaBits with the given bias; what is finite and too large
/// becomes kMaxCode.
template <int kMantissaBits, int kBias, int kMaxCode, int kInfinityCode, int kNaNCode, class D>
HWY_INLINE void store_fp8(D d, hn::Vec<D> value, std::uint8_t* target) {
  const hn::RebindToSigned<D> di;
  const hn::Rebind<std::uint8_t, D> d8;
  constexpr int kDropped = 23 - kMantissaBits;
  const auto bits = hn::BitCast(di, value);
  const auto magnitude = hn::And(bits, hn::Set(di, 0x7FFFFFFF));
  // Bits fall away with rounding to nearest even; a carry runs into the exponent, as it should. The
  // sum does not overflow below 2^31 − 2^kDropped, that is for anything but NaN.
  const auto odd = hn::And(hn::ShiftRight<kDropped>(magnitude), hn::Set(di, 1));
  const auto half = hn::Set(di, (1 << (kDropped - 1)) - 1);
  const auto normal = hn::Sub(hn::ShiftRight<kDropped>(hn::Add(hn::Add(magnitude, half), odd)),
                              hn::Set(di, (127 - kBias) << kMantissaBits));
  // Below the smallest normal number, adding 2^23 units of the last place makes the hardware round
  // to a whole number of them.
  constexpr int kMagicExponent = 127 + (1 - kBias - kMantissaBits) + 23;
  const auto magic = hn::Set(di, kMagicExponent << 23);
  const auto subnormal =
      hn::Sub(hn::BitCast(di, hn::Add(hn::BitCast(d, magnitude), hn::BitCast(d, magic))), magic);
  const auto smallest_normal = hn::Set(di, (127 + 1 - kBias) << 23);
  auto code = hn::IfThenElse(hn::Lt(magnitude, smallest_normal), subnormal, normal);
  code = hn::Min(code, hn::Set(di, kMaxCode));
  const auto infinity = hn::Set(di, 0x7F800000);
  code = hn::IfThenElse(hn::Eq(magnitude, infinity), hn::Set(di, kInfinityCode), code);
  code = hn::IfThenElse(hn::Gt(magnitude, infinity), hn::Set(di, kNaNCode), code);
  const auto sign = hn::And(hn::ShiftRight<24>(bits), hn::Set(di, 0x80));
  hn::StoreU(hn::DemoteTo(d8, hn::Or(code, sign)), d8, target);
}

struct FormatF8E4M3 {
  using Raw = std::uint8_t;
  /// As binary16 with the same mantissa, which is 2^8 too small because the biases are 7 and 15.
  /// The code of NaN comes out as 480, beyond the largest number, 448.
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const Raw* source) {
    const hn::Rebind<std::uint16_t, D> d16;
    const auto bits = hn::PromoteTo(d16, hn::LoadU(hn::Rebind<Raw, D>(), source));
    const auto sign = hn::ShiftLeft<8>(hn::And(bits, hn::Set(d16, 0x80)));
    const auto magnitude = hn::ShiftLeft<7>(hn::And(bits, hn::Set(d16, 0x7F)));
    const auto value = hn::Mul(widen_f16(d, hn::Or(sign, magnitude)), hn::Set(d, 256.0F));
    return hn::IfThenElse(hn::Gt(hn::Abs(value), hn::Set(d, 448.0F)),
                          hn::Set(d, std::numeric_limits<float>::quiet_NaN()), value);
  }
  static float load(Raw value) { return f8e4m3_to_float(value); }
  template <class D>
  static HWY_INLINE void store(D d, hn::Vec<D> value, Raw* target) {
    store_fp8<3, 7, 0x7E, 0x7E, 0x7F>(d, value, target);
  }
  static Raw store(float value) { return float_to_f8e4m3(value); }
};

struct FormatF8E5M2 {
  using Raw = std::uint8_t;
  /// The upper byte of a binary16.
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const Raw* source) {
    const hn::Rebind<std::uint16_t, D> d16;
    const auto bits = hn::PromoteTo(d16, hn::LoadU(hn::Rebind<Raw, D>(), source));
    return widen_f16(d, hn::ShiftLeft<8>(bits));
  }
  static float load(Raw value) { return f8e5m2_to_float(value); }
  template <class D>
  static HWY_INLINE void store(D d, hn::Vec<D> value, Raw* target) {
    store_fp8<2, 15, 0x7B, 0x7C, 0x7E>(d, value, target);
  }
  static Raw store(float value) { return float_to_f8e5m2(value); }
};

/// Whole vectors, then 8 elements at a time (head sizes are multiples of 8), then the rest.
template <class Format>
void load_row_as(const void* source, float* target, std::size_t size) {
  const auto* from = static_cast<const typename Format::Raw*>(source);
  const FloatTag d;
  const hn::CappedTag<float, 8> d8;
  std::size_t i = 0;
  for (; i + hn::Lanes(d) <= size; i += hn::Lanes(d)) {
    hn::StoreU(Format::load(d, from + i), d, target + i);
  }
  for (; i + hn::Lanes(d8) <= size; i += hn::Lanes(d8)) {
    hn::StoreU(Format::load(d8, from + i), d8, target + i);
  }
  for (; i < size; ++i) {
    target[i] = Format::load(from[i]);
  }
}

/// Stores source · factor / divisor.
template <class Format>
void store_row_as(const float* source, float divisor, float factor, void* target,
                  std::size_t size) {
  auto* to = static_cast<typename Format::Raw*>(target);
  const FloatTag d;
  const hn::CappedTag<float, 8> d8;
  std::size_t i = 0;
  for (; i + hn::Lanes(d) <= size; i += hn::Lanes(d)) {
    const auto quotient = hn::Div(hn::LoadU(d, source + i), hn::Set(d, divisor));
    Format::store(d, hn::Mul(quotient, hn::Set(d, factor)), to + i);
  }
  for (; i + hn::Lanes(d8) <= size; i += hn::Lanes(d8)) {
    const auto quotient = hn::Div(hn::LoadU(d8, source + i), hn::Set(d8, divisor));
    Format::store(d8, hn::Mul(quotient, hn::Set(d8, factor)), to + i);
  }
  for (; i < size; ++i) {
    to[i] = Format::store(source[i] / divisor * factor);
  }
}

/// Calls use(Format()) for the format of the dtype (f32, f16, bf16 or an fp8).
template <class Use>
HWY_INLINE void with_format(DType dtype, const Use& use) {
  switch (dtype) {
    case DType::f32:
      return use(FormatF32());
    case DType::f16:
      return use(FormatF16());
    case DType::bf16:
      return use(FormatBf16());
    case DType::f8e4m3:
      return use(FormatF8E4M3());
    case DType::f8e5m2:
      return use(FormatF8E5M2());
    default:
      HWY_ABORT("dtype without rows");
  }
}

/// A row of `size` elements of the dtype as float32.
HWY_INLINE void load_row(DType dtype, const void* source, float* target, std::size_t size) {
  with_format(dtype,
              [&](auto format) HWY_ATTR { load_row_as<decltype(format)>(source, target, size); });
}

/// source / divisor · factor, rounded once to the dtype.
HWY_INLINE void store_row(DType dtype, const float* source, float divisor, float factor,
                          void* target, std::size_t size) {
  with_format(dtype, [&](auto format) HWY_ATTR {
    store_row_as<decltype(format)>(source, divisor, factor, target, size);
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace foveal
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
