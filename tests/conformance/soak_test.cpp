// Random ragged batches against the oracle for as long as one likes: FOVEAL_SOAK_SECONDS, 2 by
// default. Each batch has a number, from FOVEAL_SOAK_FIRST (1) on, that all of it follows from.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <random>
#include <string>
#include <vector>

#include "conformance/features.h"

namespace foveal::conformance {
namespace {

std::uint64_t number_from(const char* variable, std::uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::stoull(text);
}

class Dice {
 public:
  explicit Dice(std::uint64_t seed) : generator_(seed) {}
  std::int64_t up_to(std::int64_t last) {
    return std::uniform_int_distribution<std::int64_t>(0, last)(generator_);
  }
  /// 0 … last, small ones as often as large ones.
  std::int64_t length(std::int64_t last) {
    const double exponent = std::uniform_real_distribution<double>(
        0.0, std::log1p(static_cast<double>(last)))(generator_);
    return static_cast<std::int64_t>(std::expm1(exponent));
  }
  template <typename T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[up_to(static_cast<std::int64_t>(values.size()) - 1)];
  }

 private:
  std::mt19937_64 generator_;
};

/// 64 batches in a row are of one layer, whose kernels may have to be compiled first.
Case random_case(std::uint64_t number) {
  Dice layer(number / 64);
  Dice dice(number);
  const std::int64_t head_size =
      layer.up_to(1) == 0 ? layer.one_of<std::int64_t>({64, 128, 256}) : 8 * (1 + layer.up_to(31));
  const std::int64_t num_kv_heads = 1 + layer.up_to(2);
  const std::int64_t group_size = 1 + layer.length(15);
  // So that a batch takes some milliseconds in the oracle.
  std::int64_t work = (8'000'000 >> dice.up_to(5)) / (num_kv_heads * group_size * head_size);
  std::vector<problem::Request> requests;
  for (std::int64_t left = 1 + dice.up_to(11); left > 0; --left) {
    problem::Request request{dice.up_to(2) == 0 ? 1 : dice.length(400), dice.length(3000)};
    if (dice.up_to(7) != 0) {  // Else there may be more queries than keys.
      request.kv_len += request.q_len;
    }
    if (request.q_len * request.kv_len <= work) {
      work -= request.q_len * request.kv_len;
      requests.push_back(request);
    }
  }
  if (requests.empty()) {
    requests.push_back({1, 20});
  }
  Case test = plain_case(layer.one_of({DType::f32, DType::f16, DType::bf16}), head_size,
                         num_kv_heads, group_size, 16 * (1 + layer.length(15)), requests);
  test.options.seed = number;
  test.options.want_lse = layer.up_to(3) != 0;
  std::vector<Feature> features;
  for (std::int64_t left = layer.up_to(4); left > 0; --left) {
    const auto feature =
        static_cast<Feature>(layer.up_to(static_cast<std::int64_t>(Feature::count) - 1));
    const bool fits = std::none_of(features.begin(), features.end(), [&](Feature other) {
      return feature == other || exclude_each_other(feature, other);
    });
    const bool divides =
        feature != Feature::small_kernel_blocks || test.problem.block_size % 48 == 0;
    if (fits && divides) {
      features.push_back(feature);
    }
  }
  for (const Feature feature : features) {
    apply(feature, test);
  }
  test.options.batch_invariant = test.options.num_splits == 0 && layer.up_to(3) == 0;
  return test;
}

TEST(Soak, RandomBatchesMatchTheOracle) {
  const std::uint64_t first = number_from("FOVEAL_SOAK_FIRST", 1);
  const auto end = std::chrono::steady_clock::now() +
                   std::chrono::seconds(number_from("FOVEAL_SOAK_SECONDS", 2));
  std::uint64_t number = first;
  std::uint64_t refused = 0;
  // At least one batch, however long the layers before it are refused.
  const auto none_ran = [&] { return refused == number - first; };
  for (; std::chrono::steady_clock::now() < end || (none_ran() && refused < 6400); ++number) {
    SCOPED_TRACE("FOVEAL_SOAK_FIRST=" + std::to_string(number) + " begins with this batch");
    Case test = random_case(number);
    std::string reasons;
    if (!backend_or_reasons(test.problem, reasons)) {
      ++refused;
      continue;
    }
    ASSERT_NO_THROW(expect_right(test, number));
    ASSERT_FALSE(HasFailure());
  }
  EXPECT_FALSE(none_ran()) << backend_id() << " refused them all";
  std::printf("%llu batches from FOVEAL_SOAK_FIRST=%llu on, %llu of them refused\n",
              static_cast<unsigned long long>(number - first),
              static_cast<unsigned long long>(first), static_cast<unsigned long long>(refused));
}

}  // namespace
}  // namespace foveal::conformance
