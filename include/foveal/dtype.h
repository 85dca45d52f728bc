#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "foveal/export.h"

namespace foveal {

/// Element types. Floating types are those attention computes with or stores caches in; the integer
/// types are those of metadata (int32 lengths and tables, int64 slots) and raw bytes.
enum class DType : std::uint8_t { f32, f16, bf16, f8e4m3, f8e5m2, f64, i32, i64, u8 };

/// Bytes of one element.
constexpr std::int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f16:
    case DType::bf16:
      return 2;
    case DType::f8e4m3:
    case DType::f8e5m2:
    case DType::u8:
      return 1;
  }
  return 0;
}

/// f8e4m3 is the finite-only "e4m3fn" form (no infinities, largest value 448); f8e5m2 is IEEE-like.
constexpr bool is_fp8(DType dtype) { return dtype == DType::f8e4m3 || dtype == DType::f8e5m2; }
constexpr bool is_float(DType dtype) { return dtype <= DType::f64; }

/// "f32", "bf16", "f8e4m3", "i32", …
FOVEAL_API std::string_view to_string(DType dtype);

/// Accepts the names of to_string and the usual long ones ("float32", "half", "bfloat16", "fp8",
/// "fp8_e4m3", "fp8_e5m2", …). Empty when the name is unknown.
FOVEAL_API std::optional<DType> dtype_from_string(std::string_view name);

}  // namespace foveal
