// The small matrix product behind scores and output, compiled once per Highway target.

#if defined(FOVEAL_CPU_MULTIPLY_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEAL_CPU_MULTIPLY_INL_H_
#undef FOVEAL_CPU_MULTIPLY_INL_H_
#else
#define FOVEAL_CPU_MULTIPLY_INL_H_
#endif

#include <cstdint>

#include "cpu/row_ops-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace foveal {
namespace HWY_NAMESPACE {

/// c[i][j] = [c[i][j] +] Σ_t a[i·a_row + t·a_step] · b[t·b_stride + j] for four rows i and kVectors
/// vectors of columns j. The terms are added in the order of t, each rounded once where there is an
/// FMA, whatever the block's shape.
template <int kVectors>
HWY_INLINE void multiply_block(const float* HWY_RESTRICT a, std::int64_t a_row, std::int64_t a_step,
                               const float* HWY_RESTRICT b, std::int64_t b_stride,
                               std::int64_t depth, bool accumulate, float* HWY_RESTRICT c,
                               std::int64_t c_stride) {
  const FloatTag d;
  using V = hn::Vec<FloatTag>;
  const std::int64_t n = static_cast<std::int64_t>(hn::Lanes(d));
  const auto start = [&](std::int64_t i, std::int64_t j) HWY_ATTR {
    return accumulate && j < kVectors ? hn::Load(d, c + i * c_stride + j * n) : hn::Zero(d);
  };
  V c00 = start(0, 0), c01 = start(0, 1), c02 = start(0, 2), c03 = start(0, 3);
  V c10 = start(1, 0), c11 = start(1, 1), c12 = start(1, 2), c13 = start(1, 3);
  V c20 = start(2, 0), c21 = start(2, 1), c22 = start(2, 2), c23 = start(2, 3);
  V c30 = start(3, 0), c31 = start(3, 1), c32 = start(3, 2), c33 = start(3, 3);

  for (std::int64_t t = 0; t < depth; ++t, a += a_step, b += b_stride) {
    const V b0 = hn::Load(d, b);
    const V b1 = kVectors > 1 ? hn::Load(d, b + n) : b0;
    const V b2 = kVectors > 2 ? hn::Load(d, b + 2 * n) : b0;
    const V b3 = kVectors > 2 ? hn::Load(d, b + 3 * n) : b0;
    const auto add_row = [&](std::int64_t i, V& c0, V& c1, V& c2, V& c3) HWY_ATTR {
      const V ai = hn::Set(d, a[i * a_row]);
      c0 = hn::MulAdd(ai, b0, c0);
      if constexpr (kVectors > 1) {
        c1 = hn::MulAdd(ai, b1, c1);
      }
      if constexpr (kVectors > 2) {
        c2 = hn::MulAdd(ai, b2, c2);
        c3 = hn::MulAdd(ai, b3, c3);
      }
    };
    add_row(0, c00, c01, c02, c03);
    add_row(1, c10, c11, c12, c13);
    add_row(2, c20, c21, c22, c23);
    add_row(3, c30, c31, c32, c33);
  }

  const auto finish = [&](std::int64_t i, V c0, V c1, V c2, V c3) HWY_ATTR {
    float* row = c + i * c_stride;
    hn::Store(c0, d, row);
    if constexpr (kVectors > 1) {
      hn::Store(c1, d, row + n);
    }
    if constexpr (kVectors > 2) {
      hn::Store(c2, d, row + 2 * n);
      hn::Store(c3, d, row + 3 * n);
    }
  };
  finish(0, c00, c01, c02, c03);
  finish(1, c10, c11, c12, c13);
  finish(2, c20, c21, c22, c23);
  finish(3, c30, c31, c32, c33);
}

/// The same for `rows` (a multiple of 4, or padded to it) and `columns` (a multiple of a vector).
inline void multiply(const float* a, std::int64_t a_row, std::int64_t a_step, const float* b,
                     std::int64_t b_stride, std::int64_t depth, bool accumulate, float* c,
                     std::int64_t c_stride, std::int64_t rows, std::int64_t columns) {
  const std::int64_t n = static_cast<std::int64_t>(hn::Lanes(FloatTag()));
  // 16 accumulators fit where there are 32 registers, 8 where there are 16.
  constexpr int kWide = HWY_ARCH_X86 && HWY_TARGET > HWY_AVX3 ? 2 : 4;
  std::int64_t j = 0;
  for (; j + kWide * n <= columns; j += kWide * n) {
    for (std::int64_t i = 0; i < rows; i += 4) {
      multiply_block<kWide>(a + i * a_row, a_row, a_step, b + j, b_stride, depth, accumulate,
                            c + i * c_stride + j, c_stride);
    }
  }
  for (; j + 2 * n <= columns; j += 2 * n) {
    for (std::int64_t i = 0; i < rows; i += 4) {
      multiply_block<2>(a + i * a_row, a_row, a_step, b + j, b_stride, depth, accumulate,
                        c + i * c_stride + j, c_stride);
    }
  }
  for (; j < columns; j += n) {
    for (std::int64_t i = 0; i < rows; i += 4) {
      multiply_block<1>(a + i * a_row, a_row, a_step, b + j, b_stride, depth, accumulate,
                        c + i * c_stride + j, c_stride);
    }
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace foveal
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
