#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "serving/block_pool.h"
#include "serving/request.h"

namespace foveal::serving {

struct SchedulerConfig {
  std::int64_t max_num_seqs = 16;  ///< Requests a step.
  /// Tokens a step; at least max_num_seqs, so that no running request ever waits for a prompt.
  std::int64_t max_num_batched_tokens = 256;
  std::int64_t max_seq_len = 0;  ///< Positions a sequence may have.
  /// Requests with at most this many tokens in a step stand first in the batch.
  std::int64_t reorder_threshold = 1;
  std::vector<std::int32_t> stop_tokens;
};

/// What one request does in a step: its next `num_tokens` tokens are computed.
struct ScheduledRequest {
  Request* request = nullptr;
  std::int64_t num_tokens = 0;
  /// Whether these are the last of its tokens, so that the step gives the next one.
  bool samples = false;
};

struct ScheduledStep {
  std::vector<ScheduledRequest> requests;
  std::int64_t num_tokens = 0;
};

/// Continuous batching, first come, first served. Each step takes one token of every running
/// request and fills the rest of the token budget with pieces of prompts (chunked prefill). When
/// blocks run out, the newest running request gives its own back and waits at the head of the
/// queue, to be recomputed later; so the oldest always proceeds.
///
/// Blocks enter the prefix cache when the step that fills them is scheduled, not when it is done.
/// Requests that are admitted together share a prefix in that very step: in each layer all tokens'
/// keys and values are written to the cache before any row attends to them. This is sound because a
/// scheduled step is always run: preemption only ever takes requests that are not yet in the step,
/// and after one nobody is admitted.
class Scheduler {
 public:
  /// `pool` outlives the scheduler.
  Scheduler(SchedulerConfig config, BlockPool& pool);

  /// Queues a request, which stays where it is until it has finished. Throws invalid_argument for
  /// an empty prompt or one longer than max_seq_len, and out_of_memory when the pool is too small
  /// for it even alone.
  void add(Request& request);

  bool idle() const { return waiting_.empty() && running_.empty(); }
  std::int64_t num_waiting() const { return std::ssize(waiting_); }
  std::int64_t num_running() const { return std::ssize(running_); }
  std::int64_t num_preemptions() const { return num_preemptions_; }

  /// The next step. The reference is good until the next call, before which the step must have been
  /// run and each of its requests advanced.
  const ScheduledStep& schedule();
  /// After the step: its tokens are in the cache now.
  void advance(const ScheduledRequest& scheduled);
  /// Appends the token that the step gave. A request that it finishes gives its blocks back and is
  /// not referred to again.
  FinishReason append(Request& request, std::int32_t token);

 private:
  std::int64_t blocks_for(std::int64_t num_tokens) const;
  /// Tokens of a request that fit into the step so far.
  std::int64_t next_chunk(const Request& request) const;
  bool admit(Request& request);
  void preempt_newest();
  void add_to_step(Request& request);

  SchedulerConfig config_;
  BlockPool& pool_;
  std::deque<Request*> waiting_;
  /// In order of arrival, as only the newest leaves for the queue. Hence only the last can be
  /// inside its prompt: nobody was admitted behind it.
  std::vector<Request*> running_;
  ScheduledStep step_;
  std::int64_t num_preemptions_ = 0;
};

}  // namespace foveal::serving
