#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string_view>

#include "core/check.h"
#include "foveal/backend.h"
#include "foveal/foveal_c.h"
#include "foveal/selector.h"

// C structs to C++ and back. Messages begin with the C name of the argument.
namespace foveal::c_api {

template <typename T>
const T& require(std::string_view name, const T* pointer) {
  check(pointer != nullptr, "{} is NULL, it must be given", name);
  return *pointer;
}

template <typename T>
T& require(std::string_view name, T* pointer) {
  check(pointer != nullptr, "{} is NULL, it must be given", name);
  return *pointer;
}

template <typename T>
void check_struct_size(std::string_view name, std::size_t size) {
  // The sizes of 0.1. When a struct grows, what was its size here stays accepted.
  check(size >= sizeof(T),
        "{}.struct_size is {}, it must be sizeof the struct, {}: set it before the call", name,
        size, sizeof(T));
}

/// A struct of the caller, who may have been built with a header in which it is longer.
template <typename T>
T read_struct(std::string_view name, const T* given) {
  const std::size_t size = require(name, given).struct_size;
  check_struct_size<T>(name, size);
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  if (!std::all_of(bytes + sizeof(T), bytes + size, [](unsigned char b) { return b == 0; })) {
    fail(ErrorCode::unsupported,
         "{} sets members that version {} of the library does not know (struct_size is {}, here it "
         "is {})",
         name, foveal_version(), size, sizeof(T));
  }
  T result;
  std::memcpy(&result, given, sizeof(T));
  return result;
}

/// Fills a struct of the caller, whose struct_size says how much of it there is.
template <typename T>
void write_struct(std::string_view name, T* out, T value) {
  const std::size_t size = require(name, out).struct_size;
  check_struct_size<T>(name, size);
  value.struct_size = size;
  std::memcpy(out, &value, sizeof(T));
}

/// Sets a struct of the caller to its defaults, and members this library does not know to zero.
template <typename T>
void init_struct(std::string_view name, T* out, std::size_t struct_size, T value) {
  require(name, out);
  check(struct_size >= sizeof(T), "struct_size is {}, it must be sizeof the struct, {}",
        struct_size, sizeof(T));
  value.struct_size = struct_size;
  std::memset(out, 0, struct_size);
  std::memcpy(out, &value, sizeof(T));
}

/// The tensor of an argument; NULL is absent. Every message names the argument.
TensorView to_tensor(std::string_view name, const DLTensor* tensor);
KVCacheView to_kv_cache(const DLTensor* key_cache, const DLTensor* value_cache);
void write_tensor(foveal_tensor& out, const TensorView& view);

DType to_dtype(std::string_view name, std::int32_t dtype);
std::int32_t from_dtype(DType dtype);
DeviceType to_device_type(std::string_view name, std::int32_t type);
Device to_device(std::string_view name, DLDevice device);
AttentionSpec to_spec(std::string_view name, const foveal_spec* spec);
SelectorConfig to_selector_config(const foveal_selector_config* config);
foveal_selector_config from_selector_config(const SelectorConfig& config);
BuilderConfig to_builder_config(const foveal_builder_config* config);
CommonAttentionMetadata to_common(const foveal_step* step);
ExecutionContext to_context(const foveal_context* context);

/// The enumerator with this number, of an enum whose last one is `last`.
template <typename Enum>
Enum to_enum(std::string_view name, std::int32_t number, Enum last) {
  check(number >= 0 && number <= static_cast<std::int32_t>(last), "{} is {}, it must be in [0, {}]",
        name, number, static_cast<std::int32_t>(last));
  return static_cast<Enum>(number);
}

}  // namespace foveal::c_api
