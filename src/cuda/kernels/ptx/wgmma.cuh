#pragma once

#include "ptx/convert.cuh"

// Matrix products of a warpgroup (sm_90a): 64 rows by kN columns, 16 deep (fp8: 32), float32
// accumulators, run asynchronously. Thread t of the group holds of every 8 columns n
//   d[4n], d[4n + 1]:     row 16·(t/32) + t%32/4, columns 8n + 2·(t%4) and the next
//   d[4n + 2], d[4n + 3]: 8 rows below
// and of an A operand in registers what mma.sync takes (mma.cuh) for the 16 rows of its warp.
namespace ptx {

/// An operand in shared memory whose rows are 128 bytes in the 128-byte swizzle that the copy
/// engine writes, eight rows one behind the other. One that is read across its rows goes on
/// kChunkBytes further when a row's 64 elements are used up.
template <int kChunkBytes>
struct MatrixAt {
  unsigned low;

  /// Aligned to 1024 bytes.
  explicit __device__ __forceinline__ MatrixAt(unsigned address)
      : low((address & 0x3FFFFU) >> 4 | static_cast<unsigned>(kChunkBytes >> 4) << 16) {
    // Else a loop's many descriptors would be computed before it and held in registers.
    asm volatile("" : "+r"(low));
  }
  /// `bytes` further on.
  __device__ __forceinline__ unsigned long long descriptor(int bytes) const {
    constexpr unsigned long long kSwizzle128 = 1ULL << 62;
    constexpr unsigned long long kEightRows = 1024ULL >> 4 << 32;
    return kSwizzle128 | kEightRows | (low + static_cast<unsigned>(bytes >> 4));
  }
};

/// Before the first product after registers that it uses were written by other instructions.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
/// Ends a group of products…
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// …and waits until at most kPending groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/// More or fewer registers for each thread of a warpgroup, which all its threads ask for.
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

/// Keeps the compiler from moving uses of the registers across the asynchronous products.
template <int kCount>
__device__ __forceinline__ void wgmma_touch(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" : "+f"(registers[i])::"memory");
  }
}
template <int kSteps>
__device__ __forceinline__ void wgmma_touch(unsigned (&registers)[kSteps][4]) {
#pragma unroll
  for (int i = 0; i < kSteps * 4; ++i) {
    asm volatile("" : "+r"(registers[i / 4][i % 4])::"memory");
  }
}

#define FOVEAL_D8(i)                                                                          \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define FOVEAL_D32(i) FOVEAL_D8(i), FOVEAL_D8(i + 8), FOVEAL_D8(i + 16), FOVEAL_D8(i + 24)
#define FOVEAL_N32                                                                             \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FOVEAL_N40 FOVEAL_N32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FOVEAL_N48 FOVEAL_N40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FOVEAL_N64 \
  FOVEAL_N48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FOVEAL_N96                                                                         \
  FOVEAL_N64                                                                               \
      ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FOVEAL_N128                                                                    \
  FOVEAL_N96                                                                           \
      ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, "   \
      "%109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, " \
      "%122, %123, %124, %125, %126, %127"

template <typename T, int kN>
struct Wgmma;

/// Wgmma<T, kN>::shared: both operands in shared memory, their rows along the 16. d += a·b, or a·b
///                       where not `add`.
/// Wgmma<T, kN>::registers: a in registers, b read across its rows, but along them where T is fp8.
///                          d += a·b.
/// `both` and `one` are how operands in shared memory are read, where there is a choice.
#define FOVEAL_WGMMA(type, name, depth, both, one, kN, numbers, r0, r1, r2, r3, r4, ...)         \
  template <>                                                                                    \
  struct Wgmma<type, kN> {                                                                       \
    static __device__ __forceinline__ void shared(float (&d)[kN / 2], unsigned long long a,      \
                                                  unsigned long long b, bool add) {              \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #r2                                  \
                   ", 0;\n"                                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #kN "k" depth ".f32." name "." name       \
                   " {" numbers "}, %" #r0 ", %" #r1 ", add, 1, 1" both ";\n}"                   \
                   : __VA_ARGS__                                                                 \
                   : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                \
    }                                                                                            \
    static __device__ __forceinline__ void registers(float (&d)[kN / 2], const unsigned (&a)[4], \
                                                     unsigned long long b) {                     \
      asm volatile(                                                                              \
          "{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\n"                                         \
          "wgmma.mma_async.sync.aligned.m64n" #kN "k" depth ".f32." name "." name " {" numbers   \
          "}, {%" #r0 ", %" #r1 ", %" #r2 ", %" #r3 "}, %" #r4 ", add, 1, 1" one ";\n}"          \
          : __VA_ARGS__                                                                          \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                 \
    }                                                                                            \
  };

#define FOVEAL_WGMMA_SIZES(type, name, depth, both, one)                                          \
  FOVEAL_WGMMA(type, name, depth, both, one, 64, FOVEAL_N32, 32, 33, 34, 35, 36, FOVEAL_D32(0))   \
  FOVEAL_WGMMA(type, name, depth, both, one, 80, FOVEAL_N40, 40, 41, 42, 43, 44, FOVEAL_D32(0),   \
               FOVEAL_D8(32))                                                                     \
  FOVEAL_WGMMA(type, name, depth, both, one, 96, FOVEAL_N48, 48, 49, 50, 51, 52, FOVEAL_D32(0),   \
               FOVEAL_D8(32), FOVEAL_D8(40))                                                      \
  FOVEAL_WGMMA(type, name, depth, both, one, 128, FOVEAL_N64, 64, 65, 66, 67, 68, FOVEAL_D32(0),  \
               FOVEAL_D32(32))                                                                    \
  FOVEAL_WGMMA(type, name, depth, both, one, 192, FOVEAL_N96, 96, 97, 98, 99, 100, FOVEAL_D32(0), \
               FOVEAL_D32(32), FOVEAL_D32(64))                                                    \
  FOVEAL_WGMMA(type, name, depth, both, one, 256, FOVEAL_N128, 128, 129, 130, 131, 132,           \
               FOVEAL_D32(0), FOVEAL_D32(32), FOVEAL_D32(64), FOVEAL_D32(96))

FOVEAL_WGMMA_SIZES(bf16, "bf16", "16", ", 0, 0", ", 1")
FOVEAL_WGMMA_SIZES(f16, "f16", "16", ", 0, 0", ", 1")
FOVEAL_WGMMA_SIZES(f8e4m3, "e4m3", "32", "", "")

#undef FOVEAL_WGMMA_SIZES
#undef FOVEAL_WGMMA

}  // namespace ptx
