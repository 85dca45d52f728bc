#include "problem/judge.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/check.h"
#include "core/index.h"
#include "foveal/registry.h"

namespace foveal::problem {
namespace {

constexpr double kUnit = 0x1p-24;

double terms(std::int64_t count) {
  const auto k = static_cast<double>(count);
  return std::min(k, 32.0 * std::sqrt(k));
}

double norm(const std::vector<double>& numbers, std::int64_t offset, std::int64_t count) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < count; ++i) {
    sum += numbers[at(offset + i)] * numbers[at(offset + i)];
  }
  return std::sqrt(sum);
}

std::vector<double> scaled(const std::vector<double>& numbers, double scale) {
  std::vector<double> result = numbers;
  for (double& number : result) {
    number *= scale;
  }
  return result;
}

/// The problem with float64 tensors that hold what the stored elements stand for, plain, and every
/// value twice: v, then |v|.
AttentionProblem widened(const AttentionProblem& problem) {
  const AttentionSpec& spec = problem.spec;
  const DType kv_dtype = problem.paged ? spec.cache_dtype() : spec.dtype;
  AttentionProblem wide = problem;
  wide.query = scaled(problem.query, scale_in(spec.dtype, spec.scales.q));
  wide.key =
      scaled(problem.paged ? problem.stored_key : problem.key, scale_in(kv_dtype, spec.scales.k));
  const std::vector<double> values = scaled(problem.paged ? problem.stored_value : problem.value,
                                            scale_in(kv_dtype, spec.scales.v));
  const std::int64_t size = spec.value_head_size();
  wide.value.clear();
  for (std::int64_t head = 0; head < problem.keys() * spec.num_kv_heads; ++head) {
    for (std::int64_t i = 0; i < 2 * size; ++i) {
      const double number = values[at(head * size + i % size)];
      wide.value.push_back(i < size ? number : std::abs(number));
    }
  }
  wide.stored_key = wide.key;
  wide.stored_value = wide.value;
  wide.spec.dtype = DType::f64;
  wide.spec.kv_cache_dtype.reset();
  wide.spec.head_size_v = 2 * size;
  wide.spec.scales = {};
  wide.spec.kv_sharing_target.clear();
  wide.paged = false;
  wide.common_prefix_len = 0;
  wide.block_ids.clear();
  wide.num_blocks = 0;
  wide.expected_output.reset();
  wide.expected_lse.reset();
  return wide;
}

/// A and B of judge.h for a row and head.
struct Magnitude {
  double product = 0.0;
  double added = 0.0;
};

/// The largest norm of a key, for every request and KV head.
std::vector<double> longest_keys(const AttentionProblem& wide) {
  const AttentionSpec& spec = wide.spec;
  std::vector<double> longest;
  for (std::int64_t r = 0; r < std::ssize(wide.requests); ++r) {
    for (std::int64_t head = 0; head < spec.num_kv_heads; ++head) {
      double& length = longest.emplace_back(0.0);
      for (std::int64_t i = 0; i < wide.requests[at(r)].kv_len; ++i) {
        const std::int64_t vector = (wide.key_start(r) + i) * spec.num_kv_heads + head;
        length = std::max(length, norm(wide.key, vector * spec.head_size, spec.head_size));
      }
    }
  }
  return longest;
}

/// Of a query row and head, given the longest key it may meet.
Magnitude magnitude_of(const AttentionProblem& wide, const Request& request, std::int64_t row,
                       std::int64_t head, double longest_key) {
  const AttentionSpec& spec = wide.spec;
  Magnitude magnitude;
  magnitude.product =
      std::abs(spec.softmax_scale()) * longest_key *
      norm(wide.query, (row * spec.num_heads + head) * spec.head_size, spec.head_size);
  if (!spec.alibi_slopes.empty()) {
    magnitude.added += std::abs(spec.alibi_slopes[at(head)]) *
                       static_cast<double>(std::max(request.q_len, request.kv_len));
  }
  if (!spec.sinks.empty()) {
    magnitude.added += std::abs(spec.sinks[at(head)]);
  }
  if (spec.score_mod) {
    magnitude.added += magnitude.product;
  }
  return magnitude;
}

