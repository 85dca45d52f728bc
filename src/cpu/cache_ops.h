#pragma once

#include "foveal/execution.h"
#include "foveal/spec.h"
#include "foveal/tensor.h"

namespace foveal::cpu {

/// See ops.h, which checks the arguments.
void reshape_and_cache(const TensorView& key, const TensorView& value, const KVCacheView& kv_cache,
                       const TensorView& slot_mapping, const QuantScales& scales,
                       const ExecutionContext& context);

}  // namespace foveal::cpu
