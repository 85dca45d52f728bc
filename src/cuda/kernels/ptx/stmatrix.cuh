#pragma once

// Four 8×8 matrices of 16-bit elements from fragments into shared memory (sm_90): ldmatrix.cuh the
// other way round.
namespace ptx {

__device__ __forceinline__ void stmatrix_x4(unsigned address, const unsigned (&fragment)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
}

}  // namespace ptx
