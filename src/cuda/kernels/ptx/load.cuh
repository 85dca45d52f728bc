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

/// 16 bytes of shared memory, by address.
__device__ __forceinline__ uint4 load_shared(unsigned address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}
__device__ __forceinline__ void store_shared(unsigned address, const uint4& value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}
__device__ __forceinline__ float load_shared_float(unsigned address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_shared(unsigned address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
__device__ __forceinline__ void store_shared(unsigned address, unsigned short value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}
__device__ __forceinline__ void store_shared(unsigned address, unsigned char value) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(static_cast<unsigned>(value))
               : "memory");
}

}  // namespace ptx
