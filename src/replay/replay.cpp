#include "replay/replay.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <random>
#include <unordered_map>

#include "bench/machine.h"
#include "core/check.h"
#include "replay/attention_stack.h"
#include "replay/row_check.h"
#include "replay/statistics.h"
#include "replay/synthetic.h"
#include "serving/block_pool.h"
#include "serving/scheduler.h"

namespace foveal::replay {
namespace {

using Clock = std::chrono::steady_clock;
using serving::ScheduledRequest;
using serving::ScheduledStep;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

void check_options(const Options& options) {
  check(options.num_layers >= 0 && options.num_layers <= 1024,
        "num_layers is {}, it must be from 0 to 1024", options.num_layers);
  check(options.device == DeviceType::cpu || options.device == DeviceType::cuda,
        "device is {}, accepted are cpu, cuda", to_string(options.device));
  check(!options.dtype || *options.dtype == DType::f32 || *options.dtype == DType::f16 ||
            *options.dtype == DType::bf16,
        "dtype is {}, accepted are f32, f16, bf16", to_string(options.dtype.value_or(DType::f32)));
  check(options.num_blocks == 0 || options.pool_gib == 0.0,
        "num_blocks is {} and pool_gib {}, only one of them may be given", options.num_blocks,
        options.pool_gib);
  check(options.num_blocks >= 0, "num_blocks is {}, it must be at least 0", options.num_blocks);
  check(options.pool_gib >= 0.0 && options.pool_gib <= 1e6,
        "pool_gib is {}, it must be from 0 to 1e6", options.pool_gib);
  check(options.max_num_seqs >= 1 && options.max_num_batched_tokens >= options.max_num_seqs &&
            options.max_num_batched_tokens <= 1 << 20,
        "max_num_seqs is {} and max_num_batched_tokens {}; there must be at least one request, a "
        "token for each, and at most {} tokens",
        options.max_num_seqs, options.max_num_batched_tokens, 1 << 20);
  check(options.max_requests >= 0, "max_requests is {}, it must be at least 0",
        options.max_requests);
  check(options.speed == 0.0 || (options.speed >= 1e-6 && options.speed <= 1e9),
        "speed is {}, it must be 0 or from 1e-6 to 1e9", options.speed);
  check(options.check_every >= 0, "check_every is {}, it must be at least 0", options.check_every);
}

/// The last token of an answer is never computed.
std::int64_t blocks_of(const TraceRequest& request, std::int64_t block_size) {
  return (request.total_length() - 1 + block_size - 1) / block_size;
}

/// A request on its way.
struct Active {
  serving::Request request;
  const TraceRequest* from = nullptr;
  bool admitted = false;  ///< Once at least.
};

class Replay {
 public:
  Replay(const Trace& trace, const Options& options)
      : options_(options),
        requests_(trace.requests.begin(), trace.requests.begin() + request_count(trace, options)),
        stack_(stack_config()),
        pool_(stack_.num_blocks(), stack_.block_size()),
        scheduler_(scheduler_config(), pool_),
        step_builder_(options_.max_num_seqs, options_.max_num_batched_tokens, stack_.block_size()) {
    report_.trace = trace.name;
    report_.format = trace.format;
    report_.requests = std::ssize(requests_);
    for (const TraceRequest& request : requests_) {
      if (blocks_of(request, stack_.block_size()) > pool_.num_usable()) {
        fail(ErrorCode::invalid_argument,
             "line {} of the trace is a request of {} tokens, which need {} blocks; the pool has "
             "{}. Give it more blocks or GiB, or replay only requests before this one",
             request.line, request.total_length(), blocks_of(request, stack_.block_size()),
             pool_.num_usable());
      }
      report_.prompt_tokens += request.input_length;
    }
  }

  Report run(const std::function<void(const Progress&)>& on_step) {
    const auto begin = Clock::now();
    while (next_ < std::ssize(requests_) || !scheduler_.idle()) {
      admit_arrivals();
      step();
      if (on_step) {
        on_step({.requests_done = next_ - std::ssize(active_),
                 .requests = report_.requests,
                 .steps = statistics_.num_steps(),
                 .computed_tokens = report_.computed_tokens,
                 .blocks = pool_.stats().used});
      }
    }
    report_.wall_seconds = seconds_since(begin);
    finish_report();
    return std::move(report_);
  }

 private:
  static std::ptrdiff_t request_count(const Trace& trace, const Options& options) {
    const std::int64_t count = std::ssize(trace.requests);
    return options.max_requests == 0 ? count : std::min(count, options.max_requests);
  }

