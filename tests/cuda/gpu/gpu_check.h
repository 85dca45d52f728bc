#pragma once

#include "cuda/jit.h"

namespace foveal::cuda::gpu_check {

/// out[i] = factor · in[i].
KernelKey scale_key(int factor, int device);
/// Copies a 2-D box through a tensor map, shared memory and back.
KernelKey tensor_map_key(int device);
/// Each block writes the number of blocks of its cluster.
KernelKey cluster_key(int device);

void scale(float* out, const float* in, int count, int factor, Stream stream, int device, Jit& jit);

}  // namespace foveal::cuda::gpu_check
