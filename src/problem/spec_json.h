#pragma once

#include "problem/json_value.h"
#include "problem/problem.h"

namespace foveal::problem {

inline constexpr std::int64_t kMaxLength = 1 << 24;
inline constexpr std::int64_t kMaxBlockSize = 1 << 12;

/// The members that describe a layer alike in both file formats, each optional: scale, causal,
/// attn_type, window, logits_soft_cap.
void read_layer_members(const JsonValue& json, AttentionProblem& problem);

}  // namespace foveal::problem
