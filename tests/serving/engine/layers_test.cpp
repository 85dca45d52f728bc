#include "serving/layers.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "serving/linear.h"

namespace foveal::serving {
namespace {

std::vector<float> random_floats(std::int64_t count, std::uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) {
    value = normal(generator);
  }
  return values;
}

TEST(Linear, MatchesFloat64AndDoesNotDependOnThreads) {
  const auto one = make_thread_pool(1);
  const auto four = make_thread_pool(4);
  for (const std::int64_t m : {1, 2, 7, 65}) {
    for (const std::int64_t n : {1, 15, 16, 100, 577}) {
      for (const std::int64_t k : {1, 33, 256}) {
        const Matrix weight{n, k, random_floats(n * k, 1)};
        const auto x = random_floats(m * k, 2);
        const auto start = random_floats(m * n, 3);
        for (const bool accumulate : {false, true}) {
          auto y = start;
          linear(x.data(), m, weight, y.data(), accumulate, *one);
          auto again = start;
          linear(x.data(), m, weight, again.data(), accumulate, *four);
          EXPECT_EQ(y, again);
          for (std::int64_t i = 0; i < m * n; ++i) {
            double sum = accumulate ? start[static_cast<std::size_t>(i)] : 0.0;
            for (std::int64_t c = 0; c < k; ++c) {
              sum += double{x[static_cast<std::size_t>(i / n * k + c)]} *
                     weight.data[static_cast<std::size_t>(i % n * k + c)];
            }
            ASSERT_NEAR(y[static_cast<std::size_t>(i)], sum, 2e-4) << m << " " << n << " " << k;
          }
        }
      }
    }
  }
}

TEST(Layers, RmsNorm) {
  for (const std::int64_t size : {1, 8, 16, 61, 576}) {
    const auto x = random_floats(size, 1);
    const auto weight = random_floats(size, 2);
    double sum = 0.0;
    for (const float value : x) {
      sum += double{value} * value;
    }
    std::vector<float> out(x.size());
    rms_norm(x.data(), weight.data(), size, 1e-5F, out.data());
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double expected = x[i] / std::sqrt(sum / static_cast<double>(size) + 1e-5) * weight[i];
      EXPECT_NEAR(out[i], expected, 1e-6 * std::abs(expected) + 1e-7);
    }
  }
}

TEST(Layers, SiluAndMul) {
  const std::vector<float> gates = {0.0F,  1.0F,   -1.0F, 0.3F,  -7.5F, 20.0F,  -20.0F,
                                    88.0F, -88.0F, 1e4F,  -1e4F, 1e30F, -1e30F, 3.25F};
  const auto size = std::ssize(gates);
  std::vector<float> gate_up = gates;
  for (std::int64_t i = 0; i < size; ++i) {
    gate_up.push_back(1.5F);
  }
  std::vector<float> out(gates.size());
  silu_and_mul(gate_up.data(), size, out.data());
  for (std::size_t i = 0; i < out.size(); ++i) {
    const double expected = gates[i] / (1.0 + std::exp(-double{gates[i]})) * 1.5;
    EXPECT_NEAR(out[i], expected, 4e-7 * std::abs(expected) + 1e-4 * (gates[i] < -80.0F))
        << gates[i];
  }
}

TEST(Layers, RopeTurnsPairs) {
  const std::vector<float> cos = {0.6F, 0.0F};
  const std::vector<float> sin = {0.8F, 1.0F};
  std::vector<float> interleaved = {1, 2, 3, 4, 5, 6, 7, 8};
  rope(interleaved.data(), 2, 4, cos.data(), sin.data(), true);
  const std::vector<float> expected = {0.6F - 1.6F, 0.8F + 1.2F, -4, 3,
                                       3.0F - 4.8F, 4.0F + 3.6F, -8, 7};
  std::vector<float> halves = {1, 3, 2, 4, 5, 7, 6, 8};  // The same pairs, laid out in halves.
  rope(halves.data(), 2, 4, cos.data(), sin.data(), false);
  const std::vector<std::size_t> order = {0, 2, 1, 3, 4, 6, 5, 7};
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_FLOAT_EQ(interleaved[i], expected[i]);
    EXPECT_FLOAT_EQ(halves[i], expected[order[i]]);
  }
}

}  // namespace
}  // namespace foveal::serving
