#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "errors.h"

// Python values to C++, with errors that name the argument.
namespace foveal::python {

std::int64_t to_int(const char* name, nb::handle value);
std::optional<std::int64_t> to_optional_int(const char* name, nb::handle value);
std::int32_t to_int32(const char* name, nb::handle value);
float to_float(const char* name, nb::handle value);
bool to_bool(const char* name, nb::handle value);
std::string to_string(const char* name, nb::handle value);
/// A sequence of numbers, or an array with tolist(); None is empty.
std::vector<float> to_floats(const char* name, nb::handle value);
/// "bf16", "bfloat16", torch.bfloat16, numpy.float32, a numpy.dtype: a foveal_dtype.
std::int32_t to_dtype(const char* name, nb::handle value);
const char* dtype_name(std::int32_t dtype);
/// "cpu", "cuda", "cuda:1", (type, index) of DLPack, or a device object whose str() is one.
DLDevice to_device(const char* name, nb::handle value);
/// The index of a word in a list of them.
std::int32_t to_choice(const char* name, nb::handle value, const std::vector<const char*>& words);
/// None, the number of a stream, or an object of a framework that has one.
std::optional<void*> to_stream(nb::handle stream);

/// The object of a class of this module.
template <typename T>
T& to_instance(const char* name, nb::handle value, const char* class_name) {
  if (!nb::isinstance<T>(value)) {
    raise(PyExc_TypeError,
          std::string(name) + " is " + kind_of(value) + ", it must be a foveal." + class_name);
  }
  return *nb::inst_ptr<T>(value);
}

}  // namespace foveal::python
