#pragma once

#include <fmt/format.h>

#include <utility>

#include "foveal/error.h"

namespace foveal {

/// Throws an Error with a formatted message. By convention the message begins with the argument's
/// name and says what it was and what it must be.
template <typename... Args>
[[noreturn]] void fail(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(code, fmt::format(format, std::forward<Args>(args)...));
}

/// fail(invalid_argument, …) unless the condition holds.
template <typename... Args>
void check(bool condition, fmt::format_string<Args...> format, Args&&... args) {
  if (!condition) [[unlikely]] {
    fail(ErrorCode::invalid_argument, format, std::forward<Args>(args)...);
  }
}

}  // namespace foveal
