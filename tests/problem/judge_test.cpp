// The judge lets right results pass in every dtype and finds each contract number that is off.

#include "problem/judge.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "foveal/registry.h"

namespace foveal::problem {
namespace {

const std::vector<Request> kRequests{{1, 50}, {6, 40}, {17, 17}, {1, 1}, {3, 2}};

AttentionProblem make_problem(DType dtype, std::uint64_t seed = 1) {
  AttentionProblem problem;
  problem.spec.num_heads = 6;
  problem.spec.num_kv_heads = 2;
  problem.spec.head_size = 32;
  problem.spec.dtype = dtype;
  problem.requests = kRequests;
  problem.fill_random(seed);
  return problem;
}

RunResult run(const AttentionProblem& problem) {
  return run_problem(problem, *BackendRegistry::global().get("REFERENCE"));
}

struct Mutation {
  const char* name;
  /// What the layer has, and what a wrong backend would make of it.
  std::function<void(AttentionProblem&)> right;
  std::function<void(AttentionProblem&)> wrong;
};

const std::vector<Mutation>& mutations() {
  using P = AttentionProblem;
  static const std::vector<Mutation> all{
      {"window one too long",
       [](P& p) {
         p.spec.window = {8, 0};
       },
       [](P& p) {
         p.spec.window = {9, 0};
       }},
      {"window one too short",
       [](P& p) {
         p.spec.window = {8, 0};
       },
       [](P& p) {
         p.spec.window = {7, 0};
       }},
      {"window forgotten",
       [](P& p) {
         p.spec.window = {30, 0};
       },
       [](P& p) { p.spec.window = {}; }},
      {"not causal", [](P&) {}, [](P& p) { p.causal = false; }},
      {"causal one too far", [](P&) {},
       [](P& p) {
         p.causal = false;
         p.spec.window = {-1, 1};
       }},
      {"causal aligned top-left", [](P&) {},
       [](P& p) {
         p.causal = false;
         p.spec.mask_mod = [](const ScoreIndex& i) { return i.key_position <= i.query_row; };
       }},
      {"ALiBi of the wrong sign", [](P& p) { p.spec.alibi_slopes.assign(6, 0.05F); },
       [](P& p) { p.spec.alibi_slopes.assign(6, -0.05F); }},
      {"ALiBi of the wrong head",
       [](P& p) { p.spec.alibi_slopes = {0.1F, 0.2F, 0.3F, 0.4F, 0.5F, 0.6F}; },
       [](P& p) { p.spec.alibi_slopes = {0.2F, 0.1F, 0.3F, 0.4F, 0.5F, 0.6F}; }},
      {"soft cap forgotten", [](P& p) { p.spec.logits_soft_cap = 2.0F; },
       [](P& p) { p.spec.logits_soft_cap = 0.0F; }},
      {"sink scaled", [](P& p) { p.spec.sinks.assign(6, 2.0F); },
       [](P& p) { p.spec.sinks.assign(6, 2.0F * p.spec.softmax_scale()); }},
      {"sink forgotten", [](P& p) { p.spec.sinks.assign(6, 0.0F); },
       [](P& p) { p.spec.sinks.clear(); }},
      {"sink twice", [](P& p) { p.spec.sinks.assign(6, 1.0F); },
       [](P& p) { p.spec.sinks.assign(6, 1.0F + std::log(2.0F)); }},
      {"scale of another head size", [](P&) {},
       [](P& p) { p.spec.scale = 1.0F / std::sqrt(30.0F); }},
      {"KV heads mixed up", [](P&) {},
       [](P& p) {
         for (auto* tensor : {&p.key, &p.value, &p.stored_key, &p.stored_value}) {
           for (std::size_t i = 0; i < tensor->size(); i += 64) {
             std::swap_ranges(&(*tensor)[i], &(*tensor)[i + 32], &(*tensor)[i + 32]);
           }
         }
       }},
      {"last key forgotten", [](P&) {},
       [](P& p) {
         p.spec.mask_mod = [](const ScoreIndex& i) {
           return i.key_position + 1 < kRequests[static_cast<std::size_t>(i.request)].kv_len;
         };
       }},
      {"keys for values", [](P&) {}, [](P& p) { p.value = p.stored_value = p.key; }},
  };
  return all;
}

TEST(Judge, FindsEveryMutation) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const Mutation& mutation : mutations()) {
      SCOPED_TRACE(std::string(mutation.name) + " in " + std::string(to_string(dtype)));
      AttentionProblem problem = make_problem(dtype);
      mutation.right(problem);
      const Solution exact = solve(problem);
      EXPECT_EQ(compare(problem, run(problem), exact).message, "");
      AttentionProblem mutated = problem;
      mutation.wrong(mutated);
      RunResult result = run(mutated);
      EXPECT_FALSE(compare(problem, result, exact).passed);
      // Output alone tells it too.
      result.lse.clear();
      EXPECT_FALSE(compare(problem, result, exact).passed);
    }
  }
}

TEST(Judge, FindsForgottenScales) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f8e4m3}) {
    AttentionProblem problem = make_problem(dtype);
    problem.spec.kv_cache_dtype = DType::f8e4m3;
    problem.spec.scales = {.q = 0.05F, .k = 0.01F, .v = 0.02F};
    problem.fill_random(3);
    const Solution exact = solve(problem);
    EXPECT_EQ(compare(problem, run(problem), exact).message, "");
    for (float QuantScales::*scale : {&QuantScales::q, &QuantScales::k, &QuantScales::v}) {
      if (scale == &QuantScales::q && !is_fp8(dtype)) {
        continue;
      }
      AttentionProblem mutated = problem;
      mutated.spec.scales.*scale *= 1.1F;
      EXPECT_FALSE(compare(problem,
                           run_problem(mutated, *BackendRegistry::global().get("REFERENCE"),
                                       {.update_cache = false}),
                           exact)
                       .passed);
    }
  }
}

