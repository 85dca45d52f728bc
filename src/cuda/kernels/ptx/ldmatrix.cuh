#pragma once

// Four 8×8 matrices of 16-bit elements from shared memory into the fragments of mma.sync. Lane l
// gives the address of row l % 8 of matrix l / 8; each row is 16 bytes. Lane l receives elements
// (l / 4, 2·(l % 4)) and the next of each matrix.
namespace ptx {

__device__ __forceinline__ void ldmatrix_x4(unsigned (&fragment)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}

/// As above, each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&fragment)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}

}  // namespace ptx
