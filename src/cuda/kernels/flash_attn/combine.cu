// Merges the partial results of tiles whose keys were split, and applies the sink: a warp a row,
// a lane four columns at a time.

#include "config.cuh"
#include "flash_attn/params.cuh"
#include "flash_attn/softmax.cuh"
#include "ptx/convert.cuh"
#include "tile/types.cuh"

namespace flash_attn {

using namespace config;
using namespace foveal::cuda::flash_attn;

using Output = tile::TypeOf<kQueryType>::type;
constexpr int kThreads = 128;

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFU, x, step));
  }
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    x += __shfl_xor_sync(0xFFFFFFFFU, x, step);
  }
  return x;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    flash_combine(const __grid_constant__ CombineParams p,
                  const __grid_constant__ HeadValues<kHeadValues> heads) {
  if (static_cast<int>(blockIdx.x) >= p.counts->combines) {
    return;
  }
  const CombineItem item = p.items[blockIdx.x];
  const int kv_head = static_cast<int>(blockIdx.y);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int rows = min(kBlockM, item.query_len * kGroup - item.first_row);
  const long long slot_rows = static_cast<long long>(gridDim.y) * kBlockM;
  const long long first = item.first_slot * slot_rows + kv_head * kBlockM;

  for (int row = static_cast<int>(threadIdx.x) / 32; row < rows; row += kThreads / 32) {
    const float* lse = p.partial_lse + first + row;
    float maximum = -kInfinity;
    for (int s = lane; s < item.num_slots; s += 32) {
      maximum = fmaxf(maximum, lse[s * slot_rows]);
    }
    maximum = warp_max(maximum);
    float sum = 0.0F;
    for (int s = lane; s < item.num_slots; s += 32) {
      const float part = lse[s * slot_rows];
      sum += part == -kInfinity ? 0.0F : ptx::exp2_approx(part - maximum);
    }
    sum = warp_sum(sum);

    const int packed = item.first_row + row;
    const long long token = item.query_start + packed / kGroup;
    const int head = kv_head * kGroup + packed % kGroup;
    float denominator = sum;
    if (kSinks && sum != 0.0F) {
      denominator += ptx::exp2_approx(heads.sink[head] - maximum);
    }
    const float factor = sum == 0.0F ? 0.0F : 1.0F / denominator;
    Output* output = static_cast<Output*>(p.output.data) + token * p.output.row_stride +
                     head * p.output.head_stride;
    for (int column = lane * 4; column < kHeadSizeV; column += 128) {
      const float* part = p.partial_output + (first + row) * kHeadSizeV + column;
      float4 out = {0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll 4
      for (int s = 0; s < item.num_slots; ++s) {
        const float end = lse[s * slot_rows];
        const auto v = *reinterpret_cast<const float4*>(part + s * slot_rows * kHeadSizeV);
        if (end != -kInfinity) {  // An empty part counts for nothing, whatever it holds.
          const float weight = ptx::exp2_approx(end - maximum) * factor;
          out.x += weight * v.x;
          out.y += weight * v.y;
          out.z += weight * v.z;
          out.w += weight * v.w;
        }
      }
      output[column] = ptx::from_float<Output>(out.x);
      output[column + 1] = ptx::from_float<Output>(out.y);
      output[column + 2] = ptx::from_float<Output>(out.z);
      output[column + 3] = ptx::from_float<Output>(out.w);
    }
    if (lane == 0 && p.lse != nullptr) {
      p.lse[head * p.lse_head_stride + token * p.lse_row_stride] =
          sum == 0.0F ? -kInfinity : (maximum + ptx::log2_approx(sum)) * kLn2;
    }
  }
}

}  // namespace flash_attn
