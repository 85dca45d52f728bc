#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cuda/jit.h"

namespace foveal::cuda {

/// A folder of cubins, one file each, shared by threads and processes without locks: files appear
/// by rename and are never changed. A damaged file counts as absent. The folder is kept below
/// `max_bytes` by removing the files that have gone longest without use. When it cannot be written
/// the cache says so once in the log and lives on in reading alone.
class CubinCache {
 public:
  /// An empty folder name: nothing is found and nothing stored.
  CubinCache(std::filesystem::path folder, std::int64_t max_bytes);

  /// `id` is KernelProgram::id_with_compiler().
  std::optional<Cubin> load(const std::string& id);
  void store(const std::string& id, const Cubin& cubin);

  struct Entry {
    std::filesystem::path path;
    Cubin cubin;  ///< Without its image.
    std::int64_t bytes = 0;
    std::chrono::seconds age{};  ///< Since it was last used, to the hour.
  };
  /// Most recently used first; files that are no cubins are left out.
  std::vector<Entry> list() const;
  /// Removes the cache's files (no others) and returns how many.
  std::int64_t clear();

  const std::filesystem::path& folder() const { return folder_; }
  std::int64_t max_bytes() const { return max_bytes_; }

 private:
  std::filesystem::path path_of(const std::string& id) const;
  void trim();

  std::filesystem::path folder_;
  std::int64_t max_bytes_;
  std::mutex trim_mutex_;
  std::atomic<bool> writable_{true};
};

}  // namespace foveal::cuda
