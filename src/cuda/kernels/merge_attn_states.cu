// Two partial attentions of the same rows over different keys, by their natural-log LSEs: a warp a
// row and head. With kSinks the result also gets the sink, which the parts left out.

#include "cache_ops_params.cuh"
#include "config.cuh"
#include "flash_attn/params.cuh"
#include "flash_attn/softmax.cuh"
#include "ptx/convert.cuh"
#include "tile/types.cuh"

namespace merge {

using namespace config;
using foveal::cuda::MergeParams;
using foveal::cuda::MergePart;
using foveal::cuda::flash_attn::HeadValues;

using Output = tile::TypeOf<kQueryType>::type;
constexpr int kThreads = 256;

/// Of a part: 2^(lse − maximum), 0 for an empty one (−inf or +inf).
__device__ __forceinline__ float weight_of(float lse, bool empty, float maximum) {
  return empty ? 0.0F : ptx::exp2_approx((lse - maximum) * flash_attn::kLog2E);
}

__device__ __forceinline__ float weighted(float weight, const Output* part, int column) {
  return weight == 0.0F ? 0.0F : weight * ptx::to_float(part[column]);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    merge_attn_states(const __grid_constant__ MergeParams p,
                      const __grid_constant__ HeadValues<kHeadValues> heads) {
  const long long warp = (static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  const long long row = warp / p.num_heads;
  const int head = static_cast<int>(warp % p.num_heads);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (row >= p.num_rows) {
    return;
  }
  const auto lse_of = [&](const MergePart& part) -> float& {
    return part.lse[head * part.lse_head_stride + row * part.lse_row_stride];
  };
  const auto row_of = [&](const MergePart& part) {
    return static_cast<Output*>(part.output) + row * part.row_stride + head * part.head_stride;
  };
  const float lse_a = lse_of(p.a);
  const float lse_b = lse_of(p.b);
  const bool empty_a = fabsf(lse_a) == flash_attn::kInfinity;
  const bool empty_b = fabsf(lse_b) == flash_attn::kInfinity;
  const float maximum =
      empty_a ? (empty_b ? 0.0F : lse_b) : (empty_b ? lse_a : fmaxf(lse_a, lse_b));
  float weight_a = weight_of(lse_a, empty_a, maximum);
  float weight_b = weight_of(lse_b, empty_b, maximum);
  const float sum = weight_a + weight_b;
  float denominator = sum;
  if (kSinks) {
    denominator += ptx::exp2_approx(heads.sink[head] - maximum * flash_attn::kLog2E);
  }
  const float factor = sum == 0.0F ? 0.0F : 1.0F / denominator;
  weight_a *= factor;
  weight_b *= factor;

  const Output* a = row_of(p.a);
  const Output* b = row_of(p.b);
  Output* result =
      row_of(p.result);  // May be a or b: each lane reads its columns before it writes.
  for (int column = lane * kVector; column < kHeadSizeV; column += 32 * kVector) {
    Output out[kVector];
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      out[e] = ptx::from_float<Output>(weighted(weight_a, a, column + e) +
                                       weighted(weight_b, b, column + e));
    }
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      result[column + e] = out[e];
    }
  }
  if (lane == 0 && p.result.lse != nullptr) {
    lse_of(p.result) =
        sum == 0.0F ? -flash_attn::kInfinity : maximum + ptx::log2_approx(sum) * flash_attn::kLn2;
  }
}

}  // namespace merge
