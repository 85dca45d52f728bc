#include "arguments.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

namespace foveal::python {
namespace {

[[noreturn]] void wrong_type(const char* name, nb::handle value, const char* accepted) {
  raise(PyExc_TypeError, std::string(name) + " is " + kind_of(value) + ", it must be " + accepted);
}

/// The text of an object, shortened, for messages.
std::string shown(nb::handle value) {
  constexpr std::size_t kMost = 80;
  PyObject* text = PyObject_Repr(value.ptr());
  if (text == nullptr) {
    PyErr_Clear();
    return kind_of(value);
  }
  std::string shown = text_of(nb::steal<nb::object>(text));
  return shown.size() <= kMost ? shown : shown.substr(0, kMost) + "…";
}

constexpr std::array<std::pair<const char*, std::int32_t>, 18> kDtypes{{
    {"f32", FOVEAL_F32},
    {"f16", FOVEAL_F16},
    {"bf16", FOVEAL_BF16},
    {"f8e4m3", FOVEAL_F8E4M3},
    {"f8e5m2", FOVEAL_F8E5M2},
    {"f64", FOVEAL_F64},
    {"float32", FOVEAL_F32},
    {"float", FOVEAL_F32},
    {"float16", FOVEAL_F16},
    {"half", FOVEAL_F16},
    {"bfloat16", FOVEAL_BF16},
    {"float8_e4m3fn", FOVEAL_F8E4M3},
    {"fp8_e4m3", FOVEAL_F8E4M3},
    {"fp8", FOVEAL_F8E4M3},
    {"float8_e5m2", FOVEAL_F8E5M2},
    {"fp8_e5m2", FOVEAL_F8E5M2},
    {"float64", FOVEAL_F64},
    {"double", FOVEAL_F64},
}};

}  // namespace

std::int64_t to_int(const char* name, nb::handle value) {
  if (!PyIndex_Check(value.ptr()) || PyBool_Check(value.ptr())) {
    wrong_type(name, value, "an integer");
  }
  PyObject* number = PyNumber_Index(value.ptr());
  if (number == nullptr) {
    PyErr_Clear();
    wrong_type(name, value, "an integer");
  }
  const nb::object owned = nb::steal<nb::object>(number);
  const long long result = PyLong_AsLongLong(number);
  if (result == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    raise(PyExc_ValueError, std::string(name) + " is an integer of more than 64 bits");
  }
  return result;
}

std::optional<std::int64_t> to_optional_int(const char* name, nb::handle value) {
  return value.is_none() ? std::nullopt : std::optional(to_int(name, value));
}

std::int32_t to_int32(const char* name, nb::handle value) {
  const std::int64_t number = to_int(name, value);
  if (number < std::numeric_limits<std::int32_t>::min() ||
      number > std::numeric_limits<std::int32_t>::max()) {
    raise(PyExc_ValueError,
          std::string(name) + " is " + std::to_string(number) + ", it must fit in 32 bits");
  }
  return static_cast<std::int32_t>(number);
}

float to_float(const char* name, nb::handle value) {
  // Arrays of one element turn into floats too, but a flag is a mistake.
  const double number = PyBool_Check(value.ptr()) ? -1.0 : PyFloat_AsDouble(value.ptr());
  if (PyBool_Check(value.ptr()) || (number == -1.0 && PyErr_Occurred() != nullptr)) {
    PyErr_Clear();
    wrong_type(name, value, "a number");
  }
  return static_cast<float>(number);
}

bool to_bool(const char* name, nb::handle value) {
  if (!PyBool_Check(value.ptr())) {
    wrong_type(name, value, "True or False");
  }
  return value.ptr() == Py_True;
}

std::string to_string(const char* name, nb::handle value) {
  if (!PyUnicode_Check(value.ptr())) {
    wrong_type(name, value, "a string");
  }
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(value.ptr(), &size);
  if (text == nullptr || std::string_view(text, size).find('\0') != std::string_view::npos) {
    PyErr_Clear();
    raise(PyExc_ValueError,
          std::string(name) + " is " + shown(value) + ", it must be text without null characters");
  }
  return {text, static_cast<std::size_t>(size)};
}

std::vector<float> to_floats(const char* name, nb::handle value) {
  if (value.is_none()) {
    return {};
  }
  const bool is_array = nb::hasattr(value, "tolist");
  const nb::object list = is_array ? nb::object(value.attr("tolist")()) : nb::borrow(value);
  if (PyUnicode_Check(list.ptr()) || PyBytes_Check(list.ptr()) || !PySequence_Check(list.ptr())) {
    wrong_type(name, value, "a sequence of numbers, one a head, or None");
  }
  const std::string element = std::string("an element of ") + name;
  std::vector<float> floats;
  const Py_ssize_t size = PySequence_Size(list.ptr());
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* item = PySequence_GetItem(list.ptr(), i);
    if (item == nullptr) {
      throw nb::python_error();
    }
    floats.push_back(to_float(element.c_str(), nb::steal<nb::object>(item)));
  }
  if (size < 0) {
    PyErr_Clear();
    wrong_type(name, value, "a sequence of numbers, one a head, or None");
  }
  return floats;
}

