#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "cuda/driver.h"
#include "cuda/driver_api.h"

// Modules, launches and tensor maps.
namespace foveal::cuda {
namespace {

bool is_one(const Dim3& dim) { return dim.x == 1 && dim.y == 1 && dim.z == 1; }

}  // namespace

Module::Module(int ordinal, std::span<const std::byte> cubin) : ordinal_(ordinal) {
  const ContextGuard guard(ordinal);
  // Loading may allocate and copy, which a capture by any thread in the strict mode would forbid
  // and be ended by. None of it belongs to that graph, which is what the relaxed mode is for.
  const RelaxedCaptureScope relaxed;
  const DriverApi& api = driver_api();
  const Status status = api.module_load_data.raw(&module_, cubin.data());
  if (status == Status::no_binary_for_gpu) {
    fail_call(status, api.module_load_data.name(),
              fmt::format(" (the device is {}, of compute capability {})",
                          device_properties(ordinal).name,
                          device_properties(ordinal).compute_capability));
  }
  if (status != Status::success) {
    fail_call(status, api.module_load_data.name());
  }
}

Module::Module(Module&& other) noexcept { *this = std::move(other); }

Module& Module::operator=(Module&& other) noexcept {
  std::swap(module_, other.module_);
  std::swap(ordinal_, other.ordinal_);
  return *this;
}

Module::~Module() {
  if (module_ == nullptr) {
    return;
  }
  try {  // As for buffers, a failure has nowhere to go.
    const ContextGuard guard(ordinal_);
    driver_api().module_unload.raw(module_);
  } catch (...) {
  }
}

CUfunc_st* Module::function(const std::string& name) const {
  const ContextGuard guard(ordinal_);
  const RelaxedCaptureScope relaxed;
  const DriverApi& api = driver_api();
  CUfunc_st* function = nullptr;
  const Status status = api.module_get_function.raw(&function, module_, name.c_str());
  if (status != Status::success) {
    fail_call(status, api.module_get_function.name(), " (the kernel is '" + name + "')");
  }
  return function;
}

FunctionAttributes attributes_of(CUfunc_st* function) {
  const auto get = [&](FunctionAttribute which) {
    int value = 0;
    driver_api().function_get_attribute(&value, which, function);
    return value;
  };
  return {.registers = get(FunctionAttribute::registers),
          .local_bytes = get(FunctionAttribute::local_bytes),
          .static_shared_bytes = get(FunctionAttribute::static_shared_bytes),
          .max_threads = get(FunctionAttribute::max_threads)};
}

void set_max_dynamic_shared_bytes(CUfunc_st* function, int bytes) {
  const DriverApi& api = driver_api();
  const Status status =
      api.function_set_attribute.raw(function, FunctionAttribute::max_dynamic_shared_bytes, bytes);
  if (status != Status::success) {
    fail_call(status, api.function_set_attribute.name(),
              fmt::format(" (dynamic shared memory of {} bytes)", bytes));
  }
}

void allow_non_portable_cluster(CUfunc_st* function) {
  driver_api().function_set_attribute(function, FunctionAttribute::non_portable_cluster, 1);
}

int max_active_blocks_per_sm(CUfunc_st* function, int threads, int dynamic_shared_bytes) {
  int blocks = 0;
  driver_api().occupancy(&blocks, function, threads,
                         static_cast<std::size_t>(dynamic_shared_bytes));
  return blocks;
}

void launch(CUfunc_st* function, const LaunchConfig& config, void** parameters) {
  const Dim3& grid = config.grid;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) {
    return;
  }
  LaunchAttribute attributes[3] = {};
  unsigned count = 0;
  if (!is_one(config.cluster)) {
    attributes[count].id = LaunchAttributeId::cluster;
    attributes[count++].cluster = config.cluster;
  }
  if (config.programmatic_serialization) {
    attributes[count].id = LaunchAttributeId::programmatic_serialization;
    attributes[count++].flag = 1;
  }
  if (config.cooperative) {
    attributes[count].id = LaunchAttributeId::cooperative;
    attributes[count++].flag = 1;
  }
  const DriverLaunchConfig driver_config{.grid = grid,
                                         .block = config.block,
                                         .dynamic_shared_bytes = config.dynamic_shared_bytes,
                                         .stream = config.stream,
                                         .attributes = attributes,
                                         .num_attributes = count};
  const DriverApi& api = driver_api();
  const Status status = api.launch_kernel.raw(&driver_config, function, parameters, nullptr);
  if (status != Status::success) [[unlikely]] {
    fail_call(status, api.launch_kernel.name(),
              fmt::format(" (grid {}x{}x{}, block {}x{}x{}, {} bytes of dynamic shared memory, "
                          "cluster {}x{}x{})",
                          grid.x, grid.y, grid.z, config.block.x, config.block.y, config.block.z,
                          config.dynamic_shared_bytes, config.cluster.x, config.cluster.y,
                          config.cluster.z));
  }
}

TensorMap encode_tiled(const TensorMapSpec& spec) {
  check(spec.rank >= 1 && spec.rank <= 5, "rank of a tensor map is {}, it must be 1 to 5",
        spec.rank);
  constexpr int kNoInterleave = 0;
  constexpr int kZeroFill = 0;
  const std::uint32_t unit_strides[5] = {1, 1, 1, 1, 1};
  const DriverApi& api = driver_api();
  TensorMap map;
  const Status status = api.tensor_map_encode_tiled.raw(
      &map, static_cast<int>(spec.type), static_cast<std::uint32_t>(spec.rank), spec.address,
      spec.size.data(), spec.stride_bytes.data() + 1, spec.box.data(), unit_strides, kNoInterleave,
      static_cast<int>(spec.swizzle), static_cast<int>(spec.l2_promotion), kZeroFill);
  if (status != Status::success) {
    std::string dimensions;
    for (std::size_t i = 0; i < static_cast<std::size_t>(spec.rank); ++i) {
      dimensions += fmt::format("; dimension {}: size {}, stride {} bytes, box {}", i, spec.size[i],
                                i == 0 ? 0 : spec.stride_bytes[i], spec.box[i]);
    }
    fail_call(status, api.tensor_map_encode_tiled.name(),
              fmt::format(" (type {}, address {}, swizzle {}{})", static_cast<int>(spec.type),
                          spec.address, static_cast<int>(spec.swizzle), dimensions));
  }
  return map;
}

}  // namespace foveal::cuda
