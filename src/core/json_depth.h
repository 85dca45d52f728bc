#pragma once

#include <string_view>

namespace foveal {

/// Whether brackets of the JSON text nest deeper than `levels`. What prints a parsed value, for a
/// message, goes down as deep as it nests, and a file must not choose how deep.
inline bool nests_deeper_than(std::string_view text, int levels) {
  int depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      i += c == '\\' ? 1 : 0;
      in_string = c != '"';
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > levels) {
        return true;
      }
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return false;
}

/// No file that is read here needs a tenth of it.
inline constexpr int kMaxJsonDepth = 200;

}  // namespace foveal
