#pragma once

// From products of queries and keys to scores, wherever a kernel holds them: `at(i, n, e)` is the
// score of this thread's row i against key 8·n + e of those that begin at `key`.

#include "flash_attn/rows.cuh"
#include "flash_attn/softmax.cuh"

namespace flash_attn {

// Scores are transformed before the maximum is taken; otherwise the scale is folded into the
// exponential. A scale that is not positive would turn the maximum around.
constexpr bool kTransform = kSoftCap || kAlibi || kSignedScale;
// The accumulators are rescaled only when a row's maximum has grown by more than this (base 2): p
// stays below 2^8, far inside float32 and f16, and the usual tile needs no rescaling at all.
constexpr float kSlack = 8.0F;

/// Row i of those of which a thread holds elements, counted from its first: two in every 16.
__device__ __forceinline__ int thread_row(int i) { return i / 2 * 16 + i % 2 * 8; }

/// Scale, soft cap and ALiBi, to scores in base 2.
template <int kRows, int kTiles, typename At>
__device__ __forceinline__ void transform_scores(At&& at, const ForwardParams& p,
                                                 const float (&slopes)[kRows], const Rows& rows,
                                                 int row, int key) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int position = kAlibi ? rows.position(row + thread_row(i)) : 0;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = at(i, n, e);
        score *= p.scale;
        if constexpr (kSoftCap) {
          score = soft_cap(score, p.soft_cap);
        }
        if constexpr (kAlibi) {
          score += slopes[i] * static_cast<float>(key + n * 8 + e - position);
        }
      }
    }
  }
}

/// Keys that a row does not see score −inf: chosen, never computed, whatever the score was.
template <int kRows, int kTiles, typename At>
__device__ __forceinline__ void mask_scores(At&& at, const Rows& rows, int row, int key) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int low = rows.low(row + thread_row(i)) - key;
    const int high = rows.high(row + thread_row(i)) - key;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (n * 8 + e >= high || n * 8 + e < low) {
          at(i, n, e) = -kInfinity;
        }
      }
    }
  }
}

}  // namespace flash_attn
