#pragma once

// The softmax of sm90_forward.cu: over scores as wgmma leaves them, tile by tile.

#include "flash_attn/sm90_pipeline.cuh"
#include "flash_attn/softmax.cuh"
#include "ptx/convert.cuh"

namespace flash_attn {

struct Softmax {
  float maximum[kRows];  // Reference of the exponentials: a score the row has seen, or −inf.
  float sum[kRows];      // This thread's part.
  float factor[kRows];   // What the output is due to be multiplied with.

  /// Raises the maxima where a score exceeds them by more than the slack; whether any did.
  __device__ __forceinline__ bool raise(const Scores& scores, float slack, float scale) {
    // Two chains a row, and the rows side by side: one chain would be as long as the products.
    float seen[kRows][2];
#pragma unroll
    for (int n = 0; n < kBlockN / 8; ++n) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float score = scores[n * 4 + i * 2 + e];
          seen[i][e] = n == 0 ? score : fmaxf(seen[i][e], score);
        }
      }
    }
    bool grown = false;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      seen[i][0] = fmaxf(seen[i][0], seen[i][1]);
      grown |= seen[i][0] > maximum[i] + slack;
    }
    if (!__any_sync(0xFFFFFFFFU, grown)) {
      return false;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float before = maximum[i];
      maximum[i] = fmaxf(before, quad_max(seen[i][0]));
      factor[i] = before == maximum[i] ? 1.0F : ptx::exp2_approx((before - maximum[i]) * scale);
      sum[i] *= factor[i];
    }
    return true;
  }

  /// score → 2^(score − maximum)
  __device__ __forceinline__ void exponentials(Scores& scores, float scale) {
    float offset[kRows];
    float sums[kRows][2] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      // A row that has seen nothing yet: its scores are −inf, also against any finite offset.
      offset[i] = maximum[i] == -kInfinity ? 0.0F : -maximum[i] * scale;
    }
#pragma unroll
    for (int n = 0; n < kBlockN / 8; ++n) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[n * 4 + i * 2 + e];
          score = ptx::exp2_approx(fmaf(score, scale, offset[i]));
          sums[i][e] += score;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      sum[i] += sums[i][0] + sums[i][1];
    }
  }

  /// Keeps the exponentials before what follows, beside the products under way: the compiler would
  /// rather have them behind the wait for those. It cannot know that all lanes are active, so the
  /// barrier seems to depend on the sums.
  __device__ __forceinline__ void hold() const {
    __syncwarp(__activemask() | __float_as_uint(sum[0]) | __float_as_uint(sum[1]));
  }

  __device__ __forceinline__ void rescale(Sums& output) const {
#pragma unroll
    for (int n = 0; n < kHeadSizeV / 2; ++n) {
      output[n] *= factor[n / 2 % 2];
    }
  }
};

__device__ __forceinline__ void pack_weights(Weights& weights, const Scores& scores) {
#pragma unroll
  for (int k = 0; k < kPSteps; ++k) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      // a[0], a[1]: first 8 keys, both rows; a[2], a[3]: the next 8.
      const int at = (2 * k + e / 2) * 4 + e % 2 * 2;
      weights[k][e] = ptx::pack<Weight>(scores[at], scores[at + 1]);
    }
  }
}

}  // namespace flash_attn
