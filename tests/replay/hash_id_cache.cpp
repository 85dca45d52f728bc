#include "hash_id_cache.h"

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <tuple>
#include <vector>

namespace foveal::replay::testing {
namespace {

/// Kind (0: of a hash id, 1: of one request), hash id or request, place in it.
using Content = std::tuple<int, std::uint64_t, std::int64_t>;

Content content_of(const TraceRequest& request, std::int64_t index, std::int64_t block,
                   std::int64_t block_size) {
  const std::int64_t begin = block * block_size;
  if (!request.hash_ids.empty() && begin + block_size <= request.input_length) {
    return {0, request.hash_ids.at(static_cast<std::size_t>(begin / kTokensPerHashId)),
            begin % kTokensPerHashId / block_size};
  }
  return {1, static_cast<std::uint64_t>(index), block};
}

/// Blocks by number. Free ones are taken in the order in which they became free.
class Blocks {
 public:
  explicit Blocks(std::int64_t count) : holders_(count, 0), contents_(count), freed_(count) {
    for (std::int64_t block = 0; block < count; ++block) {
      free_.emplace(freed_.at(block) = ++time_, block);
    }
  }

  std::int64_t num_free() const { return std::ssize(free_); }
  std::int64_t num_held() const { return std::ssize(holders_) - std::ssize(free_); }
  bool is_free(std::int64_t block) const { return holders_.at(block) == 0; }

  const std::int64_t* find(const Content& content) const {
    const auto found = known_.find(content);
    return found == known_.end() ? nullptr : &found->second;
  }
  void hold(std::int64_t block) {
    if (holders_.at(block)++ == 0) {
      free_.erase({freed_.at(block), block});
    }
  }
  std::int64_t take() {
    const std::int64_t block = free_.begin()->second;
    const auto known = known_.find(contents_.at(block));
    if (known != known_.end() && known->second == block) {
      known_.erase(known);
    }
    contents_.at(block) = {};
    hold(block);
    return block;
  }
  void fill(std::int64_t block, const Content& content) {
    contents_.at(block) = content;
    known_.try_emplace(content, block);
  }
  void give_back(std::vector<std::int64_t>& blocks) {
    for (; !blocks.empty(); blocks.pop_back()) {
      const std::int64_t block = blocks.back();
      if (--holders_.at(block) == 0) {
        free_.emplace(freed_.at(block) = ++time_, block);
      }
    }
  }

