// Closed forms: with keys of zero the output is the mean of the visible values and exp(LSE) their
// count, so a wrong number says which keys were seen. Everything expected here is computed from
// formulas in this file, none by the oracle.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "core/index.h"
#include "foveal/registry.h"
#include "problem/run.h"

namespace foveal {
namespace {

using problem::AttentionProblem;
using problem::CacheStyle;
using problem::Request;
using problem::RunOptions;
using problem::RunResult;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Four heads that share two KV heads; float64, so that results are exact but for the last bits.
AttentionProblem make_problem(std::vector<Request> requests) {
  AttentionProblem problem;
  problem.spec.num_heads = 4;
  problem.spec.num_kv_heads = 2;
  problem.spec.head_size = 8;
  problem.spec.scale = 1.0F;
  problem.spec.dtype = DType::f64;
  problem.requests = std::move(requests);
  problem.allocate();
  return problem;
}

/// The value of a token: its position, and a hundred more for each KV head before its own.
double value_of(std::int64_t position, std::int64_t kv_head) {
  return static_cast<double>(position + 100 * kv_head);
}

/// Sets value to value_of in every dimension, and key to `key` in dimension 0.
void fill(AttentionProblem& problem, const std::function<double(std::int64_t)>& key) {
  const auto& spec = problem.spec;
  std::size_t token = 0;
  for (const Request& request : problem.requests) {
    for (std::int64_t position = 0; position < request.kv_len; ++position) {
      for (std::int64_t head = 0; head < spec.num_kv_heads; ++head, ++token) {
        problem.key[token * at(spec.head_size)] = key(position);
        for (std::int64_t d = 0; d < spec.value_head_size(); ++d) {
          problem.value[token * at(spec.value_head_size()) + at(d)] = value_of(position, head);
        }
      }
    }
  }
  problem.quantize();
}

AttentionProblem mean_problem(std::vector<Request> requests) {
  AttentionProblem problem = make_problem(std::move(requests));
  fill(problem, [](std::int64_t) { return 0.0; });
  return problem;
}

/// The score of a key; −infinity hides it. `row` counts within the request.
using Score = std::function<double(const Request& request, std::int64_t row, std::int64_t head,
                                   std::int64_t key)>;
Score zero_where(const std::function<bool(std::int64_t position, std::int64_t key)>& visible) {
  return [=](const Request& request, std::int64_t row, std::int64_t, std::int64_t key) {
    return visible(request.kv_len - request.q_len + row, key) ? 0.0 : -kInfinity;
  };
}

/// Expects the softmax of the scores over value_of in every row and head; `sink` is one more logit.
void expect_softmax(const AttentionProblem& problem, const RunResult& result, const Score& score,
                    double sink = -kInfinity, double tolerance = 1e-12) {
  EXPECT_TRUE(result.damage.empty()) << result.damage.front();
  const auto& spec = problem.spec;
  for (std::int64_t r = 0; r < std::ssize(problem.requests); ++r) {
    const Request& request = problem.requests[at(r)];
    for (std::int64_t i = 0; i < request.q_len * spec.num_heads; ++i) {
      const std::int64_t row = i / spec.num_heads;
      const std::int64_t head = i % spec.num_heads;
      double sum = 0.0;
      double weighted = 0.0;
      for (std::int64_t key = 0; key < request.kv_len; ++key) {
        const double weight = std::exp(score(request, row, head, key));
        sum += weight;
        weighted += weight * value_of(key, head / (spec.num_heads / spec.num_kv_heads));
      }
      const double output = sum == 0.0 ? 0.0 : weighted / (sum + std::exp(sink));
      const std::int64_t token = problem.query_start(r) + row;
      SCOPED_TRACE(testing::Message() << "request " << r << ", row " << row << ", head " << head);
      for (std::int64_t d = 0; d < spec.value_head_size(); ++d) {
        ASSERT_NEAR(result.output[at((token * spec.num_heads + head) * spec.value_head_size() + d)],
                    output, tolerance * std::max(1.0, std::abs(output)));
      }
      const double lse = result.lse[at(head * problem.rows() + token)];
      if (sum == 0.0) {
        ASSERT_EQ(lse, -kInfinity);
      } else {
        ASSERT_NEAR(lse, std::log(sum), 1e-6 * std::max(1.0, std::abs(lse)));
      }
    }
  }
}

RunResult run(const AttentionProblem& problem, const RunOptions& options = {}) {
  static const AttentionBackendPtr reference = BackendRegistry::global().get("REFERENCE");
  return run_problem(problem, *reference, options);
}

const std::vector<Request> kMixed{{1, 16}, {5, 16}, {16, 16}, {3, 40}, {1, 1}};

TEST(ClosedForm, CausalIsAlignedBottomRight) {
  const AttentionProblem problem = mean_problem(kMixed);
  expect_softmax(problem, run(problem), zero_where([](std::int64_t position, std::int64_t key) {
                   return key <= position;
                 }));
}

TEST(ClosedForm, RowsThatSeeNothingAreZero) {
  const AttentionProblem problem = mean_problem({{4, 2}, {1, 0}, {3, 0}, {1, 3}});
  expect_softmax(problem, run(problem), zero_where([](std::int64_t position, std::int64_t key) {
                   return key <= position;
                 }));
}

TEST(ClosedForm, WindowExcludesTheTokenItself) {
  for (const bool causal : {true, false}) {
    for (const Window window :
         {Window{0, 0}, Window{3, 0}, Window{3, -1}, Window{-1, 2}, Window{2, 1}, Window{127, 5}}) {
      SCOPED_TRACE(testing::Message() << window.left << ", " << window.right << ", " << causal);
      AttentionProblem problem = mean_problem(kMixed);
      problem.causal = causal;
      problem.spec.window = window;
      expect_softmax(problem, run(problem),
                     zero_where([=](std::int64_t position, std::int64_t key) {
                       return (!causal || key <= position) &&
                              (window.left < 0 || key >= position - window.left) &&
                              (window.right < 0 || key <= position + window.right);
                     }));
    }
  }
}

TEST(ClosedForm, NonCausalSeesEveryKey) {
  AttentionProblem problem = mean_problem(kMixed);
  problem.causal = false;
  expect_softmax(problem, run(problem), zero_where([](auto, auto) { return true; }));
}

TEST(ClosedForm, EncodersReadPlainKeys) {
  for (const AttnType type : {AttnType::encoder, AttnType::encoder_only}) {
    AttentionProblem problem = mean_problem({{6, 6}, {3, 3}, {0, 0}, {9, 9}});
    problem.spec.attn_type = type;
    problem.causal = false;
    problem.paged = false;
    expect_softmax(problem, run(problem, {.padded_rows = 2, .row_gap = 3}),
                   zero_where([](auto, auto) { return true; }));
    problem.spec.window = {1, 2};
    expect_softmax(problem, run(problem), zero_where([](std::int64_t position, std::int64_t key) {
                     return key >= position - 1 && key <= position + 2;
                   }));
  }
}

TEST(ClosedForm, CrossAttentionReadsTheEncodersKeys) {
  AttentionProblem problem = mean_problem({{1, 7}, {4, 20}, {2, 1}, {1, 0}});
  problem.spec.attn_type = AttnType::encoder_decoder;
  problem.causal = false;
  for (const bool update : {true, false}) {
    expect_softmax(problem, run(problem, {.update_cache = update}),
                   zero_where([](auto, auto) { return true; }));
  }
}

TEST(ClosedForm, PlainKeysStartWhereKeyStartLocSays) {
  AttentionProblem problem = mean_problem(kMixed);
  problem.paged = false;
  expect_softmax(problem, run(problem), zero_where([](std::int64_t position, std::int64_t key) {
                   return key <= position;
                 }));
}

TEST(ClosedForm, AlibiIsSlopeTimesKeyMinusRow) {
  AttentionProblem problem = mean_problem(kMixed);
  problem.spec.alibi_slopes = {1.0F, 0.5F, 0.0F, -0.25F};
  expect_softmax(
      problem, run(problem),
      [&](const Request& request, std::int64_t row, std::int64_t head, std::int64_t key) {
        const std::int64_t position = request.kv_len - request.q_len + row;
        return key > position
                   ? -kInfinity
                   : problem.spec.alibi_slopes[at(head)] * static_cast<double>(key - position);
      });
}

/// Scores of 3·sin(position), through the query's dimension 0.
AttentionProblem scored_problem(double query) {
  AttentionProblem problem = make_problem({{2, 9}, {1, 20}});
  fill(problem, [](std::int64_t position) { return std::sin(static_cast<double>(position)); });
  for (std::size_t i = 0; i < problem.query.size(); i += at(problem.spec.head_size)) {
    problem.query[i] = query;
  }
  return problem;
}

Score causal_score(const std::function<double(double key, double distance)>& score) {
  return [=](const Request& request, std::int64_t row, std::int64_t, std::int64_t key) {
    const std::int64_t position = request.kv_len - request.q_len + row;
    return key > position
               ? -kInfinity
               : score(std::sin(static_cast<double>(key)), static_cast<double>(key - position));
  };
}

TEST(ClosedForm, ScaleThenCapThenAlibi) {
  AttentionProblem problem = scored_problem(6.0);
  problem.spec.scale = 0.5F;
  expect_softmax(problem, run(problem), causal_score([](double key, double) { return 3.0 * key; }));
  problem.spec.logits_soft_cap = 2.0F;
  expect_softmax(problem, run(problem),
                 causal_score([](double key, double) { return 2.0 * std::tanh(1.5 * key); }));
  problem.spec.alibi_slopes.assign(4, 0.25F);
  expect_softmax(problem, run(problem), causal_score([](double key, double distance) {
                   return 2.0 * std::tanh(1.5 * key) + 0.25 * distance;
                 }));
}

TEST(ClosedForm, ScaleDefaultsToTheRootOfTheHeadSize) {
  AttentionProblem problem = scored_problem(6.0);
  problem.spec.scale.reset();
  expect_softmax(problem, run(problem),
                 causal_score([](double key, double) { return 6.0 / std::sqrt(8.0) * key; }),
                 -kInfinity, 1e-6);
}

TEST(ClosedForm, ScoreModComesAfterTheCapInsteadOfAlibi) {
  AttentionProblem problem = scored_problem(3.0);
  problem.spec.logits_soft_cap = 2.0F;
  problem.spec.score_mod = [](float score, const ScoreIndex& index) {
    return 0.5F * score + 0.125F * static_cast<float>(index.key_position - index.query_position) +
           static_cast<float>(index.query_row);
  };
  const auto expected = [](const Request& request, std::int64_t row, std::int64_t,
                           std::int64_t key) {
    const std::int64_t position = request.kv_len - request.q_len + row;
    return key > position
               ? -kInfinity
               : std::tanh(1.5 * std::sin(static_cast<double>(key))) +
                     0.125 * static_cast<double>(key - position) + static_cast<double>(row);
  };
  expect_softmax(problem, run(problem), expected, -kInfinity, 1e-6);
}

TEST(ClosedForm, MaskModIsOnTopOfCausality) {
  AttentionProblem problem = mean_problem(kMixed);
  problem.spec.mask_mod = [](const ScoreIndex& index) {
    return (index.key_position + index.query_head + index.request) % 3 != 0;
  };
  std::int64_t request_number = 0;
  const AttentionProblem& p = problem;
  expect_softmax(
      problem, run(problem),
      [&](const Request& request, std::int64_t row, std::int64_t head, std::int64_t key) {
        for (std::int64_t r = 0; r < std::ssize(p.requests); ++r) {
          request_number = &request == &p.requests[at(r)] ? r : request_number;
        }
        const bool seen =
            key <= request.kv_len - request.q_len + row && (key + head + request_number) % 3 != 0;
        return seen ? 0.0 : -kInfinity;
      });
}

TEST(ClosedForm, ScoreModOfMinusInfinityHides) {
  AttentionProblem problem = mean_problem({{4, 12}});
  problem.spec.score_mod = [](float score, const ScoreIndex& index) {
    return index.key_position % 2 == 0 && index.query_row != 1
               ? score
               : -std::numeric_limits<float>::infinity();
  };
  expect_softmax(problem, run(problem),
                 [](const Request& request, std::int64_t row, std::int64_t, std::int64_t key) {
                   const bool seen =
                       key <= request.kv_len - request.q_len + row && key % 2 == 0 && row != 1;
                   return seen ? 0.0 : -kInfinity;
                 });
}

TEST(ClosedForm, SinkIsOneUnscaledUncappedLogitOutsideTheLse) {
  AttentionProblem problem = scored_problem(6.0);
  problem.spec.scale = 0.5F;
  problem.spec.logits_soft_cap = 2.0F;
  for (const double sink : {0.0, std::log(4.0), -30.0, 5.0}) {
    problem.spec.sinks.assign(4, static_cast<float>(sink));
    expect_softmax(problem, run(problem),
                   causal_score([](double key, double) { return 2.0 * std::tanh(1.5 * key); }),
                   static_cast<float>(sink));
  }
}

TEST(ClosedForm, SinkOfARowThatSeesNothing) {
  AttentionProblem problem = mean_problem({{4, 2}, {1, 0}});
  problem.spec.sinks = {0.0F, 1.0F, 2.0F, 3.0F};
  const RunResult result = run(problem);
  for (std::size_t i = 0; i < at(2 * 4 * 8); ++i) {
    EXPECT_EQ(result.output[i], 0.0);
  }
}

TEST(ClosedForm, ExtremeLogits) {
  for (const double query : {40.0, -40.0}) {
    AttentionProblem problem = make_problem({{1, 4}});
    fill(problem, [](std::int64_t) { return 2560.0; });
    for (double& element : problem.query) {
      element = query;
    }
    const RunResult result = run(problem);
    EXPECT_NEAR(result.output[0], 1.5, 1e-12);
    EXPECT_NEAR(result.lse[0], query * 2560.0 + std::log(4.0), 0.01);
  }
}

TEST(ClosedForm, CascadeSeesWhatTheWholeSees) {
  AttentionProblem problem = make_problem({{1, 40}, {3, 36}, {1, 35}, {8, 64}});
  problem.common_prefix_len = 32;
  fill(problem, [](std::int64_t) { return 0.0; });
  problem.spec.sinks = {0.5F, -1.0F, 0.5F, -1.0F};
  for (const bool cascade : {true, false}) {
    for (const double sink : {0.5, -1.0}) {
      problem.spec.sinks.assign(4, static_cast<float>(sink));
      expect_softmax(
          problem, run(problem, {.cascade = cascade}),
          zero_where([](std::int64_t position, std::int64_t key) { return key <= position; }),
          sink);
    }
  }
}

TEST(ClosedForm, PaddedRequestsAndRows) {
  AttentionProblem problem = make_problem({{2, 5}, {1, 9}});
  problem.padded_requests = 3;
  problem.unowned_rows = 4;
  problem.allocate();
  fill(problem, [](std::int64_t) { return 0.0; });
  for (const double row : {3.0, 4.0, 5.0, 6.0}) {
    problem.query[at(static_cast<std::int64_t>(row) * 32)] = std::nan("");
  }
  const RunResult result = run(problem, {.padded_rows = 5, .row_gap = 8});
  expect_softmax(problem, result, zero_where([](std::int64_t position, std::int64_t key) {
                   return key <= position;
                 }));
  for (std::int64_t row = 3; row < 7; ++row) {
    for (std::int64_t i = 0; i < 32; ++i) {
      EXPECT_EQ(result.output[at(row * 32 + i)], 0.0);
    }
    for (std::int64_t head = 0; head < 4; ++head) {
      EXPECT_EQ(result.lse[at(head * 7 + row)], -kInfinity);
    }
  }
}

TEST(ClosedForm, EveryLayoutBlockSizeAndPoison) {
  AttentionProblem problem = mean_problem(kMixed);
  const auto causal =
      zero_where([](std::int64_t position, std::int64_t key) { return key <= position; });
  for (const CacheStyle style : {CacheStyle::nhd, CacheStyle::hnd, CacheStyle::kv_first,
                                 CacheStyle::packed, CacheStyle::padded}) {
    for (const auto& [block_size, kernel_block_size] :
         {std::pair{1, 1}, {3, 3}, {16, 16}, {32, 8}, {48, 16}}) {
      for (const double poison : {std::nan(""), kInfinity, 1e30}) {
        problem.block_size = block_size;
        RunOptions options;
        options.cache = style;
        options.kernel_block_size = kernel_block_size;
        options.poison = poison;
        options.row_gap = 5;
        options.update_cache = block_size != 3;
        expect_softmax(problem, run(problem, options), causal);
      }
    }
  }
}

TEST(ClosedForm, ValuesOfAnotherSize) {
  for (const CacheStyle style :
       {CacheStyle::nhd, CacheStyle::hnd, CacheStyle::packed, CacheStyle::padded}) {
    AttentionProblem problem = make_problem(kMixed);
    problem.spec.head_size_v = 5;
    problem.allocate();
    fill(problem, [](std::int64_t) { return 0.0; });
    expect_softmax(
        problem, run(problem, {.cache = style}),
        zero_where([](std::int64_t position, std::int64_t key) { return key <= position; }));
  }
}

TEST(ClosedForm, EveryDType) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    AttentionProblem problem = make_problem({{1, 9}, {5, 17}});
    problem.spec.dtype = dtype;
    fill(problem, [](std::int64_t) { return 0.0; });
    expect_softmax(problem, run(problem), zero_where([](std::int64_t position, std::int64_t key) {
                     return key <= position;
                   }),
                   -kInfinity, problem::unit_roundoff(dtype));
  }
}

