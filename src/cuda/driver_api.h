#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/driver.h"

// The part of the driver's public ABI that is used, declared here so that building needs no
// toolkit. Symbols with a version suffix are those that cuda.h maps the plain name to.
namespace foveal::cuda {

struct CUgraph_st;

enum class Status : int {
  success = 0,
  invalid_value = 1,
  out_of_memory = 2,
  no_binary_for_gpu = 209,
  stream_capture_unsupported = 900,
};

// Attributes by the numbers of the ABI.
enum class DeviceAttribute : int {
  sm_count = 16,
  l2_bytes = 38,
  threads_per_sm = 39,
  compute_capability_major = 75,
  compute_capability_minor = 76,
  shared_bytes_per_sm = 81,
  registers_per_sm = 82,
  shared_bytes_per_block_optin = 97,
};
enum class FunctionAttribute : int {
  max_threads = 0,
  static_shared_bytes = 1,
  local_bytes = 3,
  registers = 4,
  max_dynamic_shared_bytes = 8,
  non_portable_cluster = 14,
};
enum class PointerAttribute : int { memory_type = 2, device_ordinal = 9 };
enum class CaptureMode : int { global = 0, thread_local_ = 1, relaxed = 2 };

enum class LaunchAttributeId : int { cooperative = 2, cluster = 4, programmatic_serialization = 6 };

struct LaunchAttribute {
  LaunchAttributeId id;
  int padding;
  union {
    char bytes[64];  // The ABI reserves this much.
    int flag;
    Dim3 cluster;
  };
};
static_assert(sizeof(LaunchAttribute) == 72);

struct DriverLaunchConfig {
  Dim3 grid;
  Dim3 block;
  unsigned dynamic_shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};
static_assert(sizeof(DriverLaunchConfig) == 56);

/// A library opened with dlopen. Entry points register themselves on construction; `missing` names
/// the first that is not there.
struct Library {
  explicit Library(const char* name);
  void* handle = nullptr;
  std::string error;
  std::string missing;
  void* find(const char* symbol);
};

/// Throws device (or out_of_memory) naming the call and the driver's own words; `details` follow.
[[noreturn]] void fail_call(Status status, const char* call, const std::string& details = {});

/// One driver function. Calling it checks the status; raw() returns it.
template <typename... Args>
class Entry {
 public:
  Entry(Library& library, const char* name)
      : name_(name), function_(reinterpret_cast<Status (*)(Args...)>(library.find(name))) {}
  void operator()(Args... args) const {
    if (const Status status = function_(args...); status != Status::success) [[unlikely]] {
      fail_call(status, name_);
    }
  }
  Status raw(Args... args) const { return function_(args...); }
  const char* name() const { return name_; }

 private:
  const char* name_;
  Status (*function_)(Args...);
};

using DeviceAddress = std::uint64_t;

struct DriverApi {
  Library library{"libcuda.so.1"};

  Entry<Status, const char**> get_error_name{library, "cuGetErrorName"};
  Entry<Status, const char**> get_error_string{library, "cuGetErrorString"};
  Entry<unsigned> init{library, "cuInit"};
  Entry<int*> driver_get_version{library, "cuDriverGetVersion"};

  Entry<int*> device_get_count{library, "cuDeviceGetCount"};
  Entry<int*, int> device_get{library, "cuDeviceGet"};
  Entry<char*, int, int> device_get_name{library, "cuDeviceGetName"};
  Entry<int*, DeviceAttribute, int> device_get_attribute{library, "cuDeviceGetAttribute"};
  Entry<std::size_t*, int> device_total_mem{library, "cuDeviceTotalMem_v2"};
  Entry<CUctx_st**, int> primary_context_retain{library, "cuDevicePrimaryCtxRetain"};
  Entry<CUctx_st**> context_get_current{library, "cuCtxGetCurrent"};
  Entry<CUctx_st*> context_push{library, "cuCtxPushCurrent_v2"};
  Entry<CUctx_st**> context_pop{library, "cuCtxPopCurrent_v2"};

