#pragma once

// What the backends on the CPU share: the plan of a step, its workspace, and the run of one layer.

#include <cstdint>
#include <memory>

#include "cpu/attention_kernel.h"
#include "cpu/plan.h"
#include "foveal/backend.h"

namespace foveal::cpu {

/// Heads and sizes of the tensors attended to.
struct Geometry {
  std::int64_t num_kv_heads = 1;
  std::int64_t group_size = 1;
  std::int64_t head_size = 0;
  std::int64_t head_size_v = 0;
};

/// Those of a layer over its cache, or over plain keys and values. They differ for MLA: one KV head
/// of latents for all query heads in the cache, as many KV heads as query heads outside of it.
Geometry geometry_of(const AttentionSpec& spec, bool paged);

/// What the kernel can do, whichever backend runs it.
BackendCapabilities capabilities_of_kernel();

/// The workspace: partial outputs, their maxima and sums, then each thread's scratch.
struct WorkspaceLayout {
  std::int64_t partial_rows = 0;  ///< Of all KV heads.
  std::int64_t partial_stride = 0;
  std::int64_t scratch_floats = 0;  ///< A thread.
  int num_threads = 0;

  /// Sections begin at multiples of 16 floats, that is of 64 bytes.
  std::int64_t partial_max() const { return partial_rows * partial_stride; }
  std::int64_t partial_sum() const { return partial_max() + padded_size(partial_rows); }
  std::int64_t scratch() const { return partial_sum() + padded_size(partial_rows); }
  std::int64_t size_bytes() const {
    return (scratch() + scratch_floats * num_threads) * static_cast<std::int64_t>(sizeof(float));
  }
};

class Workspace;

/// The builder of a backend of any name.
class StepBuilder final : public AttentionMetadataBuilder {
 public:
  StepBuilder(const char* backend, const BuilderConfig& config)
      : AttentionMetadataBuilder(backend, config) {}

  bool use_cascade(const CascadeQuery& query) const override;

 private:
  AttentionMetadataPtr do_build(std::int64_t common_prefix_len,
                                const CommonAttentionMetadata& common, bool fast_build) override;

  std::shared_ptr<Workspace> workspace_;
};

/// Tensors of one call: plain keys and values have three dimensions, paged ones four. The scales
/// are 1 where a tensor is not fp8.
struct CallTensors {
  TensorView query;
  TensorView key;
  TensorView value;
  TensorView output;
  TensorView lse{};
  float key_scale = 1.0F;
  float value_scale = 1.0F;
};

/// Runs a layer on a plan of StepBuilder.
void attend(const AttentionSpec& spec, const CallTensors& tensors,
            const AttentionMetadata& metadata, const ExecutionContext& context);

}  // namespace foveal::cpu