/// The most keys that a row of the request can see.
std::int64_t visible_keys(const AttentionProblem& problem, const Request& request) {
  const Window& window = problem.spec.window;
  const std::int64_t right = problem.causal ? 0 : window.right;
  return window.left < 0 || right < 0 ? request.kv_len
                                      : std::min(request.kv_len, window.left + 1 + right);
}

double weight_roundoff(DType query) {
  if (is_fp8(query)) {
    return unit_roundoff(DType::bf16);
  }
  return size_of(query) < 4 ? unit_roundoff(query) : 0.0;
}

/// Bounds of one row and head, as judge.h derives them; `weighted` is W and `number` o.
struct RowBounds {
  RowBounds(const AttentionProblem& problem, const Request& request, const Magnitude& magnitude)
      : sum(kUnit * terms(visible_keys(problem, request))),
        score(kUnit * (terms(problem.spec.head_size) * magnitude.product +
                       8.0 * (magnitude.product + magnitude.added + 1.0))),
        input(problem.inputs_rounded ? unit_roundoff(problem.spec.dtype) : 0.0),
        weight(weight_roundoff(problem.spec.dtype)),
        rounding(unit_roundoff(problem.output_dtype())),
        subnormal(half_subnormal(problem.output_dtype())) {
    score += 2.0 * input * magnitude.product;
    if (is_fp8(problem.spec.dtype)) {
      const std::int64_t steps = (problem.spec.head_size + 31) / 32;
      score += 0x1p-13 * static_cast<double>(steps) * magnitude.product;
    }
  }

  double lse(double number) const { return score + sum + kUnit * (8.0 + 4.0 * std::abs(number)); }
  double output(double number, double weighted) const {
    return std::max(rounding * std::abs(number), subnormal) +
           weighted * (weight + input + 2.0 * std::expm1(score) + 2.0 * sum + 16.0 * kUnit);
  }

  double sum;
  double score;
  double input;
  double weight;
  double rounding;
  double subnormal;
};

/// "request 1, row 3, head 2"
std::string place_of(const AttentionProblem& problem, std::int64_t row, std::int64_t head) {
  for (std::int64_t r = 0; r < std::ssize(problem.requests); ++r) {
    const std::int64_t start = problem.query_start(r);
    if (row < start + problem.requests[at(r)].q_len) {
      return fmt::format("request {}, row {}, head {}", r, row - start, head);
    }
  }
  return fmt::format("row {} of no request, head {}", row, head);
}

/// Collects what differs.
class Judge {
 public:
  /// Equal infinities and NaNs are no error.
  static double error_of(double got, double expected) {
    if (got == expected || (std::isnan(got) && std::isnan(expected))) {
      return 0.0;
    }
    const double error = std::abs(got - expected);
    return std::isnan(error) ? std::numeric_limits<double>::infinity() : error;
  }

  template <typename Place>
  void judge(double got, double expected, double bound, double& max_error, Place place) {
    const double error = error_of(got, expected);
    max_error = std::max(max_error, error);
    if (error == 0.0 || (std::isfinite(bound) && error <= bound)) {
      return;
    }
    if (++wrong_ > kMaxMessages) {
      return;
    }
    if (!std::isfinite(bound)) {
      messages.push_back(
          fmt::format("{}: got {}, expected {}, cannot be judged: the bound is not finite", place(),
                      got, expected));
    } else {
      messages.push_back(fmt::format("{}: got {}, expected {}, off by {:.3g}, bound {:.3g}",
                                     place(), got, expected, error, bound));
    }
  }

  std::string text() {
    if (wrong_ > kMaxMessages) {
      messages.push_back(fmt::format("{} numbers are wrong in all", wrong_));
    }
    return fmt::format("{}", fmt::join(messages, "\n"));
  }

  std::vector<std::string> messages;

 private:
  std::size_t wrong_ = 0;
};

}  // namespace

