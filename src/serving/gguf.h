#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "serving/mapped_file.h"
#include "serving/model.h"
#include "serving/weights.h"

namespace foveal::serving {

/// A metadata value. Integers of all widths are int64 (a uint64 beyond it is refused), floats are
/// double. Arrays are of strings or of numbers, the latter as doubles or int64 likewise.
using GgufValue =
    std::variant<std::int64_t, double, bool, std::string_view, std::vector<std::int64_t>,
                 std::vector<double>, std::vector<std::string_view>>;

/// The directory of a GGUF file (version 2 or 3, little-endian): its metadata and where its tensors
/// lie. Everything is bounds-checked here; views point into the mapped file, which the object
/// keeps.
class GgufFile {
 public:
  explicit GgufFile(const std::filesystem::path& path);

  const std::string& name() const { return file_.name(); }
  bool has(const std::string& key) const { return metadata_.contains(key); }
  const std::unordered_map<std::string, GgufValue>& metadata() const { return metadata_; }

  /// The value of `key`; empty when absent. Throws io when it is of another type than asked for.
  std::optional<std::int64_t> integer(const std::string& key) const;
  std::optional<double> number(const std::string& key) const;
  std::optional<bool> boolean(const std::string& key) const;
  std::optional<std::string> string(const std::string& key) const;
  /// Nullptr when absent.
  const std::vector<std::string_view>* strings(const std::string& key) const;
  const std::vector<std::int64_t>* integers(const std::string& key) const;

  /// A tensor's directory entry. `shape` has the slowest dimension first, the reverse of the
  /// file's.
  struct TensorInfo {
    std::vector<std::int64_t> shape;
    std::uint32_t type = 0;
    std::uint64_t offset = 0;  ///< from the start of the data section
  };
  const std::unordered_map<std::string, TensorInfo>& tensors() const { return tensors_; }
  /// See FindTensor. Throws unsupported for a type that Foveal does not decode.
  StoredTensor find(const std::string& tensor_name, const std::vector<std::int64_t>& shape) const;

 private:
  template <typename T>
  const T* get(const std::string& key, std::string_view type_name) const;

  MappedFile file_;
  std::unordered_map<std::string, GgufValue> metadata_;
  std::unordered_map<std::string, TensorInfo> tensors_;
  std::span<const std::byte> data_;
};

/// Whether the bytes start with GGUF's magic.
bool is_gguf(std::span<const std::byte> bytes);

/// Loads the weights of a "llama" architecture file.
Model load_gguf_model(const std::filesystem::path& path, ProgressFn progress, void* user);

}  // namespace foveal::serving
