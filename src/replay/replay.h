#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "foveal/dtype.h"
#include "foveal/tensor.h"
#include "replay/geometry.h"
#include "replay/trace.h"

// Serves a trace with the engine's scheduler and block pool, on layers of attention alone.
// docs/replay.md says what is measured, and how.
namespace foveal::replay {

struct Options {
  Geometry geometry = find_geometry("llama-3-8b");
  std::int64_t num_layers = 0;  ///< 0 is one of each kind that the geometry has.
  DeviceType device = DeviceType::cpu;
  std::string backend{};                  ///< Empty leaves the choice free.
  std::optional<DType> dtype{};           ///< By default f32 on the CPU, bf16 on a GPU.
  std::optional<DType> kv_cache_dtype{};  ///< By default dtype.
  std::int64_t block_size = 0;            ///< 0 is the backend's preferred one.
  /// Blocks that requests may hold; 0: as many as pool_gib has room for.
  std::int64_t num_blocks = 0;
  /// Of the KV cache over all layers; 0 is a quarter of the device's memory, or what all requests
  /// would need together where that is less.
  double pool_gib = 0.0;
  std::int64_t max_num_seqs = 64;              ///< Requests a step.
  std::int64_t max_num_batched_tokens = 1024;  ///< Tokens a step.
  std::int64_t max_requests = 0;               ///< The first of the trace; 0 is all.
  /// 0: every request is there from the beginning. Else they come when the trace says, so many
  /// times as fast, on a clock that only steps and waiting for requests move.
  double speed = 0.0;
  std::int64_t check_every = 16;  ///< Steps; a row of each of these is checked. 0: none is.
  int num_threads = 0;            ///< 0 is all that the machine has.
};

/// Of step latencies, by the nearest rank; all 0 without steps.
struct Latencies {
  std::int64_t steps = 0;
  double p50_ms = 0.0;
  double p90_ms = 0.0;
  double p99_ms = 0.0;
  double max_ms = 0.0;
  double seconds = 0.0;  ///< Of all together.
};

/// Some steps that follow each other.
struct Interval {
  double begin_s = 0.0;  ///< On the replay's clock.
  double end_s = 0.0;
  std::int64_t steps = 0;
  double latency_p50_ms = 0.0;
  double latency_max_ms = 0.0;
  double blocks_mean = 0.0;
  std::int64_t blocks_max = 0;
  std::int64_t tokens = 0;
  std::int64_t running_max = 0;  ///< Requests.
};

struct Report {
  // What was run.
  std::string trace{};  ///< Its name.
  TraceFormat format{};
  Options options{};      ///< With what was chosen in place of defaults.
  std::string machine{};  ///< The device, and threads of the CPU.
  std::string backends{};
  std::string selection{};       ///< Why those backends.
  std::int64_t block_bytes = 0;  ///< Over all layers.

  std::int64_t requests = 0;  ///< Of the trace, served.
  std::int64_t prompt_tokens = 0;
  /// Tokens of prompts that were in the cache when their request was first admitted.
  std::int64_t cached_tokens = 0;
  std::int64_t generated_tokens = 0;
  std::int64_t computed_tokens = 0;  ///< Of prompts and answers, again after preemptions.
  std::int64_t preemptions = 0;
  std::int64_t peak_blocks = 0;
  std::int64_t rows_checked = 0;  ///< All of them right, or there were no report.
  double wall_seconds = 0.0;      ///< Making tensors and checking them included.
  double clock_seconds = 0.0;     ///< The steps, and with speed the waiting for requests.
  double kv_bytes = 0.0;          ///< Keys and values that rows see, each once a step and layer.
  double decode_kv_bytes = 0.0;   ///< Of those, in steps of single tokens.
  Latencies all{};
  Latencies decode{};   ///< Steps in which every request computes one token.
  Latencies prefill{};  ///< The others.
  std::vector<Interval> timeline{};

  double hit_rate() const;  ///< cached_tokens of prompt_tokens.
  double tokens_per_second() const;
  double generated_per_second() const;
  double kv_gb_per_s() const;
  double decode_kv_gb_per_s() const;
};

struct Progress {
  std::int64_t requests_done = 0;
  std::int64_t requests = 0;
  std::int64_t steps = 0;
  std::int64_t computed_tokens = 0;
  std::int64_t blocks = 0;
};

/// Throws invalid_argument for options out of range and for a request that the pool can never hold,
/// what select_backend and open_attention_device throw, and device, naming step, line, position,
/// layer and head, at the first row that is wrong.
Report run(const Trace& trace, const Options& options,
           const std::function<void(const Progress&)>& on_step = {});

/// For people.
std::string to_text(const Report& report);
/// docs/replay.md lists the fields.
std::string to_json(const Report& report);
/// One page that needs nothing else.
std::string to_html(const Report& report);

}  // namespace foveal::replay
