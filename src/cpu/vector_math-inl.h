// Elementary functions on vectors, compiled once per Highway target.

#if defined(FOVEAL_CPU_VECTOR_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEAL_CPU_VECTOR_MATH_INL_H_
#undef FOVEAL_CPU_VECTOR_MATH_INL_H_
#else
#define FOVEAL_CPU_VECTOR_MATH_INL_H_
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace foveal {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// exp(x) for x ≤ 40, within 2 ulp where the result is a normal number. Below −87.33 it is 0: a
/// softmax weight under 2^−126 is nothing beside the largest one, which is 1. exp(0) is exactly 1;
/// NaN stays NaN.
///
/// x = n·ln 2 + r with |r| ≤ ln 2 / 2, and exp(r) = 1 + r + r²·P(r), P of degree 4 interpolated at
/// Chebyshev nodes: 1.1e-8 relative error before rounding.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V exp(D d, V x) {
  const hn::RebindToUnsigned<D> du;
  // 1.5 · 2^23 + 127: adding it rounds to a whole number, and leaves n + 127 in the lowest bits.
  const V magic = hn::Set(d, 12583039.0F);
  const V rounded = hn::MulAdd(x, hn::Set(d, 1.44269504F), magic);
  const V n = hn::Sub(rounded, magic);
  // ln 2 in two parts; the first has trailing zeros, so that n times it is exact.
  V r = hn::NegMulAdd(n, hn::Set(d, 0.693145752F), x);
  r = hn::NegMulAdd(n, hn::Set(d, 1.42860677e-6F), r);
  V p = hn::MulAdd(hn::Set(d, 0.00139261836F), r, hn::Set(d, 0.00836317905F));
  p = hn::MulAdd(p, r, hn::Set(d, 0.0416665546F));
  p = hn::MulAdd(p, r, hn::Set(d, 0.16666577F));
  p = hn::MulAdd(p, r, hn::Set(d, 0.5F));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0F));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0F));
  // 2^n by its exponent bits. For an x out of range they are garbage, and so is the product.
  const auto exponent = hn::ShiftLeft<23>(hn::BitCast(du, rounded));
  const V result = hn::Mul(p, hn::BitCast(d, exponent));
  return hn::IfThenElse(hn::Lt(x, hn::Set(d, -87.33F)), hn::Zero(d), result);
}

/// tanh(x) within 4 ulp for any x; NaN stays NaN.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V tanh(D d, V x) {
  const V magnitude = hn::Abs(x);
  // Near zero, where 1 − 2/(e^2x + 1) would cancel: x + x³·P(x²), 1.6e-8 relative.
  const V z = hn::Mul(x, x);
  V p = hn::MulAdd(hn::Set(d, -0.0060962995F), z, hn::Set(d, 0.020996894F));
  p = hn::MulAdd(p, z, hn::Set(d, -0.0538508495F));
  p = hn::MulAdd(p, z, hn::Set(d, 0.133327693F));
  p = hn::MulAdd(p, z, hn::Set(d, -0.333333289F));
  const V near = hn::MulAdd(hn::Mul(p, z), x, x);
  // From 9.02 on tanh rounds to 1.
  const V doubled = hn::Min(hn::Add(magnitude, magnitude), hn::Set(d, 20.0F));
  const V far = hn::Sub(hn::Set(d, 1.0F),
                        hn::Div(hn::Set(d, 2.0F), hn::Add(exp(d, doubled), hn::Set(d, 1.0F))));
  return hn::IfThenElse(hn::Gt(magnitude, hn::Set(d, 0.625F)), hn::CopySign(far, x), near);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace foveal
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
