#include "cpu/plan.h"

#include <gtest/gtest.h>

#include <limits>
#include <set>

namespace foveal::cpu {
namespace {

struct Lengths {
  std::vector<std::int32_t> query_start_loc;
  std::vector<std::int32_t> seq_lens;
};

PlanInput input_for(const Lengths& lengths, int num_threads = 4) {
  PlanInput input;
  input.query_start_loc = lengths.query_start_loc;
  input.seq_lens = lengths.seq_lens;
  input.num_threads = num_threads;
  return input;
}

TEST(Plan, VisibleKeys) {
  const RowMask causal{true, {}};
  EXPECT_EQ(causal.visible(10, 4).begin, 0);
  EXPECT_EQ(causal.visible(10, 4).end, 5);
  EXPECT_EQ(causal.visible(10, -1).tiles(), 0);
  const RowMask window{true, Window::of_tokens(3)};
  EXPECT_EQ(window.visible(10, 7).begin, 5);
  EXPECT_EQ(window.visible(10, 7).end, 8);
  EXPECT_EQ(window.visible(10, 0).begin, 0);
  const RowMask both{false, {2, 3}};
  EXPECT_EQ(both.visible(10, 8).begin, 6);
  EXPECT_EQ(both.visible(10, 8).end, 10);
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  const RowMask huge{false, {kMax, kMax}};
  EXPECT_EQ(huge.visible(10, -5).begin, 0);
  EXPECT_EQ(huge.visible(10, -5).end, 10);
}

TEST(Plan, TilesOfRowsSkipKeysNoRowSees) {
  const Lengths lengths{{0, 256}, {256}};
  PlanInput input = input_for(lengths, 1);
  input.mask.window = Window::of_tokens(64);
  const Plan plan = make_plan(input);
  ASSERT_EQ(plan.items.size(), 4U);
  for (const WorkItem& item : plan.items) {
    EXPECT_EQ(item.num_rows, 64);
    EXPECT_EQ(item.keys.begin, std::max<std::int64_t>(0, item.first_row - 63));
    EXPECT_EQ(item.keys.end, item.first_row + 64);
    EXPECT_EQ(item.partial_row, -1);
  }
}

TEST(Plan, GroupsArePackedIntoRows) {
  const Lengths lengths{{0, 1, 4}, {100, 100}};
  PlanInput input = input_for(lengths, 1);
  input.group_size = 71;
  const Plan plan = make_plan(input);
  std::int64_t rows = 0;
  for (const WorkItem& item : plan.items) {
    EXPECT_LE(item.num_rows, kBlockRows);
    rows += item.num_rows;
  }
  EXPECT_EQ(rows, 4 * 71);
  EXPECT_EQ(plan.items.size(), 2U + 4U);
}

TEST(Plan, LongestFirst) {
  const Lengths lengths{{0, 1, 2, 3}, {10, 5000, 300}};
  const Plan plan = make_plan(input_for(lengths, 1));
  ASSERT_EQ(plan.items.size(), 3U);
  std::vector<std::int64_t> requests;
  for (const Task& task : plan.tasks) {
    requests.push_back(plan.items[static_cast<std::size_t>(task.item)].request);
  }
  EXPECT_EQ(requests, (std::vector<std::int64_t>{1, 2, 0}));
}

TEST(Plan, HeadsOneAfterTheOther) {
  const Lengths lengths{{0, 200, 201}, {200, 100}};
  PlanInput input = input_for(lengths, 1);
  input.num_kv_heads = 2;
  const Plan plan = make_plan(input);
  ASSERT_EQ(plan.items.size(), 5U);
  std::vector<std::pair<std::int64_t, std::int64_t>> tasks;
  for (const Task& task : plan.tasks) {
    tasks.push_back({task.kv_head, plan.items[static_cast<std::size_t>(task.item)].first_row});
  }
  const std::vector<std::pair<std::int64_t, std::int64_t>> wanted{
      {0, 128}, {0, 64}, {0, 192}, {0, 0}, {1, 128}, {1, 64}, {1, 192}, {1, 0}, {0, 0}, {1, 0}};
  EXPECT_EQ(tasks, wanted);
}

TEST(Plan, ItemsGrowAsFarAsThreadsHaveSomeEach) {
  const Lengths lengths{{0, 2048}, {2048}};
  for (const auto& [threads, heads, rows] :
       {std::tuple{1, 32, 512}, {16, 32, 512}, {16, 8, 256}, {16, 1, 64}, {1, 1, 512}}) {
    PlanInput input = input_for(lengths, threads);
    input.num_kv_heads = heads;
    input.max_item_rows = 512;
    EXPECT_EQ(make_plan(input).max_rows, rows) << threads << " threads, " << heads << " heads";
  }
}

TEST(Plan, SplitsWhereTasksAreFewerThanThreads) {
  const Lengths lengths{{0, 1}, {64 * 100}};
  PlanInput input = input_for(lengths, 4);
  EXPECT_EQ(make_plan(input).items.size(), 4U);
  input.num_kv_heads = 4;
  EXPECT_EQ(make_plan(input).items.size(), 1U);
  EXPECT_TRUE(make_plan(input).merges.empty());
  input.num_kv_heads = 1;
  const Lengths short_one{{0, 1}, {200}};
  EXPECT_EQ(make_plan(input_for(short_one, 4)).items.size(), 1U);
}

TEST(Plan, SplitsComeFromVisibleKeysAndCoverThemOnce) {
  const Lengths lengths{{0, 1}, {100000}};
  for (const std::int64_t splits : {0, 2, 3, 7, 1000}) {
    for (const std::int64_t tokens : {0, 100, 1000}) {
      PlanInput input = input_for(lengths, 8);
      input.num_splits = splits;
      if (tokens > 0) {
        input.mask.window = Window::of_tokens(tokens);
      }
      Plan plan = make_plan(input);
      std::sort(plan.items.begin(), plan.items.end(),
                [](const auto& a, const auto& b) { return a.keys.begin < b.keys.begin; });
      std::int64_t next = tokens == 0 ? 0 : 100000 - tokens;
      const KeyRange all{next, 100000};
      for (const WorkItem& item : plan.items) {
        EXPECT_EQ(item.keys.begin, next);
        EXPECT_GT(item.keys.tiles(), 0);
        next = item.keys.end;
      }
      EXPECT_EQ(next, 100000);
      if (splits > 0) {
        EXPECT_EQ(std::ssize(plan.items), std::min(splits, all.tiles()));
      } else if (tokens == 100) {
        EXPECT_EQ(plan.items.size(), 1U);  // Three tiles are not worth it.
      }
      EXPECT_EQ(plan.partial_rows, plan.items.size() == 1 ? 0 : std::ssize(plan.items));
    }
  }
}

TEST(Plan, PartialsDoNotOverlap) {
  const Lengths lengths{{0, 0, 3, 40, 41}, {300, 700, 900, 257}};
  PlanInput input = input_for(lengths, 16);
  input.group_size = 6;
  input.common_prefix_len = 256;
  input.num_splits = 3;
  const Plan plan = make_plan(input);
  std::set<std::int64_t> used;
  for (const WorkItem& item : plan.items) {
    ASSERT_GE(item.partial_row, 0);
    EXPECT_TRUE(item.unmasked ? item.keys.end <= 256 && item.request == 1
                              : item.keys.begin >= 256 || item.keys.tiles() == 0);
    for (std::int64_t row = 0; row < item.num_rows; ++row) {
      EXPECT_TRUE(used.insert(item.partial_row + row).second);
      EXPECT_LT(item.partial_row + row, plan.partial_rows);
    }
  }
  EXPECT_EQ(std::ssize(used), plan.partial_rows);
  std::multiset<std::int64_t> merged;
  for (const MergeItem& merge : plan.merges) {
    for (std::int64_t p = 0; p < merge.num_parts; ++p) {
      for (std::int64_t row = 0; row < merge.num_rows; ++row) {
        merged.insert(plan.parts[static_cast<std::size_t>(merge.first_part + p)] + row);
      }
    }
  }
  EXPECT_EQ(merged, std::multiset<std::int64_t>(used.begin(), used.end()));
}

TEST(Plan, CascadePaysWhereItSavesLoads) {
  // The lengths of prefixes from which on a cascade was measured to be faster (docs/cpu.md): rows a
  // request, and one prefix on each side.
  constexpr std::int64_t kGroup = 4;
  for (const std::int64_t num_reqs : {8, 16, 64}) {
    for (const auto& [rows, slower, faster] :
         {std::tuple{4, 0, 256}, {64, 256, 512}, {128, 512, 1024}, {256, 2048, 4096}}) {
      CascadeInput input{.num_reqs = num_reqs,
                         .num_tokens = num_reqs * rows / kGroup,
                         .group_size = kGroup,
                         .head_size = 128,
                         .head_size_v = 128,
                         .max_item_rows = 512};
      input.common_prefix_len = slower;
      EXPECT_FALSE(cascade_pays(input)) << rows << " rows, " << num_reqs << " requests";
      input.common_prefix_len = faster;
      EXPECT_TRUE(cascade_pays(input)) << rows << " rows, " << num_reqs << " requests";
    }
  }
  // Requests that fill an item each have nothing to share.
  EXPECT_FALSE(cascade_pays({.common_prefix_len = 1 << 20,
                             .num_reqs = 8,
                             .num_tokens = 8 * 512,
                             .head_size = 128,
                             .head_size_v = 128,
                             .max_item_rows = 512}));
}

TEST(Plan, PrefixWithoutQueries) {
  const Lengths lengths{{0, 0}, {256}};
  PlanInput input = input_for(lengths);
  input.common_prefix_len = 256;
  EXPECT_TRUE(make_plan(input).items.empty());
}

}  // namespace
}  // namespace foveal::cpu
