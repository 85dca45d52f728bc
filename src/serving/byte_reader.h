#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "core/check.h"

namespace foveal::serving {

/// A cursor over a file's bytes that never reads past the end: it throws io naming the file, the
/// field, the offset and what was missing. Numbers are little-endian, as on every machine Foveal
/// runs on.
class ByteReader {
 public:
  ByteReader(std::string file_name, std::span<const std::byte> bytes)
      : file_name_(std::move(file_name)), bytes_(bytes) {}

  const std::string& file_name() const { return file_name_; }
  std::uint64_t offset() const { return offset_; }
  std::uint64_t remaining() const { return bytes_.size() - offset_; }

  template <typename T>
  T read(std::string_view field) {
    T value;
    std::memcpy(&value, take(sizeof(T), field).data(), sizeof(T));
    return value;
  }

  std::span<const std::byte> take(std::uint64_t count, std::string_view field) {
    if (count > remaining()) {
      fail(ErrorCode::io, "{}: {} needs {} bytes at offset {}, but the file ends at {}", file_name_,
           field, count, offset_, bytes_.size());
    }
    const auto taken = bytes_.subspan(offset_, count);
    offset_ += count;
    return taken;
  }

  std::string_view take_string(std::uint64_t length, std::string_view field) {
    const auto taken = take(length, field);
    return {reinterpret_cast<const char*>(taken.data()), taken.size()};
  }

 private:
  std::string file_name_;
  std::span<const std::byte> bytes_;
  std::uint64_t offset_ = 0;
};

}  // namespace foveal::serving