 private:
  std::int64_t time_ = 0;
  std::vector<std::int64_t> holders_;
  std::vector<Content> contents_;
  std::vector<std::int64_t> freed_;
  std::set<std::pair<std::int64_t, std::int64_t>> free_;
  std::map<Content, std::int64_t> known_;
};

struct Sequence {
  std::int64_t index = 0;
  const TraceRequest* request = nullptr;
  std::int64_t length = 0;  ///< Tokens known so far.
  std::int64_t computed = 0;
  std::int64_t filled = 0;  ///< Blocks whose content is known to the cache.
  std::vector<std::int64_t> blocks{};
  bool was_admitted = false;
};

std::int64_t rounded_up(std::int64_t tokens, std::int64_t block_size) {
  return (tokens + block_size - 1) / block_size;
}

}  // namespace

CacheCount count_hits(const Trace& trace, const CacheSettings& settings) {
  const std::int64_t size = settings.block_size;
  Blocks blocks(settings.num_blocks);
  std::vector<Sequence> sequences;
  for (std::int64_t i = 0; i < std::ssize(trace.requests); ++i) {
    const TraceRequest& request = trace.requests[static_cast<std::size_t>(i)];
    sequences.push_back({.index = i, .request = &request, .length = request.input_length});
  }
  std::deque<Sequence*> waiting;
  for (Sequence& sequence : sequences) {
    waiting.push_back(&sequence);
  }
  std::vector<Sequence*> running;
  CacheCount count;

  while (!waiting.empty() || !running.empty()) {
    std::int64_t budget = settings.max_num_batched_tokens;
    std::vector<std::pair<Sequence*, std::int64_t>> step;
    const auto take_part = [&](Sequence& s) {
      const std::int64_t tokens = std::min(s.length - s.computed, budget);
      while (std::ssize(s.blocks) < rounded_up(s.computed + tokens, size)) {
        s.blocks.push_back(blocks.take());
      }
      for (; (s.filled + 1) * size <= s.computed + tokens; ++s.filled) {
        blocks.fill(s.blocks.at(static_cast<std::size_t>(s.filled)),
                    content_of(*s.request, s.index, s.filled, size));
      }
      step.emplace_back(&s, tokens);
      budget -= tokens;
    };

    bool full = false;
    for (std::size_t i = 0; i < running.size(); ++i) {
      Sequence& s = *running[i];
      const std::int64_t end = s.computed + std::min(s.length - s.computed, budget);
      while (i < running.size() &&
             rounded_up(end, size) - std::ssize(s.blocks) > blocks.num_free()) {
        Sequence& newest = *running.back();
        running.pop_back();
        blocks.give_back(newest.blocks);
        newest.computed = newest.filled = 0;
        waiting.push_front(&newest);
        ++count.preemptions;
        full = true;
      }
      if (i < running.size()) {
        take_part(s);
      }
    }
    while (!full && budget > 0 && !waiting.empty() && std::ssize(running) < settings.max_num_seqs) {
      Sequence& s = *waiting.front();
      std::vector<std::int64_t> found;
      std::int64_t found_free = 0;
      // One token is left to compute.
      for (std::int64_t b = 0; (b + 1) * size < s.length; ++b) {
        const std::int64_t* block = blocks.find(content_of(*s.request, s.index, b, size));
        if (block == nullptr) {
          break;
        }
        found_free += blocks.is_free(*block) ? 1 : 0;
        found.push_back(*block);
      }
      if (rounded_up(s.length, size) - std::ssize(found) > blocks.num_free() - found_free) {
        break;
      }
      for (const std::int64_t block : found) {
        blocks.hold(block);
      }
      s.filled = std::ssize(found);
      s.computed = s.filled * size;
      s.blocks = std::move(found);
      count.cached_tokens += s.was_admitted ? 0 : s.computed;
      s.was_admitted = true;
      waiting.pop_front();
      running.push_back(&s);
      take_part(s);
    }
    ++count.steps;
    count.peak_blocks = std::max(count.peak_blocks, blocks.num_held());

    // Requests that end give their blocks back in the order of the batch: single tokens come first.
    std::stable_partition(step.begin(), step.end(),
                          [](const auto& part) { return part.second <= 1; });
    for (const auto& [s, tokens] : step) {
      s->computed += tokens;
      if (s->computed == s->length &&
          ++s->length == s->request->input_length + s->request->output_length) {
        blocks.give_back(s->blocks);
        std::erase(running, s);
      }
    }
  }
  return count;
}

std::int64_t count_hits_without_end(const Trace& trace, std::int64_t block_size) {
  std::set<std::vector<std::uint64_t>> prefixes;  // Of whole and partial ids, with their lengths.
  std::int64_t cached = 0;
  for (const TraceRequest& request : trace.requests) {
    std::vector<std::uint64_t> prefix;
    std::int64_t found = 0;
    bool known = true;
    for (std::size_t i = 0; i < request.hash_ids.size(); ++i) {
      const std::int64_t begin = static_cast<std::int64_t>(i) * kTokensPerHashId;
      prefix.push_back(request.hash_ids[i]);
      // Blocks of the id that are whole in this prompt, one after the other.
      for (std::int64_t end = begin + block_size;
           end <= std::min(begin + kTokensPerHashId, request.input_length); end += block_size) {
        prefix.push_back(static_cast<std::uint64_t>(end));
        const bool is_new = prefixes.insert(prefix).second;
        known = known && !is_new;
        found = known && end < request.input_length ? end : found;
        prefix.pop_back();
      }
    }
    cached += found;
  }
  return cached;
}

}  // namespace foveal::replay::testing
