#pragma once

#include <algorithm>
#include <random>

#include "replay/geometry.h"
#include "replay/trace.h"

namespace foveal::replay::testing {

/// Two heads on one of 8: quick to attend with.
inline Geometry tiny_geometry() {
  AttentionSpec spec;
  spec.num_heads = 2;
  spec.num_kv_heads = 1;
  spec.head_size = 8;
  return {.name = "tiny", .about = "2/1 heads of 8", .layers = {spec}};
}

/// Requests that continue earlier ones' prompts, begin as they do, repeat them, or are new.
inline Trace branching_trace(std::int64_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&](std::uint64_t bound) {
    return static_cast<std::int64_t>(random() % bound);
  };
  Trace trace{.format = TraceFormat::mooncake, .requests = {}};
  std::uint64_t next_id = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    TraceRequest request{.line = i + 1, .arrival_s = 0.1 * static_cast<double>(i)};
    request.input_length = 1 + below(1600);
    request.output_length = 1 + below(24);
    if (i > 0 && below(4) > 0) {
      const TraceRequest& other = trace.requests[static_cast<std::size_t>(below(i))];
      if (below(3) == 0) {
        request.input_length = other.input_length;  // The same again.
        request.hash_ids = other.hash_ids;
      } else {
        // Ids of blocks that are whole in the other prompt; the last may be cut short here.
        const std::int64_t whole = other.input_length / kTokensPerHashId;
        request.hash_ids.assign(other.hash_ids.begin(), other.hash_ids.begin() + below(whole + 1));
      }
    }
    const std::int64_t ids = (request.input_length + kTokensPerHashId - 1) / kTokensPerHashId;
    request.hash_ids.resize(std::min<std::size_t>(request.hash_ids.size(), ids));
    while (std::ssize(request.hash_ids) < ids) {
      request.hash_ids.push_back(next_id++);
    }
    trace.requests.push_back(std::move(request));
  }
  return trace;
}

}  // namespace foveal::replay::testing
