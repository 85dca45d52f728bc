#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "cuda/driver_api.h"

// A libcuda.so.1 for tests on machines without a GPU: one device of Hopper's figures, host memory
// for device memory, and launches that are only recorded. What goes wrong is chosen by environment:
//   FAKE_CUDA_VERSION=11080   FAKE_CUDA_NO_DEVICE=1   FAKE_CUDA_FAIL=cuMemAlloc_v2=2
using foveal::cuda::CaptureMode;
using foveal::cuda::DeviceAddress;
using foveal::cuda::DeviceAttribute;
using foveal::cuda::DriverLaunchConfig;
using foveal::cuda::FunctionAttribute;
using foveal::cuda::LaunchAttributeId;
using foveal::cuda::PointerAttribute;
using foveal::cuda::Stream;
using foveal::cuda::TensorMap;

namespace {

thread_local void* t_current = nullptr;
thread_local int t_depth = 0;
thread_local CaptureMode t_mode = CaptureMode::global;

/// What tests look at, through fake_state().
struct State {
  int loads = 0;
  int strict_loads = 0;  // Module loads while captures elsewhere would have been broken.
  int retains = 0;
  int launches = 0;
  int attributes = 0;
  unsigned cluster_x = 0;
  int flags = 0;
  unsigned grid_x = 0;
  int first_argument = 0;
};
State g_state;

int failure_of(const char* call) {
  const char* wanted = std::getenv("FAKE_CUDA_FAIL");
  const std::string prefix = std::string(call) + "=";
  return wanted != nullptr && std::string(wanted).starts_with(prefix)
             ? std::atoi(wanted + prefix.size())
             : 0;
}

template <typename T>
T handle(std::uintptr_t value) {
  return reinterpret_cast<T>(value);
}

}  // namespace

#define FAKE(name, ...)                                                    \
  extern "C" __attribute__((visibility("default"))) int name(__VA_ARGS__); \
  extern "C" __attribute__((visibility("default"))) int name(__VA_ARGS__)
#define FAIL_IF_ASKED(name) \
  if (const int error = failure_of(name); error != 0) return error

extern "C" __attribute__((visibility("default"))) State* fake_state();
extern "C" __attribute__((visibility("default"))) State* fake_state() { return &g_state; }

