// dtype × head size × GQA ratio × block size over ragged lengths, without features.

#include "conformance/features.h"

namespace foveal::conformance {
namespace {

/// Every pair of 0, 1, 15, 16, 17 and 300 as queries over keys is in one of the three batches:
/// prefill, chunks of a context, decode, empty requests, and more queries than keys.
const std::vector<std::vector<problem::Request>>& batches() {
  static const std::vector<std::vector<problem::Request>> made = [] {
    const std::vector<std::int64_t> lengths{0, 1, 15, 16, 17, 300};
    std::vector<std::vector<problem::Request>> batches(3);
    std::size_t next = 0;
    for (const std::int64_t queries : lengths) {
      for (const std::int64_t keys : lengths) {
        batches[next++ % batches.size()].push_back({queries, keys});
      }
    }
    return batches;
  }();
  return made;
}

using Shape = std::tuple<DType, std::int64_t, std::int64_t, std::int64_t>;

class Shapes : public ::testing::TestWithParam<Shape> {};

TEST_P(Shapes, MatchTheOracle) {
  const auto& [dtype, head_size, group_size, block_size] = GetParam();
  const std::int64_t number =
      static_cast<std::int64_t>(dtype) + head_size / 8 + group_size + block_size / 16;
  if (skipped_under_sanitizer(number)) {
    GTEST_SKIP() << "one case in many runs under a sanitizer";
  }
  const std::int64_t num_kv_heads = group_size > 8 ? 1 : 2;
  // The long requests are quadratic: large heads run them at a part of the shapes only.
  std::vector<problem::Request> requests;
  for (const problem::Request& request :
       batches()[static_cast<std::size_t>(number) % batches().size()]) {
    const std::int64_t work =
        request.q_len * request.kv_len * num_kv_heads * group_size * head_size;
    if (work < 10'000'000 || number % 5 == 0) {
      requests.push_back(request);
    }
  }
  Case test = plain_case(dtype, head_size, num_kv_heads, group_size, block_size, requests);
  expect_right(test, static_cast<std::uint64_t>(number));
}

INSTANTIATE_TEST_SUITE_P(
    All, Shapes,
    ::testing::Combine(::testing::Values(DType::f32, DType::f16, DType::bf16),
                       ::testing::Values(8, 16, 24, 64, 80, 120, 128, 200, 256, 328, 512),
                       ::testing::Values(1, 3, 5, 8, 16, 71), ::testing::Values(16, 32, 48, 784)),
    [](const auto& info) {
      return std::string(to_string(std::get<0>(info.param))) + "_d" +
             std::to_string(std::get<1>(info.param)) + "_g" +
             std::to_string(std::get<2>(info.param)) + "_b" +
             std::to_string(std::get<3>(info.param));
    });

}  // namespace
}  // namespace foveal::conformance
