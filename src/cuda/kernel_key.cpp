#include <fmt/format.h>

#include <cctype>
#include <cmath>
#include <utility>

#include "core/check.h"
#include "cuda/digest.h"
#include "cuda/jit.h"

namespace foveal::cuda {
namespace {

bool is_identifier(std::string_view name) {
  if (name.empty() || std::isdigit(static_cast<unsigned char>(name[0])) != 0) {
    return false;
  }
  for (const char c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '_') {
      return false;
    }
  }
  return true;
}

}  // namespace

std::string arch_name(int compute_capability) {
  // From Hopper on, the matrix instructions belong to one architecture only (suffix 'a'); consumer
  // Blackwell (12.x) has the portable ones.
  const bool specific = compute_capability >= 90 && compute_capability < 120;
  return fmt::format("sm_{}{}", compute_capability, specific ? "a" : "");
}

KernelKey& KernelKey::add(std::string_view type, std::string_view name, std::string value) {
  check(is_identifier(name), "constant of a kernel is named '{}', it must be an identifier", name);
  for (Constant& constant : constants_) {
    if (constant.name == name) {
      constant = {std::string(type), std::string(name), std::move(value)};
      return *this;
    }
  }
  constants_.push_back({std::string(type), std::string(name), std::move(value)});
  return *this;
}

KernelKey& KernelKey::set(std::string_view name, int value) {
  return add("int", name, std::to_string(value));
}

KernelKey& KernelKey::set(std::string_view name, std::int64_t value) {
  return add("long long", name, fmt::format("{}LL", value));
}

KernelKey& KernelKey::set(std::string_view name, bool value) {
  return add("bool", name, value ? "true" : "false");
}

KernelKey& KernelKey::set(std::string_view name, float value) {
  check(std::isfinite(value), "constant {} of a kernel is {}, it must be finite", name, value);
  // Hexadecimal, so that the device sees the very same number.
  return add("float", name, fmt::format("{:a}f", value));
}

KernelKey& KernelKey::set(std::string_view name, DType value) {
  return add("DType", name, fmt::format("DType::{}", to_string(value)));
}

std::string KernelKey::text() const {
  std::string text = fmt::format("{}:{} {}", source, entry, arch);
  for (const Constant& constant : constants_) {
    fmt::format_to(std::back_inserter(text), " {}={}", constant.name,
                   constant.type == "DType" ? constant.value.substr(7) : constant.value);
  }
  if (!headers.empty()) {
    std::string parts;
    for (const auto& [name, content] : headers) {
      append_part(parts, name);
      append_part(parts, content);
    }
    fmt::format_to(std::back_inserter(text), " headers={}", sha256_hex(parts).substr(0, 16));
  }
  return text;
}

std::string KernelKey::config_header() const {
  std::string text =
      "#pragma once\nnamespace config {\n"
      "enum class DType : unsigned char { f32, f16, bf16, f8e4m3, f8e5m2, f64, i32, i64, u8 };\n";
  for (const Constant& constant : constants_) {
    fmt::format_to(std::back_inserter(text), "constexpr {} {} = {};\n", constant.type,
                   constant.name, constant.value);
  }
  return text + "}  // namespace config\n";
}

}  // namespace foveal::cuda
