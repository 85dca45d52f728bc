#pragma once

#include <dlpack/dlpack.h>

#include <array>
#include <cstdint>

#include "foveal/error.h"
#include "foveal/tensor.h"

/// Tensors to and from DLPack without a copy. Header-only, against whichever dlpack.h the including
/// project has (0.6 and later): the layout of DLTensor has not changed since.
namespace foveal {

/// Type codes that DLPack added in 1.1; older headers lack the names.
inline constexpr std::uint8_t kDLPackFloat8E4M3FN = 10;
inline constexpr std::uint8_t kDLPackFloat8E5M2 = 12;

/// The view of a DLTensor's memory. Accepts CPU, pinned host, CUDA and OpenCL memory of the dtypes
/// of DType, single lanes only; null strides mean row-major. Throws unsupported with what it met.
inline TensorView from_dlpack(const DLTensor& tensor) {
  Device device;
  switch (tensor.device.device_type) {
    case kDLCPU:
    case kDLCUDAHost:
      break;
    case kDLCUDA:
    case kDLCUDAManaged:
      device = {DeviceType::cuda, tensor.device.device_id};
      break;
    case kDLOpenCL:
      device = {DeviceType::opencl, tensor.device.device_id};
      break;
    default:
      throw Error(ErrorCode::unsupported,
                  "from_dlpack: device_type is " +
                      std::to_string(static_cast<int>(tensor.device.device_type)) +
                      ", accepted are CPU, CUDAHost, CUDA, CUDAManaged and OpenCL");
  }
  const std::uint8_t code = tensor.dtype.code;
  const std::uint8_t bits = tensor.dtype.bits;
  DType dtype{};
  if (code == kDLFloat && bits == 64) {
    dtype = DType::f64;
  } else if (code == kDLFloat && bits == 32) {
    dtype = DType::f32;
  } else if (code == kDLFloat && bits == 16) {
    dtype = DType::f16;
  } else if (code == kDLBfloat && bits == 16) {
    dtype = DType::bf16;
  } else if (code == kDLPackFloat8E4M3FN && bits == 8) {
    dtype = DType::f8e4m3;
  } else if (code == kDLPackFloat8E5M2 && bits == 8) {
    dtype = DType::f8e5m2;
  } else if (code == kDLInt && bits == 32) {
    dtype = DType::i32;
  } else if (code == kDLInt && bits == 64) {
    dtype = DType::i64;
  } else if (code == kDLUInt && bits == 8) {
    dtype = DType::u8;
  } else {
    throw Error(ErrorCode::unsupported,
                "from_dlpack: dtype has code " + std::to_string(code) + " and " +
                    std::to_string(bits) +
                    " bits, accepted are f64, f32, f16, bf16, f8e4m3, f8e5m2, "
                    "i32, i64 and u8");
  }
  if (tensor.dtype.lanes != 1) {
    throw Error(
        ErrorCode::unsupported,
        "from_dlpack: dtype has " + std::to_string(tensor.dtype.lanes) + " lanes, it must have 1");
  }
  auto* data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  const std::span<const std::int64_t> shape(tensor.shape, static_cast<std::size_t>(tensor.ndim));
  if (tensor.strides == nullptr) {
    return {data, dtype, shape, device};
  }
  return {data, dtype, shape, {tensor.strides, static_cast<std::size_t>(tensor.ndim)}, device};
}

/// A DLTensor together with the arrays it points into. It borrows the memory of the view.
struct DLPackView {
  std::array<std::int64_t, TensorView::kMaxDims> shape{};
  std::array<std::int64_t, TensorView::kMaxDims> strides{};
  DLTensor tensor{};

  /// Throws invalid_argument when the view is absent.
  explicit DLPackView(const TensorView& view) {
    if (view.empty()) {
      throw Error(ErrorCode::invalid_argument, "DLPackView: view is absent, it must be a tensor");
    }
    for (int i = 0; i < view.ndim(); ++i) {
      shape[static_cast<std::size_t>(i)] = view.size(i);
      strides[static_cast<std::size_t>(i)] = view.stride(i);
    }
    tensor.data = view.data();
    tensor.ndim = view.ndim();
    tensor.shape = shape.data();
    tensor.strides = strides.data();
    tensor.byte_offset = 0;
    tensor.device.device_id = view.device().index;
    switch (view.device().type) {
      case DeviceType::cpu:
        tensor.device.device_type = kDLCPU;
        break;
      case DeviceType::cuda:
        tensor.device.device_type = kDLCUDA;
        break;
      case DeviceType::opencl:
        tensor.device.device_type = kDLOpenCL;
        break;
    }
    tensor.dtype.lanes = 1;
    tensor.dtype.bits = static_cast<std::uint8_t>(8 * size_of(view.dtype()));
    switch (view.dtype()) {
      case DType::f64:
      case DType::f32:
      case DType::f16:
        tensor.dtype.code = kDLFloat;
        break;
      case DType::bf16:
        tensor.dtype.code = kDLBfloat;
        break;
      case DType::f8e4m3:
        tensor.dtype.code = kDLPackFloat8E4M3FN;
        break;
      case DType::f8e5m2:
        tensor.dtype.code = kDLPackFloat8E5M2;
        break;
      case DType::i32:
      case DType::i64:
        tensor.dtype.code = kDLInt;
        break;
      case DType::u8:
        tensor.dtype.code = kDLUInt;
        break;
    }
  }
  DLPackView(const DLPackView&) = delete;
  DLPackView& operator=(const DLPackView&) = delete;
};

}  // namespace foveal
