// The middle of naive attention: the softmax of each row of the scores, in place. A block a row,
// whose numbers stay in registers between the one read and the one write.

#include "config.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "tile/types.cuh"

namespace bench {

using namespace config;

using Number = tile::TypeOf<kType>::type;
static_assert(sizeof(Number) == 2);
constexpr int kVector = 8;  ///< Numbers in 16 bytes.
constexpr int kWarps = kThreads / 32;
constexpr float kLog2E = 1.4426950408889634F;

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7F800000U); }

template <bool kMaximum>
__device__ __forceinline__ float combine(float a, float b) {
  return kMaximum ? fmaxf(a, b) : a + b;
}

/// Over all threads of the block, to each of them. `shared` is not used by another call.
template <bool kMaximum>
__device__ __forceinline__ float reduce(float value, float (&shared)[kWarps]) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = combine<kMaximum>(value, __shfl_xor_sync(0xFFFFFFFFU, value, distance));
  }
  if (threadIdx.x % 32 == 0) {
    shared[threadIdx.x / 32] = value;
  }
  __syncthreads();
  float result = shared[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) {
    result = combine<kMaximum>(result, shared[warp]);
  }
  return result;
}

__device__ __forceinline__ void unpack(float (&numbers)[kVector], uint4 packed) {
  const unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    numbers[2 * i] = ptx::to_float(Number{static_cast<unsigned short>(words[i])});
    numbers[2 * i + 1] = ptx::to_float(Number{static_cast<unsigned short>(words[i] >> 16)});
  }
}

__device__ __forceinline__ uint4 pack(const float (&numbers)[kVector], float factor) {
  unsigned words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = ptx::pack<Number>(numbers[2 * i] * factor, numbers[2 * i + 1] * factor);
  }
  return {words[0], words[1], words[2], words[3]};
}

/// A row takes `stride` numbers in memory, a multiple of 8 and no less than `columns`; what stands
/// behind the columns becomes 0.
extern "C" __global__ void __launch_bounds__(kThreads)
    softmax_rows(void* scores, long long stride, int columns) {
  __shared__ float maxima[kWarps];
  __shared__ float sums[kWarps];
  auto* row = reinterpret_cast<uint4*>(static_cast<Number*>(scores) +
                                       static_cast<long long>(blockIdx.x) * stride);
  float numbers[kVectors][kVector];
  float maximum = -infinity();
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int vector = v * kThreads + static_cast<int>(threadIdx.x);
    const int column = vector * kVector;
    unpack(numbers[v], column < columns ? row[vector] : uint4{});
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      numbers[v][e] = column + e < columns ? numbers[v][e] : -infinity();
      maximum = fmaxf(maximum, numbers[v][e]);
    }
  }
  maximum = reduce<true>(maximum, maxima);
  float sum = 0.0F;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      numbers[v][e] = ptx::exp2_approx((numbers[v][e] - maximum) * kLog2E);
      sum += numbers[v][e];
    }
  }
  const float factor = 1.0F / reduce<false>(sum, sums);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int vector = v * kThreads + static_cast<int>(threadIdx.x);
    if (vector * kVector < columns) {
      row[vector] = pack(numbers[v], factor);
    }
  }
}

}  // namespace bench
