#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace foveal {

/// Uninitialised memory, null where there is none. From 2 MiB on it asks for huge pages: rows of a
/// cache are pages apart, and looking up pages of 4 KiB takes longer than reading 256 bytes of
/// each.
inline std::shared_ptr<void> allocate_host(std::int64_t bytes) {
  constexpr std::size_t kPage = 4096;
  constexpr std::size_t kHugePage = std::size_t{2} << 20;
  const auto size = static_cast<std::size_t>(bytes);
  const std::size_t alignment = size >= kHugePage ? kHugePage : kPage;
  const std::size_t rounded = (size + alignment - 1) / alignment * alignment;
  void* const memory = std::aligned_alloc(alignment, rounded);
#ifdef MADV_HUGEPAGE
  if (memory != nullptr && alignment == kHugePage) {
    madvise(memory, rounded, MADV_HUGEPAGE);  // Without them it is only slower.
  }
#endif
  return {memory, std::free};
}

}  // namespace foveal
