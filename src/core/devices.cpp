#include "foveal/devices.h"

#include <unistd.h>

#include "core/cuda_devices.h"

namespace foveal {

std::vector<DeviceInfo> devices() {
  const std::int64_t memory =
      static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  std::vector<DeviceInfo> found{{.name = "CPU", .memory_bytes = memory}};
  add_cuda_devices(found);
  return found;
}

}  // namespace foveal
