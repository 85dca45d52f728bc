#pragma once

#include <string>
#include <string_view>

namespace foveal::tools {

/// Passes text on in whole UTF-8 characters: tokens may end inside one. Bytes that are no UTF-8
/// come out as U+FFFD.
class Utf8Stream {
 public:
  /// Takes more bytes and returns what is complete.
  std::string push(std::string_view bytes);
  /// What is left at the end: nothing, or U+FFFD for a character cut short.
  std::string finish();

 private:
  std::string pending_;
};

}  // namespace foveal::tools
