#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>

#include "foveal/execution.h"

/// The small operations between the products, on one row each.
namespace foveal::serving {

/// out = x / rms(x) · weight.
void rms_norm(const float* x, const float* weight, std::int64_t size, float eps, float* out);

/// Rotates the pairs of each head in place by the row's angles [head_size / 2]; pairs are (2i,
/// 2i+1) when interleaved, else (i, i + head_size/2).
void rope(float* heads, std::int64_t num_heads, std::int64_t head_size, const float* cos,
          const float* sin, bool interleaved);

/// out[i] = silu(gate_up[i]) · gate_up[size + i].
void silu_and_mul(const float* gate_up, std::int64_t size, float* out);

/// Calls row(i) for all rows. One task takes several, and few rows are done here and now: waking
/// the pool takes longer than the work.
template <typename Row>
void for_rows(ThreadPool& threads, std::int64_t num_rows, const Row& row) {
  constexpr std::int64_t kRowsPerTask = 8;
  const auto task = [&](std::int64_t i, int) {
    const std::int64_t end = std::min((i + 1) * kRowsPerTask, num_rows);
    for (std::int64_t r = i * kRowsPerTask; r < end; ++r) {
      row(r);
    }
  };
  if (num_rows <= kRowsPerTask) {
    task(0, 0);
  } else {
    threads.parallel_for((num_rows + kRowsPerTask - 1) / kRowsPerTask, std::ref(task));
  }
}

}  // namespace foveal::serving
