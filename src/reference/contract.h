#pragma once

// What one score is and which keys a row sees: the oracle's whole definition of attention besides
// the softmax itself. The contract numbers are those of docs/contracts.md.

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "foveal/spec.h"

namespace foveal::reference {

/// Contracts 1 and 3: whether the row sees the key. Positions are absolute, so that causality is
/// bottom-right aligned by itself.
inline bool is_visible(const AttentionSpec& spec, bool causal, const ScoreIndex& at) {
  if (causal && at.key_position > at.query_position) {
    return false;
  }
  if (spec.window.left >= 0 && at.key_position < at.query_position - spec.window.left) {
    return false;
  }
  if (spec.window.right >= 0 && at.key_position > at.query_position + spec.window.right) {
    return false;
  }
  return !spec.mask_mod || spec.mask_mod(at);
}

/// Contracts 2 and 4: scale, then soft cap, then the user's score or ALiBi.
inline double score(const AttentionSpec& spec, double product, const ScoreIndex& at) {
  double result = product * static_cast<double>(spec.softmax_scale());
  if (spec.logits_soft_cap > 0.0F) {
    const double cap = spec.logits_soft_cap;
    result = cap * std::tanh(result / cap);
  }
  if (spec.score_mod) {
    return spec.score_mod(static_cast<float>(result), at);
  }
  if (!spec.alibi_slopes.empty()) {
    const double slope = spec.alibi_slopes[static_cast<std::size_t>(at.query_head)];
    result += slope * static_cast<double>(at.key_position - at.query_position);
  }
  return result;
}

}  // namespace foveal::reference
