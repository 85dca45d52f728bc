#pragma once

// The block's barriers by number; 0 is that of __syncthreads.
namespace ptx {

/// Waits until kThreads threads, this one among them, have come to the barrier.
template <int kThreads>
__device__ __forceinline__ void barrier_sync(int number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(kThreads) : "memory");
}
/// Comes to the barrier without waiting.
template <int kThreads>
__device__ __forceinline__ void barrier_arrive(int number) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(kThreads) : "memory");
}
/// As barrier_sync; whether any of the threads says so.
template <int kThreads>
__device__ __forceinline__ bool barrier_or(int number, bool value) {
  int result;
  asm volatile(
      "{\n"
      ".reg .pred value, any;\n"
      "setp.ne.b32 value, %1, 0;\n"
      "barrier.cta.red.or.pred any, %2, %3, value;\n"
      "selp.b32 %0, 1, 0, any;\n"
      "}"
      : "=r"(result)
      : "r"(static_cast<int>(value)), "r"(number), "n"(kThreads)
      : "memory");
  return result != 0;
}

}  // namespace ptx
