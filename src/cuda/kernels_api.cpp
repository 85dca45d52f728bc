#include <fmt/format.h>

#include <charconv>
#include <mutex>
#include <set>
#include <utility>

#include "core/check.h"
#include "core/cuda_devices.h"
#include "cuda/cubin_cache.h"
#include "cuda/driver.h"
#include "cuda/flash_attn/kernels.h"
#include "cuda/jit.h"
#include "cuda/kernel_pack.h"
#include "cuda/kernel_program.h"
#include "cuda/models.h"
#include "foveal/kernels.h"

// The public functions of foveal/kernels.h, and the devices for foveal/devices.h.
namespace foveal {
namespace {

using namespace cuda;

CubinCache open_cache() {
  JitOptions options = JitOptions::from_environment();
  return {std::move(options.cache_folder), options.max_cache_bytes};
}

KernelInfo describe(const Cubin& cubin) {
  const KernelResources& resources = cubin.resources;
  const bool known = resources.spill_store_bytes != KernelResources::kUnknown;
  return {.key = cubin.key_text,
          .arch = cubin.arch,
          .bytes = static_cast<std::int64_t>(cubin.image.size()),
          .registers = resources.registers,
          .stack_bytes = resources.stack_bytes,
          .spill_bytes = known ? resources.spill_store_bytes + resources.spill_load_bytes : -1};
}

/// Only the names a device would ask for: kernels compiled for a portable "sm_90" would never be
/// found on a Hopper device, which asks for "sm_90a".
void check_arch(const std::string& arch) {
  int number = 0;
  const bool has_prefix = arch.starts_with("sm_");
  if (has_prefix) {
    std::from_chars(arch.data() + 3, arch.data() + arch.size(), number);
  }
  check(number != 0, "arch is '{}', accepted are sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_120, …",
        arch);
  check(arch == arch_name(number), "arch is '{}', devices of that capability take kernels of '{}'",
        arch, arch_name(number));
}

std::vector<KernelKey> keys_of(const PrebuildRequest& request) {
  check(request.block_size > 0 && request.block_size % 16 == 0,
        "block_size is {}, it must be a multiple of 16", request.block_size);
  check(request.dtype == DType::f16 || request.dtype == DType::bf16,
        "dtype is {}, accepted are f16 and bf16", to_string(request.dtype));
  for (const DType dtype : request.kv_cache_dtypes) {
    check(dtype == request.dtype || is_fp8(dtype),
          "kv_cache_dtype is {}, accepted are the dtype, {}, and f8e4m3 and f8e5m2",
          to_string(dtype), to_string(request.dtype));
  }
  std::vector<KernelKey> keys;
  std::set<std::string> seen;  // Layers and models share kernels.
  const std::vector<DType> cache_dtypes =
      request.kv_cache_dtypes.empty() ? std::vector<DType>{request.dtype} : request.kv_cache_dtypes;
  for (const std::string& arch : request.archs) {
    check_arch(arch);
    for (const std::string& model : request.models) {
      for (AttentionSpec& layer : layers_of_model(model)) {
        layer.dtype = request.dtype;
        for (const DType cache_dtype : cache_dtypes) {
          layer.kv_cache_dtype = cache_dtype;
          for (KernelKey& key : flash_attn::keys_for_model(layer, request.block_size, arch)) {
            if (seen.insert(key.text()).second) {
              keys.push_back(std::move(key));
            }
          }
        }
      }
    }
  }
  return keys;
}

}  // namespace

void add_cuda_devices(std::vector<DeviceInfo>& devices) {
  if (!available()) {
    return;
  }
  for (int ordinal = 0; ordinal < device_count(); ++ordinal) {
    const DeviceProperties& properties = device_properties(ordinal);
    devices.push_back({.device = {DeviceType::cuda, ordinal},
                       .name = properties.name,
                       .compute_capability = properties.compute_capability,
                       .memory_bytes = properties.memory_bytes});
  }
}

KernelCache kernel_cache() {
  const CubinCache cache = open_cache();
  KernelCache result{.folder = cache.folder().string(), .max_bytes = cache.max_bytes()};
  for (const CubinCache::Entry& entry : cache.list()) {
    KernelInfo info = describe(entry.cubin);
    info.bytes = entry.bytes;
    info.file = entry.path.string();
    info.age_seconds = static_cast<double>(entry.age.count());
    result.kernels.push_back(std::move(info));
  }
  return result;
}

std::int64_t clear_kernel_cache() { return open_cache().clear(); }

void load_kernel_pack(const std::string& path) { Jit::global().add_pack(path); }

std::vector<std::string> known_models() { return model_names(); }

std::vector<KernelInfo> prebuild_kernels(const PrebuildRequest& request) {
  check(!request.models.empty(), "models is empty, it must name one at least");
  check(!request.archs.empty(), "archs is empty, it must name one at least");
  check(!request.out.empty(), "out is empty, it must be the name of the file to write");
  const std::vector<KernelKey> keys = keys_of(request);
  Jit jit(JitOptions::from_environment());
  std::mutex mutex;
  std::size_t done = 0;
  const auto on_done = [&] {
    const std::lock_guard lock(mutex);
    ++done;
    if (request.progress) {
      request.progress(done, keys.size());
    }
  };
  const auto cubins = jit.compile_all(keys, request.threads, on_done);
  std::vector<std::pair<std::string, const Cubin*>> named;
  std::vector<KernelInfo> infos;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    named.emplace_back(assemble(keys[i]).id, cubins[i].get());
    infos.push_back(describe(*cubins[i]));
  }
  KernelPack::write(request.out, named);
  return infos;
}

}  // namespace foveal
