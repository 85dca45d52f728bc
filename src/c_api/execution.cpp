// Threads, builders and their plans.
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>

#include "c_api/convert.h"
#include "c_api/errors.h"
#include "c_api/handles.h"

using namespace foveal;
using namespace foveal::c_api;

namespace {

/// An engine's own threads, reached through C: exceptions of tasks travel around its frames.
class WrappedThreadPool final : public ThreadPool {
 public:
  WrappedThreadPool(int num_threads, foveal_parallel_for parallel_for, void* user_data)
      : num_threads_(num_threads), parallel_for_(parallel_for), user_data_(user_data) {}

  int num_threads() const override { return num_threads_; }

  void parallel_for(std::int64_t count, const Task& task) override {
    Call call{.task = &task, .num_threads = num_threads_};
    parallel_for_(user_data_, count, run_one, &call);
    if (call.failure) {
      std::rethrow_exception(call.failure);
    }
    check(call.calls == count, "parallel_for of the wrapped thread pool ran {} of {} tasks",
          call.calls.load(), count);
  }

 private:
  struct Call {
    const Task* task = nullptr;
    int num_threads = 0;
    std::atomic<std::int64_t> calls = 0;
    std::mutex mutex{};
    std::exception_ptr failure{};
  };

  static void run_one(void* task_data, std::int64_t index, std::int32_t worker) {
    Call& call = *static_cast<Call*>(task_data);
    ++call.calls;
    try {
      check(worker >= 0 && worker < call.num_threads,
            "parallel_for of the wrapped thread pool called a task as worker {}, it must be in "
            "[0, num_threads = {})",
            worker, call.num_threads);
      (*call.task)(index, worker);
    } catch (...) {
      const std::lock_guard lock(call.mutex);
      call.failure = std::current_exception();
    }
  }

  int num_threads_;
  foveal_parallel_for parallel_for_;
  void* user_data_;
};

foveal_metadata* new_metadata(const foveal_builder& builder, AttentionMetadataPtr metadata) {
  return new foveal_metadata{builder.backend, builder.builder, std::move(metadata)};
}

}  // namespace

foveal_status foveal_thread_pool_create(int32_t num_threads, foveal_thread_pool** out) {
  return guarded([&] {
    require("out", out);
    *out = new foveal_thread_pool{make_thread_pool(num_threads)};
  });
}

foveal_status foveal_thread_pool_wrap(int32_t num_threads, foveal_parallel_for parallel_for,
                                      void* user_data, foveal_thread_pool** out) {
  return guarded([&] {
    check(num_threads > 0, "num_threads is {}, it must be positive", num_threads);
    check(parallel_for != nullptr, "parallel_for is NULL, it must be given");
    require("out", out);
    *out = new foveal_thread_pool{
        std::make_shared<WrappedThreadPool>(num_threads, parallel_for, user_data)};
  });
}

void foveal_thread_pool_destroy(foveal_thread_pool* pool) { delete pool; }

foveal_status foveal_backend_make_builder(const foveal_backend* backend,
                                          const foveal_builder_config* config,
                                          foveal_builder** out) {
  return guarded([&] {
    const AttentionBackendPtr& made_by = require("backend", backend).backend;
    require("out", out);
    *out = new foveal_builder{made_by, made_by->make_builder(to_builder_config(config))};
  });
}

void foveal_builder_destroy(foveal_builder* builder) { delete builder; }

foveal_status foveal_builder_build(foveal_builder* builder, int64_t common_prefix_len,
                                   const foveal_step* step, bool fast_build,
                                   foveal_metadata** out) {
  return guarded([&] {
    require("builder", builder);
    require("out", out);
    *out = new_metadata(*builder,
                        builder->builder->build(common_prefix_len, to_common(step), fast_build));
  });
}

foveal_status foveal_builder_build_for_graph_capture(foveal_builder* builder,
                                                     const foveal_step* step,
                                                     foveal_metadata** out) {
  return guarded([&] {
    require("builder", builder);
    require("out", out);
    *out = new_metadata(*builder, builder->builder->build_for_graph_capture(to_common(step)));
  });
}

foveal_status foveal_builder_update_block_table(foveal_builder* builder,
                                                const foveal_metadata* metadata,
                                                const DLTensor* block_table,
                                                const DLTensor* slot_mapping,
                                                foveal_metadata** out) {
  return guarded([&] {
    require("builder", builder);
    require("out", out);
    *out = new_metadata(
        *builder, builder->builder->update_block_table(*require("metadata", metadata).metadata,
                                                       to_tensor("block_table", block_table),
                                                       to_tensor("slot_mapping", slot_mapping)));
  });
}

foveal_status foveal_builder_graph_support(const foveal_builder* builder, int32_t* out) {
  return guarded([&] {
    const GraphSupport support = require("builder", builder).builder->graph_support();
    require("out", out) = static_cast<std::int32_t>(support);
  });
}

foveal_status foveal_builder_reorder_threshold(const foveal_builder* builder, int64_t* out) {
  return guarded([&] {
    const auto threshold = require("builder", builder).builder->reorder_threshold();
    require("out", out) = threshold.value_or(-1);
  });
}

foveal_status foveal_builder_use_cascade(const foveal_builder* builder,
                                         const foveal_cascade_query* query, bool* out) {
  return guarded([&] {
    require("builder", builder);
    require("out", out);
    const foveal_cascade_query c = read_struct("query", query);
    for (const auto& [name, value] :
         {std::pair{"common_prefix_len", c.common_prefix_len}, std::pair{"num_reqs", c.num_reqs},
          std::pair{"num_tokens", c.num_tokens},
          std::pair{"context_parallel_size", c.context_parallel_size}}) {
      check(value >= 0, "query.{} is {}, it must not be negative", name, value);
    }
    *out = builder->builder->use_cascade(
        {.common_prefix_len = c.common_prefix_len,
         .num_reqs = c.num_reqs,
         .num_tokens = c.num_tokens,
         .single_token_queries = c.single_token_queries,
         .context_parallel_size = c.context_parallel_size == 0 ? 1 : c.context_parallel_size});
  });
}

void foveal_metadata_destroy(foveal_metadata* metadata) { delete metadata; }

foveal_status foveal_metadata_workspace_bytes(const foveal_metadata* metadata, int64_t* out) {
  return guarded([&] {
    const std::int64_t bytes = require("metadata", metadata).metadata->workspace_bytes();
    require("out", out) = bytes;
  });
}
