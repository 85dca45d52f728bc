#include "core/tensor_checks.h"

#include <algorithm>

#include "core/check.h"

namespace foveal {

void check_ndim(std::string_view name, const TensorView& tensor, int ndim) {
  check(!tensor.empty(), "{} is absent, it must be given", name);
  check(tensor.ndim() == ndim, "{} is {}, it must have {} dimensions", name, tensor, ndim);
}

void check_dtype(std::string_view name, const TensorView& tensor, DType dtype) {
  check(tensor.dtype() == dtype, "{} is {}, its dtype must be {}", name, tensor, to_string(dtype));
}

void check_device(std::string_view name, const TensorView& tensor, Device device) {
  check(tensor.device() == device, "{} is {}, it must be on {}", name, tensor, to_string(device));
}

void check_tensor(std::string_view name, const TensorView& tensor, DType dtype, Device device,
                  std::initializer_list<std::int64_t> shape, std::string_view form) {
  check_ndim(name, tensor, static_cast<int>(shape.size()));
  check_dtype(name, tensor, dtype);
  check_device(name, tensor, device);
  int dim = 0;
  for (const std::int64_t size : shape) {
    check(size < 0 || tensor.size(dim) == size, "{} is {}, dimension {} must be {} in {}", name,
          tensor, dim, size, form);
    ++dim;
  }
  check(tensor.data() != nullptr || tensor.numel() == 0, "{} has a null data pointer", name);
}

void check_last_contiguous(std::string_view name, const TensorView& tensor) {
  const int last = tensor.ndim() - 1;
  check(tensor.size(last) <= 1 || tensor.stride(last) == 1,
        "{} has stride {} in its last dimension, it must be 1 (contiguous heads)", name,
        tensor.stride(last));
}

void check_kv_cache(const KVCacheView& cache, std::int64_t block_size, std::int64_t num_kv_heads,
                    std::int64_t head_size, std::int64_t head_size_v, DType dtype, Device device) {
  constexpr std::string_view kForm = "[num_blocks, block_size, num_kv_heads, head size]";
  check_tensor("kv_cache.key", cache.key, dtype, device, {-1, block_size, num_kv_heads, head_size},
               kForm);
  check_tensor("kv_cache.value", cache.value, dtype, device,
               {cache.key.size(0), cache.key.size(1), num_kv_heads, head_size_v}, kForm);
  check_last_contiguous("kv_cache.key", cache.key);
  check_last_contiguous("kv_cache.value", cache.value);
}

void check_slot_mapping(const TensorView& slot_mapping, std::int64_t rows, std::int64_t slots,
                        Device device) {
  check_tensor("slot_mapping", slot_mapping, DType::i64, device, {-1}, "[num_tokens]");
  check(slot_mapping.size(0) <= rows,
        "slot_mapping has {} entries, it may have at most the {} rows of key", slot_mapping.size(0),
        rows);
  check(slot_mapping.size(0) <= 1 || slot_mapping.stride(0) == 1,
        "slot_mapping has stride {}, it must be contiguous", slot_mapping.stride(0));
  if (device.type != DeviceType::cpu) {
    return;
  }
  const std::int64_t* slot = slot_mapping.as<std::int64_t>();
  for (std::int64_t i = 0; i < slot_mapping.size(0); ++i) {
    check(slot[i] >= kPaddingSlot && slot[i] < slots,
          "slot_mapping[{}] is {}, it must be in [0, {}), or -1 for padding", i, slot[i], slots);
  }
}

}  // namespace foveal