std::int32_t to_dtype(const char* name, nb::handle value) {
  std::string text;
  if (PyUnicode_Check(value.ptr())) {
    text = to_string(name, value);
  } else if (nb::hasattr(value, "name")) {  // numpy.dtype
    text = text_of(value.attr("name"));
  } else if (nb::hasattr(value, "__name__")) {  // numpy.float32
    text = text_of(value.attr("__name__"));
  } else {  // torch.float32
    text = text_of(value);
  }
  const std::size_t dot = text.rfind('.');
  const std::string word = dot == std::string::npos ? text : text.substr(dot + 1);
  for (const auto& [known, dtype] : kDtypes) {
    if (word == known) {
      return dtype;
    }
  }
  raise(PyExc_ValueError,
        std::string(name) + " is " + shown(value) +
            ", accepted are float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 and float64, as "
            "strings or as dtypes of NumPy, ml_dtypes or PyTorch");
}

const char* dtype_name(std::int32_t dtype) {
  for (const auto& [name, known] : kDtypes) {
    if (known == dtype) {
      return name;
    }
  }
  return dtype == FOVEAL_I32 ? "i32" : dtype == FOVEAL_I64 ? "i64" : "u8";
}

DLDevice to_device(const char* name, nb::handle value) {
  const std::string text = text_of(value);
  const std::size_t colon = text.find(':');
  const std::string kind = text.substr(0, colon);
  std::int64_t index = 0;
  bool good = kind == "cpu" || kind == "cuda";
  if (colon != std::string::npos) {
    const std::string digits = text.substr(colon + 1);
    good = good && !digits.empty() && digits.size() < 5 &&
           std::all_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; });
    index = good ? std::stoll(digits) : 0;
  }
  if (!good) {
    raise(PyExc_ValueError,
          std::string(name) + " is " + shown(value) + ", accepted are 'cpu', 'cuda' and 'cuda:N'");
  }
  return {kind == "cpu" ? kDLCPU : kDLCUDA, static_cast<int>(index)};
}

std::int32_t to_choice(const char* name, nb::handle value, const std::vector<const char*>& words) {
  const std::string word = to_string(name, value);
  std::string accepted;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (word == words[i]) {
      return static_cast<std::int32_t>(i);
    }
    accepted += (i == 0 ? "'" : ", '") + std::string(words[i]) + "'";
  }
  raise(PyExc_ValueError, std::string(name) + " is " + shown(value) + ", accepted are " + accepted);
}

std::optional<void*> to_stream(nb::handle stream) {
  if (stream.is_none()) {
    return std::nullopt;
  }
  nb::object number = nb::borrow(stream);
  if (nb::hasattr(stream, "__cuda_stream__")) {  // (version, number)
    number = stream.attr("__cuda_stream__")();
    number = number[1];
  } else {
    for (const char* attribute : {"cuda_stream", "ptr", "stream"}) {  // PyTorch, CuPy, others
      if (nb::hasattr(stream, attribute)) {
        number = stream.attr(attribute);
        break;
      }
    }
  }
  if (!PyLong_Check(number.ptr()) || PyBool_Check(number.ptr())) {
    wrong_type("stream", stream,
               "None, the number of a CUDA stream, or an object with one (a stream of PyTorch or "
               "CuPy)");
  }
  const unsigned long long handle = PyLong_AsUnsignedLongLong(number.ptr());
  if (handle == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    raise(PyExc_ValueError, "stream is " + shown(stream) + ", it must be the number of a stream");
  }
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(handle));
}

}  // namespace foveal::python
