#pragma once

#include <utility>

#include "foveal/foveal_c.h"

namespace foveal::c_api {

/// Of the exception being handled: its status, and its message for foveal_last_error().
foveal_status remember_exception() noexcept;

/// Runs the body of a C function: nothing is thrown past it.
template <typename Action>
foveal_status guarded(Action&& action) noexcept {
  try {
    std::forward<Action>(action)();
    return FOVEAL_OK;
  } catch (...) {
    return remember_exception();
  }
}

}  // namespace foveal::c_api
