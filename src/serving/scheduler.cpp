#include "serving/scheduler.h"

#include <algorithm>
#include <span>
#include <utility>

#include "core/check.h"
#include "foveal/metadata.h"

namespace foveal::serving {

Scheduler::Scheduler(SchedulerConfig config, BlockPool& pool)
    : config_(std::move(config)), pool_(pool) {
  check(config_.max_num_seqs >= 1, "max_num_seqs was {}; it must be at least 1",
        config_.max_num_seqs);
  check(config_.max_num_batched_tokens >= config_.max_num_seqs,
        "max_num_batched_tokens was {}; it must be at least max_num_seqs, {}",
        config_.max_num_batched_tokens, config_.max_num_seqs);
  check(config_.max_seq_len >= 1, "max_seq_len was {}; it must be at least 1", config_.max_seq_len);
}

std::int64_t Scheduler::blocks_for(std::int64_t num_tokens) const {
  return (num_tokens + pool_.block_size() - 1) / pool_.block_size();
}

std::int64_t Scheduler::next_chunk(const Request& request) const {
  return std::min(request.num_tokens() - request.num_computed,
                  config_.max_num_batched_tokens - step_.num_tokens);
}

void Scheduler::add(Request& request) {
  check(request.num_tokens() >= 1,
        "the prompt of request {} has no tokens; it must have at least 1", request.id);
  check(request.num_tokens() <= config_.max_seq_len,
        "the prompt of request {} has {} tokens; it must have at most max_seq_len, {}", request.id,
        request.num_tokens(), config_.max_seq_len);
  check(request.sampling.max_tokens >= 1, "max_tokens of request {} was {}; it must be at least 1",
        request.id, request.sampling.max_tokens);
  // The last token generated is never computed. max_tokens may be huge, so no sum with it.
  const std::int64_t positions =
      request.num_tokens() +
      std::min(request.sampling.max_tokens - 1, config_.max_seq_len - request.num_tokens());
  if (blocks_for(positions) > pool_.num_usable()) {
    fail(ErrorCode::out_of_memory,
         "request {} may grow to {} tokens, which need {} blocks of {} tokens; the KV cache has {}",
         request.id, positions, blocks_for(positions), pool_.block_size(), pool_.num_usable());
  }
  waiting_.push_back(&request);
}

const ScheduledStep& Scheduler::schedule() {
  step_.requests.clear();
  step_.num_tokens = 0;

  bool preempted = false;
  for (std::size_t i = 0; i < running_.size(); ++i) {
    Request& request = *running_[i];
    const std::int64_t missing =
        blocks_for(request.num_computed + next_chunk(request)) - std::ssize(request.blocks);
    while (missing > pool_.num_free() && i < running_.size()) {
      preempt_newest();  // Perhaps this very request.
      preempted = true;
    }
    if (i < running_.size()) {
      add_to_step(request);
    }
  }
  while (!preempted && !waiting_.empty() && std::ssize(running_) < config_.max_num_seqs &&
         step_.num_tokens < config_.max_num_batched_tokens && admit(*waiting_.front())) {
    Request& request = *waiting_.front();
    waiting_.pop_front();
    running_.push_back(&request);
    add_to_step(request);
  }

  std::stable_partition(step_.requests.begin(), step_.requests.end(),
                        [&](const ScheduledRequest& scheduled) {
                          return scheduled.num_tokens <= config_.reorder_threshold;
                        });
  return step_;
}

/// Gives a waiting request the cached blocks that it begins with, if the rest of its tokens have
/// room too: a prompt that were begun without would soon be preempted.
bool Scheduler::admit(Request& request) {
  std::vector<std::int32_t> prefix = pool_.find_prefix(request.tokens);
  // Hits that nobody holds stand in the free list too.
  const std::int64_t revived = std::ranges::count_if(
      prefix, [&](std::int32_t block) { return pool_.ref_count(block) == 0; });
  if (blocks_for(request.num_tokens()) - std::ssize(prefix) > pool_.num_free() - revived) {
    return false;
  }
  pool_.acquire_prefix(prefix);
  request.num_computed = std::ssize(prefix) * pool_.block_size();
  request.num_cacheable_blocks = std::ssize(prefix);
  request.blocks = std::move(prefix);
  return true;
}

void Scheduler::preempt_newest() {
  Request& request = *running_.back();
  running_.pop_back();
  waiting_.push_front(&request);
  pool_.release(request.blocks);
  request.blocks.clear();
  request.num_computed = 0;
  request.num_cacheable_blocks = 0;
  ++num_preemptions_;
}

void Scheduler::add_to_step(Request& request) {
  const std::int64_t chunk = next_chunk(request);
  const std::int64_t end = request.num_computed + chunk;
  while (std::ssize(request.blocks) < blocks_for(end)) {
    request.blocks.push_back(pool_.allocate());
  }
  const std::int64_t block_size = pool_.block_size();
  for (; (request.num_cacheable_blocks + 1) * block_size <= end; ++request.num_cacheable_blocks) {
    const auto i = static_cast<std::size_t>(request.num_cacheable_blocks);
    const auto width = static_cast<std::size_t>(block_size);
    pool_.set_content(request.blocks[i],
                      i == 0 ? static_cast<std::int32_t>(kNullBlock) : request.blocks[i - 1],
                      std::span(request.tokens).subspan(i * width, width));
  }
  step_.requests.push_back({&request, chunk, end == request.num_tokens()});
  step_.num_tokens += chunk;
}

void Scheduler::advance(const ScheduledRequest& scheduled) {
  scheduled.request->num_computed += scheduled.num_tokens;
}

FinishReason Scheduler::append(Request& request, std::int32_t token) {
  request.tokens.push_back(token);
  if (std::ranges::find(config_.stop_tokens, token) != config_.stop_tokens.end()) {
    request.finish = FinishReason::stop;
  } else if (request.num_generated() >= request.sampling.max_tokens) {
    request.finish = FinishReason::max_tokens;
  } else if (request.num_tokens() > config_.max_seq_len) {
    request.finish = FinishReason::max_seq_len;
  }
  if (request.finish != FinishReason::none) {
    pool_.release(request.blocks);
    request.blocks.clear();
    std::erase(running_, &request);
  }
  return request.finish;
}

}  // namespace foveal::serving
