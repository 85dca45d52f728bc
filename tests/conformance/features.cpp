#include "conformance/features.h"

#include <array>
#include <cmath>
#include <cstdlib>
#include <set>

#include "foveal/registry.h"

namespace foveal::conformance {
namespace {

using problem::CacheStyle;

constexpr std::array<const char*, static_cast<std::size_t>(Feature::count)> kNames{
    "non_causal",
    "window",
    "two_sided_window",
    "alibi",
    "soft_cap",
    "sinks",
    "score_mod",
    "mask_mod",
    "fp8_e4m3_cache",
    "fp8_e5m2_cache",
    "narrow_values",
    "wide_values",
    "cascade",
    "cross",
    "encoder_only",
    "plain_keys",
    "splits",
    "small_kernel_blocks",
    "hnd",
    "kv_first",
    "packed",
    "padded",
    "padded_batch"};

/// Features of which a case can have one at most.
const std::vector<std::set<Feature>>& exclusive_groups() {
  static const std::vector<std::set<Feature>> groups{
      {Feature::window, Feature::two_sided_window},
      {Feature::alibi, Feature::score_mod},
      {Feature::fp8_e4m3_cache, Feature::fp8_e5m2_cache},
      {Feature::narrow_values, Feature::wide_values},
      {Feature::hnd, Feature::kv_first, Feature::packed, Feature::padded},
      // [2, num_blocks, …] holds K and V of one size.
      {Feature::kv_first, Feature::narrow_values},
      {Feature::kv_first, Feature::wide_values},
      // What a cascade's prefix pass cannot have.
      {Feature::cascade, Feature::window},
      {Feature::cascade, Feature::two_sided_window},
      {Feature::cascade, Feature::alibi},
      {Feature::cascade, Feature::score_mod},
      {Feature::cascade, Feature::mask_mod},
      {Feature::cascade, Feature::cross},
      {Feature::cascade, Feature::encoder_only},
      {Feature::cascade, Feature::plain_keys},
      // Other kinds of layers; without a cache there is nothing to lay out.
      {Feature::cross, Feature::encoder_only, Feature::non_causal},
      {Feature::cross, Feature::plain_keys},
  };
  return groups;
}

bool needs_cache(Feature feature) {
  switch (feature) {
    case Feature::fp8_e4m3_cache:
    case Feature::fp8_e5m2_cache:
    case Feature::small_kernel_blocks:
    case Feature::hnd:
    case Feature::kv_first:
    case Feature::packed:
    case Feature::padded:
      return true;
    default:
      return false;
  }
}

}  // namespace

std::string backend_id() {
  static const std::string id = [] {
    const char* named = std::getenv("FOVEAL_TEST_BACKEND");
    const char* library = std::getenv("FOVEAL_TEST_LIBRARY");
    std::string id = named != nullptr ? named : "CPU_ATTN";
    if (library != nullptr) {
      BackendRegistry::global().add_library(id, "under test", library);
    }
    return id;
  }();
  return id;
}

bool skipped_under_sanitizer([[maybe_unused]] std::int64_t case_number) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return case_number % 23 != 0;
#else
  return false;
#endif
}

std::string to_string(Feature feature) { return kNames[static_cast<std::size_t>(feature)]; }

bool exclude_each_other(Feature a, Feature b) {
  for (const std::set<Feature>& group : exclusive_groups()) {
    if (group.contains(a) && group.contains(b)) {
      return true;
    }
  }
  const auto cacheless = [](Feature f) {
    return f == Feature::encoder_only || f == Feature::plain_keys;
  };
  return (cacheless(a) && needs_cache(b)) || (cacheless(b) && needs_cache(a));
}

Case plain_case(DType dtype, std::int64_t head_size, std::int64_t num_kv_heads,
                std::int64_t group_size, std::int64_t block_size,
                const std::vector<problem::Request>& requests) {
  Case test;
  AttentionSpec& spec = test.problem.spec;
  spec.num_heads = num_kv_heads * group_size;
  spec.num_kv_heads = num_kv_heads;
  spec.head_size = head_size;
  spec.dtype = dtype;
  test.problem.block_size = block_size;
  test.problem.requests = requests;
  return test;
}