  /// Puts what is chosen in place of defaults in options_ too, which the report shows.
  StackConfig stack_config() {
    StackConfig config;
    config.geometry = options_.geometry;
    if (options_.num_layers == 0) {
      options_.num_layers = std::ssize(options_.geometry.layers);
    }
    options_.dtype =
        options_.dtype.value_or(options_.device == DeviceType::cpu ? DType::f32 : DType::bf16);
    config.num_layers = options_.num_layers;
    config.device = options_.device;
    config.backend = options_.backend;
    config.dtype = *options_.dtype;
    config.kv_cache_dtype = options_.kv_cache_dtype;
    config.block_size = options_.block_size;
    for (const TraceRequest& request : requests_) {
      max_seq_len_ = std::max(max_seq_len_, request.total_length());
    }
    config.max_seq_len = max_seq_len_;
    config.max_num_seqs = options_.max_num_seqs;
    config.max_num_tokens = options_.max_num_batched_tokens;
    config.num_threads = options_.num_threads;
    config.num_blocks = [this](std::int64_t block_size, std::int64_t block_bytes,
                               std::int64_t device_bytes) {
      return 1 + pool_blocks(block_size, block_bytes, device_bytes);  // The null block.
    };
    return config;
  }

  std::int64_t pool_blocks(std::int64_t block_size, std::int64_t block_bytes,
                           std::int64_t device_bytes) const {
    constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() - 1;
    if (options_.num_blocks > 0) {
      return std::min(options_.num_blocks, kMost);
    }
    if (options_.pool_gib > 0.0) {
      const double blocks = options_.pool_gib * kGiB / static_cast<double>(block_bytes);
      return std::clamp<std::int64_t>(static_cast<std::int64_t>(blocks), 1, kMost);
    }
    std::int64_t wanted = 0;
    for (const TraceRequest& request : requests_) {
      wanted += blocks_of(request, block_size);
    }
    return std::min({std::max<std::int64_t>(device_bytes / 4 / block_bytes, 1), wanted, kMost});
  }

  serving::SchedulerConfig scheduler_config() const {
    serving::SchedulerConfig config;
    config.max_num_seqs = options_.max_num_seqs;
    config.max_num_batched_tokens = options_.max_num_batched_tokens;
    config.max_seq_len = max_seq_len_;
    config.reorder_threshold = stack_.reorder_threshold();
    return config;
  }

  /// Queues requests that have come, no more than one step can take: their tokens need memory.
  void admit_arrivals() {
    if (options_.speed > 0.0 && scheduler_.idle()) {
      clock_ = std::max(clock_, arrival(next_));
    }
    while (next_ < std::ssize(requests_) && scheduler_.num_waiting() < options_.max_num_seqs &&
           (options_.speed == 0.0 || arrival(next_) <= clock_)) {
      const TraceRequest& from = requests_[static_cast<std::size_t>(next_)];
      auto active = std::make_unique<Active>();
      active->from = &from;
      active->request.id = next_;
      active->request.tokens = prompt_tokens(from, next_);
      active->request.num_prompt_tokens = from.input_length;
      active->request.sampling.max_tokens = from.output_length;
      scheduler_.add(active->request);
      active_.emplace(next_++, std::move(active));
    }
  }

  double arrival(std::int64_t index) const {
    return requests_[static_cast<std::size_t>(index)].arrival_s / options_.speed;
  }

  /// The clock stands still while tensors are made and rows are checked.
  void step() {
    auto begin = Clock::now();
    const ScheduledStep& scheduled = scheduler_.schedule();
    const serving::StepInput& input = step_builder_.build(scheduled);
    double seconds = seconds_since(begin);
    if (scheduled.requests.empty()) {
      fail(ErrorCode::unsupported, "the scheduler made a step of no request with {} waiting",
           scheduler_.num_waiting());
    }
    count_hits(scheduled);
    stack_.fill(input);

    const bool checked =
        options_.check_every > 0 && statistics_.num_steps() % options_.check_every == 0;
    const std::int64_t layer = checked ? below(stack_.num_layers()) : 0;
    begin = Clock::now();
    stack_.run(input, layer);
    seconds += seconds_since(begin);

    if (checked) {
      check_row(scheduled, layer);
    }
    count_step(scheduled, seconds);
    clock_ += seconds;
    finish_step(scheduled);
  }

  void count_hits(const ScheduledStep& scheduled) {
    for (const ScheduledRequest& one : scheduled.requests) {
      Active& active = *active_.at(one.request->id);
      if (!active.admitted) {
        active.admitted = true;
        report_.cached_tokens += one.request->num_computed;
      }
    }
  }

  std::int64_t below(std::int64_t bound) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(bound));
  }

