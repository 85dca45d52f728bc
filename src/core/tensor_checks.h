#pragma once

// Checks of tensors handed in by callers. Every message begins with the argument's name.

#include <fmt/format.h>

#include <initializer_list>
#include <string_view>

#include "foveal/backend.h"
#include "foveal/tensor.h"

/// Tensors in messages: described only when the message is made, so that a check that holds costs
/// nothing.
template <>
struct fmt::formatter<foveal::TensorView> : fmt::formatter<std::string_view> {
  template <typename Context>
  auto format(const foveal::TensorView& tensor, Context& context) const {
    return fmt::formatter<std::string_view>::format(tensor.describe(), context);
  }
};

namespace foveal {

void check_ndim(std::string_view name, const TensorView& tensor, int ndim);
void check_dtype(std::string_view name, const TensorView& tensor, DType dtype);
void check_device(std::string_view name, const TensorView& tensor, Device device);
/// Present, of this dtype and device and exactly this shape; −1 in `shape` accepts any size. `form`
/// spells the shape with names, for the message.
void check_tensor(std::string_view name, const TensorView& tensor, DType dtype, Device device,
                  std::initializer_list<std::int64_t> shape, std::string_view form);
/// The last dimension has stride 1, as all kernels need it.
void check_last_contiguous(std::string_view name, const TensorView& tensor);

/// A paged cache of this geometry; key and value agree in blocks and block size.
void check_kv_cache(const KVCacheView& cache, std::int64_t block_size, std::int64_t num_kv_heads,
                    std::int64_t head_size, std::int64_t head_size_v, DType dtype, Device device);
/// A slot mapping for `rows` new tokens at most; where the host can see the slots, each is in [−1,
/// slots).
void check_slot_mapping(const TensorView& slot_mapping, std::int64_t rows, std::int64_t slots,
                        Device device);

}  // namespace foveal
