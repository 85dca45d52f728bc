#include <fmt/format.h>

#include <vector>

#include "core/check.h"
#include "cuda/driver.h"
#include "serving/attention_device.h"

namespace foveal::serving {
namespace {

constexpr int kOrdinal = 0;  // CUDA_VISIBLE_DEVICES chooses which one this is.

class CudaDevice final : public AttentionDevice {
 public:
  CudaDevice() : properties_(cuda::device_properties(kOrdinal)), stream_(kOrdinal) {}

  Device device() const override { return {DeviceType::cuda, kOrdinal}; }
  std::string describe() const override {
    return fmt::format("{} ({})", to_string(device()), properties_.name);
  }
  int compute_capability() const override { return properties_.compute_capability; }
  void* stream() const override { return stream_.get(); }
  std::int64_t memory_bytes() const override { return properties_.memory_bytes; }

  std::byte* allocate(std::int64_t bytes) override {
    return memory_.emplace_back(kOrdinal, static_cast<std::size_t>(bytes)).as<std::byte>();
  }

  Mirror allocate_mirror(std::int64_t bytes) override {
    std::byte* host =
        host_memory_.emplace_back(kOrdinal, static_cast<std::size_t>(bytes)).as<std::byte>();
    return {host, allocate(bytes)};
  }

  void upload(const Mirror& mirror, std::int64_t bytes) override {
    const cuda::ContextGuard guard(kOrdinal);
    cuda::copy_async(mirror.device, mirror.host, static_cast<std::size_t>(bytes), stream());
  }

  void download(const Mirror& mirror, std::int64_t bytes) override {
    const cuda::ContextGuard guard(kOrdinal);
    cuda::copy_async(mirror.host, mirror.device, static_cast<std::size_t>(bytes), stream());
    cuda::synchronize(stream());
  }

  void wait() override {
    const cuda::ContextGuard guard(kOrdinal);
    cuda::synchronize(stream());
  }

 private:
  const cuda::DeviceProperties& properties_;
  cuda::OwnedStream stream_;
  std::vector<cuda::DeviceBuffer> memory_;
  std::vector<cuda::PinnedBuffer> host_memory_;
};

}  // namespace

std::unique_ptr<AttentionDevice> open_cuda_device() {
  if (!cuda::available()) {
    fail(ErrorCode::device,
         "device is cuda, which cannot be used here: {}. It needs an NVIDIA GPU and its driver, "
         "for CUDA 12.0 or later; without them, run on the cpu",
         cuda::unavailable_reason());
  }
  return std::make_unique<CudaDevice>();
}

}  // namespace foveal::serving
