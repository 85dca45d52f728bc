// The closed-form cases that live beside the repository, on each backend of the CPU, or on that
// which FOVEAL_TEST_BACKEND names. FOVEAL_SHARED_DIR names the folder that has cases/.

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "foveal/registry.h"
#include "problem/judge.h"
#include "problem/problem_file.h"

namespace foveal::problem {
namespace {

class SharedCases : public ::testing::TestWithParam<std::string> {};

std::vector<std::string> backends() {
  const char* named = std::getenv("FOVEAL_TEST_BACKEND");
  return named != nullptr ? std::vector<std::string>{named}
                          : std::vector<std::string>{"CPU_ATTN", "REFERENCE"};
}

TEST_P(SharedCases, Pass) {
  const char* folder = std::getenv("FOVEAL_SHARED_DIR");
  const auto path =
      std::filesystem::path(folder != nullptr ? folder : FOVEAL_SHARED_DIR) / "cases/cases.json";
  if (!std::filesystem::exists(path)) {
    GTEST_SKIP() << path << " is not there; set FOVEAL_SHARED_DIR";
  }
  const AttentionBackendPtr backend = BackendRegistry::global().get(GetParam());
  const bool serves_all = GetParam() == "CPU_ATTN" || GetParam() == "REFERENCE";
  int ran = 0;
  int refused = 0;
  for (const FileProblem& each : read_problems(path)) {
    SCOPED_TRACE(each.problem.name + " " + std::string(to_string(each.problem.spec.dtype)));
    ASSERT_TRUE(each.problem.expected_output && each.problem.expected_lse);
    const Solution exact = solve(each.problem);
    const Solution expected = expected_by_file(each.problem, exact);
    for (const CacheStyle style : {CacheStyle::nhd, CacheStyle::hnd, CacheStyle::padded}) {
      for (const std::int64_t num_splits : each.num_splits) {
        RunOptions options;
        options.cache = style;
        options.update_cache = style != CacheStyle::hnd;
        options.num_splits = num_splits;
        try {
          const RunResult result = run_problem(each.problem, *backend, options);
          EXPECT_EQ(compare(each.problem, result, expected).message, "");
          EXPECT_EQ(compare(each.problem, result, exact).message, "");
          ++ran;
        } catch (const Error& error) {
          if (serves_all || error.code() != ErrorCode::unsupported) {
            throw;
          }
          ++refused;
        }
      }
    }
  }
  EXPECT_GT(ran, 0);
  std::printf("%d runs, %d refused as unsupported\n", ran, refused);
}

INSTANTIATE_TEST_SUITE_P(Backends, SharedCases, ::testing::ValuesIn(backends()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace foveal::problem
