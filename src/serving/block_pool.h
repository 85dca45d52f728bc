#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace foveal::serving {

/// The hash of a full block: of all tokens before it (by the parent's hash) and its own.
using BlockHashFn = std::uint64_t (*)(std::uint64_t parent, std::span<const std::int32_t> tokens);
std::uint64_t hash_block(std::uint64_t parent, std::span<const std::int32_t> tokens);

/// The KV cache's blocks: who holds them, and what full ones contain, so that a request whose
/// prompt begins like another's takes its blocks instead of computing them (prefix caching).
///
/// Block 0 is the null block and is never handed out. A block nobody holds stands in the free list,
/// least recently used first, and keeps its content until it is handed out again; a hit revives it.
/// All operations are O(1) in the number of blocks.
class BlockPool {
 public:
  struct Stats {
    std::int64_t used = 0;  ///< Blocks held now.
    std::int64_t peak_used = 0;
    std::int64_t hit_blocks = 0;  ///< Blocks taken by content instead of being computed.
    std::int64_t hit_tokens = 0;
  };

  /// Throws invalid_argument for sizes that make no pool. Another `hash` is for tests of
  /// collisions.
  BlockPool(std::int64_t num_blocks, std::int64_t block_size, BlockHashFn hash = hash_block);

  std::int64_t num_blocks() const { return static_cast<std::int64_t>(blocks_.size()); }
  std::int64_t block_size() const { return block_size_; }
  std::int64_t num_usable() const { return num_blocks() - 1; }  ///< All but the null block.
  std::int64_t num_free() const { return num_usable() - stats_.used; }
  std::int64_t ref_count(std::int32_t block) const { return at(block).references; }
  const Stats& stats() const { return stats_; }

  /// Blocks of full cached content that the sequence begins with. At least one token is left over:
  /// its logits are what the caller wants. Takes no reference.
  std::vector<std::int32_t> find_prefix(std::span<const std::int32_t> tokens) const;

  /// A block with one reference and no content. Throws out_of_memory when none is free.
  std::int32_t allocate();
  /// One more reference to each block found by find_prefix, since when nothing may have been
  /// allocated.
  void acquire_prefix(std::span<const std::int32_t> blocks);
  /// Drops one reference to each block of a sequence. The last go into the free list first: a block
  /// is worth nothing without those before it, so it should be reused before them.
  void release(std::span<const std::int32_t> blocks);

  /// Makes a held block findable by the tokens that fill it, behind `parent`, whose content was set
  /// before (the null block for a sequence's first block). When the same content is cached already,
  /// that block stays the one that is found.
  void set_content(std::int32_t block, std::int32_t parent, std::span<const std::int32_t> tokens);

 private:
  struct Block {
    std::int32_t references = 0;
    std::int32_t prev = 0;  ///< In the free list, a ring through the null block.
    std::int32_t next = 0;
    std::uint64_t hash = 0;
    /// Number of the sequence of tokens from the start to the end of this block, 0 without content.
    /// Equal numbers are equal sequences; with the parent's number and the tokens it makes a hit
    /// exact whatever the hashes do.
    std::uint64_t sequence = 0;
    std::uint64_t parent_sequence = 0;
  };

  const Block& at(std::int32_t block) const { return blocks_[static_cast<std::size_t>(block)]; }
  Block& at(std::int32_t block) { return blocks_[static_cast<std::size_t>(block)]; }
  std::span<const std::int32_t> content(std::int32_t block) const;
  /// The block with this content, or the null block.
  std::int32_t find(std::uint64_t hash, std::uint64_t parent_sequence,
                    std::span<const std::int32_t> tokens) const;
  void unlink(std::int32_t block);
  void hold(std::int32_t block);
  void forget_content(std::int32_t block);

  std::int64_t block_size_;
  BlockHashFn hash_;
  std::vector<Block> blocks_;
  std::vector<std::int32_t> contents_;  ///< Token ids, block_size a block.
  std::unordered_map<std::uint64_t, std::int32_t> by_hash_;
  std::uint64_t last_sequence_ = 0;
  Stats stats_;
};

}  // namespace foveal::serving
