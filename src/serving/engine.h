#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "serving/block_pool.h"
#include "serving/model_runner.h"
#include "serving/request.h"
#include "serving/scheduler.h"
#include "serving/step_builder.h"

namespace foveal::serving {

struct EngineConfig {
  DeviceType device = DeviceType::cpu;  ///< Where attention runs; the rest runs on the CPU.
  std::string backend;         ///< Id of the attention backend; empty leaves the choice free.
  std::optional<DType> dtype;  ///< Of attention: by default f32 on the CPU, f16 on CUDA.
  std::optional<DType> kv_cache_dtype;  ///< By default attention's.
  std::int64_t block_size = 0;  ///< Tokens a cache block; 0 is the backend's preferred size.
  std::int64_t num_blocks = 0;  ///< Null block included; 0 is by max_num_seqs, up to 1 GiB.
  std::int64_t max_num_seqs = 16;
  std::int64_t max_num_batched_tokens = 256;
  std::int64_t max_seq_len = 0;  ///< 0 is the model's.
  int num_threads = 0;           ///< 0 is all that the machine has.
  std::vector<std::int32_t> stop_tokens;
};

/// One generated token, as it comes.
struct TokenEvent {
  std::int64_t request = 0;
  std::int32_t token = 0;
  FinishReason finish = FinishReason::none;  ///< When not none, it was the request's last.
};
using TokenFn = std::function<void(const TokenEvent&)>;

/// What the engine has done so far. Steps that compute any prompt token, or recompute one after a
/// preemption, count as prefill; the others, one token a request, as decode. The numbers of tokens
/// are kept by the same rule, so that a rate is tokens by the time of the steps that made them.
struct EngineStats {
  std::int64_t steps = 0;
  std::int64_t prompt_tokens = 0;     ///< Of all requests added.
  std::int64_t generated_tokens = 0;  ///< Of all requests.
  std::int64_t prefill_tokens = 0;    ///< Computed in prefill steps; cached ones are not.
  std::int64_t decode_tokens = 0;     ///< Computed, and so generated, in decode steps.
  double prefill_seconds = 0.0;
  double decode_seconds = 0.0;
  std::int64_t preemptions = 0;
  std::int64_t peak_blocks = 0;
  std::int64_t prefix_hit_blocks = 0;  ///< Those of requests resumed after a preemption included.
  std::int64_t prefix_hit_tokens = 0;

  double prefill_rate() const { return prefill_seconds > 0 ? prefill_tokens / prefill_seconds : 0; }
  double decode_rate() const { return decode_seconds > 0 ? decode_tokens / decode_seconds : 0; }
};

/// Serves requests together: schedule, lay the step out, run the model, draw tokens. For one
/// thread.
class Engine {
 public:
  /// `model` outlives the engine.
  Engine(const Model& model, const EngineConfig& config);

  /// Queues a prompt and returns the request's id: 0, 1, … `on_token` gets each token of it out of
  /// step(). Throws invalid_argument for a prompt that is empty, too long for max_seq_len or holds
  /// ids outside the vocabulary, and out_of_memory when the request can never fit into the cache.
  std::int64_t add_request(std::vector<std::int32_t> prompt, const SamplingParams& sampling,
                           TokenFn on_token);

  /// Runs one step; false when there was nothing to do. When a step throws, its requests' cache is
  /// incomplete, and the engine must not be used again.
  bool step();
  void run() {
    while (step()) {
    }
  }

  EngineStats stats() const;
  const ModelRunner& runner() const { return runner_; }

 private:
  struct Entry {
    Request request;
    TokenFn on_token;
  };

  EngineConfig config_;
  std::int64_t vocab_size_;
  ModelRunner runner_;
  BlockPool pool_;
  Scheduler scheduler_;
  StepBuilder step_builder_;
  std::unordered_map<std::int64_t, std::unique_ptr<Entry>> entries_;  ///< Unfinished requests.
  std::vector<TokenEvent> events_;
  std::int64_t next_id_ = 0;
  EngineStats stats_;
};

}  // namespace foveal::serving
