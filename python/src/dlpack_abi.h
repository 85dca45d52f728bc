#pragma once

#include <dlpack/dlpack.h>

#include <cstdint>

// What DLPack added in 1.0 (versioned tensors) and 1.3 (the exchange table of an array type), as
// its ABI has them: Debian's header is older.
namespace foveal::python {

struct DlpackVersion {
  std::uint32_t major;
  std::uint32_t minor;
};

inline constexpr std::uint64_t kDlpackReadOnly = 1;

struct VersionedTensor {
  DlpackVersion version;
  void* manager_ctx;
  void (*deleter)(VersionedTensor* self);
  std::uint64_t flags;
  DLTensor dl_tensor;
};

/// In a capsule "dlpack_exchange_api" at the array type's __dlpack_c_exchange_api__. Functions
/// return 0, or −1 with a Python error set; none synchronises.
struct ExchangeTable {
  DlpackVersion version;
  const ExchangeTable* older;  ///< A table of an older major version, or null.
  void* managed_tensor_allocator;
  int (*managed_tensor_from_py_object)(void* object, VersionedTensor** out);
  int (*managed_tensor_to_py_object)(VersionedTensor* tensor, void** out);
  /// Fills what the object owns: valid as long as it lives. May be null.
  int (*dltensor_from_py_object)(void* object, DLTensor* out);
  int (*current_work_stream)(DLDeviceType type, std::int32_t device, void** out);
};

}  // namespace foveal::python