TEST(Judge, CascadeIsTheWhole) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    AttentionProblem problem = make_problem(dtype);
    problem.requests = {{1, 40}, {4, 50}, {9, 41}};
    problem.common_prefix_len = 32;
    problem.spec.sinks.assign(6, 0.5F);
    problem.spec.logits_soft_cap = 3.0F;
    problem.fill_random(4);
    EXPECT_EQ(compare(problem, run(problem), solve(problem)).message, "");
  }
}

TEST(Judge, BoundsAreTight) {
  // One bit of bf16 is about what the bound allows for a number; four of them are not.
  const AttentionProblem problem = make_problem(DType::bf16);
  const Solution exact = solve(problem);
  const RunResult result = run(problem);
  const Comparison comparison = compare(problem, result, exact);
  EXPECT_GT(comparison.max_error, 0.0);
  EXPECT_LE(comparison.max_error, comparison.bound);
  for (std::size_t i = 0; i < exact.output.size(); ++i) {
    ASSERT_LE(exact.output_bound[i], 0x1p-8 * (std::abs(exact.output[i]) + 5.0));
  }
  for (const double bound : exact.lse_bound) {
    ASSERT_LE(bound, 1e-4);
  }
}

TEST(Judge, ADTypeThatRoundsInputsIsForgivenTheFilesNumbersOnly) {
  AttentionProblem problem = make_problem(DType::f32);
  const Solution exact = solve(problem);
  problem.expected_output = exact.output;
  problem.expected_lse = exact.lse;
  const AttentionProblem rounded = with_dtype(problem, DType::bf16);
  EXPECT_TRUE(rounded.inputs_rounded);
  const Solution exact_rounded = solve(rounded);
  const RunResult result = run(rounded);
  EXPECT_EQ(compare(rounded, result, expected_by_file(rounded, exact_rounded)).message, "");
  AttentionProblem strict = rounded;
  strict.inputs_rounded = false;
  EXPECT_FALSE(compare(strict, result, expected_by_file(strict, solve(strict))).passed);
}

TEST(Judge, ABoundThatIsNotFiniteForgivesNothing) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  const AttentionProblem problem = make_problem(DType::f32);
  const Solution exact = solve(problem);
  const RunResult right = run(problem);
  for (const double bound : {kInfinity, kNan}) {
    Solution unbounded = exact;
    unbounded.output_bound[5] = unbounded.lse_bound[5] = bound;
    RunResult result = right;
    result.output[5] = unbounded.output[5];
    result.lse[5] = unbounded.lse[5];
    EXPECT_EQ(compare(problem, result, unbounded).message, "");
    for (const double got : {unbounded.output[5] + 1.0, kInfinity, kNan}) {
      result.output[5] = got;
      const Comparison comparison = compare(problem, result, unbounded);
      EXPECT_NE(comparison.message.find("cannot be judged: the bound is not finite"),
                std::string::npos);
      EXPECT_FALSE(std::isfinite(comparison.bound));
    }
    result.output[5] = unbounded.output[5];
    result.lse[5] += 1.0;
    EXPECT_FALSE(compare(problem, result, unbounded).passed);
  }
}

TEST(Judge, EqualInfinitiesAndNansAreRightWhateverTheBound) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  const AttentionProblem problem = make_problem(DType::f32);
  Solution expected = solve(problem);
  RunResult result = run(problem);
  for (const double number : {kInfinity, -kInfinity, kNan}) {
    result.output[5] = expected.output[5] = number;
    result.lse[5] = expected.lse[5] = number;
    for (const double bound : {0.0, kInfinity, kNan}) {
      expected.output_bound[5] = expected.lse_bound[5] = bound;
      const Comparison comparison = compare(problem, result, expected);
      EXPECT_EQ(comparison.message, "");
      EXPECT_TRUE(std::isfinite(comparison.max_error));
      EXPECT_TRUE(std::isfinite(comparison.bound));
    }
  }
}

TEST(Problem, RandomNumbersAreNormalAndTheSameEverywhere) {
  AttentionProblem problem = make_problem(DType::f64, 42);
  double sum = 0.0;
  double squares = 0.0;
  for (const double number : problem.key) {
    sum += number;
    squares += number * number;
  }
  const auto count = static_cast<double>(problem.key.size());
  EXPECT_NEAR(sum / count, 0.0, 0.05);
  EXPECT_NEAR(squares / count, 1.0, 0.05);
  EXPECT_NE(problem.key, problem.value);
  EXPECT_EQ(problem.key, make_problem(DType::f64, 42).key);
  EXPECT_NE(problem.key, make_problem(DType::f64, 43).key);
}

TEST(Problem, QuantisedNumbersFindTheirWayBack) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const DType cache : {DType::f8e4m3, DType::f8e5m2}) {
      AttentionProblem problem = make_problem(dtype);
      problem.spec.kv_cache_dtype = cache;
      problem.spec.scales = {.q = 1.0F, .k = 0.013F, .v = 0.37F};
      problem.fill_random(8);
      const auto stored = problem.stored_key;
      problem.dequantize();
      problem.quantize();
      EXPECT_EQ(problem.stored_key, stored);
    }
  }
}

}  // namespace
}  // namespace foveal::problem
