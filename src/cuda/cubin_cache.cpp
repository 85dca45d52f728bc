#include "cuda/cubin_cache.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "cuda/sealed_file.h"
#include "foveal/error.h"

namespace foveal::cuda {
namespace {

namespace fs = std::filesystem;
using FileClock = fs::file_time_type::clock;

constexpr std::string_view kExtension = ".cubin";
/// A use is noted in the file's time at most this often: reading should not cost a write each time.
constexpr auto kTouchInterval = std::chrono::hours(1);
/// A temporary file this old belongs to a process that died.
constexpr auto kAbandonedAfter = std::chrono::hours(1);

struct File {
  fs::path path;
  std::int64_t bytes = 0;
  fs::file_time_type used;
};

/// The cache's files; temporary ones, abandoned or not, as `temporary`. Files that vanish meanwhile
/// (another process trims) are left out.
void scan(const fs::path& folder, std::vector<File>& cubins, std::vector<File>& temporary) {
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    std::error_code ignored;
    File file{.path = it->path(), .bytes = 0, .used = {}};
    const bool is_cubin = file.path.extension() == kExtension;
    const bool is_temporary = file.path.filename().string().starts_with(kTemporaryPrefix);
    if ((!is_cubin && !is_temporary) || !it->is_regular_file(ignored)) {
      continue;
    }
    const std::uintmax_t bytes = it->file_size(ignored);
    file.used = it->last_write_time(ignored);
    if (!ignored) {
      file.bytes = static_cast<std::int64_t>(bytes);
      (is_temporary ? temporary : cubins).push_back(std::move(file));
    }
  }
}

}  // namespace

CubinCache::CubinCache(fs::path folder, std::int64_t max_bytes)
    : folder_(std::move(folder)), max_bytes_(max_bytes) {}

fs::path CubinCache::path_of(const std::string& id) const {
  return folder_ / (id + std::string(kExtension));
}

std::optional<Cubin> CubinCache::load(const std::string& id) {
  if (folder_.empty()) {
    return std::nullopt;
  }
  const fs::path path = path_of(id);
  try {
    std::optional<SealedFile> file = find_sealed(path, kCubinTag);
    if (!file) {
      return std::nullopt;  // The usual miss; or another process has just trimmed it away.
    }
    Cubin cubin = cubin_from_json(file->head);
    cubin.image = std::move(file->payload);
    cubin.origin = Cubin::Origin::disk;
    std::error_code error;  // Ignored: on a read-only disk uses are not noted.
    const fs::file_time_type used = fs::last_write_time(path, error);
    if (!error && FileClock::now() - used > kTouchInterval) {
      fs::last_write_time(path, FileClock::now(), error);
    }
    return cubin;
  } catch (const Error& failure) {
    spdlog::warn("kernel cache: {}; the kernel is compiled anew", failure.what());
    return std::nullopt;
  }
}

void CubinCache::store(const std::string& id, const Cubin& cubin) {
  if (folder_.empty() || !writable_.load(std::memory_order_relaxed)) {
    return;
  }
  std::error_code error;
  fs::create_directories(folder_, error);
  try {
    write_sealed(path_of(id), kCubinTag, to_json(cubin), cubin.image);
  } catch (const Error& failure) {
    if (writable_.exchange(false)) {
      spdlog::warn(
          "kernel cache: {}; kernels are kept in memory only and compiled by each process",
          error ? folder_.string() + " cannot be made: " + error.message() : failure.what());
    }
    return;
  }
  trim();
}

void CubinCache::trim() {
  const std::lock_guard lock(trim_mutex_);
  std::vector<File> cubins;
  std::vector<File> temporary;
  scan(folder_, cubins, temporary);
  std::error_code ignored;
  for (const File& file : temporary) {
    if (FileClock::now() - file.used > kAbandonedAfter) {
      fs::remove(file.path, ignored);
    }
  }
  std::int64_t total = 0;
  for (const File& file : cubins) {
    total += file.bytes;
  }
  if (total <= max_bytes_) {
    return;
  }
  std::sort(cubins.begin(), cubins.end(),
            [](const File& a, const File& b) { return a.used < b.used; });
  for (const File& file : cubins) {
    if (total <= max_bytes_) {
      break;
    }
    fs::remove(file.path, ignored);
    total -= file.bytes;
  }
}

std::vector<CubinCache::Entry> CubinCache::list() const {
  std::vector<File> cubins;
  std::vector<File> temporary;
  scan(folder_, cubins, temporary);
  std::sort(cubins.begin(), cubins.end(),
            [](const File& a, const File& b) { return a.used > b.used; });
  std::vector<Entry> entries;
  for (const File& file : cubins) {
    const std::optional<Json> head = read_sealed_head(file.path, kCubinTag);
    if (!head) {
      continue;
    }
    try {
      entries.push_back(
          {.path = file.path,
           .cubin = cubin_from_json(*head),
           .bytes = file.bytes,
           .age = std::chrono::duration_cast<std::chrono::seconds>(FileClock::now() - file.used)});
    } catch (const Error&) {
      // A file of another version: cleared and trimmed, but not described.
    }
  }
  return entries;
}

std::int64_t CubinCache::clear() {
  std::vector<File> cubins;
  std::vector<File> temporary;
  scan(folder_, cubins, temporary);
  std::int64_t removed = 0;
  std::error_code ignored;
  for (const File& file : cubins) {
    removed += fs::remove(file.path, ignored) ? 1 : 0;
  }
  for (const File& file : temporary) {
    if (FileClock::now() - file.used > kAbandonedAfter) {
      fs::remove(file.path, ignored);
    }
  }
  return removed;
}

}  // namespace foveal::cuda
