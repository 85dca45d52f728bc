#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/jit.h"

// The bench's own kernels; a header, so that a test compiles them where there is no GPU.
namespace foveal::bench {

inline cuda::KernelKey read_sum_key(int compute_capability) {
  cuda::KernelKey key;
  key.source = "bench/read_sum.cu";
  key.entry = "read_sum";
  key.arch = cuda::arch_name(compute_capability);
  return key;
}

struct SoftmaxRows {
  cuda::KernelKey key;
  int threads = 0;
};

/// For rows of so many f16 or bf16 numbers: a thread takes vectors of 8, one where 1024 threads do.
inline SoftmaxRows softmax_rows(DType dtype, std::int64_t columns, int compute_capability) {
  const std::int64_t vectors = (columns + 7) / 8;
  SoftmaxRows result;
  result.threads = static_cast<int>(std::min<std::int64_t>(1024, (vectors + 31) / 32 * 32));
  result.key.source = "bench/softmax_rows.cu";
  result.key.entry = "softmax_rows";
  result.key.arch = cuda::arch_name(compute_capability);
  result.key.set("kType", dtype)
      .set("kThreads", result.threads)
      .set("kVectors", static_cast<int>((vectors + result.threads - 1) / result.threads));
  return result;
}

}  // namespace foveal::bench
