#pragma once

namespace ptx {

/// A load that stays where it is written.
__device__ __forceinline__ int4 load_global(const int4* source) {
  int4 result;
  asm volatile("ld.global.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(result.x), "=r"(result.y), "=r"(result.z), "=r"(result.w)
               : "l"(source)
               : "memory");
  return result;
}

}  // namespace ptx
