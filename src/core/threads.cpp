#include <tbb/global_control.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <memory>
#include <mutex>

#include "core/check.h"
#include "foveal/execution.h"

#if defined(__SANITIZE_THREAD__)
#define FOVEAL_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define FOVEAL_TSAN 1
#endif
#endif

#ifdef FOVEAL_TSAN
#include <atomic>
#include <exception>
#include <thread>
#include <vector>
#endif

namespace foveal {
namespace {

#ifdef FOVEAL_TSAN

/// What builds for ThreadSanitizer use, which does not see the synchronisation inside libtbb: the
/// same promises kept by plain threads, so that every race it reports is one of ours.
class PlainThreadPool final : public ThreadPool {
 public:
  explicit PlainThreadPool(int num_threads) : num_threads_(num_threads) {}

  int num_threads() const override { return num_threads_; }

  void parallel_for(std::int64_t count, const Task& task) override {
    std::atomic<std::int64_t> next{0};
    std::exception_ptr failure;
    std::mutex mutex;
    const auto work = [&](int worker) {
      try {
        for (std::int64_t i = next++; i < count; i = next++) {
          task(i, worker);
        }
      } catch (...) {
        const std::lock_guard lock(mutex);
        failure = std::current_exception();
      }
    };
    std::vector<std::thread> threads;
    for (int worker = 1; worker < num_threads_; ++worker) {
      threads.emplace_back(work, worker);
    }
    work(0);
    for (std::thread& thread : threads) {
      thread.join();
    }
    if (failure) {
      std::rethrow_exception(failure);
    }
  }

 private:
  int num_threads_;
};
using DefaultThreadPool = PlainThreadPool;

#else

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
    arena_.execute([&] {
      // Tasks are coarse and unequal, so each index is stolen on its own.
      tbb::parallel_for(
          tbb::blocked_range<std::int64_t>(0, count, 1),
          [&](const tbb::blocked_range<std::int64_t>& range) {
            const int worker = tbb::this_task_arena::current_thread_index();
            for (std::int64_t i = range.begin(); i != range.end(); ++i) {
              task(i, worker);
            }
          },
          tbb::simple_partitioner());
    });
  }

 private:
  tbb::task_arena arena_;
};
using DefaultThreadPool = TbbThreadPool;

#endif

}  // namespace

ThreadPool::~ThreadPool() = default;

std::shared_ptr<ThreadPool> make_thread_pool(int num_threads) {
  constexpr int kMost = 4096;
  check(num_threads >= 0 && num_threads <= kMost,
        "num_threads is {}, it must be in [1, {}], or 0 for all the machine has", num_threads,
        kMost);
  return std::make_shared<DefaultThreadPool>(
      num_threads > 0 ? num_threads : tbb::this_task_arena::max_concurrency());
}

ThreadPool& default_thread_pool() {
  static const std::shared_ptr<ThreadPool> pool = make_thread_pool();
  return *pool;
}

}  // namespace foveal
