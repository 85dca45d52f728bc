#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "serving/test_files.h"

namespace foveal::serving::testing {

/// Writes a GGUF file in memory, by the format's definition and without any check.
class GgufBuilder {
 public:
  std::uint32_t version = 3;
  std::uint64_t alignment = 32;

  GgufBuilder& u32(const std::string& key, std::uint32_t value) {
    return entry(key, 4, [&] { append(metadata_, value); });
  }
  GgufBuilder& u64(const std::string& key, std::uint64_t value) {
    return entry(key, 10, [&] { append(metadata_, value); });
  }
  GgufBuilder& f32(const std::string& key, float value) {
    return entry(key, 6, [&] { append(metadata_, value); });
  }
  GgufBuilder& boolean(const std::string& key, bool value) {
    return entry(key, 7, [&] { append(metadata_, static_cast<std::uint8_t>(value)); });
  }
  GgufBuilder& string(const std::string& key, const std::string& value) {
    return entry(key, 8, [&] { append_string(metadata_, value); });
  }
  GgufBuilder& strings(const std::string& key, const std::vector<std::string>& values) {
    return entry(key, 9, [&] {
      append(metadata_, std::uint32_t{8});
      append(metadata_, static_cast<std::uint64_t>(values.size()));
      for (const std::string& value : values) {
        append_string(metadata_, value);
      }
    });
  }
  GgufBuilder& i32s(const std::string& key, const std::vector<std::int32_t>& values) {
    return entry(key, 9, [&] {
      append(metadata_, std::uint32_t{5});
      append(metadata_, static_cast<std::uint64_t>(values.size()));
      metadata_ += bytes_of(values);
    });
  }
  /// Any value: its type number and its bytes.
  GgufBuilder& raw(const std::string& key, std::uint32_t type, const std::string& bytes) {
    return entry(key, type, [&] { metadata_ += bytes; });
  }

  /// `dims` as the file has them, the fastest first.
  GgufBuilder& tensor(const std::string& name, const std::vector<std::uint64_t>& dims,
                      std::uint32_t type, const std::string& bytes) {
    data_.resize((data_.size() + alignment - 1) / alignment * alignment, '\0');
    return tensor_at(name, dims, type, data_.size(), bytes);
  }
  /// The same with any offset in the directory.
  GgufBuilder& tensor_at(const std::string& name, const std::vector<std::uint64_t>& dims,
                         std::uint32_t type, std::uint64_t offset, const std::string& bytes) {
    append_string(tensors_, name);
    append(tensors_, static_cast<std::uint32_t>(dims.size()));
    tensors_ += bytes_of(dims);
    append(tensors_, type);
    append(tensors_, offset);
    data_ += bytes;
    ++tensor_count_;
    return *this;
  }
  GgufBuilder& f32_tensor(const std::string& name, const std::vector<std::uint64_t>& dims,
                          float first, float step) {
    std::size_t count = 1;
    for (const std::uint64_t size : dims) {
      count *= size;
    }
    return tensor(name, dims, 0, bytes_of(ramp(count, first, step)));
  }

  std::string build() const {
    std::string out = "GGUF";
    append(out, version);
    append(out, tensor_count_);
    append(out, metadata_count_);
    out += metadata_;
    out += tensors_;
    out.resize((out.size() + alignment - 1) / alignment * alignment, '\0');
    return out + data_;
  }

 private:
  static void append_string(std::string& out, const std::string& value) {
    append(out, static_cast<std::uint64_t>(value.size()));
    out += value;
  }
  template <typename Write>
  GgufBuilder& entry(const std::string& key, std::uint32_t type, const Write& write) {
    append_string(metadata_, key);
    append(metadata_, type);
    write();
    ++metadata_count_;
    return *this;
  }

  std::string metadata_, tensors_, data_;
  std::uint64_t metadata_count_ = 0;
  std::uint64_t tensor_count_ = 0;
};

}  // namespace foveal::serving::testing