TEST(ClosedForm, Fp8CachesAndQueriesAreScaled) {
  for (const DType cache : {DType::f8e4m3, DType::f8e5m2}) {
    for (const DType dtype : {DType::f32, DType::bf16, cache}) {
      AttentionProblem problem;
      problem.spec.num_heads = problem.spec.num_kv_heads = 1;
      problem.spec.head_size = 4;
      problem.spec.scale = 1.0F;
      problem.spec.dtype = dtype;
      problem.spec.kv_cache_dtype = cache;
      problem.spec.scales = {.q = 2.0F, .k = 0.25F, .v = 0.5F};
      problem.requests = {{1, 2}};
      problem.allocate();
      // A score of 1 for the first key, whose value stands for 1; 0 for the other.
      problem.query[0] = is_fp8(dtype) ? 0.5 : 1.0;
      problem.stored_key[0] = 4.0;
      problem.stored_value[0] = 2.0;
      problem.dequantize();
      const RunResult result = run(problem);
      EXPECT_TRUE(result.damage.empty());
      const double e = std::exp(1.0);
      EXPECT_NEAR(result.output[0], e / (e + 1.0), dtype == DType::f32 ? 1e-6 : 0x1p-8);
      EXPECT_NEAR(result.lse[0], std::log(e + 1.0), 1e-6);
    }
  }
}

}  // namespace
}  // namespace foveal
