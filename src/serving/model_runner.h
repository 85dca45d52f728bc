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
#include "serving/model.h"
#include "serving/step_builder.h"

namespace foveal::serving {

struct RunnerConfig {
  std::string backend;  ///< Id of the attention backend; empty leaves the choice free.
  std::optional<DType> kv_cache_dtype;  ///< By default float32, as everything else.
  std::int64_t block_size = 0;          ///< 0 is the backend's preferred one.
  std::int64_t num_blocks = 0;  ///< 0 is enough for max_num_seqs full sequences, up to 1 GiB.
  std::int64_t max_num_seqs = 0;
  std::int64_t max_num_tokens = 0;  ///< Most tokens a step.
  std::int64_t max_seq_len = 0;
  int num_threads = 0;  ///< 0 is all that the machine has.
};

/// Runs a Llama-type decoder in float32 on the CPU, its attention by whichever backend the selector
/// chose.
class ModelRunner {
 public:
  /// `model` outlives the runner. Throws what select_backend throws, invalid_argument for sizes
  /// that contradict each other, and out_of_memory when the cache cannot be had.
  ModelRunner(const Model& model, const RunnerConfig& config);

  /// Logits [rows of step.logits_rows, vocab_size], good until the next call.
  std::span<const float> forward(const StepInput& step);

  std::int64_t block_size() const { return block_size_; }
  std::int64_t num_blocks() const { return num_blocks_; }
  std::int64_t cache_bytes() const { return cache_bytes_; }
  const AttentionMetadataBuilder& builder() const { return *builder_; }
  /// Why the backend is the one it is.
  const SelectionReport& selection() const { return selection_; }
  int num_threads() const { return threads_->num_threads(); }

 private:
  struct Free {
    void operator()(std::byte* memory) const;
  };
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
  ExecutionContext context_;
  SelectionReport selection_;
  std::int64_t block_size_ = 0;
  std::int64_t num_blocks_ = 0;
  std::int64_t cache_bytes_ = 0;
  std::unique_ptr<AttentionMetadataBuilder> builder_;
  std::unique_ptr<std::byte[], Free> cache_;
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
