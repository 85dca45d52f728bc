// Requests of many tiles of rows and of keys, for backends whose tiles are large: each feature with
// each of the head sizes that a GPU has kernels for.

#include <fmt/format.h>

#include <algorithm>

#include "conformance/features.h"

namespace foveal::conformance {
namespace {

struct Heads {
  std::int64_t size, size_v, group;
};
using LargeCase = std::tuple<DType, Heads, Feature>;

class Large : public ::testing::TestWithParam<LargeCase> {};

TEST_P(Large, MatchesTheOracle) {
  const auto& [dtype, heads, feature] = GetParam();
  // A prompt, chunks of a context, decode, nothing, more queries than keys.
  const std::vector<problem::Request> requests{{260, 700}, {1, 500},  {129, 129},
                                               {0, 40},    {64, 400}, {300, 90}};
  Case test = plain_case(dtype, heads.size, 2, heads.group, 16, requests);
  test.problem.spec.head_size_v = heads.size_v;
  if (is_fp8(dtype)) {
    test.problem.spec.scales = {.q = 0.5F, .k = 0.25F, .v = 0.03F};
  }
  if (feature != Feature::count) {
    apply(feature, test);
  }
  if (feature == Feature::window) {
    test.problem.spec.window = Window::of_tokens(170);  // Tiles on both sides are left out.
  }
  if (feature == Feature::two_sided_window) {
    test.problem.spec.window = {150, 140};
  }
  expect_right(test, static_cast<std::uint64_t>(heads.size + heads.group));
}

std::string case_name(const ::testing::TestParamInfo<LargeCase>& info) {
  const auto& [dtype, heads, feature] = info.param;
  return fmt::format("{}_d{}_{}_g{}_{}", to_string(dtype), heads.size, heads.size_v, heads.group,
                     feature == Feature::count ? "plain" : to_string(feature));
}

INSTANTIATE_TEST_SUITE_P(
    All, Large,
    ::testing::Combine(::testing::Values(DType::f16, DType::bf16),
                       ::testing::Values(Heads{64, 64, 1}, Heads{64, 64, 3}, Heads{96, 96, 2},
                                         Heads{128, 128, 4}, Heads{128, 128, 1}, Heads{192, 128, 1},
                                         Heads{192, 192, 2}, Heads{256, 256, 2}),
                       ::testing::Values(Feature::count, Feature::non_causal, Feature::window,
                                         Feature::two_sided_window, Feature::alibi,
                                         Feature::soft_cap, Feature::sinks, Feature::cascade,
                                         Feature::cross, Feature::encoder_only, Feature::plain_keys,
                                         Feature::splits, Feature::hnd, Feature::padded,
                                         Feature::padded_batch, Feature::fp8_e4m3_cache,
                                         Feature::fp8_e5m2_cache)),
    case_name);

// Queries, keys and values in fp8; their strides must be multiples of 16 bytes, which leaves out
// `padded`.
INSTANTIATE_TEST_SUITE_P(
    Fp8, Large,
    ::testing::Combine(::testing::Values(DType::f8e4m3),
                       ::testing::Values(Heads{64, 64, 4}, Heads{96, 96, 2}, Heads{128, 128, 4},
                                         Heads{128, 128, 1}, Heads{192, 128, 1}, Heads{192, 192, 2},
                                         Heads{256, 256, 2}),
                       ::testing::Values(Feature::count, Feature::non_causal, Feature::window,
                                         Feature::two_sided_window, Feature::alibi,
                                         Feature::soft_cap, Feature::sinks, Feature::cascade,
                                         Feature::cross, Feature::encoder_only, Feature::plain_keys,
                                         Feature::splits, Feature::hnd, Feature::padded_batch)),
    case_name);

// Sums of many terms of one sign: what is not added up in float32 comes out too small.
TEST(LongContext, ValuesOfOneComeOutAsOne) {
  for (const DType dtype : {DType::bf16, DType::f8e4m3}) {
    Case test = plain_case(dtype, 128, 2, 2, 16, {{8, 40'000}});
    test.problem.fill_random(5);
    std::fill(test.problem.value.begin(), test.problem.value.end(), 1.0);
    test.problem.quantize();
    const problem::RunResult result = problem::run_problem(
        test.problem, *problem::choose_backend(test.problem, backend_id()), test.options);
    for (const double number : result.output) {
      ASSERT_NEAR(number, 1.0, 0x1p-8) << to_string(dtype);
    }
  }
}

}  // namespace
}  // namespace foveal::conformance