FAKE(cuGetErrorName, int error, const char** text) {
  *text = error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE";
  return 0;
}
FAKE(cuGetErrorString, int error, const char** text) {
  *text = error == 2 ? "out of memory" : "as the test asked";
  return 0;
}
FAKE(cuInit, unsigned) {
  FAIL_IF_ASKED("cuInit");
  return 0;
}
FAKE(cuDriverGetVersion, int* version) {
  const char* wanted = std::getenv("FAKE_CUDA_VERSION");
  *version = wanted != nullptr ? std::atoi(wanted) : 13000;
  return 0;
}
FAKE(cuDeviceGetCount, int* count) {
  *count = std::getenv("FAKE_CUDA_NO_DEVICE") != nullptr ? 0 : 1;
  return 0;
}
FAKE(cuDeviceGet, int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
FAKE(cuDeviceGetName, char* name, int size, int) {
  std::strncpy(name, "Fake H200", static_cast<std::size_t>(size));
  return 0;
}
FAKE(cuDeviceGetAttribute, int* value, DeviceAttribute attribute, int) {
  FAIL_IF_ASKED("cuDeviceGetAttribute");
  switch (attribute) {
    case DeviceAttribute::sm_count:
      *value = 132;
      return 0;
    case DeviceAttribute::compute_capability_major:
      *value = 9;
      return 0;
    case DeviceAttribute::compute_capability_minor:
      *value = 0;
      return 0;
    case DeviceAttribute::shared_bytes_per_block_optin:
      *value = 227 << 10;
      return 0;
    default:
      *value = 1;
      return 0;
  }
}
FAKE(cuDeviceTotalMem_v2, std::size_t* bytes, int) {
  *bytes = std::size_t{141} << 30;
  return 0;
}
FAKE(cuDevicePrimaryCtxRetain, void** context, int) {
  FAIL_IF_ASKED("cuDevicePrimaryCtxRetain");
  ++g_state.retains;
  *context = handle<void*>(0x1000);
  return 0;
}
FAKE(cuCtxGetCurrent, void** context) {
  *context = t_current;
  return 0;
}
FAKE(cuCtxPushCurrent_v2, void* context) {
  ++t_depth;
  t_current = context;
  return 0;
}
FAKE(cuCtxPopCurrent_v2, void** context) {
  *context = t_current;
  t_current = nullptr;
  --t_depth;
  return 0;
}
FAKE(cuMemAlloc_v2, DeviceAddress* address, std::size_t bytes) {
  FAIL_IF_ASKED("cuMemAlloc_v2");
  *address = reinterpret_cast<DeviceAddress>(std::malloc(bytes));
  return 0;
}
FAKE(cuMemFree_v2, DeviceAddress address) {
  std::free(reinterpret_cast<void*>(address));
  return 0;
}
FAKE(cuMemHostAlloc, void** address, std::size_t bytes, unsigned) {
  *address = std::malloc(bytes);
  return 0;
}
FAKE(cuMemFreeHost, void* address) {
  std::free(address);
  return 0;
}
FAKE(cuMemGetInfo_v2, std::size_t* available, std::size_t* total) {
  *available = 1;
  *total = 2;
  return 0;
}
FAKE(cuMemcpyAsync, DeviceAddress destination, DeviceAddress source, std::size_t bytes, Stream) {
  std::memcpy(reinterpret_cast<void*>(destination), reinterpret_cast<void*>(source), bytes);
  return 0;
}
FAKE(cuMemsetD8Async, DeviceAddress destination, unsigned char value, std::size_t bytes, Stream) {
  std::memset(reinterpret_cast<void*>(destination), value, bytes);
  return 0;
}
FAKE(cuMemsetD32Async, DeviceAddress destination, unsigned value, std::size_t count, Stream) {
  for (std::size_t i = 0; i < count; ++i) {
    reinterpret_cast<unsigned*>(destination)[i] = value;
  }
  return 0;
}
FAKE(cuPointerGetAttribute, void*, PointerAttribute, DeviceAddress) { return 1; }
FAKE(cuStreamCreate, Stream* stream, unsigned) {
  *stream = handle<Stream>(0x2000);
  return 0;
}
FAKE(cuStreamDestroy_v2, Stream) { return 0; }
FAKE(cuStreamSynchronize, Stream) {
  FAIL_IF_ASKED("cuStreamSynchronize");
  return 0;
}
FAKE(cuStreamIsCapturing, Stream, int* status) {
  *status = 0;
  return 0;
}
FAKE(cuStreamWaitEvent, Stream, void*, unsigned) { return 0; }
FAKE(cuStreamBeginCapture_v2, Stream, CaptureMode) { return 0; }
FAKE(cuStreamEndCapture, Stream, void** graph) {
  *graph = handle<void*>(0x3000);
  return 0;
}
FAKE(cuThreadExchangeStreamCaptureMode, CaptureMode* mode) {
  std::swap(*mode, t_mode);
  return 0;
}
FAKE(cuEventCreate, void** event, unsigned) {
  *event = handle<void*>(0x4000);
  return 0;
}
FAKE(cuEventDestroy_v2, void*) { return 0; }
FAKE(cuEventRecord, void*, Stream) { return 0; }
FAKE(cuEventSynchronize, void*) { return 0; }
FAKE(cuEventElapsedTime, float* milliseconds, void*, void*) {
  *milliseconds = 1.5F;
  return 0;
}
FAKE(cuGraphInstantiateWithFlags, void** exec, void*, unsigned long long) {
  *exec = handle<void*>(0x5000);
  return 0;
}
FAKE(cuGraphDestroy, void*) { return 0; }
FAKE(cuGraphExecDestroy, void*) { return 0; }
FAKE(cuGraphLaunch, void*, Stream) { return 0; }
FAKE(cuModuleLoadData, void** module, const void*) {
  FAIL_IF_ASKED("cuModuleLoadData");
  ++g_state.loads;
  g_state.strict_loads += t_mode == CaptureMode::relaxed ? 0 : 1;
  *module = handle<void*>(0x6000);
  return 0;
}
FAKE(cuModuleUnload, void*) { return 0; }
FAKE(cuModuleGetFunction, void** function, void*, const char* name) {
  *function = handle<void*>(0x7000);
  return std::strcmp(name, "missing") == 0 ? 500 : 0;
}
FAKE(cuFuncGetAttribute, int* value, FunctionAttribute attribute, void*) {
  *value = static_cast<int>(attribute) + 100;
  return 0;
}
FAKE(cuFuncSetAttribute, void*, FunctionAttribute, int value) {
  return value > (227 << 10) ? 1 : 0;
}
FAKE(cuOccupancyMaxActiveBlocksPerMultiprocessor, int* blocks, void*, int, std::size_t) {
  *blocks = 3;
  return 0;
}
FAKE(cuLaunchKernelEx, const DriverLaunchConfig* config, void*, void** parameters, void**) {
  FAIL_IF_ASKED("cuLaunchKernelEx");
  ++g_state.launches;
  g_state.grid_x = config->grid.x;
  g_state.attributes = static_cast<int>(config->num_attributes);
  g_state.cluster_x = 0;
  g_state.flags = 0;
  for (unsigned i = 0; i < config->num_attributes; ++i) {
    if (config->attributes[i].id == LaunchAttributeId::cluster) {
      g_state.cluster_x = config->attributes[i].cluster.x;
    } else {
      g_state.flags |= config->attributes[i].flag << static_cast<int>(config->attributes[i].id);
    }
  }
  std::memcpy(&g_state.first_argument, parameters[0], sizeof(int));
  return 0;
}
FAKE(cuTensorMapEncodeTiled, TensorMap* map, int, std::uint32_t rank, void*, const std::uint64_t*,
     const std::uint64_t* strides, const std::uint32_t*, const std::uint32_t*, int, int, int, int) {
  FAIL_IF_ASKED("cuTensorMapEncodeTiled");
  map->opaque[0] = rank;
  map->opaque[1] = strides[0];
  return 0;
}
