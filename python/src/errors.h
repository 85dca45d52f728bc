#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <string>

#include "foveal/foveal_c.h"

namespace foveal::python {

namespace nb = nanobind;

/// Raises the Python exception of a status, with the library's message: ValueError for bad
/// arguments, foveal.UnsupportedError (a ValueError too), MemoryError, OSError or RuntimeError.
void check(foveal_status status);

[[noreturn]] void raise(PyObject* type, const std::string& message);

/// str() of an object.
std::string text_of(nb::handle object);

/// "a list", for messages about arguments of the wrong type.
std::string kind_of(nb::handle object);

void bind_errors(nb::module_& module);

}  // namespace foveal::python
