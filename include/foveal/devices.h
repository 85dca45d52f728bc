#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "foveal/export.h"
#include "foveal/tensor.h"

namespace foveal {

struct DeviceInfo {
  Device device{};
  std::string name{};
  int compute_capability = 0;  ///< CUDA: 10·major + minor; 0 elsewhere.
  std::int64_t memory_bytes = 0;
};

/// The CPU, then the CUDA devices that the driver shows; just the CPU where there is no driver.
FOVEAL_API std::vector<DeviceInfo> devices();

}  // namespace foveal
