#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// NVRTC, the run-time compiler, opened on first use. Compiling needs neither a GPU nor a driver.
namespace foveal::cuda {

struct NvrtcInfo {
  bool available = false;
  std::string reason;  ///< Why not, for people.
  int major = 0;
  int minor = 0;
  std::string path;  ///< Of the library that was opened.
  /// Tells one build of the compiler from another: version and size of the library. Part of the
  /// name under which a cubin is cached.
  std::string signature;
  std::vector<int> architectures;  ///< Compute capabilities it can compile for: 80, 90, …
};

/// Looks for the library, once: FOVEAL_NVRTC (a file), then the loader's own way (which finds the
/// one PyTorch has loaded), then folders of Python packages below FOVEAL_PYTHON_SITE, VIRTUAL_ENV
/// and CONDA_PREFIX, then CUDA_HOME and /usr/local/cuda.
const NvrtcInfo& nvrtc();

/// Whether it compiles for "sm_90a" and the like.
bool nvrtc_knows(std::string_view arch);

/// One file to compile, with everything it includes.
struct Program {
  std::string name;  ///< For messages.
  std::string text;
  std::vector<std::pair<std::string, std::string>> headers;  ///< Name as included, and text.
};

struct CompiledProgram {
  std::vector<std::byte> cubin;
  std::string log;  ///< Warnings, and the assembler's resource report.
};

/// The options every kernel is compiled with; they are part of the cache's key.
const std::vector<std::string>& compile_options();

/// Throws compile with the compiler's log, or with the reason NVRTC is not there.
CompiledProgram compile_program(const Program& program, std::string_view arch);

}  // namespace foveal::cuda
