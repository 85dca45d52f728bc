#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace foveal::cuda {

/// SHA-256 by OpenSSL.
std::array<std::byte, 32> sha256(std::span<const std::byte> bytes);
/// The same as 64 hexadecimal digits.
std::string sha256_hex(std::string_view text);

/// Appends a part with its length ahead, so that no two lists of parts give the same text.
void append_part(std::string& text, std::string_view part);

}  // namespace foveal::cuda
