#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "foveal/backend.h"

namespace foveal::reference {

/// One row and head of an attention over some of its keys, without the sink.
struct Part {
  std::vector<double> output;
  double lse;
};

/// Contract 6.
Part merge(const Part& a, const Part& b);

/// The tensors of a step, whatever layer they come from. Keys and values are [blocks, block size,
/// KV heads, head size]; plain ones are one block.
struct Tensors {
  TensorView query;
  TensorView key;
  TensorView value;
  TensorView output;
  TensorView lse;
  /// What the stored elements are multiplied by.
  double query_scale = 1.0;
  double key_scale = 1.0;
  double value_scale = 1.0;
  bool paged = false;
};

/// The oracle's plan: nothing but how many kernel blocks a block of the table stands for.
class ReferenceMetadata final : public AttentionMetadata {
 public:
  ReferenceMetadata(const char* backend, const BuilderConfig& config,
                    const CommonAttentionMetadata& common, std::int64_t common_prefix_len);

  std::int64_t kernel_blocks_per_block() const { return kernel_blocks_per_block_; }

 private:
  std::int64_t kernel_blocks_per_block_;
};

/// Attention of every row of the step, in float64. With a common prefix, in two parts that are
/// merged.
void attend(const AttentionSpec& spec, const Tensors& tensors, const ReferenceMetadata& metadata,
            ThreadPool& pool);

/// A tensor [tokens, heads, size] as one block of keys or values.
TensorView as_one_block(const TensorView& plain);

/// A tensor of entries that all heads share, with a dimension of one head before its last.
TensorView with_one_head(const TensorView& tensor);

/// The scale of a quantised tensor; 1 where it is not fp8 (contract 8).
double scale_of(const TensorView& tensor, float scale);

/// Element of a tensor at an index of as many numbers as it has dimensions.
double load(const TensorView& tensor, std::initializer_list<std::int64_t> index);
void store(const TensorView& tensor, std::initializer_list<std::int64_t> index, double value);

}  // namespace foveal::reference
