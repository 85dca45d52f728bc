// Each feature, and each pair of features that can be had together, in each dtype.

#include "conformance/features.h"

namespace foveal::conformance {
namespace {

using Pair = std::tuple<DType, Feature, Feature>;

std::vector<Pair> pairs() {
  std::vector<Pair> pairs;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (int a = 0; a < static_cast<int>(Feature::count); ++a) {
      for (int b = a; b < static_cast<int>(Feature::count); ++b) {
        const auto first = static_cast<Feature>(a);
        const auto second = static_cast<Feature>(b);
        if (a == b || !exclude_each_other(first, second)) {
          pairs.emplace_back(dtype, first, second);
        }
      }
    }
  }
  return pairs;
}

class Features : public ::testing::TestWithParam<Pair> {};

TEST_P(Features, MatchTheOracle) {
  const auto& [dtype, first, second] = GetParam();
  const auto number = static_cast<std::int64_t>(first) * 31 + static_cast<std::int64_t>(second) +
                      static_cast<std::int64_t>(dtype) * 7;
  if (skipped_under_sanitizer(number)) {
    GTEST_SKIP() << "one case in many runs under a sanitizer";
  }
  // Decode, chunked prefill, prefill, empty requests, more queries than keys, speculative decode.
  const std::vector<problem::Request> requests{{1, 300}, {17, 130}, {0, 16}, {33, 33},
                                               {5, 2},   {1, 0},    {4, 77}, {1, 1}};
  Case test = plain_case(dtype, 64, 2, 3, 48, requests);
  apply(first, test);
  if (second != first) {
    apply(second, test);
  }
  expect_right(test, static_cast<std::uint64_t>(number));
}

std::string pair_name(const ::testing::TestParamInfo<Pair>& info) {
  const auto& [dtype, first, second] = info.param;
  const std::string name = std::string(foveal::to_string(dtype)) + "_" + to_string(first);
  return first == second ? name : name + "_and_" + to_string(second);
}

INSTANTIATE_TEST_SUITE_P(Pairs, Features, ::testing::ValuesIn(pairs()), pair_name);

}  // namespace
}  // namespace foveal::conformance
