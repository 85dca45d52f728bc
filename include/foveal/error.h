#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include "foveal/export.h"

namespace foveal {

/// What kind of failure an Error reports. The C API returns the same codes.
enum class ErrorCode {
  invalid_argument,  ///< An argument contradicts its contract: shape, range, order, a missing
                     ///< tensor.
  unsupported,       ///< The arguments are legal, but no (chosen) backend can serve them.
  out_of_memory,     ///< A buffer could not be had; the message says how many bytes.
  device,            ///< The device or its driver failed.
  compile,           ///< A kernel could not be compiled.
  io,                ///< A file could not be read or written, or its content is malformed.
};

/// "invalid_argument", "unsupported", …
FOVEAL_API std::string_view to_string(ErrorCode code);

/// The one exception the library throws. The message names the argument, what it was and what it
/// must be. When it is thrown before a launch (all checks are), nothing has been written to output
/// or cache.
class FOVEAL_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace foveal
