#pragma once

#include "config.cuh"
#include "ptx/convert.cuh"

namespace tile {

template <config::DType kType>
struct TypeOf;
template <>
struct TypeOf<config::DType::f32> {
  using type = float;
};
template <>
struct TypeOf<config::DType::f16> {
  using type = ptx::f16;
};
template <>
struct TypeOf<config::DType::bf16> {
  using type = ptx::bf16;
};
template <>
struct TypeOf<config::DType::f8e4m3> {
  using type = ptx::f8e4m3;
};
template <>
struct TypeOf<config::DType::f8e5m2> {
  using type = ptx::f8e5m2;
};

}  // namespace tile
