#pragma once

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.h"

namespace foveal {

namespace detail {

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

}  // namespace detail

/// The value that JSON text from a file holds. Throws io naming `where` when the text is malformed,
/// nests deeper than any file that is read here needs, or has a key of an object twice.
inline nlohmann::json parse_json(std::string_view text, const std::string& where) {
  using Event = nlohmann::json::parse_event_t;
  constexpr int kMaxDepth = 200;
  if (detail::nests_deeper_than(text, kMaxDepth)) {
    fail(ErrorCode::io, "{} nests deeper than {} levels", where, kMaxDepth);
  }
  std::vector<std::set<std::string>> keys;  // Of the objects around.
  const auto look = [&](int /*depth*/, Event event, const nlohmann::json& value) {
    if (event == Event::object_start) {
      keys.emplace_back();
    } else if (event == Event::object_end) {
      keys.pop_back();
    } else if (event == Event::key && !keys.back().insert(value.get<std::string>()).second) {
      fail(ErrorCode::io, "{} has the key \"{}\" twice in one object", where,
           value.get<std::string>());
    }
    return true;
  };
  try {
    return nlohmann::json::parse(text, look);
  } catch (const nlohmann::json::exception& error) {
    fail(ErrorCode::io, "{} is not JSON: {}", where, error.what());
  }
}

}  // namespace foveal
