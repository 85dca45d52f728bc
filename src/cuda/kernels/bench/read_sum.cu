// Sums all of a large array: how fast memory can be read at all. Each thread leaves its own sum.

namespace bench {

constexpr int kThreads = 512;
/// Loads that a thread has under way at a time.
constexpr int kLoads = 8;

__device__ __forceinline__ unsigned sum_of(uint4 words) {
  return words.x + words.y + words.z + words.w;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    read_sum(const uint4* __restrict__ data, long long count, unsigned* sums) {
  const long long step = static_cast<long long>(gridDim.x) * kThreads;
  const long long thread = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
  unsigned sum = 0;
  long long i = thread;
  for (; i + (kLoads - 1) * step < count; i += kLoads * step) {
    uint4 words[kLoads];
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      words[load] = data[i + load * step];
    }
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      sum += sum_of(words[load]);
    }
  }
  for (; i < count; i += step) {
    sum += sum_of(data[i]);
  }
  sums[thread] = sum;
}

}  // namespace bench
