#include "tensor.h"

#include <string>
#include <string_view>
#include <unordered_map>

#include "arguments.h"
#include "foveal/dlpack.h"

namespace foveal::python {
namespace {

enum class Kind { kExchange, kBuffer, kDlpack, kRefused };

/// How arrays of a type are read, found out once a type.
struct Reader {
  Kind kind = Kind::kRefused;
  const ExchangeTable* table = nullptr;
};

Reader find_reader(nb::handle array) {
  const nb::handle type = array.type();
  if (nb::hasattr(type, "__dlpack_c_exchange_api__")) {
    const nb::object capsule = type.attr("__dlpack_c_exchange_api__");
    const auto* table = static_cast<const ExchangeTable*>(
        PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (table == nullptr) {
      PyErr_Clear();
    }
    while (table != nullptr && table->version.major != 1) {
      table = table->older;
    }
    if (table != nullptr && table->managed_tensor_from_py_object != nullptr) {
      return {Kind::kExchange, table};
    }
  }
  // A masked array's mask would be ignored.
  if (nb::hasattr(type, "__array_interface__") && nb::hasattr(type, "mask")) {
    return {};
  }
  if (PyObject_CheckBuffer(array.ptr()) != 0 &&
      (nb::hasattr(type, "__array_interface__") || !nb::hasattr(type, "__dlpack__"))) {
    return {PyBytes_Check(array.ptr()) ? Kind::kRefused : Kind::kBuffer, nullptr};
  }
  return {nb::hasattr(type, "__dlpack__") ? Kind::kDlpack : Kind::kRefused, nullptr};
}

/// The types that were seen; each is kept alive, so that none takes another's place.
const Reader& reader_of(nb::handle array) {
  static auto* readers = new std::unordered_map<PyObject*, Reader>;
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(array.ptr()));
  const auto found = readers->find(type);
  if (found != readers->end()) {
    return found->second;
  }
  const Reader reader = find_reader(array);
  Py_INCREF(type);
  return readers->emplace(type, reader).first->second;
}

bool is_cuda(const DLDevice& device) {
  return device.device_type == kDLCUDA || device.device_type == kDLCUDAManaged;
}

/// Of a buffer's element format, as DLPack names it; code 255 is one it has no name for.
DLDataType dtype_of_format(const char* format, Py_ssize_t item_size) {
  std::string_view text = format == nullptr ? "B" : format;
  const auto bits = static_cast<std::uint8_t>(item_size * 8);
  if (!text.empty() && std::string_view("@=<").find(text.front()) != std::string_view::npos) {
    text.remove_prefix(1);
  }
  const auto among = [&](std::string_view letters) {
    return text.size() == 1 && letters.find(text.front()) != std::string_view::npos;
  };
  if (among("bhilqn")) {
    return {kDLInt, bits, 1};
  }
  if (among("BHILQN")) {
    return {kDLUInt, bits, 1};
  }
  return {static_cast<std::uint8_t>(among("efd") ? kDLFloat : 255), bits, 1};
}

/// ml_dtypes' types of NumPy, which are stored as integers of the same size.
std::optional<std::pair<DLDataType, const char*>> ml_dtype(nb::handle array) {
  if (!nb::hasattr(array, "dtype")) {
    return std::nullopt;
  }
  const std::string name = text_of(array.attr("dtype"));
  if (name == "bfloat16") {
    return {{{kDLBfloat, 16, 1}, "uint16"}};
  }
  if (name == "float8_e4m3fn") {
    return {{{kDLPackFloat8E4M3FN, 8, 1}, "uint8"}};
  }
  if (name == "float8_e5m2") {
    return {{{kDLPackFloat8E5M2, 8, 1}, "uint8"}};
  }
  return std::nullopt;
}

/// The array's DLPack capsule, made behind the work of the call's stream.
nb::object export_capsule(nb::handle array, CallStream& stream) {
  nb::object stream_argument = nb::none();
  const nb::object device = array.attr("__dlpack_device__")();
  if (nb::cast<int>(nb::int_(device[0])) == kDLCUDA) {
    if (!stream.known()) {
      const std::string module = text_of(array.type().attr("__module__"));
      void* current = nullptr;
      if (module.rfind("cupy", 0) == 0) {
        const nb::object cupy = nb::module_::import_("cupy");
        current = to_stream(cupy.attr("cuda").attr("get_current_stream")()).value_or(nullptr);
      }
      stream.set(current);
    }
    // DLPack's number of the default stream is 1.
    const auto number = reinterpret_cast<std::uintptr_t>(stream.get());
    stream_argument = nb::int_(number == 0 ? 1 : number);
  }
  const nb::object exporter = array.attr("__dlpack__");
  try {
    return exporter(nb::arg("stream") = stream_argument,
                    nb::arg("max_version") = nb::make_tuple(1, 1));
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_TypeError)) {
      throw;
    }
    return exporter(nb::arg("stream") = stream_argument);  // A producer of before 1.0.
  }
}

