#include <exception>
#include <string>

#include "gpu_check.h"

// The kernels of the check, and a C function for PyTorch to call.
namespace foveal::cuda::gpu_check {
namespace {

KernelKey make_key(const char* name, const char* text, int device) {
  KernelKey key;
  key.source = std::string("gpu_check/") + name + ".cu";
  key.entry = name;
  key.arch = arch_name(device_properties(device).compute_capability);
  key.headers[key.source] = text;
  return key;
}

}  // namespace

KernelKey scale_key(int factor, int device) {
  return make_key("scale", R"(#include "config.cuh"
extern "C" __global__ void scale(float* out, const float* in, int count) {
  extern __shared__ float scratch[];  // Only to ask for much of it.
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (count < 0) out[0] = scratch[i];
  if (i < count) out[i] = config::kFactor * in[i];
}
)",
                  device)
      .set("kFactor", factor);
}

KernelKey cluster_key(int device) {
  return make_key("cluster", R"(
extern "C" __global__ void cluster(int* out) {
  int blocks;
  asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (threadIdx.x == 0) out[blockIdx.x] = blocks;
}
)",
                  device);
}

KernelKey tensor_map_key(int device) {
  return make_key("tensor_map", R"(
struct alignas(128) TensorMap { unsigned long long opaque[16]; };
extern "C" __global__ void tensor_map(const __grid_constant__ TensorMap map, float* out, int x,
                                      int y) {
  __shared__ alignas(128) float tile[8 * 32];
  __shared__ alignas(8) unsigned long long barrier;
  const unsigned tile_at = static_cast<unsigned>(__cvta_generic_to_shared(tile));
  const unsigned barrier_at = static_cast<unsigned>(__cvta_generic_to_shared(&barrier));
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier_at));
    asm volatile("fence.mbarrier_init.release.cluster;");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier_at), "r"(1024));
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4}], [%2];" ::"r"(tile_at),
        "l"(&map), "r"(barrier_at), "r"(x), "r"(y)
        : "memory");
  }
  __syncthreads();
  unsigned done = 0;
  while (!done) {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier_at)
        : "memory");
  }
  for (int i = threadIdx.x; i < 8 * 32; i += blockDim.x) out[i] = tile[i];
}
)",
                  device);
}

void scale(float* out, const float* in, int count, int factor, Stream stream, int device,
           Jit& jit) {
  const Kernel* kernel = jit.prepare(scale_key(factor, device), device);
  const ContextGuard guard(device);
  launch(*kernel,
         {.grid = {static_cast<unsigned>((count + 255) / 256)}, .block = {256}, .stream = stream},
         out, in, count);
}

}  // namespace foveal::cuda::gpu_check

/// Null when all went well, otherwise what did not. For ctypes.
extern "C" __attribute__((visibility("default"))) const char* foveal_gpu_check_scale(
    float* out, const float* in, int count, int factor, void* stream, int device);

const char* foveal_gpu_check_scale(float* out, const float* in, int count, int factor, void* stream,
                                   int device) {
  static thread_local std::string message;
  try {
    foveal::cuda::gpu_check::scale(out, in, count, factor, stream, device,
                                   foveal::cuda::Jit::global());
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}
