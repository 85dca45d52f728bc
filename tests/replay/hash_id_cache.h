#pragma once

#include <cstdint>

#include "replay/trace.h"

namespace foveal::replay::testing {

struct CacheCount {
  std::int64_t cached_tokens = 0;  ///< Found when their request was first admitted.
  std::int64_t preemptions = 0;
  std::int64_t steps = 0;
  std::int64_t peak_blocks = 0;
};

struct CacheSettings {
  std::int64_t block_size = 16;  ///< Divides 512.
  std::int64_t num_blocks = 0;
  std::int64_t max_num_seqs = 0;
  std::int64_t max_num_batched_tokens = 0;
};

/// What prefix caching finds in a trace, counted over the trace's own hash ids: no tokens, no
/// hashes and nothing of the engine. A block is known by the hash id it lies in and its place
/// there, or belongs to one request alone. Requests are all there from the beginning; the policy is
/// that of the scheduler's and the pool's documentation.
CacheCount count_hits(const Trace& trace, const CacheSettings& settings);

/// The same for a cache that never runs out of blocks, whatever runs beside what: tokens of leading
/// blocks that an earlier request has too.
std::int64_t count_hits_without_end(const Trace& trace, std::int64_t block_size);

}  // namespace foveal::replay::testing
