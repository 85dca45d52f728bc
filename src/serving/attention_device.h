#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "foveal/tensor.h"

namespace foveal::serving {

/// The device that attention runs on: memory there, and copies to it and back. All work, copies and
/// kernels alike, is in the order of one stream. What it allocates lives as long as it does.
class AttentionDevice {
 public:
  virtual ~AttentionDevice() = default;

  virtual Device device() const = 0;
  /// For people: "cpu", "cuda:0 (NVIDIA H200)".
  virtual std::string describe() const = 0;
  virtual int compute_capability() const { return 0; }  ///< As in SelectorConfig.
  virtual void* stream() const { return nullptr; }
  virtual std::int64_t memory_bytes() const = 0;  ///< All that the device has, used or not.

  /// Memory of the device, aligned to 64 bytes; what is in it is undefined. Throws out_of_memory.
  virtual std::byte* allocate(std::int64_t bytes) = 0;

  /// Memory of the device and its counterpart on the host; on the CPU they are the same.
  struct Mirror {
    std::byte* host = nullptr;
    std::byte* device = nullptr;
  };
  virtual Mirror allocate_mirror(std::int64_t bytes) = 0;
  /// Host to device, the first `bytes`; the host's must stay as they are until a download is done.
  virtual void upload(const Mirror& mirror, std::int64_t bytes) = 0;
  /// Device to host; waits until they are there.
  virtual void download(const Mirror& mirror, std::int64_t bytes) = 0;
  /// Until all work given so far is done.
  virtual void wait() = 0;
};

/// The CPU, or the first CUDA device. Throws device, saying why, when there is none to use, and
/// unsupported for another type or without the CUDA half of the library.
std::unique_ptr<AttentionDevice> open_attention_device(DeviceType type);

/// In cuda_device.cpp, or in device_without_cuda.cpp.
std::unique_ptr<AttentionDevice> open_cuda_device();

}  // namespace foveal::serving
