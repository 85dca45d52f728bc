#include "objects.h"

NB_MODULE(_foveal, module) {
  module.doc() = "Foveal over its C interface; use the package foveal.";
  foveal::python::bind_errors(module);
  foveal::python::bind_selection(module);
  foveal::python::bind_steps(module);
  foveal::python::bind_layers(module);
}
