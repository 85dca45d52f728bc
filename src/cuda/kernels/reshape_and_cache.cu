// New keys and values into the paged cache: a warp a token and head, kVector elements a lane at a
// time. fp8 caches get value / scale, saturated.

#include "cache_ops_params.cuh"
#include "config.cuh"
#include "ptx/convert.cuh"
#include "tile/types.cuh"

namespace cache_ops {

using namespace config;

using Source = tile::TypeOf<kQueryType>::type;
using Cache = tile::TypeOf<kCacheType>::type;
constexpr int kThreads = 256;

template <int kBytes>
struct Bits;
template <>
struct Bits<1> {
  using type = unsigned char;
};
template <>
struct Bits<2> {
  using type = unsigned short;
};
template <>
struct Bits<4> {
  using type = unsigned;
};
template <>
struct Bits<8> {
  using type = uint2;
};
template <>
struct Bits<16> {
  using type = uint4;
};
template <>
struct Bits<32> {
  struct type {
    uint4 low, high;
  };
};

template <typename C, typename S>
__device__ __forceinline__ void write_row(C* to, const S* from, int size, float scale) {
  using From = Bits<kVector* static_cast<int>(sizeof(S))>::type;
  using To = Bits<kVector* static_cast<int>(sizeof(C))>::type;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = lane * kVector; i < size; i += 32 * kVector) {
    const From in = *reinterpret_cast<const From*>(from + i);
    To out;
    if constexpr (sizeof(S) == sizeof(C)) {  // The same type, then.
      out = reinterpret_cast<const To&>(in);
    } else {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        reinterpret_cast<C*>(&out)[e] =
            ptx::from_float<C>(ptx::to_float(reinterpret_cast<const S*>(&in)[e]) / scale);
      }
    }
    *reinterpret_cast<To*>(to + i) = out;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    reshape_and_cache(const __grid_constant__ foveal::cuda::CacheWriteParams p) {
  const long long warp = (static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  const long long row = warp / p.num_heads;
  const int head = static_cast<int>(warp % p.num_heads);
  if (row >= p.num_slots_given) {
    return;
  }
  const long long slot = p.slots[row];
  if (slot < 0 || slot >= p.slots_in_cache) {
    return;
  }
  const long long block = slot / p.block_size;
  const long long token = slot % p.block_size;
  write_row(static_cast<Cache*>(p.key_cache) + block * p.key_block + token * p.key_token +
                head * p.key_cache_head,
            static_cast<const Source*>(p.key) + row * p.key_row + head * p.key_head, kHeadSize,
            p.key_scale);
  write_row(static_cast<Cache*>(p.value_cache) + block * p.value_block + token * p.value_token +
                head * p.value_cache_head,
            static_cast<const Source*>(p.value) + row * p.value_row + head * p.value_head,
            kHeadSizeV, p.value_scale);
}

}  // namespace cache_ops
