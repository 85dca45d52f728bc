#pragma once

namespace ptx {

/// Counts 0, 1 … last and then 0 again; returns what stood there before. Release and acquire among
/// all threads of the device.
__device__ __forceinline__ unsigned atomic_inc_acq_rel(unsigned* counter, unsigned last) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(last)
               : "memory");
  return before;
}

}  // namespace ptx
