#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "foveal/dtype.h"
#include "foveal/export.h"

// GPU kernels are compiled when first needed and kept on disk. These functions look after what is
// kept, and compile ahead for machines that have no compiler. Without CUDA in the build they throw
// unsupported.
namespace foveal {

/// One compiled kernel.
struct KernelInfo {
  std::string key{};   ///< Source, kernel, architecture and what it is specialised for.
  std::string arch{};  ///< "sm_90a", …
  std::int64_t bytes = 0;
  int registers = 0;         ///< Of a thread.
  int stack_bytes = 0;       ///< Local memory of a thread: spills and arrays.
  int spill_bytes = 0;       ///< Stored and loaded by spills; −1 when the compiler did not say.
  std::string file{};        ///< In the cache.
  double age_seconds = 0.0;  ///< In the cache: since it was last used, to the hour.
};

struct KernelCache {
  std::string folder{};
  std::int64_t max_bytes = 0;
  std::vector<KernelInfo> kernels{};  ///< Most recently used first.
};

/// What lies in ${FOVEAL_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/foveal}/cubins.
FOVEAL_API KernelCache kernel_cache();
/// Empties it and returns how many kernels were removed. Kernels in use stay loaded.
FOVEAL_API std::int64_t clear_kernel_cache();

/// Takes kernels from a file of prebuild_kernels() from now on, ahead of cache and compiler. The
/// files that FOVEAL_KERNEL_PACK names (separated by ':') are taken without being asked. Throws io.
FOVEAL_API void load_kernel_pack(const std::string& path);

/// The models prebuild_kernels() knows by name: "llama-3-8b", ….
FOVEAL_API std::vector<std::string> known_models();

struct PrebuildRequest {
  std::vector<std::string> models{};  ///< Of known_models().
  std::vector<std::string> archs{};   ///< "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120".
  DType dtype = DType::bf16;
  std::vector<DType> kv_cache_dtypes{};  ///< Empty: the dtype.
  std::int64_t block_size = 16;          ///< Of the cache manager.
  std::string out{};                     ///< The pack to write.
  int threads = 0;                       ///< 0: as many as the machine has.
  /// Called from any of the threads, one at a time.
  std::function<void(std::size_t done, std::size_t total)> progress{};
};

/// Compiles every kernel the models need into one file. Needs NVRTC, but no GPU. Throws compile.
FOVEAL_API std::vector<KernelInfo> prebuild_kernels(const PrebuildRequest& request);

}  // namespace foveal
