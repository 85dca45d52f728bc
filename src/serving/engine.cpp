#include "serving/engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "core/check.h"
#include "serving/sampler.h"

namespace foveal::serving {
namespace {

std::int64_t resolve_max_seq_len(const Model& model, const EngineConfig& config) {
  return config.max_seq_len != 0 ? config.max_seq_len : model.config.max_seq_len;
}

RunnerConfig runner_config(const Model& model, const EngineConfig& config) {
  return {.device = config.device,
          .backend = config.backend,
          .dtype = config.dtype,
          .kv_cache_dtype = config.kv_cache_dtype,
          .block_size = config.block_size,
          .num_blocks = config.num_blocks,
          .max_num_seqs = config.max_num_seqs,
          .max_num_tokens = config.max_num_batched_tokens,
          .max_seq_len = resolve_max_seq_len(model, config),
          .num_threads = config.num_threads};
}

SchedulerConfig scheduler_config(const Model& model, const EngineConfig& config,
                                 const ModelRunner& runner) {
  return {.max_num_seqs = config.max_num_seqs,
          .max_num_batched_tokens = config.max_num_batched_tokens,
          .max_seq_len = resolve_max_seq_len(model, config),
          .reorder_threshold = runner.builder().reorder_threshold().value_or(1),
          .stop_tokens = config.stop_tokens};
}

bool is_decode(const ScheduledRequest& scheduled) {
  const Request& request = *scheduled.request;
  return scheduled.num_tokens == 1 && scheduled.samples &&
         request.num_computed >= request.num_prompt_tokens;
}

}  // namespace

Engine::Engine(const Model& model, const EngineConfig& config)
    : config_(config),
      vocab_size_(model.config.vocab_size),
      runner_(model, runner_config(model, config)),
      pool_(runner_.num_blocks(), runner_.block_size()),
      scheduler_(scheduler_config(model, config, runner_), pool_),
      step_builder_(config.max_num_seqs, config.max_num_batched_tokens, runner_.block_size()) {}

std::int64_t Engine::add_request(std::vector<std::int32_t> prompt, const SamplingParams& sampling,
                                 TokenFn on_token) {
  for (const std::int32_t token : prompt) {
    check(token >= 0 && token < vocab_size_,
          "the prompt of request {} holds token {}; it must be in [0, vocab_size {})", next_id_,
          token, vocab_size_);
  }
  check(std::isfinite(sampling.temperature) && sampling.temperature >= 0.0F,
        "temperature of request {} was {}; it must be finite and at least 0", next_id_,
        sampling.temperature);
  auto entry = std::make_unique<Entry>();
  entry->on_token = std::move(on_token);
  Request& request = entry->request;
  request.id = next_id_;
  request.tokens = std::move(prompt);
  request.num_prompt_tokens = request.num_tokens();
  request.sampling = sampling;
  request.generator.seed(sampling.seed);
  scheduler_.add(request);
  stats_.prompt_tokens += request.num_prompt_tokens;
  entries_.emplace(next_id_, std::move(entry));
  return next_id_++;
}

bool Engine::step() {
  if (scheduler_.idle()) {
    return false;
  }
  const auto start = std::chrono::steady_clock::now();
  const ScheduledStep& step = scheduler_.schedule();
  const bool decode = std::ranges::all_of(step.requests, is_decode);
  const std::span<const float> logits = runner_.forward(step_builder_.build(step));

  events_.clear();
  std::size_t row = 0;
  for (const ScheduledRequest& scheduled : step.requests) {
    scheduler_.advance(scheduled);
    if (scheduled.samples) {
      Request& request = *scheduled.request;
      const auto vocab = static_cast<std::size_t>(vocab_size_);
      const std::int32_t token = sample(logits.subspan(row++ * vocab, vocab),
                                        request.sampling.temperature, request.generator);
      events_.push_back({request.id, token, scheduler_.append(request, token)});
    }
  }

  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  ++stats_.steps;
  stats_.generated_tokens += std::ssize(events_);
  (decode ? stats_.decode_tokens : stats_.prefill_tokens) += step.num_tokens;
  (decode ? stats_.decode_seconds : stats_.prefill_seconds) += seconds.count();

  // Callbacks come last, when the step is done, as they may add requests or throw.
  for (const TokenEvent& event : std::exchange(events_, {})) {
    const auto entry = entries_.find(event.request);
    const TokenFn on_token = event.finish == FinishReason::none
                                 ? entry->second->on_token
                                 : std::move(entry->second->on_token);
    if (event.finish != FinishReason::none) {
      entries_.erase(entry);
    }
    if (on_token) {
      on_token(event);
    }
  }
  return true;
}

EngineStats Engine::stats() const {
  EngineStats stats = stats_;
  stats.preemptions = scheduler_.num_preemptions();
  stats.peak_blocks = pool_.stats().peak_used;
  stats.prefix_hit_blocks = pool_.stats().hit_blocks;
  stats.prefix_hit_tokens = pool_.stats().hit_tokens;
  return stats;
}

}  // namespace foveal::serving
