#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "bench/machine.h"
#include "bench/numbers.h"
#include "bench/shape.h"
#include "foveal/backend.h"

namespace foveal::bench {

/// Numbers by dtype and seed, made once a run.
class NumberStore {
 public:
  const Numbers& get(DType dtype, std::uint32_t seed);

 private:
  std::map<std::pair<DType, std::uint32_t>, Numbers> numbers_;
};

/// A shape with everything that a backend needs to run it, in the machine's memory: random numbers,
/// blocks in random order.
class Step {
 public:
  Step(Machine& machine, const Shape& shape, const AttentionBackend& backend, NumberStore& numbers);

  /// Plans the step, as a cascade where `common_prefix_len` is above 0; before forward().
  void build(std::int64_t common_prefix_len);
  void forward() const;
  /// So that a later error is not that of an earlier forward().
  void forget_output() const;
  void write_cache() const;
  void naive(void* scores) const;
  NaiveProblem naive_problem() const;
  std::int64_t workspace_bytes() const { return metadata_->workspace_bytes(); }

  // What came out of each of these against the same computed in double precision, for rows picked
  // all over the shape: the largest |difference| / |expected| of an output row, as vectors. The
  // cache must hold the very bits: infinity where it does not.
  double forward_error() const;
  double write_error() const;
  double naive_error() const;

 private:
  /// A row of queries and of the output, and where its keys and values lie.
  struct SampledRow {
    std::int64_t row = 0;
    std::int64_t num_keys = 0;
    std::function<std::int64_t(std::int64_t key)> key_at{};
    std::function<std::int64_t(std::int64_t key)> value_at{};
  };

  void make_table();
  template <typename T>
  TensorView upload(const std::vector<T>& values, DType dtype, std::vector<std::int64_t> shape);
  TensorView random_tensor(const Numbers& numbers, std::vector<std::int64_t> shape);
  std::shared_ptr<void> keep(std::int64_t bytes);
  void make_cache(const AttentionBackend& backend, NumberStore& numbers);
  std::int64_t slot(std::int64_t request, std::int64_t position) const;
  std::int64_t cache_offset(const TensorView& view, std::int64_t slot, std::int64_t kv_head) const;
  double row_error(const SampledRow& row) const;

  Machine& machine_;
  Shape s_;
  std::vector<std::shared_ptr<void>> memory_;
  std::unique_ptr<AttentionMetadataBuilder> builder_;
  std::unique_ptr<AttentionImpl> impl_;
  std::unique_ptr<MlaAttentionImpl> mla_impl_;  ///< Instead, for mla.
  AttentionMetadataPtr metadata_;

  // Host copies, which the common metadata names too.
  std::vector<std::int32_t> starts_, lens_, table_;
  std::int64_t width_ = 0;       ///< Blocks a request.
  std::int64_t num_blocks_ = 1;  ///< Of the cache, the null block included.
  CommonAttentionMetadata common_;
  /// Of mla's latent cache both views are the entries: a value is the beginning of its key.
  ForwardArgs args_;
  void* cache_ = nullptr;
  const Numbers* query_numbers_ = nullptr;
  const Numbers* key_numbers_ = nullptr;
  const Numbers* value_numbers_ = nullptr;
};

}  // namespace foveal::bench
