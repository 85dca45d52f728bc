#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "foveal/backend.h"
#include "foveal/selector.h"
#include "serving/attention_device.h"
#include "serving/model.h"
#include "serving/step_builder.h"
#include "serving/step_tensors.h"

namespace foveal::serving {

struct RunnerConfig {
  DeviceType device = DeviceType::cpu;  ///< Where attention runs and the KV cache lies.
  std::string backend;         ///< Id of the attention backend; empty leaves the choice free.
  std::optional<DType> dtype;  ///< Of attention; by default default_attention_dtype().
  std::optional<DType> kv_cache_dtype;  ///< By default attention's.
  std::int64_t block_size = 0;          ///< 0 is the backend's preferred one.
  std::int64_t num_blocks = 0;  ///< 0 is enough for max_num_seqs full sequences, up to 1 GiB.
  std::int64_t max_num_seqs = 0;
  std::int64_t max_num_tokens = 0;  ///< Most tokens a step.
  std::int64_t max_seq_len = 0;
  int num_threads = 0;  ///< 0 is all that the machine has.
};

/// What attention computes in when nobody says: f32 on the CPU, as everything else; f16 on CUDA,
/// where its 11 significant bits leave the greedy text of small models as it is.
DType default_attention_dtype(DeviceType device);

/// Runs a Llama-type decoder in float32 on the CPU, its attention by whichever backend the selector
/// chose, which may be on another device and in another dtype: then the rows of queries, keys and
/// values are rounded and copied there for each layer, and its output is copied back.
class ModelRunner {
 public:
  /// `model` outlives the runner. Throws what open_attention_device and select_backend throw,
  /// invalid_argument for sizes that contradict each other, and out_of_memory when the cache cannot
  /// be had.
  ModelRunner(const Model& model, const RunnerConfig& config);

  /// Logits [rows of step.logits_rows, vocab_size], good until the next call.
  std::span<const float> forward(const StepInput& step);

  std::int64_t block_size() const { return block_size_; }
  std::int64_t num_blocks() const { return num_blocks_; }
  std::int64_t cache_bytes() const { return cache_bytes_; }
  const AttentionMetadataBuilder& builder() const { return *builder_; }
  /// Why the backend is the one it is.
  const SelectionReport& selection() const { return selection_; }
  const AttentionDevice& device() const { return *device_; }
  int num_threads() const { return threads_->num_threads(); }

 private:
  struct Layer {
    const LayerWeights* weights;
    std::unique_ptr<AttentionImpl> attention;
    KVCacheView cache;
  };

  void embed(const StepInput& step);
  void rope_tables(const StepInput& step);
  void attention(const Layer& layer, const AttentionMetadata& plan, std::int64_t num_tokens);
  void feed_forward(const Layer& layer, std::int64_t num_tokens);

  const Model& model_;
  const ModelConfig& config_;
  std::shared_ptr<ThreadPool> threads_;
  std::unique_ptr<AttentionDevice> device_;
  ExecutionContext context_;
  SelectionReport selection_;
  std::int64_t block_size_ = 0;
  std::int64_t num_blocks_ = 0;
  std::int64_t cache_bytes_ = 0;
  std::unique_ptr<AttentionMetadataBuilder> builder_;
  std::optional<StepTensors> tensors_;
  std::vector<Layer> layers_;

  std::vector<float> rope_frequencies_;  ///< [head_size / 2]
  // Activations of one step, by the most tokens it may have.
  std::vector<float> hidden_;      ///< [tokens, hidden_size], the residual stream
  std::vector<float> normed_;      ///< [tokens, hidden_size]
  std::vector<float> qkv_;         ///< [tokens, (num_heads + 2·num_kv_heads)·head_size]
  std::vector<float> attended_;    ///< [tokens, num_heads·head_size]
  std::vector<float> gate_up_;     ///< [tokens, 2·intermediate_size]
  std::vector<float> activation_;  ///< [tokens, intermediate_size]
  std::vector<float> rope_cos_;    ///< [tokens, head_size / 2]
  std::vector<float> rope_sin_;
  std::vector<float> logits_;  ///< [max_num_seqs, vocab_size]
};

}  // namespace foveal::serving
