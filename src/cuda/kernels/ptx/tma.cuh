#pragma once

// Copies by the tensor memory access engine (sm_90), described by a tensor map that the host made.
namespace ptx {

/// As the driver's CUtensorMap; a `const __grid_constant__` parameter of the kernel.
struct alignas(128) TensorMap {
  unsigned long long opaque[16];
};

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// The box at these coordinates (innermost first) into shared memory; `barrier` gets its bytes, those
/// outside the tensor, which arrive as zeros, included.
__device__ __forceinline__ void tma_load(unsigned destination, const TensorMap& map,
                                         unsigned barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(destination),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

/// Orders this thread's ordinary accesses to shared memory before those of the copy engine and of
/// wgmma that follow.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace ptx
