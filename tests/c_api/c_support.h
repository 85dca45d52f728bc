#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "foveal/foveal_c.h"

namespace foveal::testing {

/// Expects that a call failed with this status, and every one of `parts` in the message.
template <typename... Parts>
void expect_status(foveal_status status, foveal_status wanted, const Parts&... parts) {
  EXPECT_STREQ(foveal_status_name(status), foveal_status_name(wanted)) << foveal_last_error();
  if (status == wanted) {
    for (const std::string& part : {std::string(parts)...}) {
      EXPECT_THAT(foveal_last_error(), ::testing::HasSubstr(part));
    }
  }
}

#define EXPECT_OK(call) EXPECT_EQ(call, FOVEAL_OK) << foveal_last_error()
#define ASSERT_OK(call) ASSERT_EQ(call, FOVEAL_OK) << foveal_last_error()

/// A handle that destroys itself.
template <typename T, void (*destroy)(T*)>
struct Handle {
  Handle() = default;
  Handle(Handle&& other) noexcept : pointer(std::exchange(other.pointer, nullptr)) {}
  ~Handle() { destroy(pointer); }
  operator T*() const { return pointer; }
  T** operator&() { return &pointer; }
  T* pointer = nullptr;
};
using BackendHandle = Handle<foveal_backend, foveal_backend_destroy>;
using SelectionHandle = Handle<foveal_selection, foveal_selection_destroy>;
using BuilderHandle = Handle<foveal_builder, foveal_builder_destroy>;
using MetadataHandle = Handle<foveal_metadata, foveal_metadata_destroy>;
using LayerHandle = Handle<foveal_layer, foveal_layer_destroy>;
using PoolHandle = Handle<foveal_thread_pool, foveal_thread_pool_destroy>;

inline constexpr DLDevice kCpu{kDLCPU, 0};

/// Memory with its DLTensor; converts to what the functions take.
template <typename T>
struct Tensor {
  Tensor(std::int32_t dtype, std::vector<std::int64_t> shape, std::vector<T> values = {})
      : data(std::move(values)) {
    std::size_t count = 1;
    for (const std::int64_t size : shape) {
      count *= static_cast<std::size_t>(size);
    }
    data.resize(count);
    EXPECT_OK(foveal_tensor_init(&view, data.data(), dtype, kCpu,
                                 static_cast<std::int32_t>(shape.size()), shape.data(), nullptr));
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  operator const DLTensor*() const { return &view.tensor; }

  std::vector<T> data;
  foveal_tensor view{};
};

inline Tensor<float> floats(std::vector<std::int64_t> shape, std::vector<float> values = {}) {
  return {FOVEAL_F32, std::move(shape), std::move(values)};
}
inline Tensor<std::int32_t> ints(std::vector<std::int32_t> values) {
  const auto size = static_cast<std::int64_t>(values.size());
  return {FOVEAL_I32, {size}, std::move(values)};
}
inline Tensor<std::int64_t> longs(std::vector<std::int64_t> values) {
  const auto size = static_cast<std::int64_t>(values.size());
  return {FOVEAL_I64, {size}, std::move(values)};
}

/// 4 query heads on 2 KV heads of 8, float32.
inline foveal_spec small_spec() {
  foveal_spec spec;
  EXPECT_OK(foveal_spec_init(&spec, sizeof spec));
  spec.num_heads = 4;
  spec.num_kv_heads = 2;
  spec.head_size = 8;
  spec.dtype = FOVEAL_F32;
  return spec;
}

inline BackendHandle backend_of(const char* id) {
  BackendHandle backend;
  EXPECT_OK(foveal_get_backend(id, &backend));
  return backend;
}

}  // namespace foveal::testing
