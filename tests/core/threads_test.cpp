#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <vector>

#include "foveal/execution.h"
#include "support/expect_error.h"

namespace foveal {
namespace {

TEST(ThreadPool, RunsEveryIndexOnceWithAWorkerOfItsOwn) {
  for (const int threads : {1, 2, 5}) {
    const auto pool = make_thread_pool(threads);
    EXPECT_EQ(pool->num_threads(), threads);
    std::vector<int> runs(1000);
    std::vector<std::atomic<int>> busy(static_cast<std::size_t>(threads));
    pool->parallel_for(1000, [&](std::int64_t i, int worker) {
      ASSERT_GE(worker, 0);
      ASSERT_LT(worker, threads);
      EXPECT_EQ(busy[static_cast<std::size_t>(worker)]++, 0);
      ++runs[static_cast<std::size_t>(i)];
      --busy[static_cast<std::size_t>(worker)];
    });
    EXPECT_EQ(runs, std::vector<int>(1000, 1));
    pool->parallel_for(0, [](std::int64_t, int) { FAIL(); });
  }
}

TEST(ThreadPool, PassesExceptionsOn) {
  EXPECT_THROW(default_thread_pool().parallel_for(10,
                                                  [](std::int64_t i, int) {
                                                    if (i == 7) {
                                                      throw std::runtime_error("seven");
                                                    }
                                                  }),
               std::runtime_error);
}

TEST(ThreadPool, RefusesNegativeThreads) {
  testing::expect_error(
      ErrorCode::invalid_argument, [] { make_thread_pool(-1); }, "num_threads is -1");
}

}  // namespace
}  // namespace foveal
