#include "serving/attention_device.h"

#include <unistd.h>

#include <memory>
#include <vector>

#include "core/check.h"
#include "core/host_memory.h"

namespace foveal::serving {
namespace {

class HostDevice final : public AttentionDevice {
 public:
  Device device() const override { return {}; }
  std::string describe() const override { return "cpu"; }
  std::int64_t memory_bytes() const override {
    return static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  }

  /// The memory is left as it comes, so that the system provides pages only as they are used.
  std::byte* allocate(std::int64_t bytes) override {
    // The system would promise more than it has, and end the process when it is used.
    if (bytes > memory_bytes()) {
      fail(ErrorCode::out_of_memory, "{} bytes could not be had, the machine has {}", bytes,
           memory_bytes());
    }
    memory_.push_back(allocate_host(bytes));
    if (memory_.back() == nullptr) {
      fail(ErrorCode::out_of_memory, "{} bytes could not be had", bytes);
    }
    return static_cast<std::byte*>(memory_.back().get());
  }

  Mirror allocate_mirror(std::int64_t bytes) override {
    std::byte* memory = allocate(bytes);
    return {memory, memory};
  }
  void upload(const Mirror& /*mirror*/, std::int64_t /*bytes*/) override {}
  void download(const Mirror& /*mirror*/, std::int64_t /*bytes*/) override {}
  void wait() override {}

 private:
  std::vector<std::shared_ptr<void>> memory_;
};

}  // namespace

std::unique_ptr<AttentionDevice> open_attention_device(DeviceType type) {
  switch (type) {
    case DeviceType::cpu:
      return std::make_unique<HostDevice>();
    case DeviceType::cuda:
      return open_cuda_device();
    case DeviceType::opencl:
      break;
  }
  fail(ErrorCode::unsupported, "device is {}, the engine runs attention on cpu and cuda",
       to_string(type));
}

}  // namespace foveal::serving