Solution solve(const AttentionProblem& problem) {
  const AttentionProblem wide = widened(problem);
  const RunResult exact = run_problem(wide, *BackendRegistry::global().get("REFERENCE"));
  const std::int64_t heads = problem.spec.num_heads;
  const std::int64_t size = problem.spec.value_head_size();
  const std::int64_t rows = problem.rows();
  const std::vector<double> longest = longest_keys(wide);

  Solution solution;
  solution.lse = exact.lse;
  solution.output.resize(at(rows * heads * size), 0.0);
  solution.output_bound.resize(at(rows * heads * size), 0.0);
  solution.lse_bound.resize(at(rows * heads), 0.0);
  for (std::int64_t r = 0; r < std::ssize(problem.requests); ++r) {
    const Request& request = problem.requests[at(r)];
    const std::int64_t start = problem.query_start(r);
    for (std::int64_t i = start * heads; i < (start + request.q_len) * heads; ++i) {
      const std::int64_t row = i / heads;
      const std::int64_t head = i % heads;
      const double lse = exact.lse[at(head * rows + row)];
      if (lse == -std::numeric_limits<double>::infinity()) {
        continue;
      }
      const std::int64_t kv_head = r * problem.spec.num_kv_heads + head / problem.spec.group_size();
      const RowBounds bounds(problem, request,
                             magnitude_of(wide, request, row, head, longest[at(kv_head)]));
      solution.lse_bound[at(head * rows + row)] = bounds.lse(lse);
      for (std::int64_t d = 0; d < size; ++d) {
        const double number = exact.output[at(i * 2 * size + d)];
        const double weighted = exact.output[at(i * 2 * size + size + d)];
        solution.output[at(i * size + d)] = number;
        solution.output_bound[at(i * size + d)] = bounds.output(number, weighted);
      }
    }
  }
  return solution;
}

Solution expected_by_file(const AttentionProblem& problem, const Solution& exact) {
  Solution expected = exact;
  expected.output = problem.expected_output.value_or(exact.output);
  expected.lse = problem.expected_lse.value_or(exact.lse);
  // The file's own numbers are decimal or float32.
  for (std::size_t i = 0; i < expected.output.size(); ++i) {
    expected.output_bound[i] += kUnit * std::abs(expected.output[i]);
  }
  for (std::size_t i = 0; i < expected.lse.size(); ++i) {
    if (std::isfinite(expected.lse[i])) {
      expected.lse_bound[i] += kUnit * std::abs(expected.lse[i]);
    }
  }
  return expected;
}

Comparison compare(const AttentionProblem& problem, const RunResult& result,
                   const Solution& expected, double factor) {
  const std::int64_t heads = problem.spec.num_heads;
  const std::int64_t size = problem.spec.value_head_size();
  const std::int64_t rows = problem.rows();
  check(result.output.size() == expected.output.size() &&
            (result.lse.empty() || result.lse.size() == expected.lse.size()),
        "result has {} numbers of output and {} of lse, the problem has {} and {}",
        result.output.size(), result.lse.size(), expected.output.size(), expected.lse.size());
  Comparison comparison;
  Judge judge;
  judge.messages = result.damage;
  double worst = -1.0;
  for (std::int64_t i = 0; i < rows * heads * size; ++i) {
    const double bound = factor * expected.output_bound[at(i)];
    const double got = result.output[at(i)];
    judge.judge(got, expected.output[at(i)], bound, comparison.max_error, [&] {
      return fmt::format("output of {}, dim {}",
                         place_of(problem, i / size / heads, i / size % heads), i % size);
    });
    const double error = Judge::error_of(got, expected.output[at(i)]);
    double ratio = 0.0;
    if (error != 0.0) {
      ratio = std::isfinite(bound) ? error / bound : std::numeric_limits<double>::infinity();
    }
    if (ratio > worst) {
      worst = ratio;
      comparison.bound = bound;
    }
  }
  for (std::int64_t i = 0; i < std::ssize(result.lse); ++i) {
    judge.judge(result.lse[at(i)], expected.lse[at(i)], factor * expected.lse_bound[at(i)],
                comparison.max_lse_error,
                [&] { return fmt::format("lse of {}", place_of(problem, i % rows, i / rows)); });
  }
  comparison.message = judge.text();
  comparison.passed = comparison.message.empty();
  return comparison;
}

}  // namespace foveal::problem
