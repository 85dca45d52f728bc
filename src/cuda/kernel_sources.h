#pragma once

#include <span>
#include <string_view>

namespace foveal::cuda {

/// One file below src/cuda/kernels, embedded in the library when it is built.
struct KernelSource {
  std::string_view path;  ///< Relative to src/cuda/kernels, e.g. "ptx/mma.cuh".
  std::string_view text;
};

/// All of them (*.cu, *.cuh), sorted by path.
std::span<const KernelSource> kernel_sources();

/// The text of one; empty (data() is null) when there is no such file.
std::string_view find_kernel_source(std::string_view path);

}  // namespace foveal::cuda