  Entry<DeviceAddress*, std::size_t> mem_alloc{library, "cuMemAlloc_v2"};
  Entry<DeviceAddress> mem_free{library, "cuMemFree_v2"};
  Entry<void**, std::size_t, unsigned> mem_host_alloc{library, "cuMemHostAlloc"};
  Entry<void*> mem_free_host{library, "cuMemFreeHost"};
  Entry<std::size_t*, std::size_t*> mem_get_info{library, "cuMemGetInfo_v2"};
  Entry<DeviceAddress, DeviceAddress, std::size_t, Stream> memcpy_async{library, "cuMemcpyAsync"};
  Entry<DeviceAddress, unsigned char, std::size_t, Stream> memset_d8_async{library,
                                                                           "cuMemsetD8Async"};
  Entry<DeviceAddress, unsigned, std::size_t, Stream> memset_d32_async{library, "cuMemsetD32Async"};
  Entry<void*, PointerAttribute, DeviceAddress> pointer_get_attribute{library,
                                                                      "cuPointerGetAttribute"};

  Entry<Stream*, unsigned> stream_create{library, "cuStreamCreate"};
  Entry<Stream> stream_destroy{library, "cuStreamDestroy_v2"};
  Entry<Stream> stream_synchronize{library, "cuStreamSynchronize"};
  Entry<Stream, int*> stream_is_capturing{library, "cuStreamIsCapturing"};
  Entry<Stream, CUevent_st*, unsigned> stream_wait_event{library, "cuStreamWaitEvent"};
  Entry<Stream, CaptureMode> stream_begin_capture{library, "cuStreamBeginCapture_v2"};
  Entry<Stream, CUgraph_st**> stream_end_capture{library, "cuStreamEndCapture"};
  Entry<CaptureMode*> exchange_capture_mode{library, "cuThreadExchangeStreamCaptureMode"};

  Entry<CUevent_st**, unsigned> event_create{library, "cuEventCreate"};
  Entry<CUevent_st*> event_destroy{library, "cuEventDestroy_v2"};
  Entry<CUevent_st*, Stream> event_record{library, "cuEventRecord"};
  Entry<CUevent_st*> event_synchronize{library, "cuEventSynchronize"};
  Entry<float*, CUevent_st*, CUevent_st*> event_elapsed_time{library, "cuEventElapsedTime"};

  Entry<CUgraphExec_st**, CUgraph_st*, unsigned long long> graph_instantiate{
      library, "cuGraphInstantiateWithFlags"};
  Entry<CUgraph_st*> graph_destroy{library, "cuGraphDestroy"};
  Entry<CUgraphExec_st*> graph_exec_destroy{library, "cuGraphExecDestroy"};
  Entry<CUgraphExec_st*, Stream> graph_launch{library, "cuGraphLaunch"};

  Entry<CUmod_st**, const void*> module_load_data{library, "cuModuleLoadData"};
  Entry<CUmod_st*> module_unload{library, "cuModuleUnload"};
  Entry<CUfunc_st**, CUmod_st*, const char*> module_get_function{library, "cuModuleGetFunction"};
  Entry<int*, FunctionAttribute, CUfunc_st*> function_get_attribute{library, "cuFuncGetAttribute"};
  Entry<CUfunc_st*, FunctionAttribute, int> function_set_attribute{library, "cuFuncSetAttribute"};
  Entry<int*, CUfunc_st*, int, std::size_t> occupancy{
      library, "cuOccupancyMaxActiveBlocksPerMultiprocessor"};
  Entry<const DriverLaunchConfig*, CUfunc_st*, void**, void**> launch_kernel{library,
                                                                             "cuLaunchKernelEx"};
  Entry<TensorMap*, int, std::uint32_t, void*, const std::uint64_t*, const std::uint64_t*,
        const std::uint32_t*, const std::uint32_t*, int, int, int, int>
      tensor_map_encode_tiled{library, "cuTensorMapEncodeTiled"};
};

/// The loaded driver; throws device with unavailable_reason() when there is none.
const DriverApi& driver_api();

}  // namespace foveal::cuda