void apply(Feature feature, Case& test) {
  problem::AttentionProblem& problem = test.problem;
  AttentionSpec& spec = problem.spec;
  problem.name += "+" + to_string(feature);
  const auto per_head = [&](auto&& value) {
    std::vector<float> values;
    for (std::int64_t head = 0; head < spec.num_heads; ++head) {
      values.push_back(value(static_cast<float>(head)));
    }
    return values;
  };
  const auto fp8_cache = [&](DType dtype) {
    spec.kv_cache_dtype = dtype;
    spec.scales.k = 0.5F;
    spec.scales.v = 0.03F;
  };
  switch (feature) {
    case Feature::non_causal:
      problem.causal = false;
      break;
    case Feature::window:
      spec.window = Window::of_tokens(37);
      break;
    case Feature::two_sided_window:
      spec.window = {20, 9};
      problem.causal = false;
      break;
    case Feature::alibi:
      spec.alibi_slopes = per_head([](float head) { return std::exp2(-0.5F * (head + 1.0F)); });
      break;
    case Feature::soft_cap:
      spec.logits_soft_cap = 1.5F;
      break;
    case Feature::sinks:
      spec.sinks = per_head([](float head) { return 2.0F - head; });
      break;
    case Feature::score_mod:
      spec.score_mod = [](float score, const ScoreIndex& at) {
        return score + 0.01F * static_cast<float>((at.key_position * 7 + at.query_head) % 11);
      };
      break;
    case Feature::mask_mod:
      spec.mask_mod = [](const ScoreIndex& at) {
        return (at.key_position * 5 + at.query_row + at.request) % 3 != 0;
      };
      break;
    case Feature::fp8_e4m3_cache:
      fp8_cache(DType::f8e4m3);
      break;
    case Feature::fp8_e5m2_cache:
      fp8_cache(DType::f8e5m2);
      break;
    case Feature::narrow_values:
      spec.head_size_v = 8;
      break;
    case Feature::wide_values:
      spec.head_size_v = spec.head_size + 40;
      break;
    case Feature::cascade:
      problem.common_prefix_len = 3 * problem.block_size;
      for (problem::Request& request : problem.requests) {
        request.kv_len +=
            problem.common_prefix_len + std::max<std::int64_t>(0, request.q_len - request.kv_len);
      }
      break;
    case Feature::cross:
      spec.attn_type = AttnType::encoder_decoder;
      problem.causal = false;
      break;
    case Feature::encoder_only:
      spec.attn_type = AttnType::encoder_only;
      problem.causal = false;
      problem.paged = false;
      break;
    case Feature::plain_keys:
      problem.paged = false;
      break;
    case Feature::splits:
      test.options.num_splits = 3;
      break;
    case Feature::small_kernel_blocks:
      test.options.kernel_block_size = problem.block_size / 3;
      break;
    case Feature::hnd:
      test.options.cache = CacheStyle::hnd;
      break;
    case Feature::kv_first:
      test.options.cache = CacheStyle::kv_first;
      break;
    case Feature::packed:
      test.options.cache = CacheStyle::packed;
      break;
    case Feature::padded:
      test.options.cache = CacheStyle::padded;
      test.options.row_gap = 5;
      break;
    case Feature::padded_batch:
      problem.padded_requests = 2;
      problem.unowned_rows = 3;
      test.options.padded_rows = 4;
      break;
    case Feature::count:
      break;
  }
}

AttentionBackendPtr backend_or_reasons(const problem::AttentionProblem& problem,
                                       std::string& reasons) {
  static_cast<void>(BackendRegistry::global().get(backend_id()));  // Throws where there is none.
  try {
    return problem::choose_backend(problem, backend_id());
  } catch (const Error& error) {
    if (error.code() != ErrorCode::unsupported || backend_id() == "CPU_ATTN") {
      throw;
    }
    reasons = error.what();
    return nullptr;
  }
}

void expect_right(Case& test, std::uint64_t seed) {
  test.problem.fill_random(seed);
  std::string reasons;
  const AttentionBackendPtr backend = backend_or_reasons(test.problem, reasons);
  if (!backend) {
    GTEST_SKIP() << reasons;
  }
  const problem::RunResult result = problem::run_problem(test.problem, *backend, test.options);
  const problem::Comparison comparison =
      problem::compare(test.problem, result, problem::solve(test.problem));
  EXPECT_TRUE(comparison.passed) << test.problem.name << "\n" << comparison.message;
}

}  // namespace foveal::conformance
