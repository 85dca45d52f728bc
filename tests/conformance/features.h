#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "problem/judge.h"
#include "problem/problem.h"
#include "problem/run.h"

// The suite that every backend runs: random problems, judged by the float64 oracle within bounds
// that follow from the dtype (problem/judge.h). FOVEAL_TEST_BACKEND names the backend, by default
// CPU_ATTN, and FOVEAL_TEST_LIBRARY the shared library that has it, if one does.
namespace foveal::conformance {

/// Backend under test.
std::string backend_id();

/// Under a sanitizer only every n-th case runs: they are some twenty times slower.
bool skipped_under_sanitizer(std::int64_t case_number);

/// What can be asked for on top of plain causal attention over a paged cache. Each changes one
/// thing.
enum class Feature : std::uint8_t {
  non_causal,
  window,
  two_sided_window,
  alibi,
  soft_cap,
  sinks,
  score_mod,
  mask_mod,
  fp8_e4m3_cache,
  fp8_e5m2_cache,
  narrow_values,
  wide_values,
  cascade,
  cross,
  encoder_only,
  plain_keys,
  splits,
  small_kernel_blocks,
  hnd,
  kv_first,
  packed,
  padded,
  padded_batch,
  count,
};
std::string to_string(Feature feature);

/// Two features that contradict each other, such as two cache dtypes or a cascade with a window.
bool exclude_each_other(Feature a, Feature b);

struct Case {
  problem::AttentionProblem problem;
  problem::RunOptions options;
};

/// A case without features; its tensors are still empty.
Case plain_case(DType dtype, std::int64_t head_size, std::int64_t num_kv_heads,
                std::int64_t group_size, std::int64_t block_size,
                const std::vector<problem::Request>& requests);
void apply(Feature feature, Case& test);

/// The backend under test, or null and the reasons where it refuses the problem. CPU_ATTN serves
/// all.
AttentionBackendPtr backend_or_reasons(const problem::AttentionProblem& problem,
                                       std::string& reasons);

/// Fills the tensors from the seed, runs the case on the backend under test and judges it. A case
/// that the backend refuses, with a reason, is skipped.
void expect_right(Case& test, std::uint64_t seed);

}  // namespace foveal::conformance