/// What an array's own framework said when it was asked for its memory.
[[noreturn]] void refuse(const char* name, nb::python_error& error) {
  if (!error.matches(PyExc_Exception)) {
    throw nb::python_error(error);  // KeyboardInterrupt and the like.
  }
  const std::string text = text_of(error.value());
  raise(PyExc_ValueError,
        std::string(name) + " cannot be read: " + text.substr(0, text.find('\n')));
}

[[noreturn]] void refuse_read_only(const char* name) {
  raise(PyExc_ValueError, std::string(name) + " is read-only, it must be writable");
}

}  // namespace

CallStream::CallStream(nb::handle given) : stream_(to_stream(given)) {}

Tensor::Tensor(const char* name, nb::handle array, Access access, CallStream& stream, bool optional,
               bool hold)
    : Tensor() {  // What was acquired is released when the rest throws.
  if (array.is_none()) {
    if (!optional) {
      raise(PyExc_TypeError, std::string(name) + " is None, it must be given");
    }
    return;
  }
  const Reader& reader = reader_of(array);
  switch (reader.kind) {
    case Kind::kExchange:
      read_exchange(name, array, *reader.table, stream, hold);
      break;
    case Kind::kBuffer:
      read_buffer(name, array, access);
      break;
    case Kind::kDlpack:
      read_dlpack(name, array, access, stream);
      break;
    case Kind::kRefused:
      raise(PyExc_TypeError, std::string(name) + " is " + kind_of(array) +
                                 ", it must be an array: of NumPy (not masked), PyTorch, JAX, CuPy "
                                 "or another with DLPack or a buffer");
  }
  present_ = true;
}

Tensor::~Tensor() {
  if (has_buffer_) {
    PyBuffer_Release(&buffer_);
  }
  if (versioned_ != nullptr && versioned_->deleter != nullptr) {
    versioned_->deleter(versioned_);
  }
  if (unversioned_ != nullptr && unversioned_->deleter != nullptr) {
    unversioned_->deleter(unversioned_);
  }
}

void Tensor::read_exchange(const char* name, nb::handle array, const ExchangeTable& table,
                           CallStream& stream, bool hold) {
  int failed = 0;
  if (!hold && table.dltensor_from_py_object != nullptr) {
    failed = table.dltensor_from_py_object(array.ptr(), &view_);
  } else {
    failed = table.managed_tensor_from_py_object(array.ptr(), &versioned_);
    if (failed == 0) {
      view_ = versioned_->dl_tensor;
    }
  }
  if (failed != 0) {
    nb::python_error error;  // Takes it away.
    refuse(name, error);
  }
  if (is_cuda(view_.device) && !stream.known() && table.current_work_stream != nullptr) {
    void* current = nullptr;
    if (table.current_work_stream(kDLCUDA, view_.device.device_id, &current) != 0) {
      throw nb::python_error();
    }
    stream.set(current);
  }
}

