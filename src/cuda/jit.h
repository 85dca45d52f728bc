#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/driver.h"
#include "foveal/dtype.h"

// Kernels are specialised at run time: key → source → NVRTC → cubin → function. docs/jit.md tells
// the whole way.
namespace foveal::cuda {

/// "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120", … for a compute capability (10·major +
/// minor). Architectures with instructions of their own get the suffix 'a'.
std::string arch_name(int compute_capability);

/// What a kernel is compiled from. The constants become a generated header that the device code
/// includes as "config.cuh":
///
///     #pragma once
///     namespace config {
///     enum class DType : unsigned char { f32, f16, bf16, f8e4m3, f8e5m2, f64, i32, i64, u8 };
///     constexpr int kHeadSize = 128;
///     constexpr bool kCausal = true;
///     constexpr DType kCacheType = DType::f8e4m3;
///     }
///
/// Put into a key only what changes the code: every distinct key is one more compilation.
struct KernelKey {
  /// The file that is compiled, relative to src/cuda/kernels: "flash_attn/sm80_forward.cu".
  std::string source;
  /// The kernel in it, declared extern "C" __global__. One per key.
  std::string entry;
  /// Exact target, from arch_name().
  std::string arch;

  KernelKey& set(std::string_view name, int value);
  KernelKey& set(std::string_view name, std::int64_t value);
  KernelKey& set(std::string_view name, bool value);
  KernelKey& set(std::string_view name, float value);
  KernelKey& set(std::string_view name, DType value);
  /// Refuses everything else, pointers above all, which would silently turn into bool.
  template <typename T>
  KernelKey& set(std::string_view name, T value) = delete;

  /// Text of further headers by name (a user's score function), found before the embedded ones.
  std::map<std::string, std::string, std::less<>> headers;

  /// "flash_attn/sm80_forward.cu:forward sm_90a kHeadSize=128 kCausal=true": for people and for
  /// looking loaded kernels up. Names everything in the key but the text of `headers`, of which it
  /// holds a digest.
  std::string text() const;
  /// The generated config.cuh.
  std::string config_header() const;

  friend bool operator==(const KernelKey&, const KernelKey&) = default;

 private:
  struct Constant {
    std::string type, name, value;
    friend bool operator==(const Constant&, const Constant&) = default;
  };
  KernelKey& add(std::string_view type, std::string_view name, std::string value);
  std::vector<Constant> constants_;
};

/// What a kernel takes of an SM, as the compiler reports it.
struct KernelResources {
  static constexpr int kUnknown = -1;

  int registers = 0;  ///< Of a thread, at launch.
  /// Local memory of a thread: arrays the compiler could not keep in registers, calls, and spills.
  int stack_bytes = 0;
  /// Code that moves spilled registers, in bytes moved; kUnknown when the compiler did not say.
  int spill_store_bytes = 0;
  int spill_load_bytes = 0;
  int static_shared_bytes = 0;         ///< Of a block.
  std::vector<int> parameter_bytes{};  ///< Size of each parameter.
};

/// Machine code of one kernel. Needs no GPU.
struct Cubin {
  enum class Origin { compiled, disk, pack };

  std::string key_text{};  ///< KernelKey::text()
  std::string entry{};
  std::string arch{};
  KernelResources resources{};
  std::string log{};  ///< The compiler's: warnings, and what the assembler says.
  std::vector<std::byte> image{};
  Origin origin = Origin::compiled;
  double milliseconds = 0;  ///< What getting it cost: compiling or reading.
};

/// A kernel loaded in the primary context of one device. Lives, at its address, as long as its Jit
/// (the global one: until the process ends): hold `const Kernel*` and launch without any lookup.
struct Kernel {
  CUfunc_st* function = nullptr;
  int device = 0;
  FunctionAttributes attributes{};
  KernelResources resources{};
  std::string name{};  ///< KernelKey::text(), for messages.

  /// Opts in to `bytes` of dynamic shared memory. Call it once after prepare(), not per launch.
  void set_max_dynamic_shared_bytes(int bytes) const;
};

struct JitOptions {
  /// Folder of cubins; empty: kept in memory only.
  std::filesystem::path cache_folder{};
  std::int64_t max_cache_bytes = std::int64_t{512} << 20;
  /// Files written by `foveal prebuild`; looked in before the cache and the compiler.
  std::vector<std::filesystem::path> packs{};

  /// ${FOVEAL_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/foveal}/cubins, FOVEAL_CACHE_MAX_MB and
  /// FOVEAL_KERNEL_PACK (paths separated by ':').
  static JitOptions from_environment();
};

/// Thread-safe; however many threads ask for a key at once, it is compiled and loaded once.
class Jit {
 public:
  explicit Jit(JitOptions options);
  ~Jit();
  Jit(const Jit&) = delete;
  Jit& operator=(const Jit&) = delete;
  /// The process's own, with the options of the environment.
  static Jit& global();

  /// The machine code for a key: from memory, a pack, the disk cache or NVRTC. Throws compile with
  /// the compiler's log, or with the reason NVRTC is not there. Works without a GPU.
  std::shared_ptr<const Cubin> compile(const KernelKey& key);
  /// The same for many keys on `threads` threads (0: the machine's), calling `on_done` after each
  /// from its thread. Errors are collected into one.
  std::vector<std::shared_ptr<const Cubin>> compile_all(const std::vector<KernelKey>& keys,
                                                        int threads = 0,
                                                        const std::function<void()>& on_done = {});

  /// Loads the kernel on a device, compiling it if need be. Meant for construction and build(), and
  /// safe anywhere: while a stream is being captured the load happens outside of the capture.
  const Kernel* prepare(const KernelKey& key, int device);
  /// Like prepare for many keys: missing ones are compiled in parallel.
  std::vector<const Kernel*> prepare_all(const std::vector<KernelKey>& keys, int device);

  /// Adds a pack at run time; throws io when it cannot be read or is damaged.
  void add_pack(const std::filesystem::path& path);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Throws invalid_argument unless there are as many arguments as the kernel has parameters, each of
/// its size: a struct that differs between host and device must not launch.
void check_arguments(const Kernel& kernel, std::span<const int> bytes);

/// Launches with these arguments, each copied as is. The types must be the kernel's, in order; int
/// for a `long long` is found out (see above), int for a float is not.
template <typename... Args>
void launch(const Kernel& kernel, const LaunchConfig& config, const Args&... args) {
  const std::array<int, sizeof...(Args)> bytes{static_cast<int>(sizeof(Args))...};
  check_arguments(kernel, bytes);
  void* parameters[sizeof...(Args) + 1] = {const_cast<void*>(static_cast<const void*>(&args))...,
                                           nullptr};
  launch(kernel.function, config, parameters);
}

}  // namespace foveal::cuda
