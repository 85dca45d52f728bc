#include "serving/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "foveal/error.h"

namespace foveal::serving {
namespace {

TEST(Sampler, GreedyTakesTheFirstLargest) {
  std::mt19937_64 generator;
  const std::vector<float> logits = {-1.0F, 3.0F, 2.0F, 3.0F};
  EXPECT_EQ(sample(logits, 0.0F, generator), 1);
  EXPECT_EQ(generator, std::mt19937_64()) << "greedy must not draw";
}

TEST(Sampler, DrawsBySoftmax) {
  const std::vector<float> logits = {0.0F, 1.0F, -2.0F, 500.0F - 499.5F};
  const double temperature = 0.7;
  double total = 0.0;
  for (const float logit : logits) {
    total += std::exp(logit / temperature);
  }
  std::mt19937_64 generator(5);
  std::vector<int> counts(logits.size());
  constexpr int kDraws = 40000;
  for (int i = 0; i < kDraws; ++i) {
    ++counts[static_cast<std::size_t>(sample(logits, 0.7F, generator))];
  }
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double p = std::exp(logits[i] / temperature) / total;
    EXPECT_NEAR(counts[i], kDraws * p, 5.0 * std::sqrt(kDraws * p * (1.0 - p)));
  }
}

TEST(Sampler, SurvivesLargeLogitsAndTinyTemperature) {
  std::mt19937_64 generator(1);
  const std::vector<float> logits = {1000.0F, -1000.0F, 999.0F};
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(sample(logits, 1e-30F, generator), 0);
  }
}

TEST(Sampler, RefusesLogitsThatAreNotFinite) {
  std::mt19937_64 generator;
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    for (std::size_t position = 0; position < 3; ++position) {
      std::vector<float> logits = {1.0F, 2.0F, 3.0F};
      logits[position] = bad;
      EXPECT_THROW(sample(logits, 0.0F, generator), Error);
      EXPECT_THROW(sample(logits, 1.0F, generator), Error);
    }
  }
}

TEST(Sampler, SeedsDifferByRunAndRequest) {
  EXPECT_EQ(derive_seed(1, 2), derive_seed(1, 2));
  EXPECT_NE(derive_seed(1, 2), derive_seed(1, 3));
  EXPECT_NE(derive_seed(1, 2), derive_seed(2, 2));
  EXPECT_NE(derive_seed(1, 2), derive_seed(2, 1));
}

}  // namespace
}  // namespace foveal::serving
