#include "foveal/tensor.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>

#include "core/check.h"

namespace foveal {
namespace {

void check_shape(std::span<const std::int64_t> shape) {
  check(shape.size() <= TensorView::kMaxDims,
        "TensorView: shape has {} dimensions, at most {} are accepted", shape.size(),
        TensorView::kMaxDims);
  std::int64_t elements = 1;
  for (const std::int64_t size : shape) {
    check(size >= 0, "TensorView: shape is [{}], every size must be >= 0", fmt::join(shape, ", "));
    check(!__builtin_mul_overflow(elements, std::max<std::int64_t>(size, 1), &elements),
          "TensorView: shape is [{}], its elements must be countable in 63 bits",
          fmt::join(shape, ", "));
  }
}

void check_dim(const TensorView& view, int dim) {
  check(dim >= 0 && dim < view.ndim(), "TensorView: dim is {}, it must be in [0, {})", dim,
        view.ndim());
}

/// Addresses of elements must not wrap around.
void check_reach(const TensorView& tensor) {
  constexpr std::int64_t kMaxElements = std::int64_t{1} << 59;
  std::int64_t reach = 0;
  for (int i = 0; i < tensor.ndim() && tensor.numel() > 0; ++i) {
    std::int64_t step = 0;
    const bool fits =
        tensor.size(i) == 1 ||
        (tensor.stride(i) > -kMaxElements && tensor.stride(i) < kMaxElements &&
         !__builtin_mul_overflow(tensor.size(i) - 1, std::abs(tensor.stride(i)), &step) &&
         !__builtin_add_overflow(reach, step, &reach) && reach < kMaxElements);
    check(fits, "TensorView: stride {} is {} and size {}, the elements must lie within 2^59", i,
          tensor.stride(i), tensor.size(i));
  }
}

}  // namespace

TensorView::TensorView(void* data, DType dtype, std::span<const std::int64_t> shape, Device device)
    : data_(data),
      dtype_(dtype),
      device_(device),
      present_(true),
      ndim_(static_cast<int>(shape.size())) {
  check_shape(shape);
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    shape_[i] = shape[i];
    strides_[i] = stride;
    stride *= shape[i];
  }
}

TensorView::TensorView(void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                       Device device)
    : TensorView(data, dtype, std::span<const std::int64_t>(shape.begin(), shape.size()), device) {}

TensorView::TensorView(void* data, DType dtype, std::span<const std::int64_t> shape,
                       std::span<const std::int64_t> strides, Device device)
    : data_(data),
      dtype_(dtype),
      device_(device),
      present_(true),
      ndim_(static_cast<int>(shape.size())) {
  check_shape(shape);
  check(shape.size() == strides.size(),
        "TensorView: strides has {} entries, it must have {} as shape has", strides.size(),
        shape.size());
  for (std::size_t i = 0; i < shape.size(); ++i) {
    shape_[i] = shape[i];
    strides_[i] = strides[i];
  }
  check_reach(*this);
}

std::int64_t TensorView::numel() const {
  if (empty()) {
    return 0;
  }
  std::int64_t count = 1;
  for (const std::int64_t size : shape()) {
    count *= size;
  }
  return count;
}

bool TensorView::is_contiguous() const {
  std::int64_t expected = 1;
  for (int i = ndim_ - 1; i >= 0; --i) {
    if (size(i) != 1 && stride(i) != expected) {
      return false;
    }
    expected *= size(i);
  }
  return true;
}

TensorView TensorView::permute(std::span<const int> order) const {
  check(static_cast<int>(order.size()) == ndim_,
        "TensorView::permute: order has {} entries, it must have {}", order.size(), ndim_);
  TensorView result = *this;
  std::array<bool, kMaxDims> seen{};
  for (std::size_t i = 0; i < order.size(); ++i) {
    check_dim(*this, order[i]);
    const auto from = static_cast<std::size_t>(order[i]);
    check(!seen[from], "TensorView::permute: order names dimension {} twice", order[i]);
    seen[from] = true;
    result.shape_[i] = shape_[from];
    result.strides_[i] = strides_[from];
  }
  return result;
}

TensorView TensorView::permute(std::initializer_list<int> order) const {
  return permute(std::span<const int>(order.begin(), order.size()));
}

TensorView TensorView::select(int dim, std::int64_t index) const {
  check_dim(*this, dim);
  check(index >= 0 && index < size(dim), "TensorView::select: index is {}, it must be in [0, {})",
        index, size(dim));
  TensorView result = slice(dim, index, index + 1);
  for (int i = dim; i + 1 < ndim_; ++i) {
    const auto at = static_cast<std::size_t>(i);
    result.shape_[at] = result.shape_[at + 1];
    result.strides_[at] = result.strides_[at + 1];
  }
  --result.ndim_;
  return result;
}

TensorView TensorView::slice(int dim, std::int64_t begin, std::int64_t end) const {
  check_dim(*this, dim);
  check(begin >= 0 && begin <= end && end <= size(dim),
        "TensorView::slice: range is [{}, {}), it must lie in [0, {})", begin, end, size(dim));
  TensorView result = *this;
  if (data_ != nullptr) {
    result.data_ = static_cast<std::byte*>(data_) + begin * stride(dim) * size_of(dtype_);
  }
  result.shape_[static_cast<std::size_t>(dim)] = end - begin;
  return result;
}

TensorView TensorView::view_as(DType dtype) const {
  check(size_of(dtype) == size_of(dtype_),
        "TensorView::view_as: dtype is {}, its elements must have the {} bytes of {}",
        to_string(dtype), size_of(dtype_), to_string(dtype_));
  TensorView result = *this;
  result.dtype_ = dtype;
  return result;
}

std::string TensorView::describe() const {
  if (empty()) {
    return "absent";
  }
  return fmt::format("{}[{}] on {}", to_string(dtype_), fmt::join(shape(), ", "),
                     to_string(device_));
}

}  // namespace foveal
