#pragma once

#include <cstdint>

#include "foveal/execution.h"
#include "foveal/metadata.h"
#include "foveal/spec.h"
#include "foveal/tensor.h"
#include "serving/attention_device.h"

namespace foveal::serving {

/// The largest step.
struct StepLimits {
  std::int64_t num_seqs = 0;
  std::int64_t num_tokens = 0;
  std::int64_t blocks_per_seq = 0;
};

/// A step's tables on the device.
class StepTables {
 public:
  /// `device` outlives it.
  StepTables(AttentionDevice& device, const StepLimits& limits);

  /// The step with its tables on the device, good until the next call. On the CPU they stay where
  /// they are.
  CommonAttentionMetadata upload(const CommonAttentionMetadata& host);

 private:
  AttentionDevice& device_;
  std::int64_t bytes_ = 0;
  AttentionDevice::Mirror tables_;
};

/// Tensors of a step's attention calls where the backend wants them: on its device and in its
/// dtype. Rows of float32 on the CPU are taken as they are, with no copy.
class StepTensors {
 public:
  /// `device` outlives it. `spec.dtype` is f32, f16 or bf16.
  StepTensors(AttentionDevice& device, const AttentionSpec& spec, const StepLimits& limits);

  /// As StepTables::upload.
  CommonAttentionMetadata tables(const CommonAttentionMetadata& host) {
    return tables_.upload(host);
  }

  /// Rows [num_tokens, num_heads + 2·num_kv_heads, head_size] of `qkv`, good until the next call.
  TensorView upload_qkv(float* qkv, std::int64_t num_tokens, ThreadPool& threads);
  /// Where attention writes [num_tokens, num_heads, head_size]; download_output then brings it to
  /// `attended`.
  TensorView output(float* attended, std::int64_t num_tokens) const;
  void download_output(float* attended, std::int64_t num_tokens, ThreadPool& threads);

 private:
  AttentionDevice& device_;
  DType dtype_;
  std::int64_t num_heads_;
  std::int64_t num_qkv_heads_;
  std::int64_t head_size_;
  bool in_place_;  ///< float32 on the CPU.
  StepTables tables_;
  AttentionDevice::Mirror qkv_;
  AttentionDevice::Mirror output_;
};

}  // namespace foveal::serving