void Tensor::read_buffer(const char* name, nb::handle array, Access access) {
  // With PyBUF_FORMAT and PyBUF_STRIDES; writable is asked for where it is needed.
  const int flags = access == Access::kWrite ? PyBUF_RECORDS : PyBUF_RECORDS_RO;
  std::optional<DLDataType> dtype;
  if (PyObject_GetBuffer(array.ptr(), &buffer_, flags) != 0) {
    nb::python_error first;  // Takes the error away.
    if (const auto known = ml_dtype(array)) {
      dtype = known->first;
      buffer_owner_ = array.attr("view")(known->second);
      if (PyObject_GetBuffer(buffer_owner_.ptr(), &buffer_, flags) != 0) {
        PyErr_Clear();
        refuse_read_only(name);
      }
    } else if (access == Access::kWrite &&
               PyObject_GetBuffer(array.ptr(), &buffer_, PyBUF_RECORDS_RO) == 0) {
      PyBuffer_Release(&buffer_);
      refuse_read_only(name);
    } else {
      PyErr_Clear();
      raise(PyExc_TypeError,
            std::string(name) + " has a dtype that cannot be read: " + text_of(first.value()));
    }
  }
  has_buffer_ = true;
  view_.data = buffer_.buf;
  view_.device = {kDLCPU, 0};
  view_.ndim = buffer_.ndim;
  view_.dtype = dtype.value_or(dtype_of_format(buffer_.format, buffer_.itemsize));
  if (view_.dtype.code == 255) {
    raise(PyExc_TypeError, std::string(name) + " has elements of the format '" +
                               (buffer_.format == nullptr ? "" : buffer_.format) +
                               "', which Foveal does not know");
  }
  if (buffer_.ndim > FOVEAL_MAX_DIMS) {
    raise(PyExc_ValueError, std::string(name) + " has " + std::to_string(buffer_.ndim) +
                                " dimensions, at most 8 are accepted");
  }
  static_assert(sizeof(Py_ssize_t) == sizeof(std::int64_t));
  view_.shape = reinterpret_cast<std::int64_t*>(buffer_.shape);
  for (int i = 0; i < buffer_.ndim; ++i) {
    const Py_ssize_t bytes = buffer_.strides[i];
    if (buffer_.itemsize == 0 || bytes % buffer_.itemsize != 0) {
      raise(PyExc_ValueError, std::string(name) + " has a stride of " + std::to_string(bytes) +
                                  " bytes, it must be a multiple of an element's " +
                                  std::to_string(buffer_.itemsize));
    }
    strides_[i] = bytes / buffer_.itemsize;
  }
  view_.strides = strides_;
}

void Tensor::read_dlpack(const char* name, nb::handle array, Access access, CallStream& stream) {
  if (access == Access::kWrite && text_of(array.type().attr("__module__")).rfind("jax", 0) == 0) {
    raise(PyExc_ValueError, std::string(name) + " is a JAX array, which cannot be written");
  }
  nb::object capsule;
  try {
    capsule = export_capsule(array, stream);
  } catch (nb::python_error& error) {
    refuse(name, error);
  }
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned") != 0) {
    auto* tensor =
        static_cast<VersionedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    if (tensor->version.major != 1) {
      raise(PyExc_ValueError, std::string(name) + " came as DLPack " +
                                  std::to_string(tensor->version.major) + ", known is 1");
    }
    PyCapsule_SetName(capsule.ptr(), "used_dltensor_versioned");
    versioned_ = tensor;
    view_ = tensor->dl_tensor;
    if (access == Access::kWrite && (tensor->flags & kDlpackReadOnly) != 0) {
      refuse_read_only(name);
    }
  } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor") != 0) {
    unversioned_ = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
    PyCapsule_SetName(capsule.ptr(), "used_dltensor");
    view_ = unversioned_->dl_tensor;
  } else {
    raise(PyExc_TypeError,
          std::string(name) + ": __dlpack__ of " + kind_of(array) + " returned no DLPack capsule");
  }
}

}  // namespace foveal::python
