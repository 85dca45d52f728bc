#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "foveal/export.h"
#include "foveal/tensor.h"

namespace foveal {

/// Runs CPU work on several threads. The library has one on oneTBB; an engine with threads of its
/// own hands in its own.
class FOVEAL_API ThreadPool {
 public:
  using Task = std::function<void(std::int64_t index, int worker)>;

  virtual ~ThreadPool();
  /// Workers that parallel_for may use at once; `worker` is in [0, num_threads()).
  virtual int num_threads() const = 0;
  /// Calls task(i, worker) for every i in [0, count), returns when all are done. No two calls that
  /// run at the same time have the same worker number. An exception of a task is rethrown here.
  virtual void parallel_for(std::int64_t count, const Task& task) = 0;
};

/// A pool of `num_threads` threads (0: as many as the machine lets this process use).
FOVEAL_API std::shared_ptr<ThreadPool> make_thread_pool(int num_threads = 0);
/// The process-wide pool, made on first use.
FOVEAL_API ThreadPool& default_thread_pool();

/// Where a call runs; passed to every launch. All members may be left at their defaults.
struct ExecutionContext {
  ThreadPool* threads = nullptr;  ///< CPU backends; null is default_thread_pool().
  void* stream = nullptr;         ///< GPU backends: the caller's stream.
  /// Scratch of at least AttentionMetadata::workspace_bytes() bytes (u8), aligned to 64. Absent:
  /// the builder's own, which serves one forward at a time. On a GPU so does a plan, whatever the
  /// workspace: layers of one step follow each other in stream order.
  TensorView workspace{};

  ThreadPool& pool() const { return threads != nullptr ? *threads : default_thread_pool(); }
};

}  // namespace foveal
