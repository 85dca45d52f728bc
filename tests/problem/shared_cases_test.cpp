// The closed-form cases that live beside the repository, on the oracle. FOVEAL_SHARED_DIR names the
// folder that has cases/.

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "foveal/registry.h"
#include "problem/judge.h"
#include "problem/problem_file.h"

namespace foveal::problem {
namespace {

TEST(SharedCases, PassOnTheOracle) {
  const char* folder = std::getenv("FOVEAL_SHARED_DIR");
  const auto path =
      std::filesystem::path(folder != nullptr ? folder : FOVEAL_SHARED_DIR) / "cases/cases.json";
  if (!std::filesystem::exists(path)) {
    GTEST_SKIP() << path << " is not there; set FOVEAL_SHARED_DIR";
  }
  const AttentionBackendPtr reference = BackendRegistry::global().get("REFERENCE");
  for (const FileProblem& each : read_problems(path)) {
    SCOPED_TRACE(each.problem.name + " " + std::string(to_string(each.problem.spec.dtype)));
    ASSERT_TRUE(each.problem.expected_output && each.problem.expected_lse);
    const Solution exact = solve(each.problem);
    const Solution expected = expected_by_file(each.problem, exact);
    for (const CacheStyle style : {CacheStyle::nhd, CacheStyle::hnd, CacheStyle::padded}) {
      for (const bool update : {true, false}) {
        RunOptions options;
        options.cache = style;
        options.update_cache = update;
        options.num_splits = each.num_splits.back();
        const RunResult result = run_problem(each.problem, *reference, options);
        EXPECT_EQ(compare(each.problem, result, expected).message, "");
        EXPECT_EQ(compare(each.problem, result, exact).message, "");
      }
    }
  }
}

}  // namespace
}  // namespace foveal::problem
