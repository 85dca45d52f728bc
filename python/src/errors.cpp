#include "errors.h"

namespace foveal::python {
namespace {

PyObject* unsupported_error = nullptr;

}  // namespace

void raise(PyObject* type, const std::string& message) {
  PyErr_SetString(type, message.c_str());
  throw nb::python_error();
}

void check(foveal_status status) {
  switch (status) {
    case FOVEAL_OK:
      return;
    case FOVEAL_INVALID_ARGUMENT:
      raise(PyExc_ValueError, foveal_last_error());
    case FOVEAL_UNSUPPORTED:
      raise(unsupported_error, foveal_last_error());
    case FOVEAL_OUT_OF_MEMORY:
      raise(PyExc_MemoryError, foveal_last_error());
    case FOVEAL_IO_ERROR:
      raise(PyExc_OSError, foveal_last_error());
    default:
      raise(PyExc_RuntimeError, foveal_last_error());
  }
}

std::string text_of(nb::handle object) {
  PyObject* text = PyObject_Str(object.ptr());
  if (text == nullptr) {
    throw nb::python_error();
  }
  const nb::object owned = nb::steal<nb::object>(text);
  // Lone surrogates have no UTF-8.
  PyObject* bytes = PyUnicode_AsEncodedString(text, "utf-8", "backslashreplace");
  if (bytes == nullptr) {
    throw nb::python_error();
  }
  return nb::cast<nb::bytes>(nb::steal<nb::object>(bytes)).c_str();
}

std::string kind_of(nb::handle object) {
  if (object.is_none()) {
    return "None";
  }
  const std::string module = text_of(object.type().attr("__module__"));
  const std::string name = text_of(object.type().attr("__qualname__"));
  return "a " + (module == "builtins" ? name : module + "." + name);
}

void bind_errors(nb::module_& module) {
  unsupported_error = PyErr_NewExceptionWithDoc("foveal.UnsupportedError",
                                                "The arguments are legal, but no (chosen) backend "
                                                "can serve them; the message has every reason.",
                                                PyExc_ValueError, nullptr);
  module.attr("UnsupportedError") = nb::borrow(unsupported_error);
}

}  // namespace foveal::python
