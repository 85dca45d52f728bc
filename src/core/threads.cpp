#include <tbb/global_control.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <memory>
#include <mutex>

#include "core/check.h"
#include "foveal/execution.h"

// ThreadSanitizer does not see inside libtbb, so it is told what parallel_for promises: what
// happened before the call happens before every task, and every task happens before its return.
#if defined(__SANITIZE_THREAD__)
#define FOVEAL_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define FOVEAL_TSAN 1
#endif
#endif
#ifdef FOVEAL_TSAN
extern "C" {
void __tsan_acquire(void* address);  // NOLINT(bugprone-reserved-identifier)
void __tsan_release(void* address);  // NOLINT(bugprone-reserved-identifier)
}
#endif

namespace foveal {
namespace {

void happens_before([[maybe_unused]] void* token) {
#ifdef FOVEAL_TSAN
  __tsan_release(token);
#endif
}

void happens_after([[maybe_unused]] void* token) {
#ifdef FOVEAL_TSAN
  __tsan_acquire(token);
#endif
}

/// oneTBB runs no more threads in all than the smallest live global_control says, by default what
/// the machine has. This raises the limit to what the largest pool asks for, so that a pool of more
/// threads than cores has them.
void raise_thread_limit(std::size_t num_threads) {
  static std::mutex mutex;
  static std::unique_ptr<tbb::global_control> limit;
  const auto kind = tbb::global_control::max_allowed_parallelism;
  const std::lock_guard lock(mutex);
  if (num_threads > tbb::global_control::active_value(kind)) {
    limit.reset();
    limit = std::make_unique<tbb::global_control>(kind, num_threads);
  }
}

class TbbThreadPool final : public ThreadPool {
 public:
  explicit TbbThreadPool(int num_threads) : arena_(num_threads) {
    raise_thread_limit(static_cast<std::size_t>(num_threads));
  }

  int num_threads() const override { return arena_.max_concurrency(); }

  void parallel_for(std::int64_t count, const Task& task) override {
    if (count <= 0) {
      return;
    }
    char started = 0;
    char finished = 0;
    happens_before(&started);
    arena_.execute([&] {
      // Tasks are coarse and unequal, so each index is stolen on its own.
      tbb::parallel_for(
          tbb::blocked_range<std::int64_t>(0, count, 1),
          [&](const tbb::blocked_range<std::int64_t>& range) {
            happens_after(&started);
            const int worker = tbb::this_task_arena::current_thread_index();
            for (std::int64_t i = range.begin(); i != range.end(); ++i) {
              task(i, worker);
            }
            happens_before(&finished);
          },
          tbb::simple_partitioner());
    });
    happens_after(&finished);
  }

 private:
  tbb::task_arena arena_;
};

}  // namespace

ThreadPool::~ThreadPool() = default;

std::shared_ptr<ThreadPool> make_thread_pool(int num_threads) {
  check(num_threads >= 0, "num_threads is {}, it must be >= 1, or 0 for all the machine has",
        num_threads);
  return std::make_shared<TbbThreadPool>(num_threads > 0 ? num_threads
                                                         : tbb::this_task_arena::max_concurrency());
}

ThreadPool& default_thread_pool() {
  static const std::shared_ptr<ThreadPool> pool = make_thread_pool();
  return *pool;
}

}  // namespace foveal
