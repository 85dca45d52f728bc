#include "serving/block_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>

#include "foveal/error.h"

namespace foveal::serving {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<std::int32_t> iota(std::int32_t count, std::int32_t first = 0) {
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

/// Computes a sequence: takes what is cached, allocates the rest and names the content of full
/// blocks.
std::vector<std::int32_t> fill(BlockPool& pool, const std::vector<std::int32_t>& tokens) {
  const auto width = static_cast<std::size_t>(pool.block_size());
  std::vector<std::int32_t> blocks = pool.find_prefix(tokens);
  pool.acquire_prefix(blocks);
  for (std::size_t begin = blocks.size() * width; begin < tokens.size(); begin += width) {
    const std::int32_t parent = blocks.empty() ? 0 : blocks.back();
    blocks.push_back(pool.allocate());
    if (begin + width <= tokens.size()) {
      pool.set_content(blocks.back(), parent, std::span(tokens).subspan(begin, width));
    }
  }
  return blocks;
}

TEST(BlockPool, NeverHandsOutTheNullBlock) {
  BlockPool pool(4, 2);
  EXPECT_EQ(pool.num_free(), 3);
  std::vector<std::int32_t> blocks = {pool.allocate(), pool.allocate(), pool.allocate()};
  EXPECT_THAT(blocks, ::testing::UnorderedElementsAre(1, 2, 3));
  EXPECT_EQ(pool.num_free(), 0);
  try {
    pool.allocate();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::out_of_memory);
  }
  EXPECT_EQ(pool.stats().peak_used, 3);
}

TEST(BlockPool, RefusesImpossibleSizes) {
  EXPECT_THROW(BlockPool(1, 16), Error);
  EXPECT_THROW(BlockPool(16, 0), Error);
}

TEST(BlockPool, RefusesToReleaseWhatNobodyHolds) {
  BlockPool pool(4, 2);
  const std::vector<std::int32_t> blocks = {pool.allocate()};
  pool.release(blocks);
  EXPECT_THROW(pool.release(blocks), Error);
  EXPECT_THROW(pool.release(std::vector<std::int32_t>{0}), Error);
}

TEST(BlockPool, FindsWholeBlocksAndLeavesOneToken) {
  BlockPool pool(10, 4);
  const auto tokens = iota(10);
  const auto blocks = fill(pool, tokens);
  EXPECT_THAT(pool.find_prefix(tokens), ElementsAre(blocks[0], blocks[1]));
  EXPECT_THAT(pool.find_prefix(iota(9)), ElementsAre(blocks[0], blocks[1]));
  // All eight tokens are cached, but the last must be computed.
  EXPECT_THAT(pool.find_prefix(iota(8)), ElementsAre(blocks[0]));
  EXPECT_THAT(pool.find_prefix(iota(4)), IsEmpty());
  EXPECT_THAT(pool.find_prefix(iota(10, 1)), IsEmpty());
  // The second block's tokens at the start are not the second block.
  EXPECT_THAT(pool.find_prefix(iota(6, 4)), IsEmpty());
}

TEST(BlockPool, FreedBlocksAreRevivedUntilReused) {
  BlockPool pool(5, 2);
  const auto tokens = iota(5);
  const auto blocks = fill(pool, tokens);  // Three of four blocks.
  pool.release(blocks);
  EXPECT_EQ(pool.num_free(), 4);
  EXPECT_THAT(pool.find_prefix(tokens), ElementsAre(blocks[0], blocks[1]));
  // The block never used and the half-filled one go first, then the tail of the sequence.
  pool.allocate();
  EXPECT_EQ(pool.allocate(), blocks[2]);
  EXPECT_EQ(pool.allocate(), blocks[1]);
  EXPECT_THAT(pool.find_prefix(tokens), ElementsAre(blocks[0]));
  pool.acquire_prefix(std::vector{blocks[0]});
  EXPECT_EQ(pool.num_free(), 0);
  EXPECT_EQ(pool.ref_count(blocks[0]), 1);
  EXPECT_EQ(pool.stats().hit_blocks, 1);
  EXPECT_EQ(pool.stats().hit_tokens, 2);
}

TEST(BlockPool, SharedBlocksStayUntilTheLastHolderIsGone) {
  BlockPool pool(8, 2);
  const auto first = fill(pool, iota(5));
  const auto second = fill(pool, iota(5));
  EXPECT_EQ(second[0], first[0]);
  EXPECT_EQ(second[1], first[1]);
  EXPECT_NE(second[2], first[2]);
  EXPECT_EQ(pool.ref_count(first[0]), 2);
  EXPECT_EQ(pool.stats().used, 4);
  pool.release(first);
  EXPECT_EQ(pool.ref_count(first[0]), 1);
  EXPECT_EQ(pool.stats().used, 3);
  pool.release(second);
  EXPECT_EQ(pool.stats().used, 0);
  EXPECT_EQ(pool.stats().peak_used, 4);
}

TEST(BlockPool, SameContentComputedTwiceIsFoundOnce) {
  BlockPool pool(8, 2);
  const auto tokens = iota(6);
  const std::int32_t one = pool.allocate();
  const std::int32_t two = pool.allocate();
  pool.set_content(one, 0, std::span(tokens).first(2));
  pool.set_content(two, 0, std::span(tokens).first(2));
  // A child of the second is a child of the content.
  const std::int32_t child = pool.allocate();
  pool.set_content(child, two, std::span(tokens).subspan(2, 2));
  EXPECT_THAT(pool.find_prefix(tokens), ElementsAre(one, child));
}

std::uint64_t constant_hash(std::uint64_t, std::span<const std::int32_t>) { return 42; }

TEST(BlockPool, CollidingHashesNeverGiveOtherContent) {
  BlockPool pool(16, 2, constant_hash);
  const auto a = fill(pool, iota(4));
  EXPECT_THAT(pool.find_prefix(iota(4, 10)), IsEmpty());
  const auto b = fill(pool, iota(4, 10));  // Takes the one hash over.
  EXPECT_THAT(pool.find_prefix(iota(4)), IsEmpty());
  pool.release(a);
  pool.release(b);
}

/// Random requests come and go; whatever find_prefix gives must hold the very tokens that are asked
/// for, from the first on.
void random_operations(BlockHashFn hash, std::uint64_t seed) {
  constexpr std::int64_t kWidth = 3;
  BlockPool pool(24, kWidth, hash);
  std::mt19937_64 generator(seed);
  std::map<std::int32_t, std::vector<std::int32_t>> prefixes;  // Block → all tokens up to its end.
  std::vector<std::vector<std::int32_t>> held;
  for (int step = 0; step < 3000; ++step) {
    std::vector<std::int32_t> tokens(1 + generator() % 20);
    // Few token ids, so that prefixes are often shared.
    std::ranges::generate(tokens, [&] { return static_cast<std::int32_t>(generator() % 2); });
    const std::int64_t needed = (std::ssize(tokens) + kWidth - 1) / kWidth;
    if (needed <= pool.num_free()) {
      const auto hits = pool.find_prefix(tokens);
      ASSERT_LT(std::ssize(hits) * kWidth, std::ssize(tokens));
      for (std::size_t i = 0; i < hits.size(); ++i) {
        const auto end = (static_cast<std::int64_t>(i) + 1) * kWidth;
        const std::vector<std::int32_t> expected(tokens.begin(), tokens.begin() + end);
        ASSERT_EQ(prefixes.at(hits[i]), expected);
      }
      auto blocks = fill(pool, tokens);
      for (std::size_t i = 0; i < blocks.size(); ++i) {
        const auto end = std::min(std::ssize(tokens), (static_cast<std::int64_t>(i) + 1) * kWidth);
        if (i >= hits.size()) {
          prefixes[blocks[i]].assign(tokens.begin(), tokens.begin() + end);
        }
      }
      held.push_back(std::move(blocks));
    }
    if (!held.empty() && generator() % 2 == 0) {
      const std::size_t victim = generator() % held.size();
      pool.release(held[victim]);
      held.erase(held.begin() + static_cast<std::int64_t>(victim));
    }

    std::map<std::int32_t, std::int64_t> references;
    for (const auto& blocks : held) {
      for (const std::int32_t block : blocks) {
        ++references[block];
      }
    }
    ASSERT_FALSE(references.contains(0));
    ASSERT_EQ(pool.stats().used, std::ssize(references));
    ASSERT_EQ(pool.num_free(), pool.num_usable() - std::ssize(references));
    for (const auto& [block, count] : references) {
      ASSERT_EQ(pool.ref_count(block), count);
    }
  }
  EXPECT_LE(pool.stats().peak_used, pool.num_usable());
}

TEST(BlockPool, InvariantsHoldUnderRandomOperations) {
  random_operations(hash_block, 1);
  random_operations(hash_block, 2);
}

TEST(BlockPool, InvariantsHoldWhenHashesCollide) {
  random_operations(constant_hash, 3);
  random_operations(
      [](std::uint64_t parent, std::span<const std::int32_t> tokens) {
        return (parent + static_cast<std::uint64_t>(tokens[0])) % 4;
      },
      4);
}

}  // namespace
}  // namespace foveal::serving
