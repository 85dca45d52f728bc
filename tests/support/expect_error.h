#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "foveal/error.h"

namespace foveal::testing {

/// Expects that `action` throws foveal::Error of that code, with every one of `parts` in its
/// message.
template <typename Action, typename... Parts>
void expect_error(ErrorCode code, Action&& action, const Parts&... parts) {
  try {
    action();
    ADD_FAILURE() << "expected an error of code " << to_string(code) << ", none was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(to_string(error.code()), to_string(code)) << error.what();
    for (const std::string& part : {std::string(parts)...}) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr(part));
    }
  }
}

}  // namespace foveal::testing
