#include "cpu/row_convert.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/row_convert.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h:
#include "cpu/row_ops-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace foveal {
namespace HWY_NAMESPACE {

void row_to_float(DType dtype, const void* source, float* target, std::size_t size) {
  load_row(dtype, source, target, size);
}

void row_from_float(DType dtype, const float* source, float divisor, void* target,
                    std::size_t size) {
  store_row(dtype, source, divisor, 1.0F, target, size);
}

void blend_rows(const float* a, float weight_a, const float* b, float weight_b, float* target,
                std::size_t size) {
  const FloatTag d;
  const auto wa = hn::Set(d, weight_a);
  const auto wb = hn::Set(d, weight_b);
  for (std::size_t i = 0; i < size; i += hn::Lanes(d)) {
    auto sum = hn::Zero(d);
    if (weight_a != 0.0F) {
      sum = hn::Mul(wa, hn::LoadU(d, a + i));
    }
    if (weight_b != 0.0F) {
      sum = hn::MulAdd(wb, hn::LoadU(d, b + i), sum);
    }
    hn::StoreU(sum, d, target + i);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace foveal
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace foveal {

HWY_EXPORT(row_to_float);
HWY_EXPORT(row_from_float);
HWY_EXPORT(blend_rows);

namespace cpu {

void row_to_float(DType dtype, const void* source, float* target, std::size_t size) {
  HWY_DYNAMIC_DISPATCH(row_to_float)(dtype, source, target, size);
}

void row_from_float(DType dtype, const float* source, float divisor, void* target,
                    std::size_t size) {
  HWY_DYNAMIC_DISPATCH(row_from_float)(dtype, source, divisor, target, size);
}

void blend_rows(const float* a, float weight_a, const float* b, float weight_b, float* target,
                std::size_t size) {
  HWY_DYNAMIC_DISPATCH(blend_rows)(a, weight_a, b, weight_b, target, size);
}

}  // namespace cpu
}  // namespace foveal
#endif  // HWY_ONCE
