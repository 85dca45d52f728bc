// Row conversions and elementary functions, on every Highway target.

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/rows_test.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h:
#include "core/convert.h"
#include "cpu/row_convert.h"
#include "cpu/row_ops-inl.h"
#include "cpu/step.h"
#include "cpu/vector_math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace foveal {
namespace HWY_NAMESPACE {

/// values[i] = f(values[i]); their number is a multiple of 16.
void apply_function(bool is_tanh, float* values, std::size_t size) {
  const FloatTag d;
  for (std::size_t i = 0; i < size; i += hn::Lanes(d)) {
    const auto x = hn::LoadU(d, values + i);
    hn::StoreU(is_tanh ? tanh(d, x) : exp(d, x), d, values + i);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace foveal
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace foveal {

HWY_EXPORT(apply_function);

namespace testing {
namespace {

std::vector<float> apply(bool is_tanh, std::vector<float> values) {
  while (values.size() % 16 != 0) {
    values.push_back(0.0F);
  }
  HWY_DYNAMIC_DISPATCH(apply_function)(is_tanh, values.data(), values.size());
  return values;
}

/// In units of the last place of the exact result.
double ulps(float got, double exact) {
  const int exponent = std::max(std::ilogb(exact), -126);
  return std::abs(static_cast<double>(got) - exact) / std::ldexp(1.0, exponent - 23);
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

TEST(CpuRows, ExpWithinTwoUlp) {
  std::vector<float> points;
  for (float x = 0.0F; x > -87.3F; x -= 1.7e-4F) {
    points.push_back(x);
  }
  for (float x = 1e-6F; x < 20.0F; x *= 1.0003F) {
    points.push_back(x);
    points.push_back(-x);
  }
  for_each_target([&](const char* target) {
    const std::vector<float> got = apply(false, points);
    double worst = 0.0;
    for (std::size_t i = 0; i < points.size(); ++i) {
      worst = std::max(worst, ulps(got[i], std::exp(static_cast<double>(points[i]))));
    }
    EXPECT_LE(worst, 2.0) << target;
    const std::vector<float> special =
        apply(false, {0.0F, -0.0F, -kInfinity, kNaN, -88.0F, -1e30F, -87.4F});
    EXPECT_EQ(special[0], 1.0F) << target;
    EXPECT_EQ(special[1], 1.0F) << target;
    EXPECT_EQ(special[2], 0.0F) << target;
    EXPECT_TRUE(std::isnan(special[3])) << target;
    EXPECT_EQ(special[4], 0.0F) << target;
    EXPECT_EQ(special[5], 0.0F) << target;
    EXPECT_EQ(special[6], 0.0F) << target;
  });
}

TEST(CpuRows, TanhWithinFourUlp) {
  std::vector<float> points;
  for (float x = 1e-30F; x < 1e30F; x *= 1.001F) {
    points.push_back(x);
    points.push_back(-x);
  }
  for_each_target([&](const char* target) {
    const std::vector<float> got = apply(true, points);
    double worst = 0.0;
    for (std::size_t i = 0; i < points.size(); ++i) {
      worst = std::max(worst, ulps(got[i], std::tanh(static_cast<double>(points[i]))));
    }
    EXPECT_LE(worst, 4.0) << target;
    const std::vector<float> special = apply(true, {0.0F, kInfinity, -kInfinity, kNaN});
    EXPECT_EQ(special[0], 0.0F);
    EXPECT_EQ(special[1], 1.0F);
    EXPECT_EQ(special[2], -1.0F);
    EXPECT_TRUE(std::isnan(special[3]));
  });
}

TEST(CpuRows, LoadsEveryCode) {
  for_each_target([](const char* target) {
    for (const DType dtype : {DType::f16, DType::bf16, DType::f8e4m3, DType::f8e5m2}) {
      const std::size_t count = size_of(dtype) == 1 ? 256 : 65536;
      std::vector<std::uint16_t> wide(count);
      std::vector<std::uint8_t> narrow(count);
      for (std::size_t i = 0; i < count; ++i) {
        wide[i] = static_cast<std::uint16_t>(i);
        narrow[i] = static_cast<std::uint8_t>(i);
      }
      const void* codes = size_of(dtype) == 1 ? static_cast<const void*>(narrow.data())
                                              : static_cast<const void*>(wide.data());
      std::vector<float> got(count);
      cpu::row_to_float(dtype, codes, got.data(), count);
      for (std::size_t i = 0; i < count; ++i) {
        const auto exact =
            static_cast<float>(load_element(codes, dtype, static_cast<std::int64_t>(i)));
        if (std::isnan(exact)) {
          ASSERT_TRUE(std::isnan(got[i])) << target << " " << to_string(dtype) << " " << i;
        } else {
          ASSERT_EQ(std::bit_cast<std::uint32_t>(got[i]), std::bit_cast<std::uint32_t>(exact))
              << target << " " << to_string(dtype) << " " << i;
        }
      }
    }
  });
}

/// Every code, halfway between every two, a little to either side, and numbers of all magnitudes.
std::vector<float> numbers_for(DType dtype) {
  std::vector<float> numbers{0.0F,   -0.0F,  kInfinity, -kInfinity, kNaN,
                             448.0F, 464.0F, 465.0F,    57344.0F,   61440.0F,
                             1e9F,   -1e9F,  3e38F,     -3e38F,     1e-45F};
  std::vector<float> codes;
  for (std::uint32_t code = 0; code < (size_of(dtype) == 1 ? 0x80U : 0x8000U); ++code) {
    const std::uint64_t bits = code;
    codes.push_back(static_cast<float>(load_element(&bits, dtype, 0)));
  }
  for (std::size_t i = 0; i + 1 < codes.size(); ++i) {
    const float half = 0.5F * (codes[i] + codes[i + 1]);
    for (const float x : {codes[i], half, std::nextafter(half, 0.0F), std::nextafter(half, 1e9F)}) {
      numbers.push_back(x);
      numbers.push_back(-x);
    }
  }
  std::mt19937 random(1);
  for (int i = 0; i < 20000; ++i) {
    numbers.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
  }
  return numbers;
}

TEST(CpuRows, StoresRoundLikeTheScalarConversions) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f8e4m3, DType::f8e5m2}) {
    const std::vector<float> numbers = numbers_for(dtype);
    const auto size = static_cast<std::size_t>(size_of(dtype));
    for_each_target([&](const char* target) {
      std::vector<std::uint8_t> got(numbers.size() * size);
      cpu::row_from_float(dtype, numbers.data(), 1.0F, got.data(), numbers.size());
      for (std::size_t i = 0; i < numbers.size(); ++i) {
        std::uint64_t exact = 0;  // The code in its lowest bytes.
        store_element(&exact, dtype, 0, static_cast<double>(numbers[i]));
        const double stored = load_element(got.data(), dtype, static_cast<std::int64_t>(i));
        if (std::isnan(numbers[i])) {
          ASSERT_TRUE(std::isnan(stored)) << target << " " << to_string(dtype);
          continue;
        }
        const std::uint32_t code = size == 1 ? got[i] : got[2 * i] + 256U * got[2 * i + 1];
        ASSERT_EQ(code, exact) << target << " " << to_string(dtype) << " of " << numbers[i];
      }
    });
  }
}

TEST(CpuRows, RowsOfAnySizeStayInside) {
  for_each_target([](const char* target) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f8e4m3, DType::f8e5m2}) {
      for (std::size_t size = 0; size < 70; ++size) {
        std::vector<float> row(size + 1, 0.5F);
        std::vector<std::uint8_t> stored((size + 2) * static_cast<std::size_t>(size_of(dtype)),
                                         0xAB);
        cpu::row_from_float(dtype, row.data(), 2.0F, stored.data() + size_of(dtype), size);
        std::vector<float> back(size + 1, 7.0F);
        cpu::row_to_float(dtype, stored.data() + size_of(dtype), back.data(), size);
        for (std::size_t i = 0; i < size; ++i) {
          ASSERT_EQ(back[i], 0.25F) << target;
        }
        ASSERT_EQ(back[size], 7.0F) << target;
        ASSERT_EQ(stored.back(), 0xAB) << target;
      }
    }
  });
}

}  // namespace
}  // namespace testing
}  // namespace foveal
#endif  // HWY_ONCE
