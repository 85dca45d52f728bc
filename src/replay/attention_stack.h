#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "foveal/backend.h"
#include "foveal/selector.h"
#include "replay/geometry.h"
#include "replay/synthetic.h"
#include "serving/attention_device.h"
#include "serving/step_builder.h"
#include "serving/step_tensors.h"

namespace foveal::replay {

inline constexpr double kGiB = 1 << 30;

struct StackConfig {
  Geometry geometry{};
  std::int64_t num_layers = 1;
  DeviceType device = DeviceType::cpu;
  std::string backend{};                  ///< Empty leaves the choice free.
  DType dtype = DType::f32;               ///< f32, f16 or bf16.
  std::optional<DType> kv_cache_dtype{};  ///< By default dtype.
  std::int64_t block_size = 0;            ///< 0 is the backend's preferred one.
  std::int64_t max_seq_len = 0;
  std::int64_t max_num_seqs = 0;
  std::int64_t max_num_tokens = 0;  ///< Most tokens a step.
  int num_threads = 0;              ///< 0 is all that the machine has.
  /// How many blocks the cache has, the null block included, given what one has in tokens and, over
  /// all layers, in bytes, and the bytes of memory that the device has.
  std::function<std::int64_t(std::int64_t block_size, std::int64_t block_bytes,
                             std::int64_t device_bytes)>
      num_blocks{};
};

/// Layers of attention and nothing between them: each has a cache of its own and gets the same
/// synthetic rows. Layers of MLA run forward_mqa for prompts too, as only that reads the cache.
class AttentionStack {
 public:
  /// Throws what open_attention_device and select_backend throw, and out_of_memory.
  explicit AttentionStack(const StackConfig& config);

  /// Puts the rows of the step's tokens on the device.
  void fill(const serving::StepInput& step);
  /// Plans the step, then writes to the cache and attends in every layer; returns when all is done.
  /// `last_layer` is run last, and its output is what output_row() reads.
  void run(const serving::StepInput& step, std::int64_t last_layer);
  std::vector<double> output_row(std::int64_t row, std::int64_t head);

  const AttentionSpec& spec(std::int64_t layer) const { return kind_of(layer).spec; }
  const SyntheticRows& rows() const { return rows_; }
  std::int64_t num_layers() const { return std::ssize(layers_); }
  std::int64_t block_size() const { return block_size_; }
  std::int64_t num_blocks() const { return num_blocks_; }
  std::int64_t block_bytes() const { return block_bytes_; }  ///< Over all layers.
  std::int64_t reorder_threshold() const;
  const serving::AttentionDevice& device() const { return *device_; }
  int num_threads() const { return threads_->num_threads(); }
  /// Why the backends are what they are, a line for each kind of layer, and what they run on.
  const std::string& selection() const { return selection_; }
  /// Their ids, each once.
  const std::string& backend_names() const { return backend_names_; }

 private:
  /// Layers of one spec share a plan.
  struct Kind {
    AttentionSpec spec;
    AttentionBackendPtr backend;
    std::unique_ptr<AttentionMetadataBuilder> builder{};
    AttentionMetadataPtr plan{};
  };
  struct Layer {
    std::unique_ptr<AttentionImpl> attention{};
    std::unique_ptr<MlaAttentionImpl> mla{};  ///< Instead.
    KVCacheView cache{};
    TensorView latents{};  ///< Instead, of MLA.
  };
  /// Rows of one width.
  struct Rows {
    std::int64_t width = 0;
    serving::AttentionDevice::Mirror memory{};
  };

  const Kind& kind_of(std::int64_t layer) const {
    return kinds_[static_cast<std::size_t>(layer) % kinds_.size()];
  }
  void choose_backends(const StackConfig& config);
  void make_layers(const StackConfig& config);
  Rows make_rows(std::int64_t width, std::int64_t num_tokens);
  TensorView view(const Rows& rows, std::int64_t num_tokens, std::int64_t heads) const;
  void run_layer(const Layer& layer, const Kind& kind, std::int64_t num_tokens) const;

  std::shared_ptr<ThreadPool> threads_;
  std::unique_ptr<serving::AttentionDevice> device_;
  ExecutionContext context_;
  DType dtype_;
  std::vector<Kind> kinds_;
  std::vector<Layer> layers_;
  std::string selection_;
  std::string backend_names_;
  std::int64_t block_size_ = 0;
  std::int64_t num_blocks_ = 0;
  std::int64_t block_bytes_ = 0;
  std::optional<serving::StepTables> tables_;
  SyntheticRows rows_;
  Rows query_;
  Rows key_;
  Rows value_;  ///< None for MLA, where values are a part of the keys.
  Rows output_;
};

}  // namespace foveal::replay
