#include "c_api/errors.h"

#include <exception>
#include <new>
#include <string>

#include "foveal/error.h"

namespace foveal::c_api {
namespace {

/// When there is no memory for a copy of the message, a literal stands for it.
struct LastError {
  std::string copy;
  const char* text = "";

  foveal_status set(foveal_status status, const char* message) noexcept {
    try {
      copy = message;
      text = copy.c_str();
    } catch (...) {
      text = "out of memory, while keeping the message of another error";
    }
    return status;
  }
};

LastError& last_error() noexcept {
  thread_local LastError error;
  return error;
}

foveal_status status_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
      return FOVEAL_INVALID_ARGUMENT;
    case ErrorCode::unsupported:
      return FOVEAL_UNSUPPORTED;
    case ErrorCode::out_of_memory:
      return FOVEAL_OUT_OF_MEMORY;
    case ErrorCode::device:
      return FOVEAL_DEVICE_ERROR;
    case ErrorCode::compile:
      return FOVEAL_COMPILE_ERROR;
    case ErrorCode::io:
      return FOVEAL_IO_ERROR;
  }
  return FOVEAL_INTERNAL_ERROR;
}

}  // namespace

foveal_status remember_exception() noexcept {
  LastError& error = last_error();
  try {
    throw;
  } catch (const Error& e) {
    return error.set(status_of(e.code()), e.what());
  } catch (const std::bad_alloc&) {
    return error.set(FOVEAL_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& e) {
    return error.set(FOVEAL_INTERNAL_ERROR, e.what());
  } catch (...) {
    return error.set(FOVEAL_INTERNAL_ERROR, "an exception of an unknown type");
  }
}

}  // namespace foveal::c_api

const char* foveal_last_error(void) { return foveal::c_api::last_error().text; }

const char* foveal_status_name(foveal_status status) {
  switch (static_cast<int>(status)) {
    case FOVEAL_OK:
      return "ok";
    case FOVEAL_INVALID_ARGUMENT:
      return "invalid_argument";
    case FOVEAL_UNSUPPORTED:
      return "unsupported";
    case FOVEAL_OUT_OF_MEMORY:
      return "out_of_memory";
    case FOVEAL_DEVICE_ERROR:
      return "device";
    case FOVEAL_COMPILE_ERROR:
      return "compile";
    case FOVEAL_IO_ERROR:
      return "io";
    case FOVEAL_INTERNAL_ERROR:
      return "internal";
    default:
      return "unknown";
  }
}
