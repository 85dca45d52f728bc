#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "foveal/dtype.h"
#include "foveal/tensor.h"
#include "serving/mapped_file.h"

namespace foveal::serving {

/// A tensor of a safetensors file. BOOL has no DType of its own: it is u8 with `is_bool` set.
struct SafetensorsTensor {
  DType dtype = DType::f32;
  bool is_bool = false;
  std::vector<std::int64_t> shape;
  std::span<std::byte> data;  ///< row-major, aligned for the dtype

  /// Throws unsupported for more dimensions than a view has.
  TensorView view() const { return {data.data(), dtype, shape}; }
};

/// A safetensors file: its tensors, in name order, and the strings of its `__metadata__`. The
/// tensors are views of the mapped file, which the object keeps; writing to them does not reach the
/// file.
class SafetensorsFile {
 public:
  /// Throws io for a malformed file, unsupported for a dtype other than F64, F32, F16, BF16,
  /// F8_E4M3, F8_E5M2, I32, I64, U8 and BOOL.
  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::string& name() const { return file_.name(); }
  const std::map<std::string, SafetensorsTensor>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  bool has(const std::string& tensor) const { return tensors_.contains(tensor); }
  /// Throws io when there is none.
  const SafetensorsTensor& tensor(const std::string& tensor_name) const;

 private:
  MappedFile file_;
  std::map<std::string, SafetensorsTensor> tensors_;
  std::map<std::string, std::string> metadata_;
  /// Copies of tensors that the file does not align (its format does not ask for it).
  std::vector<std::vector<std::max_align_t>> aligned_copies_;
};

/// Whether the bytes start as a safetensors file does: a header length and a JSON object.
bool is_safetensors(std::span<const std::byte> bytes);

/// Writes the file in one go: under another name first, so that a file at `path` is whole or as
/// before. Throws io when it cannot be written and invalid_argument when a tensor's data is not of
/// its shape's size.
void write_safetensors(const std::filesystem::path& path,
                       const std::map<std::string, SafetensorsTensor>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace foveal::serving
