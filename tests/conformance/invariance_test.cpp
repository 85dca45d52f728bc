// What must not change the result by a single bit: unused memory, the run, the number of threads,
// and, with batch_invariant, the rest of the batch.

#include <cmath>
#include <cstring>
#include <limits>

#include "conformance/features.h"

namespace foveal::conformance {
namespace {

using problem::RunOptions;
using problem::RunResult;

/// Bitwise, so that −0 and 0 differ and NaN equals itself.
void expect_same_bits(const std::vector<double>& a, const std::vector<double>& b,
                      const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  EXPECT_TRUE(a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0)
      << what << " differs";
}

void expect_same(const RunResult& a, const RunResult& b) {
  expect_same_bits(a.output, b.output, "output");
  expect_same_bits(a.lse, b.lse, "lse");
}

/// Dtype, head size and heads a group: GPUs have kernels of their own for the second pair.
using Variant = std::tuple<DType, std::int64_t, std::int64_t>;

class Invariance : public ::testing::TestWithParam<Variant> {
 protected:
  Invariance() {
    const auto& [dtype, head_size, group] = GetParam();
    test = plain_case(dtype, head_size, 2, group, 16,
                      {{1, 700}, {40, 333}, {0, 9}, {3, 3}, {1, 16}, {64, 64}});
    apply(Feature::padded_batch, test);
    apply(Feature::window, test);
    test.problem.spec.window = Window::of_tokens(200);
    test.problem.fill_random(5);
  }
  void SetUp() override {
    std::string reasons;
    if (!backend_or_reasons(test.problem, reasons)) {
      GTEST_SKIP() << reasons;
    }
  }
  RunResult run(const RunOptions& options) const {
    return problem::run_problem(test.problem, *problem::choose_backend(test.problem, backend_id()),
                                options);
  }
  Case test;
};

TEST_P(Invariance, UnusedMemory) {
  const RunResult expected = run(test.options);
  EXPECT_TRUE(expected.damage.empty());
  for (const double poison : {0.0, 1.0, std::numeric_limits<double>::infinity()}) {
    test.options.poison = poison;
    expect_same(run(test.options), expected);
  }
  test.options.seed = 77;  // Other blocks of the pool.
  expect_same(run(test.options), expected);
}

TEST_P(Invariance, RunsAndThreads) {
  test.options.num_splits = 4;
  test.options.num_threads = 4;
  const auto one = make_thread_pool(1);
  const auto four = make_thread_pool(4);
  test.options.threads = one.get();
  const RunResult expected = run(test.options);
  for (int i = 0; i < 3; ++i) {
    test.options.threads = four.get();
    expect_same(run(test.options), expected);
  }
}

TEST_P(Invariance, LayoutsOfTheCache) {
  const RunResult expected = run(test.options);
  for (const auto style : {problem::CacheStyle::hnd, problem::CacheStyle::kv_first,
                           problem::CacheStyle::packed, problem::CacheStyle::padded}) {
    test.options.cache = style;
    expect_same(run(test.options), expected);
  }
}

TEST_P(Invariance, TheRestOfTheBatch) {
  const AttentionBackendPtr backend = problem::choose_backend(test.problem, backend_id());
  if (!backend->capabilities().batch_invariant) {
    GTEST_SKIP() << backend->name() << " is not batch invariant";
  }
  test.options.batch_invariant = true;
  const RunResult batch = run(test.options);
  const AttentionSpec& spec = test.problem.spec;
  for (std::size_t r = 0; r < test.problem.requests.size(); ++r) {
    const auto request = static_cast<std::int64_t>(r);
    problem::AttentionProblem alone = test.problem;
    alone.requests = {test.problem.requests[r]};
    alone.padded_requests = alone.unowned_rows = 0;
    const auto cut = [](const std::vector<double>& from, std::int64_t start, std::int64_t count,
                        std::int64_t width) {
      return std::vector<double>(from.begin() + start * width,
                                 from.begin() + (start + count) * width);
    };
    const problem::Request& lens = alone.requests[0];
    const std::int64_t key_start = test.problem.key_start(request);
    const std::int64_t query_start = test.problem.query_start(request);
    const std::int64_t key_width = spec.num_kv_heads * spec.head_size;
    alone.query = cut(test.problem.query, query_start, lens.q_len, spec.num_heads * spec.head_size);
    alone.key = cut(test.problem.key, key_start, lens.kv_len, key_width);
    alone.value = cut(test.problem.value, key_start, lens.kv_len, key_width);
    alone.quantize();
    RunOptions options = test.options;
    options.padded_rows = 0;
    const RunResult solo =
        problem::run_problem(alone, *problem::choose_backend(alone, backend_id()), options);
    expect_same_bits(solo.output,
                     cut(batch.output, query_start, lens.q_len, spec.num_heads * spec.head_size),
                     "output of request " + std::to_string(r));
  }
}

TEST_P(Invariance, CascadeAgreesWithOnePass) {
  Case cascade = plain_case(std::get<0>(GetParam()), 64, 2, 4, 16, {{1, 40}, {9, 30}, {1, 17}});
  apply(Feature::cascade, cascade);
  apply(Feature::sinks, cascade);
  cascade.problem.fill_random(9);
  std::string reasons;
  const AttentionBackendPtr backend = backend_or_reasons(cascade.problem, reasons);
  if (!backend) {
    GTEST_SKIP() << reasons;
  }
  const problem::Solution exact = problem::solve(cascade.problem);
  for (const bool on : {true, false}) {
    cascade.options.cascade = on;
    const problem::Comparison comparison = problem::compare(
        cascade.problem, problem::run_problem(cascade.problem, *backend, cascade.options), exact);
    EXPECT_TRUE(comparison.passed) << comparison.message;
  }
}

INSTANTIATE_TEST_SUITE_P(All, Invariance,
                         ::testing::Values(Variant{DType::f32, 72, 5}, Variant{DType::f16, 72, 5},
                                           Variant{DType::bf16, 72, 5},
                                           Variant{DType::bf16, 128, 4}),
                         [](const auto& info) {
                           return std::string(to_string(std::get<0>(info.param))) + "_d" +
                                  std::to_string(std::get<1>(info.param));
                         });

}  // namespace
}  // namespace foveal::conformance
