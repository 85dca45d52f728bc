#include "foveal/dtype.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "foveal/error.h"
#include "foveal/tensor.h"

namespace foveal {

std::string_view to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
      return "invalid_argument";
    case ErrorCode::unsupported:
      return "unsupported";
    case ErrorCode::out_of_memory:
      return "out_of_memory";
    case ErrorCode::device:
      return "device";
    case ErrorCode::compile:
      return "compile";
    case ErrorCode::io:
      return "io";
  }
  return "unknown";
}

std::string_view to_string(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
    case DType::f8e4m3:
      return "f8e4m3";
    case DType::f8e5m2:
      return "f8e5m2";
    case DType::f64:
      return "f64";
    case DType::i32:
      return "i32";
    case DType::i64:
      return "i64";
    case DType::u8:
      return "u8";
  }
  return "unknown";
}

std::optional<DType> dtype_from_string(std::string_view name) {
  static constexpr std::array<std::pair<std::string_view, DType>, 27> kNames{{
      {"f32", DType::f32},
      {"float32", DType::f32},
      {"float", DType::f32},
      {"fp32", DType::f32},
      {"f16", DType::f16},
      {"float16", DType::f16},
      {"half", DType::f16},
      {"fp16", DType::f16},
      {"bf16", DType::bf16},
      {"bfloat16", DType::bf16},
      {"f8e4m3", DType::f8e4m3},
      {"fp8", DType::f8e4m3},
      {"fp8_e4m3", DType::f8e4m3},
      {"f8_e4m3", DType::f8e4m3},
      {"float8_e4m3fn", DType::f8e4m3},
      {"f8e5m2", DType::f8e5m2},
      {"fp8_e5m2", DType::f8e5m2},
      {"f8_e5m2", DType::f8e5m2},
      {"f64", DType::f64},
      {"float8_e5m2", DType::f8e5m2},
      {"float64", DType::f64},
      {"i32", DType::i32},
      {"int32", DType::i32},
      {"i64", DType::i64},
      {"int64", DType::i64},
      {"u8", DType::u8},
      {"uint8", DType::u8},
  }};
  std::string lower(name);
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) {
    return static_cast<char>(c >= 'A' && c <= 'Z' ? c + 32 : c);
  });
  const auto* found = std::find_if(kNames.begin(), kNames.end(),
                                   [&](const auto& entry) { return entry.first == lower; });
  if (found == kNames.end()) {
    return std::nullopt;
  }
  return found->second;
}

std::string_view to_string(DeviceType type) {
  switch (type) {
    case DeviceType::cpu:
      return "cpu";
    case DeviceType::cuda:
      return "cuda";
    case DeviceType::opencl:
      return "opencl";
  }
  return "unknown";
}

std::string to_string(const Device& device) {
  std::string name(to_string(device.type));
  if (device.type != DeviceType::cpu) {
    name.append(":").append(std::to_string(device.index));
  }
  return name;
}

}  // namespace foveal
