#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "core/check.h"
#include "core/json_text.h"
#include "serving/mapped_file.h"

namespace foveal::serving {

/// Parses a JSON object; throws io naming the file when the text is no such thing.
inline nlohmann::json parse_json_object(std::string_view text, const std::string& file) {
  nlohmann::json json = parse_json(text, file);
  if (!json.is_object()) {
    fail(ErrorCode::io, "{} is JSON, but no object", file);
  }
  return json;
}

/// The JSON object that a file of at most 100 MB holds; throws io as above.
inline nlohmann::json read_json_object(const std::filesystem::path& path) {
  constexpr std::size_t kMaxBytes = 100'000'000;
  return parse_json_object(read_text_file(path, kMaxBytes), path.string());
}

/// A value as a message shows it: short, and whatever bytes its strings hold.
inline std::string describe_json(const nlohmann::json& value) {
  constexpr std::size_t kMaxLength = 100;
  std::string text =
      value.dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
  return text.size() > kMaxLength ? text.substr(0, kMaxLength) + "…" : text;
}

/// The member `key` of an object, nullptr when it is absent or null.
inline const nlohmann::json* find_member(const nlohmann::json& object, const std::string& key) {
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

}  // namespace foveal::serving
