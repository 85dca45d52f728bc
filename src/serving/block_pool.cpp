#include "serving/block_pool.h"

#include <algorithm>
#include <limits>

#include "core/check.h"
#include "foveal/metadata.h"

namespace foveal::serving {
namespace {

constexpr auto kNull = static_cast<std::int32_t>(kNullBlock);

/// The finaliser of splitmix64 (Steele, Lea, Flood, 2014): every input bit reaches every output
/// bit.
std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

}  // namespace

std::uint64_t hash_block(std::uint64_t parent, std::span<const std::int32_t> tokens) {
  std::uint64_t hash = parent;
  for (const std::int32_t token : tokens) {
    hash = mix(hash + 0x9e3779b97f4a7c15ULL + static_cast<std::uint32_t>(token));
  }
  return hash;
}

BlockPool::BlockPool(std::int64_t num_blocks, std::int64_t block_size, BlockHashFn hash)
    : block_size_(block_size), hash_(hash) {
  check(
      num_blocks >= 2 && num_blocks <= std::numeric_limits<std::int32_t>::max(),
      "num_blocks was {}; it must be at least 2, as block 0 is never handed out, and fit in int32",
      num_blocks);
  check(block_size >= 1, "block_size was {}; it must be at least 1", block_size);
  blocks_.resize(static_cast<std::size_t>(num_blocks));
  contents_.resize(static_cast<std::size_t>(num_blocks * block_size));
  by_hash_.reserve(static_cast<std::size_t>(num_blocks));
  for (std::int32_t i = 0; i < num_blocks; ++i) {
    at(i).prev = i == 0 ? static_cast<std::int32_t>(num_blocks - 1) : i - 1;
    at(i).next = i == num_blocks - 1 ? 0 : i + 1;
  }
  // The null block stands for the empty sequence, the parent of every first block.
  at(kNull).sequence = ++last_sequence_;
}

std::span<const std::int32_t> BlockPool::content(std::int32_t block) const {
  return std::span(contents_).subspan(static_cast<std::size_t>(block * block_size_),
                                      static_cast<std::size_t>(block_size_));
}

std::int32_t BlockPool::find(std::uint64_t hash, std::uint64_t parent_sequence,
                             std::span<const std::int32_t> tokens) const {
  const auto entry = by_hash_.find(hash);
  if (entry == by_hash_.end() || at(entry->second).parent_sequence != parent_sequence ||
      !std::ranges::equal(content(entry->second), tokens)) {
    return kNull;
  }
  return entry->second;
}

std::vector<std::int32_t> BlockPool::find_prefix(std::span<const std::int32_t> tokens) const {
  std::vector<std::int32_t> found;
  const auto width = static_cast<std::size_t>(block_size_);
  std::int32_t parent = kNull;
  for (std::size_t begin = 0; begin + width < tokens.size(); begin += width) {
    const auto own = tokens.subspan(begin, width);
    const std::int32_t block = find(hash_(at(parent).hash, own), at(parent).sequence, own);
    if (block == kNull) {
      break;
    }
    found.push_back(block);
    parent = block;
  }
  return found;
}

void BlockPool::unlink(std::int32_t block) {
  at(at(block).prev).next = at(block).next;
  at(at(block).next).prev = at(block).prev;
}

void BlockPool::hold(std::int32_t block) {
  if (at(block).references++ == 0) {
    unlink(block);
    stats_.peak_used = std::max(stats_.peak_used, ++stats_.used);
  }
}

void BlockPool::forget_content(std::int32_t block) {
  const auto entry = by_hash_.find(at(block).hash);
  if (at(block).sequence != 0 && entry != by_hash_.end() && entry->second == block) {
    by_hash_.erase(entry);
  }
  at(block).sequence = 0;
}

std::int32_t BlockPool::allocate() {
  const std::int32_t block = at(kNull).next;
  if (block == kNull) {
    fail(ErrorCode::out_of_memory, "all {} blocks of the KV cache are in use", num_usable());
  }
  forget_content(block);
  hold(block);
  return block;
}

void BlockPool::acquire_prefix(std::span<const std::int32_t> blocks) {
  for (const std::int32_t block : blocks) {
    hold(block);
  }
  stats_.hit_blocks += static_cast<std::int64_t>(blocks.size());
  stats_.hit_tokens += static_cast<std::int64_t>(blocks.size()) * block_size_;
}

void BlockPool::release(std::span<const std::int32_t> blocks) {
  for (std::size_t i = blocks.size(); i-- > 0;) {
    const std::int32_t block = blocks[i];
    check(block != kNull && at(block).references > 0, "block {} was released but nobody holds it",
          block);
    if (--at(block).references == 0) {
      const std::int32_t last = at(kNull).prev;
      at(block).prev = last;
      at(block).next = kNull;
      at(last).next = block;
      at(kNull).prev = block;
      --stats_.used;
    }
  }
}

void BlockPool::set_content(std::int32_t block, std::int32_t parent,
                            std::span<const std::int32_t> tokens) {
  check(block != kNull && at(block).references > 0 && at(block).sequence == 0,
        "block {} gets content but is not a fresh block", block);
  check(at(parent).sequence != 0, "block {} follows block {}, which has no content", block, parent);
  check(std::ssize(tokens) == block_size_, "block {} gets {} tokens; it must get {}", block,
        tokens.size(), block_size_);
  Block& entry = at(block);
  entry.hash = hash_(at(parent).hash, tokens);
  entry.parent_sequence = at(parent).sequence;
  std::ranges::copy(tokens, contents_.begin() + block * block_size_);
  const std::int32_t known = find(entry.hash, entry.parent_sequence, tokens);
  if (known != kNull) {
    entry.sequence = at(known).sequence;
  } else {
    // A block of other content under the same hash (a collision, or one whose parent is gone) is no
    // longer found.
    entry.sequence = ++last_sequence_;
    by_hash_[entry.hash] = block;
  }
}

}  // namespace foveal::serving
