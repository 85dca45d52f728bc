#include "cuda/digest.h"

#include <fmt/format.h>
#include <openssl/evp.h>

#include "core/check.h"

namespace foveal::cuda {

std::array<std::byte, 32> sha256(std::span<const std::byte> bytes) {
  std::array<std::byte, 32> digest{};
  if (EVP_Digest(bytes.data(), bytes.size(), reinterpret_cast<unsigned char*>(digest.data()),
                 nullptr, EVP_sha256(), nullptr) != 1) {
    fail(ErrorCode::io, "SHA-256 is not available from OpenSSL");
  }
  return digest;
}

std::string sha256_hex(std::string_view text) {
  std::string hex;
  for (const std::byte byte : sha256(std::as_bytes(std::span(text)))) {
    fmt::format_to(std::back_inserter(hex), "{:02x}", static_cast<unsigned>(byte));
  }
  return hex;
}

void append_part(std::string& text, std::string_view part) {
  fmt::format_to(std::back_inserter(text), "{}:", part.size());
  text += part;
}

}  // namespace foveal::cuda
