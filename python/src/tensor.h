#pragma once

#include <optional>
#include <utility>

#include "dlpack_abi.h"
#include "errors.h"

namespace foveal::python {

/// The stream of a call: what the caller gave, or else the current one of the framework that the
/// first CUDA tensor is of.
class CallStream {
 public:
  explicit CallStream(nb::handle given);
  void* get() const { return stream_.value_or(nullptr); }
  bool known() const { return stream_.has_value(); }
  void set(void* stream) { stream_ = stream; }

 private:
  std::optional<void*> stream_;
};

enum class Access { kRead, kWrite };

/// An argument's array as a DLTensor, without a copy, and what keeps it valid: the object itself
/// (which the caller of the function holds), a buffer, or a DLPack capsule's tensor. Reads
///  - types with DLPack's exchange table (PyTorch): no allocation, no reference;
///  - NumPy's arrays and others of Python's buffer protocol; ml_dtypes' bfloat16 and float8 too,
///    which neither buffers nor DLPack of NumPy know;
///  - other producers of __dlpack__.
class Tensor {
 public:
  Tensor() = default;
  /// None is an absent tensor, where `optional`; to `hold`, the array's memory is kept as well.
  Tensor(const char* name, nb::handle array, Access access, CallStream& stream,
         bool optional = false, bool hold = false);
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  ~Tensor();

  /// Null when absent.
  const DLTensor* get() const { return present_ ? &view_ : nullptr; }
  operator const DLTensor*() const { return get(); }
  bool on_cpu() const {
    return present_ &&
           (view_.device.device_type == kDLCPU || view_.device.device_type == kDLCUDAHost);
  }

 private:
  void read_exchange(const char* name, nb::handle array, const ExchangeTable& table,
                     CallStream& stream, bool hold);
  void read_buffer(const char* name, nb::handle array, Access access);
  void read_dlpack(const char* name, nb::handle array, Access access, CallStream& stream);

  DLTensor view_{};
  bool present_ = false;
  bool has_buffer_ = false;
  Py_buffer buffer_{};
  nb::object buffer_owner_;
  VersionedTensor* versioned_ = nullptr;
  DLManagedTensor* unversioned_ = nullptr;
  std::int64_t strides_[FOVEAL_MAX_DIMS] = {};
};

}  // namespace foveal::python
