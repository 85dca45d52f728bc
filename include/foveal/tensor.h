#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "foveal/dtype.h"
#include "foveal/export.h"

namespace foveal {

enum class DeviceType : std::uint8_t { cpu, cuda, opencl };

FOVEAL_API std::string_view to_string(DeviceType type);

/// Where memory lives and work runs.
struct Device {
  DeviceType type = DeviceType::cpu;
  std::int32_t index = 0;

  friend bool operator==(const Device&, const Device&) = default;
};

/// "cpu", "cuda:0", …
FOVEAL_API std::string to_string(const Device& device);

/// A non-owning view of a strided array: pointer, dtype, device, shape and strides, all in elements
/// and all int64. Copying it copies no data. A default-constructed view is "absent" (empty() is
/// true), which is how optional tensors are left out.
class FOVEAL_API TensorView {
 public:
  static constexpr int kMaxDims = 8;

  TensorView() = default;

  /// A contiguous (row-major) view. Throws invalid_argument for more than kMaxDims dimensions or a
  /// negative size.
  TensorView(void* data, DType dtype, std::span<const std::int64_t> shape, Device device = {});
  TensorView(void* data, DType dtype, std::initializer_list<std::int64_t> shape,
             Device device = {});

  /// A strided view; `strides` has one entry a dimension, in elements, and may be zero or negative.
  TensorView(void* data, DType dtype, std::span<const std::int64_t> shape,
             std::span<const std::int64_t> strides, Device device = {});

  bool empty() const { return !present_; }
  void* data() const { return data_; }
  DType dtype() const { return dtype_; }
  Device device() const { return device_; }
  int ndim() const { return ndim_; }
  std::int64_t size(int dim) const { return shape_[static_cast<std::size_t>(dim)]; }
  std::int64_t stride(int dim) const { return strides_[static_cast<std::size_t>(dim)]; }
  std::span<const std::int64_t> shape() const {
    return {shape_.data(), static_cast<std::size_t>(ndim_)};
  }
  std::span<const std::int64_t> strides() const {
    return {strides_.data(), static_cast<std::size_t>(ndim_)};
  }
  /// Number of elements; 1 for a scalar (no dimensions), 0 for an absent view.
  std::int64_t numel() const;
  /// Row-major with no gaps (dimensions of size 1 may have any stride).
  bool is_contiguous() const;

  /// The pointer as T*. The caller vouches for the dtype.
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

  /// Views of the same memory. Each throws invalid_argument when a dimension is out of range.
  /// `permute({0, 2, 1})` reorders dimensions; `select(d, i)` drops dimension d at index i;
  /// `slice(d, begin, end)` keeps [begin, end) of dimension d; `view_as(dtype)` reinterprets
  /// elements of the same size (u8 caches as fp8).
  TensorView permute(std::span<const int> order) const;
  TensorView permute(std::initializer_list<int> order) const;
  TensorView select(int dim, std::int64_t index) const;
  TensorView slice(int dim, std::int64_t begin, std::int64_t end) const;
  TensorView view_as(DType dtype) const;

  /// For messages: "bf16[12, 8, 64] on cpu", or "absent".
  std::string describe() const;

 private:
  void* data_ = nullptr;
  DType dtype_ = DType::f32;
  Device device_;
  bool present_ = false;
  int ndim_ = 0;
  std::array<std::int64_t, kMaxDims> shape_{};
  std::array<std::int64_t, kMaxDims> strides_{};
};

}  // namespace foveal
