#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.h"

namespace foveal::problem {

/// A value of a JSON document and where it stands, so that every message names file and field, what
/// was found and what is accepted. Throws io.
class JsonValue {
 public:
  JsonValue(const nlohmann::json& json, std::string where)
      : json_(&json), where_(std::move(where)) {}

  const nlohmann::json& json() const { return *json_; }
  const std::string& where() const { return where_; }
  bool is_null() const { return json_->is_null(); }

  [[noreturn]] void refuse(std::string_view accepted) const {
    constexpr std::size_t kMaxLength = 80;
    std::string value =
        json_->dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
    if (value.size() > kMaxLength) {
      value = value.substr(0, kMaxLength) + "...";
    }
    fail(ErrorCode::io, "{} is {}, it must be {}", where_, value, accepted);
  }

  std::int64_t integer(std::int64_t min, std::int64_t max) const {
    const bool fits = json_->is_number_integer() &&
                      (!json_->is_number_unsigned() ||
                       json_->get<std::uint64_t>() <=
                           static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()));
    if (!fits || json_->get<std::int64_t>() < min || json_->get<std::int64_t>() > max) {
      refuse(fmt::format("an integer from {} to {}", min, max));
    }
    return json_->get<std::int64_t>();
  }

  double number() const {
    if (!json_->is_number()) {
      refuse("a number");
    }
    return json_->get<double>();
  }

  bool boolean() const {
    if (!json_->is_boolean()) {
      refuse("true or false");
    }
    return json_->get<bool>();
  }

  std::string text() const {
    if (!json_->is_string()) {
      refuse("a string");
    }
    return json_->get<std::string>();
  }

  /// The elements of an array, of `size` if it is given.
  std::vector<JsonValue> elements(std::optional<std::int64_t> size = std::nullopt) const {
    if (!json_->is_array() || (size && static_cast<std::int64_t>(json_->size()) != *size)) {
      refuse(size ? fmt::format("an array of {} elements", *size) : "an array");
    }
    std::vector<JsonValue> values;
    for (std::size_t i = 0; i < json_->size(); ++i) {
      values.emplace_back((*json_)[i], fmt::format("{}[{}]", where_, i));
    }
    return values;
  }

  std::vector<float> floats(std::optional<std::int64_t> size = std::nullopt) const {
    std::vector<float> numbers;
    for (const JsonValue& element : elements(size)) {
      numbers.push_back(static_cast<float>(element.number()));
    }
    return numbers;
  }

  /// Refuses what is not an object, and objects with other members than these.
  void only(std::initializer_list<std::string_view> names) const {
    if (!json_->is_object()) {
      refuse("an object");
    }
    for (const auto& [name, value] : json_->items()) {
      if (std::find(names.begin(), names.end(), name) == names.end()) {
        fail(ErrorCode::io, "{}.{} is unknown; known are {}", where_, name, fmt::join(names, ", "));
      }
    }
  }

  std::optional<JsonValue> find(const std::string& name) const {
    const auto found = json_->find(name);
    if (found == json_->end()) {
      return std::nullopt;
    }
    return JsonValue(*found, where_ + "." + name);
  }

  JsonValue member(const std::string& name) const {
    const auto found = find(name);
    if (!found) {
      fail(ErrorCode::io, "{}.{} is missing", where_, name);
    }
    return *found;
  }

 private:
  const nlohmann::json* json_;
  std::string where_;
};

}  // namespace foveal::problem
