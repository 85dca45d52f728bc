#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "foveal/backend.h"
#include "problem/guarded_buffer.h"
#include "problem/problem.h"
#include "problem/run.h"

namespace foveal::problem {

using NamedViews = std::vector<std::pair<std::string, TensorView>>;

/// A tensor [rows, heads, size] with gaps between rows, in guarded memory.
struct RowTensor {
  RowTensor(std::string name, DType dtype, std::int64_t rows, std::int64_t heads, std::int64_t size,
            std::int64_t row_gap, double fill);

  /// Copies consecutive rows in, beginning with row `at`.
  void fill(std::int64_t at, const std::vector<double>& numbers, std::int64_t first,
            std::int64_t count);
  std::vector<double> read(std::int64_t rows) const;

  GuardedBuffer buffer;
  TensorView view;
  NamedViews names;
};

/// Which blocks of the pool each request has, and the tables made of them.
struct BlockPlan {
  BlockPlan(const AttentionProblem& problem, std::uint64_t seed);

  std::int64_t slot(const AttentionProblem& problem, std::int64_t request,
                    std::int64_t position) const;

  std::int64_t num_blocks = 0;
  std::vector<std::vector<std::int64_t>> blocks;
  /// [num_reqs, width], one column more than needed. Padding names blocks that no request has.
  std::vector<std::int32_t> table;
  std::int64_t width = 0;
};

/// Elements that a cache takes, and its keys and values in them.
struct CacheShape {
  std::int64_t elements = 0;
  std::function<KVCacheView(GuardedBuffer&)> view;
};

CacheShape cache_shape(const AttentionProblem& problem, const AttentionBackend& backend,
                       CacheStyle style, std::int64_t num_kernel_blocks,
                       std::int64_t kernel_block_size);

/// The paged cache: every slot holds the poison, until keys are written.
struct CacheMemory {
  CacheMemory(DType dtype, const CacheShape& shape, double poison);

  /// The stored key and value number `token` (of all requests') go to the slot; now, or expected of
  /// update_kv_cache.
  void write(const AttentionProblem& problem, std::int64_t token, std::int64_t slot);
  void expect(const AttentionProblem& problem, std::int64_t token, std::int64_t slot);

  GuardedBuffer buffer;
  KVCacheView view;
  NamedViews names;

 private:
  void put(const AttentionProblem& problem, std::int64_t token, std::int64_t slot, bool now);
};

}  // namespace foveal::problem
