#pragma once

#include "foveal/backend.h"

namespace foveal::cpu {

/// See ops.h, which checks the arguments.
void merge_attn_states(const AttentionPart& result, const AttentionPart& a, const AttentionPart& b,
                       const ExecutionContext& context);

}  // namespace foveal::cpu
