#include "core/convert.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace foveal {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

TEST(Convert, KnownValues) {
  EXPECT_EQ(f16_to_float(0x3C00), 1.0F);
  EXPECT_EQ(f16_to_float(0x7BFF), 65504.0F);
  EXPECT_EQ(f16_to_float(0x0001), std::ldexp(1.0F, -24));
  EXPECT_EQ(f16_to_float(0xFC00), -kInf);
  EXPECT_EQ(bf16_to_float(0x3F80), 1.0F);
  EXPECT_EQ(f8e4m3_to_float(0x38), 1.0F);
  EXPECT_EQ(f8e4m3_to_float(0x7E), 448.0F);
  EXPECT_EQ(f8e4m3_to_float(0x01), std::ldexp(1.0F, -9));
  EXPECT_TRUE(std::isnan(f8e4m3_to_float(0x7F)));
  EXPECT_EQ(f8e5m2_to_float(0x3C), 1.0F);
  EXPECT_EQ(f8e5m2_to_float(0x7B), 57344.0F);
  EXPECT_EQ(f8e5m2_to_float(0x01), std::ldexp(1.0F, -16));
  EXPECT_EQ(f8e5m2_to_float(0x7C), kInf);
}

TEST(Convert, EveryCodeSurvivesARoundTrip) {
  for (int bits = 0; bits < 65536; ++bits) {
    const auto code = static_cast<std::uint16_t>(bits);
    const float half = f16_to_float(code);
    const float bf = bf16_to_float(code);
    if (!std::isnan(half)) {
      EXPECT_EQ(float_to_f16(half), code);
    } else {
      EXPECT_TRUE(std::isnan(f16_to_float(float_to_f16(half))));
    }
    if (!std::isnan(bf)) {
      EXPECT_EQ(float_to_bf16(bf), code);
    } else {
      EXPECT_TRUE(std::isnan(bf16_to_float(float_to_bf16(bf))));
    }
  }
  for (int bits = 0; bits < 256; ++bits) {
    const auto code = static_cast<std::uint8_t>(bits);
    const float e4m3 = f8e4m3_to_float(code);
    const float e5m2 = f8e5m2_to_float(code);
    if (!std::isnan(e4m3)) {
      EXPECT_EQ(float_to_f8e4m3(e4m3), code);
    }
    if (!std::isnan(e5m2)) {
      EXPECT_EQ(float_to_f8e5m2(e5m2), code);
    }
  }
}

/// The nearest of all codes, ties to the even one: the definition, by search.
template <typename Widen>
int nearest_code(float value, int codes, Widen widen) {
  int best = -1;
  double best_distance = std::numeric_limits<double>::infinity();
  for (int code = 0; code < codes; ++code) {
    const double candidate = widen(code);
    if (!std::isfinite(candidate) || std::signbit(candidate) != std::signbit(value)) {
      continue;
    }
    const double distance = std::abs(candidate - static_cast<double>(value));
    if (distance < best_distance || (distance == best_distance && code % 2 == 0)) {
      best = code;
      best_distance = distance;
    }
  }
  return best;
}

TEST(Convert, Fp8RoundsToNearestEvenAndSaturates) {
  const auto e4m3 = [](int code) { return f8e4m3_to_float(static_cast<std::uint8_t>(code)); };
  const auto e5m2 = [](int code) { return f8e5m2_to_float(static_cast<std::uint8_t>(code)); };
  for (float value = 1e-6F; value < 1e6F; value *= 1.013F) {
    for (const float signed_value : {value, -value}) {
      EXPECT_EQ(float_to_f8e4m3(signed_value), nearest_code(signed_value, 256, e4m3))
          << signed_value;
      EXPECT_EQ(float_to_f8e5m2(signed_value), nearest_code(signed_value, 256, e5m2))
          << signed_value;
    }
  }
  // Halfway cases exactly.
  EXPECT_EQ(float_to_f8e4m3(1.0625F), 0x38);  // between 1.0 (even) and 1.125
  EXPECT_EQ(float_to_f8e4m3(1.1875F), 0x3A);  // between 1.125 and 1.25 (even)
  EXPECT_EQ(float_to_f8e4m3(kInf), 0x7E);
  EXPECT_EQ(float_to_f8e5m2(1e30F), 0x7B);
  EXPECT_TRUE(std::isnan(f8e4m3_to_float(float_to_f8e4m3(kNaN))));
  EXPECT_TRUE(std::isnan(f8e5m2_to_float(float_to_f8e5m2(kNaN))));
}

TEST(Convert, HalvesRoundToNearestEven) {
  EXPECT_EQ(float_to_f16(1.0F + std::ldexp(1.0F, -11)), 0x3C00);
  EXPECT_EQ(float_to_f16(1.0F + 3.0F * std::ldexp(1.0F, -11)), 0x3C02);
  EXPECT_EQ(float_to_f16(65519.9F), 0x7BFF);
  EXPECT_EQ(float_to_f16(65520.0F), 0x7C00);
  EXPECT_EQ(float_to_f16(std::ldexp(1.0F, -25)), 0x0000);
  EXPECT_EQ(float_to_f16(std::ldexp(1.1F, -25)), 0x0001);
  EXPECT_EQ(float_to_bf16(1.0F + std::ldexp(1.0F, -8)), 0x3F80);
  EXPECT_EQ(float_to_bf16(1.0F + 3.0F * std::ldexp(1.0F, -8)), 0x3F82);
}

TEST(DTypes, NamesAndSizes) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f8e4m3, DType::f8e5m2,
                            DType::f64, DType::i32, DType::i64, DType::u8}) {
    EXPECT_EQ(dtype_from_string(to_string(dtype)), dtype);
    EXPECT_GT(size_of(dtype), 0);
  }
  EXPECT_EQ(dtype_from_string("BFloat16"), DType::bf16);
  EXPECT_EQ(dtype_from_string("fp8"), DType::f8e4m3);
  EXPECT_EQ(dtype_from_string("fp8_e5m2"), DType::f8e5m2);
  EXPECT_EQ(dtype_from_string("f33"), std::nullopt);
  EXPECT_TRUE(is_float(DType::f64));
  EXPECT_FALSE(is_float(DType::i32));
}

}  // namespace
}  // namespace foveal
