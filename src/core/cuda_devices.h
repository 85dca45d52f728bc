#pragma once

#include <vector>

#include "foveal/devices.h"

namespace foveal {

/// Those the driver shows; none in a build without CUDA.
void add_cuda_devices(std::vector<DeviceInfo>& devices);

}  // namespace foveal
