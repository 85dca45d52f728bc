#include "replay/synthetic.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "core/convert.h"

namespace foveal::replay {
namespace {

TraceRequest request(std::int64_t input_length, std::vector<std::uint64_t> hash_ids) {
  return {.line = 1,
          .arrival_s = 0.0,
          .input_length = input_length,
          .output_length = 1,
          .hash_ids = std::move(hash_ids)};
}

TEST(PromptTokens, EqualIdsAreEqualTokens) {
  const std::vector<std::int32_t> a = prompt_tokens(request(1200, {4, 9, 2}), 0);
  const std::vector<std::int32_t> b = prompt_tokens(request(1100, {4, 9, 7}), 1);
  ASSERT_EQ(a.size(), 1200);
  ASSERT_EQ(b.size(), 1100);
  EXPECT_TRUE(std::equal(a.begin(), a.begin() + 1024, b.begin()));
  for (std::size_t i = 1024; i < 1100; ++i) {
    EXPECT_NE(a[i], b[i]);
  }
  // Neither a block's tokens nor those of two blocks are alike.
  EXPECT_EQ(std::set<std::int32_t>(a.begin(), a.end()).size(), 1200);
  EXPECT_GE(*std::ranges::min_element(a), 0);
}

TEST(PromptTokens, WithoutIdsNoTwoPromptsAreAlike) {
  const std::vector<std::int32_t> a = prompt_tokens(request(1000, {}), 0);
  const std::vector<std::int32_t> b = prompt_tokens(request(1000, {}), 1);
  std::set<std::int32_t> all(a.begin(), a.end());
  all.insert(b.begin(), b.end());
  for (std::int64_t i = 0; i < 1000; ++i) {
    all.insert(generated_token(0, i));
    all.insert(generated_token(1, i));
  }
  EXPECT_EQ(all.size(), 4000);
  EXPECT_EQ(a, prompt_tokens(request(1000, {}), 0));
}

TEST(SyntheticRows, ARowIsItsToken) {
  using Role = SyntheticRows::Role;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const SyntheticRows rows(dtype, 96);
    std::vector<std::byte> bytes(64 * 4);
    for (const Role role : {Role::query, Role::key, Role::value}) {
      for (const std::int32_t token : {0, 1, 2147483647}) {
        rows.copy_row(role, token, 64, bytes.data());
        const std::span<const double> numbers = rows.numbers(role, token, 16, 48);
        for (std::int64_t i = 0; i < 48; ++i) {
          EXPECT_EQ(load_element(bytes.data(), dtype, 16 + i),
                    numbers[static_cast<std::size_t>(i)]);
        }
      }
    }
    const auto first = [&](Role role, std::int32_t token) {
      return rows.numbers(role, token, 0, 1)[0];
    };
    EXPECT_NE(first(Role::key, 1), first(Role::value, 1));
    EXPECT_NE(first(Role::key, 1), first(Role::key, 2));
  }
}

}  // namespace
}  // namespace foveal::replay
