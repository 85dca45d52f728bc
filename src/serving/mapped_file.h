#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>

namespace foveal::serving {

/// A whole file, mapped privately: writing through bytes() never reaches the file. Throws io when
/// it cannot be opened or is not a regular file.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  /// The path as given, for messages.
  const std::string& name() const { return name_; }
  std::span<std::byte> bytes() const { return bytes_; }

 private:
  std::string name_;
  std::span<std::byte> bytes_;
};

/// The content of a small text file (JSON). Throws io, also when it is larger than `max_bytes`.
std::string read_text_file(const std::filesystem::path& path, std::size_t max_bytes);

/// Whether there is such a folder, or such a file of any kind; false also where one may not look.
bool is_folder(const std::filesystem::path& path);
bool file_exists(const std::filesystem::path& path);

}  // namespace foveal::serving
