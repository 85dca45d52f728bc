#pragma once

#include <cstdint>

#include "foveal/execution.h"
#include "serving/model.h"

namespace foveal::serving {

/// y[m, rows] = x[m, cols] · Wᵀ, or y += with `accumulate`; all row-major without gaps. The bits of
/// the result do not depend on the number of threads.
void linear(const float* x, std::int64_t m, const Matrix& weight, float* y, bool accumulate,
            ThreadPool& threads);

}  // namespace foveal::serving