  /// Of a request drawn by lot, so that decodes are checked as often as long prompts.
  void check_row(const ScheduledStep& scheduled, std::int64_t layer) {
    const auto chosen = static_cast<std::size_t>(below(std::ssize(scheduled.requests)));
    std::int64_t row = 0;
    for (std::size_t i = 0; i < chosen; ++i) {
      row += scheduled.requests[i].num_tokens;
    }
    const ScheduledRequest& one = scheduled.requests[chosen];
    const std::int64_t offset = below(one.num_tokens);
    const std::int64_t position = one.request->num_computed + offset;
    const AttentionSpec& spec = stack_.spec(layer);
    const std::int64_t head = below(spec.num_heads);
    const std::string wrong =
        wrong_in_row(spec, stack_.rows(),
                     std::span(one.request->tokens).first(static_cast<std::size_t>(position + 1)),
                     head, stack_.output_row(row + offset, head));
    if (!wrong.empty()) {
      fail(ErrorCode::device,
           "{} computed a row wrongly in step {}: request {} (line {} of the trace), position {}, "
           "layer {}, head {}:\n{}",
           stack_.backend_names(), statistics_.num_steps(), one.request->id,
           active_.at(one.request->id)->from->line, position, layer, head, wrong);
    }
    ++report_.rows_checked;
  }

  void count_step(const ScheduledStep& scheduled, double seconds) {
    StepRecord record;
    record.begin_s = clock_;
    record.seconds = seconds;
    record.tokens = scheduled.num_tokens;
    record.blocks = pool_.stats().used;
    record.requests = std::ssize(scheduled.requests);
    record.decode = scheduled.num_tokens == record.requests;
    for (std::int64_t l = 0; l < stack_.num_layers(); ++l) {
      const AttentionSpec& spec = stack_.spec(l);
      const std::int64_t token_bytes =
          KVCacheSpec::from(spec, stack_.block_size()).page_size_bytes() / stack_.block_size();
      for (const ScheduledRequest& one : scheduled.requests) {
        std::int64_t keys = one.request->num_computed + one.num_tokens;
        if (spec.window.left >= 0) {
          keys = std::min(keys, spec.window.left + one.num_tokens);
        }
        record.kv_bytes += static_cast<double>(keys * token_bytes);
      }
    }
    statistics_.add(record);
    report_.computed_tokens += scheduled.num_tokens;
  }

  void finish_step(const ScheduledStep& scheduled) {
    for (const ScheduledRequest& one : scheduled.requests) {
      scheduler_.advance(one);
      if (!one.samples) {
        continue;
      }
      serving::Request& request = *one.request;
      const std::int64_t id = request.id;
      ++report_.generated_tokens;
      if (scheduler_.append(request, generated_token(id, request.num_generated())) !=
          serving::FinishReason::none) {
        active_.erase(id);
      }
    }
  }

  void finish_report() {
    options_.block_size = stack_.block_size();
    options_.num_blocks = pool_.num_usable();
    options_.num_threads = stack_.num_threads();
    report_.options = options_;
    report_.options.pool_gib =
        static_cast<double>(stack_.block_bytes()) * static_cast<double>(pool_.num_usable()) / kGiB;
    report_.machine =
        options_.device == DeviceType::cpu
            ? fmt::format("{}, {} threads", bench::processor_name(), stack_.num_threads())
            : stack_.device().describe();
    report_.backends = stack_.backend_names();
    report_.selection = stack_.selection();
    report_.block_bytes = stack_.block_bytes();
    report_.preemptions = scheduler_.num_preemptions();
    report_.peak_blocks = pool_.stats().peak_used;
    report_.clock_seconds = clock_;
    statistics_.summarize(report_);
  }

  Options options_;
  Report report_;
  std::vector<TraceRequest> requests_;
  std::int64_t max_seq_len_ = 0;
  AttentionStack stack_;
  serving::BlockPool pool_;
  serving::Scheduler scheduler_;
  serving::StepBuilder step_builder_;
  std::unordered_map<std::int64_t, std::unique_ptr<Active>> active_;
  std::int64_t next_ = 0;  ///< The first request not queued yet.
  double clock_ = 0.0;
  Statistics statistics_;
  std::mt19937_64 random_{1};  ///< Of the rows that are checked.
};

double rate(double amount, double seconds) { return seconds > 0.0 ? amount / seconds : 0.0; }

}  // namespace

double Report::hit_rate() const {
  return prompt_tokens > 0 ? static_cast<double>(cached_tokens) / static_cast<double>(prompt_tokens)
                           : 0.0;
}

double Report::tokens_per_second() const {
  return rate(static_cast<double>(computed_tokens), all.seconds);
}

double Report::generated_per_second() const {
  return rate(static_cast<double>(generated_tokens), all.seconds);
}

double Report::kv_gb_per_s() const { return rate(kv_bytes / 1e9, all.seconds); }

double Report::decode_kv_gb_per_s() const { return rate(decode_kv_bytes / 1e9, decode.seconds); }

Report run(const Trace& trace, const Options& options,
           const std::function<void(const Progress&)>& on_step) {
  check_options(options);
  return Replay(trace, options).run(on_step);
}

}  // namespace foveal::replay
