#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/jit.h"

namespace foveal::cuda {

/// Cubins by KernelProgram::id, in one file: a machine needs no compiler for what is in it. The id
/// holds the sources, so a pack of another version of the library is simply never hit.
class KernelPack {
 public:
  /// Throws io when the file cannot be read or is damaged.
  static KernelPack read(const std::filesystem::path& path);
  static void write(const std::filesystem::path& path,
                    const std::vector<std::pair<std::string, const Cubin*>>& cubins);

  std::optional<Cubin> find(const std::string& id) const;
  std::size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    Cubin cubin;  ///< Without its image, which lies in images_.
    std::size_t offset = 0;
    std::size_t bytes = 0;
  };
  std::map<std::string, Entry> entries_;
  std::vector<std::byte> images_;
};

}  // namespace foveal::cuda
